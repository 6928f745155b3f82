"""The rows of a run as they come, one JSON line each, so that a run that is killed loses none of them.

A run that finds such a file of its own goes on with what is missing. The answers that were under way are asked again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.bench.load import Load, Served, sends_text
from astrolabe_lab.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

VERSION = 2
NAMED = ("rid", "arrived_s", "prompt_tokens", "output_tokens", "predicted_tokens", "slo")
SECRET = ("api_key",)


class Kept:
    """Rows in the file ``path``. ``found``: those of earlier runs, by row of the trace; ``segment``: which run this is,
    from 0. Raises InputError where the file holds another run's rows."""

    def __init__(self, path: str | Path, trace: pd.DataFrame, load: Load, url: str, served: Served):
        self.path = Path(path)
        self.found: dict[int, dict] = {}
        self.segment = 0
        self._run = _identity(trace, load, url, served)
        if self.path.exists():
            self._read(len(trace))
        try:
            self._file = self.path.open("a")
        except OSError as error:
            raise InputError(f"{self.path}: rows cannot be kept there: {error.strerror}") from None
        self._write({"version": VERSION, "run": self._run, "segment": self.segment})

    def add(self, record) -> None:
        """Keep a finished row, a dataclass."""
        self._write({field.name: getattr(record, field.name) for field in fields(record)})

    def close(self) -> None:
        self._file.close()

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
        for line in whole.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if "run" in entry:
                if other := self._other(entry):
                    raise InputError(f"{self.path} holds rows of another run ({other}): remove it, or name another")
                self.segment = entry["segment"] + 1
            elif 0 <= entry["row"] < of:
                self.found[entry["row"]] = entry


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
