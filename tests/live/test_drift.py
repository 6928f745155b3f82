"""The drift alarm over running engines: none while steps take what was calibrated, one of an engine that slows down,
and its end."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import asdict

import aiohttp
import pytest

from astrolabe_lab.calibrate.artifact import Calibration, Slo
from astrolabe_lab.calibrate.live import device_of_cluster, step_flags
from astrolabe_lab.engines.pace import read_pace

from .test_stack import router

pytestmark = [pytest.mark.vllm, pytest.mark.long]
ENOUGH = 15  # steps seen, of the 12 that an alarm needs


def calibration_of(cluster, tokens=256):
    """What would be measured of the cluster, from the step cost that its engines are known to have."""

    def decode_s(streams):
        return cluster.cost.step_seconds(streams, streams, streams * tokens)

    def prefill_s(n):
        return cluster.cost.step_seconds(n, 1, 0, 0.5 * n * n, True)

    base_s = prefill_s(1)
    return Calibration(
        cluster.model, device_of_cluster(cluster.folder), "emulated", asdict(cluster.config), cluster.cost, {},
        prefill_base_s=base_s, prefill_token_s=(prefill_s(tokens) - base_s) / tokens, decode_s=decode_s(1),
        decode_slope_s=decode_s(2) - decode_s(1), overhead_s=0.0, reference_tokens=tokens,
        kv_blocks=cluster.config.num_gpu_blocks, slo=Slo(1.0, 0.1), flags=step_flags(cluster.urls[0]),
        time_scale=cluster.time_scale,
    )  # fmt: skip


@asynccontextmanager
async def streaming(session, url, model, streams=8):
    """So many streams at a time while the context lasts."""
    body = {"model": model, "prompt": [9] * 40, "max_tokens": 60, "ignore_eos": True, "stream": True}

    async def one():
        while True:
            async with session.post(url + "/v1/completions", json=body) as answer:
                assert answer.status == 200
                await answer.read()

    tasks = [asyncio.create_task(one()) for _ in range(streams)]
    try:
        yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def told(session, url):
    """By its name, what /metrics says of the drift of each instance."""
    async with session.get(url + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    found = {}
    for name, value in (line.rsplit(" ", 1) for line in lines if line.startswith("astrolabe_step_drift_")):
        found.setdefault(name.removeprefix("astrolabe_step_drift_").partition("{")[0], []).append(float(value))
    return found


async def until(session, url, met):
    while not met(found := await told(session, url)):
        await asyncio.sleep(0.5)
    return found


def test_the_alarm_is_of_the_engine_that_is_slowed_down_while_it_is(cluster, tmp_path):
    path, log = calibration_of(cluster).save(tmp_path / "C.json"), tmp_path / "log"

    async def story(url):
        async with aiohttp.ClientSession() as session, streaming(session, url, cluster.model):
            as_calibrated = await until(session, url, lambda d: min(d["observed_total"]) >= ENOUGH)
            cluster.disturb(0, slowdown=1.5)
            slow = await until(session, url, lambda d: d["alarm"][0] == 1 and d["ratio"][0] > 1.4)
            cluster.disturb(0, slowdown=1.0)
            await until(session, url, lambda d: d["alarm"][0] == 0 and "calibrated again" in log.read_text())
            return as_calibrated, slow

    with log.open("w") as said, router(cluster, "round_robin", None, "--calibration", str(path), stderr=said) as url:
        try:
            before, slow = asyncio.run(asyncio.wait_for(story(url), 240))
        finally:
            cluster.disturb(0, slowdown=1.0)
    late = max(read_pace(engine.pace)["late_share"] for engine in cluster.engines)
    if late > 0.03:
        pytest.skip(f"the host does not keep up: steps end {late:.0%} late")
    assert before["alarm"] == [0, 0, 0, 0] and all(0.98 < ratio < 1.08 for ratio in before["ratio"])
    assert slow["alarm"] == [1, 0, 0, 0] and all(0.98 < ratio < 1.08 for ratio in slow["ratio"][1:])
    lines = [line for line in log.read_text().splitlines() if "drift: " in line]
    assert len(lines) == 2 and all("steps of instance 0 take" in line for line in lines)
