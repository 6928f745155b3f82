"""One offline HTML page from executed notebooks: text, figures that still move, code folded away."""

import html
import json
import math
import re
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path

from astrolabe_lab.errors import InputError
from astrolabe_lab.record import write_whole

PLOTLY = "application/vnd.plotly.v1+json"
# The browser itself refuses the network to the page, whatever a notebook holds.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
STYLE = """
body{font:16px/1.55 system-ui,sans-serif;color:#222;max-width:60rem;margin:0 auto;padding:1rem 1.5rem 4rem}
h1,h2,h3{line-height:1.25;margin:2em 0 .5em}section>h1{border-top:3px solid #0072B2;padding-top:1em}
pre{background:#f6f8fa;padding:.7em 1em;overflow-x:auto;font-size:13px;line-height:1.4;border-radius:4px}
code{font-family:ui-monospace,monospace;font-size:.92em}
details{margin:.5em 0}summary{cursor:pointer;color:#666}
table{border-collapse:collapse;margin:1em 0;font-size:14px;display:block;overflow-x:auto}
th,td{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}
.frame th,.frame td{text-align:right}.facts td{overflow-wrap:anywhere}.error{border-left:4px solid #D55E00}
nav{background:#f6f8fa;padding:1em 1.5em;border-radius:4px}nav ul{margin:.2em 0;padding-left:1.2em}
blockquote{border-left:4px solid #56B4E9;margin-left:0;padding-left:1em;color:#444}
.figure{margin:1em 0}img{max-width:100%}
.failed{background:#fdf0e9;border-left:4px solid #D55E00;padding:.7em 1em;border-radius:4px}
.mark{color:#B34700;font-weight:600}.dead{color:#888}
"""
DRAW = """
for (const holder of document.querySelectorAll('.figure')) {
  const plot = document.createElement('div');
  holder.append(plot);
  const fail = error => { plot.textContent = 'This figure cannot be drawn: ' + error; };
  try {
    const figure = JSON.parse(holder.querySelector('script').textContent);
    Plotly.newPlot(plot, {data: figure.data, layout: figure.layout, frames: figure.frames || [],
                          config: {responsive: true, displaylogo: false}}).catch(fail);
  } catch (error) { fail(error); }
}
"""


def build(notebooks: str | Path | Iterable[str | Path], out: str | Path) -> Path:
    """Write the report of executed notebooks to `out`, one HTML file for use offline, and return its path.

    `notebooks` is a folder, searched through for executed notebooks in the order of their names, or the
    notebooks themselves. Markdown is rendered, code folded, text, tables, PNG and plotly figures shown
    (plotly.js is in the file once), and what `run.json` beside a notebook says of its run. A run that failed
    is marked as such and told up to where it stopped (`failures` lists them). Whatever HTML or script a
    notebook's text or outputs carry is shown as text or dropped, never run. Raises InputError when there is
    nothing executed to report.
    """
    paths = _executed(notebooks)
    chapters = [_Chapter(path, number).read() for number, path in enumerate(paths)]
    title = "Astrolabe Lab report"
    body = "".join(chapter.html for chapter in chapters)
    script = ""
    if any(chapter.figures for chapter in chapters):
        from plotly.offline import get_plotlyjs

        script = f"<script>{get_plotlyjs()}</script><script>{DRAW}</script>"
    write_whole(
        Path(out),
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body><h1>{title}</h1>{_contents(chapters)}{body}{script}</body></html>\n",
    )
    return Path(out)


def failures(notebooks: str | Path | Iterable[str | Path]) -> dict[Path, str]:
    """The notebooks that `build` would report as failed, each with why."""
    chapters = [_Chapter(path, 0) for path in _executed(notebooks)]
    return {chapter.path: chapter.failure for chapter in chapters if chapter.failure}


def _executed(notebooks: str | Path | Iterable[str | Path]) -> list[Path]:
    if not isinstance(notebooks, (str, Path)):
        paths = [Path(path) for path in notebooks]
        if missing := [str(path) for path in paths if not path.is_file()]:
            raise InputError(f"no such notebook: {', '.join(missing)}")
        where = ", ".join(map(str, paths)) or "an empty list of notebooks"
    else:
        where = folder = Path(notebooks)
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder; give the one that `astrolabe run` wrote to, e.g. outputs")
        hidden = re.compile(r"(^|/)\.")  # partial files and Jupyter's checkpoints
        found = (path for path in folder.rglob("*.ipynb") if not hidden.search(str(path.relative_to(folder))))
        paths = sorted(found, key=lambda path: (path.name, str(path)))
    executed = [path for path in paths if any(_ran(cell) for cell in _cells(path))]
    if not executed:
        what = f"{len(paths)} notebooks, none of them executed" if paths else "no notebook"
        raise InputError(f"{where} holds {what}; run one first: astrolabe run notebooks/00_tour.ipynb")
    return executed


