"""Runs on live pools: interleaved, resumed where they were broken off, kept only whole, and judged."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pandas as pd
import psutil
import pytest
from routed_pools import routed
from scripted_pools import scripted_pools
from test_pool_gates import ASKED, impatient  # noqa: F401

from astrolabe_lab import InputError, bench
from astrolabe_lab.arrivals import with_arrivals
from astrolabe_lab.engines.cluster_file import ClusterFile, read_cluster, write_cluster
from astrolabe_lab.engines.pace import PaceWriter
from astrolabe_lab.generators import families
from astrolabe_lab.serve.loop_lag import EDGES_S, LoopLag, told_by
from astrolabe_lab.serve.pools.records import rows
from astrolabe_lab.serve.pools.runs import _claim, _identity, _in_time, kept, plan, run_cells
from astrolabe_lab.sim.config import EngineConfig

POLICIES, TRACES = ["round_robin", "least_loaded", "marginal_cost"], ["a", "b", "c"]


def test_every_trace_meets_every_policy_once_and_the_first_one_twice_in_random_blocks():
    cells = plan(POLICIES, TRACES, seed=1)
    assert len(cells) == 3 * 4 and len({cell.name for cell in cells}) == 12
    blocks = [cells[at : at + 4] for at in range(0, 12, 4)]
    for block in blocks:
        assert len({cell.trace for cell in block}) == 1  # a trace's cells run one after another
        assert sorted(cell.label for cell in block) == sorted([*POLICIES, "round_robin (again)"])
    orders = {tuple(cell.label for cell in block) for seed in range(6) for block in _blocks(seed)}
    assert len(orders) > 6  # and in no fixed order
    assert plan(POLICIES, TRACES, seed=1) == cells


def _blocks(seed):
    cells = plan(POLICIES, TRACES, seed)
    return [cells[at : at + 4] for at in range(0, 12, 4)]


def test_the_a_a_cell_differs_in_its_draws_alone():
    cells = plan(["marginal_cost"], ["a"], seed=3)
    first, again = sorted(cells, key=lambda cell: cell.seed)
    assert first.policy == again.policy and first.trace == again.trace and first.seed != again.seed
    assert first.label != again.label


def test_policies_and_traces_must_be_distinct():
    for wrong in (([], ["a"]), (["x", "x"], ["a"]), (["x"], [])):
        with pytest.raises(InputError, match="distinct names"):
            plan(*wrong)


@contextmanager
def cluster_of_scripted_pools(
    folder, change=lambda prefill, decode: None, config=EngineConfig(), shape=(1, 2), world="hardware"
):
    """The folder of a cluster of scripted engines, spoilt by ``change``, which answer in a thread meanwhile."""
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve():
        async with scripted_pools(*shape) as (prefill, decode):
            change(prefill, decode)
            engines = [
                {"url": engine.url, "role": role, "status": str(folder / "none"), "pace": str(folder / "pace")}
                for role, pool in (("prefill", prefill), ("decode", decode))
                for engine in pool
            ]
            write_cluster(folder, engines, config, None, 1.0, "m", "", world)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield folder
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)


class Interrupted(Exception):
    pass


def few(n=4):
    """A trace of ``n`` short requests."""
    return with_arrivals(families.generate("chat", n, seed=0, text=False), 50, "poisson", 0)


def run_one(folder, out, said, trace=None):
    """One run of round robin over the pools of ``folder``: its frame and what is told of it."""
    (cell,) = plan(["round_robin"], ["a"], again=False)
    traces = {"a": few() if trace is None else trace}
    run_cells(folder, [cell], traces, out, ["--constants-from", "paper"], say=said.append)
    frame = pd.read_parquet(out / f"{cell.name}.parquet")
    return frame, frame.attrs["astrolabe"]


def test_a_run_that_was_broken_off_is_made_again_from_its_first_request(tmp_path):
    folder, out, said, slow = tmp_path / "pools", tmp_path / "out", [], []
    folder.mkdir()

    def hang(prefill, decode):
        answer = decode[0]._answer

        async def answered(http, body):
            if slow:
                await asyncio.sleep(60)
            return await answer(http, body)

        decode[0]._answer = answered

    with cluster_of_scripted_pools(folder, hang, shape=(1, 1)):
        words = [sys.executable, "-c", BROKEN_OFF, str(folder), str(out)]
        asked = subprocess.Popen(words, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
        journal = out / "a--round_robin.jsonl"
        while not (journal.exists() and '"pair"' in journal.read_text()):
            slow.append(True)  # once the gates have been passed
            slow[:] = slow if journal.exists() else []
            assert asked.poll() is None
            time.sleep(0.02)
        asked.kill()
        asked.wait()
        slow.clear()
        frame, told = run_one(folder, out, said)
    assert (frame["status"] == "ok").all() and set(frame["segment"]) == {0}
    assert len(rows(journal)) == len(frame) == 4  # nothing of the run before it


BROKEN_OFF = """
import sys
from test_pool_runs import run_one
run_one(*sys.argv[1:], [])
"""


def test_a_router_that_ends_is_named_and_nothing_of_its_run_is_kept(tmp_path):
    folder, out, said = tmp_path / "pools", tmp_path / "out", []
    folder.mkdir()

    def kill(prefill, decode):
        async def answered(http, body):
            for process in psutil.Process().children(recursive=True):
                if "route" in process.cmdline() and "astrolabe_lab.engines.guard" not in process.cmdline():
                    process.kill()
            return await answer(http, body)

        answer, decode[0]._answer = decode[0]._answer, answered

    told = "run a--round_robin: the router does not answer any more; the same again makes this run anew"
    with cluster_of_scripted_pools(folder, kill, shape=(1, 1)), pytest.raises(InputError, match=told):
        run_one(folder, out, said)
    assert not [*out.glob("*.parquet")] and not [*out.glob("*.rows.jsonl")]


def test_a_run_in_which_an_engine_ended_does_not_count(tmp_path):
    folder, said = tmp_path / "pools", []
    folder.mkdir()

    def end(prefill, decode):
        answer = decode[0]._answer

        async def answered(http, body):
            if body["max_tokens"] == 9:
                decode[0].script, decode[0].metrics = "http:500", None
            return await answer(http, body)

        decode[0]._answer = answered

    with cluster_of_scripted_pools(folder, end, shape=(1, 1)):
        frame, told = run_one(folder, tmp_path / "out", said, few().assign(output_tokens=[4, 4, 9, 4]))
    assert told["preemptions"] is None and not told["validity"]["valid"]
    why = "; ".join(told["validity"]["why"])
    assert "an engine ended or began anew" in why and "requests failed, the first of them: " in why


@pytest.mark.parametrize("spoilt", ["cut", "foreign", "empty"])
def test_a_kept_run_that_is_none_is_named(tmp_path, spoilt):
    path = tmp_path / "a--round_robin.parquet"
    few(3).drop(columns="slo").to_parquet(path)
    if spoilt != "foreign":
        path.write_bytes(path.read_bytes()[: 100 if spoilt == "cut" else 0])
    with pytest.raises(InputError, match=r"a--round_robin\.parquet is no run that was kept here: remove it"):
        kept(path)


def test_runs_go_on_where_they_were_broken_off_and_only_with_what_they_began_with(tmp_path):
    folder, out = tmp_path / "pools", tmp_path / "out"
    folder.mkdir()
    traces = {"a": with_arrivals(families.generate("chat", 6, seed=0, text=False), 50, "poisson", 0)}
    traces["a"]["output_tokens"] = 4
    cells = plan(["round_robin"], ["a"])
    said = []

    def interrupt(line):
        if line.startswith("cell"):
            raise Interrupted(line)

    def again(say=said.append, cells=cells, traces=traces, constants=("--constants-from", "paper"), load=None):
        return run_cells(folder, cells, traces, out, [*constants], load, say)

    with cluster_of_scripted_pools(folder):
        with pytest.raises(Interrupted, match="cell 1 of 2"):
            again(interrupt)
        frame = again()
        assert len(said) == 1 + len(ASKED) + 1 and ": kept" in said[0] and "'ok': 6" in said[-1]
        assert [line.partition(":")[0] for line in said[1:-1]] == [f"gate {name}" for name in ASKED]
        assert frame.groupby("cell").size().tolist() == [6, 6] and (frame["status"] == "ok").all()
        assert len(again(said.append)) == 12 and all(": kept" in line for line in said[-2:])
        about = [pd.read_parquet(path).attrs["astrolabe"] for path in out.glob("*.parquet")]
        for each in about:
            assert {gate["gate"]: gate["ok"] for gate in each["pool_gates"]} == dict.fromkeys(ASKED, True)
            assert [gate["gate"] for gate in each["gates"]] == ["idle", "prefix_reset"]

        other = {"a": traces["a"].assign(output_tokens=5)}
        more = [replace(cells[0], policy="least_loaded", label="least_loaded"), *cells[:1]]
        grown = again(said.append, cells=more)  # what is new is made, what is kept is taken, and all stand together
        assert grown["policy"].unique().tolist() == ["least_loaded", cells[0].label] and len(again()) == 12
        for part, change in {
            "cells": {"cells": [replace(cells[0], seed=7)]},
            "traces": {"traces": other},
            "options": {"constants": ["--constants-from", "paper-simulator"]},
            "load": {"load": lambda cell: bench.Load("m", concurrency=2)},
        }.items():
            with pytest.raises(InputError, match=f"holds runs of other {part}"):
                again(interrupt, **change)
        write_cluster(
            folder, read_cluster(folder).engines, EngineConfig(max_num_seqs=7), None, 1.0, "m", "", "hardware"
        )
        with pytest.raises(InputError, match="holds runs of other engines: give those again"):
            again(interrupt)


def test_a_gate_that_does_not_hold_stops_the_runs_before_the_first(tmp_path):
    folder, out = tmp_path / "pools", tmp_path / "out"
    folder.mkdir()
    traces = {"a": with_arrivals(families.generate("chat", 6, seed=0, text=False), 50, "poisson", 0)}

    def spoil(prefill, decode):
        decode[1].script = "garble"

    with cluster_of_scripted_pools(folder, spoil), pytest.raises(bench.GateError, match="^greedy: FAILED: pair 0, 1"):
        run_cells(folder, plan(["round_robin"], ["a"]), traces, out, ["--constants-from", "paper"], say=lambda _: None)
    assert [path.name for path in out.iterdir()] == ["cells.json"]


def test_what_is_in_the_file_of_constants_counts(tmp_path):
    file, cells = tmp_path / "c.json", plan(["round_robin"], ["a"])
    traces = {"a": families.generate("chat", 6, seed=0, text=False)}
    pools = ClusterFile([], EngineConfig(), None, 1.0, "m", "", "hardware")
    loads = {cell.name: bench.Load("m", api_key="secret") for cell in cells}

    def identity():
        return _identity(pools, cells, traces, ["--constants-from", str(file)], loads)

    file.write_text("{}")
    _claim(tmp_path, identity())
    assert "secret" not in (tmp_path / "cells.json").read_text()
    file = file.rename(tmp_path / "elsewhere.json")
    _claim(tmp_path, identity())
    file.write_text("{ }")
    with pytest.raises(InputError, match="other options"):
        _claim(tmp_path, identity())


def late(*seconds):
    """What a router's ``/metrics`` would tell of its event loop, as ``told_by`` reads it."""
    lag = LoopLag()
    for each in seconds:
        lag.late(each)
    return lag.counts


