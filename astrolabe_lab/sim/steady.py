"""Steady decoding: steps that only repeat the last one, taken in one pass or leapt over.

Every running request decodes, the batches in flight say the same, and nobody can be admitted: the next step is the
same requests again until one finishes, a block is missing or an arrival finds an empty queue. ``quiet`` counts the
steps before the first of them can finish (-1: not counted yet).
"""

from __future__ import annotations

import numpy as np

from astrolabe_lab.sim.compiled import V1, blocks_of, compiled, step_seconds


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
