"""Claims about how the presets are derived from public kernel timings."""

import json
import subprocess
import sys

import numpy as np
import pytest

from astrolabe_lab.cost import KEYS, preset, presets
from astrolabe_lab.cost.shapes import DEVICES, MODELS
from astrolabe_lab.errors import InputError

pd = pytest.importorskip("pandas")

LLAMA, A30 = MODELS["meta-llama/Llama-2-7b-hf"], DEVICES["A30"]
NAMES = [
    "llama2-70b-tp4-a100-40gb", "llama2-7b-a100", "llama2-7b-a30", "llama2-7b-a40", "llama3.1-8b-rtxpro6000",
    "qwen2-7b-a30", "qwen2.5-3b-a40",
]  # fmt: skip


def layer_timings(base_ms=0.5, per_token_ms=0.002):
    """Exactly linear layer timings in the columns of Vidur's mlp.csv."""
    tokens = np.r_[1, 2, 4, np.arange(8, 600, 8)]
    frame = pd.DataFrame({"num_tokens": tokens, "num_tensor_parallel_workers": 1})
    for operation in LLAMA.weights:
        frame[f"time_stats.{operation}.median"] = base_ms + per_token_ms * frame.num_tokens
    frame["time_stats.emb.median"] = 0.01
    return frame


def parts(frame, knots=(1, 48), **options):
    from astrolabe_lab.fit.kernels import fit_linear_parts

    return fit_linear_parts(frame, knots, LLAMA, A30, **options)


def test_linear_timings_are_recovered_exactly_and_the_embedding_is_counted_once():
    found = parts(layer_timings())
    assert (found.base_s, found.per_token_s) == pytest.approx((32 * 4 * 0.5e-3 + 1e-5, 32 * 4 * 2e-6), rel=1e-9)
    assert found.fit.error_pct < 1e-9


def test_timings_with_a_knee_are_recovered_between_knots():
    frame = layer_timings()
    for operation in LLAMA.weights:
        frame[f"time_stats.{operation}.median"] += 0.003 * np.maximum(frame.num_tokens - 128, 0)
    found = parts(frame, (1, 128, 592))
    line = 32 * 4 * (0.5e-3 + 2e-6 * np.array([1, 128, 592])) + 1e-5
    assert found.seconds == pytest.approx(line + 32 * 4 * 3e-6 * np.array([0, 0, 464]), rel=1e-9)


def test_impossible_and_missing_timings_do_not_move_the_fit():
    frame = layer_timings()
    frame.loc[3:6, "time_stats.mlp_down_proj.median"] = 0.011  # faster than the GPU reads the weights
    frame.loc[5:8, "time_stats.attn_pre_proj.median"] = np.nan
    found, clean = parts(frame, (1, 560)), parts(layer_timings(), (1, 560))
    assert found.seconds == pytest.approx(clean.seconds, rel=1e-9)
    assert found.fit.dropped == 8


def test_a_knot_without_usable_timings_is_refused_by_operation():
    frame = layer_timings()
    frame.loc[frame.num_tokens.between(200, 500), "time_stats.mlp_up_proj.median"] = np.nan
    with pytest.raises(InputError, match="no usable timing of mlp_up_proj lies next to 300 tokens"):
        parts(frame, (1, 250, 300, 400, 560))


def test_timings_under_tensor_parallelism_are_used_at_their_own_degree_only():
    both = pd.concat([layer_timings(), layer_timings(base_ms=9).assign(num_tensor_parallel_workers=2)])
    assert parts(both) == parts(layer_timings())
    assert parts(both, tensor_parallel=2).base_s == pytest.approx(32 * 4 * 9e-3 + 1e-5)


def test_a_fit_without_enough_timings_or_columns_is_refused():
    with pytest.raises(InputError, match="no usable timing"):
        parts(layer_timings(), (4000, 5000))
    with pytest.raises(InputError, match="lack mlp_up_proj"):
        parts(layer_timings().drop(columns="time_stats.mlp_up_proj.median"))


def test_attention_made_of_bytes_and_operations_is_taken_apart_again():
    from astrolabe_lab.fit.kernels import fit_decode_attention, fit_prefill_attention

    rng = np.random.default_rng(1)
    n, context, chunk = rng.integers(1, 48, 200), rng.integers(16, 4000, 200), rng.integers(16, 512, 200)
    seconds = 5e-6 + 1e-6 * n + 1.25 * n * context * 16384 / 933e9
    fit = fit_decode_attention(n, context, seconds, 16384, 933e9)
    assert fit.coefficients == pytest.approx((5e-6, 1e-6, 1.25), rel=1e-6)
    known = fit_decode_attention(n, context, seconds, 16384, 933e9, per_seq_s=1e-6)
    assert known.coefficients == pytest.approx(fit.coefficients, rel=1e-6)
    work = 16384 * (chunk * context + chunk**2 / 2)
    seconds = 4e-6 + 2e-8 * chunk + work / 50e12 + 3e-9 * context
    fit = fit_prefill_attention(chunk, context, seconds, 16384, per_kv_token_s=3e-9)
    assert fit.coefficients == pytest.approx((4e-6, 2e-8, 1 / 50e12), rel=1e-6)


