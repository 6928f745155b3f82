"""The load generator: a trace's requests against a router or an engine, sent on schedule, one row each.

Open loop: every request leaves at its time, whatever has come back. Closed loop: ``concurrency`` requests at a time.
Latencies count from the scheduled time (``ttft_s``, ``e2e_s``) and from the sending (``..._from_send_s``); how late the
generator itself was is in every row, and a run in which that mattered says that it is invalid.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.rng import stream
from astrolabe_lab.serve.stream import Watcher

if TYPE_CHECKING:
    import pandas as pd

FIRST_ID, LAST_ID = 5, 260  # token ids that any tokenizer has and none treats as special
LATENESS_SHARE = 0.01  # of the TTFT SLO: past this at the 99th percentile a run is invalid


@dataclass(frozen=True)
class Load:
    """How a trace is sent.

    ``exact``: every answer has exactly its true length (``ignore_eos``, min_tokens = max_tokens); False: the engine
    ends it, an emulated one by the trace's lengths. ``concurrency``: 0 for an open loop, else that many at a time.
    ``tell_lengths``: send the trace's ``predicted_tokens`` along (``x-predicted-tokens``). ``time_scale``: wall s per
    modelled s. ``timeout_s``: modelled, for one request.
    """

    model: str
    exact: bool = True
    concurrency: int = 0
    tell_lengths: bool = True
    time_scale: float = 1.0
    timeout_s: float = 600.0
    seed: int = 0
    ttft_slo_s: float = 10.0

    def __post_init__(self):
        if isinstance(self.concurrency, bool) or not isinstance(self.concurrency, int) or self.concurrency < 0:
            raise InputError(f"concurrency={self.concurrency!r} must be a whole number >= 0 (0: an open loop)")
        for name in ("time_scale", "timeout_s", "ttft_slo_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise InputError(f"{name}={value!r} must be a finite number > 0")


@dataclass(slots=True)
class Sent:
    """One request and what became of it; times in modelled s since the run's start."""

    row: int
    scheduled_s: float
    sent_s: float = math.nan
    first_token_s: float = math.nan
    finished_s: float = math.nan
    tokens: int = 0
    prompt_tokens: int | None = None
    status: str = "failed"
    reason: str = ""
    instance: int = -1
    predicted_e2e_s: float = math.nan
    decision_s: float = math.nan


async def drive(
    url: str, trace: pd.DataFrame, load: Load, progress: Callable[[int, int], None] | None = None
) -> pd.DataFrame:
    """Send the trace to ``url`` and return its result frame, one row a request whatever became of it.

    ``trace``: a trace frame; its ``prompt`` is sent where it has one, else as many token ids, the same for the same
    request and seed. ``progress(done, of)`` is called as answers end. A cancelled run raises CancelledError and ends
    the requests under way.
    """
    import aiohttp

    times = trace["arrived_s"].to_numpy(dtype=float)
    sent = [Sent(j, float(at - times[0])) for j, at in enumerate(times)]
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=load.timeout_s * load.time_scale)
    done = 0

    async def one(record: Sent, client, begun: float) -> None:
        nonlocal done
        await _one(client, url, bodies[record.row], record, load, begun)
        done += 1
        if progress is not None:
            progress(done, len(sent))

    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        served = await ask_served(client, url, load.model)
        if served.time_scale not in (None, load.time_scale):
            raise InputError(f"time_scale={load.time_scale:g}, but the router's is {served.time_scale:g}: say so too")
        bodies = [_body(load, row, served.longest) for row in trace.itertuples()]
        begun = time.monotonic()
        async with asyncio.TaskGroup() as group:
            if load.concurrency:
                waiting = iter(sent)

                async def worker():
                    for record in waiting:
                        record.scheduled_s = (time.monotonic() - begun) / load.time_scale
                        await one(record, client, begun)

                for _ in range(min(load.concurrency, len(sent))):
                    group.create_task(worker())
            else:
                for record in sent:
                    left = begun + record.scheduled_s * load.time_scale - time.monotonic()
                    if left > 0:
                        await asyncio.sleep(left)
                    group.create_task(one(record, client, begun))
    return _frame(trace, sent, load, served)


async def _one(client, url: str, asked: tuple[dict, dict], record: Sent, load: Load, begun: float) -> None:
    import aiohttp

    body, headers = asked

    def now_s() -> float:
        return (time.monotonic() - begun) / load.time_scale

    record.sent_s = now_s()
    watcher = Watcher(stream=True)
    try:
        async with client.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
            _read_headers(record, answer.headers)
            if answer.status != 200:
                record.status = "rejected" if answer.status < 500 else "failed"
                record.reason = f"HTTP {answer.status}: {(await answer.text())[:300]}"
                return
            async for chunk in answer.content.iter_any():
                if watcher.feed(chunk) and math.isnan(record.first_token_s):
                    record.first_token_s = now_s()
        record.status = "ok" if watcher.complete else "failed"
        record.reason = "" if watcher.complete else "the answer broke off"
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        record.reason = f"{type(error).__name__}: {error}"
    finally:
        record.finished_s = now_s()
        record.tokens = watcher.counted or watcher.tokens
        record.prompt_tokens = watcher.prompt_tokens


