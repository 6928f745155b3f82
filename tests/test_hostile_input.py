"""Input that is damaged, absurd or hostile: one clear error, or the right result; never a crash, never a hang."""

import errno
import json
import math

import nbformat
import numpy as np
import pandas as pd
import pytest

from astrolabe_lab import cli, length, report, result, rng, trace
from astrolabe_lab.cost import StepCost
from astrolabe_lab.errors import InputError
from astrolabe_lab.parameters import parse_parameters
from astrolabe_lab.predictor import Predictor, empty_status
from astrolabe_lab.request import Request
from astrolabe_lab.run import run_notebook
from astrolabe_lab.sim.cluster import ControlPlane, Outage, simulate
from astrolabe_lab.sim.engine import EngineConfig, run_one
from astrolabe_lab.sweep import sweep

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
