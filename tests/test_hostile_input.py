"""Input that is damaged, absurd or hostile: one clear error, or the right result; never a crash, never a hang."""

import errno
import gzip
import io
import json
import math

import nbformat
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from astrolabe_lab import arrivals, cli, cost, generators, length, report, result, rng, trace
from astrolabe_lab.cost import StepCost, shapes
from astrolabe_lab.errors import InputError
from astrolabe_lab.fidelity.measured_run import MeasuredRun
from astrolabe_lab.parameters import parse_parameters
from astrolabe_lab.predictor import Predictor, empty_status
from astrolabe_lab.request import Request
from astrolabe_lab.run import run_notebook
from astrolabe_lab.sim.cluster import ControlPlane, Outage, simulate
from astrolabe_lab.sim.engine import EngineConfig, run_one
from astrolabe_lab.sweep import sweep
from astrolabe_lab.trace import files as trace_files

COST = StepCost.parse("base_s=0.01")
HEADER = "prompt_tokens,output_tokens\n"
HUGE = 2**31 - 1


def requests(n=20, qps=5.0, prompt=100, output=50):
    counts = {"prompt_tokens": prompt, "output_tokens": output, "predicted_tokens": output}
    return pd.DataFrame({"rid": range(n), "arrived_s": np.arange(n) / qps, **counts})


def run(trace=None, policy="round_robin", **options):
    options = {"instances": 2, "engine": EngineConfig(), "cost": COST} | options
    return simulate(requests() if trace is None else trace, policy, **options)


class Asking:
    """A policy that asks for a prediction of an instance that is none."""

    def __init__(self, index):
        self.index = index

    def choose(self, request, cluster, rng):
        return int(cluster.predict(request, "e2e_s", [self.index]).argmin())


# --- trace files --------------------------------------------------------------------------------------------


@pytest.fixture
def refusal(tmp_path):
    """Gives the error of loading a file with the given content."""

    def load(content, **options):
        path = tmp_path / "t.x"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(InputError) as raised:
            trace.load(path, **options)
        return str(raised.value)

    return load


def parquet(**columns):
    out = io.BytesIO()
    pq.write_table(pa.table({"prompt_tokens": [5, 6], "output_tokens": [2, 3]} | columns), out)
    return out.getvalue()


def test_a_file_of_nothing_but_a_byte_order_mark_is_empty(refusal):
    assert "is empty" in refusal(b"\xef\xbb\xbf")


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({"prompt_tokens": [True, True]}, "prompt_tokens is True"),
        ({"prompt_tokens": [[5], [6]]}, "prompt_tokens is"),
        ({"arrived_s": pa.array([1, 2], pa.timestamp("ns"))}, "arrived_s is"),
        ({"arrived_s": pa.array([1, 2], pa.duration("s"))}, "arrived_s is"),
        ({"prefix_blocks": [[1.5], [2.0]]}, "prefix_blocks is"),
        ({"prefix_blocks": ["1 x", "2 y"]}, "prefix_blocks is '1 x'"),
    ],
)
def test_what_only_casts_to_a_number_is_no_number(refusal, columns, name):
    message = refusal(parquet(**columns))
    assert "2 of 2 rows bad" in message and name in message


def test_prefix_blocks_read_the_same_from_text_in_parquet_as_in_csv(tmp_path):
    (tmp_path / "t.parquet").write_bytes(parquet(prefix_blocks=["12 13", "7"]))
    (tmp_path / "t.csv").write_text(f"{HEADER.strip()},prefix_blocks\n5,2,12 13\n6,3,7\n")
    for name in ("t.parquet", "t.csv"):
        assert trace.load(tmp_path / name)["prefix_blocks"].tolist() == [(12, 13), (7,)]


def test_ids_that_a_float_would_merge_are_refused(refusal):
    message = refusal(f"rid,{HEADER}{2**53 + 1},5,6\n")
    assert f"rid is '{2**53 + 1}'" in message and f"at most {2**53 - 1}" in message


@pytest.mark.parametrize("late", ["1e15", "1700000000000"])  # the latter: Unix time in ms
def test_times_at_which_a_step_would_vanish_in_rounding_are_refused(refusal, late):
    assert "at most 1e+10" in refusal(f"arrived_s,{HEADER}{late},5,6\n")


def test_years_that_nanoseconds_cannot_tell_are_refused(refusal):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n0001-01-01 00:00:00,5,6\n2023-01-01 00:00:00,5,6\n"
    assert "line 2: TIMESTAMP is '0001-01-01 00:00:00'" in refusal(text)


