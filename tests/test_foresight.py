"""Foresight: assumed arrivals are served like real ones, the correction is the regression it claims to be, both use
only what has been seen, and with them predictions are no longer too low."""

import math

import numpy as np
import pytest
from clusters import AMPLE, COST, TIGHT, same, sharegpt_trace, short_trace
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import CONSTANT, KINDS, Engine, frame, random_workload

from astrolabe_lab import foresight as module
from astrolabe_lab.cost import StepCost, preset
from astrolabe_lab.errors import InputError
from astrolabe_lab.foresight import LEAST, MEMORY, RIDGE, WINDOW, Foresight
from astrolabe_lab.measure import prediction_error
from astrolabe_lab.predictor import Predictor, empty_status
from astrolabe_lab.request import Request
from astrolabe_lab.sim.cluster import ControlPlane, Outage, simulate
from astrolabe_lab.sim.config import EngineConfig


def having_seen(trace, instances=1, kind="arrivals"):
    """A Foresight that was told of the trace's requests as dispatches, with their true lengths."""
    seen = Foresight(kind, instances)
    for row in trace.itertuples():
        seen.observe_dispatch(row.arrived_s, int(row.prompt_tokens), int(row.output_tokens))
    return seen


def expected_arrivals(trace, instances, now_s, count):
    """(times, prompts, outputs) of the arrivals to assume at now_s, from the definition."""
    last = trace.tail(WINDOW)
    rate = len(last) / (now_s - last["arrived_s"].iloc[0]) / instances
    quantiles = np.sort(last["output_tokens"].to_numpy())
    m = np.arange(count)
    at = (m + 1) * (math.sqrt(5) - 1) / 2 % 1.0
    prompt = max(1, round(last["prompt_tokens"].sum() / len(last)))
    return now_s + (m + 0.5) / rate, np.full(count, prompt), quantiles[(at * len(last)).astype(int)]


# --- assumed arrivals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_prediction_is_the_outcome_when_the_assumed_arrivals_are_what_comes(kind):
    """TTFT, E2E and added delay, against the engine that serves the same arrivals to the end, with the newcomer and
    without."""
    waits = differ = 0
    for seed in range(20):
        known, config, cost = random_workload(6000 + seed, kind, requests=(LEAST + 4, 60))
        known = known.assign(arrived_s=known["arrived_s"] + 1e-3 * np.arange(len(known)))
        now_s = known["arrived_s"].iloc[-1] + 0.01
        engine = Engine(known, config, cost, predicted=known["output_tokens"])
        engine.deliver_until(np.inf)
        engine.advance(now_s)
        instances = 1 + seed % 3
        predictor = Predictor(config, cost, foresight=having_seen(known, instances))
        prompt, output = int(known["prompt_tokens"].iloc[3]), int(known["output_tokens"].iloc[3])
        request = Request(len(known), now_s, prompt, output)
        found = predictor.predict(engine.status(now_s), request, "added_delay_s")
        assert found == predictor.predict(engine.status(now_s), request, "added_delay_s"), "nothing is left behind"
        own = predictor.predict(engine.status(now_s), request)
        assert (own.ttft_s, own.e2e_s) == (found.ttft_s, found.e2e_s)

        later = expected_arrivals(known, instances, now_s, 1024)
        columns = [known[name].to_numpy() for name in ("arrived_s", "prompt_tokens", "output_tokens")]
        whole = frame(*(np.r_[a, b, c] for a, b, c in zip(columns, (now_s, prompt, output), later, strict=True)))
        served = Engine(whole, config, cost).serve().state.requests
        newcomer = served[len(known)]
        assert own.e2e_s == pytest.approx(newcomer["finished_s"] - now_s, rel=1e-9)
        assert own.ttft_s == pytest.approx(newcomer["first_token_s"] - now_s, rel=1e-9)
        n = len(known)
        without = Engine(whole.drop(index=n).reset_index(drop=True), config, cost).serve().state.requests
        others_s = math.fsum(served["finished_s"][:n]) - math.fsum(without["finished_s"][:n])
        assert found.added_delay_s == pytest.approx(own.e2e_s + others_s, rel=1e-9, abs=1e-9)
        waits += own.ttft_s > 0.2 * own.e2e_s
        differ += own.e2e_s != Predictor(config, cost).predict(engine.status(now_s), request).e2e_s
    assert waits >= 4 and differ >= 5


