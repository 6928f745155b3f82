"""A router over a running cluster in this process, which can be looked into (``routing``: one in its own process).

with launch(2, time_scale=4.0) as cluster:
    async with serving(cluster, "astrolabe:k=2", journal="j.jsonl") as (router, url):
        probed = await probes.drive(router, trace)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab import policies
from astrolabe_lab.cost import StepCost
from astrolabe_lab.foresight import Foresight
from astrolabe_lab.predictor import Predictor
from astrolabe_lab.sim.config import EngineConfig

from .instance import Instance
from .journal import Journal
from .lengths import Lengths, lengths_of
from .listen import listening
from .prompt_tokens import ByBytes
from .router import Router

if TYPE_CHECKING:
    import pandas as pd


def instances_of(
    places: list[tuple[str, Path | None]], policy: object, config: EngineConfig, cost: StepCost | None
) -> tuple[list[Instance], Foresight | None]:
    """Instances at ``places`` (URL, file of the published status or None), with Predictors where there is a ``cost``,
    and the foresight that these share where the policy wants any."""
    kind = getattr(policy, "foresight", "none")
    foresight = Foresight(kind, len(places)) if kind != "none" else None
    return [
        Instance(i, url, config, Predictor(config, cost, foresight=foresight) if cost else None, status)
        for i, (url, status) in enumerate(places)
    ], foresight


def router_of(
    cluster,
    policy: str | object,
    journal: str | Path | None = None,
    lengths: str | Lengths = "constant:256",
    count_tokens=None,
    published: bool = True,
    **options,
) -> Router:
    """A Router over ``cluster`` (of ``launch``, or a ClusterFile). ``published``: False leaves the engines' published
    statuses aside and reckons from the router's ledger. ``options``: Router's own."""
    policy = policies.parse(policy) if isinstance(policy, str) else policy
    engines = [_place(engine) for engine in cluster.engines]
    places = [(url, Path(status) if published else None) for url, status in engines]
    instances, foresight = instances_of(places, policy, cluster.config, cluster.cost)
    return Router(
        instances, policy, policies.spec(policy), [cluster.model], count_tokens or ByBytes(),
        lengths_of(lengths) if isinstance(lengths, str) else lengths, time_scale=cluster.time_scale,
        journal=Journal(journal, waits=True) if journal is not None else None, source=cluster.world,
        foresight=foresight, **options,
    )  # fmt: skip


@asynccontextmanager
async def serving(cluster, policy: str | object, **options) -> AsyncIterator[tuple[Router, str]]:
    """``router_of`` serving on a free port while the context lasts: (the router, its URL)."""
    router = router_of(cluster, policy, **options)
    router.warm_up()
    async with listening(router) as url:
        yield router, url


async def run(cluster, trace: pd.DataFrame, policy: str | object, watch_s: float = 0.0, **options) -> pd.DataFrame:
    """The result frame of ``trace`` sent to the cluster under ``policy``; ``options`` as of ``router_of``.

    With ``watch_s`` > 0 ``attrs["watched"]`` has what the router saw of its instances every so many modelled s, as a
    list of dicts: time_s since the start, and what ``GET /instances`` tells.
    """
    from astrolabe_lab import bench

    load = bench.Load(cluster.model, exact=False, time_scale=cluster.time_scale)
    watched: list[dict] = []
    async with serving(cluster, policy, **options) as (router, url):
        watching = asyncio.create_task(_watch(url, watch_s, cluster.time_scale, watched)) if watch_s else None
        try:
            frame = await bench.drive(url, trace, load)
        finally:
            if watching:
                watching.cancel()
    frame["policy"] = router.policy_name
    frame.attrs["watched"] = watched
    return frame


async def _watch(url: str, every_s: float, time_scale: float, into: list[dict]) -> None:
    import aiohttp

    loop = asyncio.get_running_loop()
    started = loop.time()
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(url + "/instances") as answer:
                now_s = (loop.time() - started) / time_scale
                into += [{"time_s": now_s} | each for each in (await answer.json())["instances"]]
            await asyncio.sleep(every_s * time_scale)


def _place(engine) -> tuple[str, str]:
    """(URL, status file) of an engine, as ``launch`` has it or as its cluster's file does."""
    return (engine["url"], engine["status"]) if isinstance(engine, dict) else (engine.url, engine.status)
