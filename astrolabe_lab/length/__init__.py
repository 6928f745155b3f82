"""The query length tagger: models of how long an answer will be, and lengths attached when a request arrives.

model = length.make("prompt_ridge").fit(prompts, tokens)
model.predict_quantiles(["Why is the sky blue?"], (0.5, 0.9))
model.save("outputs/tagger"); length.load("outputs/tagger"); length.attach(trace, "tagger:outputs/tagger")
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.length.artifact import load
from astrolabe_lab.length.kinds import KINDS, make
from astrolabe_lab.rng import stream
from astrolabe_lab.trace import check
from astrolabe_lab.trace.columns import MAX_TOKENS

if TYPE_CHECKING:
    import pandas as pd

SPECS = "trace, oracle, constant:N, noisy:REL, tagger:DIR"


def attach(frame: pd.DataFrame, spec: str, seed: int = 0) -> pd.DataFrame:
    """Return a new frame with ``predicted_tokens`` (int64, >= 1), what a router is told at arrival.

    spec: ``trace`` keeps the frame's own predictions; ``oracle`` tells the true length; ``constant:N`` tells
        N to all; ``tagger:DIR`` tells what the length model saved in DIR predicts (its median, rounded) from
        the column ``prompt``, and ``model`` if it tells serving models apart; ``noisy:REL`` tells
        max(1, round(output_tokens * (1 + REL * z))) with z standard normal and REL the relative error (0.25
        is 25 %).

    One seed draws the same z for every REL, from the stream ``lengths``, so noise levels are paired. With REL
    near 1 the floor at 1 token cuts the lower side (16 % of requests at REL = 1) and raises the mean.
    Raises InputError for another spec, a number that is not allowed, ``trace`` without predictions, ``tagger``
    without prompts or with a folder that holds no sound model, or a frame that breaks the contract (it
    may lack ``arrived_s``).
    Source: both papers inject relative Gaussian error.
    """
    import numpy as np

    kind, colon, value = str(spec).partition(":")
    valued = ("constant", "noisy", "tagger")
    if kind not in ("trace", "oracle", *valued) or bool(colon) != (kind in valued) or (colon and not value):
        raise InputError(f"lengths {spec!r} is unknown: allowed are {SPECS}")
    frame = check(frame, times=False)
    if kind == "trace":
        if "predicted_tokens" not in frame:
            raise InputError(
                "lengths 'trace' needs a column predicted_tokens, which this trace lacks; use oracle, "
                "constant:N, noisy:REL or tagger:DIR"
            )
        predicted = frame["predicted_tokens"].to_numpy()
    elif kind == "constant":
        if not (value.isascii() and value.isdigit()) or not 1 <= int(value) <= MAX_TOKENS:
            raise InputError(f"lengths {spec!r}: N is an integer from 1 to {MAX_TOKENS:,}, e.g. constant:256")
        predicted = np.full(len(frame), int(value))
    elif kind == "tagger":
        predicted = np.clip(np.rint(_tagged(frame, spec, value)), 1, MAX_TOKENS)
    else:
        predicted = frame["output_tokens"].to_numpy(dtype=np.float64)
        if kind == "noisy":
            relative = _relative_error(spec, value)
            z = stream(seed, "lengths").standard_normal(len(frame))
            with np.errstate(over="ignore"):
                predicted = np.clip(np.rint(predicted * (1.0 + relative * z)), 1, MAX_TOKENS)
    return frame.assign(predicted_tokens=predicted.astype(np.int64))


def _tagged(frame, spec, directory):
    if "prompt" not in frame:
        raise InputError(
            f"lengths {spec!r} needs a column prompt, which this trace lacks (it has {', '.join(frame)}); use a trace "
            "with texts, or oracle, constant:N or noisy:REL"
        )
    model = load(directory)
    names = frame["model"].tolist() if "model" in frame and model.models_ else None
    return model.predict(frame["prompt"].tolist(), names)


def _relative_error(spec: str, value: str) -> float:
    try:
        relative = float(value)
    except ValueError:
        relative = math.nan
    if not (math.isfinite(relative) and relative >= 0):
        raise InputError(f"lengths {spec!r}: REL is a finite number >= 0, for example noisy:0.25")
    return relative


__all__ = ["KINDS", "SPECS", "attach", "load", "make"]
