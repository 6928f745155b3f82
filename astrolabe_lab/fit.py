"""From published kernel timings to a step cost: the derivation of each preset, as code that can be run again.

Timings are per operation (kernel) and layer; a step cost is linear. Every fit is a relative least squares (a
10 % miss weighs the same at 20 ms and at 80 ms) and reports its mean absolute residual with the range it
holds on. `python -m astrolabe_lab.fit DATA_DIR` refits the presets from the data folder and prints them as
JSON.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from astrolabe_lab.cost import Preset, Regime, StepCost
from astrolabe_lab.errors import InputError

FP16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a dense Llama-like decoder."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int

    @property
    def weights(self):
        """Weights of one layer's four matrix products, by the name of the timing."""
        query, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        return {
            "attn_pre_proj": self.hidden * (query + 2 * kv),
            "attn_post_proj": query * self.hidden,
            "mlp_up_proj": 2 * self.hidden * self.ffn,
            "mlp_down_proj": self.ffn * self.hidden,
        }

    @property
    def kv_bytes(self):
        """Bytes of keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_size * FP16_BYTES

    @property
    def pair_flops(self):
        """Floating-point operations of one (query, key) pair in one layer: the score and the weighted sum."""
        return 4 * self.heads * self.head_size


@dataclass(frozen=True, slots=True)
class Device:
    """Datasheet peaks of a GPU: memory bytes per second and dense FP16 operations per second."""

    bytes_s: float
    flops_s: float


LLAMA2_7B = Model(layers=32, hidden=4096, ffn=11008, heads=32, kv_heads=32, head_size=128, vocabulary=32000)
QWEN2_7B = Model(layers=28, hidden=3584, ffn=18944, heads=28, kv_heads=4, head_size=128, vocabulary=152064)
A30 = Device(bytes_s=933e9, flops_s=165e12)
PEAK_BYTES_S = {"a100": 2039e9, "a40": 696e9}


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients of a fit (seconds per unit of each regressor, in order) and how well it holds.

    error_pct and worst_pct are the mean and largest absolute residual in percent of the timing, over `points`
    timings; `dropped` more were missing or not physically possible.
    """

    coefficients: tuple[float, ...]
    error_pct: float
    worst_pct: float
    points: int
    dropped: int = 0

    def quality(self, over):
        """The entry of a preset's `error` for this fit; `over` says on what it was made."""
        return {
            "over": over,
            "mean_abs_pct": round(self.error_pct, 2),
            "worst_pct": round(self.worst_pct, 1),
            "points": self.points,
            "dropped": self.dropped,
        }


def relative_least_squares(regressors, seconds, known=0.0):
    """The Fit of least squared relative residuals of `seconds` (n,) on a list of regressors (n,).

    `known` (n,) is a part of the seconds whose cost is fixed already. Raises InputError for too few timings.
    """
    seconds = np.asarray(seconds, float)
    design = np.column_stack([np.asarray(r, float) for r in regressors])
    if len(seconds) <= design.shape[1]:
        raise InputError(f"{len(seconds)} timings cannot fit {design.shape[1]} coefficients; widen the range")
    target = 1 - np.asarray(known, float) / seconds
    design /= seconds[:, None]
    coefficients = np.linalg.lstsq(design, target, rcond=None)[0]
    residual = 100 * np.abs(design @ coefficients - target)
    return Fit(tuple(map(float, coefficients)), float(residual.mean()), float(residual.max()), len(seconds))


def fit_linear_parts(timings, tokens, model=LLAMA2_7B, device=A30):
    """All layers but attention as base_s + per_token_s * new_tokens, fitted over tokens = (lowest, highest).

    timings: Vidur's MLP profile (num_tokens, num_tensor_parallel_workers, time_stats.OPERATION.median in
    ms); its rows without tensor parallelism are used. Each operation is fitted alone and the fits are added
    up, so a missing point costs only its own operation. A matrix product faster than reading its weights
    once, or than its arithmetic at the device's peak, is a failed measurement and is dropped.

    Raises InputError when columns are missing or too few timings lie in the range.
    """
    stats = [name.split(".")[1] for name in timings.columns if name.endswith(".median")]
    need = {"num_tokens", "num_tensor_parallel_workers", *model.weights}
    if missing := sorted(need - set(timings.columns) - set(stats)):
        raise InputError(f"layer timings lack {', '.join(missing)}; give the columns of Vidur's mlp.csv")
    lowest, highest = tokens
    rows = timings[(timings.num_tensor_parallel_workers == 1) & timings.num_tokens.between(lowest, highest)]
    new_tokens = rows.num_tokens.to_numpy(float)
    total, fitted, measured, dropped = np.zeros(2), 0.0, 0.0, 0
    for operation in stats:
        seconds = rows[f"time_stats.{operation}.median"].to_numpy(float) / 1e3
        weights = model.weights.get(operation, 0)
        read, computed = weights * FP16_BYTES / device.bytes_s, 2 * weights * new_tokens / device.flops_s
        possible = seconds > np.maximum(read, computed)
        times = 1 if operation == "emb" else model.layers
        ones = np.ones(possible.sum())
        base, per_token = relative_least_squares([ones, new_tokens[possible]], seconds[possible]).coefficients
        total += times * np.array([base, per_token])
        fitted += times * np.where(possible, base + per_token * new_tokens, 0)
        measured += times * np.where(possible, seconds, 0)
        dropped += int((~possible).sum())
    residual = 100 * np.abs(fitted / measured - 1)
    return Fit(tuple(map(float, total)), float(residual.mean()), float(residual.max()), len(rows), dropped)


