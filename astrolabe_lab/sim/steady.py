"""Steady decoding: steps that only repeat the last one, taken in one pass or leapt over.

Every running request decodes, the batches in flight say the same, and nobody can be admitted: the next step is the
same requests again until one finishes, a block is missing or an arrival finds an empty queue. ``quiet`` counts the
steps before the first of them can finish (-1: not counted yet).
"""

from __future__ import annotations

import numpy as np

from astrolabe_lab.sim.caching import keep_full, take
from astrolabe_lab.sim.compiled import V1, blocks_of, compiled, grid_seconds, step_seconds
from astrolabe_lab.sim.schedule import finish
from astrolabe_lab.sim.state import NONE


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
def steady_step(engines, requests, running, grids, pool, lists, i):
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
        if pool is not None:
            if e.pool_at != NONE:
                if computed + 1 > q.blocks * block_size:
                    take(e, pool, lists, q, 1)
                keep_full(e, pool, lists, q, running[i, k], min(computed + 1, q.prompt + q.generated))
                continue
        if computed + 1 > q.blocks * block_size:
            q.blocks += 1
            taken += 1
    e.free_blocks -= taken
    seconds = step_seconds(e, grids, 0, n, n, context, 0.0)
    seconds *= e.slow_factor
    turn(e, seconds)
    e.quiet -= 1
    e.steps += 1
    e.tokens += n


@compiled
def finishing_step(engines, requests, running, batch, done, grids, i):
    """The step of steady decoding that ends it: some requests finish, the others decode on. Synchronous scheduling,
    nobody waiting, a free block for every running request and no pool, so that nothing else can happen."""
    e = engines[i]
    slot = e.oldest
    end_s = e.end_s[slot]
    kept = 0
    context = 0
    free = e.free_blocks
    quiet = np.int64(2**62)
    for k in range(e.n_running):
        r = running[i, k]
        q = requests[r]
        q.generated += 1
        if q.generated >= q.output:
            finish(e, requests, done, i, r, end_s)
            q.in_flight = 0
            q.placeholders = 0
            free += q.blocks - q.shared
            e.freed += q.blocks - q.shared
            q.blocks = 0
            continue
        running[i, kept] = r
        batch[i, slot, kept].request = r
        kept += 1
        context += q.computed
        q.computed += 1
        quiet = min(quiet, q.output - q.generated - 1)
        if q.computed > q.blocks * e.block_size:
            q.blocks += 1
            free -= 1
    e.n_running = kept
    e.free_blocks = free
    e.quiet = quiet
    if kept == 0:
        e.n_in_flight = 0
        e.steady = 0
        e.now_s = end_s
        return
    e.n_entries[slot] = kept
    turn(e, step_seconds(e, grids, 0, kept, kept, context, 0.0) * e.slow_factor)
    e.steps += 1
    e.tokens += kept


@compiled
def steps_with_blocks(engines, requests, running, i, room):
    """How many steps of steady decoding ``room`` blocks last: n requests take n blocks every block_size steps, and in
    between each takes one when the space in its last block is used up."""
    e = engines[i]
    n = e.n_running
    used_up = np.zeros(e.block_size, np.int64)  # requests by the steps that their last block still has space for
    for k in range(n):
        q = requests[running[i, k]]
        used_up[min(q.blocks * e.block_size - q.computed, e.block_size - 1)] += 1
    left = room % n
    steps = 0
    while steps < e.block_size - 1 and used_up[steps] <= left:
        left -= used_up[steps]
        steps += 1
    return room // n * e.block_size + steps


@compiled
def leap(engines, requests, running, grids, i, until_s, arrival_s):
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
    priced = n if e.padded < 0 else int(grids[e.padded + n])
    fixed = e.cost[0, 0] + e.cost[0, 1] + e.cost[0, 2] * priced + e.cost[0, 3] * priced
    per_kv = e.cost[0, 4]
    grid = e.grid[0]
    slow = e.slow_factor
    stop_s = min(until_s, arrival_s)
    oldest = e.oldest
    end_s = e.end_s[oldest]
    most = e.quiet
    if fixed > 0.0 and (stop_s - end_s) < most * fixed * slow:
        most = np.int64((stop_s - end_s) / (fixed * slow)) + 2  # a step takes at least `fixed`
        most = min(most, e.quiet)
    context = 0
    need = 0
    for k in range(n):
        q = requests[running[i, k]]
        context += q.computed
        if q.computed + most > q.blocks * e.block_size:
            need += blocks_of(q.computed + most, e.block_size) - q.blocks
    if need > room:
        most = min(most, steps_with_blocks(engines, requests, running, i, room))
    steps = 0
    if e.depth == 1:
        start_s = e.start_s[oldest]
        while steps < most and end_s < stop_s:
            start_s = end_s
            seconds = fixed + per_kv * context
            if grid >= 0:
                seconds += grid_seconds(grids, grid, priced, context)
            end_s = start_s + seconds * slow
            context += n
            steps += 1
        e.start_s[oldest] = start_s
        e.end_s[oldest] = end_s
    else:
        while steps < most and e.end_s[e.oldest] < stop_s:
            seconds = fixed + per_kv * context
            if grid >= 0:
                seconds += grid_seconds(grids, grid, priced, context)
            turn(e, seconds * slow)
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