def test_added_delay_is_what_is_added_to_the_requests_that_are_there():
    """One seat, steps of 1 s, two requests there and one assumed every 10 s: those delay nobody before them."""
    config = EngineConfig(max_num_seqs=1)
    there = frame([400.0, 400.0], 8, [4, 20])
    engine = Engine(there, config, CONSTANT, predicted=[4, 20])
    engine.deliver_until(400.0)
    engine.advance(400.5)
    seen = Foresight("arrivals")
    for k in range(40):
        seen.observe_dispatch(10.0 * k + 10.5, 8, 4)
    found = Predictor(config, CONSTANT, foresight=seen).predict(
        engine.status(400.5), Request(2, 400.5, 8, 8), "added_delay_s"
    )
    assert (found.ttft_s, found.e2e_s, found.added_delay_s) == (24.5, 31.5, 31.5)


def test_nothing_is_assumed_before_enough_has_been_seen_or_without_a_rate():
    config, request = EngineConfig(), Request(0, 50.0, 100, 50)
    plain = Predictor(config, COST).predict(empty_status(50.0, config), request)

    def seeing(times):
        seen = Foresight("arrivals")
        for at_s in times:
            seen.observe_dispatch(at_s, 100, 50)
        return Predictor(config, COST, foresight=seen).predict(empty_status(50.0, config), request)

    assert seeing([]) == seeing(np.linspace(49, 50, LEAST - 1)) == plain
    assert seeing([50.0] * 40) == plain, "all at this very instant: no rate is known"
    assert seeing(np.linspace(49, 50, LEAST)).e2e_s > plain.e2e_s


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 40)), min_size=1, max_size=1200))
def test_the_window_holds_the_last_dispatches_in_order(lengths):
    seen = Foresight("arrivals")
    for k, (prompt, predicted) in enumerate(lengths):
        seen.observe_dispatch(float(k), prompt, predicted)
    last = lengths[-WINDOW:]
    f = seen.record[0]
    assert f["ascending"][: len(last)].tolist() == sorted(predicted for _, predicted in last)
    assert f["prompt_sum"] == sum(prompt for prompt, _ in last)


@pytest.mark.parametrize("assumed", ["arrivals", "learned", "both"])
def test_predictions_are_no_longer_too_low(assumed):
    """At 28 QPS on 12 instances, true lengths: else some 15 % too low; with foresight within 10 %, and unbiased."""
    trace = sharegpt_trace(2000, 28, seed=3, lengths="oracle")

    def error(kind):
        result = simulate(trace, f"astrolabe:k=2,foresight={kind}", instances=12)
        return prediction_error(result.iloc[500:]).iloc[0]

    blind, seeing = error("none"), error(assumed)
    assert blind.signed_pct < -12 and blind.mae_pct == pytest.approx(-blind.signed_pct, rel=0.02)
    assert seeing.mae_pct < 10 and seeing.mae_pct < blind.mae_pct / 1.7
    assert abs(seeing.signed_pct) < 3


# --- the learned correction ----------------------------------------------------------------------------------------


def regression(rows, y):
    """The weights by definition: least squares with exponential forgetting and a ridge."""
    age = MEMORY ** np.arange(len(y))[::-1]
    left = (rows * age[:, None]).T @ rows + RIDGE * np.eye(rows.shape[1])
    return np.linalg.solve(left, (rows * age[:, None]).T @ y)


