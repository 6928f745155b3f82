"""How an encoder on the CPU serves: in which precision and on how many cores, by what is faster on this machine."""

from __future__ import annotations

import statistics
import time

from astrolabe_lab.errors import InputError

CHOICES = ("auto", "float32", "bfloat16")
GAIN = 0.8  # of float32's time: a smaller gain is not worth the digits
SPEED_UP = 0.7  # of one core's time: less is not worth a second core, which clients and routers need too
TRIES = 7


def prepare(estimator, precision: str = "auto", threads: int | None = None, max_batch: int = 1) -> dict:
    """Make ``estimator`` ready to answer, before anybody waits for it; ``{"precision", "threads"}`` as ``choose`` and
    ``choose_threads`` set them, {} where there is no encoder on the CPU.

    What is compiled and allocated on first use is so afterwards, for one prompt and for ``max_batch``.
    """
    chosen, cores = choose(estimator, precision), choose_threads(estimator, threads)
    for size in (1, max_batch):
        ask(estimator, size)
    return {"precision": chosen, "threads": cores} if chosen else {}


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


def choose_threads(estimator, threads: int | None = None) -> int:
    """Set on how many cores the encoder within ``estimator`` computes and return it; 0 where there is none on the CPU.

    None times a prompt on one core and on half of them, the median of seven each, and takes the half if that needs
    less than 0.7 of the time. All are never taken: routers and clients want cores too, and threads that wait for each
    other at every layer then take many times as long. Raises InputError for fewer than 1.
    """
    if threads is not None and threads < 1:
        raise InputError(f"threads={threads!r} should be 1 or more")
    encoder = encoder_of(estimator)
    if encoder is None or encoder.device.type != "cpu":
        return 0
    import torch

    if threads is None:
        taken_s = {}
        for threads in {1, half := max(1, torch.get_num_threads() // 2)}:
            torch.set_num_threads(threads)
            ask(estimator)
            taken_s[threads] = statistics.median(_timed(estimator) for _ in range(TRIES))
        threads = half if taken_s[half] < SPEED_UP * taken_s[1] else 1
    torch.set_num_threads(threads)
    return threads


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