def _read_headers(record: Sent, headers) -> None:
    record.instance = int(headers.get("X-Astrolabe-Instance", -1))
    record.predicted_e2e_s = float(headers.get("X-Astrolabe-Predicted-E2E-S", "nan"))
    record.decision_s = float(headers.get("X-Astrolabe-Decision-Ms", "nan")) / 1e3


@dataclass(frozen=True)
class Served:
    """What a server says of itself: ``longest``: its ``max_model_len``; the rest only a router of ours tells."""

    longest: int
    source: str = "hardware"
    time_scale: float | None = None
    policy: str = ""
    seed: int = 0


async def ask_served(client, url: str, model: str) -> Served:
    """What is served at ``url``. Raises InputError where nothing is, or another model."""
    import aiohttp

    try:
        async with client.get(f"{url}/v1/models", timeout=aiohttp.ClientTimeout(total=30)) as answer:
            listed = await answer.json()
            models = {entry["id"]: entry.get("max_model_len") for entry in listed["data"]}
    except (aiohttp.ClientError, TimeoutError, OSError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"url {url!r} does not list its models ({type(error).__name__}: {error}); is it up?") from None
    if model not in models:
        raise InputError(f"model {model!r} is not served at {url}; served: {', '.join(models)}")
    return Served(models[model] or 1 << 20, **listed.get("astrolabe", {}))


def _body(load: Load, row, longest: int) -> tuple[dict, dict]:
    """(body, headers) of a trace row for a model of at most ``longest`` tokens."""
    n, length = int(row.prompt_tokens), int(row.output_tokens)
    prompt = getattr(row, "prompt", None)
    if not isinstance(prompt, str) or load.exact:
        prompt = stream(load.seed, f"prompt {row.rid}").integers(FIRST_ID, LAST_ID, n).tolist()
    body = {
        "model": load.model, "prompt": prompt, "stream": True, "temperature": 0.0,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    if load.exact:
        body |= {"max_tokens": length, "min_tokens": length, "ignore_eos": True}
    else:
        # The room that is left says nothing of the answer's length; an emulated engine learns that from vllm_xargs.
        body |= {"max_tokens": max(1, longest - n), "vllm_xargs": {"output_tokens": length}}
    headers = {"X-SLO-Class": getattr(row, "slo", "loose")}
    predicted = getattr(row, "predicted_tokens", None)
    if load.tell_lengths and predicted is not None:
        headers["X-Predicted-Tokens"] = str(int(predicted))
    return body, headers


def _frame(trace: pd.DataFrame, sent: list[Sent], load: Load, served: Served) -> pd.DataFrame:
    import numpy as np

    from astrolabe_lab.result import ordered

    columns = {name: np.array([getattr(s, name) for s in sent]) for name in (
        "scheduled_s", "sent_s", "first_token_s", "finished_s", "tokens", "status", "reason", "instance",
        "predicted_e2e_s", "decision_s",
    )}  # fmt: skip
    frame = trace.drop(columns=["prompt"], errors="ignore").reset_index(drop=True)
    ok = columns["status"] == "ok"
    scheduled, first, finished = columns["scheduled_s"], columns["first_token_s"], columns["finished_s"]
    tokens = columns["tokens"]
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot_s = np.where(tokens > 1, (finished - first) / (tokens - 1), np.nan)
    frame = frame.assign(
        arrived_s=scheduled,
        sent_s=columns["sent_s"],
        send_late_s=columns["sent_s"] - scheduled,
        instance=columns["instance"],
        first_token_s=np.where(ok, first, np.nan),
        finished_s=finished,
        ttft_s=np.where(ok, first - scheduled, np.nan),
        tpot_s=np.where(ok, tpot_s, np.nan),
        e2e_s=np.where(ok, finished - scheduled, np.nan),
        ttft_from_send_s=np.where(ok, first - columns["sent_s"], np.nan),
        e2e_from_send_s=np.where(ok, finished - columns["sent_s"], np.nan),
        generated_tokens=tokens,
        predicted_e2e_s=columns["predicted_e2e_s"],
        decision_s=columns["decision_s"],
        status=columns["status"],
        source=served.source,
        policy=served.policy,
        seed=served.seed,
        reason=columns["reason"],
    )
    frame = ordered(frame)
    frame.attrs["validity"] = validity(frame, load)
    return frame


def validity(frame: pd.DataFrame, load: Load) -> dict:
    """Whether the run can be believed: ``valid``, the generator's 99th percentile of lateness in modelled s and its
    bound, and how many answers had another length than asked for (``exact`` loads)."""
    import numpy as np

    late = float(np.nanpercentile(frame["send_late_s"], 99)) if len(frame) else 0.0
    bound = LATENESS_SHARE * load.ttft_slo_s
    wrong = int((frame.loc[frame["status"] == "ok", "generated_tokens"]
                 != frame.loc[frame["status"] == "ok", "output_tokens"]).sum())  # fmt: skip
    reasons = []
    if late > bound:
        reasons.append(f"requests left late: p99 {late:.4f} s, allowed {bound:.4f} s (1 % of the TTFT SLO)")
    if load.exact and wrong:
        reasons.append(f"{wrong} answers had another number of tokens than asked for")
    return {"valid": not reasons, "send_late_p99_s": late, "bound_s": bound, "wrong_lengths": wrong, "why": reasons}


def run(url: str, trace: pd.DataFrame, load: Load, progress=None) -> pd.DataFrame:
    """``drive`` from synchronous code."""
    return asyncio.run(drive(url, trace, load, progress))
