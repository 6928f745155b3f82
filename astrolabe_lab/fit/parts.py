"""A step cost put together from its parts: matrix products, attention, output head, all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

from astrolabe_lab.cost import Grid, Regime, StepCost
from astrolabe_lab.cost.shapes import FP16_BYTES
from astrolabe_lab.fit.kernels import LinearParts
from astrolabe_lab.fit.regression import Fit

# GEMM kernels take 64 or 128 rows at a time: the times of matrix products jump past these counts of tokens.
DECODE_KNEES = (1, 64, 72, 128, 136, 256)
KNEES = (1, 64, 72, 128, 136, 560, 2048, 4096)
ALL_REDUCES = 2  # a layer: after attention and after the MLP


@dataclass(frozen=True)
class Parts:
    """Seconds of one model on one device; attention is of one layer.

    decode and mixed are the LinearParts of the two regimes; decode's may be a straight line (two knots).
    `decode_attention` has the coefficients launch, sequence, slowness; `per_kv_s` is what a token of context costs.
    `prefill_attention` has launch, token and operation. `kv_save_s` writes a layer's new keys. Decode attention was
    timed up to `context_tokens` in all. `all_reduce` has launch and token, or is None.
    """

    decode: LinearParts
    mixed: LinearParts
    decode_attention: Fit
    per_kv_s: float
    prefill_attention: Fit
    kv_save_s: float
    context_tokens: int
    all_reduce: Fit | None = None


def share_of_peak(model, device, line, tensor_parallel=1):
    """The share of the device's memory rate at which the layers' weights are read: bytes over a line's base."""
    read = FP16_BYTES * model.layers * sum(model.weights.values()) / tensor_parallel
    return read / device.bytes_s / line.base_s


def step_cost(model, device, parts, tensor_parallel=1, host_s=0.0):
    """The StepCost of the parts. Prefill and decode attention of a mixed step run one after the other."""
    share = share_of_peak(model, device, parts.decode, tensor_parallel)
    head = FP16_BYTES * model.head_weights / tensor_parallel / (device.bytes_s * share)
    launch, per_seq, _ = parts.decode_attention.coefficients
    prefill_launch, per_chunk_token, per_flop = parts.prefill_attention.coefficients
    reduce_launch, reduce_token = parts.all_reduce.coefficients if parts.all_reduce else (0.0, 0.0)
    beside = head + model.layers * (launch + parts.kv_save_s + ALL_REDUCES * reduce_launch)
    reduced = model.layers * ALL_REDUCES * reduce_token
    shared = {"per_seq_s": model.layers * per_seq, "per_kv_token_s": model.layers * parts.per_kv_s, "host_s": host_s}
    decode = {"base_s": beside, "per_token_s": reduced}
    if line := len(parts.decode.knots) == 2:
        decode = {"base_s": parts.decode.base_s + beside, "per_token_s": parts.decode.per_token_s + reduced}
    mixed = {
        "base_s": beside + model.layers * prefill_launch,
        "per_token_s": model.layers * per_chunk_token + reduced,
        "attention_s": model.layers * model.pair_flops / tensor_parallel * per_flop,
    }
    fitted = {
        "decode": {"new_tokens": (parts.decode.knots[0], parts.decode.knots[-1])},
        "mixed": {"new_tokens": (parts.mixed.knots[0], parts.mixed.knots[-1])},
    }
    fitted["decode"]["sequences"] = fitted["decode"]["new_tokens"]
    for ranges in fitted.values():
        ranges["context_tokens"] = (0, parts.context_tokens)
    return StepCost(
        rounded(**decode, **shared), rounded(**mixed, **shared),
        decode_grid=None if line else _grid(parts.decode), mixed_grid=_grid(parts.mixed), fitted=fitted,
    )  # fmt: skip


def _grid(linear):
    return Grid(linear.knots, (0.0,), tuple((short(seconds),) for seconds in linear.seconds))


def rounded(**coefficients):
    """A Regime of the coefficients to eight digits."""
    return Regime(**{key: short(value) for key, value in coefficients.items()})


def short(value):
    """The number to eight digits."""
    return float(f"{value:.8g}")
