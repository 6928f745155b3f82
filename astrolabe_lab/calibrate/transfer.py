"""What it takes to hand a prompt's KV blocks from one pool to the other, as first tokens at the decode engine tell."""

from __future__ import annotations

import numpy as np

from astrolabe_lab.calibrate.artifact import Transfer
from astrolabe_lab.calibrate.fit import Fitted
from astrolabe_lab.calibrate.probe import Probe
from astrolabe_lab.errors import InputError

REPEATS = 7
BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def measure_transfer(prefill, decode, fitted: Fitted, left_s: float, rng) -> tuple[Transfer, list[dict]]:
    """(latency and seconds a block, a row for each hand-off), from hand-offs of 1..256 blocks in random order, while
    ``left_s`` seconds last.

    A first token after a hand-off takes the request's own way, the transfer, and one step on one token; what a prompt
    of a single token takes there without any hand-off is subtracted. Raises InputError where time is too short.
    """
    config = decode.describe().engine
    size = config.block_size
    most = min(config.usable_blocks - 2, (config.max_model_len - 2) // size)
    blocks = [n for n in BLOCKS if n <= most] or [1]
    for n in {blocks[0], blocks[-1]}:
        decode.handoff(n * size)  # the first transfer of a pair includes its handshake
    scale = decode.describe().time_scale
    begun = decode.now_s()
    seen: list[tuple[int, float]] = []
    for _ in range(REPEATS):
        for j in rng.permutation(len(blocks)):
            n = blocks[j]
            step_s = _last_token_s(fitted.cost, n * size)
            seen.append((n, decode.handoff(n * size) - step_s))
        if (decode.now_s() - begun) * scale > left_s * REPEATS / (REPEATS + 1):
            break
    singles = [answer.first_s - answer.sent_s for _ in range(REPEATS) for answer in decode.burst([Probe(1, 1)])]
    alone = max(0.0, float(np.median(singles)) - _last_token_s(fitted.cost, 1))
    n, seconds = map(np.array, zip(*seen, strict=True))
    if len(np.unique(n)) < 2:
        raise InputError("calibration: prompts of two sizes at least must fit, to time a transfer")
    (latency_s, block_s), (latency_around, block_around) = _line(n, seconds - alone, rng)
    rows = [{"blocks": int(m), "seconds": round(float(s), 6)} for m, s in zip(n, seconds - alone, strict=True)]
    return Transfer(latency_s, block_s, latency_around, block_around), rows


def _last_token_s(cost, prompt_tokens: int) -> float:
    """Seconds of the step that computes a prompt's last token, all others being there."""
    before = prompt_tokens - 1
    return cost.step_seconds(1, 1, before, before + 0.5, mixed=True)


def _line(n, seconds, rng):
    """Medians by size, then weighted least squares; intervals by resampling."""

    def line(at):
        sizes = np.unique(n[at])
        middle = np.array([np.median(seconds[at][n[at] == each]) for each in sizes])
        if len(sizes) < 2:
            return np.array([np.nan, np.nan])
        slope, base = np.polyfit(sizes, middle, 1)
        return np.array([max(base, 0.0), max(slope, 0.0)])

    best = line(np.arange(len(n)))
    draws = np.array([line(rng.integers(0, len(n), len(n))) for _ in range(300)])
    half = np.maximum(2.2 * np.nanstd(draws, axis=0), 0.002 * best)
    around = [(float(max(0.0, b - h)), float(b + h)) for b, h in zip(best, half, strict=True)]
    return best.tolist(), around
