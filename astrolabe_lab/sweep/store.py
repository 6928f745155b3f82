"""The folder of a sweep: every finished run at once, so that whatever ends the sweep, the same call goes on from there.

    runs.jsonl        a line for each run as it ends: its row, and fingerprints of code, requests and settings
    requests/         with keep="requests": the result frame of each run, RUN.parquet
    summary.parquet   the rows of the grid, in its order
    run.json          the grid, seeds, versions, commit, hardware, and what became of it

A line that was cut short, by a full disk or a lost machine, is named, and its run is made again.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab import record
from astrolabe_lab.errors import InputError

from . import identity
from .cell import Run

if TYPE_CHECKING:
    import pandas as pd

FLOATS = {None: math.nan, "inf": math.inf, "-inf": -math.inf}  # as JSON has them
RUNS, SUMMARY, REQUESTS = "runs.jsonl", "summary.parquet", "requests"


class StoreError(RuntimeError):
    """The folder of a sweep could not be written."""


class Store:
    """The folder of one sweep, held by this process alone until `close`.

    Raises InputError when another sweep holds it, when it holds something else, or runs of other code than this and
    `mix` does not allow that. `keep`: summary, or requests to keep the result frame of each run as well.
    """

    def __init__(self, folder: str | Path, mix: bool = False, keep: str = "summary") -> None:
        self.folder = Path(folder)
        self.mix, self.keep = mix, keep
        self.code, self.commit = identity.code(), record.facts()["commit"]
        self.lines: dict[str, dict] = {}  # by key: of this code, or with `mix` also of other code
        self._file, self._contents = None, {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.folder}: cannot make this folder: {error.strerror}") from None
        self._lock = self._take()
        try:
            self._check_ours()
            self._read()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._lock.release()

    # --- opening ---

    def _take(self):
        import filelock

        lock = filelock.FileLock(self.folder / ".lock", timeout=0, is_singleton=False)
        try:
            lock.acquire()
        except filelock.Timeout:
            by = record.read(self.folder).get("process", "its run.json does not say which")
            raise InputError(
                f"{self.folder} is in use by another sweep ({by}): wait for its end, or give another folder"
            ) from None
        except OSError as error:
            raise InputError(f"{self.folder}: cannot write here: {error.strerror}") from None
        return lock

    def _check_ours(self) -> None:
        found = record.read(self.folder)
        if found and "sweep" not in found:
            what = found.get("notebook") or "another run"
            raise InputError(f"{self.folder} holds the results of {what}: give a folder of the sweep's own")

    def _read(self) -> None:
        path = self.folder / RUNS
        try:
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise InputError(f"{path}: cannot read the runs made before: {error.strerror}") from None
        damaged, others = [], Counter()
        for number, text in enumerate(content.split(b"\n"), 1):
            if not text.strip():
                continue
            if (line := _parsed(text)) is None:
                damaged.append(str(number))
            elif line["code"] == self.code:
                self.lines[line["key"]] = line
            else:
                others[f"code {line['code']} (commit {line['commit']})"] += 1
                if self.mix and self.lines.get(line["key"], line)["code"] != self.code:
                    self.lines[line["key"]] = line
        if damaged:
            where = ", ".join(damaged[:5]) + ", ..." * (len(damaged) > 5)
            tell(f"{path}: line {where} is damaged, e.g. by a full disk; what it held is made again")
        if others and not self.mix:
            listed = ", ".join(f"{count:,} of {name}" for name, count in others.items())
            raise InputError(
                f"{self.folder} holds runs of other code than this, {self.code}: {listed}. Results of different code "
                "are not mixed: give another folder, or allow it with mix=True (--mix), which takes them as they are "
                "and tells them apart in the column code"
            )
        self._ends_whole = content[-1:] in (b"", b"\n")
        self._named = {line["settings"]: line for line in self.lines.values()}

    # --- runs ---

    def expect(self, runs: Iterable[Run]) -> list[str]:
        """The keys of the runs of this sweep; with `row` and `add` they stand for them.

        Raises InputError where a trace, preset or policy is no longer what it was under the same name.
        """
        keys = []
        for run in runs:
            content = run.content()
            before = self._named.get(content["settings"])
            if before and before["key"] != content["key"] and not self.mix:
                names = [name for name in ("trace", "preset") if before[name] != content[name]] or ["policy"]
                raise InputError(
                    f"{self.folder} holds a run of {run} with the same settings, but the contents of its "
                    f"{' and '.join(names)} have changed since. Give another folder, or mix=True (--mix), which makes "
                    "such runs again"
                )
            self._contents[content["key"]] = content
            keys.append(content["key"])
        return keys

    def row(self, key: str) -> dict | None:
        """The summary of a run made before; None if there is none."""
        line = self.lines.get(key)
        if line is None or (self.keep == "requests" and not self.requests_file(key).is_file()):
            return None
        return {name: FLOATS.get(value, value) for name, value in line["row"].items()}

    def marks(self, key: str) -> dict[str, str]:
        """The columns that say where a row is from: `code`, and `run`, the name of its file in `requests/`."""
        return {"code": self.lines[key]["code"], "run": key}

    def add(self, key: str, summary: Mapping[str, object], results: pd.DataFrame | None = None) -> None:
        """Keep the result of a run. Raises StoreError if the disk does not take it."""
        row = {name: _plain(value) for name, value in summary.items()}
        when = datetime.now(UTC).isoformat(timespec="seconds")
        line = self._contents[key] | {"code": self.code, "commit": self.commit, "finished": when, "row": row}
        with self._writing():
            if results is not None:
                self._save_requests(key, results)
            self._append(json.dumps(line, allow_nan=False))
        self.lines[key] = line

    def requests_file(self, key: str) -> Path:
        return self.folder / REQUESTS / f"{key}.parquet"

    def _save_requests(self, key: str, results: pd.DataFrame) -> None:
        path = self.requests_file(key)
        path.parent.mkdir(exist_ok=True)
        write_frame(results, path)

    def _append(self, text: str) -> None:
        path = self.folder / RUNS
        if self._file is None:
            self._file = path.open("ab", buffering=0)
        end = self._file.seek(0, os.SEEK_END)
        whole = text.encode() + b"\n" if self._ends_whole else b"\n" + text.encode() + b"\n"
        try:
            if self._file.write(whole) != len(whole):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):
                self._file.truncate(end)
            raise
        self._ends_whole = True

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"{self.folder}: cannot write: {error.strerror or error}. The runs made so far are kept: see to the "
                "disk, then start the same sweep again"
            ) from error

    # --- the whole ---

    def note(self, **entries: object) -> None:
        """Put `entries` into run.json."""
        with self._writing():
            record.note(self.folder, **entries)

    def save(self, summary: pd.DataFrame) -> Path:
        """Write the frame of the sweep, and say in run.json how many rows it has."""
        path = self.folder / SUMMARY
        with self._writing():
            write_frame(summary, path)
        return path


def write_frame(frame: pd.DataFrame, path: Path) -> None:
    """Write the frame so that ``path`` holds all of it or what it held before, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    plain = frame.copy(deep=False)
    plain.attrs = {}
    try:
        plain.to_parquet(partial, index=False)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _parsed(text: bytes) -> dict | None:
    """A line of runs.jsonl; None if it is damaged."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(line, dict) and {"key", "settings", "trace", "preset", "code", "commit", "row"} <= line.keys()
    return line if whole and isinstance(line["row"], dict) else None


def _plain(value: object) -> object:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else repr(value)
    return value


def tell(line: str) -> None:
    print(f"sweep: {line}", file=sys.stderr, flush=True)
