"""Llama-2-7B on A100 and A40, and Llama-2-70B over four A100-40GB."""

from __future__ import annotations

from astrolabe_lab.cost import Preset
from astrolabe_lab.cost.shapes import DEVICES, MODELS, kv_blocks
from astrolabe_lab.fit.a30 import BATCH, CHUNK, DATE, HEAD_NOTE, LINEAR_NOTE, PAPER_ENGINE, replace_blocks
from astrolabe_lab.fit.kernels import (
    fit_all_reduce,
    fit_decode_attention,
    fit_linear_parts,
    fit_prefill_attention,
)
from astrolabe_lab.fit.parts import DECODE_KNEES, KNEES, Parts, share_of_peak, step_cost

VIDUR = "microsoft/vidur 7d47513 (MIT): "
SAMPLES = "its attention, samples as vendored in sw5sh/cs378-assignment3 7ac2fe9. "
VIDUR_BATCH = 128
NOT_MEASURED = "0: not measured with these kernels (Vidur's CPU overheads of Llama-2-7B in 2023-24: 1.2..4.3 ms a step)"


def llama2_7b_a100(timings):
    """The preset llama2-7b-a100, from the public timings (a data.Timings)."""
    model, device = MODELS["meta-llama/Llama-2-7b-hf"], DEVICES["A100-80GB"]
    decoding, per_kv = _decode("a100", timings, model, device)
    p = timings.prefill_of_a100(model.heads)
    p = p[p.isl <= 2048]
    prefill = fit_prefill_attention(p.isl, 0 * p.isl, p.latency / 1e3, model.pair_flops, per_kv)
    return _llama2_7b(
        "llama2-7b-a100", "NVIDIA A100 80 GB", model, device, timings.mlp("a100", "Llama-2-7b-hf"), decoding, per_kv,
        prefill,
        source=f"{VIDUR}A100 kernel timings of Llama-2-7B's linear parts; {SAMPLES}AIConfigurator 0.12 (Apache-2.0, "
        "NVIDIA): prefill attention of 32 heads on an A100.",
        host=NOT_MEASURED,
        per_seq="fitted: decode attention at batches 1..128",
        over=("batch 1..128, context 32..960", "prompts of 1..2048 tokens"),
        context=VIDUR_BATCH * 928,
    )  # fmt: skip


def llama2_7b_a40(timings):
    """The preset llama2-7b-a40, from the public timings (a data.Timings)."""
    model, device = MODELS["meta-llama/Llama-2-7b-hf"], DEVICES["A40"]
    decoding, per_kv, prefill = a40_attention(timings)
    return _llama2_7b(
        "llama2-7b-a40", "NVIDIA A40 48 GB", model, device, timings.mlp("a40", "Llama-2-7b-hf"), decoding, per_kv,
        prefill,
        source=f"{VIDUR}A40 kernel timings of Llama-2-7B's linear parts; {SAMPLES}",
        host=NOT_MEASURED,
        per_seq="derived: that of the A100, as the A40's attention was timed at one context",
        over=("batch 15..102, context 992", "chunks 384..416, context 0..3712"),
        context=102 * 992,
    )  # fmt: skip


def a40_attention(timings):
    """(Fit of decode attention, seconds a token of context, Fit of prefill attention): Llama-2-7B's on the A40."""
    model, device = MODELS["meta-llama/Llama-2-7b-hf"], DEVICES["A40"]
    per_seq_s = _decode("a100", timings, model, DEVICES["A100-80GB"])[0].coefficients[1]
    decoding, per_kv = _decode("a40", timings, model, device, per_seq_s)
    p = timings.samples("a40", "attn_prefill")
    p = p[p.prefill_chunk_size <= CHUNK]
    seconds = p.median_ms / 1e3
    return (
        decoding,
        per_kv,
        fit_prefill_attention(p.prefill_chunk_size, p.kv_cache_size, seconds, model.pair_flops, per_kv),
    )


