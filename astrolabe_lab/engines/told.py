"""What a request tells its engine in ``vllm_xargs``: a client's own words, which must not end the engine."""

from __future__ import annotations

import numpy as np


def told(sampling_params, name: str, kind: str = "i8") -> int | None:
    """The whole number >= 0 that the request gives as ``name``, None where it gives none of numpy's ``kind``."""
    value = (getattr(sampling_params, "extra_args", None) or {}).get(name)
    return value if type(value) is int and 0 <= value <= np.iinfo(kind).max else None
