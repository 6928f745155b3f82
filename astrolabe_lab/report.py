"""One offline HTML page from executed notebooks: text, figures that still move, code folded away."""

import html
import json
import re
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from .errors import InputError
from .record import write_whole

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
"""
DRAW = """
for (const holder of document.querySelectorAll('.figure')) {
  const figure = JSON.parse(holder.querySelector('script').textContent);
  const plot = document.createElement('div');
  holder.append(plot);
  Plotly.newPlot(plot, {data: figure.data, layout: figure.layout, frames: figure.frames || [],
                        config: {responsive: true, displaylogo: false}});
}
"""


def build(notebooks: str | Path | Iterable[str | Path], out: str | Path) -> Path:
    """Write the report of executed notebooks to `out`, one HTML file for use offline, and return its path.

    `notebooks` is a folder, searched through for executed notebooks in the order of their names, or the
    notebooks themselves. Markdown is rendered, code folded, text, tables, PNG and plotly figures shown
    (plotly.js is in the file once), and what `run.json` beside a notebook says of its run. Whatever HTML or
    script a notebook's text or outputs carry is shown as text or dropped, never run. Raises InputError when
    there is nothing executed to report.
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
        return nbformat.read(path, as_version=4).cells
    except Exception as error:  # nbformat raises whatever its JSON or schema reader does
        raise InputError(f"{path} is not a Jupyter notebook: {error}") from None


def _ran(cell) -> bool:
    return cell.cell_type == "code" and (bool(cell.outputs) or cell.execution_count is not None)


def _contents(chapters: list["_Chapter"]) -> str:
    rows = []
    for chapter in chapters:
        inner = "".join(
            f'<li><a href="#{anchor}">{text}</a></li>' for level, anchor, text in chapter.headings if level == 2
        )
        first = next((h for h in chapter.headings if h[0] == 1), (1, chapter.anchor, html.escape(chapter.path.stem)))
        rows.append(f'<li><a href="#{chapter.anchor}">{first[2]}</a><ul>{inner}</ul></li>')
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

    def read(self) -> "_Chapter":
        show = {"markdown": self._markdown, "code": self._code}
        cells = "".join(show[cell.cell_type](cell) for cell in _cells(self.path) if cell.cell_type in show)
        self.html = f'<section id="{self.anchor}">{cells}{_facts(self.path.with_name("run.json"))}</section>'
        return self

    def _markdown(self, cell) -> str:
        def numbered(match: re.Match) -> str:
            level, text = int(match[1]), match[2]
            anchor = f"{self.anchor}-{len(self.headings)}"
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
        if PLOTLY in data:
            self.figures += 1
            figure = json.dumps(data[PLOTLY]).replace("<", "\\u003c")  # no text in it can close the script element
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

    return mistune.create_markdown(renderer=Renderer(escape=True), plugins=["table", "strikethrough"])(source)


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


def _facts(path: Path) -> str:
    """The run's record as a folded table; nothing where there is none, a word where it cannot be read."""
    if not path.is_file():
        return ""
    try:
        record = json.loads(path.read_text())
        rows = "".join(f"<tr><th>{html.escape(str(k))}</th><td>{_value(v)}</td></tr>" for k, v in record.items())
    except (ValueError, AttributeError):
        rows = f"<tr><td>{html.escape(path.name)} could not be read</td></tr>"
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
