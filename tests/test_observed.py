"""What a router's journal tells of predicted and observed lengths."""

import asyncio

import numpy as np
import pytest
import routed_pools
import test_router
from scripted_engine import scripted_engines
from scripted_pools import scripted_pools

from astrolabe_lab.arrivals import with_arrivals
from astrolabe_lab.cost import StepCost
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.length import attach
from astrolabe_lab.length.observed import read_observed, write_journal
from astrolabe_lab.predictor import Predictor
from astrolabe_lab.serve import probes
from astrolabe_lab.serve.journal import Journal
from astrolabe_lab.sim.cluster import simulate
from astrolabe_lab.sim.config import EngineConfig


def decided(rid, arrived_s, **more):
    decision = {"event": "decision", "rid": rid, "arrived_s": arrived_s, "time_s": arrived_s}
    return decision | {"predicted_tokens": 100} | more


def ended(rid, time_s, tokens=50, **more):
    outcome = {"event": "outcome", "rid": rid, "time_s": time_s, "output_tokens": tokens}
    return outcome | {"status": "ok", "finish_reason": "stop"} | more


@pytest.fixture
def kept(tmp_path):
    """Writes entries as a router's journal does and reads what was observed."""

    def keep(*entries, torn="", **options):
        path = tmp_path / "router.jsonl"
        journal = Journal(path)
        for entry in entries:
            journal.write(entry)
        journal.close()
        with path.open("a") as file:
            file.write(torn)
        return read_observed(path, **options)

    return keep


def test_a_decision_and_its_outcome_make_a_row(kept):
    frame = kept(
        decided(7, 1.0, prompt="hi", model="m", prompt_tokens=3, predicted_tokens_from="tagger"), ended(7, 2.5, 42)
    )
    assert frame.to_dict("records") == [
        {
            "rid": 7, "arrived_s": 1.0, "finished_s": 2.5, "prompt_tokens": 3, "predicted_tokens": 100,
            "predicted_from": "tagger", "output_tokens": 42, "censored": False, "model": "m", "prompt": "hi",
        }
    ]  # fmt: skip
    assert not any(frame.attrs.values())


def test_rows_come_as_they_arrived_not_as_they_ended(kept):
    frame = kept(decided(1, 1.0), decided(2, 2.0), ended(2, 3.0), ended(1, 4.0))
    assert frame["rid"].tolist() == [1, 2]


def test_rows_after_one_in_flight_wait_for_it(kept):
    frame = kept(decided(1, 1.0), decided(2, 2.0), decided(3, 3.0), ended(1, 4.0), ended(3, 5.0))
    assert frame["rid"].tolist() == [1] and frame.attrs["in_flight"] == 2


def test_in_flight_at_its_end_a_journal_is_not_biased_to_short_answers():
    # A window of answers that take as long as they are long: those that have ended are the short ones.
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 1000, 3000)
    ends = np.arange(3000) * 1.0 + lengths
    assert lengths[ends < 3000][-500:].mean() < lengths.mean() * 0.8
    first_in_flight = np.flatnonzero(ends >= 3000)[0]
    assert lengths[:first_in_flight][-500:].mean() == pytest.approx(lengths.mean(), rel=0.1)


def test_a_request_that_never_ends_is_lost_after_a_while_and_holds_up_nobody(kept):
    entries = (decided(1, 1.0), decided(2, 2.0), ended(2, 3.0), decided(3, 700.0), ended(3, 701.0))
    frame = kept(*entries)
    assert frame["rid"].tolist() == [2, 3] and frame.attrs["lost"] == 1


def test_a_router_that_started_anew_has_lost_what_was_in_flight(kept):
    frame = kept(decided(1, 1000.0), decided(1, 2.0), ended(1, 3.0))
    assert frame["arrived_s"].tolist() == [2.0] and frame.attrs["lost"] == 1


def test_a_retry_is_one_request(kept):
    frame = kept(decided(1, 1.0, attempt=0), decided(1, 1.0, attempt=1), ended(1, 2.0))
    assert len(frame) == 1 and not any(frame.attrs.values())


def test_a_failed_dispatch_that_another_follows_is_no_end(kept):
    entries = (decided(1, 1.0, attempt=0), ended(1, 1.5, 0, status="retried"), decided(1, 1.0, attempt=1))
    frame = kept(*entries, ended(1, 2.0, 42))
    assert frame["output_tokens"].tolist() == [42] and not any(frame.attrs.values())


def test_probes_are_passed_over(kept):
    frame = kept(
        decided(1, 1.0, probe=True), {"event": "probe", "rid": 1, "time_s": 1.5}, decided(2, 2.0), ended(2, 3.0)
    )
    assert frame["rid"].tolist() == [2] and not any(frame.attrs.values())


