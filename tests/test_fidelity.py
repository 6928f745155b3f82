"""Claims about replaying a measured run on layer timings: a made-up GPU's, and a real one's."""

import json
import shutil

import numpy as np
import pytest

from astrolabe_lab import cli
from astrolabe_lab.errors import InputError

pd = pytest.importorskip("pandas")


def loaded(timings, run):
    from astrolabe_lab.fidelity.layers import LayerTimings
    from astrolabe_lab.fidelity.measured_run import MeasuredRun

    return LayerTimings.load(timings), MeasuredRun.load(run)


@pytest.fixture(scope="module")
def gpu():
    from astrolabe_lab.fidelity.made_up_gpu import MadeUpGpu

    return MadeUpGpu()


@pytest.fixture(scope="module")
def exact(gpu, tmp_path_factory):
    """(timings, run) folders of the made-up GPU, without noise."""
    folder = tmp_path_factory.mktemp("made_up")
    return gpu.write_timings(folder / "timings", noise=0), gpu.write_run(folder / "run", requests=120, qps=12)


@pytest.fixture
def copies(exact, tmp_path):
    """Copies of both folders, to damage."""
    return tuple(shutil.copytree(folder, tmp_path / name) for folder, name in zip(exact, ("t", "r"), strict=True))


def errors(check):
    return check.table.set_index(["metric", "statistic"]).error_pct


# A made-up GPU: the law is known


def test_timings_without_noise_replay_a_run_on_their_law(exact, gpu):
    from astrolabe_lab.fidelity import compare

    check = compare(*loaded(*exact), host_s=gpu.host_s, spread_share=0)
    found = errors(check)
    assert found["tpot"].abs().max() < 0.3 and found["latency"].abs().max() < 0.3
    assert abs(found["ttft", "mean"]) < 3, "a request that just misses a step waits for a whole one"
    assert check.fits["mixed"].error_pct < 1e-6 and check.fits["decode"].worst_pct < 1


def test_what_the_host_takes_is_missed_by_as_much_when_it_is_left_out(exact, gpu):
    from astrolabe_lab.fidelity import compare

    check = compare(*loaded(*exact), host_s=0, spread_share=0)
    lost = 100 * gpu.host_s / check.table.set_index(["metric", "statistic"]).measured_s["tpot", "median"]
    assert errors(check)["tpot", "median"] == pytest.approx(-lost, rel=0.25)


def test_whole_steps_made_of_layers_are_priced_as_the_law_prices_them(exact, gpu):
    from astrolabe_lab.sim.engine import EngineConfig

    engine = EngineConfig(max_num_seqs=128, max_num_batched_tokens=2048, num_gpu_blocks=40_000, max_model_len=8192)
    steps = loaded(*exact)[0].iterations(gpu.shape, engine, longest=4096)
    assert set(steps.mixed) == {True, False} and len(steps) > 1000
    law = [
        gpu.cost().step_seconds(*row) - gpu.host_s
        for row in steps[["new_tokens", "sequences", "context_tokens", "attention", "mixed"]].to_numpy()
    ]
    np.testing.assert_allclose(steps.seconds, law, rtol=0.01)
    assert abs((steps.seconds / law - 1).mean()) < 1e-3


def test_iterations_of_layers_go_into_the_linear_fit(exact, gpu):
    from astrolabe_lab.fit import fit
    from astrolabe_lab.sim.engine import EngineConfig

    engine = EngineConfig(max_num_seqs=64, max_num_batched_tokens=512, num_gpu_blocks=10_000)
    found = fit(loaded(*exact)[0].iterations(gpu.shape, engine, longest=4096), quiet=True, draws=20)
    per_kv = gpu.shape.layers * gpu.shape.kv_bytes / gpu.bytes_s
    assert found.cost.decode.per_kv_token_s == pytest.approx(per_kv, rel=0.02)
    assert found.cost.mixed.per_kv_token_s == pytest.approx(gpu.mixing * per_kv, rel=0.05)


