"""The compiled engine: one request's way through it is deliver -> schedule -> complete, repeated by advance.

Reproduces vLLM V1's default scheduler step by step (requests, token counts, order, preemptions), synchronous and
asynchronous, and the two schedulers of vLLM 0.7. Rules, per scheduler:

``v1``  Running requests first, in order, each up to the token budget; one that finds no block preempts the last of
the queue, possibly itself. Then, unless something was preempted, waiting requests in order while seats, budget and
blocks for the whole prompt (plus the watermark, when anything runs) last. Only the blocks of a chunk are taken.

``v0_chunked``  The same order (decodes, the unfinished prefill, new ones), but a prompt's blocks are taken whole at
admission, the watermark always stays free, a decode needs one free block even where its token fits into its last one,
and admission goes on after a preemption: victims rejoin the queue's head afterwards.

``v0_prefill_first``  Waiting requests first, whole prompts; only a step that admits none decodes.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from astrolabe_lab.sim.state import FAILED, FINISHED, INBOX, NONE, REJECTED, RUNNING, WAITING

compiled = njit(cache=True, error_model="numpy", nogil=True)

V1, V0_CHUNKED, V0_PREFILL_FIRST = 0, 1, 2


@compiled
def blocks_of(tokens, block_size):
    return (tokens + block_size - 1) // block_size


@compiled
def step_seconds(cost, regime, new_tokens, sequences, context_tokens, attention):
    """Step time in s; the order of the additions is part of the contract (oracles reproduce it bit for bit)."""
    return (
        cost[regime, 0]
        + cost[regime, 1]
        + cost[regime, 2] * new_tokens
        + cost[regime, 3] * sequences
        + cost[regime, 4] * context_tokens
        + cost[regime, 5] * attention
    )


# --- arrival ---------------------------------------------------------------------------------------------------


@compiled
def deliver(s, i, r, ready_s):
    """Hand request r to engine i, whose scheduler sees it from ready_s on. False: it can never run, rejected."""
    e = s.engines[i]
    q = s.requests[r]
    q.instance = i
    q.ready_s = ready_s
    room = e.usable_blocks
    if e.scheduler != V1:
        room -= e.watermark_blocks
    if q.prompt + q.output > e.max_model_len or blocks_of(q.prompt + q.output - 1, e.block_size) > room:
        q.state = REJECTED
        q.finished_s = ready_s
        s.done[i, q.router, 0] += 1
        s.done[i, q.router, 1] += q.prompt + q.predicted
        return False
    q.state = INBOX
    after = e.inbox_tail
    while after != NONE and s.requests[after].ready_s > ready_s:
        after = s.requests[after].previous
    q.previous = after
    if after == NONE:
        q.next = e.inbox_head
        e.inbox_head = r
    else:
        q.next = s.requests[after].next
        s.requests[after].next = r
    if q.next == NONE:
        e.inbox_tail = r
    else:
        s.requests[q.next].previous = r
    return True


@compiled
def take_inbox(s, i):
    """Move what has arrived by now to the waiting queue's tail."""
    e = s.engines[i]
    while e.inbox_head != NONE:
        r = e.inbox_head
        q = s.requests[r]
        if q.ready_s > e.now_s:
            return
        e.inbox_head = q.next
        if q.next == NONE:
            e.inbox_tail = NONE
        else:
            s.requests[q.next].previous = NONE
        q.previous = e.waiting_tail
        q.next = NONE
        if e.waiting_tail == NONE:
            e.waiting_head = r
        else:
            s.requests[e.waiting_tail].next = r
        e.waiting_tail = r
        q.state = WAITING
        e.n_waiting += 1
        e.waiting_blocks += blocks_of(q.prompt + q.generated, e.block_size)


@compiled
def leave_waiting(s, i, r):
    e = s.engines[i]
    q = s.requests[r]
    if q.previous == NONE:
        e.waiting_head = q.next
    else:
        s.requests[q.previous].next = q.next
    if q.next == NONE:
        e.waiting_tail = q.previous
    else:
        s.requests[q.next].previous = q.previous
    q.previous = NONE
    q.next = NONE
    e.n_waiting -= 1
    e.waiting_blocks -= blocks_of(q.prompt + q.generated, e.block_size)


# --- schedule --------------------------------------------------------------------------------------------------


