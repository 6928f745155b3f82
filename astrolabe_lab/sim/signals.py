"""What a router can know of an instance: its signals, all of them with one age."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from astrolabe_lab.sim.compiled import blocks_of, compiled
from astrolabe_lab.sim.state import NONE

SIGNALS = np.dtype(
    [
        ("instance", "i8"),
        ("age_s", "f8"),  # of everything below but the router's own ledger
        ("running", "i8"),
        ("waiting", "i8"),
        ("free_blocks", "i8"),
        ("total_blocks", "i8"),
        ("block_size", "i8"),
        ("waiting_blocks", "i8"),  # KV blocks that all waiting requests need for what they hold now
        ("first_waiting_blocks", "i8"),  # that the first of them needs
        ("pending_tokens", "i8"),  # tokens left to compute of all unfinished requests, by their predicted lengths
        ("prefill_tokens", "i8"),  # prompt tokens of them left to compute
        # means since the engine started, as it publishes them; 0 where there were none yet
        ("queue_s", "f8"),  # from arrival to admission
        ("prefill_s_per_token", "f8"),  # from admission to the first token, per prompt token
        ("decode_s_per_token", "f8"),  # from the first token to the last, per token
        ("in_flight", "i8"),  # the router's own ledger: requests dispatched and not ended, and their
        ("in_flight_tokens", "i8"),  # prompt and predicted tokens
    ],
    align=True,
)


@dataclass(frozen=True, slots=True)
class Signals:
    """One instance's signals; ages in s, sizes in requests, tokens and KV blocks (see SIGNALS)."""

    instance: int
    age_s: float
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    block_size: int
    waiting_blocks: int
    first_waiting_blocks: int
    pending_tokens: int
    prefill_tokens: int
    queue_s: float
    prefill_s_per_token: float
    decode_s_per_token: float
    in_flight: int
    in_flight_tokens: int

    def __getattr__(self, name):
        raise AttributeError(f"an instance has no signal {name!r}; it has: {', '.join(SIGNALS.names)}")


@compiled
def read_counts(engines, requests, i, now_s, x):
    """Fill the record x with engine i's signals at now_s (up to which it has been advanced), but for tokens to compute:
    nothing in it shows the outcome of a step that has not ended. The router's own ledger is left alone."""
    e = engines[i]
    x.instance = i
    x.age_s = 0.0
    x.running = e.n_running
    x.waiting = e.n_waiting
    x.free_blocks = e.free_blocks
    x.total_blocks = e.usable_blocks
    x.block_size = e.block_size
    x.waiting_blocks = e.waiting_blocks
    x.queue_s = e.queued_s / max(e.queued, 1)
    x.prefill_s_per_token = e.prefilled_s / max(e.prefilled, 1)
    x.decode_s_per_token = e.decoded_s / max(e.decoded, 1)
    x.first_waiting_blocks = 0
    r = e.waiting_head
    if r != NONE:
        x.first_waiting_blocks = blocks_of(requests[r].prompt + requests[r].generated, e.block_size)
    r = e.inbox_head
    while r != NONE and requests[r].ready_s <= now_s:
        blocks = blocks_of(requests[r].prompt + requests[r].generated, e.block_size)
        if x.waiting == 0:
            x.first_waiting_blocks = blocks
        x.waiting += 1
        x.waiting_blocks += blocks
        r = requests[r].next


@compiled
def read_signals(engines, requests, running, batch, i, now_s, x):
    """Fill the record x with all of engine i's signals at now_s, tokens to compute included."""
    read_counts(engines, requests, i, now_s, x)
    e = engines[i]
    pending = e.waiting_tokens
    prefill = e.waiting_prompts
    for k in range(e.n_running):
        q = requests[running[i, k]]
        pending += max(0, q.prompt + q.predicted - (q.computed - q.in_flight))
        prefill += max(0, q.prompt - (q.computed - q.in_flight))
    r = e.inbox_head
    while r != NONE and requests[r].ready_s <= now_s:
        pending += requests[r].prompt + requests[r].predicted
        prefill += requests[r].prompt
        r = requests[r].next
    x.pending_tokens = pending
    x.prefill_tokens = prefill
