"""Padded and tabulated step costs: the compiled engine prices a step as ``StepCost`` does, leaping or stepping."""

import numpy as np
import pytest
from workloads import KINDS, SYNCHRONOUS, Engine, differences, frame, random_workload

from astrolabe_lab.cost import Grid, Regime, StepCost
from astrolabe_lab.errors import InputError
from astrolabe_lab.predictor import Predictor
from astrolabe_lab.request import Request
from astrolabe_lab.sim.compiled import step_seconds
from astrolabe_lab.sim.engine import EngineConfig, run_one
from astrolabe_lab.sim.state import new_engines

SEEDS = range(12)


def random_grid(rng):
    axes = [np.unique(rng.integers(0, most, rng.integers(1, 8))).astype(float) for most in (60, 3000)]
    return Grid(*(tuple(axis) for axis in axes), tuple(map(tuple, rng.uniform(1e-3, 2e-2, [len(x) for x in axes]))))


def random_cost(seed, linear=True):
    """A step cost with padding and grids, each of them or not."""
    rng = np.random.default_rng([seed, 7])
    scale = np.array([1e-3, 1e-2, 1e-4, 1e-4, 1e-6, 1e-8]) * linear
    decode, mixed = (Regime(*(rng.uniform(0.1, 1, 6) * scale)) for _ in range(2))
    sizes = np.unique(rng.integers(1, 50, rng.integers(1, 8)))
    grids = [random_grid(rng) if not linear or rng.random() < 0.7 else None for _ in range(2)]
    return StepCost(decode, mixed, tuple(sizes) if rng.random() < 0.7 else (), *grids)


def bilinear(grid, new_tokens, context_tokens):
    """The grid by numpy's one-dimensional interpolation, along context first."""
    along = [np.interp(context_tokens, grid.context_tokens, row) for row in grid.seconds]
    return np.interp(new_tokens, grid.new_tokens, along)


@pytest.mark.parametrize("linear", [True, False])
def test_the_kernel_prices_a_step_as_step_cost_does_to_the_last_bit(linear):
    config = EngineConfig(max_num_seqs=64)
    for seed in SEEDS:
        cost = random_cost(seed, linear)
        engines, grids = new_engines([config], [cost])
        rng = np.random.default_rng(seed)
        for _ in range(200):
            n, context, attention = int(rng.integers(0, 65)), int(rng.integers(0, 4000)), float(rng.uniform(0, 1e5))
            for mixed, tokens, work in ((True, n + 100, attention), (False, n, 0.0)):
                ours = step_seconds(engines[0], grids, int(mixed), tokens, n, context, work)
                assert ours == cost.step_seconds(tokens, n, context, work, mixed)


def test_a_grid_is_bilinear_between_its_points_and_constant_beyond_its_edges():
    rng = np.random.default_rng(3)
    for _ in range(50):
        grid = random_grid(rng)
        for new_tokens, context_tokens in rng.uniform(0, [80, 4000], (40, 2)):
            assert grid.at(new_tokens, context_tokens) == pytest.approx(bilinear(grid, new_tokens, context_tokens))
        for i, x in enumerate(grid.new_tokens):
            for j, y in enumerate(grid.context_tokens):
                assert grid.at(x, y) == pytest.approx(grid.seconds[i][j], rel=1e-12)


def test_a_padded_decode_costs_what_the_next_size_costs_and_a_mixed_step_what_it_is():
    plain = StepCost.parse("base_s=0.01,per_token_s=1e-3,per_seq_s=1e-4,per_kv_token_s=1e-6")
    padded = StepCost(plain.decode, plain.mixed, pad_sizes=(4, 8))
    for n, size in ((1, 4), (4, 4), (5, 8), (8, 8), (9, 9)):
        assert padded.step_seconds(n, n, 500) == plain.step_seconds(size, size, 500)
        assert padded.step_seconds(n, n, 500, mixed=True) == plain.step_seconds(n, n, 500, mixed=True)


