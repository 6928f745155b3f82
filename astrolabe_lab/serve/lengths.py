"""Where a running router gets the predicted length of a request from."""

from __future__ import annotations

from astrolabe_lab.errors import InputError
from astrolabe_lab.serve.openai_api import Asked


def lengths_of(spec: str):
    """``async (Asked) -> (predicted_tokens, source)`` for ``constant:N``.

    What the client says (``x-predicted-tokens``) goes first, as it stands; another prediction is at most the request's
    ``max_tokens``.
    Raises InputError for another spec.
    """
    kind, _, value = spec.partition(":")
    if kind != "constant" or not (value.isascii() and value.isdigit() and 1 <= int(value[:12]) < 2**31):
        raise InputError(f"lengths {spec!r}: a router takes constant:N, for example constant:256")
    constant = int(value)

    async def predict(asked: Asked) -> tuple[int, str]:
        if asked.predicted_tokens is not None:
            return asked.predicted_tokens, "client"
        if asked.max_tokens is not None and 1 <= asked.max_tokens < constant:
            return asked.max_tokens, "max_tokens"
        return constant, "constant"

    return predict
