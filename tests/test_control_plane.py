"""The control plane: when statuses are read, what delays cost, and a ledger that counts what a router knows."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from clusters import AMPLE, COST, POLICIES, TIGHT, Spy, requests, same, short_trace, status_time

from astrolabe_lab import policies
from astrolabe_lab.errors import InputError
from astrolabe_lab.predictor import Predictor, empty_status
from astrolabe_lab.request import Request
from astrolabe_lab.sim.cluster import ControlPlane, LatencyNoise, Outage, simulate

IDLE = requests(np.arange(1, 61) * 50.0, 20, 12)  # each request finds an idle cluster


def run(trace, policy, control=None, **settings):
    settings = {"instances": 4, "engine": AMPLE, "cost": COST, **settings}
    return simulate(trace, policy, **settings, **({} if control is None else {"control": control}))


# --- what signals show ---------------------------------------------------------------------------------------------

PLANES = {
    "ideal": ControlPlane(),
    "dispatch": ControlPlane(dispatch_s=0.13),
    "tag": ControlPlane(tag_s=0.08),
    "predict": ControlPlane(predict_s=(0.05, 0.4)),
    "stale": ControlPlane(status_interval_s=0.7),
    "routers": ControlPlane(routers=3),
    "all": ControlPlane(0.7, 0.03, (0.05, 0.4), 0.13, 2),
}
FAULTS = {
    "no fault": (),
    "faults": (
        Outage(0, 0.8, 1.9, "fail", detected_after_s=0.3),
        Outage(1, 1.0, 2.0, "redispatch", detected_after_s=0.4),
        Outage(1, 2.0, 2.5, "redispatch"),
        Outage(3, 1.5, 2.6, "pause", detected_after_s=0.5),
    ),
}


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "astrolabe:k=2"])
@pytest.mark.parametrize("plane", PLANES)
def test_signals_and_ledger_are_those_of_the_outcome(plane, policy):
    """Every signal at every decision against counts over the result frame: the ledger as of now, the rest as of the
    last refresh, each router's ledger its own."""
    control = PLANES[plane]
    spy = Spy(policy)
    trace = short_trace(220, 60)
    result = run(trace, spy, control, engine=TIGHT)
    assert (result.status == "rejected").any() and result.preemptions.sum() > 10
    sent_s = (result.arrived_s + result.decision_s).to_numpy()
    ready_s = sent_s + control.dispatch_s
    finished_s, instance = result.finished_s.to_numpy(), result.instance.to_numpy()
    tokens = (trace.prompt_tokens + trace.predicted_tokens).to_numpy()
    ok, router = (result.status == "ok").to_numpy(), np.arange(len(trace)) % control.routers
    assert len(spy.seen) == len(trace)
    for decision in spy.seen:
        r = decision.request.rid
        assert decision.router == router[r]
        now_s = decision.request.arrived_s + control.tag_s
        taken_s = status_time(now_s, control.status_interval_s)
        others = np.arange(len(trace)) != r
        for x in decision.signals:
            mine = (instance == x["instance"]) & others
            there = mine & ok & (ready_s <= taken_s) & (finished_s > taken_s)
            assert x["running"] + x["waiting"] == there.sum()
            own = mine & (router == router[r]) & (sent_s <= now_s) & (finished_s > now_s)
            assert (x["in_flight"], x["in_flight_tokens"]) == (own.sum(), tokens[own].sum())
            assert x["age_s"] == pytest.approx(now_s - taken_s, abs=1e-12)
            assert 0 <= x["age_s"] <= control.status_interval_s


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("policy", ["po2_requests", "astrolabe:k=2"])
def test_the_ledger_never_goes_negative_and_returns_to_zero(policy, plane, faults):
    trace = pd.concat([short_trace(220, 60), requests([1000.0] * 12, 5, 3)]).assign(rid=range(232))
    spy = Spy(policy)
    result = run(trace, spy, PLANES[plane], engine=TIGHT, faults=faults)
    for decision in spy.seen:
        for name in decision.signals.dtype.names:
            assert (decision.signals[name] >= 0).all(), name
        assert (decision.signals["free_blocks"] <= decision.signals["total_blocks"]).all()
    assert (result.finished_s[:220] < 1000.0).all()
    first = {d.router: d for d in reversed(spy.seen) if d.request.arrived_s == 1000.0}  # each router's, all else ended
    assert len(first) == PLANES[plane].routers
    for decision in first.values():
        assert (decision.signals["in_flight"] == 0).all() and (decision.signals["in_flight_tokens"] == 0).all()
    assert set(result.status) <= {"ok", "rejected", "failed"} and result.finished_s.notna().all()