@compiled
def preempt_last(s, i, victims):
    """Take the last running request's blocks and put it before the other victims; returns it, the new first."""
    e = s.engines[i]
    e.n_running -= 1
    r = s.running[i, e.n_running]
    q = s.requests[r]
    e.free_blocks += q.blocks
    q.blocks = 0
    q.computed = 0
    q.placeholders = 0
    q.stale = q.in_flight
    q.preemptions += 1
    q.state = WAITING
    q.previous = NONE
    q.next = victims
    if victims != NONE:
        s.requests[victims].previous = r
    e.preemptions += 1
    e.n_waiting += 1
    e.waiting_blocks += blocks_of(q.prompt + q.generated, e.block_size)
    if s.log.size > 0:
        at = s.log_size[0]
        s.log_size[0] += 1
        if at < s.log.size:  # a preemption is a row with 0 tokens, of the step being planned
            s.log[at].step = e.steps
            s.log[at].request = r
            s.log[at].tokens = 0
    return r


@compiled
def requeue(s, i, victims):
    """Put the chain of victims at the head of the waiting queue."""
    e = s.engines[i]
    if victims == NONE:
        return
    last = victims
    while s.requests[last].next != NONE:
        last = s.requests[last].next
    s.requests[last].next = e.waiting_head
    if e.waiting_head == NONE:
        e.waiting_tail = last
    else:
        s.requests[e.waiting_head].previous = last
    e.waiting_head = victims


@compiled
def admit(s, i, slot, n, budget, context, attention):
    """Admit waiting requests in order while seats, budget and blocks last."""
    e = s.engines[i]
    v1 = e.scheduler == V1
    while budget > 0 and e.waiting_head != NONE and e.n_running < e.max_num_seqs:
        r = e.waiting_head
        q = s.requests[r]
        tokens = q.prompt + q.generated
        new = tokens
        if new > budget:
            if not e.chunked:
                break
            new = budget
        whole = blocks_of(tokens, e.block_size)
        watermark = e.watermark_blocks
        if v1 and e.n_running == 0:
            watermark = 0
        if whole + watermark > e.free_blocks:
            break
        leave_waiting(s, i, r)
        blocks = blocks_of(new, e.block_size) if v1 else whole
        e.free_blocks -= blocks
        q.blocks = blocks
        q.state = RUNNING
        s.running[i, e.n_running] = r
        e.n_running += 1
        b = s.batch[i, slot, n]
        b.request = r
        b.tokens = new
        b.emits = 1 if new == tokens else 0
        n += 1
        q.computed = new
        q.in_flight += new
        q.placeholders += b.emits
        budget -= new
        attention += 0.5 * new * new
    return n, budget, context, attention


@compiled
def schedule(s, i):
    """Plan the next batch of engine i at now_s and put it in flight; returns the number of requests in it."""
    e = s.engines[i]
    slot = (e.oldest + e.n_in_flight) & 1
    budget = e.max_num_batched_tokens
    n = 0
    context = 0
    attention = 0.0
    prefills = 0
    victims = NONE
    admitted_from = 0
    v1 = e.scheduler == V1
    requests = s.requests
    running = s.running[i]
    batch = s.batch[i, slot]
    block_size = e.block_size
    last_position = e.max_model_len - 1
    if e.scheduler == V0_PREFILL_FIRST:
        n, budget, context, attention = admit(s, i, slot, 0, budget, context, attention)
    if n == 0:
        k = 0
        while k < e.n_running and budget > 0:
            r = running[k]
            q = requests[r]
            computed = q.computed
            known = q.prompt + q.generated + q.placeholders
            if q.placeholders > 0 and computed + 2 - q.placeholders >= q.prompt + q.output:
                k += 1  # asynchronous: the batch in flight brings its last token
                continue
            new = min(known - computed, budget)
            new = min(new, last_position - computed)
            if new <= 0:
                k += 1
                continue
            decode = computed >= q.prompt and known - computed == 1
            lost = False
            if v1:
                if computed + new > q.blocks * block_size:
                    need = blocks_of(computed + new, block_size) - q.blocks
                    while need > e.free_blocks:
                        victims = preempt_last(s, i, victims)
                        if victims == r:
                            lost = True
                            break
                    if lost:
                        break
                    e.free_blocks -= need
                    q.blocks += need
            elif decode:
                while e.free_blocks < 1:
                    victims = preempt_last(s, i, victims)
                    if victims == r:
                        lost = True
                        break
                if lost:
                    break
                if computed + 1 > q.blocks * block_size:
                    e.free_blocks -= 1
                    q.blocks += 1
            b = batch[n]
            b.request = r
            b.tokens = new
            b.emits = 1 if computed + new == known else 0
            n += 1
            k += 1
            q.computed = computed + new
            q.in_flight += new
            q.placeholders += b.emits
            budget -= new
            context += computed
            if not decode:
                prefills += 1
                attention += new * float(computed) + 0.5 * new * new
        admitted_from = n
        if e.scheduler == V0_CHUNKED or (v1 and victims == NONE):
            n, budget, context, attention = admit(s, i, slot, n, budget, context, attention)
    admitted = n - admitted_from
    if victims != NONE:
        requeue(s, i, victims)
    e.steady = 1 if prefills + admitted == 0 and victims == NONE and n == e.n_running else 0
    if n == 0:
        return 0
    tokens = e.max_num_batched_tokens - budget
    regime = 1 if prefills + admitted > 0 else 0
    start = e.now_s
    if e.n_in_flight > 0:
        start = e.end_s[e.oldest]
    seconds = step_seconds(e.cost, regime, tokens, n, context, attention)
    if e.slow_factor != 1.0:
        seconds *= e.slow_factor
    e.start_s[slot] = start
    e.end_s[slot] = start + seconds
    e.n_entries[slot] = n
    e.decode_only[slot] = e.steady
    e.n_in_flight += 1
    e.steps += 1
    e.tokens += tokens
    if s.log.size > 0:
        write_log(s, i, slot)
    return n