def _cells(path: Path) -> list:
    import nbformat

    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook, relax_add_props=True)
        return notebook.cells
    except Exception as error:  # nbformat raises whatever its JSON or schema reader does
        raise InputError(f"{path} is not a Jupyter notebook: {error}") from None


def _ran(cell) -> bool:
    return cell.cell_type == "code" and (bool(cell.outputs) or cell.execution_count is not None)


def _contents(chapters: list["_Chapter"]) -> str:
    rows = []
    for chapter in chapters:
        inner = "".join(
            f'<li><a href="#{anchor}">{text}</a></li>' if anchor else f'<li class="dead">{text} (not run)</li>'
            for level, anchor, text in chapter.headings if level == 2
        )  # fmt: skip
        first = next((h for h in chapter.headings if h[0] == 1), (1, chapter.anchor, html.escape(chapter.path.stem)))
        mark = ' <span class="mark">failed</span>' if chapter.failure else ""
        rows.append(f'<li><a href="#{chapter.anchor}">{first[2]}</a>{mark}<ul>{inner}</ul></li>')
    return f"<nav><ul>{''.join(rows)}</ul></nav>"


@dataclass
class _Chapter:
    """One notebook on its way to HTML."""

    path: Path
    number: int
    html: str = ""
    figures: int = 0
    headings: list[tuple[int, str, str]] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        return f"notebook-{self.number}"

    @cached_property
    def cells(self) -> list:
        return [cell for cell in _cells(self.path) if "papermill-error-cell-tag" not in cell.metadata.get("tags", ())]

    @cached_property
    def record(self) -> dict | None:
        """What `run.json` beside the notebook says; None where there is none, empty if it cannot be read."""
        path = self.path.with_name("run.json")
        if not path.is_file():
            return None
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, OSError, RecursionError):
            return {}

    @cached_property
    def failure(self) -> str:
        """Why the run ended early; empty if it did not."""
        status = (self.record or {}).get("status")
        if status in ("failed", "interrupted", "running"):
            return str(self.record.get("error") or status)
        errors = (o for cell in self.cells if cell.cell_type == "code" for o in cell.outputs)
        return next((_plain(f"{o.ename}: {o.evalue}") for o in errors if o.output_type == "error"), "")

    @property
    def end(self) -> int:
        """The number of cells up to the last one that ran."""
        return 1 + max((index for index, cell in enumerate(self.cells) if _ran(cell)), default=-1)

    def read(self) -> "_Chapter":
        show = {"markdown": self._markdown, "code": self._code}
        end = self.end if self.failure else len(self.cells)
        told = "".join(show[cell.cell_type](cell) for cell in self.cells[:end] if cell.cell_type in show)
        if self.failure:
            banner = f'<p class="failed"><b>This run failed.</b> {html.escape(self.failure)}</p>'
            heading, found, rest = told.partition("</h1>")
            told = heading + found + banner + rest if found else banner + told
            told += '<p class="failed">Nothing below this was run.</p>' if self.cells[end:] else ""
            for cell in self.cells[end:]:
                if cell.cell_type == "markdown":
                    self._markdown(cell, linked=False)
        self.html = f'<section id="{self.anchor}">{told}{_facts(self.record)}</section>'
        return self

    def _markdown(self, cell, linked: bool = True) -> str:
        def numbered(match: re.Match) -> str:
            level, text = int(match[1]), match[2]
            anchor = f"{self.anchor}-{len(self.headings)}" if linked else ""
            self.headings.append((level, anchor, re.sub(r"<[^>]*>", "", text)))
            return f'<h{level} id="{anchor}">{text}</h{level}>'

        return re.sub(r"<h([1-6])>(.*?)</h\1>", numbered, _rendered(cell.source), flags=re.S)

    def _code(self, cell) -> str:
        code = f"<details><summary>code</summary><pre><code>{html.escape(cell.source)}</code></pre></details>"
        return (code if cell.source.strip() else "") + "".join(map(self._output, _merged(cell.outputs)))

    def _output(self, output) -> str:
        if output.output_type == "stream":
            text = f"<pre>{html.escape(_plain(output.text))}</pre>"
            return f"<details><summary>log</summary>{text}</details>" if output.name == "stderr" else text
        if output.output_type == "error":
            trace = _plain("\n".join(output.traceback) or f"{output.ename}: {output.evalue}")
            return f'<pre class="error">{html.escape(trace)}</pre>'
        return self._data(output.data)

    def _data(self, data: dict) -> str:
        data = {kind: value for kind, value in data.items() if kind == PLOTLY or isinstance(value, str)}
        if PLOTLY in data:
            self.figures += 1
            # No text in it can close the script element.
            figure = json.dumps(_finite(data[PLOTLY])).replace("<", "\\u003c")
            return f'<div class="figure"><script type="application/json">{figure}</script></div>'
        if "image/png" in data:
            return f'<img alt="" src="data:image/png;base64,{html.escape("".join(data["image/png"].split()))}">'
        if "text/html" in data and (table := _Tables.of(data["text/html"])):
            return f'<div class="frame">{table}</div>'
        if "text/markdown" in data:
            return _rendered(data["text/markdown"])
        return f"<pre>{html.escape(_plain(data['text/plain']))}</pre>" if "text/plain" in data else ""


