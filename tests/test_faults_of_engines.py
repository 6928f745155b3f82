"""What engines do to a router: die, hang, break off, fail; every request still has one outcome, nothing leaks."""

import asyncio
import json
import math
import re
from dataclasses import replace

import pytest
from scripted_engine import QUICK, ScriptedEngine, scripted_engines
from test_faults import dispatched, idle, one_row_each
from test_router import ask, healthz, outcomes, routed, run

from astrolabe_lab.serve.breaker import Breaker, Health
from astrolabe_lab.serve.instance import Instance
from astrolabe_lab.serve.limits import Limits
from astrolabe_lab.sim.config import EngineConfig

IDLE_METRICS = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"


def test_an_engine_killed_while_idle_costs_nobody_an_answer(tmp_path):
    async def story():
        async with scripted_engines(2) as engines, routed(engines, tmp_path / "j") as (_, session, url):
            assert (await ask(session, url))[0] == 200
            engines[0].die()
            answers = await asyncio.gather(*(ask(session, url) for _ in range(20)))
            assert {(status, headers["X-Astrolabe-Instance"]) for status, _, headers in answers} == {(200, "1")}

    run(story())
    assert {row["status"] for row in one_row_each(tmp_path / "j")} == {"ok"}


def test_an_engine_killed_while_streaming_fails_its_requests_and_no_others(tmp_path):
    async def story():
        async with (
            scripted_engines(2) as engines,
            routed(engines, tmp_path / "j") as (router, session, url),
        ):
            for engine in engines:
                engine.hold_at = 1
                engine.going.clear()
            asking = [asyncio.create_task(ask(session, url, max_tokens=40)) for _ in range(10)]
            while sum(e.streamed > 0 for i in router.instances for e in i.ledger.entries.values()) < 10:
                await asyncio.sleep(0.01)
            engines[0].die()
            engines[1].going.set()
            answers = await asyncio.gather(*asking)
            for status, body, headers in answers:
                assert status == 200
                told = b"ended before its answer did" in body
                assert told == (headers["X-Astrolabe-Instance"] == "0")
            await idle(router)
            assert not router.instances[0].available(router.now_s())

    run(story())
    rows = one_row_each(tmp_path / "j")
    assert sorted(row["status"] for row in rows) == ["failed"] * 5 + ["ok"] * 5
    assert all(0 < row["output_tokens"] < 40 for row in rows if row["status"] == "failed")


def test_an_engine_killed_before_the_first_byte_hands_its_requests_on(tmp_path):
    async def story():
        patient = Limits(probe_s=0.05, drain_s=1.0)
        async with (
            scripted_engines(2) as engines,
            routed(engines, tmp_path / "j", limits=patient) as (
                router,
                session,
                url,
            ),
        ):
            engines[0].script = "silent"
            asking = [asyncio.create_task(ask(session, url)) for _ in range(10)]
            while engines[0].running < 5:
                await asyncio.sleep(0.01)
            engines[0].die()
            answers = await asyncio.gather(*asking)
            assert {(status, headers["X-Astrolabe-Instance"]) for status, _, headers in answers} == {(200, "1")}
            await idle(router)

    run(story())
    assert [row["status"] for row in one_row_each(tmp_path / "j")] == ["ok"] * 10
    assert len(outcomes(tmp_path / "j")["retried"]) == 5


@pytest.mark.parametrize("script", ["silent", "head", "error", "http:503", "refuse"])
def test_an_engine_that_never_answers_is_passed_over_then_left_alone(tmp_path, script):
    async def story():
        limits = replace(QUICK, first_byte_s=1.0)
        async with scripted_engines(2) as engines, routed(engines, tmp_path / "j", limits=limits) as (
            router, session, url,
        ):  # fmt: skip
            engines[0].script = script
            router.instances[0].breaker.cool_s = math.inf
            for _ in range(6):
                status, body, headers = await ask(session, url)
                assert (status, headers["X-Astrolabe-Instance"]) == (200, "1"), body
            assert router.instances[0].breaker.opened_s is not None
            assert len(engines[0].seen) == Breaker.failures
            await idle(router, engines[1:])

    run(story())
    assert [row["status"] for row in one_row_each(tmp_path / "j")] == ["ok"] * 6


@pytest.mark.parametrize("script", ["break", "cut", "late-error"])
def test_an_engine_whose_answers_always_break_off_is_left_alone_too(tmp_path, script):
    async def story():
        async with scripted_engines(2, token_s=0.01) as engines, routed(engines, tmp_path / "j") as (
            router, session, url,
        ):  # fmt: skip
            engines[0].script = script
            router.instances[0].breaker.cool_s = math.inf
            for _ in range(12):
                await ask(session, url)
            assert len(engines[0].seen) == Breaker.failures
            await idle(router, engines)

    run(story())
    rows = one_row_each(tmp_path / "j")
    assert sorted(row["status"] for row in rows) == ["failed"] * 3 + ["ok"] * 9


