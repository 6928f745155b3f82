"""Llama-2-7B and Qwen2-7B on the A30, the Astrolabe paper's engines."""

from __future__ import annotations

from astrolabe_lab.cost import Preset
from astrolabe_lab.cost.shapes import DEVICES, MODELS
from astrolabe_lab.fit.kernels import fit_decode_attention, fit_linear_parts, fit_prefill_attention
from astrolabe_lab.fit.parts import KNEES, Parts, share_of_peak, step_cost

DATE = "2026-11-29"
A30, BATCH, CHUNK = DEVICES["A30"], 48, 512
PAPER_ENGINE = {
    "max_num_seqs": BATCH, "max_num_batched_tokens": CHUNK, "block_size": 16, "num_gpu_blocks": 1056,
    "max_model_len": 4096, "enable_chunked_prefill": True,
}  # fmt: skip
LINEAR_NOTE = (
    "matrix products and elementwise kernels, fitted; of mixed steps a line between the knees of 64- and 128-row GEMM "
    "tiles (mixed_grid)"
)
HEAD_NOTE = "plus derived: reading the output head at the rate the weights are read ({share:.0%} of {peak:.0f} GB/s)"


def llama2_7b_a30(timings):
    """The preset llama2-7b-a30, from the public timings (a data.Timings).

    Llama-2-7B's own attention timings on the A30 are not public in a usable form. Its decode attention comes from
    its timings on A100 and A40 (bytes counted at each device's peak), its prefill attention from Qwen2-7B on the A30
    (counted in operations).
    """
    model, qwen = MODELS["meta-llama/Llama-2-7b-hf"], MODELS["Qwen/Qwen2-7B"]
    mlp = timings.astrolabe("a30", "meta-llama__Llama-2-7b-hf", "mlp")
    attention = timings.astrolabe("a30", "Qwen__Qwen-2-7B", "attention")
    decode, mixed = (fit_linear_parts(mlp, knots, model, A30) for knots in ((1, BATCH), KNEES))
    samples = [(timings.samples(name, "attn_decode", BATCH), DEVICES[gpu].bytes_s) for name, gpu in ELSEWHERE]
    rows = [part.assign(peak=peak) for part, peak in samples]
    import pandas as pd

    d = pd.concat(rows)
    decoding = fit_decode_attention(d.batch_size, d.kv_cache_size, d.median_ms / 1e3, model.kv_bytes, d.peak)
    per_byte = decoding.coefficients[2] / A30.bytes_s
    prefill, save_s = prefill_and_save(attention, qwen, per_byte * qwen.kv_bytes)
    parts = Parts(decode, mixed, decoding, per_byte * model.kv_bytes, prefill, save_s, BATCH * 992)
    share = share_of_peak(model, A30, decode)
    return Preset(
        name="llama2-7b-a30",
        model="meta-llama/Llama-2-7b-hf, FP16, one GPU",
        device="NVIDIA A30 24 GB",
        date=DATE,
        cost=step_cost(model, A30, parts, host_s=HOST_S),
        engine=PAPER_ENGINE,
        source=(
            "AKafakA/Astrolabe 2e5fad6 (MIT): A30 kernel timings of Llama-2-7B's linear parts and Qwen2-7B's "
            "attention. Vidur's Llama-2-7B attention on A100 and A40 (MIT), samples as vendored in "
            "sw5sh/cs378-assignment3 7ac2fe9. Engine keys: the Astrolabe paper's A30 runs."
        ),
        derivation={
            "host_s": HOST_NOTE,
            "base_s": f"decode: fitted, {HEAD_NOTE.format(share=share, peak=A30.bytes_s / 1e9)}, the launches of "
            "attention, and the KV write (of Qwen2-7B, A30); mixed: these without the fitted part",
            "per_token_s": "decode: fitted; mixed: the per-token part of Qwen2-7B's prefill attention on the A30",
            "mixed_grid": LINEAR_NOTE,
            "per_seq_s": "derived: Llama-2-7B's decode attention on A100 and A40; what the linear parts cost per "
            "sequence is in per_token_s, as the two are one in decode-only steps",
            "per_kv_token_s": f"derived: 524288 bytes a token at {1 / decoding.coefficients[2]:.0%} of 933 GB/s, the "
            "share Llama-2-7B's decode attention reaches on A100 and A40 (Qwen2-7B's on the A30 agrees to 3 % at "
            "100..300 MB a layer). The same in mixed steps: vLLM 0.7 runs the attention of decodes apart from that "
            "of prompts",
            "attention_s": f"derived: 524288 FLOPs a query-key pair at {1 / prefill.coefficients[2] / 1e12:.0f} "
            "TFLOP/s, the speed of Qwen2-7B's prefill attention on the A30 for chunks up to 512",
        },
        error={
            "decode_linear": decode.fit.quality("1..48 new tokens"),
            "mixed_linear": mixed.fit.quality("1..4096 new tokens"),
            "decode_attention": decoding.quality("Llama-2-7B on A100 and A40, batch 1..48, context 32..992"),
            "prefill_attention": prefill.quality("Qwen2-7B, chunks 32..512, context 0..4032"),
        },
    )


