"""The rows of a run as they come, one JSON line each, so that a run that is killed loses none of them.

A run that finds such a file of its own goes on with what is missing. The answers that were under way are asked again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.bench.load import Load
from astrolabe_lab.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

VERSION = 1
NAMED = ("rid", "arrived_s", "prompt_tokens", "output_tokens", "predicted_tokens", "slo")
SECRET = ("api_key",)


class Kept:
    """Rows in the file ``path``. ``found``: those of earlier runs, by row of the trace; ``segment``: which run this is,
    from 0. Raises InputError where the file holds another run's rows."""

    def __init__(self, path: str | Path, trace: pd.DataFrame, load: Load, url: str):
        self.path = Path(path)
        self.found: dict[int, dict] = {}
        self.segment = 0
        self._run = _fingerprint(trace, load, url)
        if self.path.exists():
            self._read(len(trace))
        try:
            self._file = self.path.open("a")
        except OSError as error:
            raise InputError(f"{self.path}: rows cannot be kept there: {error.strerror}") from None
        self._write({"version": VERSION, "run": self._run, "segment": self.segment, "url": url})

    def add(self, record) -> None:
        """Keep a finished row, a dataclass."""
        self._write({field.name: getattr(record, field.name) for field in fields(record)})

    def close(self) -> None:
        self._file.close()

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
                if entry["run"] != self._run or entry["version"] != VERSION:
                    raise InputError(
                        f"{self.path} holds rows of another run (trace, load or URL differ): remove it, or name another"
                    )
                self.segment = entry["segment"] + 1
            elif 0 <= entry["row"] < of:
                self.found[entry["row"]] = entry


def _fingerprint(trace: pd.DataFrame, load: Load, url: str) -> str:
    import pandas as pd

    rows = pd.util.hash_pandas_object(trace[[name for name in NAMED if name in trace]], index=False)
    digest = hashlib.sha256(rows.to_numpy().tobytes())
    how = {key: value for key, value in asdict(load).items() if key not in SECRET}
    digest.update(json.dumps([how, url], sort_keys=True).encode())
    return digest.hexdigest()[:16]
