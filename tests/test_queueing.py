"""The engine as a queue: where theory gives an answer, the engine gives the same."""

import numpy as np
import pytest
from workloads import CONSTANT, cost_of, frame, random_workload

from astrolabe_lab.arrivals import unit_arrivals
from astrolabe_lab.sim.engine import EngineConfig, run_one

REQUESTS = 60_000
SEEDS = range(6)
ONE_AT_A_TIME = EngineConfig(max_num_seqs=1, max_num_batched_tokens=4096, num_gpu_blocks=4096)


def mean_waits(load, service, prompt, output, cost, config=ONE_AT_A_TIME):
    """Mean waits in s, one a seed, of Poisson arrivals at ``load`` over the mean of ``service`` (arrays by seed)."""
    waits = []
    for seed in SEEDS:
        arrived = unit_arrivals("poisson", REQUESTS, seed) * service(seed).mean() / load
        results, _ = run_one(frame(arrived, prompt(seed), output(seed)), config, cost, log=False, leaps=True)
        waits.append((results["e2e_s"] - service(seed)).mean())
    return np.array(waits)


def assert_theory(waits, theory):
    """The mean over seeds is within four standard errors of theory, and these are small enough to tell."""
    error = waits.std(ddof=1) / np.sqrt(len(waits))
    assert error < 0.05 * theory
    assert abs(waits.mean() - theory) < 4 * error + 0.005 * theory


def pollaczek_khinchine(load, service):
    """Mean wait of M/G/1 in s: load E[S^2] / (2 E[S] (1 - load)), with the moments of the drawn service times."""
    mean, second = service.mean(), (service**2).mean()
    return load * second / (2 * mean * (1 - load))


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_md1_mean_wait_matches_theory(load):
    ones = np.ones(REQUESTS)
    waits = mean_waits(load, lambda _: ones, lambda _: 4, lambda _: 1, CONSTANT)
    assert_theory(waits, load / (2 * (1 - load)))


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_mg1_mean_wait_matches_theory_for_prompts_of_geometric_length(load):
    per_token_s = 1e-3
    prompts = {seed: np.random.default_rng(seed).geometric(1 / 200, REQUESTS).clip(max=4000) for seed in SEEDS}
    cost = cost_of([[0, 0, per_token_s, 0, 0, 0]] * 2)
    waits = mean_waits(load, lambda seed: prompts[seed] * per_token_s, prompts.get, lambda _: 1, cost)
    assert_theory(waits, pollaczek_khinchine(load, np.concatenate(list(prompts.values())) * per_token_s))


def test_mg1_mean_wait_matches_theory_for_answers_of_geometric_length():
    load = 0.5
    outputs = {seed: np.random.default_rng(100 + seed).geometric(1 / 30, REQUESTS) for seed in SEEDS}
    waits = mean_waits(load, lambda seed: outputs[seed].astype(float), lambda _: 8, outputs.get, CONSTANT)
    assert_theory(waits, pollaczek_khinchine(load, np.concatenate(list(outputs.values())).astype(float)))


@pytest.mark.parametrize("kind", ["v1", "v0_chunked", "v0_prefill_first"])
def test_littles_law_holds_on_the_log(kind):
    # The running, over time, are the time that requests spend between admission and end, preempted time left out.
    for seed in range(30):
        trace, config, cost = random_workload(7000 + seed, kind)
        results, log = run_one(trace, config, cost)
        if results["preemptions"].any():
            continue
        steps = log.attrs["steps"]
        over_time = ((steps["end_s"] - steps["start_s"]) * steps["running"]).sum()
        stays = (results["finished_s"] - log.groupby("rid")["start_s"].min().reindex(results["rid"]).to_numpy()).sum()
        assert over_time == pytest.approx(stays, rel=1e-9)


def test_littles_law_holds_between_arrivals_and_ends():
    n = 20_000
    arrived = unit_arrivals("poisson", n, 1) / 0.9
    results, log = run_one(frame(arrived, 16, 8), EngineConfig(max_num_seqs=16), CONSTANT)
    steps = log.attrs["steps"]
    # The log shows who was there when a step of 1 s began; who arrives in it is there for half of it on average.
    rate = n / arrived[-1]
    shown = (steps["running"] + steps["waiting"]).sum() / results["finished_s"].max()
    assert shown + rate / 2 == pytest.approx(rate * results["e2e_s"].mean(), rel=0.01)


def test_an_overloaded_engine_works_at_its_capacity():
    seats, output, step_s = 20, 40, 1.0
    capacity = seats / (output * step_s)  # a request holds its seat for one step a token
    n = 8000
    for load in (1.5, 4.0):
        arrived = unit_arrivals("poisson", n, 2) / (load * capacity)
        results, _ = run_one(frame(arrived, 4, output), EngineConfig(seats), CONSTANT, log=False, leaps=True)
        assert n / results["finished_s"].max() == pytest.approx(capacity, rel=0.01)


def test_below_capacity_an_engine_keeps_up():
    n, load = 8000, 0.7
    arrived = unit_arrivals("poisson", n, 3) / (load * 20 / 40)
    results, _ = run_one(frame(arrived, 4, 40), EngineConfig(20), CONSTANT, log=False, leaps=True)
    assert n / results["finished_s"].max() == pytest.approx(load * 20 / 40, rel=0.01)
    assert results["e2e_s"].mean() < 50


def test_requests_at_once_end_in_waves_of_the_seats():
    results, _ = run_one(frame(np.zeros(10), 4, 7), EngineConfig(4, 512), CONSTANT)
    assert results["finished_s"].tolist() == [7] * 4 + [14] * 4 + [21] * 2


def test_the_token_budget_bounds_the_throughput_of_prompts():
    n, chunk = 2000, 64
    config = EngineConfig(max_num_seqs=32, max_num_batched_tokens=chunk)
    results, _ = run_one(frame(np.zeros(n), 100, 1), config, CONSTANT, log=False)
    assert results["finished_s"].max() == -(-n * 100 // chunk)
