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
def deliver(engines, requests, running, batch, done, log, i, r, ready_s):
    """Hand request r to engine i, whose scheduler sees it from ready_s on. False: it can never run, rejected."""
    e = engines[i]
    q = requests[r]
    q.instance = i
    q.ready_s = ready_s
    room = e.usable_blocks
    if e.scheduler != V1:
        room -= e.watermark_blocks
    if q.prompt + q.output > e.max_model_len or blocks_of(q.prompt + q.output - 1, e.block_size) > room:
        q.state = REJECTED
        q.finished_s = ready_s
        done[i, q.router, 0] += 1
        done[i, q.router, 1] += q.prompt + q.predicted
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
def take_inbox(engines, requests, running, batch, done, log, i):
    """Move what has arrived by now to the waiting queue's tail."""
    e = engines[i]
    while e.inbox_head != NONE:
        r = e.inbox_head
        q = requests[r]
        if q.ready_s > e.now_s:
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
        else:
            requests[e.waiting_tail].next = r
        e.waiting_tail = r
        q.state = WAITING
        e.n_waiting += 1
        e.waiting_blocks += blocks_of(q.prompt + q.generated, e.block_size)


@compiled
def leave_waiting(engines, requests, running, batch, done, log, i, r):
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
    e.n_waiting -= 1
    e.waiting_blocks -= blocks_of(q.prompt + q.generated, e.block_size)


# --- schedule --------------------------------------------------------------------------------------------------


@compiled
def preempt_last(engines, requests, running, batch, done, log, i, victims):
    """Take the last running request's blocks and put it before the other victims; returns it, the new first."""
    e = engines[i]
    e.n_running -= 1
    r = running[i, e.n_running]
    q = requests[r]
    e.free_blocks += q.blocks
    q.blocks = 0
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
    e.n_waiting += 1
    e.waiting_blocks += blocks_of(q.prompt + q.generated, e.block_size)
    if log.size > 0:
        at = engines[i].log_rows
        engines[i].log_rows += 1
        if at < log.size:  # a preemption is a row with 0 tokens, of the step being planned
            log[at].step = e.steps
            log[at].request = r
            log[at].tokens = 0
    return r


@compiled
def requeue(engines, requests, running, batch, done, log, i, victims):
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


@compiled
def admit(engines, requests, running, batch, done, log, i, slot, n, budget, context, attention):
    """Admit waiting requests in order while seats, budget and blocks last."""
    e = engines[i]
    v1 = e.scheduler == V1
    while budget > 0 and e.waiting_head != NONE and e.n_running < e.max_num_seqs:
        r = e.waiting_head
        q = requests[r]
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
        leave_waiting(engines, requests, running, batch, done, log, i, r)
        blocks = blocks_of(new, e.block_size) if v1 else whole
        e.free_blocks -= blocks
        q.blocks = blocks
        q.state = RUNNING
        running[i, e.n_running] = r
        e.n_running += 1
        b = batch[i, slot, n]
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
def schedule(engines, requests, running, batch, done, log, i):
    """Plan the next batch of engine i at now_s and put it in flight; returns the number of requests in it."""
    e = engines[i]
    slot = (e.oldest + e.n_in_flight) & 1
    budget = e.max_num_batched_tokens
    n = 0
    context = 0
    attention = 0.0
    prefills = 0
    victims = NONE
    admitted_from = 0
    v1 = e.scheduler == V1
    block_size = e.block_size
    last_position = e.max_model_len - 1
    if e.scheduler == V0_PREFILL_FIRST:
        n, budget, context, attention = admit(engines, requests, running, batch, done, log, i, slot, 0, budget, context, attention)
    if n == 0:
        k = 0
        while k < e.n_running and budget > 0:
            r = running[i, k]
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
                        victims = preempt_last(engines, requests, running, batch, done, log, i, victims)
                        if victims == r:
                            lost = True
                            break
                    if lost:
                        break
                    e.free_blocks -= need
                    q.blocks += need
            elif decode:
                while e.free_blocks < 1:
                    victims = preempt_last(engines, requests, running, batch, done, log, i, victims)
                    if victims == r:
                        lost = True
                        break
                if lost:
                    break
                if computed + 1 > q.blocks * block_size:
                    e.free_blocks -= 1
                    q.blocks += 1
            b = batch[i, slot, n]
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
            n, budget, context, attention = admit(engines, requests, running, batch, done, log, i, slot, n, budget, context, attention)
    admitted = n - admitted_from
    if victims != NONE:
        requeue(engines, requests, running, batch, done, log, i, victims)
    e.steady = 1 if prefills + admitted == 0 and victims == NONE and n == e.n_running else 0
    e.quiet = -1
    if n == 0:
        return 0
    tokens = e.max_num_batched_tokens - budget
    regime = 1 if prefills + admitted > 0 else 0
    start = e.now_s
    if e.n_in_flight > 0:
        start = e.end_s[e.oldest]
    seconds = step_seconds(e.cost, regime, tokens, n, context, attention)
    seconds *= e.slow_factor
    e.start_s[slot] = start
    e.end_s[slot] = start + seconds
    e.n_entries[slot] = n
    e.decode_only[slot] = e.steady
    e.n_in_flight += 1
    e.steps += 1
    e.tokens += tokens
    if log.size > 0:
        write_log(engines, requests, running, batch, done, log, i, slot)
    return n


