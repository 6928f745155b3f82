"""The cluster: one row a request, the single engine's own outcome, better and worse policies, randomness that does not
spread."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from clusters import (
    AMPLE,
    BUSY,
    CHOICE_COLUMNS,
    COST,
    DELAYED,
    POLICIES,
    TIGHT,
    Constant,
    Spy,
    busy,
    same,
    sharegpt_trace,
    short_trace,
)

from astrolabe_lab import policies
from astrolabe_lab.cost import StepCost, preset
from astrolabe_lab.sim.cluster import ControlPlane, LatencyNoise, Outage, simulate
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.sim.engine import run_one

# --- one row a request ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_has_one_row_whatever_becomes_of_it(policy):
    trace = BUSY.assign(rid=np.arange(1000, 1000 + 3 * len(BUSY), 3), family="chat", own=np.arange(len(BUSY)) * 0.5)
    before = trace.copy(deep=True)
    result = simulate(
        trace,
        policy,
        instances=3,
        engine=TIGHT,
        cost=COST,
        faults=(Outage(1, 1.0, 3.0), Outage(2, 2.0, 4.0, "redispatch")),
    )
    pd.testing.assert_frame_equal(result[list(trace)], before)
    pd.testing.assert_frame_equal(trace, before)
    ok, rejected, failed = (result[result.status == status] for status in ("ok", "rejected", "failed"))
    assert len(ok) + len(rejected) + len(failed) == len(trace)
    assert len(ok) and len(rejected) and len(failed)
    assert (ok.generated_tokens == ok.output_tokens).all()
    assert ((ok.arrived_s < ok.first_token_s) & (ok.first_token_s <= ok.finished_s)).all()
    np.testing.assert_allclose(ok.ttft_s, ok.first_token_s - ok.arrived_s)
    np.testing.assert_allclose(ok.e2e_s, ok.finished_s - ok.arrived_s)
    several = ok[ok.generated_tokens > 1]
    np.testing.assert_allclose(
        several.tpot_s * (several.generated_tokens - 1), several.e2e_s - several.ttft_s, atol=1e-12
    )
    assert ok[ok.generated_tokens == 1].tpot_s.isna().all()
    impossible = TIGHT.rejects(trace.prompt_tokens, trace.output_tokens)
    assert set(rejected.rid) | set(failed.rid) >= set(trace.rid[impossible]) >= set(rejected.rid)
    assert (rejected.generated_tokens == 0).all()
    lost = result[result.status != "ok"]
    assert lost[["first_token_s", "ttft_s", "tpot_s", "e2e_s"]].isna().all(axis=None)
    assert (lost.finished_s >= lost.arrived_s).all()
    assert set(result.source) == {"simulated"} and set(result.seed) == {0}
    assert set(result.policy) == {policies.spec(policies.parse(policy))}


def test_a_request_keeps_its_place_in_a_frame_of_any_index():
    shuffled = BUSY.set_index(np.random.default_rng(0).permutation(len(BUSY)))
    same(simulate(shuffled, "random", instances=3, engine=TIGHT, cost=COST), busy("random"))


def test_the_preset_is_the_default_engine_and_cost():
    trace = sharegpt_trace(60, 10)
    default = preset("llama2-7b-a30")
    explicit = simulate(
        trace, "least_loaded", instances=4, engine=EngineConfig.from_dict(default.engine), cost=default.cost
    )
    same(simulate(trace, "least_loaded", instances=4), explicit)


# --- one instance --------------------------------------------------------------------------------------------------

ENGINES = {
    "v1": TIGHT,
    "async": EngineConfig.parse("async_scheduling=true", TIGHT),
    "unchunked": EngineConfig.parse("enable_chunked_prefill=false,max_num_batched_tokens=160", TIGHT),
    "v0_chunked": EngineConfig.parse("scheduler=v0_chunked", TIGHT),
    "v0_prefill_first": EngineConfig.parse("scheduler=v0_prefill_first,max_num_batched_tokens=160", TIGHT),
}


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_a_cluster_of_one_is_the_engine_alone(engine):
    alone, _ = run_one(BUSY, engine, COST, log=False)
    assert alone.preemptions.sum() > 20 and (alone.status == "rejected").any()
    for compiled in (True, False):
        for leaps in (True, False):
            result = simulate(
                BUSY, "least_loaded", instances=1, engine=engine, cost=COST, compiled=compiled, leaps=leaps
            )
            same(result[list(alone)], alone)
            assert set(result.instance) == {0}


def test_with_one_instance_every_policy_gives_the_same_frame():
    one = [
        busy(policy if "k=" in policy or policy != "astrolabe" else "astrolabe:k=1", instances=1) for policy in POLICIES
    ]
    for other in one[1:]:
        same(one[0], other, CHOICE_COLUMNS)


def test_signals_are_those_of_the_step_in_flight():
    """Against the step log of the engine alone: running, waiting, free blocks and the tokens left to compute."""
    trace = short_trace(120, 12, seed=4)
    config = EngineConfig.parse("num_gpu_blocks=4000", TIGHT)
    spy = Spy()
    simulate(trace, spy, instances=1, engine=config, cost=COST)
    alone, log = run_one(trace, config, COST)
    assert not len(log.attrs["preemptions"])
    steps = log.attrs["steps"].set_index("step")
    checked = 0
    for decision in spy.seen:
        now_s, x = decision.request.arrived_s, decision.signals[0]
        flying = steps[(steps.start_s < now_s) & (steps.end_s > now_s)]
        unfinished = alone[(alone.arrived_s < now_s) & (alone.finished_s > now_s)]
        assert x["running"] + x["waiting"] == len(unfinished)
        if not len(flying):
            assert x["free_blocks"] == x["total_blocks"] == 3999
            continue
        step = flying.iloc[0]
        arrived_since = ((alone.arrived_s > step.start_s) & (alone.arrived_s < now_s)).sum()
        assert (x["running"], x["waiting"]) == (step.running, step.waiting + arrived_since)
        assert x["free_blocks"] == step.free_blocks
        computed = log[log.step < flying.index[0]].groupby("rid").tokens.sum().reindex(unfinished.rid, fill_value=0)
        sized = trace.set_index("rid").loc[unfinished.rid]
        left = sized.prompt_tokens + sized.predicted_tokens - computed
        assert x["pending_tokens"] == left.clip(lower=0).sum()
        first_step = log.groupby("rid").step.first()
        queued = sized[[rid not in first_step.index or first_step[rid] > flying.index[0] for rid in sized.index]]
        blocks = -(-queued.prompt_tokens // 4)
        assert x["waiting_blocks"] == blocks.sum()
        assert x["first_waiting_blocks"] == (blocks.iloc[0] if len(blocks) else 0)
        checked += 1
    assert checked > 80


# --- better and worse ----------------------------------------------------------------------------------------------


def means(policy, column="e2e_s", seeds=(0, 1, 2)):
    """The column's mean of 1,200 requests at a rate that keeps 8 instances busy, for each seed."""
    traces = [sharegpt_trace(1200, 20, seed, "oracle") for seed in seeds]
    return [simulate(t, policy, instances=8, seed=seed)[column].mean() for t, seed in zip(traces, seeds, strict=True)]