def test_the_correction_is_the_forgetful_ridge_regression():
    rng = np.random.default_rng(0)
    full, decode_s = rng.random(900), rng.lognormal(1.5, 1.0, 900)
    rows = np.c_[np.ones(900), full, np.log1p(decode_s), full * np.log1p(decode_s)]
    y = rows @ [0.1, 0.05, -0.02, 0.1] + rng.normal(0, 0.02, 900)
    f = module.new_foresight("learned")[0]
    for k in range(900):
        module.note_outcome(f, rows[k], decode_s[k], decode_s[k] * math.exp(y[k]))
        if k in (0, 3, 50, 899):
            np.testing.assert_allclose(f["weights"], regression(rows[: k + 1], y[: k + 1]), rtol=1e-7, atol=1e-9)
    x = rows[0]
    assert module.correction(f, x) == pytest.approx(math.exp(f["weights"] @ x))
    assert module.correction(f, x) == pytest.approx(math.exp(x @ [0.1, 0.05, -0.02, 0.1]), rel=0.03)


def test_one_wild_outcome_moves_the_correction_no_further_than_a_bounded_surprise():
    x = np.array([1.0, 0.5, 2.0, 1.0])

    def after(ratio):
        f = module.new_foresight("learned")[0]
        module.note_outcome(f, x, 1.0, ratio)
        return module.correction(f, x)

    assert after(1.0) == 1.0
    assert after(1.2) < after(1e9) == after(math.exp(module.SURPRISE))
    assert after(1e-9) == after(math.exp(-module.SURPRISE)) < 1.0


def test_through_the_predictor_outcomes_correct_later_predictions():
    """All requests take 1.5 times as long as simulated: after enough of them, predictions do as well; TTFT is kept."""
    config, seen = EngineConfig(), Foresight("learned")
    predictor = Predictor(config, COST, foresight=seen)
    plain = Predictor(config, COST).predict(empty_status(0.0, config), Request(0, 0.0, 50, 100))

    def ask(metric=None):
        return predictor.predict(empty_status(0.0, config), Request(0, 0.0, 50, 100), metric)

    assert ask() == plain
    decode_s = plain.e2e_s - plain.ttft_s
    for _ in range(300):
        seen.observe_outcome(ask(), plain.ttft_s, plain.ttft_s + 1.5 * decode_s)
    assert seen.outcomes == 300
    found = ask("added_delay_s")
    assert found.ttft_s == plain.ttft_s
    assert found.e2e_s - found.ttft_s == pytest.approx(1.5 * decode_s, rel=0.02)
    assert found.tpot_s == pytest.approx(1.5 * plain.tpot_s, rel=0.02)
    assert found.added_delay_s == found.e2e_s, "alone on its instance it delays nobody else"


def test_what_tells_nothing_teaches_nothing():
    config, seen = EngineConfig(), Foresight("learned")
    predictor = Predictor(config, COST, foresight=seen)
    status = empty_status(0.0, config)
    seen.observe_outcome(predictor.predict(status, Request(0, 0.0, 50, 1)), 1.0, 1.0)  # no decode
    seen.observe_outcome(predictor.predict(status, Request(0, 0.0, 50, 9), "ttft_s"), 1.0, 2.0)
    seen.observe_outcome(Predictor(config, COST).predict(status, Request(0, 0.0, 50, 9)), 1.0, 2.0)
    seen.observe_outcome(predictor.predict(status, Request(0, 0.0, 5000, 9)), 1.0, 2.0)  # did not fit
    assert seen.outcomes == 0


def test_a_belief_that_is_wrong_is_learned_away():
    """Predictors that take steps for half as long as they are: the learned correction makes up for it."""
    trace = sharegpt_trace(1500, 20, seed=1, lengths="oracle")
    cost = preset("llama2-7b-a30").cost
    half = StepCost.parse(",".join(f"{r}.{k}={getattr(getattr(cost, r), k) / 2}" for r in ("decode", "mixed") for k in (
        "host_s", "base_s", "per_token_s", "per_seq_s", "per_kv_token_s", "attention_s")))  # fmt: skip
    errors = {
        kind: prediction_error(
            simulate(trace, f"astrolabe:foresight={kind}", instances=10, predictor_cost=half).iloc[700:]
        ).iloc[0]
        for kind in ("none", "both")
    }
    assert errors["none"].signed_pct < -50
    assert abs(errors["both"].signed_pct) < 6 and errors["both"].mae_pct < 15


