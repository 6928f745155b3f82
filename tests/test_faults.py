"""What fails that a router leans on, and its own end: every request still has one outcome and row, nothing leaks."""

import asyncio
import json
import time
from dataclasses import replace

import pytest
from scripted_engine import QUICK, scripted_engines
from test_router import ask, routed, run

from astrolabe_lab.cost import StepCost
from astrolabe_lab.predictor import Predictor
from astrolabe_lab.serve import journal
from astrolabe_lab.serve.lengths import lengths_of
from astrolabe_lab.serve.limits import Limits
from astrolabe_lab.serve.watch import Watch
from astrolabe_lab.sim.config import EngineConfig


async def dispatched(router, n):
    """Wait until n requests are at engines."""
    while sum(len(each.ledger) for each in router.instances) < n:
        await asyncio.sleep(0.01)


async def idle(router, engines=(), seconds=10.0):
    """Wait until nothing is in flight."""
    until = time.monotonic() + seconds
    while router.in_flight or any(engine.running for engine in engines):
        assert time.monotonic() < until, (router.in_flight, [engine.running for engine in engines])
        await asyncio.sleep(0.01)
    assert [(len(i.ledger), i.ledger.tokens) for i in router.instances] == [(0, 0)] * len(router.instances)
    assert not router.records._ended


def one_row_each(path):
    """The final rows of a journal, which are one a request."""
    rows = [e for e in journal.read(path) if e["event"] == "outcome" and e["status"] != "retried"]
    assert len({row["rid"] for row in rows}) == len(rows)
    decided = {e["rid"] for e in journal.read(path) if e["event"] == "decision"}
    assert decided <= {row["rid"] for row in rows}
    return rows