@compiled
def write_log(s, i, slot):
    """One row a scheduled request, in scheduling order. Rows past the log's end are counted, not written."""
    e = s.engines[i]
    for j in range(e.n_entries[slot]):
        at = s.log_size[0]
        s.log_size[0] += 1
        if at < s.log.size:
            row = s.log[at]
            row.step = e.steps - 1
            row.request = s.batch[i, slot, j].request
            row.tokens = s.batch[i, slot, j].tokens
            row.start_s = e.start_s[slot]
            row.end_s = e.end_s[slot]
            row.free_blocks = e.free_blocks
            row.running = e.n_running
            row.waiting = e.n_waiting


# --- complete --------------------------------------------------------------------------------------------------


@compiled
def complete(s, i):
    """The oldest batch ends: its tokens are delivered, finished requests leave."""
    e = s.engines[i]
    requests = s.requests
    slot = e.oldest
    batch = s.batch[i, slot]
    t = e.end_s[slot]
    ended = 0
    for j in range(e.n_entries[slot]):
        b = batch[j]
        q = requests[b.request]
        q.in_flight -= b.tokens
        stale = q.stale > 0
        if stale:
            q.stale -= b.tokens
        if b.emits == 0:
            continue
        if stale:
            # Delivered although the request was preempted meanwhile: it waits with one more token to recompute.
            e.waiting_blocks += blocks_of(q.prompt + q.generated + 1, e.block_size) - blocks_of(
                q.prompt + q.generated, e.block_size
            )
        else:
            q.placeholders -= 1
        q.generated += 1
        if q.generated == 1:
            q.first_token_s = t
        if q.generated >= q.output:
            if stale:
                leave_waiting(s, i, b.request)
            else:
                e.free_blocks += q.blocks
                q.blocks = 0
                ended += 1
            q.state = FINISHED
            q.finished_s = t
            e.finished += 1
            s.done[i, q.router, 0] += 1
            s.done[i, q.router, 1] += q.prompt + q.predicted
    if ended > 0:
        kept = 0
        for k in range(e.n_running):
            r = s.running[i, k]
            if s.requests[r].state == RUNNING:
                s.running[i, kept] = r
                kept += 1
        e.n_running = kept
        e.steady = 0
    e.oldest = 1 - slot
    e.n_in_flight -= 1
    e.now_s = t
    e.stalled = 0


