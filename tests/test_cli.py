"""The command line, in processes of its own where that matters, and in this one for the many ways to be wrong."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from astrolabe_lab import arrivals, cli, cost, length, policies, result, trace
from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.sim.cluster import ControlPlane, simulate

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = "doctor run simulate report policies trace compare capacity".split()


def command(*words) -> list[str]:
    return [sys.executable, "-m", "astrolabe_lab.cli", *map(str, words)]


def astrolabe(*words, **options) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command(*words), capture_output=True, text=True, env=environment, timeout=300, **options)


@pytest.fixture(scope="module")
def requests():
    return sharegpt_like.generate(120, seed=3, text=False)


@pytest.fixture
def files(tmp_path, requests):
    """A folder with ``t.csv`` (no times) and what makes a simulation of it."""
    trace.save(requests, tmp_path / "t.csv")
    return tmp_path


def words_for(folder, out="r.parquet", **changes):
    """The words of a valid ``simulate``; ``changes`` replace or, with None, remove options."""
    options = {
        "trace": folder / "t.csv",
        "qps": 4,
        "policy": "least_loaded",
        "instances": 2,
        "out": folder / out,
    }
    options |= changes
    return ["simulate"] + [str(w) for k, v in options.items() if v is not None for w in (f"--{k.replace('_', '-')}", v)]


# --- simulate: the result -----------------------------------------------------------------------------------


def test_simulate_writes_what_the_library_returns(files, requests):
    assert cli.main(words_for(files, policy="astrolabe:k=2", lengths="noisy:0.3", seed=5)) == 0
    preset = cost.preset("llama2-7b-a30")
    timed = length.attach(arrivals.with_arrivals(requests, 4, seed=5), "noisy:0.3", seed=5)
    expected = simulate(timed, policies.parse("astrolabe:k=2"), instances=2, cost=preset.cost, seed=5)
    written = pd.read_parquet(files / "r.parquet")
    pd.testing.assert_frame_equal(
        written.drop(columns="decision_s"), result.ordered(expected).drop(columns="decision_s")
    )


def test_every_request_has_one_row_and_the_columns_follow_the_contract(files, requests):
    assert cli.main(words_for(files)) == 0
    written = pd.read_parquet(files / "r.parquet")
    assert written["rid"].tolist() == requests["rid"].tolist()
    contract = [name for name in (*result.TRACE_COLUMNS, *result.COLUMNS) if name in written]
    assert list(written.columns) == contract
    pools = {name for name in result.COLUMNS if name.startswith(("prefill", "decode", "transfer"))}
    caching = {"cached_tokens"}  # where prompts are cached
    assert set(result.COLUMNS) - pools - caching <= set(contract)
    assert set(written["source"]) == {"simulated"}


@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_csv_holds_the_same_rows_as_parquet(files, suffix):
    for name in ("r.parquet", f"r.{suffix}"):
        assert cli.main(words_for(files, out=name)) == 0
    pd.testing.assert_frame_equal(
        pd.read_csv(files / f"r.{suffix}").drop(columns="decision_s"),
        pd.read_parquet(files / "r.parquet").drop(columns="decision_s"),
        check_dtype=False,
        rtol=0,
        atol=0,
    )


def test_the_result_says_how_it_came_about(files):
    words = words_for(files, engine="max_num_seqs=8", cost="base_s=0.02", lengths="oracle", delays="paper", routers=2)
    assert cli.main([*words, "--latency-noise", "common=0.1,candidate=0.2"]) == 0
    about = pd.read_parquet(files / "r.parquet").attrs["astrolabe"]
    assert about["engine"]["max_num_seqs"] == 8
    assert about["cost"]["mixed"]["base_s"] == 0.02
    assert about["cost"]["mixed"]["per_token_s"] == 0, "without a preset, keys left out are zero"
    assert about["control"] == json.loads(json.dumps({**vars(ControlPlane.paper()), "routers": 2})), (
        "a given delay replaces the paper's, the others stay"
    )
    assert about["latency_noise"] == {"common": 0.1, "candidate": 0.2}
    assert about["qps"] == 4


def test_two_policies_at_one_seed_see_the_same_arrivals(files):
    for policy in ("random", "round_robin"):
        assert cli.main(words_for(files, policy=policy, out=f"{policy}.parquet", seed=9)) == 0
    seen = [pd.read_parquet(files / f"{policy}.parquet") for policy in ("random", "round_robin")]
    assert seen[0]["arrived_s"].equals(seen[1]["arrived_s"])
    assert not seen[0]["instance"].equals(seen[1]["instance"])


def test_limit_takes_the_first_requests(files, requests):
    assert cli.main(words_for(files, limit=7)) == 0
    assert pd.read_parquet(files / "r.parquet")["rid"].tolist() == requests["rid"].tolist()[:7]


def test_a_trace_with_times_is_replayed_at_its_own_times(files, requests):
    timed = arrivals.with_arrivals(requests, 3, "gamma", seed=1, alpha=0.5)
    trace.save(timed, files / "t.csv")
    assert cli.main(words_for(files, qps=None)) == 0
    assert pd.read_parquet(files / "r.parquet")["arrived_s"].tolist() == timed["arrived_s"].tolist()


def test_json_is_one_object_on_stdout_and_logs_go_to_stderr(files):
    done = astrolabe(*words_for(files), "--json")
    assert done.returncode == 0
    record = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert record["preset"] == "llama2-7b-a30"
    assert record["rows"] == record["summary"]["n"] == record["summary"]["ok"] == 120
    assert type(record["summary"]["n"]) is int


def test_json_writes_what_is_not_a_number_as_null(files, capsys):
    assert cli.main([*words_for(files, engine="max_model_len=2", limit=3), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert summary["rejected"] == 3
    assert summary["ttft_p99_s"] is None


def test_the_table_names_every_outcome_and_latency(files, capsys):
    assert cli.main(words_for(files, engine="max_model_len=600,max_num_batched_tokens=600")) == 0
    shown = capsys.readouterr().out
    rejected = (pd.read_parquet(files / "r.parquet")["status"] == "rejected").sum()
    assert 0 < rejected < 120
    assert f"120: {120 - rejected} ok, {rejected} rejected" in shown
    assert all(
        word in shown for word in ("TTFT s", "TPOT s", "E2E s", "throughput", "preemptions", "mean", "p50", "p99")
    )


def test_the_presets_are_listed_with_model_device_and_error(capsys):
    assert cli.main(["presets"]) == 0
    out = capsys.readouterr().out
    assert "llama2-7b-a30\n    meta-llama/Llama-2-7b-hf" in out and "NVIDIA A30" in out and out.count("mean error") == 7
    assert cli.main(["presets", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["presets"]) == set(cost.presets())


def test_a_summary_says_which_arrivals_and_whether_it_is_steady(files, capsys):
    assert cli.main(words_for(files)) == 0
    out = capsys.readouterr().out
    assert "arrivals    poisson at " in out and "regime      short: too short" in out


# --- wrong use ----------------------------------------------------------------------------------------------

WRONG = {
    "no trace of that name": ({"trace": "nowhere.csv"}, ["nowhere.csv"]),
    "unknown policy": ({"policy": "best"}, ["'best'", "allowed", "round_robin", "astrolabe"]),
    "unknown policy option": ({"policy": "astrolabe:q=2"}, ["'q'", "k, metric"]),
    "k above the instances": ({"policy": "astrolabe:k=9", "lengths": "oracle"}, ["k=9", "1..2"]),
    "lengths needed and absent": ({"policy": "astrolabe:k=2"}, ["predicted", "--lengths oracle"]),
    "lengths of a trace that has none": ({"lengths": "trace"}, ["predicted_tokens"]),
    "unknown lengths": ({"lengths": "perfect"}, ["'perfect'", "oracle", "constant:N"]),
    "no instances": ({"instances": 0}, ["--instances", "'0'", "from 1 up"]),
    "half an instance": ({"instances": "2.5"}, ["--instances", "'2.5'"]),
    "negative seed": ({"seed": "-1"}, ["--seed"]),
    "rate of zero": ({"qps": 0}, ["--qps", "> 0"]),
    "rate that is no number": ({"qps": "nan"}, ["--qps", "'nan'"]),
    "no rate and no times": ({"qps": None}, ["t.csv has no arrival times", "--qps"]),
    "arrivals without a rate": ({"qps": None, "arrivals": "poisson"}, ["--arrivals poisson", "--qps"]),
    "unknown arrivals": ({"arrivals": "weibull"}, ["'weibull'", "gamma"]),
    "gamma without its shape": ({"arrivals": "gamma"}, ["--alpha"]),
    "a shape without gamma": ({"alpha": 0.5}, ["--arrivals gamma"]),
    "unknown preset": ({"preset": "h100"}, ["'h100'", "llama2-7b-a30"]),
    "unknown cost key": ({"cost": "speed=1"}, ["'speed'", "base_s"]),
    "negative cost": ({"cost": "base_s=-1"}, ["base_s"]),
    "unknown engine key": ({"engine": "gpus=8"}, ["'gpus'", "max_num_seqs"]),
    "engine flag not modelled": (
        {"engine": "speculative_config=ngram"},
        ["speculative_config", "not modelled"],
    ),
    "engine value of a wrong type": ({"engine": "max_num_seqs=many"}, ["max_num_seqs=many"]),
    "unknown noise": ({"latency_noise": "all=1"}, ["--latency-noise", "common=REL"]),
    "prediction time reversed": ({"predict_s": "0.08,0.06"}, ["--predict-s", "LOW <= HIGH"]),
    "output of an unknown kind": ({"out": "r.xlsx"}, ["r.xlsx", ".parquet", ".csv"]),
    "output in no folder": ({"out": "missing/r.parquet"}, ["missing", "create it first"]),
    "output that is a folder": ({"out": "folder.parquet"}, ["folder.parquet is a folder"]),
    "no policy": ({"policy": None}, ["--policy", "simulate --help"]),
    "unknown option": ({"polcy": "random"}, ["--polcy", "--help"]),
}


@pytest.mark.parametrize("changes, fragments", WRONG.values(), ids=WRONG)
def test_wrong_use_is_one_clear_line_and_exit_code_2(files, monkeypatch, capsys, changes, fragments):
    monkeypatch.chdir(files)
    (files / "folder.parquet").mkdir()
    before = sorted(files.rglob("*"))
    assert cli.main([*words_for(files, **changes), "--json"]) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("astrolabe: error: ")
    assert [fragment for fragment in fragments if fragment not in lines[0]] == []
    assert json.loads(out) == {"error": lines[0].removeprefix("astrolabe: error: ")}
    assert sorted(files.rglob("*")) == before, "nothing is written"


def test_an_output_that_cannot_be_written_is_found_before_the_work(files, capsys, monkeypatch):
    monkeypatch.setattr(trace, "load", lambda *a, **k: pytest.fail("the work has started"))
    assert cli.main(words_for(files, out="no/such/folder/r.csv")) == 2
    assert cli.main(words_for(Path("/proc"), trace=files / "t.csv")) == 2
    assert "cannot write to /proc" in capsys.readouterr().err


def test_no_command_is_wrong_use_that_points_to_the_help(capsys):
    assert cli.main([]) == 2
    assert "astrolabe --help" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert f"example:\n  astrolabe {name}" in shown
    assert "--json" in shown


def test_help_tells_the_preset_that_engines_and_pools_have_by_default(capsys):
    from astrolabe_lab.cli.simulate import DEFAULT_PRESET
    from astrolabe_lab.engines.launch import PRESET
    from astrolabe_lab.serve.pools.launch import PRESET as OF_POOLS

    shown = {}
    for name in ("launch", "simulate"):
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        shown[name] = " ".join(capsys.readouterr().out.split())
    assert f"({PRESET}; pools: {OF_POOLS})" in shown["launch"]
    assert f"default: {DEFAULT_PRESET}; with --pools: the second paper's" in shown["simulate"]


# --- when things go wrong -----------------------------------------------------------------------------------


def broken(*_, **__):
    raise RuntimeError("the engine fell over")


def test_an_unexpected_error_is_one_line_and_exit_code_1(files, monkeypatch, capsys):
    monkeypatch.setattr(result, "save", broken)
    assert cli.main(words_for(files)) == 1
    err = capsys.readouterr().err
    assert "astrolabe: error: RuntimeError: the engine fell over (--debug shows where)" in err
    assert "Traceback" not in err


def test_debug_shows_the_traceback(files, monkeypatch, capsys):
    monkeypatch.setattr(result, "save", broken)
    assert cli.main([*words_for(files), "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_failed_write_leaves_the_old_result_and_no_litter(files, monkeypatch):
    assert cli.main(words_for(files, out="r.csv")) == 0
    before = (files / "r.csv").read_bytes()

    def half(frame, path, **_):
        Path(path).write_text("rid,arr")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_csv", half)
    assert cli.main(words_for(files, out="r.csv", seed=1)) == 1
    assert (files / "r.csv").read_bytes() == before
    assert sorted(p.name for p in files.iterdir()) == ["r.csv", "t.csv"]


def test_an_interrupt_is_quiet_and_leaves_nothing_behind(files):
    trace.save(arrivals.with_arrivals(sharegpt_like.generate(300_000, text=False), 20), files / "t.csv")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = command(*words_for(files, policy="min_qps", qps=None))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = subprocess.Popen(words, env=environment, **pipes)
    assert any("requests dispatched" in line for line in running.stderr)  # by then the work has begun
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert out == "" and "Traceback" not in err
    assert [p.name for p in files.iterdir()] == ["t.csv"]


def test_a_reader_that_hangs_up_is_no_complaint():
    read, write = os.pipe()
    os.close(read)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command("policies"), stdout=write, stderr=subprocess.PIPE, env=environment)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_under_stdout_is_a_failure():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command("policies"), stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert done.returncode == 1
    assert done.stderr == "astrolabe: error: cannot print the result: No space left on device\n"


# --- the other commands -------------------------------------------------------------------------------------


@pytest.fixture
def notebook(tmp_path):
    import nbformat

    cells = [
        nbformat.v4.new_code_cell("n = 3  # how many", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell("print(n * 2)\nassert n < 100, 'too many'"),
    ]
    path = tmp_path / "small.ipynb"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    return path


def test_run_takes_parameters_also_after_an_option_and_report_gathers_the_outcome(notebook, tmp_path, capsys):
    assert cli.main(["run", str(notebook), "--out", str(tmp_path / "out"), "n=21", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert "42" in Path(record["notebook"]).read_text()
    assert cli.main(["report", str(tmp_path / "out"), "--out", str(tmp_path / "report.html"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    page = Path(record["report"])
    assert page.stat().st_size == record["bytes"]
    assert "42" in page.read_text()


def test_a_misspelt_parameter_is_wrong_use(notebook, tmp_path, capsys):
    assert cli.main(["run", str(notebook), "m=21", "--out", str(tmp_path / "out")]) == 2
    assert "n" in capsys.readouterr().err


def test_a_notebook_that_fails_is_a_failure_that_names_the_cell(notebook, tmp_path, capsys):
    assert cli.main(["run", str(notebook), "n=500", "--out", str(tmp_path / "out")]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("astrolabe: error: small.ipynb: cell ")
    assert "(print(n * 2)) failed: AssertionError: too many" in last


def test_every_listed_policy_with_its_listed_options_is_one(capsys):
    assert cli.main(["policies", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["policies"]
    assert set(listed) == set(policies.NAMES)
    for name, policy in listed.items():
        options = ",".join(f"{key}={value}" for key, value in policy["options"].items())
        assert type(policies.parse(f"{name}:{options}")) is policies.NAMES[name]
        assert policy["about"].endswith(".")


def test_plain_json_has_no_numpy_and_no_infinity():
    import numpy as np

    mixed = {"a": np.int64(3), "b": [np.float64("inf"), (1.5, np.nan)], "c": np.bool_(True), "d": Path("x")}
    assert json.loads(cli._one_line_json(mixed)) == {"a": 3, "b": [None, [1.5, None]], "c": True, "d": "x"}