def test_two_all_reduces_a_layer_are_folded_into_base_and_tokens():
    from dataclasses import replace

    from astrolabe_lab.fit.kernels import fit_all_reduce
    from astrolabe_lab.fit.parts import Parts, step_cost
    from astrolabe_lab.fit.regression import Fit

    tokens = np.arange(1, 500, 7)
    timings = pd.DataFrame({"num_workers": 4, "devices_per_node": 4, "size": tokens * 4096 * 2})
    timings["time_stats.all_reduce.median"] = 0.03 + 2e-4 * tokens
    reduce = fit_all_reduce(timings, 4, 4096, 500)
    assert reduce.coefficients == pytest.approx((3e-5, 2e-7), rel=1e-6)
    line, attention = parts(layer_timings()), Fit((1e-6, 0.0, 1.0), 0, 0, 9)
    alone = Parts(line, parts(layer_timings(), (1, 560)), attention, 1e-8, attention, 0.0, 1000)
    plain, folded = (step_cost(LLAMA, A30, p) for p in (alone, replace(alone, all_reduce=reduce)))
    for n, mixed in ((1, False), (40, False), (300, True)):
        more = folded.step_seconds(n, n, 0, mixed=mixed) - plain.step_seconds(n, n, 0, mixed=mixed)
        assert more == pytest.approx(2 * 32 * (3e-5 + 2e-7 * n), rel=1e-6)


def test_a_profile_scaled_to_another_model_keeps_its_rates():
    from astrolabe_lab.fit.others import scaled

    small = MODELS["Qwen/Qwen2.5-3B"]
    frame = scaled(layer_timings(), LLAMA, small)
    for name, weights in LLAMA.weights.items():
        column = f"time_stats.{name}.median"
        assert (frame[column] / weights * LLAMA.weights[name] / small.weights[name] * weights).to_numpy() == (
            pytest.approx(layer_timings()[column].to_numpy())
        )
    assert (frame["time_stats.emb.median"] == 0.01).all()


# The shipped presets


def test_there_is_a_preset_for_every_gpu_and_model_that_the_papers_and_the_measured_run_used():
    assert presets() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_says_what_it_rests_on(name):
    chosen = preset(name)
    assert chosen.name == name
    for told in (chosen.model, chosen.device, chosen.date, chosen.source, chosen.engine):
        assert told
    for key in KEYS:
        if getattr(chosen.cost.mixed, key) > 0 or getattr(chosen.cost.decode, key) > 0:
            assert chosen.derivation[key]
    assert chosen.derivation["host_s"] and chosen.derivation["mixed_grid"]
    assert all({"over", "mean_abs_pct", "worst_pct", "points"} <= set(entry) for entry in chosen.error.values())


@pytest.mark.parametrize("name", NAMES)
def test_no_preset_holds_a_table_of_timings(name):
    for grid in filter(None, (preset(name).cost.decode_grid, preset(name).cost.mixed_grid)):
        assert np.size(grid.seconds) <= 24, "knots of a fit, not timings"


def test_presets_that_are_derived_say_so():
    derivation = preset("qwen2.5-3b-a40").derivation
    assert all("derived" in derivation[key] for key in ("base_s", "mixed_grid", "per_kv_token_s", "attention_s"))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_never_beats_the_memory_that_it_reads(name):
    chosen = preset(name)
    model = MODELS[next(m for m in MODELS if m in chosen.model)]
    gpu = next(g for g in DEVICES if g.replace("RTXPRO6000", "RTX PRO 6000").split("-")[0] in chosen.device)
    gpu = "A100-40GB" if "40 GB" in chosen.device and "A100" in chosen.device else gpu
    gpu = "A100-80GB" if "80 GB" in chosen.device else gpu
    degree = 4 if "four GPUs" in chosen.model else 1
    layers = model.layers * sum(model.weights.values()) + model.head_weights
    for sequences, context in ((1, 300), (20, 6000), (48, 16_000)):
        read = (2 * layers + model.layers * model.kv_bytes * context) / degree / DEVICES[gpu].bytes_s
        assert 1 < chosen.cost.step_seconds(sequences, sequences, context) / read < 1.9


def test_the_papers_kv_blocks_are_the_presets():
    papers = {"llama2-7b-a30": 1056, "qwen2-7b-a30": 7289, "llama2-70b-tp4-a100-40gb": 806}
    assert {name: preset(name).engine["num_gpu_blocks"] for name in papers} == papers
    assert preset("qwen2.5-3b-a40").engine["num_gpu_blocks"] * 16 == 60_000


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_covers_what_its_own_engine_can_schedule(name):
    from astrolabe_lab.sim.config import EngineConfig

    chosen = preset(name)
    config = EngineConfig.from_dict(chosen.engine)
    assert chosen.cost.outside(config) == []
    wider = EngineConfig.from_dict(chosen.engine | {"max_num_seqs": 1000, "max_num_batched_tokens": 10_000})
    assert any("sequences" in line for line in chosen.cost.outside(wider))
    assert any("new tokens" in line for line in chosen.cost.outside(wider))


