"""One call a decision: advance the engines, read their signals, add the router's own ledger."""

from __future__ import annotations

from astrolabe_lab.sim import kernel
from astrolabe_lab.sim.compiled import compiled
from astrolabe_lab.sim.signals import read_signals
from astrolabe_lab.sim.state import NONE


@compiled
def observe(state, now_s, leaps, reachable, base, taken_s, sent, router, order, shown):
    """Advance all engines to now_s, refresh the signals of the reachable ones, and show router's view of ``order``."""
    engines, requests, running, batch, done, log, grids, pool, lists = state
    for i in range(engines.size):
        kernel.advance(engines, requests, running, batch, done, log, grids, pool, lists, i, now_s, NONE, leaps)
        if reachable[i]:
            read_signals(engines, requests, running, batch, i, now_s, base[i])
            taken_s[i] = now_s
    reveal(base, taken_s, now_s, sent, done, router, order, shown)


@compiled
def reveal(base, taken_s, now_s, sent, done, router, order, shown):
    """Copy the signals of the instances in ``order``, with their age and the router's ledger (dispatched - ended)."""
    for k in range(order.size):
        i = order[k]
        shown[k] = base[i]
        shown[k].age_s = now_s - taken_s[i]
        shown[k].in_flight = sent[i, router, 0] - done[i, router, 0]
        shown[k].in_flight_tokens = sent[i, router, 1] - done[i, router, 1]
