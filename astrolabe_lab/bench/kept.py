"""The rows of a run as they come, one JSON line each, so that a run that is killed loses none of them.

A run that finds such a file of its own goes on with what is missing. The answers that were under way are asked again.
One run at a time has the file.
"""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.alone import alone
from astrolabe_lab.bench.load import Load, Served, sends_text
from astrolabe_lab.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

VERSION = 3
NAMED = ("rid", "arrived_s", "prompt_tokens", "output_tokens", "predicted_tokens", "slo")
SECRET = ("api_key",)
KINDS = {"int": (int,), "float": (int, float), "str": (str,), "int | None": (int, type(None))}  # of JSON


@dataclass(slots=True)
class Sent:
    """One request and what became of it; times in modelled s since the run's start."""

    row: int
    scheduled_s: float
    sent_s: float = math.nan
    first_token_s: float = math.nan
    finished_s: float = math.nan
    tokens: int = 0
    prompt_tokens: int | None = None
    status: str = "failed"
    reason: str = ""
    instance: int = -1
    prefill_instance: int = -1
    decode_instance: int = -1
    predicted_e2e_s: float = math.nan
    decision_s: float = math.nan
    segment: int = 0


class Kept:
    """Rows in the file ``path``. ``found``: those of earlier runs, by row of the trace; ``segment``: which run this is,
    from 0. Raises InputError where the file holds another run's rows or none of ours, or another run has it."""

    def __init__(self, path: str | Path, trace: pd.DataFrame, load: Load, url: str, served: Served):
        self.path = Path(path)
        self.found: dict[int, dict] = {}
        self.segment = 0
        self._run = _identity(trace, load, url, served)
        with ExitStack() as opened:
            opened.enter_context(alone(self.path))
            try:
                if self.path.exists():
                    self._read(len(trace))
                self._file = opened.enter_context(self.path.open("a"))
            except OSError as error:
                raise InputError(f"{self.path}: rows cannot be kept there: {error.strerror}") from None
            self._opened = opened.pop_all()
        self._write({"version": VERSION, "run": self._run, "segment": self.segment})

    def add(self, record) -> None:
        """Keep a finished row, a dataclass."""
        self._write({field.name: getattr(record, field.name) for field in fields(record)})

    def close(self) -> None:
        self._opened.close()

    def _other(self, entry: dict) -> str:
        """How the run that wrote ``entry`` differs from this one; empty where it does not."""
        if entry["version"] != VERSION:
            return f"of version {entry['version']}, this is {VERSION}"
        was = entry["run"]
        return ", ".join(f"{k} was {was.get(k)!r}, is {v!r}" for k, v in self._run.items() if was.get(k) != v)

    def _write(self, entry: dict) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def _read(self, of: int) -> None:
        raw = self.path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):  # a torn last line: its request is asked again
            with self.path.open("rb+") as file:
                file.truncate(len(whole))
        begun = False
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
            except RecursionError:
                entry = None
            except ValueError:
                continue
            if _begins(entry):
                if other := self._other(entry):
                    raise InputError(f"{self.path} holds rows of another run ({other}): remove it, or name another")
                self.segment, begun = entry["segment"] + 1, True
            elif not (begun and _is_row(entry)):
                raise InputError(
                    f"{self.path}, line {number}: no row that a run kept: remove the file, or name another"
                )
            elif 0 <= entry["row"] < of:
                self.found[entry["row"]] = entry


def _begins(entry: object) -> bool:
    """Whether that is the line a run begins with."""
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("run"), dict)
        and type(entry.get("segment")) is int
        and "version" in entry
    )


def _is_row(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == {field.name for field in fields(Sent)}
        and type(entry["row"]) is int
        and all(type(entry[field.name]) in KINDS[field.type] for field in fields(Sent))
    )


def _identity(trace: pd.DataFrame, load: Load, url: str, served: Served) -> dict:
    """What makes two runs the same: the trace and the prompts sent as text, digested, how and to whom they are sent."""
    import pandas as pd

    def digest(names) -> str:
        rows = pd.util.hash_pandas_object(trace[[name for name in names if name in trace]], index=False)
        return hashlib.sha256(rows.to_numpy().tobytes()).hexdigest()[:16]

    how = {f"load.{key}": value for key, value in asdict(load).items() if key not in SECRET}
    server = {f"server.{key}": value for key, value in asdict(served).items()}
    prompts = digest(["prompt"]) if sends_text(load) and "prompt" in trace else None
    return {"trace": digest(NAMED), "prompts": prompts, "url": url} | how | server