@pytest.mark.parametrize("inside", ["[" * 100_000, "9" * 5_000])
def test_json_past_what_the_reader_takes_is_no_json(refusal, inside):
    assert "not JSON" in refusal('[{"conversations":' + inside)
    assert "line 2: not JSON" in refusal('{"conversations":[]}\n[1]\n'.replace("[1]", '{"a":' + inside + "}"))


def test_a_line_separator_inside_a_json_string_ends_no_line(tmp_path):
    turns = [{"value": "a b \u2028 c d e"}, {"value": "a b c d e"}]
    line = json.dumps({"conversations": turns}, ensure_ascii=False)
    (tmp_path / "t.jsonl").write_text(f"{line}\n{line}\n", encoding="utf-8")
    assert len(trace.load(tmp_path / "t.jsonl")) == 2


def test_a_gzip_file_that_unpacks_without_end_is_refused(refusal, monkeypatch):
    monkeypatch.setattr(trace_files, "MAX_UNPACKED", 10_000)
    assert "unpacks to more than 10,000 bytes" in refusal(gzip.compress(bytes(10_001)))


def test_a_device_is_no_trace():
    with pytest.raises(InputError, match="/dev/zero is a device"):
        trace.load("/dev/zero")


@pytest.mark.parametrize("write", ["csv", "parquet"])
def test_a_file_of_too_many_columns_is_refused_at_its_header(refusal, monkeypatch, write):
    monkeypatch.setattr(trace_files, "MAX_COLUMNS", 100)
    names = [f"c{i}" for i in range(101)]
    content = ",".join(names) + "\n" if write == "csv" else parquet(**{name: [0, 0] for name in names[2:]})
    message = refusal(content)
    assert "has 101 columns, more than the 100" in message and len(message) < 400


def test_a_header_that_names_a_column_twice_is_told_by_that_name(refusal):
    message = refusal("rid,prompt_tokens,rid," + ",".join(f"c{i}" for i in range(1000)) + "\n")
    assert "names 'rid' more than once" in message and len(message) < 200


@pytest.mark.parametrize("many", [10**12, 2**70])
@pytest.mark.parametrize(
    "draw",
    [
        lambda n: generators.draw("sharegpt_like", n),
        lambda n: generators.draw("family:mixed", n),
        lambda n: trace.sample(requests(), n, 0, replace=True),
        lambda n: arrivals.unit_arrivals("poisson", n, 0),
    ],
)
def test_more_requests_than_fit_a_memory_are_refused_before_they_are_drawn(draw, many):
    with pytest.raises(InputError, match=f"n={many} is not usable.*at most 100,000,000"):
        draw(many)


def test_running_out_of_memory_is_told_in_a_line(monkeypatch, capsys):
    def hungry(*_, **__):
        raise MemoryError("Unable to allocate 72.8 TiB")

    monkeypatch.setattr("astrolabe_lab.doctor.examine", hungry)
    assert cli.main(["doctor"]) == 1
    assert "too little memory for that (Unable to allocate 72.8 TiB): ask for less" in capsys.readouterr().err


@pytest.mark.parametrize("read", [cost.preset, shapes.Model.from_config, lambda p: MeasuredRun.load(p.parent)])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe{", "not UTF-8"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "nested too deep"),
        (b"[1]", "not a JSON object"),
    ],
)
def test_a_json_file_that_is_none_is_named(tmp_path, read, content, says):
    path = tmp_path / "meta.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=says) as raised:
        read(path)
    assert "meta.json" in str(raised.value)


def test_a_million_rows_load_and_round_trip(tmp_path):
    frame = requests(1_000_000)
    pd.testing.assert_frame_equal(trace.load(trace.save(frame, tmp_path / "t.parquet")), frame, check_dtype=False)


# --- the simulator ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"instances": 10**9}, "at most 100,000"),
        ({"engine": {"max_num_seqs": 4}}, "is no EngineConfig"),
        ({"engine": [EngineConfig(), None]}, "engine: None is no EngineConfig"),
        ({"cost": 0.01}, "cost: 0.01 is no StepCost"),
        ({"predictor_cost": 3}, "predictor_cost: 3 is no StepCost"),
        ({"control": None}, "control: None is no ControlPlane"),
        ({"latency_noise": 0.3}, "LatencyNoise"),
        ({"faults": Outage(0, 1.0)}, "faults=.*"),
        ({"faults": None}, "faults: None is no list"),
        ({"extension_tokens": 0}, "extension_tokens=0"),
        ({"extension_tokens": 2**40}, "extension_tokens="),
        ({"seed": 2**70}, "below 2\\*\\*63"),
        ({"cost": StepCost.parse("base_s=1e308,per_token_s=1e308")}, "times grow past what a float can hold"),
    ],
)
def test_an_argument_that_is_none_is_named(bad, says):
    with pytest.raises(InputError, match=says):
        run(**bad)


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "astrolabe:k=2"])
def test_more_seats_than_requests_cost_no_memory_and_change_nothing(policy):
    seats = [EngineConfig(max_num_seqs=s, max_num_batched_tokens=HUGE) for s in (20, HUGE)]
    one, other = (run(policy=policy, engine=engine) for engine in seats)
    pd.testing.assert_frame_equal(one, other)


