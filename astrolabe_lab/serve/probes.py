"""The same request to every candidate: how far predictions are off, and whether the best one is recognised.

A probe is predicted on every instance, then sent to all of them at once, past the router's policy. It is load like any
other; what is under way is in the statuses that later predictions start from.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from astrolabe_lab.errors import InputError
from astrolabe_lab.event_loop import few_pauses
from astrolabe_lab.request import Request
from astrolabe_lab.rng import stream

from .dispatch import Decision
from .live_view import LiveView
from .router import Router
from .stream import Watcher

if TYPE_CHECKING:
    import pandas as pd

FIRST_ID, LAST_ID = 5, 260  # token ids that any tokenizer has and none treats as special


@dataclass(slots=True)
class _Answer:
    instance: int
    ttft_s: float = math.nan
    e2e_s: float = math.nan
    generated_tokens: int = 0
    status: str = "failed"


async def drive(router: Router, trace: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """Probes of the router's available instances with the requests of ``trace`` at their times; one row a probe and
    instance.

    Columns, as of a result frame: ``rid, arrived_s`` (since the start), ``prompt_tokens, output_tokens,
    predicted_tokens, instance, in_system`` (requests that its status showed), ``predicted_ttft_s, predicted_e2e_s`` (of
    an answer of ``predicted_tokens``), ``first_token_s, finished_s, ttft_s, e2e_s, generated_tokens, status``; times in
    modelled s. ``trace`` needs ``predicted_tokens``
    (``length.attach``). The router keeps a journal of them where it keeps one, so that a replay knows what all
    candidates would have given. Raises InputError for a trace without lengths.
    """
    import aiohttp
    import pandas as pd

    if "predicted_tokens" not in trace:
        raise InputError("probes need predicted_tokens: attach lengths (length.attach), e.g. oracle")
    times = trace["arrived_s"].to_numpy(dtype=float)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        with few_pauses():
            found = await _all(session, router, trace, times - times[0], seed)
    return pd.DataFrame(found)


async def _all(session, router: Router, trace: pd.DataFrame, after_s, seed: int) -> list[dict]:
    """The rows of all probes, each sent at its time."""
    begun = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for row, at in zip(trace.itertuples(), after_s, strict=True):
            left = begun + at * router.time_scale - time.monotonic()
            if left > 0:
                await asyncio.sleep(left)
            tasks.append(group.create_task(_one(session, router, row, begun, seed)))
    return [found for task in tasks for found in task.result()]


async def _one(session, router: Router, row, begun: float, seed: int) -> list[dict]:
    now_s = router.now_s()
    request = Request(router.new_rid(), now_s, int(row.prompt_tokens), int(row.predicted_tokens))
    available = [instance for instance in router.instances if instance.available(now_s)]
    view = LiveView(available, now_s)
    predicted_e2e_s = view.predict(request, "e2e_s", range(len(view)))
    predicted = dict(view.predictions)
    best = available[int(np.argmin(predicted_e2e_s))] if available else None
    if best is None:
        return []
    router.records.probe(request, Decision(best, view, now_s, 0.0), router.models[0])
    entries = [i.ledger.open(request.rid, request.prompt_tokens, request.predicted_tokens, now_s) for i in available]
    prompt = stream(seed, f"prompt {row.rid}").integers(FIRST_ID, LAST_ID, request.prompt_tokens).tolist()
    body = {
        "model": router.models[0], "prompt": prompt, "stream": True, "temperature": 0.0,
        "max_tokens": max(1, best.engine.max_model_len - len(prompt)),
        "stream_options": {"include_usage": True},
        "vllm_xargs": {
            "output_tokens": int(row.output_tokens), "rid": request.rid, "predicted_tokens": request.predicted_tokens,
        },
    }  # fmt: skip
    answers = await asyncio.gather(
        *(_ask(session, router, i, e, body) for i, e in zip(available, entries, strict=True))
    )
    router.records.probed(request, answers)
    arrived_s = now_s - begun / router.time_scale
    known = {
        "rid": request.rid,
        "arrived_s": arrived_s,
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": int(row.output_tokens),
        "predicted_tokens": request.predicted_tokens,
    }
    found = []
    for answer, status in zip(answers, view.statuses, strict=True):
        foretold = predicted.get(answer.instance)
        found.append(
            known
            | {
                "instance": answer.instance,
                "in_system": len(status.rows),
                "predicted_ttft_s": math.nan if foretold is None else foretold.ttft_s,
                "predicted_e2e_s": math.nan if foretold is None else foretold.e2e_s,
                "first_token_s": arrived_s + answer.ttft_s,
                "finished_s": arrived_s + answer.e2e_s,
                "ttft_s": answer.ttft_s,
                "e2e_s": answer.e2e_s,
                "generated_tokens": answer.generated_tokens,
                "status": answer.status,
            }
        )
    return found


async def _ask(session, router: Router, instance, entry, body: dict) -> _Answer:
    import aiohttp

    answer, watcher, sent_s = _Answer(instance.index), Watcher(stream=True), entry.sent_s
    try:
        async with session.post(instance.url + "/v1/completions", json=body, allow_redirects=False) as response:
            async for chunk in response.content.iter_any():
                if watcher.feed(chunk):
                    instance.ledger.progress(entry, watcher.tokens, router.now_s())
        answer.e2e_s = router.now_s() - sent_s
        if entry.first_token_s is not None:
            answer.ttft_s = entry.first_token_s - sent_s
        answer.generated_tokens = watcher.output_tokens
        answer.status, _ = watcher.verdict(response.status)
    except (aiohttp.ClientError, TimeoutError, OSError):
        pass
    finally:
        instance.settle(entry.rid)
    return answer


def rank_one(probes: pd.DataFrame) -> pd.DataFrame:
    """Of every probe that all its candidates answered: ``rid, arrived_s, candidates, in_system`` (mean),
    ``predicted_best, measured_best`` (instances), ``hit`` (they are the same), ``regret_s`` (measured E2E at the
    predicted best - that at the measured best) and ``spread_s`` (worst - best measured). The mean of ``hit`` is the
    papers' rank-1 rate."""
    import pandas as pd

    found = []
    for rid, rows in probes.groupby("rid", sort=False):
        if len(rows) < 2 or not (rows["status"] == "ok").all() or rows["predicted_e2e_s"].isna().any():
            continue
        e2e = rows.set_index("instance")["e2e_s"]
        predicted = rows["instance"].to_numpy()[int(np.argmin(rows["predicted_e2e_s"]))]
        found.append(
            {
                "rid": rid,
                "arrived_s": rows["arrived_s"].iloc[0],
                "candidates": len(rows),
                "in_system": rows["in_system"].mean(),
                "predicted_best": predicted,
                "measured_best": e2e.idxmin(),
                "hit": predicted == e2e.idxmin(),
                "regret_s": e2e[predicted] - e2e.min(),
                "spread_s": e2e.max() - e2e.min(),
            }
        )
    return pd.DataFrame(found)


