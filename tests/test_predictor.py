"""The Predictor: exact where nothing is unknown, and honest about what does not fit."""

import math

import numpy as np
import pytest
from workloads import CONSTANT, KINDS, Engine, flags_of, frame, random_workload

from astrolabe_lab.errors import InputError
from astrolabe_lab.objective import METRICS
from astrolabe_lab.predictor import Predictor, empty_status
from astrolabe_lab.request import Request
from astrolabe_lab.sim.engine import EngineConfig, run_one

WORKLOADS = 40


def request_of(trace, r):
    row = trace.iloc[r]
    return Request(r, row["arrived_s"], int(row["prompt_tokens"]), int(row["output_tokens"]))


def outcome_of_last(trace, config, cost):
    """(ttft_s, e2e_s, first_token_s, finished_s) of the trace's last request when it is served to the end."""
    q = Engine(trace, config, cost).serve(leaps=True).state.requests[len(trace) - 1]
    arrived_s = trace["arrived_s"].iloc[-1]
    return q["first_token_s"] - arrived_s, q["finished_s"] - arrived_s, q["first_token_s"], q["finished_s"]


def cut(trace, newcomer_at_s):
    """The requests that arrive by then, and one more that arrives at that very instant."""
    before = trace[trace["arrived_s"] <= newcomer_at_s]
    last = trace.iloc[[-1]].assign(arrived_s=newcomer_at_s)
    return frame(*(np.r_[before[name], last[name]] for name in ("arrived_s", "prompt_tokens", "output_tokens")))


def instants(trace, config, cost, rng, n=4):
    """Random instants of a run, of which some are in the middle of a step and some are the very end of one."""
    results, log = run_one(trace, config, cost)
    return [*rng.uniform(0, results["finished_s"].max(), n), *rng.choice(log["end_s"].unique(), 2)]


@pytest.mark.parametrize("kind", KINDS)
def test_with_true_lengths_and_no_later_arrival_the_prediction_is_the_outcome(kind):
    preempted = mid_step = 0
    for seed in range(WORKLOADS):
        whole, config, cost = random_workload(2000 + seed, kind)
        rng = np.random.default_rng(seed)
        predictor = Predictor(config, cost)
        for now_s in instants(whole, config, cost, rng):
            trace = cut(whole, now_s)
            known = trace.iloc[:-1]
            engine = Engine(known, config, cost, predicted=known["output_tokens"])
            engine.deliver_until(np.inf)
            engine.advance(now_s, leaps=bool(rng.integers(2)))
            status = engine.status(now_s)
            predicted = predictor.predict(status, request_of(trace, len(known)))
            ttft_s, e2e_s, first_token_s, finished_s = outcome_of_last(trace, config, cost)
            output = trace["output_tokens"].iloc[-1]
            tpot_s = (finished_s - first_token_s) / (output - 1) if output > 1 else 0.0
            assert predicted.fits
            assert (predicted.ttft_s, predicted.e2e_s, predicted.tpot_s) == (ttft_s, e2e_s, tpot_s), (
                seed,
                now_s,
            )
            preempted += status.rows["preemptions"].any()
            mid_step += not math.isnan(status.header["step_started_s"][0])
    assert preempted > WORKLOADS // 2 and mid_step > 2 * WORKLOADS


@pytest.mark.parametrize("kind", KINDS)
def test_a_stale_status_with_the_dispatches_since_predicts_the_outcome_too(kind):
    for seed in range(WORKLOADS):
        whole, config, cost = random_workload(3000 + seed, kind)
        rng = np.random.default_rng(seed)
        predictor = Predictor(config, cost)
        for now_s in instants(whole, config, cost, rng, 2):
            trace = cut(whole, now_s)
            taken_s = now_s * rng.random()
            seen = trace[trace["arrived_s"] <= taken_s]
            engine = Engine(trace, config, cost, predicted=trace["output_tokens"])
            engine.deliver_until(taken_s)
            engine.advance(taken_s)
            since = trace.iloc[len(seen) : -1][["arrived_s", "prompt_tokens", "output_tokens"]]
            dispatched = list(since.itertuples(index=False, name=None))
            predicted = predictor.predict(
                engine.status(taken_s), request_of(trace, len(trace) - 1), now_s=now_s, dispatched=dispatched
            )
            assert (predicted.ttft_s, predicted.e2e_s) == outcome_of_last(trace, config, cost)[:2], (
                seed,
                now_s,
            )


