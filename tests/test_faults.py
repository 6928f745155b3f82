"""Instances that slow down, stop and come back: what happens to every request is explicit, and nothing is lost."""

from math import inf

import numpy as np
import pytest
from clusters import AMPLE, COST, POLICIES, SECOND, TIGHT, Constant, Spy, requests, same, short_trace

from astrolabe_lab.errors import InputError
from astrolabe_lab.sim.cluster import ControlPlane, LatencyNoise, Outage, Slowdown, simulate
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.sim.engine import run_one

TEN = requests([0.0], 5, 10)  # one request of ten steps, a second each
DELAYED = ControlPlane(0.7, 0.03, (0.05, 0.4), 0.13, 2)
ASYNC = "async_scheduling=true"


def run(trace, policy=None, faults=(), *, instances=2, engine=AMPLE, cost=SECOND, **settings):
    policy = Constant() if policy is None else policy
    return simulate(trace, policy, instances=instances, engine=engine, cost=cost, faults=faults, **settings)


# --- slowdown ------------------------------------------------------------------------------------------------------


def test_a_slowdown_slows_the_steps_that_start_in_its_window_and_no_others():
    for factor, start_s, end_s, finished_s in (
        (2.0, 3.5, 6.5, 12.0),  # the steps of 4 and 6 s
        (2.0, 4.0, 6.0, 11.0),  # a step that starts at the window's end is none of its
        (3.0, 0.0, inf, 30.0),
        (0.5, 2.0, 4.0, 8.0),
        (5.0, 10.0, 20.0, 10.0),
        (5.0, 3.1, 3.9, 10.0),
    ):
        result = run(TEN, faults=[Slowdown(0, start_s, end_s, factor)])
        assert result.finished_s[0] == finished_s, (start_s, end_s)
        assert run(TEN, Constant(1), [Slowdown(0, start_s, end_s, factor)]).finished_s[0] == 10.0


def test_slowdowns_one_after_another_and_beside_outages_are_independent():
    faults = [Slowdown(0, 2.0, 4.0, 2.0), Slowdown(0, 4.0, 5.0, 3.0), Slowdown(1, 0.0, 90.0, 7.0)]
    # steps start at 0, 1, 2 (slow, to 4), 4 (slower, to 7), 7, 8, ...
    assert run(TEN, faults=faults).finished_s[0] == 13.0
    assert run(TEN, faults=[*faults, Outage(1, 1.0, 5.0, "pause")]).finished_s[0] == 13.0


def test_a_predictor_knows_nothing_of_a_slowdown():
    result = run(TEN, "astrolabe:k=all", [Slowdown(0, 0.0, inf, 2.0), Slowdown(1, 0.0, inf, 2.0)])
    assert (result.predicted_e2e_s[0], result.e2e_s[0]) == (10.0, 20.0)


# --- one outage, by hand -------------------------------------------------------------------------------------------


def test_a_request_on_an_instance_that_fails_has_failed_at_that_time():
    row = run(TEN, faults=[Outage(0, 4.5)]).iloc[0]
    assert (row.status, row.finished_s, row.generated_tokens, row.instance) == ("failed", 4.5, 4, 0)
    assert row[["first_token_s", "ttft_s", "tpot_s", "e2e_s"]].isna().all()


def test_a_redispatched_request_starts_over_and_its_first_token_is_that_of_its_last_run():
    row = run(TEN, faults=[Outage(0, 4.5, inf, "redispatch")]).iloc[0]
    assert (row.status, row.instance, row.generated_tokens, row.preemptions) == ("ok", 1, 10, 0)
    assert (row.first_token_s, row.finished_s, row.ttft_s, row.tpot_s) == (5.5, 14.5, 5.5, 1.0)


def test_a_paused_instance_goes_on_where_it_was():
    row = run(TEN, faults=[Outage(0, 4.5, 7.5, "pause")]).iloc[0]
    assert (row.status, row.instance, row.first_token_s, row.finished_s) == ("ok", 0, 1.0, 13.0)
    for start_s in (1.0, 3.3, 9.9):
        assert run(TEN, faults=[Outage(0, start_s, start_s + 5, "pause")]).finished_s[0] == 15.0
    assert run(TEN, faults=[Outage(0, 10.5, 12.0, "pause")]).finished_s[0] == 10.0


