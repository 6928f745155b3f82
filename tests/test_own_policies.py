"""Policies of the user's own: what they are given, what they may return, and what is said of input that is wrong."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from clusters import (
    AMPLE,
    BUSY,
    CHOICE_COLUMNS,
    COST,
    DELAYED,
    TIGHT,
    Constant,
    Spy,
    busy,
    requests,
    same,
)

from astrolabe_lab.cost import StepCost
from astrolabe_lab.errors import InputError
from astrolabe_lab.policies import Astrolabe, LeastLoaded, MinQps, RoundRobin
from astrolabe_lab.sim.cluster import LatencyNoise, Outage, simulate

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