@compiled
def write_log(engines, requests, running, batch, done, log, i, slot):
    """One row a scheduled request, in scheduling order. Rows past the log's end are counted, not written."""
    e = engines[i]
    for j in range(e.n_entries[slot]):
        at = engines[i].log_rows
        engines[i].log_rows += 1
        if at < log.size:
            row = log[at]
            row.step = e.steps - 1
            row.request = batch[i, slot, j].request
            row.tokens = batch[i, slot, j].tokens
            row.start_s = e.start_s[slot]
            row.end_s = e.end_s[slot]
            row.free_blocks = e.free_blocks
            row.running = e.n_running
            row.waiting = e.n_waiting


# --- complete --------------------------------------------------------------------------------------------------


@compiled
def complete(engines, requests, running, batch, done, log, i):
    """The oldest batch ends: its tokens are delivered, finished requests leave."""
    e = engines[i]
    slot = e.oldest
    t = e.end_s[slot]
    ended = 0
    for j in range(e.n_entries[slot]):
        b = batch[i, slot, j]
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
                leave_waiting(engines, requests, running, batch, done, log, i, b.request)
            else:
                e.free_blocks += q.blocks
                q.blocks = 0
                ended += 1
            q.state = FINISHED
            q.finished_s = t
            e.finished += 1
            done[i, q.router, 0] += 1
            done[i, q.router, 1] += q.prompt + q.predicted
    if ended > 0:
        kept = 0
        for k in range(e.n_running):
            r = running[i, k]
            if requests[r].state == RUNNING:
                running[i, kept] = r
                kept += 1
        e.n_running = kept
        e.steady = 0
    e.oldest = 1 - slot
    e.n_in_flight -= 1
    e.now_s = t
    e.stalled = 0


# --- steady decoding -------------------------------------------------------------------------------------------
#
# Every running request decodes, the batches in flight say the same, and nobody can be admitted: the next step is the
# same requests again until one finishes, a block is missing or an arrival finds an empty queue. ``quiet`` counts the
# steps before the first of them can finish (-1: not counted yet).


@compiled
def quiet_steps(engines, requests, running, i):
    e = engines[i]
    quiet = np.int64(2**62)
    for k in range(e.n_running):
        q = requests[running[i, k]]
        quiet = min(quiet, q.output - q.generated - q.placeholders)
    return quiet


@compiled
def turn(e, seconds):
    """The oldest batch in flight has ended; one that takes ``seconds`` joins."""
    oldest = e.oldest
    if e.depth == 2:
        e.oldest = 1 - oldest
        e.start_s[oldest] = e.end_s[1 - oldest]
    else:
        e.start_s[oldest] = e.end_s[oldest]
    e.end_s[oldest] = e.start_s[oldest] + seconds


@compiled
def steady_step(engines, requests, running, i):
    """One step of steady decoding: end the oldest batch and schedule the next, request by request."""
    e = engines[i]
    n = e.n_running
    block_size = e.block_size
    context = 0
    taken = 0
    for k in range(n):
        q = requests[running[i, k]]
        computed = q.computed
        context += computed
        q.computed = computed + 1
        q.generated += 1
        if computed + 1 > q.blocks * block_size:
            q.blocks += 1
            taken += 1
    e.free_blocks -= taken
    seconds = step_seconds(e.cost, 0, n, n, context, 0.0)
    seconds *= e.slow_factor
    turn(e, seconds)
    e.quiet -= 1
    e.steps += 1
    e.tokens += n


