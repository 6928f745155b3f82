"""Every notebook: its form, and that it runs from top to bottom without a browser."""

import ast
import asyncio
import importlib
import inspect
import json
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType

import nbformat
import pandas as pd
import pytest

from astrolabe_lab import sweep
from astrolabe_lab.errors import InputError
from astrolabe_lab.length.observed import read_observed
from astrolabe_lab.parameters import notebook_parameters
from astrolabe_lab.report import PLOTLY, build
from astrolabe_lab.run import run_notebook

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
SMALL = {
    "00_tour": {"requests": 120, "instances": 2, "qps": 4.0},
    "01_traces": {"requests": 150, "seeds": [0, 1], "instances": 2, "qps": 4.0},
    "02_engine": {"load_requests": 40, "load_seeds": [0, 1], "check_requests": 12},
    "03_dispatch_sweep": {"qps": [6.0, 9.0], "seeds": [0, 1], "requests": 80, "instances": 3},
    "10_length_model": {
        "answers": 300,
        "models": ["constant", "prompt_ridge:vocabulary=50", "encoder:max_tokens=32,landmarks=40,vocabulary=50"],
    },
    "04_fidelity": {"requests": 60, "qps": 12.0},
    "20_live_router": {"requests": 14, "qps": 4.0, "longest": 40, "policies": ["least_loaded", "astrolabe:k=2"]},
    "21_predict_then_check": {
        "instances": 2,
        "low_qps": 2.0,
        "high_qps": 5.0,
        "requests": 14,
        "probes": 5,
        "groups": 1,
        "longest": 40,
        "learned": 100,
        "unchunked": 1,
    },
    "22_real_model": {
        "prompts": 60,
        "longest": 60,
        "alone": 4,
        "together": 16,
        "requests": 16,
        "low_qps": 2.0,
        "high_qps": 6.0,
    },
    "11_how_good_is_good_enough": {
        "qps": [6.0, 9.0],
        "seeds": [0, 1],
        "requests": 80,
        "instances": 3,
        "mixed_qps": 6.0,
    },
    "12_drift": {
        "trained_on": 300,
        "before": 700,
        "after": 500,
        "judged_on": 100,
        "seeds": [0, 1],
        "instances": 3,
        "rates": [2.5, 4.0],
        "window": 100,
    },
    "30_calibrate": {"engine": "max_num_seqs=8,num_gpu_blocks=256", "budget_s": 130.0, "jitters_ms": [0.0, 2.0]},
    "31_disaggregated_routing": {
        "slopes_s": [5.5e-5, 4e-4],
        "families": ["mixed", "chat"],
        "seeds": [0, 1],
        "requests": 60,
        "search_seeds": [0],
        "tolerance": 0.5,
    },
    "32_where_it_fails": {
        "slopes_s": [5.5e-5, 4e-4],
        "seeds": [0, 1],
        "requests": 60,
        "search_seeds": [0],
        "tolerance": 0.5,
        "starved_qps": [6.0],
        "starved_seeds": [0, 1],
        "tokens": [60000, 8000],
    },
    "33_simulator_vs_paper": {
        "families": ["mixed", "chat"],
        "slopes_s": [5.5e-5, 4e-4],
        "seeds": [0, 1],
        "requests": 60,
        "search_seeds": [0],
        "tolerance": 0.5,
    },
    "34_pools_on_live_engines": {
        "made": ["width", "bursty"],
        "policies": ["round_robin", "marginal_cost"],
        "seeds": [0],
        "requests": 6,
        "search_seeds": [1],  # where six requests are enough to make round robin collapse
        "tolerance": 0.5,
        "time_scale": 1.0,
    },
}
LIVE = {"20_live_router", "21_predict_then_check", "22_real_model", "34_pools_on_live_engines"}  # start vLLM engines
LENGTH = {"10_length_model"}  # need the length models' packages
MARKS = dict.fromkeys(LIVE, (pytest.mark.vllm, pytest.mark.long)) | dict.fromkeys(LENGTH, (pytest.mark.length,))
FORBIDDEN = ("!pip", "%pip", "input(", "asyncio.run", "FigureWidget", "interact(", ".show()", "LLM(")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
each_execution = pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=MARKS.get(path.stem, ())) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def markdown(path):
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]


