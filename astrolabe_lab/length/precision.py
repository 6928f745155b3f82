"""In what precision an encoder on the CPU serves: bfloat16 where that is faster, which depends on the processor."""

from __future__ import annotations

import time

from astrolabe_lab.errors import InputError

CHOICES = ("auto", "float32", "bfloat16")
GAIN = 0.8  # of float32's time: a smaller gain is not worth the digits
TRIES = 7


def choose(estimator, precision: str = "auto") -> str:
    """Set the precision of the encoder within ``estimator`` and return it; "" where there is none on the CPU.

    ``auto`` times a prompt in both, the best of seven each, and takes bfloat16 if it needs less than 0.8 of the time:
    with matrix units (AMX) it needs half, without them it can be slower. Predictions move by about a percent. Raises
    InputError for another precision.
    """
    if precision not in CHOICES:
        raise InputError(f"precision={precision!r} is unknown: allowed are {', '.join(CHOICES)}")
    encoder = encoder_of(estimator)
    if encoder is None or encoder.device.type != "cpu":
        return ""
    if precision == "auto":
        taken_s = {}
        for encoder.bfloat16 in (False, True):
            ask(estimator)
            taken_s[encoder.bfloat16] = min(_timed(estimator) for _ in range(TRIES))
        encoder.bfloat16 = taken_s[True] < GAIN * taken_s[False]
    else:
        encoder.bfloat16 = precision == "bfloat16"
    return "bfloat16" if encoder.bfloat16 else "float32"


def encoder_of(estimator):
    """The TextEncoder within ``estimator``, also one that is recalibrated or made noisy; None where there is none."""
    while hasattr(estimator, "model"):
        estimator = estimator.model
    return getattr(estimator, "_text", None)


def ask(estimator, prompts: int = 1) -> None:
    """Have the model predict for so many prompts of about 100 words."""
    estimator.predict_quantiles(["warm-up " * 100] * prompts, models=(estimator.models_ or [None])[0])


def _timed(estimator) -> float:
    began_s = time.perf_counter()
    ask(estimator)
    return time.perf_counter() - began_s
