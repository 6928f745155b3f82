"""How late an event loop is: what it adds to every token that passes through it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

NAME = "astrolabe_loop_lag_seconds"  # of the histogram in a router's /metrics
EVERY_S = 0.01
EDGES_S = (*(0.005 * 2 ** (k / 4) for k in range(-16, 41)), math.inf)  # 0.3 ms to 5 s, with 5 ms among them


class LoopLag:
    """Sleeps ``EVERY_S`` again and again and counts how much longer that took; wall seconds.

    ``counts``: as many as ``EDGES_S``; each counts what was at most that late, and later than the edge before.
    """

    def __init__(self):
        self.counts = [0] * len(EDGES_S)

    def p99_s(self) -> float | None:
        """99th percentile of the lateness since the beginning; None before there is any."""
        return p99_s(self.counts)

    def family(self):
        """All of it for Prometheus."""
        from prometheus_client.core import HistogramMetricFamily

        buckets = [
            (f"{edge:.6g}".replace("inf", "+Inf"), below)
            for edge, below in zip(EDGES_S, accumulate(self.counts), strict=True)
        ]
        return HistogramMetricFamily(
            NAME, "Lateness of the event loop, looked at every 10 ms", buckets=buckets, sum_value=None
        )

    def late(self, seconds: float) -> None:
        self.counts[bisect_left(EDGES_S, seconds)] += 1

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            begun = time.monotonic()
            await asyncio.sleep(EVERY_S)
            self.late(max(0.0, time.monotonic() - begun - EVERY_S))

    @contextlib.contextmanager
    def watching(self):
        """Within an event loop, for as long as the block lasts."""
        task = asyncio.get_running_loop().create_task(self.watch())
        try:
            yield self
        finally:
            task.cancel()


def p99_s(counts: Sequence[float]) -> float | None:
    """The edge below which 99 % of ``counts`` (of LoopLag) lie; None of none."""
    if (total := sum(counts)) <= 0:
        return None
    return next(edge for edge, below in zip(EDGES_S, accumulate(counts), strict=True) if below >= 0.99 * total)


def told_by(url: str) -> list[float]:
    """How often the router's event loop has been how late so far, as ``LoopLag.counts``; empty where it does not
    tell."""
    import urllib.request

    from astrolabe_lab.status.scrape import value_of

    with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:
        text = answer.read().decode()
    below = [value_of(line) for line in text.splitlines() if line.startswith(f"{NAME}_bucket{{")]
    return [n - before for n, before in zip(below, [0.0, *below], strict=False)]


def between_s(before: Sequence[float], after: Sequence[float]) -> float | None:
    """The 99th percentile of what a router told after and not before (of ``told_by``); None where it does not tell."""
    return p99_s([n - was for n, was in zip(after, before, strict=True)]) if len(before) == len(after) else None
