"""What goes wrong around a router of pools: one row a request, no blocks left behind, whatever fails."""

import asyncio
import json
import random
from dataclasses import replace

import aiohttp
import pytest
from routed_pools import MODEL, ask, routed, run, settled
from scripted_engine import QUICK
from scripted_pools import scripted_pools

from astrolabe_lab.disagg.policies import LeastLoadedPair
from astrolabe_lab.serve import journal
from astrolabe_lab.serve.pools.records import rows


def test_a_prefill_engine_that_fails_is_passed_over_before_the_client_has_seen_anything(tmp_path):
    limits = replace(QUICK, first_byte_s=1.0)

    async def story():
        async with (
            scripted_pools(2, 1) as (prefill, decode),
            routed((prefill, decode), tmp_path / "j", limits=limits) as (router, session, url),
        ):
            for script in ("http:500", "refuse", "silent"):
                prefill[0].script, router.policy.count = script, 0
                status, _, headers = await ask(session, url)
                assert (status, headers["X-Astrolabe-Prefill-Instance"]) == (200, "1"), script
                router.instances[0].breaker.succeeded()
            assert router.counters.retries == 3

    run(story())
    frame = rows(tmp_path / "j")
    assert len(frame) == 3 and (frame["status"] == "ok").all() and (frame["attempts"] == 2).all()


@pytest.mark.parametrize("tries", [1, 2, 3, 4])
@pytest.mark.parametrize("script", ["ok", "http:500"])
def test_one_bound_holds_for_the_tries_of_both_steps(tmp_path, tries, script):
    limits = replace(QUICK, tries=tries, failures=9, probe_s=60.0)

    async def story():
        async with (
            scripted_pools(5, 5) as (prefill, decode),
            routed((prefill, decode), tmp_path / "j", limits=limits) as (router, session, url),
        ):
            while any(instance.gauges.taken_s < 0 for instance in router.instances):  # past the first probes
                await asyncio.sleep(0.01)
            for engine in prefill:
                await engine.stop()
            for engine in decode:
                engine.script = script
            status, body, _ = await ask(session, url)
            alone = tries > 1  # the last try of several asks decode alone
            assert status == (502 if not alone else 200 if script == "ok" else 500), body
            assert sum(engine.alone for engine in decode) == sum(len(engine.seen) for engine in decode) == alone
            assert router.counters.retries == tries - 1

    run(story())
    assert list(rows(tmp_path / "j")["attempts"]) == [tries]
    attempts = [entry["attempt"] for entry in journal.read(tmp_path / "j") if entry["event"] == "pair"]
    assert attempts == list(range(tries))


def test_a_request_that_failed_at_an_engine_of_each_pool_is_not_tried_at_a_third(tmp_path):
    async def story():
        async with scripted_pools(2, 2) as (prefill, decode), routed((prefill, decode), tmp_path / "j") as found:
            _, session, url = found
            prefill[0].script = "refuse"
            for engine in decode:
                engine.script = "refuse"
            status, body, _ = await ask(session, url)
            assert status == 502 and b"2 engines failed while they had this request" in body
            assert [len(engine.seen) for engine in prefill] == [1, 1]
            assert sum(len(engine.pulled) for engine in decode) == 1

    run(story())
    assert list(rows(tmp_path / "j")["attempts"]) == [2]


def test_blocks_lost_with_their_prefill_engine_are_computed_again_where_it_decodes(tmp_path):
    async def story():
        async with scripted_pools(1, 1) as (prefill, decode), routed((prefill, decode), tmp_path / "j") as found:
            _, session, url = found
            prefill[0].script = "die_after"
            assert (await ask(session, url))[0] == 200
            assert len(decode[0].recomputed) == 1

    run(story())
    assert list(rows(tmp_path / "j")["status"]) == ["ok"]