def fit_decode_attention(sequences, context, seconds, kv_bytes, bytes_s):
    """One layer's decode attention as launch + per_seq * sequences + slowness * KV read time at the peak.

    sequences, context (tokens of each sequence), seconds and bytes_s (each timing's device peak) are (n,);
    kv_bytes is Model.kv_bytes. Coefficients: seconds per launch, seconds per sequence, and slowness (1 /
    share of the peak reached).
    """
    ideal = np.asarray(sequences, float) * np.asarray(context, float) * kv_bytes / np.asarray(bytes_s, float)
    return relative_least_squares([np.ones(len(ideal)), sequences, ideal], seconds)


def fit_prefill_attention(chunk, context, seconds, pair_flops, per_kv_token_s=0.0):
    """One layer's attention of one prefill chunk as launch + per_token * chunk + operations / speed.

    chunk, context and seconds are (n,); pair_flops is Model.pair_flops. per_kv_token_s is what a step cost
    charges for a token of context anyway. Coefficients: seconds per launch, token of the chunk and
    operation.
    """
    chunk, context = np.asarray(chunk, float), np.asarray(context, float)
    operations = pair_flops * (chunk * context + chunk**2 / 2)
    return relative_least_squares([np.ones(len(chunk)), chunk, operations], seconds, per_kv_token_s * context)


def fit_mixed_attention(timings, decodes=64, context=2048, chunk=512):
    """(decode-only Fit, mixed Fit) of one layer's attention; coefficients[2] of both is per context token.

    timings: LLMServingSim's attention profile (prefill_chunk, kv_prefill, n_decode, kv_decode, time_us), cut
    to at most `decodes` decoding sequences, `context` tokens of context each and `chunk` prompt tokens.
    """
    rows = timings[
        timings.n_decode.between(1, decodes)
        & (timings.kv_decode <= context)
        & (timings.kv_prefill <= context)
        & (timings.prefill_chunk <= chunk)
    ].astype(float)
    a, m = rows[rows.prefill_chunk == 0], rows[rows.prefill_chunk > 0]
    alone = relative_least_squares([np.ones(len(a)), a.n_decode, a.n_decode * a.kv_decode], a.time_us / 1e6)
    pairs = m.prefill_chunk * m.kv_prefill + m.prefill_chunk**2 / 2
    read = m.n_decode * m.kv_decode + m.kv_prefill
    return alone, relative_least_squares(
        [np.ones(len(m)), m.n_decode, read, m.prefill_chunk, pairs], m.time_us / 1e6
    )