# With the timings


@pytest.mark.shared
def test_refitting_the_public_timings_gives_the_shipped_presets(shared):
    from astrolabe_lab.fit.data import Timings
    from astrolabe_lab.fit.presets import PRESETS

    assert sorted(PRESETS) == presets()
    timings = Timings(shared / "data")
    for name, derive in PRESETS.items():
        again, shipped = derive(timings), preset(name)
        np.testing.assert_allclose(again.cost.array, shipped.cost.array, rtol=1e-6)
        for grid in ("decode_grid", "mixed_grid"):
            ours, theirs = getattr(again.cost, grid), getattr(shipped.cost, grid)
            assert (ours is None) == (theirs is None)
            if ours:
                np.testing.assert_allclose(ours.array, theirs.array, rtol=1e-6)
        assert again.cost.fitted == shipped.cost.fitted
        for field in ("engine", "model", "device", "source", "derivation", "date"):
            assert getattr(again, field) == getattr(shipped, field)
        for part, entry in again.error.items():
            assert shipped.error[part]["mean_abs_pct"] == pytest.approx(entry["mean_abs_pct"], abs=0.02)


@pytest.mark.shared
def test_the_module_prints_one_preset_and_refuses_a_folder_without_timings(shared, tmp_path):
    def run(*words):
        command = [sys.executable, "-m", "astrolabe_lab.fit", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    done = run(shared / "data", "--preset", "qwen2-7b-a30")
    assert json.loads(done.stdout) == json.loads(json.dumps(preset("qwen2-7b-a30").to_dict()))
    lost = run(tmp_path)
    assert lost.returncode == 2 and "give the folder that holds astrolabe/ and vidur/" in lost.stderr


@pytest.mark.shared
def test_the_fitted_lines_stay_within_the_stated_error_of_the_timings(shared):
    name = "profiling__compute__a30__meta-llama__Llama-2-7b-hf__mlp.csv.gz"
    frame = pd.read_csv(shared / "data" / "astrolabe" / name)
    frame = frame[(frame.num_tensor_parallel_workers == 1) & (frame.num_tokens <= 48)]
    per_layer = [c for c in frame.columns if c.endswith(".median") and "emb" not in c]
    measured = (32 * frame[per_layer].sum(axis=1) + frame["time_stats.emb.median"]).to_numpy() / 1e3
    decode = preset("llama2-7b-a30").cost.decode
    line = decode.base_s + decode.per_token_s * frame.num_tokens.to_numpy()
    head_and_attention = np.median(line - measured)
    assert 0.0005 < head_and_attention < 0.002
    assert np.max(np.abs((line - head_and_attention) / measured - 1)) < 0.055


@pytest.mark.shared
def test_the_derived_decode_attention_agrees_with_another_model_on_the_same_gpu(shared):
    name = "profiling__compute__a30__Qwen__Qwen-2-7B__attention.csv.gz"
    rows = pd.read_csv(shared / "data" / "astrolabe" / name)
    rows = rows[~rows.is_prefill & (rows.batch_size >= 8)]
    kv_bytes = rows.batch_size * rows.kv_cache_size * 2048
    rows, kv_bytes = rows[kv_bytes.between(1e8, 3e8)], kv_bytes[kv_bytes.between(1e8, 3e8)]
    decode = preset("llama2-7b-a30").cost.decode
    ours = (decode.per_seq_s * rows.batch_size + decode.per_kv_token_s * kv_bytes / 16_384) / 32
    theirs = rows["time_stats.attn_decode.median"] / 1e3
    assert len(rows) > 1000
    assert (theirs / ours).median() == pytest.approx(1, abs=0.06)
    assert (theirs / ours).between(0.8, 1.25).mean() > 0.98


@pytest.mark.shared
def test_llama2_70b_over_four_gpus_agrees_with_whole_model_timings_of_another_source(shared):
    """Splitwise measured the whole model over four A100-80GB: a prompt of 512, and decodes with their host overhead."""
    rows = pd.read_csv(shared / "data/vidur/splitwise/perf_model.csv")
    rows = rows[(rows.model == "llama2-70b") & (rows.hardware == "a100-80gb") & (rows.tensor_parallel == 4)]
    at = rows[rows.prompt_size == 512].groupby("batch_size")[["prompt_time", "token_time"]].median() / 1e3
    cost = preset("llama2-70b-tp4-a100-40gb").cost
    assert cost.step_seconds(512, 1, 0, 512**2 / 2, mixed=True) == pytest.approx(at.prompt_time[1], rel=0.1)
    assert cost.step_seconds(1, 1, 576) == pytest.approx(at.token_time[1], rel=0.2)
