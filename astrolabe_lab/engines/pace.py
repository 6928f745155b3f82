"""When an emulated step ends, and whether the host keeps up: how late steps end, against what was modelled."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from astrolabe_lab.errors import InputError

LATE_SHARE = 0.05  # of the modelled time: past this the host does not keep up, and what is measured is the host
PACE = np.dtype([("steps", "f8"), ("modelled_s", "f8"), ("late_s", "f8"), ("latest_s", "f8")])


def step_end(free_at: float, submitted: float, seconds: float, continues: bool) -> float:
    """When a step of ``seconds`` ends, all on one wall clock: the step before it ended at ``free_at``, and this one was
    ``submitted`` to the device.

    A step cost is the time from step to step, what the host does in between included. So where work ``continues``, the
    host's own time since the last step counts as this one's, as far as the step is long.
    """
    begin = max(free_at, submitted - seconds) if continues else max(free_at, submitted)
    return begin + seconds


class PaceWriter:
    """The engine's side: ``step`` once a step. Without a path nothing is kept."""

    def __init__(self, path: str | Path | None):
        self._record = np.zeros(1, PACE)
        if path:
            with Path(path).open("wb+") as file:
                file.truncate(PACE.itemsize)
                self._memory = mmap.mmap(file.fileno(), PACE.itemsize)
            self._record = np.frombuffer(self._memory, PACE)

    def step(self, modelled_s: float, late_s: float) -> None:
        """A step that was to take ``modelled_s`` on the wall clock ended ``late_s`` after its time."""
        record = self._record[0]
        record["steps"] += 1
        record["modelled_s"] += modelled_s
        record["late_s"] += late_s
        record["latest_s"] = max(record["latest_s"], late_s)


def read_pace(path: str | Path) -> dict:
    """``steps``, ``modelled_s`` and ``late_s`` (wall s), ``late_share`` (of these two) and ``latest_s`` of an emulated
    engine's life.

    Raises InputError where there is no such file."""
    try:
        record = np.frombuffer(Path(path).read_bytes(), PACE)[0]
    except (OSError, ValueError, IndexError) as error:
        raise InputError(f"pace of an emulated engine: {path} cannot be read ({error})") from None
    modelled = float(record["modelled_s"])
    return {
        "steps": int(record["steps"]),
        "modelled_s": modelled,
        "late_s": float(record["late_s"]),
        "late_share": float(record["late_s"]) / modelled if modelled else 0.0,
        "latest_s": float(record["latest_s"]),
    }
