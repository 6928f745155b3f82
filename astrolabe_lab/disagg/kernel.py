"""The compiled P/D cluster: everything that happens in it, in the order of time.

At one instant: pulls that end, steps that end, requests that reach decode, leases that run out, and only then steps
that start, so that whatever comes at that instant is still seen by them.
"""

from __future__ import annotations

import numpy as np

from astrolabe_lab.disagg.compiled import compiled
from astrolabe_lab.disagg.decode_step import fail_pulls, notice_landed, schedule_decode
from astrolabe_lab.disagg.state import ENDED, LANDED, MOVING, PREFILL, QUEUED, READY
from astrolabe_lab.sim.queues import deliver, take_inbox
from astrolabe_lab.sim.schedule import complete, schedule
from astrolabe_lab.sim.state import FINISHED, NONE

PULLS, STEPS, ARRIVALS, LEASES, STARTS = range(5)


@compiled
def share(pulls, n, way, k):
    """Among how many the k-th pull shares the busier of its two ends."""
    out = 0
    into = 0
    w = way[pulls[k].request]
    for j in range(n):
        if pulls[j].joined == 1:
            other = way[pulls[j].request]
            out += other.prefill == w.prefill
            into += other.decode == w.decode
    return max(out, into)


@compiled
def next_pull(header, way, pulls):
    """(time, k): when the next pull begins to move, or ends, and which."""
    h = header[0]
    at_s = np.inf
    which = NONE
    for k in range(h.n_pulls):
        due_s = pulls[k].joins_s
        if pulls[k].joined == 1:
            due_s = h.moved_s + pulls[k].left_s * share(pulls, h.n_pulls, way, k)
        if due_s < at_s:
            at_s = due_s
            which = k
    return at_s, which


@compiled
def pull_happens(header, way, pulls, k, now_s):
    """The k-th pull begins to move, or ends. Returns the request whose pull has ended, or NONE."""
    h = header[0]
    joined = 0
    for j in range(h.n_pulls):
        if pulls[j].joined == 1:
            joined += 1
            pulls[j].left_s -= (now_s - h.moved_s) / share(pulls, h.n_pulls, way, j)
    h.moved_s = now_s
    if pulls[k].joined == 0 and pulls[k].left_s > 0.0:
        pulls[k].joined = 1
        return NONE
    r = pulls[k].request
    h.n_pulls -= 1
    for j in range(k, h.n_pulls):
        pulls[j] = pulls[j + 1]
    return r


@compiled
def free_pulled(engines, pulled, i, which):
    """Prefill engine i frees the blocks of ``pulled[i, which]``."""
    engines[i].free_blocks += pulled[i, which]
    pulled[i, which] = 0


