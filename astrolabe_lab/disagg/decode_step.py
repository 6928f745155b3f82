"""A decode engine's step: vLLM V1's schedule where a waiting request first pulls its KV blocks from prefill.

As vLLM 0.32's scheduler has it with a connector that loads asynchronously: running requests first. Then, unless
something was preempted and while seats and budget last, those that hold blocks already, in the order they began to
pull: the ones whose blocks are there take a seat and compute the last token of the prompt, which emits token 1. Then
waiting requests: a new one takes the blocks of its whole prompt, where these fit beside what running prefills still
need, and starts to pull without a seat; one that was preempted recomputes everything. The first that does not fit ends
the step's admissions.
"""

from __future__ import annotations

import numpy as np

from astrolabe_lab.disagg.compiled import compiled
from astrolabe_lab.disagg.state import ENDED, LANDED, LOCAL, PULLING, QUEUED, READY
from astrolabe_lab.sim.compiled import blocks_of, step_seconds
from astrolabe_lab.sim.queues import leave_waiting, take_inbox
from astrolabe_lab.sim.schedule import schedule
from astrolabe_lab.sim.state import FAILED, NONE, RUNNING


@compiled
def begin_pull(header, way, pulls, r, blocks, now_s):
    """Request r's blocks are asked for at prefill."""
    h = header[0]
    way[r].phase = PULLING
    way[r].pull_s = now_s
    x = pulls[h.n_pulls]
    x.request = r
    x.joins_s = now_s + h.base_s
    x.left_s = blocks * h.per_block_s
    x.joined = 0
    if way[r].held == 0:  # nothing is there any more
        way[r].failed = 1
        x.left_s = 0.0
    h.n_pulls += 1


@compiled
def hold(holding, requests, i, r):
    """Request r joins the end of engine i's list of requests that hold blocks without a seat."""
    tail = holding[i, 1]
    requests[r].previous = tail
    requests[r].next = NONE
    if tail == NONE:
        holding[i, 0] = r
    else:
        requests[tail].next = r
    holding[i, 1] = r
    holding[i, 2] += 1


@compiled
def unhold(holding, requests, i, r):
    q = requests[r]
    if q.previous == NONE:
        holding[i, 0] = q.next
    else:
        requests[q.previous].next = q.next
    if q.next == NONE:
        holding[i, 1] = q.previous
    else:
        requests[q.next].previous = q.previous
    q.previous = NONE
    q.next = NONE
    holding[i, 2] -= 1


@compiled
def notice_landed(way, holding, requests, i, seen_in):
    """Engine i's scheduler hears of pulls that have ended: those that the step of slot ``seen_in`` - 1 saw, or, -1,
    all."""
    r = holding[i, 0]
    while r != NONE:
        if way[r].phase == LANDED and (seen_in < 0 or way[r].seen_in == seen_in):
            way[r].phase = READY
        r = requests[r].next


@compiled
def reserved_blocks(e, requests, running, i):
    """Blocks that running requests which still compute their prompt will take."""
    reserved = 0
    for k in range(e.n_running):
        q = requests[running[i, k]]
        reserved += max(0, blocks_of(q.prompt + q.generated, e.block_size) - q.blocks)
    return reserved


@compiled
def seat(e, requests, running, batch, way, i, slot, n, r, computed, new):
    """Request r runs: ``new`` tokens after ``computed`` ones, as entry n of the batch in ``slot``."""
    q = requests[r]
    tokens = q.prompt + q.generated
    taken = max(0, blocks_of(computed + new, e.block_size) - q.blocks)
    e.free_blocks -= taken
    q.blocks += taken
    if np.isnan(q.first_token_s):
        e.queued += 1
        e.queued_s += e.now_s - q.ready_s
        q.first_token_s = e.now_s
    q.state = RUNNING
    way[r].phase = LOCAL
    running[i, e.n_running] = r
    e.n_running += 1
    b = batch[i, slot, n]
    b.request = r
    b.tokens = new
    b.emits = 1 if computed + new == tokens else 0
    q.computed = computed + new
    q.in_flight += new
    q.placeholders += b.emits