@pytest.mark.parametrize("settings", ["", ASYNC, "scheduler=v0_chunked"])
def test_a_pause_shifts_what_is_under_way_and_changes_nothing_else(settings):
    """All arrive at once, so the whole rest of the run moves by the length of the pause."""
    engine = EngineConfig.parse(settings, TIGHT)
    trace = short_trace(60, 40).assign(arrived_s=0.0)
    plain = run(trace, instances=1, engine=engine, cost=COST)
    half_s = plain.finished_s.median()  # the very end of a step: that step is over, the next has not begun
    for start_s in (half_s, half_s + 0.0123):
        paused = run(trace, instances=1, engine=engine, cost=COST, faults=[Outage(0, start_s, start_s + 7, "pause")])
        after = plain.finished_s > start_s
        assert 20 < after.sum() < 40
        np.testing.assert_allclose(paused.finished_s, plain.finished_s + 7.0 * after, atol=1e-9)
        assert (paused.preemptions == plain.preemptions).all()


@pytest.mark.parametrize("on_stop", ["fail", "redispatch", "pause"])
def test_an_outage_when_nothing_is_there_changes_nothing_there(on_stop):
    trace = TEN.assign(arrived_s=100.0)
    for outage in (Outage(0, 0.0, 50.0, on_stop), Outage(0, 99.0, 100.0, on_stop), Outage(0, 110.5, 120.0, on_stop)):
        assert run(trace, faults=[outage]).finished_s[0] == 110.0, outage
    late = Outage(0, 5000.0, 6000.0, on_stop)
    same(run(trace, "least_loaded", [late]), run(trace, "least_loaded"))


def test_an_arrival_at_the_very_start_of_an_outage_finds_it_down_and_at_its_end_finds_it_up():
    trace = TEN.assign(arrived_s=5.0)
    assert run(trace, faults=[Outage(0, 5.0)]).instance[0] == 1
    back = run(trace, faults=[Outage(0, 1.0, 5.0)]).iloc[0]
    assert (back.instance, back.first_token_s) == (0, 6.0)


# --- healthy, stopped, back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_stop", ["fail", "redispatch"])
def test_an_instance_returns_empty_and_is_used_again(on_stop):
    trace = requests(np.arange(40) * 0.5, 20, 30)
    spy = Spy("least_loaded")
    result = run(trace, spy, [Outage(1, 5.2, 10.2, on_stop)], instances=3, cost=COST)
    firsts = {d.request.rid: d for d in reversed(spy.seen)}
    assert (len(spy.seen) > len(firsts)) == (on_stop == "redispatch")
    for decision in firsts.values():
        now_s = decision.request.arrived_s
        assert decision.instances == ((0, 2) if 5.2 <= now_s < 10.2 else (0, 1, 2))
    first_after = next(d for d in spy.seen if d.request.arrived_s > 10.2)
    x = first_after.signals[1]
    assert (x["running"], x["waiting"], x["in_flight"], x["in_flight_tokens"], x["pending_tokens"]) == (0, 0, 0, 0, 0)
    assert x["free_blocks"] == x["total_blocks"]
    assert (result[result.arrived_s > 10.2].instance == 1).any()


def test_an_instance_that_is_back_says_so_and_the_others_statuses_stay_as_old_as_they_are():
    trace = requests(np.arange(40) * 0.5 + 0.1, 20, 30)
    spy = Spy("round_robin")
    run(trace, spy, [Outage(1, 5.2, 10.2)], instances=3, cost=COST, control=ControlPlane(status_interval_s=8.0))
    for decision in spy.seen:
        now_s = decision.request.arrived_s
        for x in decision.signals:
            taken_s = 10.2 if x["instance"] == 1 and 10.2 <= now_s < 16.0 else now_s // 8.0 * 8.0
            assert x["age_s"] == pytest.approx(now_s - taken_s)
            if taken_s == 10.2:
                assert (x["running"], x["waiting"], x["free_blocks"]) == (0, 0, x["total_blocks"])


def test_what_was_there_is_dispatched_again_in_order_and_goes_elsewhere():
    trace = requests(np.arange(12) * 0.1, 5, 30)
    spy = Spy("round_robin")
    result = run(trace, spy, [Outage(1, 2.0, inf, "redispatch")], instances=3)
    again = spy.seen[12:]
    assert [d.request.rid for d in again] == [1, 4, 7, 10]
    assert all(d.instances == (0, 2) and d.request == spy.seen[d.request.rid].request for d in again)
    assert (result.status == "ok").all() and set(result.instance) == {0, 2}