def test_least_loaded_beats_random_beats_one_instance_for_all():
    least, drawn, constant = (means(policy) for policy in ("least_loaded", "random", Constant(3)))
    assert all(a < b < c for a, b, c in zip(least, drawn, constant, strict=True))


@pytest.mark.parametrize(("metric", "column"), [("e2e_s", "e2e_s"), ("added_delay_s", "e2e_s"), ("ttft_s", "ttft_s")])
def test_astrolabe_with_true_lengths_beats_round_robin_at_load(metric, column):
    predicted, blind = means(f"astrolabe:k=all,metric={metric}", column), means("round_robin", column)
    assert all(a < b for a, b in zip(predicted, blind, strict=True))


def test_a_slow_instance_gets_less_from_least_loaded_and_its_share_from_round_robin():
    calm = short_trace(250, 20)
    slow = StepCost.parse("base_s=0.03,per_token_s=3e-4,per_kv_token_s=3e-6")
    shares = {
        policy: (simulate(calm, policy, instances=3, engine=AMPLE, cost=[COST, COST, slow]).instance == 2).mean()
        for policy in ("least_loaded", "round_robin")
    }
    assert shares["least_loaded"] < 0.25 < 0.33 < shares["round_robin"] < 0.34


def test_beliefs_of_the_predictors_steer_astrolabe_and_nobody_else():
    lie = [COST, COST, StepCost.parse("base_s=1")]
    told = busy("astrolabe:k=all", predictor_cost=lie)
    assert (told.instance == 2).mean() < 0.1 < (busy("astrolabe:k=all").instance == 2).mean()
    same(busy("least_loaded", predictor_cost=lie), busy("least_loaded"))


