"""The runs of a sweep are made: spread over processes or a cluster, and kept in a folder as they end."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING

from astrolabe_lab.sweep import crew

from . import told
from .cell import Run, row_of, run_cell
from .grid import Grid
from .progress import Progress
from .sources import Sources
from .store import SUMMARY, Store, StoreError, tell

if TYPE_CHECKING:
    import pandas as pd


class Conductor:
    """Makes runs `on` this machine or a cluster, `workers` at once, and tells of it."""

    def __init__(
        self,
        runs: Sequence[Run],
        sources: Sources,
        on: str,
        workers: int | None,
        retries: int,
        progress: bool | Callable[[int, int, dict], None] | None,
    ) -> None:
        self.runs, self.sources, self.on, self.workers, self.retries = runs, sources, on, workers, retries
        self.progress = progress

    def in_memory(self) -> pd.DataFrame:
        """The frame of all runs; the first that fails ends it."""
        import pandas as pd

        rows: dict[int, dict] = {}
        everything = range(len(self.runs))
        with self._told(everything) as told, closing(self._made(everything)) as made:
            for index, (summary, _) in made:
                rows[index] = row_of(self.runs[index].cell, summary)
                told.finished(rows[index])
        return pd.DataFrame([rows[index] for index in everything])

    def into(self, store: Store, grid: Grid) -> pd.DataFrame:
        """The frame of all runs, those that `store` holds and those that are made now and kept there."""
        kept = Kept(self.runs, store)
        store.note(
            new=True, status="running", sweep={"on": self.on, "keep": store.keep, "code": store.code},
            process=f"process {os.getpid()} on {platform.node()}", parameters=described(grid),
            seed=list(dict.fromkeys(run.seed for run in self.runs)),
        )  # fmt: skip
        try:
            todo = kept.missing()
            made = self._made(todo, store.keep == "requests", "yield")
            with self._told(todo) as told, closing(made):  # whatever ends it, no worker goes on
                for index, result in made:
                    run = self.runs[index]
                    if isinstance(result, crew.Failure):
                        kept.failed[str(run)] = result.cause
                        told.failed(str(run), run.cell.label, result.cause.partition("\n")[0])
                    else:
                        kept.add(index, *result)
                        told.finished(row_of(run.cell, result[0]))
        except KeyboardInterrupt:
            with suppress(StoreError):
                kept.close("interrupted")
            tell(f"ended with {kept.told()} kept in {store.folder}; the same again goes on from there")
            raise
        except BaseException:
            with suppress(StoreError):
                kept.close("failed")
            raise
        summary = kept.close("failed" if kept.failed else "ok")
        if kept.failed:
            name, cause = next(iter(kept.failed.items()))
            others = f", and {len(kept.failed) - 1} more" if len(kept.failed) > 1 else ""
            raise crew.CrewError(
                f"{name}: {cause}{others}. {kept.told()} are in {store.folder}; the same again tries the failed ones "
                "once more"
            )
        return summary

    def _told(self, which: Sequence[int]) -> Progress:
        labels = [self.runs[index].cell.label for index in which]
        if self.progress is not False:
            for line in dict.fromkeys(filter(None, map(self._short_of_requests, self.runs))):
                tell(line)
        return Progress(self.progress, labels, len(self.runs), self.workers or crew.cores())

    def _short_of_requests(self, run: Run) -> str:
        """What to say of a run that asks for more of a trace's first requests than it has."""
        asked, frame = run.requests.count, self.sources.frames.get(run.requests.source)
        if asked is None or frame is None or run.requests.sample != "head" or len(frame) >= asked:
            return ""
        trace = run.cell.settings["trace"]
        named = str(trace) if isinstance(trace, str) or hasattr(trace, "__fspath__") else "the trace"
        return (
            f"{named} has {len(frame):,} requests, fewer than the {asked:,} asked for: such runs are of {len(frame):,}"
        )

    def _made(self, which: Sequence[int], keep: bool = False, failures: str = "raise") -> Iterator[tuple[int, object]]:
        """(index, (summary, result frame or None) or a Failure) of the runs at these indices, as they end.

        Those of one seed come together: a worker prepares its requests once, and what there is of the grid when a
        sweep is ended is whole seeds.
        """
        if not which:
            return
        order = sorted(which, key=lambda index: (self.runs[index].seed, self.runs[index].requests.source, index))
        todo = [self.runs[index] for index in order]
        job = partial(run_cell, frames=self.sources.frames, keep_requests=keep)
        if self.on == "local":
            workers = max(1, min(self.workers or crew.cores(), len(todo)))
            ended = crew.each(job, todo, workers, retries=self.retries, failures=failures)
        else:
            from . import ray_crew

            modules = told.own_modules(run.policy for run in todo)
            ended = ray_crew.each(
                job, todo, self.on, self.workers, retries=self.retries, failures=failures, modules=modules
            )
        with closing(ended):
            for at, result in ended:
                yield order[at], result


class Kept:
    """What a store has of a sweep's runs, and had before."""

    def __init__(self, runs: Sequence[Run], store: Store) -> None:
        self.runs, self.store = runs, store
        self.keys = store.expect(runs)
        found = ((index, store.row(key)) for index, key in enumerate(self.keys))
        self.rows = {index: row for index, row in found if row is not None}
        self.before = len(self.rows)
        self.failed: dict[str, str] = {}  # cause by name
        self.began = time.perf_counter()

    def missing(self) -> list[int]:
        return [index for index in range(len(self.runs)) if index not in self.rows]

    def add(self, index: int, summary: dict, results: pd.DataFrame | None) -> None:
        self.store.add(self.keys[index], summary, results)
        self.rows[index] = summary

    def told(self) -> str:
        return f"{len(self.rows)} of {len(self.runs)} runs"

    def close(self, status: str) -> pd.DataFrame:
        """Writes the frame of the runs that there are, and run.json; returns the frame."""
        import pandas as pd

        summary = pd.DataFrame(
            [
                row_of(self.runs[index].cell, self.rows[index]) | self.store.marks(self.keys[index])
                for index in sorted(self.rows)
            ]
        )
        if len(summary):
            self.store.save(summary)
        made = len(self.rows) - self.before
        counts = {"all": len(self.runs), "made": made, "made_before": self.before, "failed": len(self.failed)}
        self.store.note(
            status=status, runs=counts, rows={SUMMARY: len(summary)} if len(summary) else {}, failed=self.failed,
            codes=sorted(set(summary["code"])) if len(summary) else [],
            wall_s=round(time.perf_counter() - self.began, 3),
        )  # fmt: skip
        return summary


def described(grid: Grid) -> dict[str, object]:
    """The grid in JSON's types."""
    written = grid.written or {"defaults": dict(grid.defaults), "axes": grid.axes, "exclude": grid.exclude}
    return json.loads(json.dumps(written, default=_named, allow_nan=False))


def _named(value: object) -> str:
    import pandas as pd

    from astrolabe_lab.policies import spec

    if isinstance(value, pd.DataFrame):
        return f"a frame of {len(value)} requests"
    return spec(value) if hasattr(value, "choose") else str(value)
