"""Whether a status can be one of an engine's: compiled code has no bounds checks, so it must be known before it runs.

A status from outside (JSON, a sidecar) may be damaged or another engine's. What is checked is what every engine of this
configuration keeps to at every instant; a status that passes can be simulated to the end.
"""

from __future__ import annotations

import numpy as np

from astrolabe_lab.errors import InputError
from astrolabe_lab.sim.compiled import V1, blocks_of, compiled
from astrolabe_lab.sim.state import RUNNING, WAITING

(
    SOUND, TIMES, COUNTS, ORDER, SEATS, FREE_BLOCKS, STALLED, NEGATIVE, PROMPT, LENGTH, MEMORY, ASYNCHRONOUS, BATCH,
    EMITS, COMPUTED, IDLE, BLOCKS, NOT_WAITING, STEP, CACHED,
) = range(20)  # fmt: skip

REASONS = {
    TIMES: "taken_s and step_started_s must be finite, and no step starts after the status was taken",
    COUNTS: "the header's numbers of requests are not those of the rows",
    ORDER: "running requests must come before waiting ones, and there are no other states",
    SEATS: "more requests run, or are scheduled in a step, than max_num_seqs={max_num_seqs}",
    FREE_BLOCKS: "the free blocks and those of the requests are not the engine's {usable_blocks} in all",
    STALLED: "stalled is for asynchronous scheduling with a step in flight",
    NEGATIVE: "no number of tokens, blocks or preemptions can be negative",
    PROMPT: "prompt must be 1 token at least",
    LENGTH: "an unfinished request of prompt and generated tokens must be within max_model_len={max_model_len}",
    MEMORY: "prompt and generated tokens need more than the {request_blocks} blocks that a request can hold",
    ASYNCHRONOUS: "a step in flight behind another, or of a preempted request, takes asynchronous scheduling",
    BATCH: "more tokens are scheduled in a step than max_num_batched_tokens={max_num_batched_tokens}",
    EMITS: "emits must say of each step in flight whether it computes the last token known",
    COMPUTED: "computed and scheduled tokens are more than the request has",
    IDLE: "a running request has tokens computed or scheduled, and if none is scheduled, some left to compute",
    BLOCKS: "blocks must hold the tokens computed and scheduled (under V0 the whole prompt)",
    NOT_WAITING: "a waiting request holds no blocks and no computed tokens",
    CACHED: "cached and shared are for prefix caching, of full blocks that leave the request a token to compute",
    STEP: "step_started_s is given when, and only when, tokens are scheduled now",
}  # fmt: skip


@compiled
def find_flaw(template, header, rows):
    """(flaw, row): what keeps the status from being one of engine ``template[0]``'s, SOUND if nothing does, and the
    row it was found in, -1 for the status as a whole."""
    e = template[0]
    h = header[0]
    if not (np.isfinite(h.taken_s) and (np.isnan(h.step_started_s) or np.isfinite(h.step_started_s))):
        return TIMES, -1
    if h.step_started_s > h.taken_s:
        return TIMES, -1
    if h.n_rows != rows.size or h.n_running < 0 or h.n_running > h.n_rows:
        return COUNTS, -1
    if h.n_running > e.max_num_seqs:
        return SEATS, -1
    if h.free_blocks < 0 or h.free_blocks > e.usable_blocks:
        return FREE_BLOCKS, -1
    held = h.free_blocks
    n_now = n_next = tokens_now = tokens_next = 0
    for j in range(rows.size):
        row = rows[j]
        if row.state != (RUNNING if j < h.n_running else WAITING):
            return ORDER, j
        flaw = flaw_of(e, row)
        if flaw != SOUND:
            return flaw, j
        held += row.blocks if row.state == WAITING else row.blocks - row.shared
        n_now += row.scheduled_now > 0
        n_next += row.scheduled_next > 0
        tokens_now += row.scheduled_now
        tokens_next += row.scheduled_next
    if held != e.usable_blocks:
        return FREE_BLOCKS, -1
    if max(n_now, n_next) > e.max_num_seqs:
        return SEATS, -1
    if max(tokens_now, tokens_next) > e.max_num_batched_tokens:
        return BATCH, -1
    if (n_now > 0) == np.isnan(h.step_started_s) or (n_next > 0 and n_now == 0):
        return STEP, -1
    if h.stalled != 0 and (h.stalled != 1 or e.depth < 2 or n_now == 0 or n_next > 0):
        return STALLED, -1
    return SOUND, -1


@compiled
def flaw_of(e, row):
    """The flaw of one row, SOUND if it has none."""
    least = min(row.computed, row.generated, row.scheduled_now, row.scheduled_next)
    if min(least, row.predicted, row.blocks, row.preemptions, row.cached, row.shared) < 0:
        return NEGATIVE
    if row.prompt < 1:
        return PROMPT
    known = row.prompt + row.generated
    most = (known - 1) // e.block_size if e.caching == 1 else 0
    if row.state == RUNNING and (row.cached > 0 or row.shared > min(row.blocks, most)):
        return CACHED
    if row.state == WAITING and (row.cached > most or row.shared > row.cached):
        return CACHED
    after_now = row.computed + row.scheduled_now
    emits_now = 1 if row.scheduled_now > 0 and after_now == known else 0
    emits_next = 1 if row.scheduled_next > 0 and after_now + row.scheduled_next == known + emits_now else 0
    if row.emits != emits_now + 2 * emits_next:
        return EMITS
    if after_now > known or after_now + row.scheduled_next > known + emits_now:
        return COMPUTED
    held = known + max(1, emits_now + emits_next)  # of tokens, at the earliest possible end
    if held > e.max_model_len:
        return LENGTH
    if blocks_of(held - 1, e.block_size) > e.request_blocks:
        return MEMORY
    if row.scheduled_next > 0 and e.depth < 2:
        return ASYNCHRONOUS
    if row.state == RUNNING:
        if after_now + row.scheduled_next == 0 or (row.computed == known and emits_now + emits_next == 0):
            return IDLE
        needed = after_now + row.scheduled_next
        if e.scheduler != V1:
            needed = max(needed, row.prompt)
        if row.blocks < blocks_of(needed, e.block_size):
            return BLOCKS
        return SOUND
    if row.scheduled_next > 0 or (row.scheduled_now > 0 and (e.depth < 2 or row.preemptions == 0)):
        return ASYNCHRONOUS
    if row.blocks > 0 or (row.scheduled_now == 0 and row.computed > 0):
        return NOT_WAITING
    return SOUND


def check_status(status, template) -> None:
    """Raise InputError when ``status`` cannot be one of engine ``template[0]``'s (an ENGINE array of length 1)."""
    flaw, j = find_flaw(template, status.header, status.rows)
    if flaw == SOUND:
        return
    engine = {name: int(template[name][0]) for name in template.dtype.names if template[name].shape == (1,)}
    where = f"request {status.rows['rid'][j]} (row {j}): " if j >= 0 else ""
    raise InputError(f"status: {where}{REASONS[flaw].format(**engine)}; take a fresh one of this engine's")