def test_a_run_tells_of_preemptions_and_of_a_host_that_did_not_keep_up(tmp_path):
    folder, said = tmp_path / "pools", []
    folder.mkdir()
    pace, asked = PaceWriter(folder / "pace"), []

    def disturb(prefill, decode):
        answer, idle = decode[0]._answer, decode[0].metrics

        async def answered(http, body):
            asked.append(body)
            pace.step(1.0, 0.5)
            decode[0].metrics = idle.replace("preemptions_total 0", f"preemptions_total {len(asked)}")
            return await answer(http, body)

        decode[0]._answer = answered

    traces = {"a": with_arrivals(families.generate("chat", 4, seed=0, text=False), 50, "poisson", 0)}
    with cluster_of_scripted_pools(folder, disturb, shape=(1, 1)):
        cells = plan(["round_robin"], ["a"], again=False)
        frame = run_cells(folder, cells, traces, tmp_path / "out", ["--constants-from", "paper"], say=said.append)
    told = pd.read_parquet(tmp_path / "out" / f"{cells[0].name}.parquet").attrs["astrolabe"]
    assert len(frame) == 4 and told["preemptions"] == 4 and told["validity"]["host_late_share"] == 0.5
    assert not told["validity"]["valid"] and "INVALID: the host did not keep up" in said[-1]


