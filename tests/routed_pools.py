"""A router of pools in this process, over scripted engines, and its client."""

import asyncio
import time
from contextlib import asynccontextmanager

import aiohttp
from scripted_engine import QUICK

from astrolabe_lab.disagg.constants import PAPER
from astrolabe_lab.disagg.policies import RoundRobinPair
from astrolabe_lab.serve import journal
from astrolabe_lab.serve.instance import Instance
from astrolabe_lab.serve.listen import listening
from astrolabe_lab.serve.pools.router import PoolRouter
from astrolabe_lab.serve.prompt_tokens import ByBytes
from astrolabe_lab.sim.config import EngineConfig

MODEL = "m"


async def constant(asked):
    return asked.predicted_tokens or 64, "constant"


@asynccontextmanager
async def routed(pools, path, policy=None, limits=QUICK, **options):
    prefill, decode = pools
    router = PoolRouter(
        [Instance(i, engine.url, EngineConfig()) for i, engine in enumerate([*prefill, *decode])],
        policy or RoundRobinPair(), "test", [MODEL], ByBytes(), constant, limits=limits,
        journal=journal.Journal(path), n_prefill=len(prefill), constants=PAPER, **options,
    )  # fmt: skip
    async with listening(router) as url, aiohttp.ClientSession() as session:
        yield router, session, url


async def ask(session, url, stream=True, **more):
    body = {"model": MODEL, "prompt": "hello there", "max_tokens": 6, "stream": stream, **more}
    async with session.post(url + "/v1/completions", json=body) as answer:
        return answer.status, await answer.read(), answer.headers


async def settled(router, prefill):
    """Wait until nothing is in flight and no block is held."""
    until = time.monotonic() + 20.0
    while router.in_flight or router._releases or any(engine.held for engine in prefill):
        assert time.monotonic() < until, (router.in_flight, router._releases, [engine.held for engine in prefill])
        await asyncio.sleep(0.02)


def run(story):
    return asyncio.run(asyncio.wait_for(story, 60))
