import json
import os
import sys

import nbformat
import pandas as pd
import pytest

from astrolabe_lab import record
from astrolabe_lab.errors import InputError
from astrolabe_lab.parameters import notebook_parameters, parse_parameters
from astrolabe_lab.run import NotebookError, run_notebook

DEFAULTS = """name: str = "astrolabe:k=2"  # a label, with what confuses papermill's own reader
count: int = 5  # how many
share: float = 0.5  # of what
loud: bool = False  # or not
qps: list = [1.0, 2.0]  # rates
trace: str | None = None  # a file
"""


@pytest.fixture
def notebook(tmp_path):
    """Writes a notebook with the parameters above and the given code cells; returns its path."""

    def write(*cells, parameters=DEFAULTS):
        code = nbformat.v4.new_code_cell
        first = [code(parameters, metadata={"tags": ["parameters"]})] if parameters else []
        written = nbformat.v4.new_notebook(cells=first + [code(source) for source in cells])
        written.metadata["kernelspec"] = {"name": "nowhere", "display_name": "none", "language": "python"}
        nbformat.write(written, tmp_path / "lesson.ipynb")
        return tmp_path / "lesson.ipynb"

    return write


def test_values_take_the_type_of_the_notebooks_default(notebook):
    given = ["name=007", "count=007", "share=1", "loud=true", "qps=3,4.5"]
    values = parse_parameters(notebook(), given)
    assert values == {"name": "007", "count": 7, "share": 1.0, "loud": True, "qps": [3.0, 4.5]}
    assert [type(value) for value in values.values()] == [str, int, float, bool, list]


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("qps=[3, 4]", [3.0, 4.0]),
        ("trace=x=y.csv", "x=y.csv"),
        ("trace=null", None),
        ("name=", ""),
        ("qps=", []),
    ],
)
def test_lists_are_json_or_commas_and_only_the_first_equals_sign_splits(notebook, given, value):
    assert parse_parameters(notebook(), [given]) == {given.partition("=")[0]: value}


def test_a_misspelt_parameter_is_refused_with_the_allowed_names(notebook):
    with pytest.raises(InputError, match=r"no parameter 'cuont'; its parameters are: name, count, share, loud, qps"):
        run_notebook(notebook(), ["cuont=3"])


@pytest.mark.parametrize(
    "given",
    [
        "count=3.5",
        "count=1e3",
        "count=many",
        "share=nan",
        "share=inf",
        "loud=1",
        "qps=[1, [2]]",
        "qps=a,b",
        "qps={}",
    ],
)
def test_a_value_of_another_type_is_refused_by_name(notebook, given):
    with pytest.raises(InputError, match=f"parameter {given.partition('=')[0]}="):
        parse_parameters(notebook(), [given])


@pytest.mark.parametrize("given", [{"qps": (1.0, 2.0)}, {"name": 7}, {"count": True}, {"share": float("nan")}])
def test_python_values_that_papermill_would_bend_are_refused(notebook, given):
    with pytest.raises(InputError, match="should be"):
        parse_parameters(notebook(), given)


@pytest.mark.parametrize("given", ["count", "=3", "two words=3"])
def test_what_is_not_key_equals_value_is_refused(notebook, given):
    with pytest.raises(InputError, match="not of the form key=value"):
        parse_parameters(notebook(), [given])


def test_a_parameter_given_twice_is_refused(notebook):
    with pytest.raises(InputError, match="given twice"):
        parse_parameters(notebook(), ["count=1", "count=2"])


def test_a_derived_value_in_the_parameters_cell_is_refused(notebook):
    path = notebook(parameters="count: int = 5\ntwice = count * 2\n")
    with pytest.raises(InputError, match=r"the parameters cell holds `twice = count \* 2`"):
        notebook_parameters(path)


def test_files_that_are_no_notebooks_are_refused(notebook, tmp_path):
    notebook()
    with pytest.raises(InputError, match=r"does not exist; there are: .*lesson\.ipynb"):
        run_notebook(tmp_path / "leson.ipynb")
    (tmp_path / "text.ipynb").write_text("hello")
    with pytest.raises(InputError, match="is not a Jupyter notebook"):
        run_notebook(tmp_path / "text.ipynb")


