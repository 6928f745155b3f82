"""How full the KV caches are, polled: of published statuses where there are any, else of the engines' metrics."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import aiohttp
import numpy as np

from astrolabe_lab.disagg.view import POLLED
from astrolabe_lab.status.scrape import read_gauges, value_of

FAILED = "vllm:nixl_num_failed_transfers_total"
FAILED_S = 2.0  # modelled s between two askings


@dataclass
class Occupancy:
    """``rows``: an element of POLLED for each instance, numbered in its pool, as last read; ``every_s``: modelled
    seconds between polls.

    A published status costs a read of shared memory; ``/metrics`` of a stock engine costs it milliseconds of its server
    each time. An engine that does not answer keeps its last row, whose ``taken_s`` tells its age.
    """

    instances: list
    now_s: object
    time_scale: float
    every_s: float
    faults: int = 0
    rows: np.ndarray = field(init=False)
    failed: dict[int, float] = field(default_factory=dict)  # transfers, by place, as the engines count them

    def __post_init__(self):
        self.rows = np.zeros(len(self.instances), POLLED)
        self.rows["taken_s"] = -np.inf
        for row, instance in zip(self.rows, self.instances, strict=True):
            row["instance"] = instance.place
            row["capacity_tokens"] = instance.engine.usable_blocks * instance.engine.block_size

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Until cancelled; no answer of an engine ends it."""
        places = range(len(self.instances))
        await asyncio.gather(*(self._watch(session, at) for at in places), *(self._count(session, at) for at in places))

    async def _count(self, session, at: int) -> None:
        """How many transfers to the engine have failed, asked again and again."""
        timeout = aiohttp.ClientTimeout(total=max(1.0, FAILED_S * self.time_scale))
        while True:
            try:
                async with session.get(
                    self.instances[at].url + "/metrics", timeout=timeout, allow_redirects=False
                ) as answer:
                    lines = (await answer.text(errors="replace")).splitlines()
                counts = [value_of(line) for line in lines if line.startswith(FAILED)]
                if counts:
                    self.failed[at] = sum(counts)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
                self.faults += 1
            await asyncio.sleep(FAILED_S * self.time_scale)

    async def _watch(self, session, at: int) -> None:
        while True:
            instance = self.instances[at]
            if instance.status_path is None or not self._read_status(at):
                await self._ask(session, at)
            await asyncio.sleep(self.every_s * self.time_scale)

    def _read_status(self, at: int) -> bool:
        instance, now_s = self.instances[at], self.now_s()
        status, source = instance.status(now_s)
        if source != "published":
            return False
        used = instance.engine.usable_blocks - int(status.free_blocks)
        waiting = len(status.rows) - int(status.running)
        self._set(at, min(status.taken_s, now_s), used, int(status.running), waiting)
        return True

    async def _ask(self, session, at: int) -> None:
        instance, asked_s = self.instances[at], self.now_s()
        try:
            timeout = aiohttp.ClientTimeout(total=max(1.0, self.every_s * self.time_scale))
            async with session.get(instance.url + "/metrics", timeout=timeout, allow_redirects=False) as answer:
                gauges = read_gauges(await answer.text(errors="replace"), asked_s, self.time_scale)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            self.faults += 1
            return
        used = round(gauges.kv_usage * instance.engine.usable_blocks)
        self._set(at, asked_s, used, int(gauges.running), int(gauges.waiting))

    def _set(self, at: int, taken_s: float, used_blocks: int, running: int, waiting: int) -> None:
        row = self.rows[at]
        self.instances[at].polled_s = self.now_s()
        row["taken_s"], row["used_tokens"] = taken_s, used_blocks * self.instances[at].engine.block_size
        row["running"], row["waiting"] = running, waiting