def test_without_any_prefill_engine_decode_engines_compute_prompts_and_prefill_comes_back(tmp_path):
    async def story():
        async with scripted_pools(1, 1) as (prefill, decode), routed((prefill, decode), tmp_path / "j") as found:
            router, session, url = found
            await prefill[0].stop()
            for n in (1, 2, 3, 4, 5):  # at first by trying, then as it is known to be down
                assert (await ask(session, url))[0] == 200
                assert decode[0].alone == n == router.counters.recomputed
            while router.instances[0].available(router.now_s()):
                await asyncio.sleep(0.02)
            assert (await ask(session, url))[2]["X-Astrolabe-Prefill-Instance"] == "-1"
            await prefill[0].start()
            router.instances[0].breaker.cool_s = 0.1
            while not router.instances[0].available(router.now_s()):
                await asyncio.sleep(0.02)
            assert (await ask(session, url))[2]["X-Astrolabe-Prefill-Instance"] == "0"

    run(story())
    frame = rows(tmp_path / "j")
    assert (frame["status"] == "ok").all() and list(frame["prefill_instance"]) == [-1] * 6 + [0]


def test_a_decode_engine_that_dies_while_pulling_is_passed_over_and_the_blocks_are_pulled_by_another(tmp_path):
    async def story():
        async with scripted_pools(1, 3) as (prefill, decode), routed((prefill, decode), tmp_path / "j") as found:
            router, session, url = found
            decode[0].script = "die_pulling"
            status, _, headers = await ask(session, url)
            assert status == 200 and headers["X-Astrolabe-Decode-Instance"] != "0"
            await settled(router, prefill)
            assert not prefill[0].held
            assert sum(len(engine.pulled) for engine in decode) == 1

    run(story())
    assert list(rows(tmp_path / "j")["status"]) == ["ok"]


def test_when_every_decode_engine_fails_the_client_is_told_and_the_blocks_are_given_back(tmp_path):
    async def story():
        async with scripted_pools(1, 2) as (prefill, decode), routed((prefill, decode), tmp_path / "j") as found:
            router, session, url = found
            for engine in decode:
                engine.script = "http:500"
            status, body, _ = await ask(session, url)
            assert status == 500 and json.loads(body)["error"]["type"] == "told"
            await settled(router, prefill)
            assert len(router.pairs.rows) == 0 and not any(len(i.ledger) for i in router.instances)

    run(story())
    assert list(rows(tmp_path / "j")["status"]) == ["failed"]


def test_a_client_that_leaves_between_the_steps_leaves_no_blocks_behind(tmp_path):
    async def story():
        async with scripted_pools(1, 1) as (prefill, decode), routed((prefill, decode), tmp_path / "j") as found:
            router, session, url = found
            gate = asyncio.Event()
            choose, left = router._dispatch.__class__.__call__, []

            async def held_up(self, *arguments):
                left.append(True)
                await gate.wait()
                return await choose(self, *arguments)

            router._dispatch.__class__.__call__ = held_up
            try:
                asking = asyncio.create_task(ask(session, url))
                while not left:
                    await asyncio.sleep(0.01)
                assert len(prefill[0].held) == 1
                asking.cancel()
                await settled(router, prefill)
            finally:
                router._dispatch.__class__.__call__ = choose
            assert not prefill[0].held and len(router.pairs.rows) == 0

    run(story())
    assert list(rows(tmp_path / "j")["status"]) == ["aborted"]


async def left_during_prefill(router, session, url, prefill):
    """A client has left whose prompt is computed, and the answer is on its way."""
    prefill.underway.clear()
    asking = asyncio.create_task(ask(session, url))
    while not prefill.seen:
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.sleep(0.1)
    assert router.in_flight == len(router.instances[0].ledger) == 1  # the engine has it still, and the bounds count it


@pytest.mark.parametrize(
    ("script", "down", "released", "left_to_expire"),
    [("ok", False, 1, 0), ("ok", True, 0, 1), ("http:400", False, 0, 0), ("http:500", False, 0, 0)],
)
def test_a_client_that_leaves_during_prefill_leaves_no_blocks_uncounted(
    tmp_path, script, down, released, left_to_expire
):
    async def story():
        async with scripted_pools(1, 1) as (prefill, decode), routed((prefill, decode), tmp_path / "j") as found:
            router, session, url = found
            prefill[0].script = script
            await left_during_prefill(router, session, url, prefill[0])
            if down:
                await decode[0].stop()
            prefill[0].underway.set()
            await settled(router, [] if down else prefill)
            assert (router.counters.released, router.counters.left_to_expire) == (released, left_to_expire)
            assert router.in_flight == len(router.pairs.rows) == sum(len(i.ledger) for i in router.instances) == 0
            assert not prefill[0].aborted and len(decode[0].let_go) == released
            assert down or not prefill[0].held

    run(story())
    (row,) = [entry for entry in journal.read(tmp_path / "j") if entry["event"] == "outcome"]
    assert row["status"] == "aborted"
    assert len(rows(tmp_path / "j")) == 1


