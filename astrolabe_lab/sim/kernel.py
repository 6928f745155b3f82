"""The compiled engine: a request's way through it is deliver -> schedule -> complete, repeated by advance.

Reproduces vLLM V1's default scheduler step by step (requests, token counts, order, preemptions), synchronous and
asynchronous, and the two schedulers of vLLM 0.7; ``schedule.py`` states their rules.
"""

from __future__ import annotations

import numpy as np

from astrolabe_lab.sim.caching import clear_pool
from astrolabe_lab.sim.compiled import compiled
from astrolabe_lab.sim.queues import deliver, first_in_line, next_in_line, take_inbox, tell_router
from astrolabe_lab.sim.schedule import complete, schedule, write_log
from astrolabe_lab.sim.state import FAILED, FINISHED, NONE, UNBORN
from astrolabe_lab.sim.steady import finishing_step, leap, quiet_steps, steady_step

__all__ = ["advance", "advance_all", "deliver", "stop"]


@compiled
def advance(engines, requests, running, batch, done, log, grids, pool, lists, i, until_s, target, leaps):
    """Run engine i up to ``until_s``: steps that end by then end, steps that start before it start.

    A step that would start exactly at ``until_s`` waits for the next call, so that a request delivered at that
    instant is still seen by it. Stops early when request ``target`` (or NONE) has finished.
    """
    run_until(engines, requests, running, batch, done, log, grids, pool, lists, i, until_s, target, leaps)
    e = engines[i]
    if until_s < np.inf and e.inbox_head != NONE:
        if e.n_in_flight == 0 and e.n_running + e.n_waiting == 0:  # idle: the first arrival wakes it, at its own time
            e.now_s = max(e.now_s, min(requests[e.inbox_head].ready_s, until_s))
        take_inbox(engines, requests, running, batch, done, log, grids, pool, lists, i, until_s)


@compiled
def run_until(engines, requests, running, batch, done, log, grids, pool, lists, i, until_s, target, leaps):
    """The steps of ``advance``."""
    e = engines[i]
    while True:
        if e.n_in_flight < e.depth and e.stalled == 0:
            if e.now_s >= until_s:
                return
            take_inbox(engines, requests, running, batch, done, log, grids, pool, lists, i, e.now_s)
            if e.n_running + e.n_waiting > 0:
                before = e.preemptions
                if schedule(engines, requests, running, batch, done, log, grids, pool, lists, i) > 0:
                    continue
                if e.n_in_flight > 0:
                    e.stalled = 1
                elif e.preemptions == before:
                    e.stuck = 1  # a bug: requests that can never run are rejected on delivery
                    return
                continue
            if e.n_in_flight == 0:
                if e.inbox_head == NONE:
                    return
                ready_s = requests[e.inbox_head].ready_s
                if ready_s >= until_s:
                    return
                e.now_s = ready_s
                continue
            e.stalled = 1
        slot = e.oldest
        if e.end_s[slot] > until_s:
            return
        if e.steady == 1 and e.n_in_flight == e.depth and e.decode_only[0] + e.decode_only[1] >= e.depth:
            if e.quiet < 0:
                e.quiet = quiet_steps(engines, requests, running, i)
            arrival_s = np.inf
            if e.n_waiting == 0 and e.inbox_head != NONE:
                # Behind a blocked queue an arrival changes nothing: blocks only get fewer until somebody finishes.
                arrival_s = requests[e.inbox_head].ready_s
            end_s = e.end_s[slot]
            if end_s < until_s and end_s < arrival_s:
                counted = e.pool_at == NONE  # blocks are alike; else each one taken or freed is a certain one
                long = min(until_s, arrival_s) - end_s > 2.0 * (end_s - e.start_s[slot])
                if leaps and long and e.quiet > 2 and counted:
                    if leap(engines, requests, running, grids, i, until_s, arrival_s) > 0:
                        continue
                if e.free_blocks > e.n_running and (e.quiet > 0 or (e.depth == 1 and e.n_waiting == 0 and counted)):
                    if log.size > 0:
                        # to show who waits
                        take_inbox(engines, requests, running, batch, done, log, grids, pool, lists, i, end_s)
                    if e.quiet > 0:
                        steady_step(engines, requests, running, grids, pool, lists, i)
                    else:
                        finishing_step(engines, requests, running, batch, done, grids, i)
                        if target != NONE and requests[target].state == FINISHED:
                            return
                    if log.size > 0 and e.n_in_flight > 0:
                        slot = (e.oldest + e.depth - 1) & 1
                        write_log(engines, requests, running, batch, done, log, grids, pool, lists, i, slot)
                    continue
        complete(engines, requests, running, batch, done, log, grids, pool, lists, i)
        if target != NONE and requests[target].state == FINISHED:
            return


@compiled
def advance_all(engines, requests, running, batch, done, log, grids, pool, lists, until_s, leaps):
    for i in range(engines.size):
        advance(engines, requests, running, batch, done, log, grids, pool, lists, i, until_s, NONE, leaps)


@compiled
def stop(engines, requests, running, batch, done, log, grids, pool, lists, i, now_s, give_back):
    """Engine i stops at now_s: batches in flight are lost, blocks are freed, every request on it has failed, or is
    handed back for another dispatch (state UNBORN, its tokens lost). Returns their indices, in the queues' order."""
    e = engines[i]
    lost = np.empty(e.n_running + e.n_waiting + requests.size, np.int64)
    n = 0
    for k in range(e.n_running):
        lost[n] = running[i, k]
        n += 1
    r = first_in_line(e)
    while r != NONE:
        lost[n] = r
        n += 1
        r = next_in_line(e, requests, r)
    for k in range(n):
        q = requests[lost[k]]
        q.previous = NONE
        q.next = NONE
        q.blocks = 0
        q.shared = 0
        q.computed = 0
        q.placeholders = 0
        q.in_flight = 0
        q.stale = 0
        tell_router(done, i, q)
        if give_back:
            q.state = UNBORN
            q.generated = 0
            q.first_token_s = np.nan
        else:
            q.state = FAILED
            q.finished_s = now_s
    e.n_running = 0
    e.n_waiting = 0
    e.waiting_tokens = 0
    e.waiting_prompts = 0
    e.waiting_blocks = 0
    e.waiting_head = NONE
    e.waiting_tail = NONE
    e.inbox_head = NONE
    e.inbox_tail = NONE
    e.n_in_flight = 0
    e.free_blocks = e.usable_blocks
    if pool is not None:
        if e.pool_at != NONE:
            clear_pool(e, pool, lists)
    e.steady = 0
    e.stalled = 0
    e.now_s = now_s
    e.queued = e.prefilled = e.decoded = 0
    e.queued_s = e.prefilled_s = e.decoded_s = 0.0
    return lost[:n]
