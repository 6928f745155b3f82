"""The status of an instance: what its engine can tell.

A status shows the state as of a schedule: computed tokens are those before the step in flight, whose outcome nobody
knows yet. A Predictor turns it back into an engine (``restore``) and simulates that forward. The same object comes from
the simulator and, later, from a real engine's scheduler.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from astrolabe_lab.errors import InputError
from astrolabe_lab.sim.caching import count_shared, look_up
from astrolabe_lab.sim.compiled import compiled
from astrolabe_lab.sim.queues import first_in_line, next_in_line
from astrolabe_lab.sim.state import NONE, RUNNING, WAITING

VERSION = 1
NOW, NEXT = 1, 2  # bits of ROW.emits

HEADER = np.dtype(
    [
        ("taken_s", "f8"),
        ("step_started_s", "f8"),  # NaN when no step is in flight
        ("free_blocks", "i8"),
        ("n_running", "i8"),
        ("n_rows", "i8"),  # running requests in the queue's order, then waiting ones
        ("stalled", "i8"),  # asynchronous scheduling: nothing can be scheduled before the step in flight ends
    ],
    align=True,
)
ROW = np.dtype(
    [
        ("rid", "i8"),
        ("state", "i4"),  # RUNNING or WAITING
        ("prompt", "i4"),
        ("computed", "i4"),  # before the step in flight
        ("generated", "i4"),
        ("scheduled_now", "i4"),  # tokens in the step in flight
        ("scheduled_next", "i4"),  # tokens in the step queued behind it (asynchronous scheduling)
        ("emits", "i4"),  # whether these bring a token: bits NOW, NEXT
        ("predicted", "i4"),  # 0: unknown
        ("blocks", "i4"),
        ("preemptions", "i4"),
        # with prefix caching, else 0
        ("cached", "i4"),  # of a waiting request: its leading blocks that are in the engine's cache now
        ("shared", "i4"),  # of these, those that running ones hold; of a running one's blocks, those one before holds
    ],
    align=True,
)
OPTIONAL = ("cached", "shared")  # left out of the JSON where they are 0


@dataclass
class Status:
    """One instance's status. ``header``: shape (1,) HEADER; ``rows``: shape (n,) ROW; times in s, sizes in tokens
    and KV blocks."""

    header: np.ndarray
    rows: np.ndarray

    @property
    def taken_s(self) -> float:
        return float(self.header["taken_s"][0])

    @property
    def free_blocks(self) -> int:
        return int(self.header["free_blocks"][0])

    @property
    def running(self) -> int:
        return int(self.header["n_running"][0])

    @property
    def waiting(self) -> int:
        return len(self.rows) - self.running

    def to_json(self) -> str:
        """The status as JSON, version 1; ``from_json`` gives it back exactly."""
        started = float(self.header["step_started_s"][0])
        names = [n for n in ROW.names if n != "state"]
        requests = [
            {
                "state": "running" if row["state"] == RUNNING else "waiting",
                **{n: int(row[n]) for n in names if row[n] or n not in OPTIONAL},
            }
            for row in self.rows
        ]
        return json.dumps(
            {
                "version": VERSION,
                "taken_s": self.taken_s,
                "step_started_s": None if np.isnan(started) else started,
                "stalled": bool(self.header["stalled"][0]),
                "free_blocks": self.free_blocks,
                "requests": requests,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Status:
        """The status in ``text``. Raises InputError naming the field when it is not a status of this version.

        Whether it can be one of a certain engine is checked where it is used (``status_check``).
        """
        try:
            raw = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"status: not JSON: {error}") from None
        version = raw.get("version") if isinstance(raw, dict) else type(raw).__name__
        if version != VERSION or isinstance(version, bool):
            raise InputError(f"status: version {version!r} where {VERSION} is understood")
        _check_fields(raw, ("version", "taken_s", "step_started_s", "stalled", "free_blocks", "requests"), "status")
        if not isinstance(raw["stalled"], bool):
            raise InputError(f"status: stalled={raw['stalled']!r} must be true or false")
        if not isinstance(raw["requests"], list):
            raise InputError(f"status: requests={raw['requests']!r:.60} must be a list")
        header = np.zeros(1, HEADER)
        rows = np.zeros(len(raw["requests"]), ROW)
        header["taken_s"] = _seconds(raw["taken_s"], "taken_s")
        started = raw["step_started_s"]
        header["step_started_s"] = np.nan if started is None else _seconds(started, "step_started_s")
        header["free_blocks"] = _whole(raw["free_blocks"], "free_blocks", "i8")
        header["stalled"] = raw["stalled"]
        header["n_rows"] = len(rows)
        for j, request in enumerate(raw["requests"]):
            where = f"status: request {j}"
            _check_fields(request, ROW.names, where, OPTIONAL)
            if request["state"] not in ("running", "waiting"):
                raise InputError(f"{where}: state={request['state']!r:.60} must be running or waiting")
            rows["state"][j] = RUNNING if request["state"] == "running" else WAITING
            for name in ROW.names:
                if name != "state" and name in request:
                    rows[name][j] = _whole(request[name], f"request {j}: {name}", ROW[name].str)
        header["n_running"] = int((rows["state"] == RUNNING).sum())
        return cls(header, rows)


def _check_fields(entries, names, where: str, optional=()) -> None:
    if not isinstance(entries, dict):
        raise InputError(f"{where} is {entries!r:.60}, not an object of {', '.join(names)}")
    missing, unknown = set(names) - set(entries) - set(optional), set(entries) - set(names)
    for problem, found in (("missing", missing), ("unknown", unknown)):
        if found:
            raise InputError(f"{where}: {problem} {', '.join(sorted(found))}; its fields are {', '.join(names)}")


def _seconds(value, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
        raise InputError(f"status: {name}={value!r:.60} must be a finite number of seconds")
    return float(value)


def _whole(value, name: str, kind: str) -> int:
    most = np.iinfo(kind).max
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise InputError(f"status: {name}={value!r:.60} must be a whole number from 0 to {most}")
    return value


@compiled
def write_status(engines, requests, running, batch, done, log, grids, pool, lists, i, now_s, header, rows):
    """Write engine i's status at now_s (up to which it has been advanced). False: ``rows`` is too small, nothing
    usable was written and ``header.n_rows`` says how many are needed."""
    e = engines[i]
    h = header[0]
    h.taken_s = now_s
    h.free_blocks = e.free_blocks
    h.n_running = e.n_running
    h.stalled = e.stalled
    h.step_started_s = np.nan
    e.marks += 1
    n = 0
    for k in range(e.n_running):
        n = write_row(requests, running[i, k], RUNNING, rows, n)
        if n <= rows.size:
            rows[n - 1].shared = count_shared(e, pool, lists, requests[running[i, k]])
    r = first_in_line(e)
    while r != NONE and (requests[r].state == WAITING or requests[r].ready_s <= now_s):
        n = write_row(requests, r, WAITING, rows, n)
        if e.caching == 1 and n <= rows.size:
            found, idle = look_up(e, pool, lists, requests[r], r)
            rows[n - 1].cached = found
            rows[n - 1].shared = found - idle
        r = next_in_line(e, requests, r)
    h.n_rows = n
    if n > rows.size:
        return False
    slot = e.oldest
    if e.n_in_flight > 0:
        h.step_started_s = e.start_s[slot]
        for j in range(e.n_entries[slot]):
            row = rows[requests[batch[i, slot, j].request].row]
            row.scheduled_now = batch[i, slot, j].tokens
            row.emits |= NOW * batch[i, slot, j].emits
    if e.n_in_flight > 1:
        slot = 1 - slot
        for j in range(e.n_entries[slot]):
            row = rows[requests[batch[i, slot, j].request].row]
            row.scheduled_next = batch[i, slot, j].tokens
            row.emits |= NEXT * batch[i, slot, j].emits
    return True


@compiled
def write_row(requests, r, state, rows, n):
    """Write request r to row n, if there is such a row; returns n + 1."""
    if n >= rows.size:
        return n + 1
    q = requests[r]
    q.row = n
    row = rows[n]
    row.rid = r
    row.state = state
    row.prompt = q.prompt
    row.computed = q.lost if q.stale > 0 else q.computed - q.in_flight
    row.generated = q.generated
    row.scheduled_now = 0
    row.scheduled_next = 0
    row.emits = 0
    row.predicted = q.predicted
    row.blocks = q.blocks
    row.preemptions = q.preemptions
    row.cached = 0
    row.shared = 0
    return n + 1
