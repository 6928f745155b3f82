"""Predicted output lengths, attached once, when a request arrives."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.rng import stream
from astrolabe_lab.trace import check
from astrolabe_lab.trace_columns import MAX_TOKENS

if TYPE_CHECKING:
    import pandas as pd

SPECS = "trace, oracle, constant:N, noisy:REL"


def attach(frame: pd.DataFrame, spec: str, seed: int = 0) -> pd.DataFrame:
    """Return a new frame with ``predicted_tokens`` (int64, >= 1), what a router is told at arrival.

    spec: ``trace`` keeps the frame's own predictions; ``oracle`` tells the true length; ``constant:N`` tells
        N to all; ``noisy:REL`` tells max(1, round(output_tokens * (1 + REL * z))) with z standard normal and
        REL the relative error (0.25 is 25 %).

    One seed draws the same z for every REL, from the stream ``lengths``, so noise levels are paired. With REL
    near 1 the floor at 1 token cuts the lower side (16 % of requests at REL = 1) and raises the mean.
    Raises InputError for another spec, a number that is not allowed, ``trace`` without predictions, or a
    frame that breaks the contract (it may lack ``arrived_s``).
    Source: both papers inject relative Gaussian error.
    """
    import numpy as np

    kind, colon, value = str(spec).partition(":")
    if kind == "tagger":
        raise InputError(
            f"lengths {spec!r}: the length tagger comes with the Length part; until then use one of {SPECS}"
        )
    if kind not in ("trace", "oracle", "constant", "noisy") or bool(colon) != (kind in ("constant", "noisy")):
        raise InputError(f"lengths {spec!r} is unknown: allowed are {SPECS}")
    frame = check(frame, times=False)
    if kind == "trace":
        if "predicted_tokens" not in frame:
            raise InputError(
                "lengths 'trace' needs a column predicted_tokens, which this trace lacks; use oracle, "
                "constant:N or noisy:REL"
            )
        predicted = frame["predicted_tokens"].to_numpy()
    elif kind == "constant":
        if not (value.isascii() and value.isdigit()) or not 1 <= int(value) <= MAX_TOKENS:
            raise InputError(f"lengths {spec!r}: N is an integer from 1 to {MAX_TOKENS:,}, e.g. constant:256")
        predicted = np.full(len(frame), int(value))
    else:
        predicted = frame["output_tokens"].to_numpy(dtype=np.float64)
        if kind == "noisy":
            relative = _relative_error(spec, value)
            z = stream(seed, "lengths").standard_normal(len(frame))
            with np.errstate(over="ignore"):
                predicted = np.clip(np.rint(predicted * (1.0 + relative * z)), 1, MAX_TOKENS)
    return frame.assign(predicted_tokens=predicted.astype(np.int64))


def _relative_error(spec: str, value: str) -> float:
    try:
        relative = float(value)
    except ValueError:
        relative = math.nan
    if not (math.isfinite(relative) and relative >= 0):
        raise InputError(f"lengths {spec!r}: REL is a finite number >= 0, for example noisy:0.25")
    return relative
