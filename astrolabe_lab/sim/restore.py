"""An engine rebuilt from its status, with assumed output lengths: what a Predictor simulates forward."""

from __future__ import annotations

import numpy as np

from astrolabe_lab.sim.compiled import compiled, step_seconds
from astrolabe_lab.sim.queues import count_waiting
from astrolabe_lab.sim.state import NONE, RUNNING


@compiled
def assumed_output(e, prompt, generated, predicted, extension):
    """Output length assumed of a request: its prediction; once that is passed, ``extension`` more tokens than it has;
    never more than the engine lets it have."""
    output = predicted if generated < predicted else generated + extension
    room = min(e.max_model_len, e.request_blocks * e.block_size + 1) - prompt
    return max(min(output, room), generated + 1)


@compiled
def restore(engines, requests, running, batch, grids, template, header, rows, extension):
    """Make engine 0 of a scratch state (room for all rows) the engine that ``header`` and ``rows`` describe, with the
    configuration and cost of ``template[0]`` and assumed output lengths. Request j is row j."""
    engines[0] = template[0]
    e = engines[0]
    h = header[0]
    e.now_s = h.taken_s
    e.free_blocks = h.free_blocks
    e.freed = 0
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
        emitting = (row.emits & 1) + (row.emits >> 1)
        q.prompt = row.prompt
        # At least what is being generated: no engine schedules a token past the request's last.
        q.output = max(assumed_output(e, row.prompt, row.generated, row.predicted, extension), row.generated + emitting)
        q.predicted = row.predicted
        q.generated = row.generated
        q.in_flight = in_flight
        q.blocks = row.blocks
        q.cached = row.cached
        q.shared = row.shared
        q.kept_until = row.shared - row.cached  # as if they were the last in the queue of free blocks
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
            q.placeholders = emitting
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
            count_waiting(e, q, 1)
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
        e.end_s[slot] = start_s + step_seconds(e, grids, regime, tokens[slot], n[slot], context[slot], attention[slot])
        e.n_entries[slot] = n[slot]
        e.n_in_flight += 1
        start_s = e.end_s[slot]
