"""One step of an engine: schedule puts a batch in flight, complete delivers its tokens.

Reproduces vLLM V1's default scheduler step by step (requests, token counts, order, preemptions), synchronous and
asynchronous, and the two schedulers of vLLM 0.7. Rules, per scheduler:

With prefix caching (``v1`` only) an admitted request starts after the tokens whose blocks it finds; ``caching.py``.

``v1``  Running requests first, in order, each up to the token budget; one that finds no block preempts the last of
the queue, possibly itself. Then, unless something was preempted, waiting requests in order while seats, budget and
blocks for the whole prompt (plus the watermark, when anything runs) last. Only the blocks of a chunk are taken.

``v0_chunked``  The same order (decodes, the unfinished prefill, new ones), but a prompt's blocks are taken whole at
admission, the watermark always stays free, a running request needs one free block even where its tokens fit into its
last one (but for an unfinished prompt that fills its blocks), and admission goes on after a preemption: victims rejoin
the queue's head afterwards.

``v0_prefill_first``  Waiting requests first, whole prompts; only a step that admits none decodes.
"""

from __future__ import annotations

import numpy as np

from astrolabe_lab.sim.caching import adopt, keep_full, look_up, release, take
from astrolabe_lab.sim.compiled import V0_CHUNKED, V0_PREFILL_FIRST, V1, blocks_of, compiled, step_seconds
from astrolabe_lab.sim.queues import count_waiting, leave_waiting, preempt_until_free, requeue, tell_router
from astrolabe_lab.sim.state import FINISHED, NONE, RUNNING


@compiled
def admit(
    engines, requests, running, batch, done, log, grids, pool, lists, i, slot, n, budget, context, attention, prefills
):
    """Admit waiting requests in order while seats, budget and blocks last."""
    e = engines[i]
    v1 = e.scheduler == V1
    while budget > 0 and e.waiting_head != NONE and e.n_running < e.max_num_seqs:
        r = e.waiting_head
        q = requests[r]
        tokens = q.prompt + q.generated
        found, idle = look_up(e, pool, lists, q, r)
        computed = found * e.block_size
        new = tokens - computed
        if new > budget:
            if not e.chunked:
                break
            new = budget
        whole = blocks_of(tokens, e.block_size)
        watermark = e.watermark_blocks
        if v1 and e.n_running == 0:
            watermark = 0
        if whole - found + idle + watermark > e.free_blocks:
            break
        leave_waiting(engines, requests, running, batch, done, log, grids, pool, lists, i, r)
        if np.isnan(q.first_token_s):
            e.queued += 1
            e.queued_s += e.now_s - q.ready_s
            q.first_token_s = e.now_s
        adopt(e, pool, lists, q, found, idle)
        take(e, pool, lists, q, (blocks_of(computed + new, e.block_size) if v1 else whole) - found)
        keep_full(e, pool, lists, q, r, computed + new)
        q.state = RUNNING
        running[i, e.n_running] = r
        e.n_running += 1
        b = batch[i, slot, n]
        b.request = r
        b.tokens = new
        b.emits = 1 if computed + new == tokens else 0
        n += 1
        q.computed = computed + new
        q.in_flight += new
        q.placeholders += b.emits
        budget -= new
        context += computed
        if new > 1 or computed < q.prompt or b.emits == 0:
            prefills += 1
            attention += new * float(computed) + 0.5 * new * new
    return n, budget, context, attention, prefills


