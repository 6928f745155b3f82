"""The status of an engine that publishes none, reckoned from a router's own ledger and the engine's gauges.

It is the object that engines of ours publish (``sim.status.Status``), so that signals and Predictors take either.
"""

from __future__ import annotations

import numpy as np

from astrolabe_lab.serve.ledger import Ledger
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.sim.state import RUNNING, WAITING
from astrolabe_lab.sim.status import HEADER, ROW, Status

from .scrape import Gauges


def reckon(ledger: Ledger, gauges: Gauges, engine: EngineConfig, now_s: float) -> Status:
    """What the engine's status would be, as far as this router can tell.

    A request whose first token has passed runs and holds its tokens, those of an answer that is not streamed as many
    as the engine's mean pace makes likely; every other one waits, its prompt not yet computed. What the gauges say
    beyond that is other clients': as many requests more, as long as ours are on average, half done.
    """
    own = ledger.table()
    others = _others(own, gauges)
    n = len(own) + others
    rows, header = np.zeros(n, ROW), np.zeros(1, HEADER)
    header["taken_s"], header["step_started_s"] = now_s, np.nan
    header["free_blocks"], header["n_rows"] = engine.usable_blocks, n
    if n == 0:
        return Status(header, rows)
    rids, prompts, predictions = own["rid"], own["prompt"], own["predicted"]
    generated = _generated(own, gauges, now_s)
    if others:
        prompt, predicted = _likely(ledger, gauges, engine)
        decoding = max(0, round(gauges.running) - np.count_nonzero(generated))
        rids = np.concatenate([rids, -1 - np.arange(others)])
        prompts = np.concatenate([prompts, np.full(others, prompt)])
        predictions = np.concatenate([predictions, np.full(others, predicted)])
        generated = np.concatenate([generated, np.where(np.arange(others) < decoding, predicted // 2, 0)])
    longest = min(engine.max_model_len, engine.request_blocks * engine.block_size) - 1
    prompts = np.minimum(np.maximum(prompts, 1), longest)
    generated = np.minimum(generated, longest - prompts)
    blocks = -(-(prompts + generated) // engine.block_size)
    decodes = generated > 0
    runs = decodes & (np.cumsum(decodes) <= engine.max_num_seqs)
    runs &= np.cumsum(blocks * runs) <= engine.usable_blocks
    order = np.concatenate([np.flatnonzero(runs), np.flatnonzero(~runs)])
    rows["rid"], rows["prompt"] = rids[order], prompts[order]
    rows["generated"], rows["predicted"] = generated[order], predictions[order]
    rows["state"] = np.where(runs, RUNNING, WAITING)[order]
    rows["computed"] = np.where(runs, prompts + generated - 1, 0)[order]
    rows["blocks"] = np.where(runs, blocks, 0)[order]
    header["free_blocks"] -= rows["blocks"].sum()
    header["n_running"] = np.count_nonzero(runs)
    return Status(header, rows)


def streamed(status: Status) -> list[list[int]]:
    """[rid, generated] of the requests of the router's own that have begun to answer: all of a reckoned status that
    does not follow from what was dispatched and ended before it."""
    begun = status.rows[(status.rows["generated"] > 0) & (status.rows["rid"] >= 0)]
    return begun[["rid", "generated"]].tolist()


def _generated(own: np.ndarray, gauges: Gauges, now_s: float) -> np.ndarray:
    passed = own["streamed"]
    if gauges.decode_s_per_token <= 0.0 or own["streams"].all():
        return passed
    decoding_s = now_s - own["sent_s"] - gauges.queue_s - gauges.prefill_s_per_token * own["prompt"]
    with np.errstate(over="ignore"):  # a pace of next to nothing
        likely = np.clip(decoding_s / gauges.decode_s_per_token, 0, np.maximum(own["predicted"] - 1, 0))
    return np.where(own["streams"], passed, likely.astype(np.int64))


def _others(own: np.ndarray, gauges: Gauges) -> int:
    """Requests that the engine had when it was asked and this router has not sent."""
    there = round(gauges.running + gauges.waiting)
    if there == 0:
        return 0
    return max(0, there - np.count_nonzero(own["sent_s"] <= gauges.taken_s) - gauges.ended_since)


def _likely(ledger: Ledger, gauges: Gauges, engine: EngineConfig) -> tuple[int, int]:
    """(prompt, predicted) tokens of another client's request: as ours, or without any from the KV cache in use."""
    if ledger.opened:
        return max(1, round(ledger.prompts / ledger.opened)), max(2, round(ledger.predictions / ledger.opened))
    held = gauges.kv_usage * engine.usable_blocks * engine.block_size / max(1.0, gauges.running)
    half = max(1, int(held / 2)) if gauges.running else engine.block_size
    return half, max(2, half)
