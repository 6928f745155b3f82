"""Sending a trace on schedule, and timing what comes back."""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from astrolabe_lab.bench.frame import frame_of
from astrolabe_lab.bench.kept import Kept, Sent
from astrolabe_lab.bench.load import Load, ask_served, request_of
from astrolabe_lab.errors import InputError
from astrolabe_lab.event_loop import few_pauses
from astrolabe_lab.serve.stream import Watcher

if TYPE_CHECKING:
    import pandas as pd

ITL = ("mean", "p50", "p90", "p99")


async def drive(
    url: str,
    trace: pd.DataFrame,
    load: Load,
    progress: Callable[[int, int], None] | None = None,
    keep: str | Path | None = None,
) -> pd.DataFrame:
    """Send the trace to ``url`` and return its result frame, one row a request whatever became of it.

    ``trace``: a trace frame; its ``prompt`` is sent where it has one, else as many token ids, the same for the same
    request and seed. ``progress(done, of)`` is called as answers end. ``keep``: a file for the rows as they come; where
    it holds rows of this very run, the others are sent, the first at once, and times go on where they broke off.
    ``attrs["itl"]``: mean, p50, p90, p99 in modelled s of the gaps between events that brought text, of what was sent
    now. A cancelled run raises CancelledError and ends the requests under way. Raises InputError as ``ask_served``
    does, and where ``keep`` holds rows of another trace, load or server (policy, seed, world).
    """
    import aiohttp

    if trace.empty:
        raise InputError("the trace is empty: there is nothing to send")
    times = trace["arrived_s"].to_numpy(dtype=float)
    sent = [Sent(j, float(at - times[0])) for j, at in enumerate(times)]
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=load.timeout_s * load.time_scale)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        served = await ask_served(client, url, load.model, load.headers)
        if served.time_scale not in (None, load.time_scale):
            raise InputError(f"time_scale={load.time_scale:g}, but the router's is {served.time_scale:g}: say so too")
        kept = Kept(keep, trace, load, url, served) if keep is not None else None
        if kept is not None:
            for row, entry in kept.found.items():
                sent[row] = Sent(**entry)
        left = [record for record in sent if math.isnan(record.finished_s)]
        rows = trace.iloc[[record.row for record in left]].itertuples()
        bodies = {r.row: request_of(load, row, served.longest) for r, row in zip(left, rows, strict=True)}
        for record in left:
            record.segment = kept.segment if kept else 0
        sending = _Sending(client, url, load, bodies, kept, progress, len(sent) - len(left), len(sent))
        try:
            with few_pauses():
                await (sending.closed(left, sent) if load.concurrency else sending.open(left))
        finally:
            if kept is not None:
                kept.close()
    frame = frame_of(trace, sent, load, served)
    frame.attrs["itl"] = _quantiles(sending.gaps_s)
    return frame


def _quantiles(gaps_s: array) -> dict[str, float]:
    """mean, p50, p90, p99 in s; NaN of none."""
    if not gaps_s:
        return dict.fromkeys(ITL, math.nan)
    values = np.frombuffer(gaps_s, dtype=np.float32)
    return dict(zip(ITL, [float(values.mean()), *np.quantile(values, (0.5, 0.9, 0.99)).tolist()], strict=True))


@dataclass
class _Sending:
    """One run: ``bodies`` by row; ``begun`` is where the modelled clock is 0."""

    client: object
    url: str
    load: Load
    bodies: dict[int, tuple[dict, dict]]
    kept: Kept | None
    progress: Callable[[int, int], None] | None
    done: int
    of: int
    begun: float = 0.0
    gaps_s: array = field(default_factory=lambda: array("f"))  # between events that brought text, of all requests

    def now_s(self) -> float:
        return (time.monotonic() - self.begun) / self.load.time_scale

    def start_at(self, modelled_s: float) -> None:
        self.begun = time.monotonic() - modelled_s * self.load.time_scale

    async def open(self, records: list[Sent]) -> None:
        """Every request at its time, the first now."""
        self.start_at(min((record.scheduled_s for record in records), default=0.0))
        async with asyncio.TaskGroup() as group:
            for record in records:
                early_s = record.scheduled_s - self.now_s()
                if early_s > 0:
                    await asyncio.sleep(early_s * self.load.time_scale)
                group.create_task(self.one(record))

    async def closed(self, records: list[Sent], all_of_them: list[Sent]) -> None:
        """``concurrency`` requests at a time, the first of them spread over ``ramp_s``."""
        self.start_at(max((r.finished_s for r in all_of_them if not math.isnan(r.finished_s)), default=0.0))
        waiting = iter(records)
        workers = min(self.load.concurrency, len(records))

        async def worker(i: int) -> None:
            if i and self.load.ramp_s:
                await asyncio.sleep(i / workers * self.load.ramp_s * self.load.time_scale)
            for record in waiting:
                record.scheduled_s = self.now_s()
                await self.one(record)

        async with asyncio.TaskGroup() as group:
            for i in range(workers):
                group.create_task(worker(i))

    async def one(self, record: Sent) -> None:
        await self.ask(record)
        self.done += 1
        if self.kept is not None:
            self.kept.add(record)
        if self.progress is not None:
            self.progress(self.done, self.of)

    async def ask(self, record: Sent) -> None:
        """Send it and take in its answer."""
        import aiohttp

        body, headers = self.bodies.pop(record.row)
        record.sent_s = self.now_s()
        watcher = Watcher(stream=True)
        try:
            async with self.client.post(f"{self.url}/v1/completions", json=body, headers=headers) as answer:
                _read_headers(record, answer.headers)
                if answer.status >= 400:
                    record.status, reason = watcher.verdict(answer.status)
                    record.reason = f"{reason}: {(await answer.text())[:300]}"
                    return
                last_s = math.nan
                async for chunk in answer.content.iter_any():
                    if new := watcher.feed(chunk):
                        at_s = self.now_s()
                        if math.isnan(last_s):
                            record.first_token_s = at_s
                        else:
                            self.gaps_s.append(at_s - last_s)
                        self.gaps_s.extend([0.0] * (new - 1))
                        last_s = at_s
            record.status, record.reason = watcher.verdict(answer.status)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            record.reason = f"{type(error).__name__}: {error}"
        finally:
            record.finished_s = self.now_s()
            record.tokens = watcher.counted or watcher.tokens
            record.prompt_tokens = watcher.prompt_tokens


def _read_headers(record: Sent, headers) -> None:
    record.instance = int(headers.get("X-Astrolabe-Instance", -1))
    record.prefill_instance = int(headers.get("X-Astrolabe-Prefill-Instance", -1))
    record.decode_instance = int(headers.get("X-Astrolabe-Decode-Instance", -1))
    record.predicted_e2e_s = float(headers.get("X-Astrolabe-Predicted-E2E-S", "nan"))
    record.decision_s = float(headers.get("X-Astrolabe-Decision-Ms", "nan")) / 1e3
