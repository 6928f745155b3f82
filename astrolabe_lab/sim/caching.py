"""KV blocks under prefix caching: which are free, who holds them, and what is found in them again.

As vLLM V1's block pool has it. A block that is full is remembered by what it and all before it contain; it stays so
when nobody holds it any more, until it is handed out again. A request that is admitted takes over the leading blocks
that are remembered, but never all of its tokens: the last must be computed. Blocks are handed out from the front of the
queue of free ones. A request gives its blocks back from the last to the first: those that are remembered join the
queue's end, so that the longest unused is forgotten first, the others its front.

An engine with ``pool_at`` has a pool and finds exactly what vLLM would. One that caches without a pool (in a Predictor,
which knows no block of an engine by its number) counts: it is told how many leading blocks a request would find, and
takes those of a preempted request to go in the order of the queue.
"""

from __future__ import annotations

import numpy as np

from astrolabe_lab.sim.compiled import compiled
from astrolabe_lab.sim.state import NONE

CHAIN = 2**31  # a key is the number of a chain of contents times this, plus the number of the block in its request


@compiled
def clear_pools(engines, pool, lists):
    """Empty the pools of all engines that have one."""
    for i in range(engines.size):
        if engines[i].pool_at != NONE:
            clear_pool(engines[i], pool, lists)


@compiled
def clear_pool(e, pool, lists):
    """All blocks are free, in the order of their numbers, and nothing is remembered. Block 0, vLLM's null block, ends
    the circle of the free ones."""
    for b in range(e.usable_blocks + 1):
        x = pool[e.pool_at + b]
        x.references = 0
        x.previous = b - 1 if b > 0 else e.usable_blocks
        x.next = b + 1 if b < e.usable_blocks else 0
        x.key = 0
        x.bucket = 0
        x.before = 0
        x.after = 0
    for seat in range(e.max_num_seqs + 1):
        lists[e.seats_at + seat] = seat
    e.seats_taken = 0


