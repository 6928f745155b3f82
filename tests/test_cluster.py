"""The cluster: one row a request, the single engine's own outcome, randomness that does not spread, refused input."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from clusters import AMPLE, COST, POLICIES, TIGHT, Constant, Spy, requests, same, sharegpt_trace, short_trace

from astrolabe_lab import policies
from astrolabe_lab.cost import StepCost, preset
from astrolabe_lab.errors import InputError
from astrolabe_lab.policies import Astrolabe, LeastLoaded, MinQps, RoundRobin
from astrolabe_lab.sim.cluster import ControlPlane, LatencyNoise, Outage, simulate
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.sim.engine import run_one

BUSY = short_trace(250, 40)
CHOICE_COLUMNS = ("policy", "predicted_e2e_s")


def busy(policy, **settings):
    return simulate(BUSY, policy, **{"instances": 3, "engine": TIGHT, "cost": COST, **settings})


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

DELAYED = ControlPlane(tag_s=0.01, predict_s=(0.05, 0.2), dispatch_s=0.01)


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


# --- policies of the user's own ------------------------------------------------------------------------------------


def test_a_class_with_one_method_runs_as_ours_do():
    class Shortest:
        def choose(self, request, cluster, rng):
            loads = [s.running + s.waiting for s in cluster]
            least = [i for i, load in enumerate(loads) if load == min(loads)]
            return least[int(rng.random() * len(least))] if len(least) > 1 else least[0]

    result = busy(Shortest())
    assert set(result.policy) == {"Shortest"}
    same(result, busy("least_loaded"), ("policy",))


def test_any_object_with_choose_will_do():
    turns = iter(range(10**6))
    result = busy(SimpleNamespace(choose=lambda request, cluster, rng: next(turns) % len(cluster)))
    same(result, busy("round_robin"), ("policy",))


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, np.array], ids=["int64", "int32", "uint8", "0-d array"])
def test_numpy_integers_are_indices(kind):
    same(busy(SimpleNamespace(choose=lambda *_: kind(1))), busy(Constant(1)), ("policy",))


def test_a_run_leaves_the_policy_as_it_was():
    turns, qps = RoundRobin(), MinQps()
    for policy, settings in ((turns, {}), (turns, {"compiled": False}), (qps, {})):
        same(busy(policy, **settings), busy(policy, **settings))
    assert turns.count == 0 and qps.sent == {}


def test_a_request_shows_what_a_router_may_know():
    trace = BUSY.head(20).assign(slo=["tight", "loose"] * 10, prefix_blocks=[(i, i + 1) for i in range(20)])
    spy = Spy()
    simulate(trace, spy, instances=3, engine=AMPLE, cost=COST)
    for row, decision in zip(trace.itertuples(), spy.seen, strict=True):
        r = decision.request
        shown = (r.rid, r.arrived_s, r.prompt_tokens, r.predicted_tokens, r.slo, r.prefix_blocks)
        assert shown == (row.rid, row.arrived_s, row.prompt_tokens, row.predicted_tokens, row.slo, row.prefix_blocks)
        assert {type(value) for value in shown} <= {int, float, str, tuple}


def test_a_callable_metric_is_an_objective_of_its_own():
    def shown(predictions):
        shown.seen.append(predictions)
        return predictions.e2e_s

    shown.seen = []
    same(busy(Astrolabe(3, shown)), busy("astrolabe:k=3"), ("policy", "predicted_e2e_s"))
    assert len(shown.seen) == len(BUSY)
    for p in shown.seen:
        fits = np.isfinite(p.e2e_s)
        assert (fits == np.isfinite(p.ttft_s)).all() and (fits == np.isfinite(p.tpot_s)).all()
        assert (p.ttft_s[fits] <= p.e2e_s[fits]).all()
    first = busy(Astrolabe(3, lambda p: p.ttft_s), latency_noise=LatencyNoise(0.1, 0.1))
    same(first, busy("astrolabe:k=3,metric=ttft_s", latency_noise=LatencyNoise(0.1, 0.1)), CHOICE_COLUMNS)


def test_progress_ends_with_all():
    for compiled in (True, False):
        calls: list[tuple] = []
        report = calls.append
        busy("least_loaded", compiled=compiled, progress=lambda done, total, report=report: report((done, total)))
        assert calls == sorted(calls) and calls[-1] == (250, 250) and {total for _, total in calls} == {250}


# --- refused input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choice", [None, 1.0, "1", True, np.True_, -1, 3, np.int64(3), np.array([1]), np.float64(1), (0, 1)], ids=repr
)
def test_a_choice_that_is_no_index_names_the_policy_and_what_is_allowed(choice):
    class Careless:
        def choose(self, request, cluster, rng):
            return choice

    with pytest.raises(InputError, match=r"policy Careless: choose\(\) returned .*0\.\.2"):
        busy(Careless())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": object()}, r"has no method choose\(request, cluster, rng\)"),
        ({"policy": SimpleNamespace(choose=3)}, r"has no method choose\(request, cluster, rng\)"),
        ({"policy": LeastLoaded}, r"LeastLoaded is a class; give an object of it: LeastLoaded\(\.\.\.\)"),
        ({"policy": "least_busy"}, "'least_busy' is unknown; allowed: random, round_robin"),
        ({"trace": BUSY.drop(columns="arrived_s")}, r"arrived_s is missing.*arrivals\.with_arrivals"),
        ({"trace": BUSY.drop(columns="output_tokens")}, "output_tokens is missing"),
        ({"trace": BUSY.head(0)}, "no rows"),
        ({"trace": BUSY.iloc[::-1]}, "arrival times go back"),
        ({"instances": 0}, "instances=0 must be a whole number >= 1"),
        ({"instances": 2.5}, "instances=2.5 must be a whole number >= 1"),
        ({"instances": True}, "instances=True must be a whole number >= 1"),
        ({"engine": [TIGHT] * 2}, "engine: 2 given for 3 instances; give one for all, or one each"),
        ({"cost": [COST] * 4}, "cost: 4 given for 3 instances"),
        ({"predictor_cost": (COST,)}, "predictor_cost: 1 given for 3 instances"),
        ({"policy": "astrolabe:k=4"}, r"policy astrolabe:k=4: k=4 is outside 1\.\.3 \(the cluster has 3"),
        ({"policy": "po2_requests", "compiled": True}, "policy po2_requests: no compiled twin"),
        ({"compiled": True, "control": DELAYED}, "policy round_robin: no compiled twin under these settings"),
        ({"compiled": True, "faults": (Outage(0, 1.0),)}, "no compiled twin under these settings"),
        ({"seed": -1}, "seed=-1"),
    ],
)  # fmt: skip
def test_wrong_input_is_named(settings, message):
    settings = {"trace": BUSY, "policy": "round_robin", "instances": 3, "engine": TIGHT, "cost": COST, **settings}
    with pytest.raises(InputError, match=message):
        simulate(settings.pop("trace"), settings.pop("policy"), **settings)


@pytest.mark.parametrize("policy", ["min_tokens", "astrolabe"])
def test_a_missing_length_is_an_error_that_says_how_to_attach_one(policy):
    with pytest.raises(InputError, match=rf"policy {policy}.* needs predicted lengths.*length\.attach"):
        simulate(BUSY.drop(columns="predicted_tokens"), policy, instances=3)


def test_a_policy_of_ones_own_that_predicts_without_lengths_is_told_so():
    asking = SimpleNamespace(choose=lambda request, cluster, rng: int(cluster.predict(request, "e2e_s", [0])[0]))
    with pytest.raises(InputError, match=r"request 0 has no predicted length: .*length\.attach"):
        simulate(BUSY.drop(columns="predicted_tokens"), asking, instances=3)


@pytest.mark.parametrize("compiled", [None, False])
def test_k_beyond_the_cluster_is_refused_by_object_and_twin_alike(compiled):
    with pytest.raises(InputError, match=r"k=4 is outside 1\.\.3"):
        busy("astrolabe:k=4", compiled=compiled)


@pytest.mark.parametrize(
    ("metric", "instances", "message"),
    [
        ("speed", [0], "metric='speed' is not one of e2e_s, ttft_s, tpot_s, added_delay_s, blend:W"),
        ("e2e_s", [0, 3], r"predict\(\) was asked for instance 3; the cluster has 3 healthy instances, 0\.\.2"),
        ("e2e_s", [-1], r"predict\(\) was asked for instance -1"),
        (lambda p: 1.0, [0, 1], r"the metric returned shape \(\) for 2 instances"),
        (lambda p: p.e2e_s[:1], [0, 1], r"the metric returned shape \(1,\) for 2 instances"),
        (lambda p: None, [0, 1], r"the metric returned shape \(\) for 2 instances"),
        (lambda p: ["fast", "slow"], [0, 1], r"the metric returned \['fast', 'slow'\], not numbers"),
    ],
)
def test_a_wrong_question_to_the_predictors_is_named(metric, instances, message):
    asking = SimpleNamespace(choose=lambda request, cluster, rng: cluster.predict(request, metric, instances) and 0)
    with pytest.raises(InputError, match=message):
        busy(asking)


def test_what_a_policy_raises_reaches_the_user():
    def choose(request, cluster, rng):
        raise ZeroDivisionError("my own")

    with pytest.raises(ZeroDivisionError, match="my own"):
        busy(SimpleNamespace(choose=choose))
    with pytest.raises(IndexError, match=r"instance index 3 is outside 0\.\.2"):
        busy(SimpleNamespace(choose=lambda request, cluster, rng: cluster[3].running))


def test_a_trace_with_one_request_and_simultaneous_arrivals_are_served():
    assert busy("astrolabe").shape[0] == 250
    one = simulate(requests([0.0], 5, 3), "astrolabe", instances=2, engine=TIGHT, cost=StepCost.parse("base_s=1"))
    assert (one.finished_s[0], one.ttft_s[0], one.predicted_e2e_s[0]) == (3.0, 1.0, 3.0)
    burst = simulate(requests([1.0] * 40, 5, 3), "least_loaded", instances=4, engine=TIGHT, cost=COST, compiled=False)
    assert Counter(burst.instance) == Counter(dict.fromkeys(range(4), 10))


def test_a_burst_of_many_at_one_instant_costs_each_the_same():
    """The queue is counted, not walked, at each decision: walked, this would take minutes."""
    seen = []

    class Counting:
        def __deepcopy__(self, memo):
            return self

        def choose(self, request, cluster, rng):
            seen.append(int((cluster.signals["running"] + cluster.signals["waiting"]).sum()))
            return 0

    result = simulate(requests(np.zeros(100_000), 20, 2), Counting(), instances=1, engine=AMPLE, cost=COST)
    assert (result["status"] == "ok").all()
    assert seen == list(range(100_000)), "each sees all before it, running or waiting"