@compiled
def admit(
    header, way, pulls, holding,
    engines, requests, running, batch, done, log, grids, pool, lists, i, slot, n, budget,
):  # fmt: skip
    """The step's admissions; returns the batch's entries after them."""
    e = engines[i]
    h = header[0]
    r = holding[i, 0]
    while r != NONE:
        if budget <= 0 or e.n_running >= e.max_num_seqs:
            return n
        after = requests[r].next
        if way[r].phase == READY:
            q = requests[r]
            if way[r].failed == 1:
                e.free_blocks += q.blocks
                q.blocks = 0
                way[r].failed = 2
            computed = q.prompt - 1 if way[r].failed == 0 else 0
            new = q.prompt - computed
            if new > budget:
                if e.chunked == 0:
                    return n
                new = budget
            watermark = e.watermark_blocks if e.n_running > 0 else 0
            if blocks_of(q.prompt, e.block_size) - q.blocks + watermark > e.free_blocks:
                return n
            unhold(holding, requests, i, r)
            seat(e, requests, running, batch, way, i, slot, n, r, computed, new)
            n += 1
            budget -= new
        r = after
    while e.waiting_head != NONE and budget > 0:
        r = e.waiting_head
        q = requests[r]
        fresh = way[r].phase == QUEUED
        if e.n_running >= e.max_num_seqs and not (fresh and h.pull_at_once == 1):
            return n
        tokens = q.prompt + q.generated
        whole = blocks_of(tokens, e.block_size)
        watermark = e.watermark_blocks if e.n_running > 0 else 0
        if fresh:
            if whole + watermark > e.free_blocks - reserved_blocks(e, requests, running, i):
                return n
            leave_waiting(engines, requests, running, batch, done, log, grids, pool, lists, i, r)
            e.free_blocks -= whole
            q.blocks = whole
            hold(holding, requests, i, r)
            begin_pull(header, way, pulls, r, whole, e.now_s)
            continue
        new = tokens
        if new > budget:
            if e.chunked == 0:
                return n
            new = budget
        if whole + watermark > e.free_blocks:
            return n
        leave_waiting(engines, requests, running, batch, done, log, grids, pool, lists, i, r)
        seat(e, requests, running, batch, way, i, slot, n, r, 0, new)
        n += 1
        budget -= new
    return n


@compiled
def price(e, requests, batch, grids, i, slot, n):
    """Seconds of the batch in ``slot``. A last token of the prompt computed alone is a decode: one query token."""
    tokens = 0
    context = 0
    attention = 0.0
    regime = 0
    for j in range(n):
        b = batch[i, slot, j]
        before = requests[b.request].computed - b.tokens
        tokens += b.tokens
        context += before
        if b.tokens > 1 or b.emits == 0 or before < requests[b.request].prompt - 1:
            regime = 1
            attention += b.tokens * float(before) + 0.5 * b.tokens * b.tokens
    return step_seconds(e, grids, regime, tokens, n, context, attention) * e.slow_factor


@compiled
def schedule_decode(
    header, way, pulls, holding,
    engines, requests, running, batch, done, log, grids, pool, lists, i,
):  # fmt: skip
    """Plan the next batch of decode engine i at its ``now_s`` and put it in flight; returns the requests in it."""
    e = engines[i]
    take_inbox(engines, requests, running, batch, done, log, grids, pool, lists, i, e.now_s)
    slot = (e.oldest + e.n_in_flight) & 1
    head, tail = e.waiting_head, e.waiting_tail
    e.waiting_head = NONE  # out of sight of the engine's own admissions; its victims join what is hidden at the head
    e.waiting_tail = NONE
    preemptions = e.preemptions
    tokens = e.tokens
    n = 0
    if e.n_running > 0:
        n = schedule(engines, requests, running, batch, done, log, grids, pool, lists, i)
    if head != NONE:
        if e.waiting_head == NONE:
            e.waiting_head = head
        else:
            requests[e.waiting_tail].next = head
            requests[head].previous = e.waiting_tail
        e.waiting_tail = tail
    scheduled = n
    if e.preemptions == preemptions:
        budget = e.max_num_batched_tokens - (e.tokens - tokens)
        n = admit(
            header, way, pulls, holding,
            engines, requests, running, batch, done, log, grids, pool, lists, i, slot, n, budget,
        )  # fmt: skip
    if n == 0:
        return 0
    if scheduled == 0:
        e.start_s[slot] = e.end_s[e.oldest] if e.n_in_flight > 0 else e.now_s
        e.n_in_flight += 1
        e.steps += 1
    for j in range(scheduled, n):
        e.tokens += batch[i, slot, j].tokens
    e.n_entries[slot] = n
    e.steady = 0
    e.decode_only[slot] = 0
    e.end_s[slot] = e.start_s[slot] + price(e, requests, batch, grids, i, slot, n)
    if header[0].polls_at_launch == 1:
        r = holding[i, 0]
        while r != NONE:
            if way[r].phase == LANDED and way[r].seen_in == 0:
                way[r].seen_in = slot + 1
            r = requests[r].next
    return n


@compiled
def fail_pulls(way, holding, engines, requests, i, now_s):
    """Requests whose pull failed end there, where decode is told to fail them."""
    e = engines[i]
    r = holding[i, 0]
    while r != NONE:
        after = requests[r].next
        if way[r].phase == READY and way[r].failed == 1:
            unhold(holding, requests, i, r)
            e.free_blocks += requests[r].blocks
            requests[r].blocks = 0
            requests[r].state = FAILED
            requests[r].finished_s = now_s
            way[r].phase = ENDED
        r = after
