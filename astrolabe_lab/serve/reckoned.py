"""The status of an engine that publishes none, reckoned from a router's own ledger and the engine's gauges.

It is the object that engines of ours publish (``sim.status.Status``), so that signals and Predictors take either.
"""

from __future__ import annotations

import numpy as np

from astrolabe_lab.serve.ledger import InFlight, Ledger
from astrolabe_lab.serve.scrape import Gauges
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.sim.state import RUNNING, WAITING
from astrolabe_lab.sim.status import HEADER, ROW, Status


def reckon(ledger: Ledger, gauges: Gauges, engine: EngineConfig, now_s: float) -> Status:
    """What the engine's status would be, as far as this router can tell.

    A request whose first token has passed runs and holds its tokens, those of an answer that is not streamed as many
    as the engine's mean pace makes likely; every other one waits, its prompt not yet computed. What the gauges say
    beyond that is other clients': as many requests more, which share the used KV blocks that are not ours and are as
    long as ours are on average, half done.
    """
    block, seats = engine.block_size, engine.max_num_seqs
    free = engine.usable_blocks
    longest = min(engine.max_model_len, engine.request_blocks * block) - 1
    running, waiting = [], []

    def enter(rid: int, prompt: int, generated: int, predicted: int) -> None:
        nonlocal free
        prompt = max(1, min(prompt, longest))
        generated = min(generated, longest - prompt)
        blocks = -(-(prompt + generated) // block)
        if generated > 0 and len(running) < seats and blocks <= free:
            free -= blocks
            running.append(
                (rid, RUNNING, prompt, prompt + generated - 1, generated, 0, 0, 0, predicted, blocks, 0, 0, 0)
            )
        else:
            waiting.append((rid, WAITING, prompt, 0, generated, 0, 0, 0, predicted, 0, 0, 0, 0))

    own = list(ledger.entries.values())
    for entry in own:
        enter(entry.rid, entry.prompt_tokens, _generated(entry, gauges, now_s), entry.predicted_tokens)
    if others := _others(own, gauges):
        prompt, predicted = _likely(ledger, gauges, engine, others)
        decoding = min(others, max(0, round(gauges.running) - len(running)))
        for j in range(others):
            enter(-1 - j, prompt, max(1, predicted // 2) if j < decoding else 0, predicted)
    header = np.zeros(1, HEADER)
    header["taken_s"], header["step_started_s"] = now_s, np.nan
    header["free_blocks"], header["n_running"] = free, len(running)
    header["n_rows"] = len(running) + len(waiting)
    return Status(header, np.array(running + waiting, ROW))


def _generated(entry: InFlight, gauges: Gauges, now_s: float) -> int:
    if entry.first_token_s is not None:
        return max(1, entry.streamed)
    if entry.streams or gauges.decode_s_per_token <= 0.0:
        return 0
    decoding_s = now_s - entry.sent_s - gauges.queue_s - gauges.prefill_s_per_token * entry.prompt_tokens
    return max(0, min(int(decoding_s / gauges.decode_s_per_token), entry.predicted_tokens - 1))


def _others(own: list[InFlight], gauges: Gauges) -> int:
    """Requests that the engine had when it was asked and this router has not sent."""
    sent = sum(entry.sent_s <= gauges.taken_s for entry in own) + gauges.ended_since
    return max(0, round(gauges.running + gauges.waiting) - sent)


def _likely(ledger: Ledger, gauges: Gauges, engine: EngineConfig, others: int) -> tuple[int, int]:
    """(prompt, predicted) tokens of another client's request."""
    if ledger.opened:
        return max(1, round(ledger.prompts / ledger.opened)), max(2, round(ledger.predictions / ledger.opened))
    held = gauges.kv_usage * engine.usable_blocks * engine.block_size / max(1.0, gauges.running)
    half = max(1, int(held / 2)) if gauges.running else engine.block_size
    return half, max(2, half)