@pytest.mark.parametrize(
    ("during", "valid", "p99_s"),
    [
        ([0.002] * 1000, True, 0.0021),
        ([0.0049] * 1000, True, 0.005),
        ([0.02] * 20 + [0.002] * 980, False, 0.02),
        ([0.02] * 200 + [0.001] * 9000, False, 0.02),  # late at first, in time for the last minute and more
        ([0.02] * 9 + [0.002] * 991, True, 0.0021),
        ([99.0] * 100, False, np.inf),
    ],
)
def test_a_run_through_a_router_whose_event_loop_was_late_meanwhile_is_invalid(during, valid, p99_s):
    start = [0.5] * 300  # while it came up
    found = _in_time({"valid": True, "why": []}, late(*start), late(*start, *during))
    assert found["valid"] is valid and bool(found["why"]) is not valid
    assert found["loop_lag_p99_s"] == pytest.approx(p99_s, rel=0.02)


@pytest.mark.parametrize(("before", "after"), [([], []), ([], late(0.001)), (late(0.001), late(0.001))])
def test_a_router_that_does_not_tell_how_late_it_was_makes_a_run_invalid(before, after):
    found = _in_time({"valid": True, "why": ["a"]}, before, after)
    assert not found["valid"] and found["why"] == ["a", "the router does not tell how late its event loop was"]


def test_a_router_tells_how_late_its_event_loop_was_since_it_began(tmp_path):
    async def story():
        async with scripted_pools(1, 1) as pools, routed(pools, tmp_path / "j") as (router, _, url):
            for _ in range(7000):
                router.lag.late(0.02)
            told = await asyncio.to_thread(told_by, url)
            assert sum(told) >= 7000 and told[EDGES_S.index(0.02)] == 7000
            assert await asyncio.to_thread(told_by, pools[0][0].url) == []

    asyncio.run(asyncio.wait_for(story(), 30))