def test_an_undetected_outage_shows_its_last_signals_and_swallows_what_is_sent_there():
    trace = requests(np.r_[0.0, 0.1, 4.0 + np.arange(20) * 0.25], 5, 40)
    spy = Spy("round_robin")
    result = run(trace, spy, [Outage(0, 4.6, inf, "fail", detected_after_s=2.0)], instances=2)
    down = [d for d in spy.seen if 4.6 <= d.request.arrived_s < 6.6]
    for decision in spy.seen:
        assert decision.instances == ((1,) if decision.request.arrived_s >= 6.6 else (0, 1))
    for decision in down:
        now_s, x = decision.request.arrived_s, decision.signals[0]
        assert x["age_s"] == pytest.approx(now_s - 4.6)
        assert (x["running"], x["waiting"]) == (2, 1)  # the one of 4.5 s waited for a step to end
        assert decision.signals[1]["age_s"] == 0
        assert x["in_flight"] == 0  # the router's own streams have ended
    swallowed = result[(result.arrived_s >= 4.6) & (result.arrived_s < 6.6) & (result.instance == 0)]
    assert len(swallowed) == 4 and (swallowed.status == "failed").all()
    assert (swallowed.finished_s == swallowed.arrived_s).all()
    assert (result[result.arrived_s >= 6.6].status == "ok").all()


def test_with_redispatch_the_first_refusal_gives_an_undetected_outage_away():
    trace = requests(np.arange(20) * 0.25, 5, 40)
    spy = Spy("round_robin")
    result = run(trace, spy, [Outage(0, 2.1, inf, "redispatch", detected_after_s=60.0)], instances=2)
    assert (result.status == "ok").all() and (result.instance == 1).all()
    refused = [d for d in spy.seen if d.chosen == 0 and d.request.arrived_s > 2.1]
    assert len(refused) <= 1
    slow = ControlPlane(dispatch_s=1.2)
    spy = Spy("round_robin")
    result = run(trace, spy, [Outage(0, 2.1, inf, "redispatch", detected_after_s=60.0)], instances=2, control=slow)
    assert (result.status == "ok").all()
    refused = [d for d in spy.seen if d.chosen == 0 and d.request.arrived_s + 1.2 > 2.1]
    assert len(refused) > 1  # those that were on their way before the first came back


def test_a_request_on_its_way_shares_the_fate_of_an_instance_that_is_down_and_is_served_by_one_that_is_back():
    late = ControlPlane(dispatch_s=3.0)
    trace = TEN.assign(arrived_s=1.0)  # reaches the engine at 4 s
    failed = run(trace, faults=[Outage(0, 2.0, 5.0)], control=late).iloc[0]
    assert (failed.status, failed.finished_s, failed.instance) == ("failed", 4.0, 0)
    moved = run(trace, faults=[Outage(0, 2.0, 5.0, "redispatch")], control=late).iloc[0]
    assert (moved.status, moved.instance, moved.first_token_s) == ("ok", 1, 8.0)
    served = run(trace, faults=[Outage(0, 2.0, 3.0)], control=late).iloc[0]
    assert (served.status, served.instance, served.first_token_s) == ("ok", 0, 5.0)
    waited = run(trace, faults=[Outage(0, 2.0, 6.0, "pause")], control=late).iloc[0]
    assert (waited.status, waited.instance, waited.first_token_s) == ("ok", 0, 7.0)


def test_a_paused_instance_is_left_out_when_detected_and_its_requests_come_back():
    trace = requests(np.arange(30) * 0.5, 5, 6)
    spy = Spy("round_robin")
    result = run(trace, spy, [Outage(0, 4.2, 9.2, "pause", detected_after_s=1.0)], instances=2)
    for decision in spy.seen:
        assert decision.instances == ((1,) if 5.2 <= decision.request.arrived_s < 9.2 else (0, 1))
        frozen = 4.2 <= decision.request.arrived_s < 9.2
        assert (
            decision.signals["age_s"][decision.signals["instance"] == 0] > 0
        ).all() == frozen or 0 not in decision.instances
    assert (result.status == "ok").all()
    hung = result[(result.instance == 0) & (result.arrived_s < 9.2) & (result.finished_s > 4.2)]
    assert len(hung) > 3 and (hung.finished_s > 9.2).all()