@pytest.mark.parametrize(("whole_answer_s", "status", "code"), [(5.0, "ok", 200), (0.3, "failed", 504)])
def test_an_answer_that_is_not_streamed_may_take_longer_than_a_first_byte_and_no_engine_is_blamed(
    tmp_path, whole_answer_s, status, code
):
    async def story():
        limits = replace(QUICK, first_byte_s=0.2, whole_answer_s=whole_answer_s)
        async with (
            scripted_engines(2, first_s=0.6) as engines,
            routed(engines, tmp_path / "j", limits=limits) as (router, session, url),
        ):
            answered, body, _ = await ask(session, url, stream=False)
            assert answered == code, body
            assert (b"was not whole after 0.3 s" in body) == (code == 504)
            assert [i.breaker.in_a_row for i in router.instances] == [0, 0]
            assert sum(len(engine.seen) for engine in engines) == 1
            await idle(router)

    run(story())
    assert [row["status"] for row in one_row_each(tmp_path / "j")] == [status]


def test_an_engine_s_own_error_is_passed_on_with_its_status(tmp_path):
    async def story():
        async with scripted_engines(1) as engines, routed(engines, tmp_path / "j") as (_, session, url):
            engines[0].script = "http:501"
            status, body, _ = await ask(session, url, stream=False)
            assert status == 501
            assert json.loads(body)["error"]["type"] == "told"

    run(story())
    assert [row["status"] for row in one_row_each(tmp_path / "j")] == ["failed"]


def test_a_request_that_kills_engines_kills_two_at_most_and_its_client_is_told(tmp_path):
    """vLLM on CPU ends when a request has a ``seed``: the request must not go the round of the cluster."""

    async def story():
        async with scripted_engines(4) as engines, routed(engines, tmp_path / "j") as (
            router, session, url,
        ):  # fmt: skip
            for engine in engines:
                engine.script = "mortal"
            status, body, _ = await ask(session, url, seed=1)
            error = json.loads(body)["error"]
            assert (status, error["code"]) == (502, "engines_failed")
            assert "2 engines failed while they had this request" in error["message"]
            assert sum(engine._runner is None for engine in engines) == 2
            answers = await asyncio.gather(*(ask(session, url) for _ in range(10)))
            assert {status for status, _, _ in answers} == {200}
            alive = {str(j) for j, engine in enumerate(engines) if engine._runner is not None}
            assert {headers["X-Astrolabe-Instance"] for _, _, headers in answers} == alive
            await idle(router)

    run(story())
    assert sorted(row["status"] for row in one_row_each(tmp_path / "j")) == ["failed"] + ["ok"] * 10


def test_an_end_that_comes_twice_is_one_outcome(tmp_path):
    async def story():
        async with scripted_engines(1) as engines, routed(engines, tmp_path / "j") as (
            router, session, url,
        ):  # fmt: skip
            engines[0].script = "twice"
            status, body, _ = await ask(session, url)
            assert status == 200 and body.count(b"[DONE]") == 2  # bytes pass unchanged
            await idle(router, engines)
            assert not router.instances[0].settle(1)  # nothing is struck twice

    run(story())
    (row,) = one_row_each(tmp_path / "j")
    assert (row["status"], row["finish_reason"]) == ("ok", "length")


def test_health_goes_and_comes_with_hysteresis_and_a_draining_engine_finishes_what_it_has(tmp_path, caplog):
    async def story():
        async with (
            scripted_engines(2) as engines,
            routed(engines, tmp_path / "j", api_key="k") as (router, session, url),
        ):
            session.headers["Authorization"] = "Bearer k"
            engines[0].healthy = False
            while router.instances[0].health.healthy:
                await asyncio.sleep(0.01)
            assert (await ask(session, url))[2]["X-Astrolabe-Instance"] == "1"
            engines[0].healthy = True
            while not router.instances[0].health.healthy:
                await asyncio.sleep(0.01)
            for engine in engines:
                engine.going.clear()
            under_way = [asyncio.create_task(ask(session, url, max_tokens=20)) for _ in range(4)]
            await dispatched(router, 4)
            engines[0].going.set()
            async with session.post(url + "/instances/1", json={"draining": True}) as answer:
                assert answer.status == 200 and (await answer.json())["draining"]
            later = [await ask(session, url) for _ in range(4)]
            assert {headers["X-Astrolabe-Instance"] for _, _, headers in later} == {"0"}
            engines[1].going.set()
            before = await asyncio.gather(*under_way)
            assert {headers["X-Astrolabe-Instance"] for _, _, headers in before} == {"0", "1"}
            assert {status for status, _, _ in before} == {200}
            async with session.get(url + "/instances") as answer:
                seen = (await answer.json())["instances"]
            assert [each["available"] for each in seen] == [True, False]
            for path, body, status in (("/instances/2", {"draining": True}, 404), ("/instances/0", {"off": 1}, 400)):
                async with session.post(url + path, json=body) as answer:
                    assert answer.status == status
            async with session.get(url + "/instances", headers={"Authorization": "Bearer no"}) as answer:
                assert answer.status == 401

    run(story())
    gone, back = caplog.messages
    assert re.fullmatch(r"engine 0 at \S+ does not answer, .*", gone) and re.fullmatch(
        r"engine 0 at \S+ answers again", back
    )
    assert {row["status"] for row in one_row_each(tmp_path / "j")} == {"ok"}