def llama2_7b_a30(data):
    """The preset llama2-7b-a30, fitted from the public timings under the folder `data` (a Path).

    Llama-2-7B's own attention timings on the A30 are not public in a usable form. Its decode attention comes
    from its timings on A100 and A40 (bytes counted at each device's peak), its prefill attention from
    Qwen2-7B on the A30 (counted in operations), and what mixing costs from Llama-3.1-8B on an RTX PRO 6000.
    """
    model, device, qwen = LLAMA2_7B, A30, QWEN2_7B
    mlp = pd.read_csv(data / "astrolabe/profiling__compute__a30__meta-llama__Llama-2-7b-hf__mlp.csv.gz")
    attention = pd.read_csv(data / "astrolabe/profiling__compute__a30__Qwen__Qwen-2-7B__attention.csv.gz")
    blackwell = pd.read_csv(data / "vidur/llmservingsim/RTXPRO6000_Llama-3.1-8B_bf16_tp1/attention.csv")
    samples = pd.read_csv(data / "vidur/sampled/llama2_7b_tp1_attention_samples.csv")

    linear, linear_mixed = fit_linear_parts(mlp, (1, 48)), fit_linear_parts(mlp, (48, 560))
    d = samples[(samples.op == "attn_decode") & (samples.batch_size <= 48)]
    decode = fit_decode_attention(
        d.batch_size, d.kv_cache_size, d.median_ms / 1e3, model.kv_bytes, d.device.map(PEAK_BYTES_S)
    )
    launch, per_seq, slowness = decode.coefficients
    per_byte = slowness / device.bytes_s
    alone, mixed = fit_mixed_attention(blackwell)
    ratio = mixed.coefficients[2] / alone.coefficients[2]
    p = attention[attention.is_prefill & (attention.prefill_chunk_size <= 512)]
    prefill = fit_prefill_attention(
        p.prefill_chunk_size, p.kv_cache_size, p["time_stats.attn_prefill.median"] / 1e3,
        qwen.pair_flops, ratio * per_byte * qwen.kv_bytes,
    )
    prefill_launch, per_chunk_token, per_flop = prefill.coefficients

    save = float(attention["time_stats.attn_kv_cache_save.median"].median()) / 1e3
    share = FP16_BYTES * model.layers * sum(model.weights.values()) / device.bytes_s / linear.coefficients[0]
    head = FP16_BYTES * model.vocabulary * model.hidden / (device.bytes_s * share)
    per_kv = model.layers * model.kv_bytes * per_byte
    cost = StepCost(
        decode=_rounded(
            base_s=linear.coefficients[0] + head + model.layers * (launch + save),
            per_token_s=linear.coefficients[1],
            per_seq_s=model.layers * per_seq,
            per_kv_token_s=per_kv,
        ),
        mixed=_rounded(
            base_s=linear_mixed.coefficients[0] + head + model.layers * (prefill_launch + save),
            per_token_s=linear_mixed.coefficients[1] + model.layers * per_chunk_token,
            per_seq_s=model.layers * per_seq,
            per_kv_token_s=ratio * per_kv,
            attention_s=model.layers * model.pair_flops * per_flop,
        ),
    )
    return Preset(
        name="llama2-7b-a30",
        model="meta-llama/Llama-2-7b-hf, FP16, one GPU",
        device="NVIDIA A30 24 GB",
        date="2026-11-29",
        cost=cost,
        engine={
            "max_num_seqs": 48, "max_num_batched_tokens": 512, "block_size": 16, "num_gpu_blocks": 1056,
            "max_model_len": 4096, "enable_chunked_prefill": True,
        },
        source=(
            "AKafakA/Astrolabe 2e5fad6 (MIT): A30 kernel timings of Llama-2-7B's linear parts and Qwen2-7B's "
            "attention. Vidur's Llama-2-7B attention on A100 and A40 (MIT), samples as vendored in "
            "sw5sh/cs378-assignment3 7ac2fe9. casys-kaist/LLMServingSim 5daddb21 (MIT): mixed attention on "
            "an RTX PRO 6000. Engine keys: the Astrolabe paper's A30 runs."
        ),
        derivation={
            "host_s": "0: not measured on this machine. Vidur's CPU overheads (schedule, prepare, sample, "
            "process) of Llama-2-7B on A100 and A40 hosts are 1.2..4.3 ms at batches 8..48 (2023-24 code)",
            "base_s": "fitted, plus derived: reading the output head at the rate the weights are read "
            f"({share:.0%} of 933 GB/s), the launches of attention, and the KV write (of Qwen2-7B, A30)",
            "per_token_s": "fitted; mixed adds the per-token part of Qwen2-7B's prefill attention on the A30",
            "per_seq_s": "derived: Llama-2-7B's decode attention on A100 and A40; what the linear parts cost "
            "per sequence is in per_token_s, as the two are one in decode-only steps",
            "per_kv_token_s": f"derived: 524288 bytes a token at {1 / slowness:.0%} of 933 GB/s, the share "
            "Llama-2-7B's decode attention reaches on A100 and A40 (Qwen2-7B's on the A30 agrees to 3 % at "
            f"100..300 MB a layer); mixed {ratio:.2f} times that, as on an RTX PRO 6000 up to 64 "
            "decodes of 2048 tokens (2 at 16k)",
            "attention_s": f"derived: 524288 FLOPs a query-key pair at {1 / per_flop / 1e12:.0f} TFLOP/s, "
            "the speed of Qwen2-7B's prefill attention on the A30 for chunks up to 512",
        },
        error={
            "decode_linear": linear.quality("1..48 new tokens"),
            "mixed_linear": linear_mixed.quality("48..560 new tokens"),
            "decode_attention": decode.quality("Llama-2-7B on A100 and A40, batch 1..48, context 32..992"),
            "prefill_attention": prefill.quality("Qwen2-7B, chunks 32..512, context 0..4032"),
            "attention_ratio_decode": alone.quality("RTX PRO 6000, decode only"),
            "attention_ratio_mixed": mixed.quality("RTX PRO 6000, mixed"),
        },
    )


PRESETS = (llama2_7b_a30,)


def _rounded(**coefficients):
    return Regime(**{key: float(f"{value:.8g}") for key, value in coefficients.items()})


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python -m astrolabe_lab.fit DATA_DIR  (the folder that holds astrolabe/ and vidur/)")
    for derive in PRESETS:
        print(json.dumps(derive(Path(sys.argv[1])).to_dict(), indent=2))