@pytest.mark.parametrize("kind", KINDS)
def test_leaps_over_padded_and_tabulated_steps_equal_single_steps_to_the_last_bit(kind):
    leapt = 0
    for seed in SEEDS:
        trace, config, _ = random_workload(9000 + seed, kind)
        cost = random_cost(seed, linear=seed % 3 > 0)
        engines = [Engine(trace, config, cost).serve(leaps) for leaps in (False, True)]
        assert not differences(*(engine.outcome() for engine in engines)), seed
        leapt += int(engines[0].state.engines["steps"][0])
    assert leapt > 1000


@pytest.mark.parametrize("kind", SYNCHRONOUS)
def test_every_logged_step_takes_what_step_cost_says(kind):
    for seed in SEEDS:
        trace, config, _ = random_workload(9100 + seed, kind)
        cost = random_cost(seed)
        _, log = run_one(trace, config, cost)
        prompt = trace["prompt_tokens"].to_numpy()
        lost = log.attrs["preemptions"]
        held = np.zeros(len(trace), np.int64)
        known = prompt.copy()
        for step, rows in log.groupby("step"):
            held[lost.loc[lost["step"] == step, "rid"]] = 0
            context, work, prefills = 0, 0.0, 0
            for rid, tokens in zip(rows["rid"], rows["tokens"], strict=True):
                before = held[rid]
                context += before
                if not (tokens == 1 and before >= prompt[rid] and before + 1 == known[rid]):
                    prefills += 1
                    work += tokens * before + tokens * tokens / 2
                held[rid] += tokens
                known[rid] += held[rid] == known[rid]
            seconds = cost.step_seconds(int(rows["tokens"].sum()), len(rows), context, work, prefills > 0)
            took = rows["end_s"].iloc[0] - rows["start_s"].iloc[0]
            assert took == pytest.approx(seconds, rel=1e-9, abs=1e-12), (seed, step)


def test_the_frontend_delays_what_the_client_sees_and_no_step():
    trace, config, cost = random_workload(1, "v1")
    slow = StepCost(cost.decode, cost.mixed, frontend_s=0.25)
    (before, steps), (after, same_steps) = run_one(trace, config, cost), run_one(trace, config, slow)
    assert steps.equals(same_steps)
    for name in ("first_token_s", "finished_s", "ttft_s", "e2e_s"):
        np.testing.assert_allclose(after[name] - before[name], 0.25, rtol=0, atol=1e-9)
    np.testing.assert_allclose(after["tpot_s"], before["tpot_s"], atol=1e-9)


def test_a_prediction_on_an_idle_engine_is_what_the_client_sees():
    half_a_second = Grid((8.0,), (0.0,), ((0.5,),))
    cost = StepCost(
        Regime(base_s=0.01), Regime(base_s=0.01), pad_sizes=(8,), decode_grid=half_a_second, frontend_s=0.25
    )
    config = EngineConfig()
    engine = Engine(frame([0.0], 20, 5), config, cost)
    predicted = Predictor(config, cost).predict(engine.status(0.0), Request(0, 0.0, 20, 5))
    results, _ = run_one(frame([0.0], 20, 5), config, cost)
    assert predicted.e2e_s == pytest.approx(results["e2e_s"].iloc[0], rel=1e-12)
    assert predicted.ttft_s == pytest.approx(0.01 + 0.25) and predicted.e2e_s == pytest.approx(0.01 + 4 * 0.51 + 0.25)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grid((2.0, 1.0), (0.0,), ((1.0,), (1.0,))),
        lambda: Grid((1.0,), (0.0, np.nan), ((1.0, 1.0),)),
        lambda: Grid((1.0,), (0.0,), ((-1.0,),)),
        lambda: Grid((1.0, 2.0), (0.0,), ((1.0,),)),
        lambda: Grid((), (0.0,), ()),
        lambda: StepCost(Regime(base_s=1), Regime(base_s=1), pad_sizes=(4, 2)),
        lambda: StepCost(Regime(base_s=1), Regime(base_s=1), pad_sizes=(0.5,)),
        lambda: StepCost(Regime(base_s=1), Regime(base_s=1), frontend_s=-1),
        lambda: StepCost(Regime(), Regime(), decode_grid=Grid((1.0,), (0.0,), ((1.0,),))),
    ],
)
def test_costs_that_price_no_step_are_refused(make):
    with pytest.raises(InputError):
        make()