def test_a_notebook_does_not_overwrite_itself(notebook, tmp_path):
    with pytest.raises(InputError, match="holds the notebook itself"):
        run_notebook(notebook(), out_dir=tmp_path)


def test_a_run_keeps_the_outputs_the_files_and_how_they_came_about(notebook, tmp_path, capfd):
    path = notebook(
        "import pandas as pd, sys\nfrom astrolabe_lab import record\nout_dir = record.output_dir('lesson')",
        "print(name, count, record.headless(), file=sys.stderr)",
        "record.save_run(out_dir, {'count': count, 'seed': 3}, summary=pd.DataFrame({'x': [count]}))",
    )
    executed = run_notebook(path, {"count": 9}, out_dir=tmp_path / "out")
    assert executed == tmp_path / "out" / "lesson.ipynb"
    assert pd.read_parquet(tmp_path / "out" / "summary.parquet").x.tolist() == [9]
    noted = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (noted["status"], noted["notebook"], noted["seed"]) == ("ok", "lesson.ipynb", 3)
    assert noted["parameters"] == {"count": 9, "seed": 3} and noted["rows"] == {"summary.parquet": 1}
    assert noted["versions"]["numpy"] and noted["hardware"]["cores"] >= 1 and noted["wall_s"] > 0
    err = capfd.readouterr().err
    assert "astrolabe:k=2 9 True" in err  # what a cell writes to stderr is seen while it runs
    assert "lesson: cell 5 of 5 (record.save_run" in err
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == [
        "lesson.ipynb",
        "run.json",
        "summary.parquet",
    ]
    assert record.OUT_DIR not in os.environ and record.HEADLESS not in os.environ


def test_a_failing_cell_is_named_and_its_notebook_kept(notebook, tmp_path):
    path = notebook("before = 1", "1 / 0", "after = 1")
    with pytest.raises(NotebookError, match=r"lesson\.ipynb: cell 3 of 4 \(1 / 0\) failed: ZeroDivisionError"):
        run_notebook(path, out_dir=tmp_path / "out")
    kept = nbformat.read(tmp_path / "out" / "failed" / "lesson.ipynb", as_version=4)
    errors = [o.ename for c in kept.cells if c.cell_type == "code" for o in c.outputs if o.output_type == "error"]
    assert errors == ["ZeroDivisionError"]
    noted = json.loads((tmp_path / "out" / "failed" / "run.json").read_text())
    assert noted["status"] == "failed" and "1 / 0" in noted["error"]


SAVES = (
    "import pandas as pd\nfrom astrolabe_lab import record\nout_dir = record.output_dir('lesson')",
    "(out_dir / 'more').mkdir(exist_ok=True)\n(out_dir / 'more' / f'{name}.txt').write_text(name)",
    "saved = record.save_run(out_dir, {'count': count}, **{name: pd.DataFrame({'x': [count]})})\nprint(saved)",
    "1 / count",
)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_failed_run_stands_beside_the_last_good_one_and_leaves_it_whole(notebook, tmp_path):
    path, out = notebook(*SAVES), tmp_path / "out"
    executed = run_notebook(path, {"name": "good"}, out_dir=out)
    good = {name: (out / name).read_bytes() for name in files(out)}
    assert list(good) == ["good.parquet", "lesson.ipynb", "more/good.txt", "run.json"]
    assert str(out / "run.json") in executed.read_text()  # what the notebook printed is where it lies now
    with pytest.raises(NotebookError, match=r"see .*out/failed/lesson\.ipynb"):
        run_notebook(path, {"name": "bad", "count": 0}, out_dir=out)
    assert {name: (out / name).read_bytes() for name in good} == good
    failed = ["bad.parquet", "lesson.ipynb", "more/bad.txt", "run.json"]
    assert files(out) == sorted([*good, *(f"failed/{name}" for name in failed)])
    assert json.loads((out / "failed" / "run.json").read_text())["parameters"] == {"count": 0}


