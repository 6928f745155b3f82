"""Real vLLM engines that are killed, hang, and a router that is killed: every request has one outcome all the same."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from astrolabe_lab import bench
from astrolabe_lab.serve import in_process, journal

from .test_stack import router, trace_of

pytestmark = [pytest.mark.vllm, pytest.mark.long]


def load(cluster):
    return bench.Load(cluster.model, exact=False, time_scale=cluster.time_scale)


def instances(url):
    with urllib.request.urlopen(url + "/instances", timeout=60) as answer:
        return json.load(answer)["instances"]


def one_row_each(path):
    rows = [e for e in journal.read(path) if e["event"] == "outcome" and e["status"] != "retried"]
    assert len({row["rid"] for row in rows}) == len(rows)
    assert {e["rid"] for e in journal.read(path) if e["event"] == "decision"} <= {row["rid"] for row in rows}
    return rows


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_hung_engine_is_not_taken_for_an_idle_one_and_nothing_is_lost_when_it_wakes(cluster, tmp_path):
    async def story():
        async with in_process.serving(cluster, "astrolabe:k=all", journal=tmp_path / "j") as (served, url):
            first = asyncio.create_task(bench.drive(url, trace_of(12, qps=12.0), load(cluster)))
            await asyncio.sleep(1.0)
            cluster.disturb(0, stalled=True)
            try:
                while served.instances[0].status(served.now_s())[1] != "stale":
                    await asyncio.sleep(0.2)
                second = await bench.drive(url, trace_of(12, qps=6.0, seed=1), load(cluster))
            finally:
                cluster.disturb(0, stalled=False)
            return await first, second, [len(each.ledger) for each in served.instances]

    first, second, left = asyncio.run(asyncio.wait_for(story(), 300))
    assert (first["status"] == "ok").all() and (second["status"] == "ok").all()
    assert 0 in set(first["instance"]) and 0 not in set(second["instance"])
    assert left == [0, 0, 0, 0]
    assert len(one_row_each(tmp_path / "j")) == 24


def test_an_engine_killed_under_load_costs_its_own_streams_and_comes_back(cluster, tmp_path):
    victim = cluster.engines[3]
    with router(cluster, "round_robin", tmp_path / "j") as url:

        async def story():
            sending = asyncio.create_task(bench.drive(url, trace_of(32, qps=8.0, seed=2), load(cluster)))
            await asyncio.sleep(2.0 * cluster.time_scale)
            for pid in victim.pids():
                os.kill(pid, signal.SIGKILL)
            return await sending

        frame = asyncio.run(asyncio.wait_for(story(), 300))
        assert len(frame) == 32
        lost = frame[frame["status"] != "ok"]
        assert set(lost["instance"]) <= {3} and len(lost) < 12
        assert (frame.loc[frame["instance"] != 3, "status"] == "ok").all()
        assert [each["in_flight"] for each in instances(url)] == [0, 0, 0, 0]
        assert len(one_row_each(tmp_path / "j")) == 32
        # Started again, found by the probes, past the breaker.
        wait_until(lambda: instances(url)[3]["restarts"] >= 1 and instances(url)[3]["available"], 600)
        again = bench.run(url, trace_of(16, qps=8.0, seed=3), load(cluster))
        assert (again["status"] == "ok").all() and 3 in set(again["instance"])


def test_a_router_killed_under_load_leaves_engines_idle_and_a_journal_that_goes_on(cluster, tmp_path):
    command = [sys.executable, "-m", "astrolabe_lab.cli", "route", "--cluster", str(cluster.folder)]
    command += ["--policy", "least_loaded", "--journal", str(tmp_path / "j")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    url = json.loads(process.stdout.readline())["url"]

    async def story():
        sending = asyncio.create_task(bench.drive(url, trace_of(12, qps=12.0, seed=4), load(cluster)))
        await asyncio.sleep(1.5 * cluster.time_scale)
        process.kill()
        return await sending

    frame = asyncio.run(asyncio.wait_for(story(), 120))
    process.wait()
    assert len(frame) == 12 and (frame["status"] == "failed").any()
    with router(cluster, "least_loaded", tmp_path / "j") as second:
        wait_until(lambda: sum(each["running"] + each["waiting"] for each in instances(second)) == 0, 60)
        assert all(each["free_blocks"] == cluster.config.usable_blocks for each in instances(second))
        again = bench.run(second, trace_of(8, qps=8.0, seed=5), load(cluster))
    assert (again["status"] == "ok").all()
    events = [entry["event"] for entry in journal.read(tmp_path / "j")]  # no torn line is left in its middle
    assert events.count("router") == 2
