"""The status of a running engine in shared memory: an engine publishes at every step, anybody reads, no read is torn.

A file, mapped into memory by both sides, holds one status (the object of ``sim.status``) behind a counter that is odd
while the engine writes, and a checksum. The file costs no disk traffic worth naming and needs no clean-up service.
"""

from __future__ import annotations

import mmap
import os
import time
import zlib
from pathlib import Path

import numpy as np

from astrolabe_lab.errors import InputError
from astrolabe_lab.sim.status import HEADER, ROW, Status

MAGIC = 0x41535452_53544154  # "ASTRSTAT"
VERSION = 1
CAPACITY = 8192  # requests
TRIES = 1000

CONTROL = np.dtype(
    [
        ("magic", "u8"),
        ("version", "u8"),
        ("capacity", "u8"),
        ("pid", "u8"),
        ("born_ns", "u8"),  # tells a restarted engine from its predecessor
        ("sequence", "u8"),  # odd while a status is being written
        ("checksum", "u8"),
        ("steps", "u8"),
    ]
)
HEAD_BYTES = CONTROL.itemsize + HEADER.itemsize


class StatusWriter:
    """The engine's side. ``path`` is made anew; ``rows`` is where the next status' requests are written."""

    def __init__(self, path: str | Path, capacity: int = CAPACITY):
        path = Path(path)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        size = HEAD_BYTES + capacity * ROW.itemsize
        with unfinished.open("wb+") as file:
            file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
        self._control = np.frombuffer(self._memory, CONTROL, 1)[0:1]
        self._header = np.frombuffer(self._memory, HEADER, 1, CONTROL.itemsize)
        self.rows = np.frombuffer(self._memory, ROW, capacity, HEAD_BYTES)
        control = self._control
        control["magic"], control["version"], control["capacity"] = MAGIC, VERSION, capacity
        control["pid"], control["born_ns"] = os.getpid(), time.time_ns()
        self.write(np.zeros(1, HEADER), np.zeros(0, ROW))
        unfinished.replace(path)

    def write(self, header: np.ndarray, rows: np.ndarray) -> None:
        """Publish a status; requests past the capacity are left out of the rows but counted in the header."""
        control = self._control
        control["sequence"] += 1
        kept = rows[: len(self.rows)]
        self._header[:] = header
        self.rows[: len(kept)] = kept
        control["checksum"] = _checksum(header, kept)
        control["steps"] += 1
        control["sequence"] += 1


class StatusReader:
    """The other side of ``path``. ``read`` gives the newest status; ``epoch`` tells which life of the engine it is."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._inode = os.fstat(file.fileno()).st_ino
        except (OSError, ValueError) as error:
            raise InputError(f"status of an engine: {self.path} cannot be read ({error}); is the engine up?") from None
        if len(self._memory) < HEAD_BYTES:
            raise InputError(f"status of an engine: {self.path} is too short to be one")
        self._control = np.frombuffer(self._memory, CONTROL, 1)
        control = self._control[0]
        size = HEAD_BYTES + int(control["capacity"]) * ROW.itemsize
        if control["magic"] != MAGIC or control["version"] != VERSION or size != len(self._memory):
            raise InputError(f"status of an engine: {self.path} holds something else, or another version of it")
        self.epoch = (int(control["pid"]), int(control["born_ns"]))

    def current(self) -> bool:
        """Whether this is still the engine's file: a restarted engine publishes in a new one."""
        try:
            return os.stat(self.path).st_ino == self._inode
        except OSError:
            return False

    @property
    def steps(self) -> int:
        """Statuses published so far."""
        return int(self._control["steps"][0])

    def read(self) -> Status:
        """The newest status, whole. Raises TimeoutError where the engine died while it wrote one."""
        for attempt in range(TRIES):
            before = int(self._control["sequence"][0])
            if before % 2 == 0:
                header = np.frombuffer(self._memory, HEADER, 1, CONTROL.itemsize).copy()
                n = min(max(int(header["n_rows"][0]), 0), int(self._control["capacity"][0]))
                rows = np.frombuffer(self._memory, ROW, n, HEAD_BYTES).copy()
                checksum = int(self._control["checksum"][0])
                if int(self._control["sequence"][0]) == before and checksum == _checksum(header, rows):
                    return Status(header, rows)
            if attempt > 10:
                time.sleep(0.0001)
        raise TimeoutError(f"status of an engine: {self.path} is being written for ever; its engine is dead or stuck")


def _checksum(header: np.ndarray, rows: np.ndarray) -> int:
    return zlib.crc32(rows.tobytes(), zlib.crc32(header.tobytes()))
