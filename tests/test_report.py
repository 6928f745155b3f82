import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import nbformat
import pandas as pd
import plotly.graph_objects as go
import pytest

from astrolabe_lab import cli, report
from astrolabe_lab.errors import InputError
from astrolabe_lab.run import NotebookError, run_notebook

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
v4 = nbformat.v4


def figure_output(title="A figure"):
    figure = go.Figure(go.Bar(x=["a", "b"], y=[1, 2]), layout={"title": {"text": title}})
    figure.frames = [go.Frame(name="0", data=[{"type": "bar", "y": [2, 1]}])]
    return v4.new_output("display_data", {report.PLOTLY: json.loads(figure.to_json()), "text/plain": "Figure({})"})


def executed(*outputs, source="draw()"):
    return v4.new_code_cell(source, outputs=list(outputs), execution_count=1)


@pytest.fixture
def folder(tmp_path):
    def write(*cells, name="lesson", run=None):
        place = tmp_path / "outputs" / name
        place.mkdir(parents=True, exist_ok=True)
        nbformat.write(v4.new_notebook(cells=list(cells)), place / f"{name}.ipynb")
        if run is not None:
            (place / "run.json").write_text(run)
        return tmp_path / "outputs"

    return write


class Page(HTMLParser):
    """The elements of a page, with what they would load."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.loads, self.handlers = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [
            v for k, v in attrs if k in ("src", "srcset", "data", "poster") or (tag == "link" and k == "href")
        ]
        self.handlers += [k for k, _ in attrs if k.startswith("on")]


def page(folder, tmp_path):
    return report.build(folder, tmp_path / "report.html").read_text()


def test_the_page_loads_nothing_and_tells_the_browser_to_refuse_the_network(folder, tmp_path):
    markdown = v4.new_markdown_cell("# T\n![pic](https://example.org/x.png) [link](https://example.org)")
    text = page(folder(markdown, executed(figure_output())), tmp_path)
    parsed = Page(text)
    assert parsed.loads == [] and "link" not in parsed.tags and "iframe" not in parsed.tags
    assert re.search(r"Content-Security-Policy\" content=\"default-src 'none'", text)
    assert '<a href="https://example.org/x.png">pic</a>' in text


def test_plotly_js_is_there_once_for_any_number_of_figures_and_not_without(folder, tmp_path):
    from plotly.offline import get_plotlyjs

    text = page(folder(executed(figure_output("one"), figure_output("two"))), tmp_path)
    assert text.count(get_plotlyjs()[:2000]) == 1
    assert text.count('<div class="figure">') == 2
    plain = page(folder(executed(v4.new_output("stream", text="hello"))), tmp_path)
    assert get_plotlyjs()[:2000] not in plain and len(plain) < 10_000


def test_figures_keep_their_frames(folder, tmp_path):
    text = page(folder(executed(figure_output())), tmp_path)
    kept = json.loads(re.search(r'<script type="application/json">(.*?)</script>', text, re.S)[1])
    assert kept["frames"][0]["data"][0]["y"] == [2, 1]


def test_untrusted_text_is_shown_and_never_run(folder, tmp_path):
    attack = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    html = f"<table onclick=alert(1)><tr><td rowspan=2>{attack}cell</td></tr></table>{attack}"
    cells = [
        v4.new_markdown_cell(f"# Title {attack}\n{attack}\n[click](javascript:alert(1))"),
        executed(v4.new_output("stream", text=attack), source=f"print('{attack}')"),
        executed(v4.new_output("error", ename="E", evalue=attack, traceback=[attack])),
        executed(v4.new_output("display_data", {"text/html": html, "text/plain": "x"})),
        executed(v4.new_output("display_data", {"image/png": 'aGk="><script>alert(1)</script>'})),
        executed(figure_output(f"</script>{attack}")),
    ]
    text = page(folder(*cells, run=json.dumps({"parameters": {"trace": attack}})), tmp_path)
    parsed = Page(text)
    assert parsed.handlers == []
    assert parsed.tags.count("script") == 3  # the figure's JSON, plotly.js, and what draws
    assert "<script>alert" not in text and "javascript:alert" not in text
    assert '<td rowspan="2">cell</td>' in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_a_data_frame_becomes_a_table_with_its_cells(folder, tmp_path):
    frame = pd.DataFrame({"policy": ["a<b"], "ttft": [1.5]})
    cell = executed(v4.new_output("execute_result", {"text/html": frame._repr_html_(), "text/plain": "x"}))
    text = page(folder(cell), tmp_path)
    assert "<th>policy</th>" in text and "<td>a&lt;b</td>" in text and "<td>1.5</td>" in text
    assert "dataframe tbody" not in text  # pandas' own style sheet


def test_code_and_logs_are_folded_and_terminal_colours_gone(folder, tmp_path):
    streams = [
        v4.new_output("stream", name="stderr", text="10%\r50%\rdone\n"),
        v4.new_output("stream", text="\x1b[31mred"),
    ]
    text = page(folder(executed(*streams, source="x = 1")), tmp_path)
    assert "<details><summary>code</summary><pre><code>x = 1</code></pre></details>" in text
    assert "<details><summary>log</summary><pre>done" in text
    assert "<pre>red</pre>" in text


def test_a_log_of_many_pieces_is_one_log(folder, tmp_path):
    pieces = [v4.new_output("stream", name="stderr", text=f"run {n}\n") for n in range(3)]
    text = page(folder(executed(*pieces, v4.new_output("stream", text="done"))), tmp_path)
    assert text.count("<summary>log</summary>") == 1
    assert "<pre>run 0\nrun 1\nrun 2\n</pre>" in text and "<pre>done</pre>" in text


def test_the_table_of_contents_leads_to_every_section(folder, tmp_path):
    folder(v4.new_markdown_cell("# First\n## Part & one"), executed(), name="00_a")
    text = page(folder(v4.new_markdown_cell("# Second"), executed(), name="01_b"), tmp_path)
    contents = re.search(r"<nav>(.*?)</nav>", text, re.S)[1]
    assert re.findall(r">([^<>]+)</a>", contents) == ["First", "Part &amp; one", "Second"]
    assert all(f'id="{anchor}"' in text for anchor in re.findall(r'href="#([^"]+)"', contents))


def test_the_facts_of_the_run_are_told(folder, tmp_path):
    run = {
        "parameters": {"qps": [1, 2]},
        "seed": 7,
        "versions": {"numpy": "2.0"},
        "commit": "abc",
        "hardware": {"cores": 2},
    }
    text = page(folder(executed(), run=json.dumps(run)), tmp_path)
    for fact in ("qps: 1, 2", "<th>seed</th><td>7</td>", "numpy: 2.0", "abc", "cores: 2"):
        assert fact in text
    assert "run.json could not be read" in page(folder(executed(), run="{torn"), tmp_path)


@pytest.fixture
def failed_run(tmp_path):
    """The folder of a run whose second section broke."""
    cells = [
        v4.new_markdown_cell("# Title\nintro\n## One"), v4.new_code_cell("1 / 1"),
        v4.new_markdown_cell("## Two"), v4.new_code_cell("1 / 0"), v4.new_code_cell("print('never')"),
        v4.new_markdown_cell("It shows that\n## Three"), v4.new_code_cell("3"),
    ]  # fmt: skip
    path = tmp_path / "lesson.ipynb"
    nbformat.write(v4.new_notebook(cells=cells), path)
    with pytest.raises(NotebookError):
        run_notebook(path, out_dir=tmp_path / "outputs")
    return tmp_path / "outputs"


def test_a_failed_run_is_marked_told_up_to_where_it_stopped_and_listed(failed_run, tmp_path, capsys):
    text = page(failed_run, tmp_path)
    assert "papermill" not in re.sub(r"<details>.*?</details>", "", text, flags=re.S) and "An Exception" not in text
    contents = re.search(r"<nav>(.*?)</nav>", text, re.S)[1]
    assert 'Title</a> <span class="mark">failed</span>' in contents
    assert re.findall(r">([^<>]+)</a>", contents) == ["Title", "One", "Two"]
    assert '<li class="dead">Three (not run)</li>' in contents
    title, banner = text.index("Title</h1>"), text.index("This run failed.</b> lesson.ipynb: cell 2 of 4 (1 / 0)")
    assert title < banner < text.index("intro") < text.index("Nothing below this was run")
    assert "never" not in text and "It shows that" not in text
    assert cli.main(["report", str(failed_run), "--out", str(tmp_path / "r.html"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert [*json.loads(out)["failed"]] == [str(failed_run / "failed" / "lesson.ipynb")]
    assert "lesson.ipynb is of a failed run: lesson.ipynb: cell 2 of 4 (1 / 0) failed: ZeroDivisionError" in err


def test_a_run_that_broke_in_jupyter_is_marked_too(folder, tmp_path):
    broken = executed(v4.new_output("error", ename="E", evalue="x", traceback=["E: x"]))
    text = page(folder(broken, v4.new_markdown_cell("## Later")), tmp_path)
    assert "This run failed.</b> E: x" in text and "Later (not run)" in text


def test_a_good_run_is_not_marked(folder, tmp_path):
    place = folder(executed(v4.new_output("stream", text="x")), run='{"status": "ok"}')
    assert 'class="mark"' not in page(place, tmp_path) and report.failures(place) == {}


def test_a_folder_without_executed_notebooks_is_refused_with_the_next_step(folder, tmp_path):
    with pytest.raises(InputError, match="is not a folder"):
        report.build(tmp_path / "nowhere", tmp_path / "r.html")
    with pytest.raises(InputError, match="holds no notebook; run one first: astrolabe run"):
        report.build(tmp_path, tmp_path / "r.html")
    with pytest.raises(InputError, match="1 notebooks, none of them executed"):
        report.build(folder(v4.new_code_cell("x = 1")), tmp_path / "r.html")
    with pytest.raises(InputError, match=r"no such notebook: .*gone\.ipynb"):
        report.build([tmp_path / "gone.ipynb"], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_checkpoints_and_half_written_notebooks_are_passed_over(folder, tmp_path):
    place = folder(executed(v4.new_output("stream", text="once")))
    for copy in (".ipynb_checkpoints/lesson-checkpoint.ipynb", ".lesson.1.partial.ipynb"):
        (place / copy).parent.mkdir(exist_ok=True)
        shutil.copy(place / "lesson/lesson.ipynb", place / copy)
    assert page(place, tmp_path).count("once") == 1


def test_a_failed_build_leaves_the_old_report(folder, tmp_path):
    before = page(folder(executed()), tmp_path)
    (tmp_path / "outputs/lesson/lesson.ipynb").write_text("torn")
    with pytest.raises(InputError, match="is not a Jupyter notebook"):
        page(tmp_path / "outputs", tmp_path)
    assert (tmp_path / "report.html").read_text() == before
    assert not list(tmp_path.glob(".*partial"))


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH")
def test_a_browser_draws_every_figure_without_a_network(folder, tmp_path):
    path = report.build(folder(executed(figure_output("first"), figure_output("second"))), tmp_path / "r.html")
    words = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]
    words += [
        f"--user-data-dir={tmp_path / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--dump-dom",
    ]
    dom = subprocess.run([*words, path.as_uri()], capture_output=True, text=True, timeout=120).stdout
    drawn = dom.rpartition("</nav>")[2]
    assert len(re.findall(r'<g class="point">', drawn)) == 4  # two bars in each of two figures
    assert "first" in drawn and "second" in drawn