# --- windows -------------------------------------------------------------------------------------------------------


def test_one_outage_may_follow_another_at_once():
    spy = Spy("round_robin")
    trace = requests(np.arange(40) * 0.5 + 0.25, 5, 3)
    faults = [Outage(0, 10.0, 15.0, "pause"), Outage(0, 2.0, 6.0), Outage(0, 6.0, 10.0, "redispatch")]
    run(trace, spy, faults)
    for decision in spy.seen:
        assert decision.instances == ((1,) if 2.0 <= decision.request.arrived_s < 15.0 else (0, 1))


def test_a_detection_that_comes_after_the_end_is_of_no_consequence():
    spy = Spy("round_robin")
    trace = requests(np.arange(40) * 0.5 + 0.25, 5, 3)
    faults = [Outage(0, 2.0, 3.0, "pause", detected_after_s=5.0), Outage(0, 6.5, 12.0, "pause", detected_after_s=3.0)]
    run(trace, spy, faults)
    for decision in spy.seen:
        assert decision.instances == ((1,) if 9.5 <= decision.request.arrived_s < 12.0 else (0, 1))


@pytest.mark.parametrize("control", [ControlPlane(), DELAYED], ids=["ideal", "delayed"])
@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "astrolabe:k=2"])
def test_when_all_are_down_requests_fail_and_when_one_is_back_they_do_not(policy, control):
    trace = requests(np.arange(60) * 0.5 + 0.1, 5, 3)
    faults = [Outage(0, 5.0, 15.0), Outage(1, 5.0, 20.0, "redispatch"), Outage(2, 5.0, inf)]
    result = run(trace, policy, faults, instances=3, cost=COST, control=control)
    decided_s = result.arrived_s + control.tag_s
    out = result[(decided_s >= 5.0) & (decided_s < 15.0)]
    assert len(out) == 20 and (out.status == "failed").all() and (out.instance == -1).all()
    assert out.decision_s.isna().all() and out.predicted_e2e_s.isna().all()
    np.testing.assert_allclose(out.finished_s, out.arrived_s + control.tag_s)
    assert (result[decided_s >= 15.0].status == "ok").all()


def test_nobody_is_dispatched_again_for_ever():
    """Every instance refuses and none is known to: each refusal gives one away, until none is left."""
    trace = requests(np.arange(10) * 0.1, 5, 3)
    faults = [Outage(i, 0.0, inf, "redispatch", detected_after_s=1e6) for i in range(5)]
    for control in (ControlPlane(), ControlPlane(dispatch_s=0.5), DELAYED):
        for policy in ("round_robin", "po2_requests", "astrolabe"):
            spy = Spy(policy)
            result = run(trace, spy, faults, instances=5, control=control)
            assert (result.status == "failed").all() and result.finished_s.notna().all()
            assert len(spy.seen) <= 5 * len(trace)


def test_preemptions_of_every_run_are_counted():
    trace = short_trace(60, 80, seed=3)
    trace = trace[~TIGHT.rejects(trace.prompt_tokens, trace.output_tokens)]
    _, log = run_one(trace, TIGHT, COST)
    steps = log.drop_duplicates("step").set_index("step").start_s
    preempted = log.attrs["preemptions"]
    stop_s = float(steps[preempted.step.iloc[-1]]) + 0.005  # in the step of the last preemption
    before = preempted[preempted.step.map(steps) < stop_s].groupby("rid").size()
    # the second instance has room for all
    result = run(trace, faults=[Outage(0, stop_s, inf, "redispatch")], engine=[TIGHT, AMPLE], cost=COST)
    assert (result.status == "ok").all() and before.sum() > 5
    expected = before.reindex(result.rid, fill_value=0).to_numpy()
    moved = (result.instance == 1).to_numpy()
    assert expected[moved].sum() > 0
    assert (result.preemptions.to_numpy() == expected).all()
    assert (result[moved].first_token_s > stop_s).all()


# --- nothing lost --------------------------------------------------------------------------------------------------

