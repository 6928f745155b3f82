"""What a proxy would have seen of the simulated pools by now: polled occupancy, and its own requests' streams."""

from __future__ import annotations

import numpy as np

from astrolabe_lab.disagg.compiled import compiled
from astrolabe_lab.disagg.kernel import run
from astrolabe_lab.disagg.state import ENDED
from astrolabe_lab.sim.state import NONE


@compiled
def poll(engines, requests, held, row, i, now_s):
    """Write engine i's occupancy to ``row``; ``held``: its requests that hold blocks without a seat."""
    e = engines[i]
    row.instance = i
    row.taken_s = now_s
    row.used_tokens = (e.usable_blocks - e.free_blocks) * e.block_size
    row.capacity_tokens = e.usable_blocks * e.block_size
    row.running = e.n_running
    waiting = e.n_waiting + held
    r = e.inbox_head
    while r != NONE:
        waiting += 1
        r = requests[r].next
    row.waiting = waiting


@compiled
def look(pools, now_s, interval_s, leak, p_polled, d_polled, rows):
    """Run the pools to ``now_s`` and write what a router knows then; returns how many ``rows`` are in flight.

    Occupancy is that of the last multiple of ``interval_s`` (0: of now). With ``leak`` the predicted lengths of
    requests in flight are the true ones, which no router could know.
    """
    header, way, open_, holding = pools[0], pools[1], pools[3], pools[5]
    prefill, decode = pools[8], pools[9]
    h = header[0]
    at_s = now_s
    if interval_s > 0.0:
        at_s = min(np.floor(now_s / interval_s) * interval_s, now_s)
    if at_s > h.polled_s:
        run(pools, at_s)
        h.polled_s = at_s
        for i in range(p_polled.size):
            poll(prefill[0], prefill[1], 0, p_polled[i], i, at_s)
        for i in range(d_polled.size):
            poll(decode[0], decode[1], holding[i, 2], d_polled[i], i, at_s)
    run(pools, now_s)
    requests = decode[1]
    n = 0
    for k in range(h.n_open):
        r = open_[k]
        w = way[r]
        if w.phase == ENDED:
            continue
        open_[n] = r
        q = requests[r]
        row = rows[n]
        row.rid = r
        row.prompt_tokens = q.prompt
        row.predicted_tokens = q.output if leak else q.predicted
        row.tight = w.tight
        row.prefill = w.prefill
        row.decode = w.decode
        row.sent_s = w.sent_s
        row.prefilled_s = w.prefilled_s
        row.streamed = q.generated
        row.first_token_s = q.first_token_s if q.generated > 0 else np.nan
        n += 1
    h.n_open = n
    return n