@compiled
def key_of(e, lists, q, r, number):
    """What the block of that number of request r = q contains, with all before it: equal where that is equal."""
    end = (number + 1) * e.block_size
    chain = np.int64(-1 - r)  # the request's own
    if end <= q.listed_tokens:
        chain = np.int64(lists[q.prefix_at + (end - 1) // e.prefix_block_tokens])
    return chain * CHAIN + number


@compiled
def bucket_of(e, key):
    return ((key * -7046029254386353131) >> 32) & e.bucket_mask  # 2**64 / golden ratio: neighbours go far apart


@compiled
def recall(e, pool, at, key):
    """The block that is remembered by ``key``, the first of several; 0: none is. The pool begins at ``pool[at]``."""
    b = pool[at + bucket_of(e, key)].bucket
    while b != 0 and pool[at + b].key != key:
        b = pool[at + b].after
    return b


@compiled
def remember(e, pool, b, key):
    at = e.pool_at
    x = pool[at + b]
    x.key = key
    x.before = 0
    x.after = 0
    head = pool[at + bucket_of(e, key)]
    if head.bucket == 0:
        head.bucket = b
        return
    last = head.bucket
    while pool[at + last].after != 0:
        last = pool[at + last].after
    pool[at + last].after = b
    x.before = last


@compiled
def forget(e, pool, b):
    at = e.pool_at
    x = pool[at + b]
    if x.before == 0:
        pool[at + bucket_of(e, x.key)].bucket = x.after
    else:
        pool[at + x.before].after = x.after
    if x.after != 0:
        pool[at + x.after].before = x.before
    x.key = 0


@compiled
def leave_free(pool, at, b):
    x = pool[at + b]
    pool[at + x.previous].next = x.next
    pool[at + x.next].previous = x.previous


@compiled
def join_free(pool, at, b, after):
    """Put block b among the free ones, behind ``after``."""
    x = pool[at + b]
    x.previous = after
    x.next = pool[at + after].next
    pool[at + x.next].previous = b
    pool[at + after].next = b


@compiled
def take(e, pool, lists, q, n):
    """Give request q n more blocks; as many must be free."""
    if pool is not None:
        if e.pool_at != NONE:
            at = e.pool_at
            for _ in range(n):
                b = pool[at].next
                leave_free(pool, at, b)
                if pool[at + b].key != 0:
                    forget(e, pool, b)
                pool[at + b].references = 1
                lists[e.tables_at + q.seat * e.table_width + q.blocks] = b
                q.blocks += 1
            e.free_blocks -= n
            return
    e.free_blocks -= n
    q.blocks += n


@compiled
def release(e, pool, lists, q):
    """Take all of request q's blocks; free are those that nobody else holds."""
    if pool is not None:
        if e.pool_at != NONE:
            at = e.pool_at
            front = 0
            for k in range(q.blocks - 1, -1, -1):
                b = lists[e.tables_at + q.seat * e.table_width + k]
                x = pool[at + b]
                x.references -= 1
                if x.references > 0:
                    continue
                e.free_blocks += 1
                if x.key == 0:
                    join_free(pool, at, b, front)
                    front = b
                else:
                    join_free(pool, at, b, pool[at].previous)
            e.seats_taken -= 1
            lists[e.seats_at + e.seats_taken] = q.seat
            q.blocks = 0
            return
    own = q.blocks - q.shared
    e.free_blocks += own
    e.freed += own
    q.blocks = 0


@compiled
def keep_full(e, pool, lists, q, r, tokens):
    """Remember the blocks of request r = q that its first ``tokens`` tokens fill."""
    if pool is not None:
        if e.pool_at != NONE:
            while q.cached < tokens // e.block_size:
                b = lists[e.tables_at + q.seat * e.table_width + q.cached]
                remember(e, pool, b, key_of(e, lists, q, r, q.cached))
                q.cached += 1


@compiled
def find(e, pool, at, lists, q, r):
    """(found, idle): the leading blocks of request r = q that are remembered, of those that it may take over, and how
    many of them nobody holds. The pool begins at ``pool[at]``. Their numbers are in the table of the next free seat."""
    table = e.tables_at + lists[e.seats_at + e.seats_taken] * e.table_width
    found = 0
    idle = 0
    while found < (q.prompt + q.generated - 1) // e.block_size:
        b = recall(e, pool, at, key_of(e, lists, q, r, found))
        if b == 0:
            break
        lists[table + found] = b
        found += 1
        if pool[at + b].references == 0:
            idle += 1
    return found, idle


@compiled
def look_up(e, pool, lists, q, r):
    """(found, idle) of the waiting request r = q, as ``find``."""
    if pool is not None:
        if e.pool_at != NONE:
            return find(e, pool, e.pool_at, lists, q, r)
    if e.caching == 0:
        return 0, 0
    lost = max(0, e.freed - e.free_blocks - q.kept_until)  # blocks handed out since these were next
    found = min(max(q.shared, q.cached - lost), (q.prompt + q.generated - 1) // e.block_size)
    return found, max(0, found - q.shared)


@compiled
def look_up_newcomer(engines, requests, pool, at, lists, i, r):
    """(found, idle) of request r, were it at engine i, as ``find``; the engine's pool, or a copy, is ``pool[at:]``."""
    if pool is not None:
        e = engines[i]
        if e.pool_at != NONE:
            return find(e, pool, at, lists, requests[r], r)
    return 0, 0


@compiled
def adopt(e, pool, lists, q, found, idle):
    """Give request q, which is being admitted, the blocks that ``look_up`` has just found."""
    q.blocks = found
    q.reused += found * e.block_size
    e.free_blocks -= idle
    if pool is not None:
        if e.pool_at != NONE:
            q.seat = lists[e.seats_at + e.seats_taken]
            e.seats_taken += 1
            q.cached = found
            for k in range(found):
                b = lists[e.tables_at + q.seat * e.table_width + k]
                if pool[e.pool_at + b].references == 0:
                    leave_free(pool, e.pool_at, b)
                pool[e.pool_at + b].references += 1
            return
    q.shared = found - idle


@compiled
def release_preempted(e, pool, lists, q):
    """``release`` of a request that will come back for its blocks."""
    if e.caching == 1 and e.pool_at == NONE:
        q.cached = min(q.computed, q.prompt + q.generated) // e.block_size
        q.kept_until = e.freed
    release(e, pool, lists, q)
    if e.caching == 1 and e.pool_at == NONE:
        q.shared = min(q.shared, q.cached)


@compiled
def count_shared(e, pool, lists, q):
    """How many of running request q's blocks this has seen in other requests since the last ``e.marks += 1``."""
    shared = 0
    if pool is not None:
        if e.pool_at != NONE:
            for k in range(min(q.blocks, q.listed_tokens // e.block_size)):  # no others can be anybody else's
                x = pool[e.pool_at + lists[e.tables_at + q.seat * e.table_width + k]]
                shared += x.mark == e.marks
                x.mark = e.marks
    return shared