def test_an_asynchronous_engine_that_waits_for_its_step_is_restored_waiting():
    # The first request's only token is in flight, so nothing was scheduled behind it: both others join at its end.
    trace = frame([0.0, 0.4, 0.7], 4, [1, 3, 3])
    config = EngineConfig(async_scheduling=True)
    engine = Engine(trace.iloc[:2], config, CONSTANT, predicted=[1, 3])
    engine.deliver_until(0.5)
    engine.advance(0.5)
    status = engine.status(0.5)
    assert status.header["stalled"][0] == 1 and status.waiting == 1
    predicted = Predictor(config, CONSTANT).predict(status, request_of(trace, 2))
    assert (predicted.ttft_s, predicted.e2e_s) == outcome_of_last(trace, config, CONSTANT)[:2]


@pytest.mark.parametrize("kind", KINDS)
def test_each_metric_alone_is_that_of_the_whole_prediction(kind):
    for seed in range(WORKLOADS):
        whole, config, cost = random_workload(4000 + seed, kind)
        predictor = Predictor(config, cost)
        for now_s in instants(whole, config, cost, np.random.default_rng(seed), 2):
            trace = cut(whole, now_s)
            engine = Engine(trace.iloc[:-1], config, cost, predicted=trace["output_tokens"].iloc[:-1])
            engine.deliver_until(np.inf)
            engine.advance(now_s)
            status, request = engine.status(now_s), request_of(trace, len(trace) - 1)
            full = predictor.predict(status, request)
            assert full.added_delay_s is None
            for metric in METRICS[:3]:
                alone = predictor.predict(status, request, metric)
                assert getattr(alone, metric) == getattr(full, metric), (seed, metric)
            with_delay = predictor.predict(status, request, "added_delay_s")
            assert (with_delay.ttft_s, with_delay.e2e_s, with_delay.tpot_s) == (
                full.ttft_s,
                full.e2e_s,
                full.tpot_s,
            )

            finished = [Engine(t, config, cost).serve().state.requests["finished_s"] for t in (trace, trace.iloc[:-1])]
            others_s = math.fsum(finished[0][:-1]) - math.fsum(finished[1])
            assert with_delay.added_delay_s == pytest.approx(full.e2e_s + others_s, rel=1e-9, abs=1e-9)
            assert with_delay.value("blend:0.25") == pytest.approx(full.e2e_s + 0.25 * others_s, rel=1e-9, abs=1e-9)
            waits = 0.25 * others_s + 2.0 * full.ttft_s
            assert with_delay.value("blend:0.25:2") == pytest.approx(full.e2e_s + waits, rel=1e-9, abs=1e-9)
            assert with_delay.value("blend:0") == with_delay.value("e2e_s") == full.e2e_s
            assert with_delay.value("blend:1") == with_delay.value("added_delay_s") == with_delay.added_delay_s
            assert full.value("blend:0.5") == full.value("added_delay_s") == math.inf, "it was not computed"


def test_a_newcomer_that_waits_for_nobody_adds_no_delay_but_its_own():
    config = EngineConfig()
    alone = Predictor(config, CONSTANT).predict(empty_status(5.0, config), Request(0, 5.0, 10, 7), "added_delay_s")
    assert (alone.ttft_s, alone.e2e_s, alone.tpot_s, alone.added_delay_s) == (1.0, 7.0, 1.0, 7.0)


def test_times_count_from_the_arrival_also_when_the_dispatch_comes_later():
    config = EngineConfig()
    late = Predictor(config, CONSTANT).predict(
        empty_status(5.0, config), Request(0, 2.5, 10, 3), "added_delay_s", now_s=6.0
    )
    assert (late.ttft_s, late.e2e_s, late.tpot_s, late.added_delay_s) == (4.5, 6.5, 1.0, 6.5)


def test_predicting_changes_neither_the_status_nor_the_next_prediction():
    trace, config, cost = random_workload(3, "v1_async")
    engine = Engine(trace, config, cost, predicted=trace["output_tokens"])
    engine.deliver_until(np.inf)
    engine.advance(trace["arrived_s"].max())
    status = engine.status(trace["arrived_s"].max())
    before = status.to_json()
    predictor, request = Predictor(config, cost), Request(0, 0.0, 5, 6)
    answers = [predictor.predict(status, request, metric) for metric in (None, "ttft_s", "added_delay_s", None)]
    predictor.predict(empty_status(0.0, config), request)
    answers.append(predictor.predict(status, request))
    assert answers[0] == answers[3] == answers[4]
    assert status.to_json() == before


@pytest.mark.parametrize("extension", [1, 10, 25])
def test_a_request_past_its_prediction_ends_the_extension_later(extension):
    config = EngineConfig(max_num_seqs=1)
    engine = Engine(frame([0.0], 4, 500), config, CONSTANT, predicted=[8])
    engine.deliver_until(0.0)
    predictor = Predictor(config, CONSTANT, extension_tokens=extension)
    for generated in range(1, 40):
        engine.advance(float(generated))
        status = engine.status(float(generated))
        assert status.rows["generated"][0] == generated
        left = 8 - generated if generated < 8 else extension
        waits_s = predictor.predict(status, Request(1, float(generated), 4, 1)).ttft_s - 1.0
        assert waits_s == left, generated