def test_the_other_router_s_dispatches_are_not_in_a_ledger():
    trace = requests(np.arange(1, 21) * 1e-3, 5, 30)
    spies = {routers: Spy("round_robin") for routers in (1, 2)}
    for routers, spy in spies.items():
        run(trace, spy, ControlPlane(routers=routers, status_interval_s=100.0), instances=1)
    one, two = ([int(d.signals["in_flight"][0]) for d in spy.seen] for spy in spies.values())
    assert one == list(range(20))
    assert two == [turn // 2 for turn in range(20)]


def test_routers_have_policies_and_draws_of_their_own():
    trace = short_trace(400, 40)
    turns = run(trace, "round_robin", ControlPlane(routers=2))
    assert (turns.instance.to_numpy() == np.arange(400) // 2 % 4).all()
    drawn = run(trace, "random", ControlPlane(routers=2)).instance.to_numpy()
    alone = run(trace, "random").instance.to_numpy()
    assert (drawn[::2] == alone[:200]).all()  # the first router's stream is the only router's
    assert 0.15 < (drawn[1::2] == alone[:200]).mean() < 0.35


# --- stale statuses ------------------------------------------------------------------------------------------------


def largest_share(result, size=20):
    """Mean over stretches of ``size`` dispatches of the share that the most chosen instance got."""
    chosen = result.instance.to_numpy()
    return np.mean([max(Counter(chosen[k : k + size]).values()) / size for k in range(0, len(chosen) - size, size)])


HERD = {"instances": 8, "engine": TIGHT}


@pytest.mark.parametrize("policy", ["least_loaded", "po2_requests", "min_memory", "llumnix_minus_b"])
def test_stale_statuses_make_policies_herd(policy):
    """With several routers: a router's own ledger would keep po2_requests from herding on its own."""
    trace = short_trace(1200, 60)
    fresh, stale = (run(trace, policy, ControlPlane(status_interval_s=s, routers=4), **HERD) for s in (0.0, 3.0))
    assert largest_share(stale) > (1.1 if policy == "po2_requests" else 1.8) * largest_share(fresh)
    assert stale.e2e_s.mean() > fresh.e2e_s.mean()


def test_a_lone_router_with_true_lengths_predicts_from_a_stale_status_as_from_a_fresh_one():
    """It knows all that was sent since: what a status of 100 s ago implies for now is what now shows, bit for bit."""
    trace = short_trace(1200, 60, lengths="oracle")
    trace = trace[~TIGHT.rejects(trace.prompt_tokens, trace.output_tokens)]
    fresh = run(trace, "astrolabe:k=all", **HERD)
    assert fresh.preemptions.sum() > 10
    for interval_s in (0.1, 3.0, 100.0):
        same(run(trace, "astrolabe:k=all", ControlPlane(status_interval_s=interval_s), **HERD), fresh)


def test_an_interval_shorter_than_any_gap_is_almost_fresh():
    trace = short_trace(200, 20)
    spy = Spy("least_loaded")
    run(trace, spy, ControlPlane(status_interval_s=1e-4))
    assert max(d.signals["age_s"].max() for d in spy.seen) <= 1e-4


# --- delays --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_delays_shift_the_first_token_of_an_idle_cluster_by_their_sum(policy):
    asks = policy.startswith("astrolabe")
    plain = run(IDLE, policy)
    delayed = run(IDLE, policy, ControlPlane(tag_s=0.5, predict_s=0.25, dispatch_s=2.0))
    shift_s = 0.5 + 0.25 * asks + 2.0
    for column in ("first_token_s", "finished_s", "ttft_s", "e2e_s"):
        np.testing.assert_allclose(delayed[column] - plain[column], shift_s, atol=1e-9)
    np.testing.assert_allclose(delayed.tpot_s, plain.tpot_s, atol=1e-9)
    assert (delayed.decision_s == 0.5 + 0.25 * asks).all() and (plain.decision_s == 0).all()
    if asks:
        np.testing.assert_allclose(delayed.predicted_e2e_s, delayed.e2e_s, atol=1e-9)


def test_a_decision_waits_for_the_slowest_predictor_asked():
    """Uniform draws between low and high: the mean of the slowest of k is low + (high - low) k / (k + 1)."""
    trace = requests(np.arange(1, 1501) * 5.0, 5, 3)
    low, high = 0.2, 1.2
    means = {}
    for k in (1, 2, 8):
        result = run(trace, f"astrolabe:k={k}", ControlPlane(tag_s=0.1, predict_s=(low, high)), instances=8)
        waited = result.decision_s - 0.1
        assert waited.between(low, high).all()
        np.testing.assert_allclose(
            result.ttft_s - result.decision_s, result.ttft_s[0] - result.decision_s[0], atol=1e-9
        )
        means[k] = waited.mean()
        assert abs(means[k] - (low + (high - low) * k / (k + 1))) < 0.025
    assert means[1] < means[2] < means[8]


def test_calls_to_the_predictors_one_after_another_add_up():
    def twice(request, cluster, rng):
        cluster.predict(request, "ttft_s", [0, 1])
        cluster.predict(request, "e2e_s", [2])
        return 2

    result = run(IDLE, SimpleNamespace(choose=twice), ControlPlane(predict_s=0.25))
    assert (result.decision_s == 0.5).all()


def test_the_paper_s_control_plane_is_its_measured_delays():
    result = run(IDLE, "astrolabe", ControlPlane.paper())
    assert result.decision_s.between(0.0048 + 0.062, 0.0048 + 0.080).all()
    assert (run(IDLE, "least_loaded", ControlPlane.paper()).decision_s == 0.0048).all()


def test_state_is_read_when_the_decision_begins_not_when_it_ends():
    """The first request ends at 1.12 s; the second arrives at 1.0 s, is tagged until 1.1 or 1.2 s, and asks for 5 s."""
    step_s = COST.step_seconds(20, 1, 0, 200.0, mixed=True)
    ends_s = 1.0 + run(requests([1.0], 20, 1), "random", instances=1).e2e_s[0]
    assert ends_s == pytest.approx(1.0 + step_s)
    for tag_s, running in ((step_s * 0.5, 1), (step_s * 1.5, 0)):
        spy = Spy("astrolabe:k=1")
        trace = requests([1.0 - tag_s, 1.0], 20, 1)
        run(trace, spy, ControlPlane(tag_s=tag_s, predict_s=5.0), instances=1)
        assert spy.seen[1].signals["running"][0] == 0  # the first still waits for its own decision: nothing is there
        spy = Spy("round_robin")
        run(trace, spy, ControlPlane(tag_s=tag_s), instances=1)
        assert spy.seen[1].signals["running"][0] + spy.seen[1].signals["waiting"][0] == running * 1


# --- predictions under delays --------------------------------------------------------------------------------------

KNOWING = {
    "ideal": ControlPlane(),
    "dispatch": ControlPlane(dispatch_s=0.3),
    "stale": ControlPlane(status_interval_s=3.0),
    "stale, dispatch": ControlPlane(status_interval_s=2.0, dispatch_s=0.5),
    "tag, predict": ControlPlane(tag_s=0.02, predict_s=0.01, dispatch_s=0.2),
}


@pytest.mark.parametrize("plane", KNOWING)
def test_with_true_lengths_the_last_request_s_prediction_is_its_outcome(plane):
    """One router knows all that was sent: whatever the delays, its last prediction has nothing left to guess."""
    matched = 0
    for n in range(1, 60, 2):
        trace = short_trace(n, 25, seed=n, lengths="oracle")
        trace = trace[~TIGHT.rejects(trace.prompt_tokens, trace.output_tokens)]
        result = run(trace, "astrolabe:k=all", KNOWING[plane], instances=2, engine=TIGHT)
        last = result.iloc[-1]
        if plane == "tag, predict" and result.arrived_s.diff().iloc[-1] < 0.01:
            continue  # the request before it is still being decided on: nobody knows where it goes
        assert last.predicted_e2e_s == pytest.approx(last.e2e_s, abs=1e-9), n
        matched += 1
    assert matched > 20


def test_another_router_s_dispatches_are_unknown_to_a_prediction_until_a_status_shows_them():
    trace = requests([1.0, 1.001], 200, 20)
    for routers, knows in ((1, True), (2, False)):
        result = run(trace, "astrolabe:k=1", ControlPlane(dispatch_s=0.5, routers=routers), instances=1)
        assert (result.predicted_e2e_s[1] == pytest.approx(result.e2e_s[1], abs=1e-9)) == knows
    fresh = run(trace, "astrolabe:k=1", ControlPlane(routers=2), instances=1)
    assert fresh.predicted_e2e_s[1] == pytest.approx(fresh.e2e_s[1], abs=1e-9)


def test_a_dispatch_in_transit_is_added_to_the_prediction():
    first, second = Request(0, 1.0, 200, 20), Request(1, 1.2, 50, 10)
    trace = requests([1.0, 1.2], [200, 50], [20, 10])
    result = run(trace, "astrolabe:k=1", ControlPlane(dispatch_s=0.5), instances=1)
    predictor = Predictor(AMPLE, COST)
    alone = predictor.predict(empty_status(1.0, AMPLE), first, now_s=1.5)
    behind = predictor.predict(empty_status(1.2, AMPLE), second, now_s=1.7, dispatched=[(1.5, 200, 20)])
    assert result.predicted_e2e_s.tolist() == pytest.approx([alone.e2e_s, behind.e2e_s], abs=1e-12)
    assert behind.e2e_s > predictor.predict(empty_status(1.2, AMPLE), second, now_s=1.7).e2e_s


def test_an_ideal_plane_written_out_is_the_ideal_plane():
    trace = short_trace(100, 40)
    written = ControlPlane(status_interval_s=0, tag_s=0, predict_s=(0.0, 0.0), dispatch_s=0, routers=1)
    for policy in ("least_loaded", "astrolabe"):
        same(run(trace, policy, written, engine=TIGHT), run(trace, policy, engine=TIGHT))


# --- refused settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: ControlPlane(status_interval_s=-1),
            "status_interval_s=-1 must be a finite number >= 0",
        ),
        (lambda: ControlPlane(tag_s="5ms"), "control plane: tag_s='5ms' must be"),
        (lambda: ControlPlane(tag_s=float("nan")), "control plane: tag_s=nan must be"),
        (lambda: ControlPlane(dispatch_s=float("inf")), "control plane: dispatch_s=inf must be"),
        (lambda: ControlPlane(predict_s=(0.2, 0.1)), r"predict_s=\(0.2, 0.1\) must be \(low, high\) with low <= high"),
        (lambda: ControlPlane(predict_s=(0.1, 0.2, 0.3)), "must be a number or"),
        (lambda: ControlPlane(predict_s=(-0.1, 0.2)), "predict_s=-0.1 must be"),
        (lambda: ControlPlane(routers=0), "control plane: routers=0 must be a whole number >= 1"),
        (lambda: ControlPlane(routers=1.5), "control plane: routers=1.5 must be"),
        (lambda: LatencyNoise(common=-0.1), "latency noise: common=-0.1 must be"),
        (lambda: LatencyNoise(candidate=None), "latency noise: candidate=None must be"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(build, message):
    with pytest.raises(InputError, match=message):
        build()


def test_policies_by_text_and_by_object_are_one():
    trace = short_trace(60, 40)
    same(run(trace, "astrolabe:k=3"), run(trace, policies.parse("astrolabe:k=3")))