@compiled
def leap(engines, requests, running, i, until_s, arrival_s):
    """Many steps of steady decoding at once.

    Counts change in closed form; times are accumulated step by step with the additions of single steps, so they are
    equal to the last bit. Stops before the first step that would start at or after ``until_s`` or see an arrival.
    Returns the number of steps, 0 where blocks are too scarce to know without stepping.
    """
    e = engines[i]
    n = e.n_running
    room = e.free_blocks
    if e.scheduler != V1:
        room -= 1  # V0: the last one to append must still see a free block
    context = 0
    low = 0
    high = e.quiet
    steps = high
    while True:  # the most steps whose blocks fit: all quiet ones, or what a bisection finds
        need = 0
        context = 0
        for k in range(n):
            q = requests[running[i, k]]
            context += q.computed
            if q.computed + steps > q.blocks * e.block_size:
                need += blocks_of(q.computed + steps, e.block_size) - q.blocks
        if need <= room:
            low = steps
        else:
            high = steps - 1
        if low >= high:
            break
        steps = (low + high + 1) // 2
    fixed = e.cost[0, 0] + e.cost[0, 1] + e.cost[0, 2] * n + e.cost[0, 3] * n
    per_kv = e.cost[0, 4]
    slow = e.slow_factor
    stop_s = min(until_s, arrival_s)
    steps = 0
    oldest = e.oldest
    end_s = e.end_s[oldest]
    if e.depth == 1:
        start_s = e.start_s[oldest]
        while steps < low and end_s < stop_s:
            start_s = end_s
            end_s = start_s + (fixed + per_kv * context) * slow
            context += n
            steps += 1
        e.start_s[oldest] = start_s
        e.end_s[oldest] = end_s
    else:
        while steps < low and e.end_s[e.oldest] < stop_s:
            turn(e, (fixed + per_kv * context) * slow)
            context += n
            steps += 1
    if steps == 0:
        return 0
    taken = 0
    for k in range(n):
        q = requests[running[i, k]]
        q.computed += steps
        q.generated += steps
        if q.computed > q.blocks * e.block_size:
            blocks = blocks_of(q.computed, e.block_size)
            taken += blocks - q.blocks
            q.blocks = blocks
    e.free_blocks -= taken
    e.quiet -= steps
    e.steps += steps
    e.tokens += steps * n
    return steps


# --- advance ---------------------------------------------------------------------------------------------------


@compiled
def advance(engines, requests, running, batch, done, log, i, until_s, target, leaps):
    """Run engine i up to ``until_s``: steps that end by then end, steps that start before it start.

    A step that would start exactly at ``until_s`` waits for the next call, so that a request delivered at that
    instant is still seen by it. Stops early when request ``target`` (or NONE) has finished.
    """
    e = engines[i]
    while True:
        if e.n_in_flight < e.depth and e.stalled == 0:
            if e.now_s >= until_s:
                return
            take_inbox(engines, requests, running, batch, done, log, i)
            if e.n_running + e.n_waiting > 0:
                before = e.preemptions
                if schedule(engines, requests, running, batch, done, log, i) > 0:
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
            if e.quiet > 0 and end_s < until_s and end_s < arrival_s:
                if leaps and e.quiet > 2 and min(until_s, arrival_s) - end_s > 2.0 * (end_s - e.start_s[slot]):
                    if leap(engines, requests, running, i, until_s, arrival_s) > 0:
                        continue
                if e.free_blocks > e.n_running:
                    steady_step(engines, requests, running, i)
                    if log.size > 0:
                        write_log(engines, requests, running, batch, done, log, i, (e.oldest + e.depth - 1) & 1)
                    continue
        complete(engines, requests, running, batch, done, log, i)
        if target != NONE and requests[target].state == FINISHED:
            return


@compiled
def advance_all(engines, requests, running, batch, done, log, until_s, leaps):
    for i in range(engines.size):
        advance(engines, requests, running, batch, done, log, i, until_s, NONE, leaps)


@compiled
def stop(engines, requests, running, batch, done, log, i, now_s, give_back):
    """Engine i stops at now_s: batches in flight are lost, blocks are freed, every request on it has failed, or is
    handed back for another dispatch (state UNBORN, its tokens lost). Returns the indices of these requests, in order."""
    e = engines[i]
    lost = np.empty(e.n_running + e.n_waiting + requests.size, np.int64)
    n = 0
    for k in range(e.n_running):
        lost[n] = running[i, k]
        n += 1
    r = e.waiting_head
    while r != NONE:
        lost[n] = r
        n += 1
        r = requests[r].next
    r = e.inbox_head
    while r != NONE:
        lost[n] = r
        n += 1
        r = requests[r].next
    for k in range(n):
        q = requests[lost[k]]
        q.previous = NONE
        q.next = NONE
        q.blocks = 0
        q.computed = 0
        q.placeholders = 0
        q.in_flight = 0
        q.stale = 0
        done[i, q.router, 0] += 1
        done[i, q.router, 1] += q.prompt + q.predicted
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