ELSEWHERE = (("a100", "A100-80GB"), ("a40", "A40"))
HOST_S = 0.0
HOST_NOTE = (
    "0, the value that brings llumnix_minus (a) closest to the 31.5 QPS of the Astrolabe paper (P99 TTFT <= 10 s, "
    "n = 10,000, scheduler v0_chunked): it reaches 31.3 as the mean of ten seeds (95 % 31.0..31.6) with the requests "
    "in the file's order, 30.7 (30.4..30.9) in random order, and 0.85 QPS less for each ms. The 1..4 ms of host "
    "overhead that Vidur measured on A100 and A40 hosts in 2023-24 are thus not added: the timings leave no room"
)


def qwen2_7b_a30(timings):
    """The preset qwen2-7b-a30, from the public timings (a data.Timings)."""
    model = MODELS["Qwen/Qwen2-7B"]
    mlp = timings.astrolabe("a30", "Qwen__Qwen-2-7B", "mlp")
    attention = timings.astrolabe("a30", "Qwen__Qwen-2-7B", "attention")
    decode, mixed = (fit_linear_parts(mlp, knots, model, A30) for knots in ((1, BATCH), KNEES))
    d = attention[~attention.is_prefill & (attention.batch_size <= BATCH)]
    seconds = d["time_stats.attn_decode.median"] / 1e3
    decoding = fit_decode_attention(d.batch_size, d.kv_cache_size, seconds, model.kv_bytes, A30.bytes_s)
    per_kv = decoding.coefficients[2] * model.kv_bytes / A30.bytes_s
    prefill, save_s = prefill_and_save(attention, model, per_kv)
    parts = Parts(decode, mixed, decoding, per_kv, prefill, save_s, BATCH * 4032)
    share = share_of_peak(model, A30, decode)
    return Preset(
        name="qwen2-7b-a30",
        model="Qwen/Qwen2-7B, FP16, one GPU",
        device="NVIDIA A30 24 GB",
        date=DATE,
        cost=step_cost(model, A30, parts),
        engine=replace_blocks(PAPER_ENGINE, 7289),
        source=(
            "AKafakA/Astrolabe 2e5fad6 (MIT): A30 kernel timings of Qwen2-7B's linear parts and attention. Engine "
            "keys: the Astrolabe paper's A30 runs, 7289 KV blocks as in its public configuration."
        ),
        derivation={
            "host_s": "0: not measured on this machine",
            "base_s": f"decode: fitted, {HEAD_NOTE.format(share=share, peak=A30.bytes_s / 1e9)}; launches of attention "
            "and the KV write fitted; mixed: these without the linear parts",
            "per_token_s": "decode: fitted; mixed: the per-token part of prefill attention, fitted",
            "mixed_grid": LINEAR_NOTE,
            "per_seq_s": "fitted: decode attention; what the linear parts cost per sequence is in per_token_s",
            "per_kv_token_s": f"fitted: {model.layers * model.kv_bytes} bytes a token at "
            f"{1 / decoding.coefficients[2]:.0%} of 933 GB/s; the same in mixed steps, whose decodes vLLM 0.7 runs "
            "apart from prompts",
            "attention_s": f"fitted: {model.layers * model.pair_flops} FLOPs a query-key pair at "
            f"{1 / prefill.coefficients[2] / 1e12:.0f} TFLOP/s",
        },
        error={
            "decode_linear": decode.fit.quality("1..48 new tokens"),
            "mixed_linear": mixed.fit.quality("1..4096 new tokens"),
            "decode_attention": decoding.quality("batch 1..48, context 32..4032"),
            "prefill_attention": prefill.quality("chunks 32..512, context 0..4032"),
        },
    )


def prefill_and_save(attention, model, per_kv_s, tensor_parallel=1):
    """(Fit of prefill attention up to a chunk of 512, seconds to write a layer's keys) of a Vidur attention profile."""
    p = attention[attention.is_prefill & (attention.prefill_chunk_size <= CHUNK)]
    seconds = p["time_stats.attn_prefill.median"] / 1e3
    flops = model.pair_flops / tensor_parallel
    fit = fit_prefill_attention(p.prefill_chunk_size, p.kv_cache_size, seconds, flops, per_kv_s)
    name = "time_stats.attn_kv_cache_save.median"
    return fit, float(attention[name].median()) / 1e3 if name in attention else 0.0


def replace_blocks(engine, blocks):
    """Engine keys with another number of KV blocks."""
    return engine | {"num_gpu_blocks": blocks}