def test_what_a_router_wrote_reads_back_retries_probes_and_all(tmp_path):
    def predictor():
        return Predictor(EngineConfig(), StepCost.parse("base_s=0.02"))

    async def story():
        async with (
            scripted_engines(2) as engines,
            test_router.routed(engines, tmp_path / "j", predictors=predictor) as (router, session, url),
        ):
            await probes.drive(router, probed)
            engines[0].script, router.policy.count = "http:500", 0
            for _ in range(3):
                assert (await test_router.ask(session, url))[0] == 200
            assert router.counters.retries

    probed = sharegpt_like.generate(2).assign(arrived_s=0.0, output_tokens=6, predicted_tokens=6, prompt_tokens=20)
    asyncio.run(asyncio.wait_for(story(), 60))
    frame = read_observed(tmp_path / "j")
    assert frame["output_tokens"].tolist() == [6, 6, 6]
    assert set(frame["predicted_from"]) == {"constant"} and set(frame["model"]) == {test_router.MODEL}
    assert not any(frame.attrs.values())


def test_what_a_router_of_pools_wrote_reads_back(tmp_path):
    async def story():
        async with (
            scripted_pools(2, 1) as (prefill, decode),
            routed_pools.routed((prefill, decode), tmp_path / "j") as (router, session, url),
        ):
            prefill[0].script = "http:500"  # round robin: one request is tried twice
            for _ in range(3):
                assert (await routed_pools.ask(session, url))[0] == 200
            assert router.counters.retries

    asyncio.run(asyncio.wait_for(story(), 60))
    frame = read_observed(tmp_path / "j")
    assert frame["output_tokens"].tolist() == [6, 6, 6] and not any(frame.attrs.values())


def test_an_answer_that_was_cut_off_is_censored(kept):
    frame = kept(
        decided(1, 1.0), ended(1, 2.0, finish_reason="length"),
        decided(2, 2.0), ended(2, 3.0, status="aborted", finish_reason=None),
        decided(3, 3.0), ended(3, 4.0),
    )  # fmt: skip
    assert frame["censored"].tolist() == [True, True, False]


def test_what_has_no_length_is_counted_and_left_out(kept):
    frame = kept(
        decided(1, 1.0), ended(1, 2.0, tokens=0, status="failed"),
        decided(2, 2.0), ended(2, 2.0, tokens=0, status="rejected"),
        decided(3, 3.0, predicted_tokens=None), ended(3, 4.0),
        decided(4, 4.0, predicted_tokens="lots"), ended(4, 5.0, tokens=float("nan")),
        ended(99, 5.0),
    )  # fmt: skip
    assert frame.empty
    assert frame.attrs == {"in_flight": 0, "lost": 0, "unanswered": 3, "unpredicted": 1}


def test_a_torn_last_line_is_left_out(kept):
    frame = kept(decided(1, 1.0), ended(1, 2.0), torn='{"version": 1, "event": "deci')
    assert frame["rid"].tolist() == [1]


def test_an_empty_journal_has_no_rows(kept):
    assert kept().empty


def test_several_journals_are_read_as_one(kept, tmp_path):
    kept(decided(1, 1.0), ended(1, 2.0))
    path = tmp_path / "router.jsonl"
    assert read_observed([path, path])["rid"].tolist() == [1, 1]


@pytest.mark.parametrize("content", ["not json\n", "[1]\n", '{"version": 9}\n'])
def test_what_is_no_journal_is_refused(tmp_path, content):
    (tmp_path / "x").write_text(content)
    with pytest.raises(InputError, match="line 1"):
        read_observed(tmp_path / "x")
    with pytest.raises(InputError, match="cannot be read"):
        read_observed(tmp_path / "absent")


def test_a_simulated_run_reads_back_as_it_went(tmp_path):
    trace = attach(with_arrivals(sharegpt_like.generate(200, seed=3), qps=4), "noisy:0.3", seed=3)
    results = simulate(trace, "astrolabe:k=2", instances=2, seed=3)
    assert set(results["status"]) == {"ok"}
    observed = read_observed(write_journal(results, tmp_path / "sim.jsonl"))
    for name in ("rid", "arrived_s", "finished_s", "predicted_tokens", "prompt"):
        assert observed[name].tolist() == results[name].tolist()
    assert observed["output_tokens"].tolist() == results["generated_tokens"].tolist()
    assert not observed["censored"].any()


def test_rejected_requests_of_a_run_hold_up_nobody(tmp_path):
    trace = sharegpt_like.generate(20, seed=3).assign(arrived_s=np.arange(20.0))
    trace.loc[3, "prompt_tokens"] = 10**6
    results = simulate(attach(trace, "oracle"), "random", instances=2, seed=3)
    assert results.loc[3, "status"] == "rejected"
    observed = read_observed(write_journal(results, tmp_path / "sim.jsonl"))
    assert len(observed) == 19 and observed.attrs["unanswered"] == 1


def test_prompts_of_any_unicode_survive_the_journal(kept, tmp_path):
    whole = "\0 and \N{GRINNING FACE} and \u2028"
    frame = kept(decided(1, 1.0, prompt="\ud83d alone, " + whole), ended(1, 2.0))
    assert frame["prompt"].tolist() == ["\ufffd alone, " + whole]
    trace = sharegpt_like.generate(1).assign(arrived_s=0.0, prompt=whole)
    results = simulate(attach(trace, "oracle"), "random", instances=1)
    assert read_observed(write_journal(results, tmp_path / "y"))["prompt"].tolist() == [whole]
