"""The queues of an engine: inbox -> waiting -> running, and back to the head of waiting by preemption."""

from __future__ import annotations

from astrolabe_lab.sim.caching import release_preempted
from astrolabe_lab.sim.compiled import blocks_of, compiled
from astrolabe_lab.sim.state import INBOX, NONE, REJECTED, WAITING


@compiled
def count_waiting(e, q, sign):
    """Count request q as waiting (sign 1), or as waiting no more (-1)."""
    e.n_waiting += sign
    e.waiting_tokens += sign * (q.prompt + q.predicted)
    e.waiting_prompts += sign * q.prompt
    e.waiting_blocks += sign * blocks_of(q.prompt + q.generated, e.block_size)


@compiled
def tell_router(done, i, q):
    """Request q has ended at engine i: its router's ledger hears of it."""
    done[i, q.router, 0] += 1
    done[i, q.router, 1] += q.prompt + q.predicted


@compiled
def first_in_line(e):
    """The first request that engine e has not admitted: waiting ones come before the inbox. NONE: there is none."""
    return e.waiting_head if e.waiting_head != NONE else e.inbox_head


@compiled
def next_in_line(e, requests, r):
    """The request that comes after r, as in ``first_in_line``."""
    after = requests[r].next
    if after == NONE and requests[r].state == WAITING:
        return e.inbox_head
    return after


@compiled
def deliver(engines, requests, running, batch, done, log, grids, pool, lists, i, r, ready_s):
    """Hand request r to engine i, whose scheduler sees it from ready_s on. False: it can never run, rejected."""
    e = engines[i]
    q = requests[r]
    q.instance = i
    q.ready_s = ready_s
    if q.prompt + q.output > e.max_model_len or blocks_of(q.prompt + q.output - 1, e.block_size) > e.request_blocks:
        q.state = REJECTED
        q.finished_s = ready_s
        tell_router(done, i, q)
        return False
    q.state = INBOX
    after = e.inbox_tail
    while after != NONE and requests[after].ready_s > ready_s:
        after = requests[after].previous
    q.previous = after
    if after == NONE:
        q.next = e.inbox_head
        e.inbox_head = r
    else:
        q.next = requests[after].next
        requests[after].next = r
    if q.next == NONE:
        e.inbox_tail = r
    else:
        requests[q.next].previous = r
    return True


@compiled
def take_inbox(engines, requests, running, batch, done, log, grids, pool, lists, i, now_s):
    """Move what has arrived by now_s to the waiting queue's tail."""
    e = engines[i]
    while e.inbox_head != NONE:
        r = e.inbox_head
        q = requests[r]
        if q.ready_s > now_s:
            return
        e.inbox_head = q.next
        if q.next == NONE:
            e.inbox_tail = NONE
        else:
            requests[q.next].previous = NONE
        q.previous = e.waiting_tail
        q.next = NONE
        if e.waiting_tail == NONE:
            e.waiting_head = r
            e.steady = 0  # behind a blocked queue an arrival changes nothing; an empty one was not blocked
        else:
            requests[e.waiting_tail].next = r
        e.waiting_tail = r
        q.state = WAITING
        count_waiting(e, q, 1)


@compiled
def leave_waiting(engines, requests, running, batch, done, log, grids, pool, lists, i, r):
    e = engines[i]
    q = requests[r]
    if q.previous == NONE:
        e.waiting_head = q.next
    else:
        requests[q.previous].next = q.next
    if q.next == NONE:
        e.waiting_tail = q.previous
    else:
        requests[q.next].previous = q.previous
    q.previous = NONE
    q.next = NONE
    count_waiting(e, q, -1)


@compiled
def preempt_last(engines, requests, running, batch, done, log, grids, pool, lists, i, victims):
    """Take the last running request's blocks and put it before the other victims; returns it, the new first."""
    e = engines[i]
    e.n_running -= 1
    r = running[i, e.n_running]
    q = requests[r]
    release_preempted(e, pool, lists, q)
    q.lost = q.computed - q.in_flight
    q.computed = 0
    q.placeholders = 0
    q.stale = q.in_flight
    q.preemptions += 1
    q.state = WAITING
    q.previous = NONE
    q.next = victims
    if victims != NONE:
        requests[victims].previous = r
    e.preemptions += 1
    count_waiting(e, q, 1)
    if log.size > 0:
        at = engines[i].log_rows
        engines[i].log_rows += 1
        if at < log.size:  # a preemption is a row with 0 tokens, of the step being planned
            log[at].step = e.steps
            log[at].request = r
            log[at].tokens = 0
    return r


@compiled
def preempt_until_free(engines, requests, running, batch, done, log, grids, pool, lists, i, blocks, r, victims):
    """Preempt from the end of the running queue until so many blocks are free, or r itself is preempted; returns the
    first of the victims."""
    while engines[i].free_blocks < blocks and victims != r:
        victims = preempt_last(engines, requests, running, batch, done, log, grids, pool, lists, i, victims)
    return victims


@compiled
def requeue(engines, requests, running, batch, done, log, grids, pool, lists, i, victims):
    """Put the chain of victims at the head of the waiting queue."""
    e = engines[i]
    if victims == NONE:
        return
    last = victims
    while requests[last].next != NONE:
        last = requests[last].next
    requests[last].next = e.waiting_head
    if e.waiting_head == NONE:
        e.waiting_tail = last
    else:
        requests[e.waiting_head].previous = last
    e.waiting_head = victims