def test_batches_of_unequal_contexts_take_longer_by_the_stated_share(exact):
    from astrolabe_lab.fidelity.layers import Spread

    timings = loaded(*exact)[0]
    equal = Spread.of([500] * 4, [1] * 4, share=0.1)
    np.testing.assert_allclose(equal.longest_over_mean([1, 4, 64]), 1)
    wide = Spread.of([100, 100, 100, 1700], [1] * 4, share=0.1)
    n = np.array([1, 2, 16, 128])
    chance = 1 - 0.75**n
    np.testing.assert_allclose(wide.longest_over_mean(n), (100 + 1600 * chance) / 500)
    plain = timings.decode_attention_s(n, 500.0)
    longest = timings.decode_attention_s(n, 500.0 * wide.longest_over_mean(n))
    np.testing.assert_allclose(timings.decode_attention_s(n, 500.0, wide), 0.9 * plain + 0.1 * longest)


def test_the_default_graph_sizes_are_vllms():
    from astrolabe_lab.fidelity import pad_sizes_of
    from astrolabe_lab.sim.engine import EngineConfig

    assert pad_sizes_of(EngineConfig(max_num_seqs=16)) == (1, 2, 4, 8, 16, 24, 32)
    large = pad_sizes_of(EngineConfig(max_num_seqs=512))
    assert large[-3:] == (480, 496, 512) and 248 in large and 256 in large and 264 not in large