def test_a_good_run_replaces_the_one_before_and_clears_the_failed_one_but_no_file_of_others(notebook, tmp_path):
    path, out = notebook(*SAVES), tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / ".running.999999999").mkdir()  # of a run that was killed
    with pytest.raises(NotebookError):
        run_notebook(path, {"name": "bad", "count": 0}, out_dir=out)
    for name in ("first", "second"):
        run_notebook(path, {"name": name}, out_dir=out)
    assert files(out) == ["lesson.ipynb", "more/second.txt", "notes.txt", "run.json", "second.parquet"]
    assert not (out / "failed").exists() and not list(out.glob(".running*"))


def test_saving_by_hand_leaves_no_frame_of_the_run_before(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for name in ("first", "second"):
        record.save_run(tmp_path, {}, **{name: pd.DataFrame({"x": [1]})})
    assert files(tmp_path) == ["notes.txt", "run.json", "second.parquet"]


def test_a_record_names_no_file_outside_its_folder(tmp_path):
    (tmp_path / "outside.txt").write_text("mine")
    (tmp_path / "in").mkdir()
    record.note(tmp_path / "in", files=["../outside.txt"])
    record.clear(tmp_path / "in")
    assert files(tmp_path) == ["outside.txt"]


def test_a_failing_cell_shows_its_error_and_no_word_of_the_kernels_own(notebook, tmp_path, capfd):
    with pytest.raises(NotebookError):
        run_notebook(notebook("1 / 0"), out_dir=tmp_path / "out")
    assert "IPKernelApp" not in capfd.readouterr().err


def test_relative_paths_start_beside_the_notebooks_folder(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "trace.csv").touch()
    for folder in (tmp_path, tmp_path / "notebooks"):
        monkeypatch.chdir(folder)
        assert record.input_file("trace.csv").samefile(tmp_path / "trace.csv")
        with pytest.raises(InputError, match=rf"file gone\.csv does not exist: {tmp_path}/gone\.csv was looked for"):
            record.input_file("gone.csv")


def test_a_cell_over_its_time_limit_ends_the_run(notebook, tmp_path):
    with pytest.raises(NotebookError, match=r"cell 2 of 2 \(import time; time.sleep\(60\)\) ran over 2 s"):
        run_notebook(notebook("import time; time.sleep(60)"), out_dir=tmp_path / "out", cell_timeout_s=2)
    assert json.loads((tmp_path / "out" / "failed" / "run.json").read_text())["status"] == "failed"


def test_a_dead_kernel_is_told_apart_from_a_failing_cell(notebook, tmp_path):
    with pytest.raises(NotebookError, match="kernel died in cell 2 of 2"):
        run_notebook(notebook("import os; os._exit(1)"), out_dir=tmp_path / "out")


def test_figures_are_kept_as_json_without_a_copy_of_plotly_js(notebook, tmp_path):
    executed = run_notebook(notebook("import plotly.graph_objects as go\ngo.Figure()"), out_dir=tmp_path / "out")
    (output,) = nbformat.read(executed, as_version=4).cells[-1].outputs
    assert "application/vnd.plotly.v1+json" in output.data and "text/html" not in output.data
    assert executed.stat().st_size < 100_000


def test_a_record_that_is_not_json_is_refused_and_nothing_half_written_stays(tmp_path):
    with pytest.raises(InputError, match=r"run\.json takes"):
        record.save_run(tmp_path, {"trace": tmp_path})
    with pytest.raises(InputError, match=r"run\.json takes"):
        record.save_run(tmp_path, {"share": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_later_interactive_run_does_not_inherit_the_record_of_an_ended_one(tmp_path):
    record.note(tmp_path, new=True, status="failed", error="boom")
    record.save_run(tmp_path, {"seed": 1})
    noted = json.loads((tmp_path / "run.json").read_text())
    assert "error" not in noted and noted["seed"] == 1


def test_outputs_lie_beside_the_notebooks_folder(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    for folder in (tmp_path, tmp_path / "notebooks"):
        monkeypatch.chdir(folder)
        assert record.output_dir("lesson") == tmp_path / "outputs" / "lesson"


def test_importing_the_runner_loads_no_heavy_module():
    assert os.system(
        f"{sys.executable} -c \"import sys, astrolabe_lab.run; "
        "sys.exit(bool({'pandas', 'papermill', 'numba', 'plotly'} & set(sys.modules)))\""
    ) == 0  # fmt: skip
