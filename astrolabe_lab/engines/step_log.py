"""What an engine's last steps were and how long each took: the measurements that a step cost is fitted to.

The engine's scheduler appends one record a step to a ring in a file mapped into memory, so logging costs no system call
and a long-lived engine no disk. ``read_steps`` gives them as ``fit.fit`` takes them.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from astrolabe_lab.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from astrolabe_lab.cost import StepCost
    from astrolabe_lab.sim.status import Status

MAGIC = 0x41535452_53544550  # "ASTRSTEP"
CAPACITY = 1 << 16  # steps
HEAD = np.dtype([("magic", "u8"), ("capacity", "u8"), ("written", "u8")])
STEP = np.dtype(
    [
        ("scheduled_s", "f8"),  # the engine's clock, modelled s
        ("ended_s", "f8"),
        ("seconds", "f8"),  # from the end of the step before where the engine stayed busy, else from its scheduling
        ("new_tokens", "i8"),
        ("sequences", "i8"),
        ("context_tokens", "i8"),
        ("attention", "f8"),
        ("mixed", "u1"),
        ("after_idle", "u1"),
    ]
)


class StepLog:
    """The engine's side. ``path`` is made anew; None keeps nothing."""

    def __init__(self, path: str | Path | None, capacity: int = CAPACITY):
        self._records = None
        self._ended_s = -np.inf
        self._busy = False
        if path is None:
            return
        path = Path(path)
        unfinished = path.with_name(path.name + ".new")
        with unfinished.open("wb+") as file:
            file.truncate(HEAD.itemsize + capacity * STEP.itemsize)
            memory = mmap.mmap(file.fileno(), HEAD.itemsize + capacity * STEP.itemsize)
        self._head = np.frombuffer(memory, HEAD, 1)
        self._records = np.frombuffer(memory, STEP, capacity, HEAD.itemsize)
        self._head["magic"], self._head["capacity"] = MAGIC, capacity
        unfinished.replace(path)

    def step(self, scheduled_s: float, ended_s: float, counts: tuple, busy: bool) -> None:
        """A step scheduled at ``scheduled_s`` ended; ``counts``: new_tokens, sequences, context_tokens, attention,
        mixed. ``busy``: requests are left, so the next step follows at once."""
        if self._records is None:
            return
        continued = self._busy
        seconds = ended_s - (self._ended_s if continued else scheduled_s)
        self._ended_s, self._busy = ended_s, busy
        written = int(self._head["written"][0])
        self._records[written % len(self._records)] = (scheduled_s, ended_s, seconds, *counts, not continued)
        self._head["written"] = written + 1


def counts_of(chunks) -> tuple[int, int, int, float, bool]:
    """The counts that price a step of ``chunks``: (prompt tokens, computed before, tokens now) of each request."""
    new = context = n = 0
    attention = 0.0
    mixed = False
    for prompt, computed, tokens in chunks:
        n += 1
        new += tokens
        context += computed
        if computed < prompt or tokens > 1:
            mixed = True
            attention += tokens * float(computed) + 0.5 * tokens * tokens
    return new, n, context, attention, mixed


def in_flight_s(status: Status, cost: StepCost) -> float:
    """The price in s of the step that ``status`` shows in flight; 0 where there is none."""
    rows = status.rows[status.rows["scheduled_now"] > 0]
    if not len(rows):
        return 0.0
    return cost.step_seconds(*counts_of(rows[["prompt", "computed", "scheduled_now"]].tolist()))


def written(path: str | Path) -> int:
    """How many steps the engine has logged in its life, of which ``read_steps`` gives the last ones."""
    return int(_open(Path(path))[0]["written"][0])


def read_steps(path: str | Path, since: int = 0) -> pd.DataFrame:
    """The last steps of an engine, oldest first, from its ``since``-th on: ``scheduled_s, ended_s, seconds,
    new_tokens, sequences, context_tokens, attention, mixed, after_idle``.

    ``seconds`` is what a step adds to its requests' time: its host work and the gap before it included. Raises
    InputError where there is no such file.
    """
    import pandas as pd

    head, records = _open(Path(path))
    total, capacity = int(head["written"][0]), len(records)
    first = max(0, since, total - capacity)
    order = np.arange(first, total) % capacity
    frame = pd.DataFrame(records[order])
    return frame.assign(mixed=frame["mixed"].astype(bool), after_idle=frame["after_idle"].astype(bool))


def _open(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"steps of an engine: {path} cannot be read ({error.strerror}); is the engine up?") from None
    head = np.frombuffer(raw, HEAD, 1) if len(raw) >= HEAD.itemsize else None
    if head is None or head["magic"] != MAGIC or len(raw) != HEAD.itemsize + int(head["capacity"][0]) * STEP.itemsize:
        raise InputError(f"steps of an engine: {path} holds something else")
    return head, np.frombuffer(raw, STEP, int(head["capacity"][0]), HEAD.itemsize)
