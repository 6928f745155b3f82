"""Run a notebook from top to bottom without a browser, with checked parameters, and keep what it made."""

import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from astrolabe_lab import record
from astrolabe_lab.errors import InputError
from astrolabe_lab.parameters import matched, notebook_parameters

MOST_S = 10**9  # thirty years
WORK = ".running."  # and the process id: the folder a run works in


class NotebookError(RuntimeError):
    """A cell failed, ran too long, or its kernel died; names the cell and the executed notebook."""


def run_notebook(
    path: str | Path,
    parameters: Mapping[str, object] | Iterable[str] = (),
    out_dir: str | Path | None = None,
    cell_timeout_s: float = 1800,
) -> Path:
    """Execute the notebook at `path` and return the path of the executed copy, `OUT_DIR/NAME.ipynb`.

    `parameters` replace the defaults of the cell tagged `parameters`: a mapping, or `key=value` strings read
    with the types of those defaults. `out_dir` is `outputs/NAME` unless given, and `run.json` there says how
    the run went; a run that ends well takes the place of the one before, a failed one goes to
    `out_dir/failed` (see `record`). One line per cell goes to stderr, with what the cell itself writes there.

    Raises InputError for a file that is no notebook, an unknown parameter (the message lists the known ones)
    or a value of the wrong type; NotebookError when a cell fails or exceeds `cell_timeout_s`: the executed
    copy in `out_dir/failed` then holds the error and its `run.json` says `failed`.
    """
    path = Path(path)
    allowed = notebook_parameters(path)
    values = matched(allowed, parameters, path.name)
    if not (isinstance(cell_timeout_s, (int, float)) and 0 < cell_timeout_s <= MOST_S):
        raise InputError(f"cell_timeout_s={cell_timeout_s!r} must be a number of seconds above 0, at most {MOST_S}")
    out_dir = (Path(out_dir) if out_dir else Path("outputs") / path.stem).resolve()
    executed = out_dir / path.name
    if executed == path.resolve():
        raise InputError(f"out_dir={out_dir} holds the notebook itself, which the run would overwrite")
    work = out_dir / f"{WORK}{os.getpid()}"
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for left in out_dir.glob(f"{WORK}*"):  # by runs that were killed
            if not _alive(left.name.removeprefix(WORK)):
                shutil.rmtree(left, ignore_errors=True)
        work.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"out_dir={out_dir}: cannot make this folder: {error.strerror}") from None
    began = time.perf_counter()
    used = allowed | values
    record.note(work, new=True, status="running", notebook=path.name, parameters=used, seed=record.seed(used))
    try:
        with _kernel_environment(work, out_dir):
            _execute(path, work / path.name, out_dir / record.FAILED / path.name, values, cell_timeout_s)
    except BaseException as error:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        record.note(work, status=status, error=str(error), wall_s=round(time.perf_counter() - began, 3))
        record.keep(work, out_dir / record.FAILED)
        raise
    record.note(work, status="ok", wall_s=round(time.perf_counter() - began, 3))
    record.keep(work, out_dir)
    record.clear(out_dir / record.FAILED)
    with suppress(OSError):  # absent, or not empty
        (out_dir / record.FAILED).rmdir()
    return executed


def _alive(pid: str) -> bool:
    import psutil

    return pid.isdigit() and psutil.pid_exists(int(pid)) and int(pid) != os.getpid()


@contextmanager
def _kernel_environment(work: Path, out_dir: Path) -> Iterator[None]:
    """What the kernel inherits: where to write, that nobody watches, figures as JSON only."""
    changes = {
        record.OUT_DIR: str(work),
        record.KEPT_DIR: str(out_dir),
        record.HEADLESS: "1",
        "PLOTLY_RENDERER": "plotly_mimetype",
    }
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _execute(path: Path, executed: Path, if_failed: Path, values: dict[str, object], cell_timeout_s: float) -> None:
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.engines import NBClientEngine, papermill_engines
    from papermill.exceptions import PapermillExecutionError

    class Announcing(NBClientEngine):
        """papermill's engine, with a line per cell on stderr."""

        @classmethod
        def execute_managed_notebook(cls, nb_man, kernel_name, **options):
            cells.announce(nb_man)
            super().execute_managed_notebook(nb_man, kernel_name, **options)

    logging.getLogger("papermill").setLevel(logging.ERROR)  # its own check of names fails on valid cells
    cells = _Cells(path.stem)
    papermill_engines.register("astrolabe", Announcing)
    partial = executed.with_name(f".{executed.stem}.{os.getpid()}.partial.ipynb")
    try:
        papermill.execute_notebook(
            _literal(path), _literal(partial), values, engine_name="astrolabe", kernel_name="python3",
            language="python", progress_bar=False, execution_timeout=math.ceil(cell_timeout_s), stderr_file=sys.stderr,
            coalesce_streams=True,
            # ipykernel warns of its local sockets at every start, and of the interrupt that ends it as an error
            extra_arguments=["--log-level=CRITICAL"],
        )  # fmt: skip
    except PapermillExecutionError as error:
        raise NotebookError(
            f"{path.name}: {cells.current} failed: {error.ename}: {error.evalue}; see {if_failed}"
        ) from None
    except CellTimeoutError:
        raise NotebookError(f"{path.name}: {cells.current} ran over {cell_timeout_s:g} s; see {if_failed}") from None
    except DeadKernelError:
        raise NotebookError(f"{path.name}: kernel died in {cells.current}; see {if_failed}") from None
    finally:
        if partial.exists():
            os.replace(partial, executed)


def _literal(path: Path) -> str:
    """`path` as papermill takes it: it fills in what stands in braces."""
    return str(path).replace("{", "{{").replace("}", "}}")


class _Cells:
    """Counts the code cells of a running notebook and says on stderr what became of each."""

    def __init__(self, name: str) -> None:
        self.name, self.current, self.done, self.began = name, "before the first cell", 0, 0.0

    def announce(self, nb_man) -> None:
        total = sum(cell.cell_type == "code" for cell in nb_man.nb.cells)
        start, complete = nb_man.cell_start, nb_man.cell_complete

        def cell_start(cell, cell_index=None, **options):
            if cell.cell_type == "code":
                self.began = time.perf_counter()
                self.current = f"cell {self.done + 1} of {total} ({_first_line(cell.source)})"
            return start(cell, cell_index, **options)

        def cell_complete(cell, cell_index=None, **options):
            if cell.cell_type == "code":
                self.done += 1
                seconds = time.perf_counter() - self.began
                print(f"{self.name}: {self.current}: {seconds:.1f} s", file=sys.stderr, flush=True)
            return complete(cell, cell_index, **options)

        nb_man.cell_start, nb_man.cell_complete = cell_start, cell_complete


def _first_line(source: str) -> str:
    line = next((line for line in source.splitlines() if line.strip() and not line.startswith("#")), "empty")
    return line if len(line) <= 60 else line[:57] + "..."