def test_the_extension_rule_is_the_papers_ten_tokens_unless_set():
    assert Predictor(EngineConfig(), CONSTANT).extension_tokens == 10
    for wrong in (0, -1, 2.5, True, "10"):
        with pytest.raises(InputError, match="extension_tokens"):
            Predictor(EngineConfig(), CONSTANT, extension_tokens=wrong)


def test_no_assumed_length_goes_beyond_what_the_engine_can_hold():
    config = EngineConfig(max_num_seqs=1, max_model_len=32)
    engine = Engine(frame([0.0], 4, 28), config, CONSTANT, predicted=[2**31 - 1])
    engine.deliver_until(0.0)
    engine.advance(3.0)
    assert Predictor(config, CONSTANT).predict(engine.status(3.0), Request(1, 3.0, 4, 1)).ttft_s == 25 + 1
    engine.state.requests["predicted"] = 1
    engine.advance(27.0)
    assert Predictor(config, CONSTANT).predict(engine.status(27.0), Request(1, 27.0, 4, 1)).ttft_s == 1 + 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_can_never_run_does_not_fit_and_says_why(kind):
    base = flags_of(kind, 64) | {"max_num_seqs": 2, "block_size": 4, "watermark": 0.1}
    long = EngineConfig(**base, max_model_len=64, num_gpu_blocks=200)
    small = EngineConfig(**base, max_model_len=64, num_gpu_blocks=10)
    for config, limit, why in ((long, 64, "max_model_len=64"), (small, 37, "9 KV blocks")):
        predictor = Predictor(config, CONSTANT)
        status = empty_status(0.0, config)
        for metric in (None, *METRICS):
            assert predictor.predict(status, Request(0, 0.0, limit - 3, 3), metric).fits
            too_much = predictor.predict(status, Request(0, 0.0, limit - 3, 4), metric)
            assert not too_much.fits and why in too_much.reason
            assert too_much.e2e_s is too_much.ttft_s is too_much.tpot_s is too_much.added_delay_s is None
        assert not predictor.predict(status, Request(0, 0.0, 2**40, 4)).fits
        assert not predictor.predict(status, Request(0, 0.0, 4, 2**40)).fits


def test_a_dispatch_that_can_never_run_delays_nobody():
    config = EngineConfig(max_model_len=64)
    predictor, status, request = Predictor(config, CONSTANT), empty_status(0.0, config), Request(0, 1.0, 8, 4)
    assert predictor.predict(status, request, dispatched=[(0.5, 5000, 10)]) == predictor.predict(status, request)


def test_a_dispatch_of_unknown_length_is_extended_like_any_other():
    config = EngineConfig(max_num_seqs=1)
    predictor, status = Predictor(config, CONSTANT), empty_status(0.0, config)
    for dispatch in ((0.0, 8, 0), [0.0, 8, 0]):
        assert predictor.predict(status, Request(0, 0.0, 8, 4), dispatched=[dispatch]).ttft_s == 10 + 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"metric": "latency"},
        {"now_s": math.nan},
        {"now_s": math.inf},
        {"dispatched": [(math.nan, 5, 5)]},
        {"dispatched": [(0.0, 0, 5)]},
        {"dispatched": [(0.0, 2**31, 5)]},
        {"dispatched": [(0.0, 5, -1)]},
    ],
)
def test_wrong_arguments_are_one_error(wrong):
    config = EngineConfig()
    with pytest.raises(InputError):
        Predictor(config, CONSTANT).predict(empty_status(0.0, config), Request(0, 0.0, 8, 4), **wrong)


def test_a_request_without_a_predicted_length_is_refused():
    config = EngineConfig()
    with pytest.raises(InputError, match=r"request 7 has no predicted length.*length\.attach"):
        Predictor(config, CONSTANT).predict(empty_status(0.0, config), Request(7, 0.0, 8))


def test_more_requests_than_the_scratch_state_first_held_are_predicted():
    trace = frame(np.zeros(1200), 5, 3)
    config = EngineConfig(max_num_seqs=4)
    engine = Engine(trace, config, CONSTANT, predicted=trace["output_tokens"])
    engine.deliver_until(0.0)
    predicted = Predictor(config, CONSTANT).predict(engine.status(0.0), Request(1200, 0.0, 5, 3))
    assert predicted.e2e_s == outcome_of_last(cut(trace, 0.0), config, CONSTANT)[1]