@compiled
def schedule(engines, requests, running, batch, done, log, grids, pool, lists, i):
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
        n, budget, context, attention, prefills = admit(
            engines, requests, running, batch, done, log, grids, pool, lists,
            i, slot, 0, budget, context, attention, prefills,
        )  # fmt: skip
    if n == 0:
        k = 0
        spare = e.free_blocks
        while k < e.n_running and budget > 0:
            r = running[i, k]
            q = requests[r]
            computed = q.computed
            known = q.prompt + q.generated + q.placeholders
            if q.placeholders > 0 and computed + 2 - q.placeholders >= q.prompt + q.output:
                k += 1  # asynchronous: the batch in flight brings its last token
                continue
            if computed + 1 == known and computed >= q.prompt and spare > 0:  # a decode that finds its block
                if computed == q.blocks * block_size:
                    take(e, pool, lists, q, 1)
                    spare -= 1
                keep_full(e, pool, lists, q, r, min(computed + 1, q.prompt + q.generated))
                b = batch[i, slot, n]
                b.request = r
                b.tokens = 1
                b.emits = 1
                n += 1
                k += 1
                q.computed = computed + 1
                q.in_flight += 1
                q.placeholders += 1
                budget -= 1
                context += computed
                continue
            new = min(known - computed, budget)
            new = min(new, last_position - computed)
            if new <= 0:
                k += 1
                continue
            decode = computed >= q.prompt and known - computed == 1
            need = 0  # blocks to take
            least = 0  # that must be free
            if v1:
                if computed + new > q.blocks * block_size:
                    need = blocks_of(computed + new, block_size) - q.blocks
                least = need
            elif decode or known % block_size > 0:
                need = 1 if computed + 1 > q.blocks * block_size else 0
                least = 1
            if least > e.free_blocks:
                victims = preempt_until_free(
                    engines, requests, running, batch, done, log, grids, pool, lists, i, least, r, victims
                )
                if victims == r:
                    break
            if need > 0:
                take(e, pool, lists, q, need)
            keep_full(e, pool, lists, q, r, min(computed + new, q.prompt + q.generated))
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
            spare = e.free_blocks
            if not decode:
                prefills += 1
                attention += new * float(computed) + 0.5 * new * new
        admitted_from = n
        if e.scheduler == V0_CHUNKED or (v1 and victims == NONE):
            n, budget, context, attention, prefills = admit(
                engines, requests, running, batch, done, log, grids, pool, lists,
                i, slot, n, budget, context, attention, prefills,
            )  # fmt: skip
    admitted = n - admitted_from
    if victims != NONE:
        requeue(engines, requests, running, batch, done, log, grids, pool, lists, i, victims)
    e.steady = 1 if prefills + admitted == 0 and victims == NONE and n == e.n_running else 0
    e.quiet = -1
    if n == 0:
        return 0
    tokens = e.max_num_batched_tokens - budget
    regime = 1 if prefills > 0 else 0
    start = e.now_s
    if e.n_in_flight > 0:
        start = e.end_s[e.oldest]
    seconds = step_seconds(e, grids, regime, tokens, n, context, attention)
    seconds *= e.slow_factor
    e.start_s[slot] = start
    e.end_s[slot] = start + seconds
    e.n_entries[slot] = n
    e.decode_only[slot] = e.steady
    e.n_in_flight += 1
    e.steps += 1
    e.tokens += tokens
    if log.size > 0:
        write_log(engines, requests, running, batch, done, log, grids, pool, lists, i, slot)
    return n


@compiled
def write_log(engines, requests, running, batch, done, log, grids, pool, lists, i, slot):
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


@compiled
def finish(e, requests, done, i, r, now_s):
    """Request r has its last token; its router hears of it."""
    q = requests[r]
    e.finished += 1
    e.decoded += q.generated - 1
    e.decoded_s += now_s - q.first_token_s
    q.state = FINISHED
    q.finished_s = now_s
    tell_router(done, i, q)


@compiled
def complete(engines, requests, running, batch, done, log, grids, pool, lists, i):
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
            count_waiting(e, q, -1)
            q.generated += 1
            count_waiting(e, q, 1)
        else:
            q.placeholders -= 1
            q.generated += 1
            if e.depth == 2:
                keep_full(e, pool, lists, q, b.request, q.computed - q.placeholders)
        if q.generated == 1:
            e.prefilled += q.prompt
            e.prefilled_s += t - q.first_token_s
            q.first_token_s = t
        if q.generated >= q.output:
            if stale:
                leave_waiting(engines, requests, running, batch, done, log, grids, pool, lists, i, b.request)
            else:
                release(e, pool, lists, q)
                ended += 1
            finish(e, requests, done, i, b.request, t)
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