def test_no_notebook_is_left_out():
    assert {path.stem for path in NOTEBOOKS} == set(SMALL)


@each_notebook
def test_it_is_stripped_of_outputs_and_of_what_papermill_noted(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in code_cells(path))
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    assert all(set(cell.metadata) <= {"tags"} for cell in notebook.cells)


@each_notebook
def test_it_opens_with_a_title_then_one_parameters_cell_then_the_setup(path):
    assert markdown(path)[0].startswith(f"# {path.stem[:2]} · ")
    tagged = [index for index, cell in enumerate(code_cells(path)) if "parameters" in cell.metadata.get("tags", [])]
    assert tagged == [0]
    assert "from astrolabe_lab import" in code_cells(path)[1].source


@each_notebook
def test_its_parameters_are_typed_plain_and_explained(path):
    assert set(notebook_parameters(path))  # refuses anything derived
    source = code_cells(path)[0].source
    lines = source.splitlines()
    for statement in ast.parse(source).body:
        assert isinstance(statement, ast.AnnAssign), f"{ast.unparse(statement)} has no type"
        assert "  # " in lines[statement.end_lineno - 1], f"{ast.unparse(statement)} has no comment"


@each_notebook
def test_its_code_cells_are_short_and_hide_nothing(path):
    for cell in code_cells(path):
        assert len(cell.source.splitlines()) < 15, cell.source
        assert not [word for word in FORBIDDEN if word in cell.source], cell.source
        paths = [n.value for n in ast.walk(ast.parse(cell.source)) if isinstance(n, ast.Constant)]
        assert not [p for p in paths if isinstance(p, str) and p.startswith(("/", "~", "C:"))], cell.source