def test_a_router_that_is_ended_gives_blocks_back_first(tmp_path):
    async def story():
        async with scripted_pools(1, 1) as (prefill, decode):
            async with routed((prefill, decode), tmp_path / "j") as (router, session, url):
                await left_during_prefill(router, session, url, prefill[0])
                asyncio.get_running_loop().call_later(0.3, prefill[0].underway.set)
            assert router.counters.released == 1 and not prefill[0].held

    run(story())


def test_a_client_that_leaves_in_mid_stream_ends_the_request_at_decode(tmp_path):
    async def story():
        pools = scripted_pools(1, 1, token_s=0.05)
        async with pools as (prefill, decode), routed((prefill, decode), tmp_path / "j") as (router, session, url):
            body = {"model": MODEL, "prompt": "x", "max_tokens": 500, "stream": True}
            answer = await session.post(url + "/v1/completions", json=body)
            await answer.content.readany()
            answer.close()
            await settled(router, prefill)
            assert decode[0].aborted == 1 and len(router.pairs.rows) == 0

    run(story())
    assert list(rows(tmp_path / "j")["status"]) == ["aborted"]


def test_chaos_loses_nothing_and_leaks_nothing(tmp_path):
    dice = random.Random(5)
    n = 160

    async def one(session, url):
        with_patience = aiohttp.ClientTimeout(total=dice.choice([0.02, 0.1, 5.0, 5.0, 5.0]))
        body = {"model": MODEL, "prompt": "x" * dice.randint(1, 50), "max_tokens": dice.randint(1, 9), "stream": True}
        try:
            async with session.post(url + "/v1/completions", json=body, timeout=with_patience) as answer:
                await answer.read()
        except (aiohttp.ClientError, TimeoutError):
            pass

    async def troubles(prefill, decode):
        scripts = ["ok", "ok", "ok", "http:500", "refuse", "break"]
        while True:
            await asyncio.sleep(0.05)
            dice.choice(prefill).script = dice.choice([*scripts, "die_after"])
            dice.choice(decode).script = dice.choice([*scripts, "die_pulling"])

    async def story():
        pools = scripted_pools(2, 3, token_s=0.004)
        async with (
            pools as (prefill, decode),
            routed((prefill, decode), tmp_path / "j", LeastLoadedPair()) as (router, session, url),
        ):
            trouble = asyncio.create_task(troubles(prefill, decode))
            gate = asyncio.Semaphore(12)

            async def gated():
                async with gate:
                    await one(session, url)

            await asyncio.gather(*(gated() for _ in range(n)))
            trouble.cancel()
            await settled(router, [])
            assert router.in_flight == 0 and len(router.pairs.rows) == 0
            assert [len(i.ledger) for i in router.instances] == [0] * 5
            return router.counters

    counters = run(story())
    frame = rows(tmp_path / "j")
    assert len(frame) == frame["rid"].nunique()
    assert not (frame["status"] == "unfinished").any()
    assert set(frame["status"]) >= {"ok", "aborted"}
    assert sum(counters.outcomes.values()) - counters.outcomes["retried"] == len(frame)


def test_a_last_try_that_computes_the_prompt_itself_gives_the_blocks_back(tmp_path):
    async def story():
        async with scripted_pools(1, 2) as (prefill, decode), routed((prefill, decode), tmp_path / "j") as found:
            router, session, url = found
            decode[0].script = "die_pulling"
            assert (await ask(session, url))[0] == 200
            assert decode[1].alone == 1 and router.counters.recomputed == 1
            await settled(router, prefill)
            assert not prefill[0].held and router.counters.released == 1
            async with session.get(url + "/metrics") as answer:
                text = await answer.text()
            assert "astrolabe_recomputed_total 1.0" in text and "astrolabe_released_total 1.0" in text

    run(story())
    assert list(rows(tmp_path / "j")["status"]) == ["ok"]