@compiled
def leap(s, i, until_s):
    """Leap over steps in which every running request decodes, none finishes and all find their blocks.

    Counts change in closed form; times are accumulated step by step with the same additions as single steps, so they
    are equal to the last bit. Stops before the first step that would start at or after ``until_s`` or that an arrival
    would see.
    """
    e = s.engines[i]
    n = e.n_running
    most = np.int64(2**62)
    need = 0
    context = 0
    for k in range(n):
        q = s.requests[s.running[i, k]]
        most = min(most, q.output - q.generated - q.placeholders)
        context += q.computed
    if most <= 1:
        return
    room = e.free_blocks
    if e.scheduler != V1:
        room -= 1  # V0: the last one to append must still see a free block
    if room < 0:
        return
    # Largest number of steps up to `most` whose blocks fit: all of them, or what a bisection finds.
    low = 0
    high = most
    steps = most
    while True:
        need = 0
        for k in range(n):
            q = s.requests[s.running[i, k]]
            if q.computed + steps > q.blocks * e.block_size:
                need += blocks_of(q.computed + steps, e.block_size) - q.blocks
        if need <= room:
            low = steps
        else:
            high = steps - 1
        if low >= high:
            break
        steps = (low + high + 1) // 2
    most = low
    if most <= 1:
        return
    arrival_s = np.inf
    if e.n_waiting == 0 and e.inbox_head != NONE:
        # Behind a blocked queue an arrival changes nothing: blocks only get fewer until somebody finishes.
        arrival_s = s.requests[e.inbox_head].ready_s
    fixed = e.cost[0, 0] + e.cost[0, 1] + e.cost[0, 2] * n + e.cost[0, 3] * n
    per_kv = e.cost[0, 4]
    slow = e.slow_factor
    oldest = e.oldest
    newest = (oldest + e.n_in_flight - 1) & 1
    start0, end0 = e.start_s[oldest], e.end_s[oldest]
    start1, end1 = e.start_s[newest], e.end_s[newest]
    deep = e.depth == 2
    done = 0
    while done < most and end0 < until_s and end0 < arrival_s:
        seconds = fixed + per_kv * context
        if slow != 1.0:
            seconds *= slow
        if deep:
            start0, end0 = start1, end1
            start1 = end1
            end1 = end1 + seconds
        else:
            start0 = end0
            end0 = end0 + seconds
        context += n
        done += 1
    if done == 0:
        return
    need = 0
    for k in range(n):
        q = s.requests[s.running[i, k]]
        if q.computed + done > q.blocks * e.block_size:
            need += blocks_of(q.computed + done, e.block_size) - q.blocks
    e.free_blocks -= need
    for k in range(n):
        q = s.requests[s.running[i, k]]
        q.computed += done
        q.generated += done
        if q.computed > q.blocks * e.block_size:
            q.blocks = blocks_of(q.computed, e.block_size)
    e.start_s[oldest], e.end_s[oldest] = start0, end0
    if deep:
        e.start_s[newest], e.end_s[newest] = start1, end1
    e.steps += done
    e.tokens += done * n


# --- advance ---------------------------------------------------------------------------------------------------


@compiled
def advance(s, i, until_s, target, leaps):
    """Run engine i up to ``until_s``: steps that end by then end, steps that start before it start.

    A step that would start exactly at ``until_s`` waits for the next call, so that a request delivered at that
    instant is still seen by it. Stops early when request ``target`` (or NONE) has finished.
    """
    e = s.engines[i]
    while True:
        if e.n_in_flight < e.depth and e.stalled == 0:
            if e.now_s >= until_s:
                return
            take_inbox(s, i)
            if e.n_running + e.n_waiting > 0:
                before = e.preemptions
                if schedule(s, i) > 0:
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
                ready_s = s.requests[e.inbox_head].ready_s
                if ready_s >= until_s:
                    return
                e.now_s = ready_s
                continue
            e.stalled = 1
        slot = e.oldest
        if e.end_s[slot] > until_s:
            return
        if (
            leaps
            and e.steady == 1
            and e.n_in_flight == e.depth
            and e.decode_only[slot] == 1
            and (e.depth == 1 or e.decode_only[1 - slot] == 1)
            and until_s - e.end_s[slot] > 3.0 * (e.end_s[slot] - e.start_s[slot])
        ):
            leap(s, i, until_s)
            if e.end_s[e.oldest] > until_s:
                return
        complete(s, i)
        if target != NONE and s.requests[target].state == FINISHED:
            return


@compiled
def advance_all(s, until_s, leaps):
    for i in range(s.engines.size):
        advance(s, i, until_s, NONE, leaps)


@compiled
def stop(s, i, now_s, give_back):
    """Engine i stops at now_s: batches in flight are lost, blocks are freed, every request on it has failed, or is
    handed back for another dispatch (state UNBORN, its tokens lost). Returns the indices of these requests, in order."""
    e = s.engines[i]
    lost = np.empty(e.n_running + e.n_waiting + s.requests.size, np.int64)
    n = 0
    for k in range(e.n_running):
        lost[n] = s.running[i, k]
        n += 1
    r = e.waiting_head
    while r != NONE:
        lost[n] = r
        n += 1
        r = s.requests[r].next
    r = e.inbox_head
    while r != NONE:
        lost[n] = r
        n += 1
        r = s.requests[r].next
    for k in range(n):
        q = s.requests[lost[k]]
        q.previous = NONE
        q.next = NONE
        q.blocks = 0
        q.computed = 0
        q.placeholders = 0
        q.in_flight = 0
        q.stale = 0
        s.done[i, q.router, 0] += 1
        s.done[i, q.router, 1] += q.prompt + q.predicted
        if give_back:
            q.state = 0
            q.generated = 0
            q.first_token_s = np.nan
        else:
            q.state = FAILED
            q.finished_s = now_s
    e.n_running = 0
    e.n_waiting = 0
    e.waiting_blocks = 0
    e.waiting_head = NONE
    e.waiting_tail = NONE
    e.inbox_head = NONE
    e.inbox_tail = NONE
    e.n_in_flight = 0
    e.free_blocks = e.usable_blocks
    e.steady = 0
    e.stalled = 0
    e.now_s = now_s
    return lost[:n]
