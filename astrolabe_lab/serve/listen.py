"""A router on a socket: what its application needs around it to be safe from slow and many clients."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from astrolabe_lab.errors import InputError

BACKLOG = 2048
KEEP_ALIVE_S = 75.0
SWEEP_S = 1.0


@asynccontextmanager
async def listening(router, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serves ``router`` while the context lasts; its URL. Port 0: a free one.

    A connection whose first request has no complete head after ``limits.head_s`` is closed: aiohttp waits for ever.
    The journal is written from then on. Raises InputError where it cannot listen, or another router has the journal.
    """
    allow_open_files()
    runner = web.AppRunner(
        router.application(), access_log=None, handler_cancellation=True, shutdown_timeout=5.0,
        keepalive_timeout=KEEP_ALIVE_S,
    )  # fmt: skip
    await runner.setup()
    sweeping = asyncio.create_task(_close_the_headless(runner, router.limits.head_s * router.time_scale))
    try:
        site = web.TCPSite(runner, host, port, backlog=BACKLOG)
        try:
            await site.start()
        except OSError as error:
            raise InputError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        if router.journal is not None:
            router.journal.start()
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        sweeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sweeping
        await runner.cleanup()


async def _close_the_headless(runner: web.AppRunner, head_s: float) -> None:
    since: dict[object, float] = {}
    while True:
        await asyncio.sleep(min(SWEEP_S, head_s / 2))
        now = time.monotonic()
        # The number of requests that a connection has begun; there is no public name for it.
        headless = [c for c in runner.server.connections if c._request_count == 0]
        since = {connection: since.get(connection, now) for connection in headless}
        for connection, first_seen in since.items():
            if now - first_seen > head_s:
                connection.force_close()


def allow_open_files() -> None:
    """Let this process have as many open files as it may: a connection is one, and each request has two."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