STORM = (
    Outage(0, 0.7, 1.4, "fail", 0.2),
    Outage(0, 1.4, 1.9, "redispatch"),
    Outage(1, 0.9, 2.4, "redispatch", 0.5),
    Outage(2, 1.1, 2.0, "pause", 0.3),
    Outage(2, 2.5, 2.6, "redispatch", 0.3),
    Outage(3, 2.2, inf, "redispatch", 0.1),
    Slowdown(1, 0.2, 3.0, 3.0),
    Slowdown(3, 0.2, 3.0, 0.5),
)


@pytest.mark.parametrize("plane", ["ideal", "delayed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_lost_in_a_storm(policy, plane):
    control = DELAYED if plane == "delayed" else ControlPlane()
    trace = short_trace(300, 90)
    settings = {
        "instances": 4,
        "engine": TIGHT,
        "cost": COST,
        "control": control,
        "latency_noise": LatencyNoise(0.1, 0.1),
    }
    result = run(trace, policy, STORM, **settings)
    assert result.rid.tolist() == trace.rid.tolist()
    ok = result[result.status == "ok"]
    assert len(ok) > 200 and set(result.status) <= {"ok", "rejected", "failed"}
    # By means since the start, least_latency may send the engine that fails nothing at the time.
    assert "failed" in set(result.status) or policy == "least_latency"
    assert (ok.generated_tokens == ok.output_tokens).all()
    assert (ok.first_token_s > ok.arrived_s + ok.decision_s + control.dispatch_s).all()
    assert result.finished_s.notna().all() and (result.finished_s >= result.arrived_s).all()
    assert not ((result.instance == 3) & (result.finished_s > 2.2) & (result.status == "ok")).any()
    same(result, run(trace, policy, STORM, **settings))
    same(result, run(trace, policy, STORM, leaps=False, **settings))
    same(result, run(trace, policy, STORM[::-1], **settings))


# --- refused settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Outage(-1, 0.0), "outage: instance=-1 must be a whole number >= 0"),
        (lambda: Outage(True, 0.0), "outage: instance=True must be"),
        (lambda: Outage(0, -1.0), "outage: start_s=-1.0 must be a finite number >= 0"),
        (lambda: Outage(0, inf), "outage: start_s=inf must be"),
        (lambda: Outage(0, 5.0, 5.0), "outage: end_s=5.0 must be after start_s=5.0"),
        (lambda: Outage(0, 5.0, float("nan")), "outage: end_s=nan must be after"),
        (lambda: Outage(0, 5.0, None), "outage: end_s=None must be after"),
        (lambda: Outage(0, 5.0, 6.0, "retry"), "outage: on_stop='retry' is not one of fail, redispatch, pause"),
        (lambda: Outage(0, 5.0, on_stop="pause"), "outage: on_stop=pause needs an end_s"),
        (lambda: Outage(0, 5.0, detected_after_s=-1.0), "outage: detected_after_s=-1.0 must be"),
        (lambda: Slowdown(0, 1.0, 2.0, 0.0), "slowdown: factor=0 would make steps take no time"),
        (lambda: Slowdown(0, 1.0, 2.0, -2.0), "slowdown: factor=-2.0 must be"),
        (lambda: Slowdown(0, 2.0, 1.0, 2.0), "slowdown: end_s=1.0 must be after start_s=2.0"),
        (lambda: run(TEN, faults=["crash"]), "fault 'crash' is neither an Outage nor a Slowdown"),
        (lambda: run(TEN, faults=Outage(0, 1.0)), "faults: .*is no list"),
        (lambda: run(TEN, faults=[Outage(2, 1.0)]), r"fault: instance=2 is outside 0\.\.1"),
        (
            lambda: run(TEN, faults=[Outage(1, 1.0, 3.0), Outage(1, 2.0, 4.0)]),
            "two outages of instance 1 overlap; separate them",
        ),
        (lambda: run(TEN, faults=[Outage(1, 1.0), Outage(1, 9.0, 10.0)]), "two outages of instance 1 overlap"),
        (lambda: run(TEN, faults=[Outage(1, 1.0, 3.0)] * 2), "two outages of instance 1 overlap"),
        (
            lambda: run(TEN, faults=[Slowdown(0, 1.0, 3.0, 2.0), Slowdown(0, 0.0, 9.0, 3.0)]),
            "two slowdowns of instance 0 overlap",
        ),
    ],
)
def test_a_fault_that_makes_no_sense_is_named(build, message):
    with pytest.raises(InputError, match=message):
        build()
