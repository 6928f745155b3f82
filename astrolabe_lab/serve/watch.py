"""Beside the data path: asking every engine, again and again, whether it is well and how busy it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import aiohttp

from astrolabe_lab.status.scrape import Gauges, read_gauges

from .instance import Instance
from .limits import Limits

log = logging.getLogger(__name__)

PATIENCE_S = 5.0  # wall; a burst of requests must not make an engine look dead


@dataclass
class Watch:
    """``run`` asks for ever: health of all, and the gauges at ``/metrics``, which stand in for a published status
    where there is none and tell mean times everywhere."""

    session: aiohttp.ClientSession
    instances: list[Instance]
    now_s: Callable[[], float]
    time_scale: float
    limits: Limits

    async def run(self) -> None:
        """Never returns; no answer of an engine ends it."""
        await asyncio.gather(*(asking for i in self.instances for asking in (self._health(i), self._gauges(i))))

    async def _health(self, instance: Instance) -> None:
        timeout = aiohttp.ClientTimeout(total=max(PATIENCE_S, self.limits.probe_s * self.time_scale))
        while True:
            try:
                async with self.session.get(instance.url + "/health", timeout=timeout, allow_redirects=False) as answer:
                    ok = answer.status == 200
            except (aiohttp.ClientError, TimeoutError, OSError):
                ok = False
            before = instance.health.healthy
            instance.health.probed(ok)
            if before != instance.health.healthy:
                what = "does not answer, and gets no requests until it does" if before else "answers again"
                log.warning("engine %d at %s %s", instance.index, instance.url, what)
            await asyncio.sleep(self.limits.probe_s * self.time_scale)

    async def _gauges(self, instance: Instance) -> None:
        """An engine that does not tell keeps its last gauges: silence is not idleness."""
        timeout = aiohttp.ClientTimeout(total=max(PATIENCE_S, self.limits.probe_s * self.time_scale))
        every_s = self.limits.scrape_s if instance.status_path is None else self.limits.probe_s
        while True:
            coming = instance.coming = Gauges(self.now_s())
            try:
                async with self.session.get(
                    instance.url + "/metrics", timeout=timeout, allow_redirects=False
                ) as answer:
                    if answer.status == 200:
                        text = await answer.text(errors="replace")
                        told = read_gauges(text, coming.taken_s, self.time_scale)
                        instance.gauges = replace(told, ended_since=coming.ended_since)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
                instance.gauge_faults += 1
            await asyncio.sleep(every_s * self.time_scale)