def test_kv_capacity_is_what_the_run_recorded_or_derived_from_memory_or_given(copies):
    from astrolabe_lab.cost.shapes import DEVICES, MODELS, RESERVE_BYTES
    from astrolabe_lab.fidelity import engine_of

    shape = MODELS["meta-llama/Llama-3.1-8B"]
    run = loaded(*copies)[1]
    assert engine_of(run, shape)[0].num_gpu_blocks == 20_000
    del run.flags["num_gpu_blocks"]
    with pytest.raises(InputError, match="give --device, or --engine num_gpu_blocks=N"):
        engine_of(run, shape)
    config, notes = engine_of(run, shape, DEVICES["RTX4090"])
    free = 0.9 * DEVICES["RTX4090"].memory_bytes - shape.weight_bytes - RESERVE_BYTES
    assert config.num_gpu_blocks == int(free // (16 * 32 * 4096))
    assert config.num_gpu_blocks == pytest.approx(2588, abs=10), "what vLLM chose there"
    assert "derived" in notes[0]
    config, notes = engine_of(run, shape, overrides="num_gpu_blocks=900,async_scheduling=true")
    assert (config.num_gpu_blocks, config.async_scheduling) == (900, True) and "as given" in notes[0]


def test_what_overrides_change_is_derived_and_told_with_them(copies):
    from astrolabe_lab.cost.shapes import DEVICES, MODELS
    from astrolabe_lab.fidelity import engine_of

    run, shape = loaded(*copies)[1], MODELS["meta-llama/Llama-3.1-8B"]
    config, notes = engine_of(run, shape, overrides="block_size=32,enable_prefix_caching=false")
    assert (config.num_gpu_blocks, config.block_size) == (10_000, 32), "the same tokens"
    assert "10000 blocks of 32, as the run recorded: 20000 of 16" in notes[0]
    assert not config.enable_prefix_caching and not any("prefix caching" in note for note in notes)
    del run.flags["num_gpu_blocks"]
    gpu = DEVICES["RTX4090"]
    sixteen, thirty_two = (engine_of(run, shape, gpu, f"block_size={size}")[0].num_gpu_blocks for size in (16, 32))
    assert thirty_two == sixteen // 2
    on = "enable_prefix_caching=true,async_scheduling=true"
    assert [note.split(";")[0] for note in engine_of(run, shape, gpu, on)[1][1:]] == [
        "async_scheduling=True: as given",
        "prefix caching is on, as given",
    ]


def test_asynchronous_scheduling_is_vllms_default_of_the_runs_version(copies):
    from dataclasses import replace

    from astrolabe_lab.cost.shapes import MODELS
    from astrolabe_lab.fidelity import engine_of

    run, shape = loaded(*copies)[1], MODELS["meta-llama/Llama-3.1-8B"]
    del run.flags["async_scheduling"]
    for version, default in (("0.12.0", False), ("0.14.0", True), ("0.19.1", True), ("1.0", True)):
        config, notes = engine_of(replace(run, vllm_version=version), shape)
        assert config.async_scheduling is default and f"the default of vLLM {version}" in notes[1]


def test_the_noise_of_timings_averages_out(gpu, exact, tmp_path):
    from astrolabe_lab.fidelity import compare

    timings = gpu.write_timings(tmp_path / "noisy", noise=0.05)
    check = compare(*loaded(timings, exact[1]), host_s=gpu.host_s, spread_share=0)
    assert 0.1 < check.fits["mixed"].error_pct < 5
    assert abs(errors(check)["tpot", "mean"]) < 3


# Damaged and foreign files

HEADER = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"


@pytest.mark.parametrize(
    ("name", "damage", "named"),
    [
        ("attention.csv", None, r"attention.csv'.*No such file.*attention.csv, dense.csv, per_sequence.csv"),
        ("dense.csv", "", "cannot be read as CSV"),
        ("dense.csv", "layer,tokens\nqkv_proj,1\n", "lack time_us"),
        ("dense.csv", "layer,tokens,time_us\nqkv_proj,1,fast\n", "line 2 has time_us='fast'"),
        ("dense.csv", "layer,tokens,time_us\nqkv_proj,1,0\n", "no number above 0"),
        ("dense.csv", "layer,tokens,time_us\nmoe,1,3.5\n", "unknown layer moe; known: layernorm"),
        ("dense.csv", "layer,tokens,time_us\nqkv_proj,1,3.5\n", "lacks o_proj, gate_up_proj, down_proj"),
        ("dense.csv", "layer,tokens,time_us\n", "hold no rows"),
        ("attention.csv", f"{HEADER}\n0,0,1,16,8\n", "no batch with a prefill"),
        ("attention.csv", f"{HEADER}\n16,0,1,16,8\n", "that only decodes"),
        ("attention.csv", "\x00\xff", "attention.csv"),
    ],
)
def test_damaged_timings_are_refused_by_file_and_line(copies, name, damage, named):
    file = copies[0] / name
    file.unlink() if damage is None else file.write_text(damage)
    with pytest.raises(InputError, match=named):
        loaded(*copies)


def test_what_was_timed_twice_has_the_mean_of_its_times(copies):
    once = loaded(*copies)[0].attention
    file = copies[0] / "attention.csv"
    rows = pd.read_csv(file)
    pd.concat([rows.assign(time_us=rows.time_us * share) for share in (0.9, 1.1)]).to_csv(file, index=False)
    pd.testing.assert_frame_equal(loaded(*copies)[0].attention, once)


@pytest.mark.parametrize(
    ("kept", "seqs", "named"),
    [
        ("prefill_chunk == 0 or n_decode + kv_prefill == 0", 128, "none .* that has a prefill chunk beside decodes or"),
        ("prefill_chunk > 0 or n_decode == n_decode.max()", 8, "none .* that only decodes is one this engine could"),
    ],
)
def test_timings_without_a_kind_of_batch_are_refused_by_that_kind(copies, kept, seqs, named):
    from astrolabe_lab.fidelity import compare

    attention = pd.read_csv(copies[0] / "attention.csv")
    between = attention.assign(kv_decode=attention.kv_decode + (attention.n_decode > 0))
    pd.concat([attention, between]).query(kept).to_csv(copies[0] / "attention.csv", index=False)
    with pytest.raises(InputError, match=named):
        compare(*loaded(*copies), engine=f"max_num_seqs={seqs}")


REQUEST = {"input_toks": 5, "output_toks": 2, "queued_ts": 1.0, "first_token_ts": 2.0, "last_token_ts": 3.0}


@pytest.mark.parametrize(
    ("name", "damage", "named"),
    [
        ("meta.json", None, "meta.json: cannot read .*No such file"),
        ("meta.json", "{", "is not JSON"),
        ("meta.json", "[]", "is not a JSON object"),
        ("meta.json", "{}", "lacks engine_kwargs or vllm_version"),
        ("meta.json", {"vllm_version": "0.19.0", "engine_kwargs": {"tensor_parallel_size": 2}}, "runs of one GPU"),
        ("meta.json", {"vllm_version": "0.19.0", "engine_kwargs": {"kv_cache_dtype": "fp8"}}, "kv_cache_dtype=fp8"),
        ("requests.jsonl", None, "requests.jsonl.*No such file"),
        ("requests.jsonl", "", "holds no requests"),
        ("requests.jsonl", "{}\n", r"line 1 is no request with input_toks"),
        ("requests.jsonl", "\n\n3\n", "line 3 is no request"),
        ("requests.jsonl", REQUEST | {"output_toks": 0}, "must be whole numbers >= 1"),
        ("requests.jsonl", REQUEST | {"queued_ts": None}, "must be numbers"),
        ("requests.jsonl", REQUEST | {"queued_ts": -(10**400)}, "must be numbers of seconds"),
        ("requests.jsonl", "[" * 100_000, "line 1 is no request"),
        ("meta.json", {"vllm_version": "0.19.0", "engine_kwargs": {}, "resolved_config": [1]}, "resolved_config is"),
        ("meta.json", {"vllm_version": "0.19.0", "engine_kwargs": {}, "hardware": "A30"}, "hardware is 'A30'; it must"),
        ("requests.jsonl", REQUEST | {"first_token_ts": 9.0}, "must follow each other"),
    ],
)
def test_a_damaged_run_is_refused_by_file_and_line(copies, name, damage, named):
    file = copies[1] / name
    file.unlink() if damage is None else file.write_text(damage if isinstance(damage, str) else json.dumps(damage))
    with pytest.raises(InputError, match=named):
        loaded(*copies)


def test_requests_that_the_engine_cannot_run_are_said_not_dropped(copies):
    from astrolabe_lab.fidelity import compare

    with pytest.raises(InputError, match=r"requests cannot run on this engine \(max_model_len=8192, num_gpu_blocks=20"):
        compare(*loaded(*copies), engine="num_gpu_blocks=20")


def test_an_unknown_model_is_refused_unless_its_shape_is_given(copies):
    from astrolabe_lab.cost.shapes import MODELS, Model
    from astrolabe_lab.fidelity import compare

    meta = json.loads((copies[1] / "meta.json").read_text())
    meta["engine_kwargs"]["model"] = meta["model"] = "some/other-8B"
    (copies[1] / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(InputError, match="unknown model 'some/other-8B'; known: .*config.json"):
        compare(*loaded(*copies))
    shape = MODELS["meta-llama/Llama-3.1-8B"]
    config = {
        "num_attention_heads": shape.heads, "num_hidden_layers": shape.layers, "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn, "num_key_value_heads": shape.kv_heads, "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.max_model_len,
    }  # fmt: skip
    (copies[1] / "config.json").write_text(json.dumps(config))
    assert Model.from_config(copies[1] / "config.json") == shape
    for change, named in (({"hidden_size": None}, "not a Hugging Face config"), ({"num_experts": 8}, "mixture")):
        (copies[1] / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(InputError, match=named):
            Model.from_config(copies[1] / "config.json")


# The command


def test_the_command_prints_one_json_object_and_writes_a_row_a_request(exact, tmp_path, capsys):
    words = ["fidelity", "--timings", str(exact[0]), "--run", str(exact[1]), "--host-s", "2e-4", "--spread", "0"]
    assert cli.main([*words, "--json", "--out", str(tmp_path / "requests.parquet")]) == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["table"]) == 15 and record["requests"] == 120 and record["preemptions"] == 0
    columns = {"metric", "statistic", "measured_s", "simulated_s", "error_pct", "peer_error_pct"}
    assert all(set(row) == columns for row in record["table"])
    assert record["engine"]["num_gpu_blocks"] == 20_000 and record["wall_s"] < 1
    rows = pd.read_parquet(tmp_path / "requests.parquet")
    assert len(rows) == 120 and {"ttft_s", "sim_ttft_s", "sim_latency_s"} <= set(rows)
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "TTFT mean" in said and "async_scheduling=False" in said and "own simulator" not in said


def test_the_command_says_what_is_missing_in_one_line(exact, tmp_path, capsys):
    assert cli.main(["fidelity", "--timings", str(tmp_path), "--run", str(exact[1])]) == 2
    assert capsys.readouterr().err.count("astrolabe: error: layer timings") == 1
    assert cli.main(["fidelity", "--timings", str(exact[0]), "--run", str(exact[1]), "--device", "H9000"]) == 2
    assert "unknown device 'H9000'; known: A30" in capsys.readouterr().err
    assert cli.main(["fidelity", "--timings", str(exact[0]), "--run", str(exact[1]), "--spread", "1.5"]) == 2
    assert "share=1.5 must be in [0, 1)" in capsys.readouterr().err


# A real GPU


@pytest.fixture(scope="module")
def measured(shared):
    folder = shared / "data" / "vidur" / "llmservingsim"
    return folder / "RTXPRO6000_Llama-3.1-8B_bf16_tp1", folder / "measured_vllm" / "RTXPRO6000_Llama-3.1-8B"


@pytest.mark.shared
def test_a_measured_run_is_replayed_within_the_targets(measured):
    from astrolabe_lab.fidelity import compare

    check = compare(*loaded(*measured))
    mean = errors(check).xs("mean", level="statistic")
    assert abs(mean["ttft"]) < 5 and abs(mean["tpot"]) < 3 and abs(mean["latency"]) < 3
    assert len(check.requests) == 300
    assert check.engine.async_scheduling and check.engine.enable_prefix_caching
    assert 30_000 < check.engine.num_gpu_blocks < 40_000
    sources = ("host_s=160 us", "11133", "0.0535", "KV capacity")
    for word in (*sources, "async_scheduling=True", "prefix caching is on", "0 preemptions"):
        assert any(word in note for note in check.notes), word


@pytest.mark.shared
def test_the_measured_side_is_computed_as_the_runs_own_summary_does(measured):
    from astrolabe_lab.fidelity import compare

    check = compare(*loaded(*measured))
    table = check.table.set_index(["metric", "statistic"])
    found = 0
    for line in (measured[1] / "summary.txt").read_text().splitlines():
        words = line.split()
        if words and words[0] in ("TTFT", "TPOT", "Latency"):
            row = table.loc[words[0].lower(), words[1].lower()]
            assert row.measured_s * 1e3 == pytest.approx(float(words[2]), abs=0.06)
            assert row.peer_error_pct == float(words[4].rstrip("%"))
            found += 1
    assert found == 15


@pytest.mark.shared
def test_no_measured_time_moves_the_replay(measured, tmp_path):
    """Every measured time but the arrivals is doubled: the simulated times must stay what they are."""
    from astrolabe_lab.fidelity import compare

    run = shutil.copytree(measured[1], tmp_path / measured[1].name)
    run.chmod(0o755)
    lines = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    for line in lines:
        for name in ("first_token_ts", "last_token_ts"):
            line[name] = line["queued_ts"] + 2 * (line[name] - line["queued_ts"])
    (run / "requests.jsonl").unlink()
    (run / "requests.jsonl").write_text("\n".join(map(json.dumps, lines)))
    real, doubled = (compare(*loaded(measured[0], folder)).table for folder in (measured[1], run))
    assert (real.simulated_s == doubled.simulated_s).all()
    np.testing.assert_allclose(doubled.measured_s, 2 * real.measured_s)


@pytest.mark.shared
def test_the_preset_of_that_gpu_replays_the_run_nearly_as_well_as_the_timings(measured):
    from astrolabe_lab.cost import preset
    from astrolabe_lab.fidelity import error_table
    from astrolabe_lab.sim.engine import EngineConfig, run_one

    chosen, run = preset("llama3.1-8b-rtxpro6000"), loaded(*measured)[1]
    replayed, _ = run_one(run.requests, EngineConfig.from_dict(chosen.engine), chosen.cost, log=False)
    requests = run.requests.assign(sim_ttft_s=replayed.ttft_s, sim_tpot_s=replayed.tpot_s, sim_latency_s=replayed.e2e_s)
    mean = error_table(requests).set_index(["metric", "statistic"]).error_pct.xs("mean", level="statistic")
    assert abs(mean["tpot"]) < 8 and abs(mean["latency"]) < 10