# --- in a run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["arrivals", "both"])
def test_several_routers_with_delays_and_outages_look_ahead_alike(kind):
    """Each router sees a third of the dispatches and takes itself for one like the others."""
    trace = short_trace(900, 60, lengths="oracle")
    control = ControlPlane(0.05, 0.001, (0.0, 0.01), 0.01, routers=3)
    plain, seeing = (
        simulate(trace, f"astrolabe:foresight={f}", instances=4, engine=AMPLE, cost=COST, control=control)
        for f in ("none", kind)
    )
    blind, error = (prediction_error(r.iloc[300:]).iloc[0] for r in (plain, seeing))
    assert error.mae_pct < blind.mae_pct and abs(error.signed_pct) < abs(blind.signed_pct)
    faults = (Outage(1, 2.0, 5.0), Outage(2, 4.0, 6.0, "redispatch"), Outage(3, 7.0, 9.0, "pause"))
    settings = {"instances": 4, "engine": TIGHT, "cost": COST, "control": control, "faults": faults}
    first, again = (simulate(trace, f"astrolabe:foresight={kind}", **settings) for _ in range(2))
    same(first, again)
    assert set(first.status) == {"ok", "failed", "rejected"} and (first.predicted_e2e_s > 0).sum() > 700


def test_a_policy_of_ones_own_says_what_its_predictors_assume():
    class Mine:
        def __init__(self, foresight):
            self.foresight, self.told = foresight, []

        def __deepcopy__(self, memo):
            return self

        def choose(self, request, cluster, rng):
            self.told.append(cluster.predict(request, "e2e_s", [0])[0])
            return request.rid % len(cluster)

    policies = [Mine(kind) for kind in ("none", "arrivals")]
    for policy in policies:
        simulate(short_trace(200, 40), policy, instances=2, engine=AMPLE, cost=COST)
    blind, seeing = (np.array(policy.told) for policy in policies)
    assert (blind[:LEAST] == seeing[:LEAST]).all() and (seeing >= blind).all() and (seeing > blind).sum() > 100
    with pytest.raises(InputError, match="foresight='all' is not one of none, arrivals, learned, both"):
        simulate(short_trace(20, 40), Mine("all"), instances=2, engine=AMPLE, cost=COST)


# --- refused input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Foresight("some"), "foresight='some' is not one of none, arrivals, learned, both"),
        (lambda: Foresight(instances=0), "instances=0 must be a whole number >= 1"),
        (lambda: Foresight(instances=True), "instances=True must be a whole number >= 1"),
        (lambda: Foresight().observe_dispatch(math.nan, 5, 5), "at_s=nan must be finite"),
        (lambda: Foresight().observe_dispatch(0.0, 0, 5), "prompt_tokens=0 must be a whole number >= 1"),
        (lambda: Foresight().observe_dispatch(0.0, 5, 0), "predicted_tokens=0 must be a whole number >= 1"),
        (lambda: Foresight().observe_dispatch(0.0, 5, 2**31), "predicted_tokens=2147483648"),
        (lambda: having_seen(frame([0.0, 1.0], 5, 5)).observe_dispatch(0.5, 5, 5), "not before the last dispatch"),
        (lambda: Predictor(AMPLE, COST, foresight="both"), "foresight: 'both' is no Foresight"),
    ],
)  # fmt: skip
def test_what_cannot_have_been_seen_is_refused(wrong, message):
    with pytest.raises(InputError, match=message):
        wrong()


@pytest.mark.parametrize("times", [(math.nan, 1.0), (2.0, 1.0), (-1.0, 1.0), (0.5, math.inf)])
def test_an_outcome_that_is_none_is_refused(times):
    prediction = Predictor(AMPLE, COST).predict(empty_status(0.0, AMPLE), Request(0, 0.0, 5, 5))
    with pytest.raises(InputError, match="0 <= ttft_s <= e2e_s"):
        Foresight("learned").observe_outcome(prediction, *times)
