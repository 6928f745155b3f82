"""Stepping one by one, leaping, and advancing in pieces are the same run, to the last bit."""

import numpy as np
import pytest
from workloads import CACHING, CONSTANT, KINDS, Engine, cost_of, differences, frame, random_workload

from astrolabe_lab.sim.engine import EngineConfig, run_one

WORKLOADS = 60


@pytest.mark.parametrize("kind", (*KINDS, *CACHING))
def test_leaps_give_the_same_bits_as_single_steps(kind):
    preempted = 0
    for seed in range(WORKLOADS):
        workload = random_workload(seed, kind)
        stepped, leapt = Engine(*workload).serve().outcome(), Engine(*workload).serve(leaps=True).outcome()
        assert not differences(stepped, leapt), (seed, differences(stepped, leapt))
        preempted += stepped["engine.preemptions"]
    assert preempted > 50  # the workloads do reach what makes leaps hard


@pytest.mark.parametrize("leaps", [False, True])
@pytest.mark.parametrize("kind", (*KINDS, *CACHING))
def test_advancing_in_pieces_is_advancing_at_once(kind, leaps):
    for seed in range(WORKLOADS):
        workload = random_workload(seed, kind)
        whole = Engine(*workload).serve()
        rng = np.random.default_rng(seed)
        last_s = np.nanmax(whole.state.requests["finished_s"])
        for pieces in (1, 7, 300):
            engine = Engine(*workload)
            engine.deliver_until(np.inf)
            for until_s in np.sort(rng.uniform(0, last_s, pieces)):
                engine.advance(until_s, leaps)
            engine.advance(np.inf, leaps)
            found = differences(whole.outcome(), engine.outcome())
            assert not found, (seed, pieces, found)


@pytest.mark.parametrize("kind", (*KINDS, *CACHING))
def test_stopping_at_the_very_end_of_every_step_changes_nothing(kind):
    for seed in range(WORKLOADS // 2):
        trace, config, cost = random_workload(seed, kind)
        results, log = run_one(trace, config, cost)
        engine = Engine(trace, config, cost)
        engine.deliver_until(np.inf)
        for end_s in log["end_s"].unique():  # so that no step is taken by the shortcuts for steady decoding
            engine.advance(end_s)
        engine.advance(np.inf)
        outcome = engine.outcome()
        for name in ("first_token_s", "finished_s"):
            assert np.array_equal(outcome[name], results[name]), (seed, name)
        assert np.array_equal(outcome["preemptions"], results["preemptions"]), seed


@pytest.mark.parametrize("leaps", [False, True])
@pytest.mark.parametrize("kind", (*KINDS, *CACHING))
def test_a_request_handed_over_at_its_arrival_fares_as_one_announced_before(kind, leaps):
    for seed in range(WORKLOADS):
        workload = random_workload(seed, kind)
        announced = Engine(*workload).serve(leaps).outcome()
        engine = Engine(*workload)
        for now_s in workload[0]["arrived_s"]:
            engine.advance(now_s, leaps)
            engine.deliver_until(now_s)
        engine.advance(np.inf, leaps)
        assert not differences(announced, engine.outcome()), seed


def test_a_leap_over_a_million_steps_adds_up_time_as_single_steps_do():
    cost = cost_of([[1e-3, 0.1 / 3, 0, 1e-4, 1e-7, 0]] * 2)
    config = EngineConfig(max_num_seqs=4, num_gpu_blocks=400_000, max_model_len=2_000_000)
    workload = frame([0.0, 0.5], [100, 3], [1_000_000, 700_000]), config, cost
    stepped, leapt = Engine(*workload).serve(), Engine(*workload).serve(leaps=True)
    assert stepped.outcome()["engine.steps"] >= 1_000_000
    assert not differences(stepped.outcome(), leapt.outcome())


def test_a_slowed_engine_leaps_as_it_steps():
    workload = (
        frame([0.0, 1.0], 10, [500, 300]),
        EngineConfig(),
        cost_of([[0.1, 0.3, 1e-3, 1e-3, 1e-5, 1e-6]] * 2),
    )
    outcomes = []
    for leaps in (False, True):
        engine = Engine(*workload)
        engine.deliver_until(np.inf)
        engine.advance(30.0, leaps)
        engine.state.engines["slow_factor"] = 1.7
        engine.advance(100.0, leaps)
        engine.state.engines["slow_factor"] = 1.0
        outcomes.append(engine.serve(leaps).outcome())
    assert not differences(*outcomes)


def test_a_step_that_would_start_at_until_waits_for_the_next_call():
    engine = Engine(frame([0.0, 2.0], 4, 5), EngineConfig(), CONSTANT)
    engine.deliver_until(0.0)
    engine.advance(2.0)
    assert engine.state.engines["steps"][0] == 2  # those of [0, 1) and [1, 2)
    engine.deliver_until(2.0)
    engine.advance(2.0)
    assert engine.state.engines["steps"][0] == 2
    engine.advance(2.5)
    assert engine.state.engines["n_running"][0] == 2
