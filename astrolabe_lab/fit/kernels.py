"""Fits of published kernel timings: one layer's matrix products, attention and all-reduce, by what they do.

Timings are Vidur's (per operation, in ms) or LLMServingSim's (per layer, in us).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from astrolabe_lab.cost.shapes import FP16_BYTES
from astrolabe_lab.errors import InputError
from astrolabe_lab.fit.regression import Fit, hats, relative_least_squares

ONE_NODE = "devices_per_node"


@dataclass(frozen=True, slots=True)
class LinearParts:
    """All layers but attention, of `tokens` new ones: linear between `knots` (k,), `seconds` (k,) at them."""

    knots: tuple[float, ...]
    seconds: tuple[float, ...]
    fit: Fit

    @property
    def base_s(self):
        """Seconds of zero tokens, on the line through the first two knots."""
        return self.seconds[0] - self.knots[0] * self.per_token_s

    @property
    def per_token_s(self):
        """Seconds a token between the first two knots."""
        return (self.seconds[1] - self.seconds[0]) / (self.knots[1] - self.knots[0])


def fit_linear_parts(timings, knots, model, device, tensor_parallel=1):
    """The LinearParts of a Vidur MLP profile, fitted over its timings from the first knot to the last.

    timings: num_tokens, num_tensor_parallel_workers, time_stats.OPERATION.median in ms; the rows of
    `tensor_parallel` GPUs are used. Two knots are a straight line. Each operation is fitted alone and the fits are
    added up, so a missing point costs only its own operation. A matrix product faster than reading its weights
    once, or than its arithmetic at the device's peak, is a failed measurement and is dropped.

    Raises InputError when columns are missing or too few timings lie in the range.
    """
    stats = [name.split(".")[1] for name in timings.columns if name.endswith(".median")]
    need = {"num_tokens", "num_tensor_parallel_workers", *model.weights}
    if missing := sorted(need - set(timings.columns) - set(stats)):
        raise InputError(f"layer timings lack {', '.join(missing)}; give the columns of Vidur's mlp.csv")
    of_degree = timings.num_tensor_parallel_workers == tensor_parallel
    rows = timings[of_degree & timings.num_tokens.between(knots[0], knots[-1])]
    new_tokens = rows.num_tokens.to_numpy(float)
    total, fitted, measured, dropped = np.zeros(len(knots)), 0.0, 0.0, 0
    for operation in stats:
        seconds = rows[f"time_stats.{operation}.median"].to_numpy(float) / 1e3
        weights = model.weights.get(operation, 0) / tensor_parallel
        read, computed = weights * FP16_BYTES / device.bytes_s, 2 * weights * new_tokens / device.flops_s
        possible = seconds > np.maximum(read, computed)
        times = 1 if operation == "emb" else model.layers
        shape = hats(new_tokens, knots)
        if (empty := ~shape[possible].any(axis=0)).any():
            at = knots[int(np.argmax(empty))]
            raise InputError(f"no usable timing of {operation} lies next to {at:g} tokens; choose other knots")
        values = relative_least_squares(list(shape[possible].T), seconds[possible]).coefficients
        total += times * np.array(values)
        fitted += times * np.where(possible, shape @ values, 0)
        measured += times * np.where(possible, seconds, 0)
        dropped += int((~possible).sum())
    residual = 100 * np.abs(fitted / measured - 1)
    fit = Fit(tuple(map(float, total)), float(residual.mean()), float(residual.max()), len(rows), dropped)
    return LinearParts(tuple(map(float, knots)), fit.coefficients, fit)


def fit_decode_attention(sequences, context, seconds, kv_bytes, bytes_s, per_seq_s=None):
    """One layer's decode attention as launch + per_seq * sequences + slowness * KV read time at the peak.

    sequences, context (tokens of each sequence), seconds and bytes_s (each timing's device peak) are (n,);
    kv_bytes is Model.kv_bytes. `per_seq_s` fixes what a sequence costs, where the timings cannot tell. Coefficients:
    seconds per launch, seconds per sequence, and slowness (1 / share of the peak reached).
    """
    sequences = np.asarray(sequences, float)
    ideal = sequences * np.asarray(context, float) * kv_bytes / np.asarray(bytes_s, float)
    if per_seq_s is None:
        return relative_least_squares([np.ones(len(ideal)), sequences, ideal], seconds, non_negative=True)
    fit = relative_least_squares([np.ones(len(ideal)), ideal], seconds, per_seq_s * sequences, non_negative=True)
    launch, slowness = fit.coefficients
    return Fit((launch, per_seq_s, slowness), fit.error_pct, fit.worst_pct, fit.points)


def fit_prefill_attention(chunk, context, seconds, pair_flops, per_kv_token_s=0.0):
    """One layer's attention of one prefill chunk as launch + per_token * chunk + operations / speed.

    chunk, context and seconds are (n,); pair_flops is Model.pair_flops. per_kv_token_s is what a step cost
    charges for a token of context anyway. Coefficients: seconds per launch, token of the chunk and
    operation.
    """
    chunk, context = np.asarray(chunk, float), np.asarray(context, float)
    operations = pair_flops * (chunk * context + chunk**2 / 2)
    return relative_least_squares(
        [np.ones(len(chunk)), chunk, operations], seconds, per_kv_token_s * context, non_negative=True
    )


def fit_all_reduce(timings, workers, hidden, tokens):
    """One all-reduce of `hidden` FP16 values a token over so many GPUs of one node, as launch + per_token * tokens.

    timings: Vidur's all_reduce.csv (num_workers, devices_per_node, size in bytes, time_stats.all_reduce.median in
    ms), up to `tokens` tokens. Raises InputError where it holds none of these.
    """
    rows = timings[(timings.num_workers == workers) & (timings[ONE_NODE] == workers)]
    count = rows["size"].to_numpy(float) / (hidden * FP16_BYTES)
    inside = count <= tokens
    seconds = rows["time_stats.all_reduce.median"].to_numpy(float)[inside] / 1e3
    return relative_least_squares([np.ones(inside.sum()), count[inside]], seconds, non_negative=True)


def spread_of_timings(values, timings):
    """Mean absolute difference, in percent, of seconds (n,) to timings (n,)."""
    return float(100 * np.abs(np.asarray(values) / np.asarray(timings) - 1).mean())
