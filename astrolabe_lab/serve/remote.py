"""Asking Predictor sidecars, side by side and with a deadline."""

from __future__ import annotations

import asyncio
import math
from dataclasses import fields

import aiohttp

from astrolabe_lab.predictor import Prediction
from astrolabe_lab.request import Request

from .instance import Instance
from .sidecar import MOST_DISPATCHED, VERSION

NAMES = tuple(f.name for f in fields(Prediction) if f.name != "basis")


class RemotePredictors:
    """Answers ``LiveView`` through the sidecars at ``urls`` (by instance). ``deadline_s``: wall s for all of one
    decision; what is late, missing or no prediction counts as None, which the policy sees as infinite."""

    def __init__(self, urls: dict[int, str], deadline_s: float, now_s):
        self.urls = urls
        self.deadline_s = deadline_s
        self._now_s = now_s
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.wrong = 0  # answers that were none

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))

    async def close(self) -> None:
        await self._session.close()

    def __call__(self, instances: list[Instance], request: Request, metric) -> list[Prediction | None]:
        """Called from a policy, in a thread beside the event loop."""
        asking = asyncio.run_coroutine_threadsafe(self._ask(instances, request, metric), self._loop)
        return asking.result()

    async def _ask(self, instances, request, metric) -> list[Prediction | None]:
        tasks = [asyncio.create_task(self._one(instance, request, metric)) for instance in instances]
        done, late = await asyncio.wait(tasks, timeout=self.deadline_s)
        for task in late:
            task.cancel()
        return [task.result() if task in done and not task.exception() else None for task in tasks]

    async def _one(self, instance: Instance, request: Request, metric) -> Prediction | None:
        now_s = self._now_s()
        question = {
            "version": VERSION,
            "prompt_tokens": request.prompt_tokens,
            "predicted_tokens": request.predicted_tokens,
            "metric": metric,
            "waited_s": max(0.0, now_s - request.arrived_s),
            "dispatched": [
                {
                    "rid": e.rid,
                    "age_s": max(0.0, now_s - e.sent_s),
                    "prompt_tokens": e.prompt_tokens,
                    "predicted_tokens": e.predicted_tokens,
                }
                for e in instance.ledger.entries.values()
                if e.streamed == 0
            ][-MOST_DISPATCHED:],
        }
        async with self._session.post(self.urls[instance.index] + "/predict", json=question) as answer:
            if answer.status != 200:
                return None
            return self._read(await answer.json())

    def _read(self, raw) -> Prediction | None:
        """The prediction in an answer; None, and counted, for one that cannot be one."""
        if not isinstance(raw, dict) or not isinstance(raw.get("fits"), bool):
            self.wrong += 1
            return None
        values = {name: raw.get(name) for name in NAMES if name not in ("fits", "reason")}
        for value in values.values():
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                self.wrong += 1
                return None
        return Prediction(raw["fits"], **values, reason=str(raw.get("reason", ""))[:200])