# --- randomness ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"control": DELAYED, "latency_noise": LatencyNoise(0.2, 0.2)}], ids=["ideal", "delayed"]
)
def test_one_seed_gives_one_frame_and_another_gives_another(settings):
    first, again, other = (busy("astrolabe", seed=seed, **settings) for seed in (5, 5, 6))
    same(first, again)
    assert (first.instance != other.instance).any()


def test_one_seed_gives_one_frame_in_a_fresh_process():
    script = """
import pandas as pd
from clusters import *
from astrolabe_lab.sim.cluster import *
noise, control = LatencyNoise(0.1, 0.1), ControlPlane(predict_s=(0.05, 0.2))
trace = short_trace(80, 40)
for settings in ({}, {"control": control, "latency_noise": noise}):
    frame = simulate(trace, "astrolabe", instances=3, engine=TIGHT, cost=COST, seed=3, **settings)
    print(pd.util.hash_pandas_object(frame).sum())
"""
    root = Path(__file__).resolve().parent.parent
    fresh = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(root), str(root / 'tests')]}\n{script}"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert fresh.returncode == 0, fresh.stderr
    trace, expected = short_trace(80, 40), []
    for settings in ({}, {"control": ControlPlane(predict_s=(0.05, 0.2)), "latency_noise": LatencyNoise(0.1, 0.1)}):
        frame = simulate(trace, "astrolabe", instances=3, engine=TIGHT, cost=COST, seed=3, **settings)
        expected.append(str(pd.util.hash_pandas_object(frame).sum()))
    assert fresh.stdout.split() == expected


def test_noise_on_latency_disturbs_no_other_draw():
    noise = LatencyNoise(0.3, 0.3)
    same(busy("random", latency_noise=noise), busy("random"))
    # with k=1 the noise can change no choice: the same instances are drawn, the same delays are waited
    noisy, plain = (busy("astrolabe:k=1", latency_noise=n, control=DELAYED) for n in (noise, LatencyNoise()))
    same(noisy, plain, ("predicted_e2e_s",))
    assert (noisy.predicted_e2e_s != plain.predicted_e2e_s).mean() > 0.9


def test_common_noise_changes_predictions_and_no_choice():
    noisy, plain = (busy("astrolabe:k=3", latency_noise=LatencyNoise(common=c)) for c in (0.1, 0.0))
    same(noisy, plain, ("predicted_e2e_s",))
    ratio = (noisy.predicted_e2e_s / plain.predicted_e2e_s).dropna()
    assert abs(ratio.mean() - 1) < 0.03 and 0.07 < ratio.std() < 0.13
    own = busy("astrolabe:k=3", latency_noise=LatencyNoise(candidate=0.5))
    assert (own.instance != plain.instance).mean() > 0.2


def test_a_policy_that_draws_more_disturbs_nothing_else():
    class Wasteful(Constant):
        def choose(self, request, cluster, rng):
            rng.random(7)
            cluster.predict(request, "e2e_s", range(len(cluster)))
            return super().choose(request, cluster, rng)

    class Frugal(Wasteful):
        def choose(self, request, cluster, rng):
            cluster.predict(request, "e2e_s", range(len(cluster)))
            return Constant.choose(self, request, cluster, rng)

    settings = {"control": DELAYED, "latency_noise": LatencyNoise(0.2, 0.2), "faults": (Outage(1, 1.0, 2.0),)}
    same(busy(Wasteful(1), **settings), busy(Frugal(1), **settings), ("policy",))
