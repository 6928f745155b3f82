"""Where a running router gets the predicted length of a request from."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from astrolabe_lab.errors import InputError
from astrolabe_lab.length.precision import prepare
from astrolabe_lab.length.remote import RemoteTagger
from astrolabe_lab.length.tagging import Tag, Tagger
from astrolabe_lab.urls import url_of

from .openai_api import Asked

SPECS = "constant:N, or tagger:DIR or tagger:URL with ,constant=N and ,deadline_ms=X"
DEADLINE_MS = 50.0
MAX_BATCH = 32  # prompts at once, of a model in this process


@dataclass
class Lengths:
    """``await lengths(asked)`` is (predicted_tokens, where it came from).

    What the client says (``x-predicted-tokens``) goes first, then ``tag(prompt, model)``, without one ``constant``; no
    prediction is longer than the request's ``max_tokens``. ``end()`` ends what is behind ``tag``. ``knows``: the
    serving models that the length model tells apart; others get the constant.
    """

    constant: int
    tag: Callable[[str, str], Awaitable[Tag]] | None = None
    end: Callable[[], Awaitable[None]] | None = None
    knows: tuple[str, ...] = ()

    async def __call__(self, asked: Asked) -> tuple[int, str]:
        predicted, source = self.constant, "constant"
        if asked.predicted_tokens:
            predicted, source = asked.predicted_tokens, "client"
        elif self.tag is not None and asked.prompt_ids is None:
            tag = await self.tag(asked.text, asked.model)
            predicted, source = tag.predicted_tokens, f"constant: {tag.reason}" if tag.reason else "tagger"
        elif self.tag is not None:
            source = "constant: token ids"  # a length model reads text
        if asked.max_tokens is not None and 1 <= asked.max_tokens < predicted:
            predicted = asked.max_tokens
        return predicted, source

    def check_models(self, models: list[str]) -> None:
        """Raise InputError where the length model knows none of the models that a router answers for."""
        if self.knows and not set(self.knows) & set(models):
            raise InputError(
                f"the length model knows the serving models {', '.join(self.knows)}, and the router answers for "
                f"{', '.join(models)}: every request would get the constant. Name the model as it does, or train "
                "one on answers of this model"
            )

    async def close(self) -> None:
        """End what is behind it."""
        if self.end is not None:
            await self.end()


def lengths_of(spec: str) -> Lengths:
    """The Lengths that ``constant:N`` or ``tagger:WHERE[,constant=N][,deadline_ms=X]`` describes.

    WHERE is the folder of a length model, to run in this process, or the URL of ``astrolabe tag``. The constant
    stands in for an answer that is late, missing or wrong: the median the model was trained on, or 256 for a URL,
    unless said otherwise. Raises InputError for another spec, or a folder without a sound model.
    """
    kind, _, value = spec.partition(":")
    where, *options = value.split(",")
    if kind == "constant" and not options:
        return Lengths(_whole(spec, where))
    if kind != "tagger" or not where:
        raise InputError(f"lengths {spec!r} is unknown to a router: it takes {SPECS}")
    told = dict.fromkeys(("constant", "deadline_ms"))
    for option in options:
        name, _, text = option.partition("=")
        if name not in told:
            raise InputError(f"lengths {spec!r}: {option!r} is unknown; a tagger takes constant=N and deadline_ms=X")
        told[name] = text
    constant = None if told["constant"] is None else _whole(spec, told["constant"])
    try:
        deadline_s = float(DEADLINE_MS if told["deadline_ms"] is None else told["deadline_ms"]) / 1e3
    except ValueError:
        deadline_s = math.nan
    if not 0 < deadline_s <= 60:
        raise InputError(f"lengths {spec!r}: deadline_ms should be a number of milliseconds above 0, at most 60000")
    if where.startswith(("http://", "https://")):
        remote = RemoteTagger(url_of(where, "lengths tagger"), deadline_s, constant or 256)
        return Lengths(remote.fallback, remote.tag, remote.close)
    return _in_process(where, deadline_s, constant)


def _in_process(directory: str, deadline_s: float, constant: int | None) -> Lengths:
    import asyncio

    from astrolabe_lab import length

    estimator = length.load(directory)
    prepare(estimator, max_batch=MAX_BATCH)
    if constant is None:
        constant = max(1, round(estimator.median_tokens_))
    tagger = Tagger(estimator, deadline_s, constant, max_batch=MAX_BATCH)
    knows = set(estimator.models_)

    async def tag(prompt: str, model: str) -> Tag:
        if knows and model not in knows:
            return Tag(constant, "constant", "refused")
        return await tagger.tag_async(prompt, model)

    async def end() -> None:
        await asyncio.to_thread(tagger.close)

    return Lengths(constant, tag, end, tuple(estimator.models_))


def _whole(spec: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) < 2**31):
        raise InputError(f"lengths {spec!r}: a constant is a whole number of tokens >= 1, for example constant:256")
    return int(text)
