"""A calibration beside the truth, which only a simulated or an emulated engine has."""

from __future__ import annotations

import pandas as pd

from astrolabe_lab.calibrate.artifact import Calibration
from astrolabe_lab.cost import StepCost
from astrolabe_lab.sim.config import EngineConfig


def constants(calibration: Calibration, truth: StepCost) -> pd.DataFrame:
    """A row for each coefficient with an interval: coefficient, true, found, low, high (s), covered.

    Decode steps do not tell a token from a sequence: what `truth` charges for either is compared as one, per_seq_s.
    Coefficients of a regime that bends have no row, as the table stands in for them.
    """
    rows = []
    for name, (low, high) in calibration.intervals.items():
        regime, dot, key = name.partition(".")
        if not dot:
            continue
        true, found = (getattr(getattr(cost, regime), key) for cost in (truth, calibration.cost))
        if name == "decode.per_seq_s":
            true += truth.decode.per_token_s
        elif key == "base_s":
            true += getattr(truth, regime).host_s
        rows.append((name, true, found, low, high, low <= true <= high))
    return pd.DataFrame(rows, columns=["coefficient", "true", "found", "low", "high", "covered"])


def in_short(calibration: Calibration, truth: StepCost) -> dict:
    """What a router prices decoding with: decode_step_off_pct, slope_ms and half its interval (half_width_ms), and
    first_token_overhead_ms, rounds."""
    low, high = calibration.intervals["decode_slope_s"]
    true_s = truth.step_seconds(1, 1, calibration.reference_tokens)
    return {
        "decode_step_off_pct": 100 * (calibration.decode_s / true_s - 1), "slope_ms": 1e3 * calibration.decode_slope_s,
        "half_width_ms": 500 * (high - low), "first_token_overhead_ms": 1e3 * calibration.overhead_s,
        "rounds": calibration.rounds,
    }  # fmt: skip


def over_the_grid(found: StepCost, truth: StepCost, config: EngineConfig) -> pd.DataFrame:
    """A row for each of many steps that the engine can schedule: mixed, new_tokens, sequences, context_tokens, true_s,
    found_s, error_pct. Batches from 1 to all seats, contexts from short to all that fits, prompts from 1 to a chunk."""
    room = config.usable_blocks * config.block_size
    steps = [
        (False, n, n, n * context, 0.0)
        for n in range(1, config.max_num_seqs + 1)
        for context in (1, 16, 64, 128, 256, 512, 1024, 2048)
        if n * context <= room and context < config.max_model_len
    ]
    for new in sorted({1, *range(4, config.max_num_batched_tokens + 1, 4)}):
        for n in (1, 2, 4, 8, 16, config.max_num_seqs):
            chunk = new - n + 1
            if chunk >= 1 and n <= config.max_num_seqs:
                steps.append((True, new, n, 64 * n, chunk * chunk / 2))
    rows = []
    for mixed, new, n, context, attention in steps:
        true_s, found_s = (cost.step_seconds(new, n, context, attention, mixed) for cost in (truth, found))
        rows.append((mixed, new, n, context, true_s, found_s, 100 * (found_s / true_s - 1)))
    names = ["mixed", "new_tokens", "sequences", "context_tokens", "true_s", "found_s", "error_pct"]
    return pd.DataFrame(rows, columns=names)
