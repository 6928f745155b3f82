"""How late an event loop is: what it adds to every token that passes through it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque

EVERY_S = 0.01
KEPT = 6000  # a minute


class LoopLag:
    """Sleeps ``EVERY_S`` again and again and keeps how much longer that took; wall seconds."""

    def __init__(self):
        self._late: deque[float] = deque(maxlen=KEPT)

    def p99_s(self) -> float | None:
        """99th percentile of the lateness, of the last minute watched; None before there is any."""
        if not self._late:
            return None
        ordered = sorted(self._late)
        return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            begun = time.monotonic()
            await asyncio.sleep(EVERY_S)
            self._late.append(max(0.0, time.monotonic() - begun - EVERY_S))

    @contextlib.contextmanager
    def watching(self):
        """Within an event loop, for as long as the block lasts."""
        task = asyncio.get_running_loop().create_task(self.watch())
        try:
            yield self
        finally:
            task.cancel()