def test_health_changes_after_several_probes_and_the_breaker_lets_one_trial_through():
    health = Health(down_after=3, up_after=2)
    seen = []
    for ok in (False, False, True, False, False, False, True, False, True, True):
        health.probed(ok)
        seen.append(health.healthy)
    assert seen == [True] * 5 + [False] * 4 + [True]
    breaker = Breaker(failures=2, cool_s=5.0)
    breaker.failed(0.0)
    assert breaker.allows(0.0)
    breaker.failed(1.0)
    assert not breaker.allows(5.9) and breaker.allows(6.0)
    breaker.sent(6.0)
    assert not breaker.allows(6.1)  # while the trial is under way
    breaker.answers()
    assert breaker.allows(6.2)  # its first byte has come
    breaker.failed(6.3)
    assert not breaker.allows(7.0) and breaker.allows(11.3)
    breaker.sent(11.3)
    assert breaker.allows(16.3)  # a trial that never ended frees the next
    breaker.succeeded()
    breaker.failed(17.0)
    assert breaker.allows(17.0)


def test_an_instance_that_failed_is_tried_again_only_once_a_probe_has_found_it_well():
    instance = Instance(0, "http://x", EngineConfig(), breaker=Breaker(failures=1, cool_s=5.0))
    instance.health.probed(False)
    assert instance.available(0.0)  # one probe in vain is no verdict
    instance.breaker.failed(0.0)
    assert not instance.available(6.0)  # cooled, yet the last probe did not find it
    instance.health.probed(True)
    assert not instance.available(4.0) and instance.available(6.0)


def test_metrics_that_are_cut_off_are_a_fault_of_the_engine_s_and_the_router_asks_again(tmp_path):
    async def story():
        limits = replace(QUICK, scrape_s=0.02)
        async with scripted_engines(1) as engines, routed(engines, tmp_path / "j", limits=limits) as (router, _, _):
            engines[0].metrics = "vllm:num_requests_running"
            while router.instances[0].gauge_faults < 3:
                await asyncio.sleep(0.01)
            engines[0].metrics = IDLE_METRICS
            while router.instances[0].gauges.taken_s < 0:
                await asyncio.sleep(0.01)

    run(story())


def test_a_request_that_ends_while_the_engine_is_asked_is_not_taken_for_another_client_s(tmp_path):
    async def story():
        limits = replace(QUICK, scrape_s=0.02)
        async with (
            scripted_engines(1) as engines,
            routed(engines, tmp_path / "j", limits=limits) as (router, session, url),
        ):
            (engine,), (instance,) = engines, router.instances
            engine.going.clear()
            asking = asyncio.create_task(ask(session, url))
            await dispatched(router, 1)
            engine.metrics = IDLE_METRICS.replace("running 0", "running 1")  # which is ours
            while instance.gauges.running != 1:
                await asyncio.sleep(0.01)
            engine.telling.clear()
            asked_s = instance.gauges.taken_s
            while instance.coming.taken_s <= asked_s:  # the next look is under way
                await asyncio.sleep(0.01)
            engine.going.set()
            assert (await asking)[0] == 200
            before = instance.gauges
            engine.telling.set()
            while instance.gauges is before:
                await asyncio.sleep(0.001)
            assert instance.gauges.running == 1 and instance.gauges.ended_since == 1
            assert len(instance.ledger_status(router.now_s()).rows) == 0

    run(story())


def test_all_engines_down_then_back_loses_nobody_twice(tmp_path):
    async def story():
        async with scripted_engines(2, token_s=0.01) as engines, routed(engines, tmp_path / "j") as (
            router, session, url,
        ):  # fmt: skip
            for instance in router.instances:
                instance.breaker.cool_s = 0.2
            for engine in engines:
                engine.die()
            told = await asyncio.gather(*(ask(session, url) for _ in range(10)))
            assert {status for status, _, _ in told} <= {502, 503}
            for engine in engines:
                await engine.start()
            await healthz(session, url, 200)
            while (await ask(session, url))[0] != 200:
                await asyncio.sleep(0.05)
            answers = await asyncio.gather(*(ask(session, url) for _ in range(10)))
            assert {status for status, _, _ in answers} == {200}
            await idle(router, engines)

    run(story())
    one_row_each(tmp_path / "j")


def test_scripted_engines_can_be_started_again():
    async def story():
        engine = await ScriptedEngine().start()
        before = engine.url
        engine.die()
        await engine.start()
        assert engine.url == before
        await engine.stop()

    run(story())