@compiled
def run(pools, until_s):
    """Let happen what happens before ``until_s``, and at it all but the start of steps."""
    header, way, prefilled, open_, pulls, holding, wake_s, pulled, prefill, decode = pools
    p_engines, p_requests, p_running, p_batch, p_done, p_log, p_grids, p_pool, p_lists = prefill
    d_engines, d_requests, d_running, d_batch, d_done, d_log, d_grids, d_pool, d_lists = decode
    h = header[0]
    n_p = p_engines.size
    n = n_p + d_engines.size
    launch = h.polls_at_launch == 1
    while True:
        at_s, which = next_pull(header, way, pulls)
        kind = PULLS
        for i in range(n):
            e = p_engines[i] if i < n_p else d_engines[i - n_p]
            if e.n_in_flight > 0 and e.end_s[e.oldest] < at_s:
                at_s = e.end_s[e.oldest]
                kind = STEPS
                which = i
        if h.n_delivered < h.n_prefilled:
            w = way[prefilled[h.n_delivered]]
            due_s = w.prefilled_s + p_engines[w.prefill].frontend_s + h.proxy_s
            if due_s < at_s:
                at_s = due_s
                kind = ARRIVALS
        if h.n_leases < h.n_prefilled and h.lease_s < np.inf:
            due_s = way[prefilled[h.n_leases]].prefilled_s + h.lease_s
            if due_s < at_s:
                at_s = due_s
                kind = LEASES
        for i in range(n):
            if wake_s[i] < at_s:
                at_s = wake_s[i]
                kind = STARTS
                which = i
        if at_s > until_s or at_s == np.inf or (kind == STARTS and at_s >= until_s):
            return
        if kind == PULLS:
            r = pull_happens(header, way, pulls, which, at_s)
            if r == NONE:
                continue
            w = way[r]
            w.landed_s = at_s
            w.phase = LANDED
            p = w.prefill
            pulled[p, 0] += w.held
            w.held = 0
            if p_engines[p].n_in_flight == 0:
                free_pulled(p_engines, pulled, p, 0)
                wake_s[p] = at_s
            if d_engines[w.decode].n_in_flight == 0:
                w.phase = READY
                wake_s[n_p + w.decode] = at_s
        elif kind == STEPS and which < n_p:
            i = which
            e = p_engines[i]
            slot = e.oldest
            for j in range(e.n_entries[slot]):
                r = p_batch[i, slot, j].request
                way[r].held = p_requests[r].blocks
            complete(p_engines, p_requests, p_running, p_batch, p_done, p_log, p_grids, p_pool, p_lists, i)
            for j in range(e.n_entries[slot]):
                r = p_batch[i, slot, j].request
                if p_requests[r].state == FINISHED and way[r].phase == PREFILL:
                    way[r].phase = MOVING
                    way[r].prefilled_s = at_s
                    e.free_blocks -= way[r].held  # its token is dropped, its blocks stay
                    prefilled[h.n_prefilled] = r
                    h.n_prefilled += 1
                else:
                    way[r].held = 0
            free_pulled(p_engines, pulled, i, 1 + slot if launch else 0)
            wake_s[i] = at_s
        elif kind == STEPS:
            i = which - n_p
            e = d_engines[i]
            slot = e.oldest
            complete(d_engines, d_requests, d_running, d_batch, d_done, d_log, d_grids, d_pool, d_lists, i)
            for j in range(e.n_entries[slot]):
                r = d_batch[i, slot, j].request
                if d_requests[r].state == FINISHED:
                    way[r].phase = ENDED
            notice_landed(way, holding, d_requests, i, slot + 1 if launch else -1)
            wake_s[which] = at_s
        elif kind == ARRIVALS:
            r = prefilled[h.n_delivered]
            h.n_delivered += 1
            i = way[r].decode
            way[r].phase = QUEUED
            deliver(d_engines, d_requests, d_running, d_batch, d_done, d_log, d_grids, d_pool, d_lists, i, r, at_s)
            if d_engines[i].n_in_flight == 0:
                wake_s[n_p + i] = at_s
        elif kind == LEASES:
            r = prefilled[h.n_leases]
            h.n_leases += 1
            if way[r].phase <= QUEUED and way[r].held > 0:
                p = way[r].prefill
                pulled[p, 0] += way[r].held
                way[r].held = 0
                if p_engines[p].n_in_flight == 0:
                    free_pulled(p_engines, pulled, p, 0)
                    wake_s[p] = at_s
        elif which < n_p:
            i = which
            e = p_engines[i]
            wake_s[i] = np.inf
            e.now_s = at_s
            take_inbox(p_engines, p_requests, p_running, p_batch, p_done, p_log, p_grids, p_pool, p_lists, i, at_s)
            if e.n_running + e.n_waiting == 0:
                continue
            slot = (e.oldest + e.n_in_flight) & 1
            before = e.preemptions
            if schedule(p_engines, p_requests, p_running, p_batch, p_done, p_log, p_grids, p_pool, p_lists, i) > 0:
                if launch:
                    pulled[i, 1 + slot] += pulled[i, 0]
                    pulled[i, 0] = 0
                if e.n_in_flight < e.depth:
                    wake_s[i] = at_s
            elif e.n_in_flight == 0 and (pulled[i, 0] > 0 or e.preemptions > before):
                free_pulled(p_engines, pulled, i, 0)  # a step without tokens takes no time, and hears of pulls
                wake_s[i] = at_s
        else:
            i = which - n_p
            e = d_engines[i]
            wake_s[which] = np.inf
            e.now_s = at_s
            if h.recompute == 0:
                fail_pulls(way, holding, d_engines, d_requests, i, at_s)
            before = e.preemptions
            if (
                schedule_decode(
                    header,
                    way,
                    pulls,
                    holding,
                    d_engines,
                    d_requests,
                    d_running,
                    d_batch,
                    d_done,
                    d_log,
                    d_grids,
                    d_pool,
                    d_lists,
                    i,
                )  # fmt: skip
                > 0
            ):
                if e.n_in_flight < e.depth:
                    wake_s[which] = at_s
            elif e.n_in_flight == 0:
                unseen = False
                r = holding[i, 0]
                while r != NONE:
                    unseen |= way[r].phase == LANDED
                    r = d_requests[r].next
                notice_landed(way, holding, d_requests, i, -1)
                if unseen or e.preemptions > before:
                    wake_s[which] = at_s


@compiled
def send(pools, r, p, d, now_s):
    """The router sends request r to prefill engine p, and from there to decode engine d."""
    header, way, prefilled, open_, pulls, holding, wake_s, pulled, prefill, decode = pools
    p_engines, p_requests, p_running, p_batch, p_done, p_log, p_grids, p_pool, p_lists = prefill
    w = way[r]
    w.phase = PREFILL
    w.prefill = p
    w.decode = d
    w.sent_s = now_s
    deliver(p_engines, p_requests, p_running, p_batch, p_done, p_log, p_grids, p_pool, p_lists, p, r, now_s)
    if p_engines[p].n_in_flight == 0:
        wake_s[p] = now_s
    h = header[0]
    open_[h.n_open] = r
    h.n_open += 1