@pytest.mark.parametrize("fault", ["down", "slow", "lying"])
def test_a_tagger_that_fails_costs_its_deadline_at_most(tmp_path, fault):
    async def tagger(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        if fault == "slow":
            await asyncio.sleep(3600)
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 24\r\n\r\n{"predicted_tokens": -5}')
        await writer.drain()
        writer.close()

    async def story():
        server = await asyncio.start_server(tagger, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1] if fault != "down" else 9
        lengths = lengths_of(f"tagger:http://127.0.0.1:{port},constant=77,deadline_ms=100")
        async with scripted_engines(1) as engines, routed(engines, tmp_path / "j") as (
            router, session, url,
        ):  # fmt: skip
            router.lengths = lengths
            started = time.monotonic()
            for _ in range(5):
                status, _, headers = await ask(session, url, max_tokens=200)
                assert (status, headers["X-Astrolabe-Predicted-Tokens"]) == (200, "77")
            assert time.monotonic() - started < 5 * 0.1 + 10.0
            assert all(origin.startswith("constant") for origin in router.counters.lengths)
        server.close()

    run(story())


def test_a_policy_that_raises_is_a_500_with_a_row_and_the_next_request_goes_on(tmp_path):
    async def story():
        async with scripted_engines(1) as engines, routed(engines, tmp_path / "j") as (
            router, session, url,
        ):  # fmt: skip
            good, router.policy = router.policy, object()
            status, body, _ = await ask(session, url)
            assert status == 500 and "AttributeError" in json.loads(body)["error"]["message"]
            router.policy = good
            assert (await ask(session, url))[0] == 200
            await idle(router, engines)

    run(story())
    assert [row["status"] for row in one_row_each(tmp_path / "j")] == ["failed", "ok"]


def test_an_over_long_prompt_is_the_engine_s_to_refuse_and_hurts_no_prediction(tmp_path):
    config, cost = EngineConfig(max_model_len=512), StepCost.parse("base_s=0.02")

    async def story():
        async with (
            scripted_engines(2) as engines,
            routed(
                engines, tmp_path / "j", "astrolabe:k=2", config=config,
                predictors=lambda: Predictor(config, cost),
            ) as (router, session, url),
        ):  # fmt: skip
            for engine in engines:
                engine.script = "http:400"
            for _ in range(8):
                assert (await ask(session, url, prompt="long " * 5000))[0] == 400
            assert all(i.breaker.in_a_row == 0 for i in router.instances)
            engines[0].script = engines[1].script = "silent"  # it hangs there, unseen, while others are predicted
            hanging = asyncio.create_task(ask(session, url, prompt="long " * 5000))
            while not any(engine.running for engine in engines):
                await asyncio.sleep(0.01)
            engines[0].script = engines[1].script = "ok"
            status, _, headers = await ask(session, url)
            assert status == 200 and float(headers["X-Astrolabe-Predicted-E2E-S"]) > 0
            hanging.cancel()
            await idle(router, engines)

    run(story())
    assert len(one_row_each(tmp_path / "j")) == 10


def test_a_router_that_stops_under_load_finishes_what_it_has_and_the_next_goes_on_in_its_journal(tmp_path):
    async def story():
        async with scripted_engines(2, token_s=0.03) as engines:
            async with routed(engines, tmp_path / "j", limits=Limits(probe_s=0.05, drain_s=30.0)) as (
                router,
                session,
                url,
            ):
                under_way = [asyncio.create_task(ask(session, url, max_tokens=15)) for _ in range(10)]
                await dispatched(router, 10)
                stopping = asyncio.create_task(router._drain(None))
                await asyncio.sleep(0.02)
                status, _, headers = await ask(session, url)
                assert (status, headers["Retry-After"]) == (503, "1")
                assert {status for status, _, _ in await asyncio.gather(*under_way)} == {200}
                await stopping
            async with routed(engines, tmp_path / "j", limits=Limits(probe_s=0.05, drain_s=30.0)) as (
                router,
                session,
                url,
            ):
                assert (await ask(session, url))[0] == 200
                await idle(router, engines)

    run(story())
    assert sorted(row["status"] for row in one_row_each(tmp_path / "j")) == ["failed"] + ["ok"] * 11
    assert [e["event"] for e in journal.read(tmp_path / "j")].count("router") == 2


def test_a_router_of_slow_engines_waits_for_its_requests_in_their_time(tmp_path):
    async def story():
        limits = replace(QUICK, drain_s=0.3)
        async with scripted_engines(1, first_s=0.8) as engines, routed(
            engines, tmp_path / "j", limits=limits, time_scale=10.0
        ) as (router, session, url):  # fmt: skip
            asking = asyncio.create_task(ask(session, url, stream=False))
            await dispatched(router, 1)
            await router._drain(None)
            assert router.in_flight == 0 and (await asking)[0] == 200

    run(story())


def test_a_router_whose_watch_has_died_still_serves_and_closes_all_it_has(tmp_path, monkeypatch, caplog):
    async def dies(self, instance):
        raise RuntimeError("as told")

    class Lengths:
        closed = False

        async def __call__(self, asked):
            return 64, "constant"

        async def close(self):
            self.closed = True

    monkeypatch.setattr(Watch, "_gauges", dies)

    async def story():
        async with scripted_engines(1) as engines, routed(
            engines, tmp_path / "j", lengths=Lengths()
        ) as (router, session, url):  # fmt: skip
            assert (await ask(session, url))[0] == 200
        assert router.lengths.closed and router._dispatch.session.closed and router.journal._file.closed

    run(story())
    assert "without watching its engines" in caplog.text
    assert [row["status"] for row in one_row_each(tmp_path / "j")] == ["ok"]


def test_two_routers_over_one_cluster_keep_their_numbers_apart(tmp_path):
    async def story():
        async with (
            scripted_engines(2) as engines,
            routed(engines, tmp_path / "a") as (_, session, first),
            routed(engines, tmp_path / "b") as (_, _, second),
        ):
            await asyncio.gather(*(ask(session, url) for url in (first, second) for _ in range(40)))

    run(story())
    rids = [row["rid"] for name in "ab" for row in one_row_each(tmp_path / name)]
    assert len(set(rids)) == len(rids) == 80