def llama2_70b_a100(timings):
    """The preset llama2-70b-tp4-a100-40gb, from the public timings (a data.Timings).

    The attention timings that come with the linear parts are no measurements (a decode reads its keys twelve times
    faster than the memory can): attention is derived from Vidur's on two A100-80GB, in bytes and operations per GPU.
    """
    model, device, degree = MODELS["meta-llama/Llama-2-70b-hf"], DEVICES["A100-40GB"], 4
    mlp = timings.astrolabe("a100_40gb", "meta-llama__Llama-2-70b-hf", "mlp")
    decode, mixed = (fit_linear_parts(mlp, knots, model, device, degree) for knots in ((1, BATCH), KNEES))
    half, peak = timings.attention_of_70b(), DEVICES["A100-80GB"].bytes_s
    d = half[~half.is_prefill & (half.batch_size <= BATCH)]
    seconds = d["time_stats.attn_decode.median"] / 1e3
    decoding = fit_decode_attention(d.batch_size, d.kv_cache_size, seconds, model.kv_bytes / 2, peak)
    slowness = decoding.coefficients[2]
    p = half[half.is_prefill & (half.prefill_chunk_size <= CHUNK)]
    prefill = fit_prefill_attention(
        p.prefill_chunk_size, p.kv_cache_size, p["time_stats.attn_prefill.median"] / 1e3, model.pair_flops / 2,
        slowness * model.kv_bytes / 2 / peak,
    )  # fmt: skip
    reduce = fit_all_reduce(timings.all_reduce(), degree, model.hidden, 2048)
    parts = Parts(
        decode, mixed, decoding, slowness * model.kv_bytes / degree / device.bytes_s, prefill, 0.0, BATCH * 4032, reduce
    )
    share = share_of_peak(model, device, decode, degree)
    reduced = "two all-reduces a layer over NVLink, fitted"
    return Preset(
        name="llama2-70b-tp4-a100-40gb",
        model="meta-llama/Llama-2-70b-hf, FP16, tensor parallel over four GPUs",
        device="4 x NVIDIA A100 40 GB",
        date=DATE,
        cost=step_cost(model, device, parts, degree),
        engine=replace_blocks(PAPER_ENGINE, 806),
        source=(
            "AKafakA/Astrolabe 2e5fad6 (MIT): A100-40GB kernel timings of Llama-2-70B's linear parts over four GPUs, "
            "and of all-reduce. microsoft/vidur (MIT), its history: attention of Llama-2-70B over two A100-80GB. "
            "Engine keys: the Astrolabe paper's, 806 KV blocks as in its public configuration."
        ),
        derivation={
            "host_s": "0: not measured on this machine",
            "base_s": f"decode: fitted, {HEAD_NOTE.format(share=share, peak=device.bytes_s / 1e9)} by each GPU; "
            f"launches of attention; {reduced}; mixed: these without the linear parts",
            "per_token_s": f"decode: fitted; {reduced}; mixed: the latter and the per-token part of prefill attention",
            "mixed_grid": LINEAR_NOTE,
            "per_seq_s": "0: decode attention over two A100-80GB asks for none",
            "per_kv_token_s": f"derived: {model.layers * model.kv_bytes // degree} bytes a token and GPU at "
            f"{1 / slowness:.0%} of 1555 GB/s, the share reached over two A100-80GB",
            "attention_s": f"derived: a GPU's quarter of the operations at {1 / prefill.coefficients[2] / 1e12:.0f} "
            "TFLOP/s, the speed over two A100-80GB",
        },
        error={
            "decode_linear": decode.fit.quality("1..48 new tokens"),
            "mixed_linear": mixed.fit.quality("1..4096 new tokens"),
            "decode_attention": decoding.quality("two A100-80GB, batch 1..48, context 32..4032"),
            "prefill_attention": prefill.quality("two A100-80GB, chunks 64..512, context 0..4032"),
            "all_reduce": reduce.quality("four GPUs, 1..2048 tokens"),
        },
    )


def _decode(name, timings, model, device, per_seq_s=None):
    """(Fit of decode attention, seconds a token of context) of Llama-2-7B's samples on "a100" or "a40"."""
    d = timings.samples(name, "attn_decode", VIDUR_BATCH)
    fit = fit_decode_attention(
        d.batch_size, d.kv_cache_size, d.median_ms / 1e3, model.kv_bytes, device.bytes_s, per_seq_s
    )
    return fit, fit.coefficients[2] * model.kv_bytes / device.bytes_s


def _llama2_7b(name, gpu, model, device, mlp, decoding, per_kv, prefill, *, source, host, per_seq, over, context):
    decode, mixed = (fit_linear_parts(mlp, knots, model, device) for knots in (DECODE_KNEES[:4], KNEES))
    share = share_of_peak(model, device, decode)
    blocks = kv_blocks(model, device)
    return Preset(
        name=name,
        model="meta-llama/Llama-2-7b-hf, FP16, one GPU",
        device=gpu,
        date=DATE,
        cost=step_cost(model, device, Parts(decode, mixed, decoding, per_kv, prefill, 0.0, context)),
        engine=replace_blocks(PAPER_ENGINE, blocks) | {"max_num_seqs": VIDUR_BATCH},
        source=f"{source.strip()} Engine keys: Vidur's batch of {VIDUR_BATCH} and chunk of {CHUNK}; {blocks} KV blocks "
        "derived: 0.9 of the memory less the weights and 1.15 GiB.",
        derivation={
            "host_s": host,
            "base_s": f"{HEAD_NOTE.format(share=share, peak=device.bytes_s / 1e9).removeprefix('plus ')}, and the "
            "launches of attention, fitted",
            "per_token_s": "mixed: the per-token part of prefill attention, fitted",
            "decode_grid": "the linear parts, as mixed_grid",
            "mixed_grid": LINEAR_NOTE,
            "per_seq_s": f"{per_seq}; what the linear parts cost per sequence is in decode_grid",
            "per_kv_token_s": f"fitted: 524288 bytes a token at {1 / decoding.coefficients[2]:.0%} of "
            f"{device.bytes_s / 1e9:.0f} GB/s; the same in mixed steps, as decodes and prompts were timed apart",
            "attention_s": f"fitted: 524288 FLOPs a query-key pair at {1 / prefill.coefficients[2] / 1e12:.0f} TFLOP/s",
        },
        error={
            "decode_linear": decode.fit.quality(f"1..{VIDUR_BATCH} new tokens"),
            "mixed_linear": mixed.fit.quality("1..4096 new tokens"),
            "decode_attention": decoding.quality(over[0]),
            "prefill_attention": prefill.quality(over[1]),
        },
    )