def _rendered(source: str) -> str:
    """Markdown as HTML: raw HTML in it escaped, images other than embedded PNGs left as links."""
    import mistune

    class Renderer(mistune.HTMLRenderer):
        def image(self, text, url, title=None):
            if url.startswith("data:image/png;base64,"):
                return f'<img alt="{html.escape(text)}" src="{html.escape(url)}">'
            return f'<a href="{html.escape(self.safe_url(url))}">{html.escape(text or url)}</a>'

    try:
        return mistune.create_markdown(renderer=Renderer(escape=True), plugins=["table", "strikethrough"])(source)
    except RecursionError:  # text nested beyond sense
        return f"<pre>{html.escape(source)}</pre>"


def _finite(value: object) -> object:
    """`value` without NaN and infinities, which Python reads from JSON and browsers refuse."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _merged(outputs: list) -> list:
    """The outputs with each stream in one piece: a kernel sends it in as many as it was flushed."""
    merged = []
    for output in outputs:
        last = merged[-1] if merged else None
        if last and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            merged.append(copy(output))
    return merged


def _plain(text: str) -> str:
    """Terminal text without colour codes, and of lines that overwrote themselves only the last state."""
    text = re.sub(r"\x1b\[[0-9;?]*[ -/]*[@-~]", "", text)
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


def _facts(record: dict | None) -> str:
    """The run's record as a folded table; nothing where there is none, a word where it cannot be read."""
    if record is None:
        return ""
    rows = "".join(f"<tr><th>{html.escape(str(k))}</th><td>{_value(v)}</td></tr>" for k, v in record.items())
    rows = rows or "<tr><td>run.json could not be read</td></tr>"
    return f'<details><summary>how this run came about</summary><table class="facts">{rows}</table></details>'


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "<br>".join(f"{html.escape(str(key))}: {_value(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(_value(inner) for inner in value) or "none"
    return html.escape(str(value))


class _Tables(HTMLParser):
    """Keeps the tables of some HTML, rebuilt from their cells' text; all else in it goes."""

    KEPT = ("table", "thead", "tbody", "tfoot", "tr", "th", "td", "caption")

    @classmethod
    def of(cls, source: str) -> str:
        parser = cls(convert_charrefs=True)
        parser.feed(source)
        parser.close()
        return "".join(parser.parts) + "</table>" * parser.depth

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.parts: list[str] = []
        self.depth = self.muted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.depth += tag == "table"
        self.muted += tag in ("script", "style")
        if self.depth and tag in self.KEPT:
            spans = (
                (name, value) for name, value in attrs if name in ("colspan", "rowspan") and (value or "").isdigit()
            )
            self.parts.append(f"<{tag}{''.join(f' {name}={chr(34)}{value}{chr(34)}' for name, value in spans)}>")

    def handle_endtag(self, tag: str) -> None:
        if self.depth and tag in self.KEPT:
            self.parts.append(f"</{tag}>")
        self.depth -= tag == "table" and self.depth > 0
        self.muted -= tag in ("script", "style") and self.muted > 0

    def handle_data(self, text: str) -> None:
        if self.depth and not self.muted:
            self.parts.append(html.escape(text))