@each_notebook
def test_whatever_it_imports_of_ours_is_there(path):
    """Told without running it: some notebooks run only where there is time for live engines."""
    found = 0
    for cell in code_cells(path):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "astrolabe_lab":
                for alias in node.names:
                    found += 1
                    module = importlib.import_module(node.module)
                    if not hasattr(module, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")
    assert found


@each_notebook
def test_every_section_lets_the_reader_predict_before_it_explains(path):
    text = "\n".join(markdown(path))
    assert text.count("**Predict.**") >= 2
    assert text.count("**Predict.**") <= text.count("**Explain.**")
    assert text.index("**Predict.**") < text.index("**Explain.**")


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Runs a notebook at small parameters the first time it is asked for; returns the executed copy."""
    outputs = tmp_path_factory.mktemp("outputs")

    @cache
    def run(name):
        path = next(path for path in NOTEBOOKS if path.stem == name)
        return run_notebook(path, SMALL[name], outputs / name, cell_timeout_s=900 if name in LIVE else 280)

    return run


@each_execution
def test_it_runs_and_leaves_figures_frames_and_the_record_of_its_run(path, executed):
    copy = executed(path.stem)
    notebook = nbformat.read(copy, as_version=4)
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in shown if output.output_type == "error"]
    assert [output for output in shown if PLOTLY in output.get("data", {})]
    assert copy.stat().st_size < 2_000_000
    noted = json.loads((copy.parent / "run.json").read_text())
    assert noted["status"] == "ok" and noted["versions"]["python"] and noted["hardware"] and "seed" in noted
    assert noted["parameters"] == notebook_parameters(path) | SMALL[path.stem]
    assert noted["guesses"]
    for name, rows in noted["rows"].items():
        assert len(pd.read_parquet(copy.parent / name)) == rows


def test_the_tour_runs_a_policy_of_its_own(executed):
    results = pd.read_parquet(executed("00_tour").with_name("results.parquet"))
    assert "FewestTokensOfTwo" in set(results.policy)
    assert (results.groupby("policy").size() == SMALL["00_tour"]["requests"]).all()


def test_the_engine_notebook_never_claims_a_comparison_that_was_not_made(executed):
    differences = pd.read_parquet(executed("02_engine").with_name("differences.parquet"))
    text = executed("02_engine").read_text()
    if find_spec("vllm"):
        assert len(differences) == 6 and differences.steps.min() > 100
        assert (differences[["different_steps", "different_preemptions"]] == 0).all(axis=None)
    else:
        assert differences.empty
        assert "nothing was compared: vLLM is not installed here" in text and "make vllm" in text


def test_the_sweep_has_every_run_of_its_grid(executed):
    summary = pd.read_parquet(executed("03_dispatch_sweep").with_name("summary.parquet"))
    assert len(summary) == 7 * 2 * 2 and not summary.duplicated(["policy", "qps", "seed"]).any()


def test_the_fidelity_notebook_says_when_its_gpu_is_made_up(executed):
    text = executed("04_fidelity").read_text()
    assert "a made-up GPU" in text and "our own engine" in text
    table = pd.read_parquet(executed("04_fidelity").with_name("errors.parquet"))
    assert len(table) == 15 and table.peer_error_pct.isna().all()


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.slow
def test_the_notebook_on_a_real_model_ran_every_request_on_engines_that_passed_the_gates(executed):
    runs = pd.read_parquet(executed("22_real_model").with_name("runs.parquet"))
    assert (runs.status == "ok").all() and set(runs.source) == {"hardware"} and set(runs.instance) == {0, 1}
    assert (runs.generated_tokens == runs.output_tokens).all() and len(runs) == 5 * SMALL["22_real_model"]["requests"]
    steps = pd.read_parquet(executed("22_real_model").with_name("steps.parquet"))
    assert len(steps) > 200 and set(steps.mixed) == {True, False}


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.slow
def test_the_notebook_on_live_pools_starts_those_of_each_study_and_runs_the_simulators_requests(executed):
    name = "34_pools_on_live_engines"
    width, bursty = (pd.read_parquet(executed(name).with_name(f"{s}_emulated.parquet")) for s in SMALL[name]["made"])
    names = ["marginal_cost", "round_robin", "round_robin (again)"]
    assert width.groupby("pools").policy.agg(sorted).to_dict() == {"2+3": names, "2+4": names, "2+6": names}
    assert sorted(bursty.policy) == names
    for study, runs in zip(SMALL[name]["made"], (width, bursty), strict=True):
        assert set(runs.source) == {"emulated"} and (runs.ok == SMALL[name]["requests"]).all()
        beside = pd.read_parquet(executed(name).with_name(f"{study}_simulated.parquet"))
        assert set(beside.n) == set(runs.n) and set(beside.qps) == set(runs.qps) and len(beside) == 2 * len(runs) / 3


def pools_notebook(tmp_path, monkeypatch, **given):
    """Run the cells of the notebook on live pools with simulated runs in place of live ones, none of which counts."""
    name = "34_pools_on_live_engines"

    def busy(grid, pools, out, redo_invalid):
        assert redo_invalid  # so that running it again is of use
        rows = sweep.run(grid, workers=1, progress=False)
        return rows.assign(source="emulated", valid=False, why="the host was busy")

    monkeypatch.setenv("ASTROLABE_OUT_DIR", str(tmp_path))
    monkeypatch.setattr("astrolabe_lab.serve.pools.studies.run", busy)
    names = {"display": lambda frame: print(frame.to_string())}
    for cell in code_cells(next(path for path in NOTEBOOKS if path.stem == name)):
        code = compile(cell.source, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(FunctionType(code, names)())
        else:
            exec(code, names)
        if "parameters" in cell.metadata.get("tags", []):
            names |= SMALL[name] | given


def test_the_notebook_on_live_pools_says_so_and_is_saved_where_no_run_counts(tmp_path, monkeypatch, capsys):
    pools_notebook(tmp_path, monkeypatch)
    told = capsys.readouterr().out
    assert "width: 0 of 6 runs count" in told and "The first run: the host was busy." in told
    assert "no two runs count" in told and "in no setting do both policies count" in told and "nan" not in told
    assert len(pd.read_parquet(tmp_path / "width_emulated.parquet")) == 6


def test_the_notebook_on_live_pools_refuses_a_scale_before_it_searches(tmp_path, monkeypatch):
    monkeypatch.setattr("astrolabe_lab.disagg.saturation.find", lambda *_, **__: pytest.fail("searched"))
    with pytest.raises(InputError, match="time_scale=0 must be a finite number > 0"):
        pools_notebook(tmp_path, monkeypatch, time_scale=0)


@pytest.mark.shared
def test_the_fidelity_notebook_replays_a_real_run(shared, tmp_path):
    folder = shared / "data" / "vidur" / "llmservingsim"
    files = {
        "timings_dir": str(folder / "RTXPRO6000_Llama-3.1-8B_bf16_tp1"),
        "run_dir": str(folder / "measured_vllm" / "RTXPRO6000_Llama-3.1-8B"),
    }
    path = next(path for path in NOTEBOOKS if path.stem == "04_fidelity")
    copy = run_notebook(path, files, tmp_path / "real", cell_timeout_s=280)
    assert "a real run of vLLM 0.19.0" in copy.read_text()
    table = pd.read_parquet(copy.with_name("errors.parquet")).set_index(["metric", "statistic"])
    assert table.error_pct.abs().xs("mean", level="statistic").max() < 5 and table.peer_error_pct.notna().all()


def test_what_a_length_is_worth_is_told_for_every_level_and_once_for_who_reads_none(executed):
    summary = pd.read_parquet(executed("11_how_good_is_good_enough").with_name("summary.parquet"))
    assert len(summary) == (2 * 5 + 2) * 2 * 2
    assert summary.groupby("policy").lengths.nunique().to_dict() == {
        "astrolabe:k=2": 5, "min_tokens": 5, "least_loaded": 1, "llumnix_minus_a": 1,
    }  # fmt: skip
    assert summary.groupby(["qps", "seed"]).workload.nunique().eq(1).all()  # all comparisons are paired


def test_the_drift_notebook_finds_both_changes_and_leaves_their_journals(executed):
    errors = pd.read_parquet(executed("12_drift").with_name("errors.parquet")).set_index(["change", "told"])
    assert (errors.loc[(slice(None), "retrained"), "mae_tokens"].to_numpy()
            < errors.loc[(slice(None), "old model"), "mae_tokens"].to_numpy()).all()  # fmt: skip
    for change in ("longer", "reasoning"):
        observed = read_observed(executed("12_drift").with_name(f"{change}.jsonl"))
        assert len(observed) == 1200 and observed.prompt.notna().all()


def test_the_calibration_of_the_notebook_finds_what_the_engine_was_made_of(executed):
    folder = executed("30_calibrate").parent
    constants, grid = (pd.read_parquet(folder / f"{name}.parquet") for name in ("constants", "grid"))
    assert constants.covered.mean() >= 0.75
    assert grid.error_pct.abs().max() < 15 and grid[~grid.mixed].error_pct.abs().max() < 3
    assert json.loads((folder / "calibration.json").read_text())["kind"] == "astrolabe calibration"


def test_together_they_make_one_report(executed, tmp_path):
    left_out = LIVE if find_spec("torch") else LIVE | LENGTH
    quiet = [path for path in NOTEBOOKS if path.stem not in left_out]
    text = build([executed(path.stem) for path in quiet], tmp_path / "report.html").read_text()
    titles = [title.removeprefix("# ") for path in quiet for title in [markdown(path)[0].splitlines()[0]]]
    assert all(title in text for title in titles)
    assert os.listdir(tmp_path) == ["report.html"]