def recognised(probes: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """How well the best candidate is recognised, a row a set of probes (by name; sets with one candidate are left out):
    ``probes, candidates, recognised_pct`` with Wilson's 95 % interval (``recognised_low_pct, recognised_high_pct``; as
    if probes were independent, which close ones are not quite) and what chance would give, ``regret_when_wrong_ms``
    (mean; NaN where it never was), and the mean distance from the best to the worst measured, ``best_to_worst_ms``."""
    import pandas as pd

    from astrolabe_lab.measure import wilson

    rows = {}
    for name, found in probes.items():
        ranks = rank_one(found)
        if ranks.empty:
            continue
        low, high = wilson(int(ranks["hit"].sum()), len(ranks))
        rows[name] = {
            "probes": len(ranks),
            "candidates": int(ranks["candidates"].max()),
            "recognised_pct": 100.0 * ranks["hit"].mean(),
            "recognised_low_pct": 100.0 * low,
            "recognised_high_pct": 100.0 * high,
            "by_chance_pct": 100.0 * (1.0 / ranks["candidates"]).mean(),
            "regret_when_wrong_ms": 1e3 * ranks.loc[~ranks["hit"], "regret_s"].mean(),
            "best_to_worst_ms": 1e3 * ranks["spread_s"].mean(),
        }
    return pd.DataFrame.from_dict(rows, orient="index")