def test_a_request_met_twice_by_a_predictor_has_a_seat():
    """After an outage that the router has not noticed, it is in the engine's last status and on its way there again."""
    faults = [Outage(0, 0.05, 9.0, "redispatch", detected_after_s=5.0)]
    frame = run(requests(1), "astrolabe:k=1", instances=1, faults=faults, control=ControlPlane(status_interval_s=0.01))
    assert frame["status"].tolist() in (["ok"], ["failed"])


def test_ten_thousand_instances_serve_as_soon_as_two_that_never_queue():
    pd.testing.assert_series_equal(run(instances=10_000)["e2e_s"], run(requests(), instances=20)["e2e_s"])


def test_routers_beyond_the_requests_change_nothing():
    few, many = (run(policy="least_loaded", control=ControlPlane(routers=r)) for r in (20, 10**9))
    pd.testing.assert_frame_equal(few, many)


def test_a_status_interval_below_rounding_is_a_fresh_status_and_no_look_ahead():
    tiny = run(policy="least_loaded", control=ControlPlane(status_interval_s=5e-324))
    assert tiny["status"].eq("ok").all() and (tiny["ttft_s"] > 0).all() and tiny["instance"].nunique() == 2


def test_the_largest_token_counts_are_served_in_full():
    engine = EngineConfig(num_gpu_blocks=HUGE, max_model_len=HUGE, max_num_batched_tokens=HUGE)
    frame = run(requests(2, prompt=10**9, output=1000), engine=engine)
    assert frame["generated_tokens"].tolist() == [1000, 1000] and np.allclose(frame["e2e_s"], 10.0)


def test_the_smallest_cache_serves_what_fits_and_rejects_the_rest():
    engine = EngineConfig(block_size=1, num_gpu_blocks=2)
    assert run(engine=engine)["status"].eq("rejected").all()
    assert run(requests(prompt=1, output=1), engine=engine)["status"].eq("ok").all()


def test_a_step_log_that_fits_no_memory_is_refused_and_rejected_requests_take_no_room():
    with pytest.raises(InputError, match=r"1,000,000,004 rows.*log=False"):
        run_one(requests(1, prompt=10, output=10**9), EngineConfig(max_model_len=HUGE, num_gpu_blocks=HUGE), COST)
    results, steps = run_one(requests(9, prompt=10, output=10**9), EngineConfig(), COST)
    assert results["status"].eq("rejected").all() and steps.empty


def test_a_predictor_of_the_largest_engine_takes_no_memory():
    engine = EngineConfig(max_num_seqs=HUGE, max_num_batched_tokens=HUGE)
    found = Predictor(engine, COST).predict(empty_status(0.0, engine), Request(0, 0.0, 5, 5))
    assert math.isclose(found.e2e_s, 0.05)


def test_noise_past_what_a_float_holds_stays_within_what_a_length_can_be():
    predicted = length.attach(requests(), "noisy:1e308")["predicted_tokens"]
    assert set(predicted) == {1, 10**9}


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, True, None, "1"])
def test_a_seed_that_no_column_holds_is_refused(seed):
    with pytest.raises(InputError, match="seed="):
        rng.stream(seed, "policy")


# --- the command line ---------------------------------------------------------------------------------------


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text(HEADER + "5,6\n7,8\n")
    return "simulate --trace t.csv --qps 4 --policy least_loaded --instances 2 --out".split()


@pytest.mark.parametrize("alias", ["t.csv", "./x/../t.csv", "link.csv"])
def test_the_result_never_replaces_the_trace(words, tmp_path, capsys, alias):
    (tmp_path / "x").mkdir()
    (tmp_path / "link.csv").symlink_to("t.csv")
    assert cli.main([*words, alias]) == 2
    assert "is the trace itself" in capsys.readouterr().err
    assert (tmp_path / "t.csv").read_text() == HEADER + "5,6\n7,8\n"


def test_a_full_disk_is_told_with_the_file_and_the_old_one_stays(words, tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "Error writing bytes to file. Detail: [errno 28]")  # as pyarrow says it

    monkeypatch.setattr(pd.DataFrame, "to_parquet", full)
    for name, save in (("r.parquet", result.save), ("u.parquet", trace.save)):
        (tmp_path / name).write_text("old")
        with pytest.raises(OSError, match=f"{name}"):
            save(requests(3), tmp_path / name)
        assert (tmp_path / name).read_text() == "old"
    assert cli.main(["trace", "make", "t.csv", "--out", "u.parquet"]) == 1
    assert "error: u.parquet: No space left on device; free some space" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.parquet", "t.csv", "u.parquet"]


