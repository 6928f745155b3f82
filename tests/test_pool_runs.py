"""Before and around runs on pools: gates over scripted engines, and cells that are interleaved and resumable."""

import asyncio

import numpy as np
import pytest
from scripted_pools import scripted_pools
from test_pool_router import routed

from astrolabe_lab import InputError
from astrolabe_lab.bench import gates as engine_gates
from astrolabe_lab.serve.loop_lag import EDGES_S, LoopLag
from astrolabe_lab.serve.pools.gates import check_pools
from astrolabe_lab.serve.pools.runs import _claim, _in_time, _lags, plan

POLICIES, TRACES = ["round_robin", "least_loaded", "marginal_cost"], ["a", "b", "c"]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(engine_gates, "IDLE_S", 0.2)
    monkeypatch.setattr("astrolabe_lab.serve.pools.gates.SETTLE_S", 0.2)


def verdicts(change, prefill=2, decode=2):
    """{gate: (ok, detail)} of pools that ``change(prefill, decode)`` has spoilt."""

    async def story():
        async with scripted_pools(prefill, decode) as (p, d):
            change(p, d)
            found = await check_pools([e.url for e in p], [e.url for e in d], "m")
            return {each.gate: (each.ok, each.detail) for each in found}, p, d

    return asyncio.run(asyncio.wait_for(story(), 60))


def test_sound_pools_pass_every_gate_and_every_pair_was_used():
    found, prefill, decode = verdicts(lambda p, d: None)
    assert list(found) == ["idle", "warm_up", "prefix_reset", "pairs", "exact", "greedy"]
    assert all(ok for ok, _ in found.values()), found
    assert not any(engine.held for engine in prefill)
    assert all(len(engine.pulled) >= 2 * 2 * 2 for engine in decode)
    assert "4 pairs" in found["pairs"][1]


def test_answers_that_depend_on_the_way_the_prompt_took_fail_the_greedy_gate():
    def spoil(prefill, decode):
        decode[1].script = "garble"

    found, *_ = verdicts(spoil)
    ok, detail = found["greedy"]
    assert not ok and "pair 0, 1 departs at token 9 from an engine that computed the prompt itself" in detail
    assert found["exact"][0]


def test_a_token_short_fails_the_exact_gate():
    def spoil(prefill, decode):
        decode[0].short = 1

    found, *_ = verdicts(spoil)
    assert found["exact"] == (False, "pair 0, 0 counts 40 and 15 (length), not 40 and 16")


def test_engines_that_keep_no_blocks_are_no_prefill_pool():
    def spoil(prefill, decode):
        prefill[0].script = "http:500"

    found, *_ = verdicts(spoil)
    assert not found["pairs"][0] and "prefill engine 0 answers HTTP 500" in found["pairs"][1]


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


def test_a_folder_goes_on_with_its_own_cells_and_refuses_others(tmp_path):
    cells = plan(POLICIES, TRACES)
    port = _claim(tmp_path, cells)
    assert _claim(tmp_path, cells) == port
    with pytest.raises(InputError, match="holds other cells"):
        _claim(tmp_path, plan(POLICIES, ["a"]))
    for wrong in (([], ["a"]), (["x", "x"], ["a"]), (["x"], [])):
        with pytest.raises(InputError, match="distinct names"):
            plan(*wrong)


def late(*seconds):
    """What a router's ``/metrics`` would tell of its event loop, as ``_lags`` reads it."""
    lag = LoopLag()
    for each in seconds:
        lag.late(each)
    return lag.counts


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
            told = await asyncio.to_thread(_lags, url)
            assert sum(told) >= 7000 and told[EDGES_S.index(0.02)] == 7000
            assert await asyncio.to_thread(_lags, pools[0][0].url) == []

    asyncio.run(asyncio.wait_for(story(), 30))
