"""Qwen2.5-3B on the A40 (derived from Llama-2-7B's timings there), and Llama-3.1-8B on an RTX PRO 6000 (measured)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from astrolabe_lab.cost import Grid, Preset, StepCost
from astrolabe_lab.cost.shapes import DEVICES, MODELS, kv_blocks
from astrolabe_lab.fit.a30 import DATE, HEAD_NOTE
from astrolabe_lab.fit.a100 import SAMPLES, VIDUR, a40_attention
from astrolabe_lab.fit.iterations import fit
from astrolabe_lab.fit.kernels import fit_linear_parts
from astrolabe_lab.fit.parts import DECODE_KNEES, KNEES, Parts, rounded, share_of_peak, short, step_cost
from astrolabe_lab.fit.regression import hats, relative_least_squares

KV_TOKENS = 60_000  # of each engine of Calibrate-then-Route (section IV)
LONGEST = 4096
TOKEN_KNOTS = (1, 64, 128, 256, 512, 1024, 2048)
CONTEXT_KNOTS = (0, 262_144, 524_288)  # attention of mixed batches turns steeper between


def qwen25_3b_a40(timings):
    """The preset qwen2.5-3b-a40, derived from Llama-2-7B's public timings on the A40 (a data.Timings).

    No timing of Qwen2.5-3B is public: every kernel is taken to run at the rate Llama-2-7B's reaches on the same GPU, in
    bytes for weights and keys, in operations for products and attention.
    """
    model, known, device = MODELS["Qwen/Qwen2.5-3B"], MODELS["meta-llama/Llama-2-7b-hf"], DEVICES["A40"]
    mlp = scaled(timings.mlp("a40", "Llama-2-7b-hf"), known, model)
    decode, mixed = (fit_linear_parts(mlp, knots, model, device) for knots in (DECODE_KNEES, KNEES))
    decoding, per_kv, prefill = a40_attention(timings)
    per_kv *= model.kv_bytes / known.kv_bytes
    launch, per_seq, slowness = decoding.coefficients
    decoding = replace(decoding, coefficients=(launch, per_seq * model.kv_heads / known.kv_heads, slowness))
    context = 102 * 992 * known.kv_bytes // model.kv_bytes
    share = share_of_peak(model, device, decode)
    blocks = KV_TOKENS // 16
    return Preset(
        name="qwen2.5-3b-a40",
        model="Qwen/Qwen2.5-3B, BF16, one GPU",
        device="NVIDIA A40 48 GB",
        date=DATE,
        cost=step_cost(model, device, Parts(decode, mixed, decoding, per_kv, prefill, 0.0, context)),
        engine={
            "max_num_seqs": 256,
            "max_num_batched_tokens": 2048,
            "block_size": 16,
            "num_gpu_blocks": blocks,
            "max_model_len": model.max_model_len,
            "enable_chunked_prefill": True,
        },
        source=f"{VIDUR}A40 kernel timings of Llama-2-7B's linear parts; {SAMPLES}Engine keys: vLLM's defaults, and "
        f"{KV_TOKENS:,} tokens of KV cache as in Calibrate-then-Route.",
        derivation={
            "host_s": "0: not measured",
            "base_s": f"{HEAD_NOTE.format(share=share, peak=device.bytes_s / 1e9).removeprefix('plus ')}, and the "
            "launches of Llama-2-7B's attention",
            "per_token_s": "mixed: derived: the per-token part of Llama-2-7B's prefill attention",
            "decode_grid": "derived, as mixed_grid",
            "mixed_grid": "derived: Llama-2-7B's matrix products on the A40 scaled by weights, its elementwise kernels "
            "with their growth scaled by the hidden size; a line between the knees of 64- and 128-row GEMM tiles",
            "per_seq_s": "derived: Llama-2-7B's on the A100 by KV heads (a sequence takes one unit of work for each)",
            "per_kv_token_s": f"derived: {model.layers * model.kv_bytes} bytes a token at "
            f"{1 / decoding.coefficients[2]:.0%} of 696 GB/s",
            "attention_s": f"derived: {model.layers * model.pair_flops} FLOPs a query-key pair at "
            f"{1 / prefill.coefficients[2] / 1e12:.0f} TFLOP/s",
        },
        error={
            "decode_linear": decode.fit.quality("Llama-2-7B's scaled timings, 1..256 new tokens"),
            "mixed_linear": mixed.fit.quality("Llama-2-7B's scaled timings, 1..4096 new tokens"),
            "decode_attention": decoding.quality("Llama-2-7B, batch 15..102, context 992"),
            "prefill_attention": prefill.quality("Llama-2-7B, chunks 384..416, context 0..3712"),
        },
    )


def scaled(mlp, known, model):
    """A Vidur MLP profile of the Model `known` as that of another would be, each kernel at the same rate.

    Matrix products scale with their weights. Elementwise kernels keep what they take for one token, and grow with the
    hidden size.
    """
    rows = mlp[mlp.num_tensor_parallel_workers == 1].sort_values("num_tokens").copy()
    for column in [name for name in rows if name.endswith(".median")]:
        operation = column.split(".")[1]
        if operation in model.weights:
            rows[column] *= model.weights[operation] / known.weights[operation]
        else:
            first = rows[column].iloc[0]
            rows[column] = first + (rows[column] - first) * model.hidden / known.hidden
    return rows


def llama31_8b_rtxpro6000(timings):
    """The preset llama3.1-8b-rtxpro6000, from LLMServingSim's layer timings (a data.Timings)."""
    from astrolabe_lab.fidelity import HOST_S, HOST_SOURCE, pad_sizes_of
    from astrolabe_lab.sim.config import EngineConfig

    model, device = MODELS["meta-llama/Llama-3.1-8B"], DEVICES["RTXPRO6000"]
    engine = {
        "max_num_seqs": 128,
        "max_num_batched_tokens": 2048,
        "block_size": 16,
        "num_gpu_blocks": kv_blocks(model, device),
        "max_model_len": model.max_model_len,
        "enable_chunked_prefill": True,
        "async_scheduling": True,
    }
    config = EngineConfig.from_dict(engine)
    steps = timings.blackwell().iterations(model, config, LONGEST)
    base = StepCost(rounded(base_s=1.0), rounded(base_s=1.0))  # the other regime is fitted below
    decode = fit(steps[~steps.mixed], base=base, draws=20, quiet=True).regimes["decode"]
    rows = steps[steps.mixed]
    by_context = hats(rows.context_tokens, CONTEXT_KNOTS).T[1:]
    mixed = relative_least_squares(
        [*hats(rows.new_tokens, TOKEN_KNOTS).T, *by_context, rows.sequences, rows.attention],
        rows.seconds,
        non_negative=True,
    )
    k = len(TOKEN_KNOTS)
    seconds = np.add.outer(mixed.coefficients[:k], [0.0, *mixed.coefficients[k:-2]])
    grid = Grid(TOKEN_KNOTS, CONTEXT_KNOTS, tuple(tuple(map(short, row)) for row in seconds))
    d = decode.coefficients
    cost = StepCost(
        rounded(host_s=HOST_S, base_s=d.base_s, per_token_s=d.per_token_s, per_kv_token_s=d.per_kv_token_s),
        rounded(host_s=HOST_S, per_seq_s=mixed.coefficients[-2], attention_s=mixed.coefficients[-1]),
        pad_sizes=pad_sizes_of(config), mixed_grid=grid,
        fitted={name: {count: _range(part[count]) for count in ("new_tokens", "sequences", "context_tokens")}
                for name, part in (("decode", steps[~steps.mixed]), ("mixed", rows))},
    )  # fmt: skip
    return Preset(
        name="llama3.1-8b-rtxpro6000",
        model="meta-llama/Llama-3.1-8B, BF16, one GPU",
        device="NVIDIA RTX PRO 6000 Blackwell 96 GB",
        date=DATE,
        cost=cost,
        engine=engine,
        source="casys-kaist/LLMServingSim 5daddb21 (MIT): timings of Llama-3.1-8B's layers under vLLM on an RTX PRO "
        "6000, attention of mixed batches among them. Engine keys: of its measured run; KV blocks derived: 0.9 of the "
        "memory less the weights and 1.15 GiB.",
        derivation={
            "host_s": f"{HOST_S * 1e6:g} us: {HOST_SOURCE}",
            "base_s": "decode: fitted to layers x (attention + dense) + head and sampler of timed batches",
            "per_token_s": "decode: fitted likewise",
            "per_seq_s": "mixed: fitted; decode: counted in per_token_s",
            "per_kv_token_s": "decode: fitted to batches of equal contexts. Unequal ones take longer, which astrolabe "
            "fidelity accounts for and a preset cannot: replaying the 300 measured requests it is 3.9 % low in mean "
            "TPOT, 5.4 % in latency and 9.6 % in TTFT",
            "attention_s": "mixed: fitted",
            "mixed_grid": "fitted: piecewise linear in new tokens and in context, added up",
            "pad_sizes": "vLLM's default CUDA-graph sizes",
        },
        error={
            "decode": {
                "over": f"batch 1..128, context 16..{LONGEST} each", "mean_abs_pct": round(decode.error_pct, 2),
                "worst_pct": round(decode.worst_pct, 1), "points": decode.points, "dropped": 0,
            },
            "mixed": mixed.quality(f"chunks 16..2048, with up to 128 decodes, context up to {LONGEST} each"),
        },
    )  # fmt: skip


def _range(values):
    return float(values.min()), float(values.max())
