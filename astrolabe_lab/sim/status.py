"""The status of an instance: what its engine can tell, and an engine rebuilt from it.

A status shows the state as of a schedule: computed tokens are those before the step in flight, whose outcome nobody
knows yet. ``restore`` turns it back into a running engine with assumed output lengths; that is what a Predictor
simulates forward. The same object comes from the simulator and, later, from a real engine's scheduler.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from astrolabe_lab.errors import InputError
from astrolabe_lab.sim.compiled import blocks_of, compiled, step_seconds
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
    ],
    align=True,
)


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
            {"state": "running" if row["state"] == RUNNING else "waiting", **{n: int(row[n]) for n in names}}
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
        """The status in ``text``. Raises InputError naming the field when it is not a status of this version."""
        try:
            raw = json.loads(text)
            if not isinstance(raw, dict) or raw.get("version") != VERSION:
                found = raw.get("version") if isinstance(raw, dict) else type(raw).__name__
                raise InputError(f"status: version {found!r} where {VERSION} is understood")
            header = np.zeros(1, HEADER)
            rows = np.zeros(len(raw["requests"]), ROW)
            started = raw["step_started_s"]
            header["taken_s"] = raw["taken_s"]
            header["step_started_s"] = np.nan if started is None else started
            header["free_blocks"] = raw["free_blocks"]
            header["stalled"] = bool(raw["stalled"])
            header["n_rows"] = len(rows)
            for row, request in zip(rows, raw["requests"], strict=True):
                for name in ROW.names:
                    row[name] = (
                        {"running": RUNNING, "waiting": WAITING}[request[name]] if name == "state" else request[name]
                    )
            header["n_running"] = int((rows["state"] == RUNNING).sum())
        except KeyError as error:
            raise InputError(f"status: field or value {error} is missing or unknown") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise (error if isinstance(error, InputError) else InputError(f"status: not a status: {error}")) from None
        if (rows["state"][: int(header["n_running"][0])] != RUNNING).any():
            raise InputError("status: running requests must come before waiting ones")
        for name in ROW.names[2:]:
            if (rows[name] < 0).any():
                raise InputError(f"status: {name} must not be negative")
        return cls(header, rows)


@compiled
def write_status(engines, requests, running, batch, i, now_s, header, rows):
    """Write engine i's status at now_s (up to which it has been advanced). False: ``rows`` is too small, nothing
    usable was written and ``header.n_rows`` says how many are needed."""
    e = engines[i]
    h = header[0]
    arrived = 0
    r = e.inbox_head
    while r != NONE and requests[r].ready_s <= now_s:
        arrived += 1
        r = requests[r].next
    h.n_rows = e.n_running + e.n_waiting + arrived
    if h.n_rows > rows.size:
        return False
    h.taken_s = now_s
    h.free_blocks = e.free_blocks
    h.n_running = e.n_running
    h.stalled = e.stalled
    h.step_started_s = np.nan
    n = 0
    for k in range(e.n_running):
        write_row(requests, running[i, k], RUNNING, rows, n)
        n += 1
    r = e.waiting_head
    while r != NONE:
        write_row(requests, r, WAITING, rows, n)
        n += 1
        r = requests[r].next
    r = e.inbox_head
    for _ in range(arrived):
        write_row(requests, r, WAITING, rows, n)
        n += 1
        r = requests[r].next
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


@compiled
def assumed_output(e, prompt, generated, predicted, extension):
    """Output length assumed of a request: its prediction; once that is passed, ``extension`` more tokens than it has;
    never more than the engine lets it have."""
    output = predicted if generated < predicted else generated + extension
    room = min(e.max_model_len, e.request_blocks * e.block_size + 1) - prompt
    return max(min(output, room), generated + 1)


@compiled
def restore(engines, requests, running, batch, template, header, rows, extension):
    """Make engine 0 of a scratch state (room for all rows) the engine that ``header`` and ``rows`` describe, with the
    configuration and cost of ``template[0]`` and assumed output lengths. Request j is row j."""
    engines[0] = template[0]
    e = engines[0]
    h = header[0]
    e.now_s = h.taken_s
    e.free_blocks = h.free_blocks
    e.stalled = h.stalled
    e.n_running = h.n_running
    last = NONE
    n = np.zeros(2, np.int64)
    tokens = np.zeros(2, np.int64)
    context = np.zeros(2, np.int64)
    prefills = np.zeros(2, np.int64)
    attention = np.zeros(2, np.float64)
    for j in range(h.n_rows):
        row = rows[j]
        q = requests[j]
        in_flight = row.scheduled_now + row.scheduled_next
        q.prompt = row.prompt
        q.output = assumed_output(e, row.prompt, row.generated, row.predicted, extension)
        q.predicted = row.predicted
        q.generated = row.generated
        q.in_flight = in_flight
        q.blocks = row.blocks
        q.state = row.state
        q.preemptions = row.preemptions
        q.previous = NONE
        q.next = NONE
        q.router = 0
        q.instance = 0
        q.lost = 0
        q.ready_s = h.taken_s
        q.first_token_s = np.nan
        q.finished_s = np.nan
        if row.state == RUNNING:
            q.computed = row.computed + in_flight
            q.stale = 0
            q.placeholders = (row.emits & 1) + (row.emits >> 1)
            running[0, j] = j
        else:
            q.computed = 0
            q.stale = in_flight
            q.lost = row.computed
            q.placeholders = 0
            q.previous = last
            if last == NONE:
                e.waiting_head = j
            else:
                requests[last].next = j
            last = j
            e.n_waiting += 1
            e.waiting_blocks += blocks_of(q.prompt + q.generated, e.block_size)
        before = row.computed
        known = row.prompt + row.generated
        for slot in range(2):
            new = row.scheduled_now if slot == 0 else row.scheduled_next
            if new == 0:
                continue
            b = batch[0, slot, n[slot]]
            b.request = j
            b.tokens = new
            b.emits = (row.emits >> slot) & 1
            n[slot] += 1
            tokens[slot] += new
            context[slot] += before
            if not (b.emits == 1 and new == 1 and before >= row.prompt and before + 1 == known):
                prefills[slot] += 1
                attention[slot] += new * float(before) + 0.5 * new * new
            before += new
            known += b.emits
    e.waiting_tail = last
    start_s = h.step_started_s
    for slot in range(2):
        if n[slot] == 0:
            break
        regime = 1 if prefills[slot] > 0 else 0
        e.start_s[slot] = start_s
        e.end_s[slot] = start_s + step_seconds(e.cost, regime, tokens[slot], n[slot], context[slot], attention[slot])
        e.n_entries[slot] = n[slot]
        e.n_in_flight += 1
        start_s = e.end_s[slot]