def test_a_name_longer_than_the_system_takes_is_wrong_use(words, capsys):
    assert cli.main([*words, "a" * 300 + ".csv"]) == 2
    assert "File name too long" in capsys.readouterr().err


# --- notebooks and reports ----------------------------------------------------------------------------------


@pytest.fixture
def notebook(tmp_path):
    """Writes a notebook of one code cell, without any metadata on a kernel; returns its path."""

    def write(source="print(repr(s))", parameters='s = "a"\nn = 3\nnone = None', name="n.ipynb"):
        code = nbformat.v4.new_code_cell
        cells = [code(parameters, metadata={"tags": ["parameters"]}), code(source)]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / name)
        return tmp_path / name

    return write


def test_a_notebook_runs_without_kernelspec_in_a_path_with_braces_and_takes_any_text(notebook, tmp_path):
    text = "é'\"\\ $x `{}\n\u4e2d"
    executed = run_notebook(notebook(name="a {b} é.ipynb"), {"s": text}, tmp_path / "o{ut}", cell_timeout_s=59.5)
    (output,) = nbformat.read(executed, as_version=4).cells[-1].outputs
    assert output.text == repr(text) + "\n"


@pytest.mark.parametrize("given", ["s=\udcff", "none=\udcff", "n=" + "9" * 5000])
def test_a_value_that_cannot_be_written_is_refused_in_a_line_of_sane_length(notebook, given):
    with pytest.raises(InputError, match="should be") as raised:
        parse_parameters(notebook(), [given])
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, "1"])
def test_a_cell_timeout_that_is_none_is_refused(notebook, seconds):
    with pytest.raises(InputError, match="cell_timeout_s="):
        run_notebook(notebook(), cell_timeout_s=seconds)


def test_a_folder_that_cannot_be_made_is_wrong_use(notebook, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file"):
        run_notebook(notebook(), out_dir=tmp_path / "file" / "sub")


def executed(folder, *outputs, **cell):
    """A folder with one executed notebook of these outputs."""
    made = {"cell_type": "code", "id": "a", "source": "1", "metadata": {}, "execution_count": 1, "outputs": [*outputs]}
    book = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [made | cell]}
    (folder / "n.ipynb").write_text(json.dumps(book))
    return folder


def shown(data):
    return {"output_type": "display_data", "metadata": {}, "data": data}


@pytest.mark.parametrize(
    "output",
    [
        {"output_type": "unheard-of"},
        {"output_type": "error", "ename": 5, "evalue": [], "traceback": [5]},
    ],
)
def test_a_notebook_of_a_wrong_form_is_refused_by_name(tmp_path, output):
    with pytest.raises(InputError, match=r"n\.ipynb is not a Jupyter notebook"):
        report.build(executed(tmp_path, output), tmp_path / "r.html")


def test_an_output_that_is_no_text_is_passed_over(tmp_path):
    folder = executed(tmp_path, shown({"image/png": {"a": 1}, "text/plain": "fine"}))
    assert "fine" in report.build(folder, tmp_path / "r.html").read_text()


def test_a_figure_with_nan_is_drawn_with_gaps(tmp_path):
    figure = {"data": [{"y": [math.nan, 1.0, math.inf]}], "layout": {}}
    page = report.build(executed(tmp_path, shown({report.PLOTLY: figure})), tmp_path / "r.html").read_text()
    assert '{"y": [null, 1.0, null]}' in page


def test_half_a_character_in_a_record_spoils_no_report(tmp_path):
    (tmp_path / "run.json").write_text('{"status": "ok", "note": "\\ud800"}')
    page = report.build(executed(tmp_path, shown({"text/plain": "fine"})), tmp_path / "r.html")
    assert "fine" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda: run_one(requests(), None), "config: None is no EngineConfig"),
        (lambda: run_one(requests(), cost=3), "cost: 3 is no StepCost"),
        (lambda: Predictor(None, COST), "engine: None is no EngineConfig"),
        (lambda: Predictor(EngineConfig(), None), "cost: None is no StepCost"),
        (lambda: sweep(requests(), ["random"], 5, [0]), "qps=5 should be a list"),
        (lambda: sweep(requests(), ["random"], [5], 3), "seeds=3 should be a list"),
        (lambda: run(policy=Asking("a")), "asked for instance 'a'"),
        (lambda: run(policy=Asking(0.5)), "asked for instance 0.5"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named(call, told):
    with pytest.raises(InputError, match=told):
        call()
