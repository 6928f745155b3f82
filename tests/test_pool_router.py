"""The router of pools over scripted engines: one row a request, no blocks left behind, whatever fails."""

import asyncio
import json
import random
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import numpy as np
import pandas as pd
import pytest
from scripted_pools import scripted_pools

from astrolabe_lab import InputError, length
from astrolabe_lab.arrivals import with_arrivals
from astrolabe_lab.cli import main
from astrolabe_lab.disagg import routers, simulate_pools
from astrolabe_lab.disagg.constants import PAPER
from astrolabe_lab.disagg.policies import LeastLoadedPair, RoundRobinPair
from astrolabe_lab.generators import families
from astrolabe_lab.serve import journal
from astrolabe_lab.serve.instance import Instance
from astrolabe_lab.serve.limits import Limits
from astrolabe_lab.serve.listen import listening
from astrolabe_lab.serve.pools import handoff
from astrolabe_lab.serve.pools.records import rows
from astrolabe_lab.serve.pools.replay import replay
from astrolabe_lab.serve.pools.router import PoolRouter
from astrolabe_lab.serve.prompt_tokens import ByBytes
from astrolabe_lab.sim.config import EngineConfig

MODEL = "m"
LIMITS = Limits(probe_s=0.05, first_byte_s=1.0, between_bytes_s=1.0, drain_s=1.0)


async def constant(asked):
    return asked.predicted_tokens or 64, "constant"


@asynccontextmanager
async def routed(pools, path, policy=None, limits=LIMITS, **options):
    prefill, decode = pools
    router = PoolRouter(
        [Instance(i, engine.url, EngineConfig()) for i, engine in enumerate([*prefill, *decode])],
        policy or RoundRobinPair(), "test", [MODEL], ByBytes(), constant, limits=limits,
        journal=journal.Journal(path), n_prefill=len(prefill), constants=PAPER, **options,
    )  # fmt: skip
    async with listening(router) as url, aiohttp.ClientSession() as session:
        yield router, session, url


async def ask(session, url, stream=True, **more):
    body = {"model": MODEL, "prompt": "hello there", "max_tokens": 6, "stream": stream, **more}
    async with session.post(url + "/v1/completions", json=body) as answer:
        return answer.status, await answer.read(), answer.headers


async def settled(router, prefill):
    """Wait until nothing is in flight and no block is held."""
    for _ in range(200):
        if not router.in_flight and not any(engine.held for engine in prefill) and not router._releases:
            return
        await asyncio.sleep(0.02)


def run(story):
    return asyncio.run(asyncio.wait_for(story, 60))


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_is_prefilled_on_one_engine_and_decoded_on_another(tmp_path, stream):
    async def story():
        async with scripted_pools(2, 2) as (prefill, decode), routed((prefill, decode), tmp_path / "j") as found:
            router, session, url = found
            status, body, headers = await ask(session, url, stream, min_tokens=6, stream_options={"include_usage": True}
                                              if stream else None)  # fmt: skip
            assert status == 200 and body.count(b" t") in (6, 1)
            assert headers["X-Astrolabe-Prefill-Instance"] == headers["X-Astrolabe-Decode-Instance"] == "0"
            (first,), (second,) = prefill[0].seen, decode[0].seen
            assert first["max_tokens"] == 1 and "min_tokens" not in first
            assert second["max_tokens"] == 6 and second["min_tokens"] == 6
            assert second["kv_transfer_params"]["remote_engine_id"] == prefill[0].url
            assert first["vllm_xargs"]["rid"] == second["vllm_xargs"]["rid"]
            assert len(decode[0].pulled) == 1 and not prefill[0].held
            assert len(router.pairs.rows) == 0

    run(story())
    (row,) = rows(tmp_path / "j").to_dict("records")
    assert (row["status"], row["prefill_instance"], row["decode_instance"], row["blocks"]) == ("ok", 0, 0, 3)
    assert row["generated_tokens"] == 6
    assert row["arrived_s"] <= row["prefill_finished_s"] <= row["finished_s"]


def test_a_prefill_engine_that_fails_is_passed_over_before_the_client_has_seen_anything(tmp_path):
    async def story():
        async with scripted_pools(2, 1) as (prefill, decode), routed((prefill, decode), tmp_path / "j") as found:
            router, session, url = found
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
    limits = replace(LIMITS, tries=tries, failures=9, probe_s=60.0)

    async def story():
        async with (
            scripted_pools(5, 5) as (prefill, decode),
            routed((prefill, decode), tmp_path / "j", limits=limits) as (router, session, url),
        ):
            await asyncio.sleep(0.1)  # past the first probes
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


def test_a_prompt_that_prefill_refuses_is_refused_to_the_client_and_nothing_is_decoded(tmp_path):
    async def story():
        async with scripted_pools(1, 1) as (prefill, decode), routed((prefill, decode), tmp_path / "j") as found:
            router, session, url = found
            prefill[0].script = "http:400"
            status, body, _ = await ask(session, url)
            assert status == 400 and json.loads(body)["error"]["type"] == "told"
            assert not decode[0].seen and router.instances[0].breaker.opened_s is None

    run(story())
    assert list(rows(tmp_path / "j")["status"]) == ["rejected"]


class Watching:
    """Remembers what it was shown."""

    def __init__(self):
        self.seen = []

    def choose(self, request, cluster, rng):
        self.seen.append((cluster.in_flight.copy(), cluster.prefill.copy(), cluster.decode.copy()))
        return 0, len(cluster.decode) - 1


def test_a_policy_sees_the_ledger_as_tokens_stream_and_pools_numbered_from_zero(tmp_path):
    async def story():
        pools, policy = scripted_pools(1, 2, token_s=0.02), Watching()
        async with (
            pools as (prefill, decode),
            routed((prefill, decode), tmp_path / "j", policy) as (_, session, url),
        ):
            first = asyncio.create_task(ask(session, url, max_tokens=40))
            await asyncio.sleep(0.4)
            await ask(session, url, max_tokens=2)
            await first
        return policy.seen

    empty, later = run(story())
    assert len(empty[0]) == 0
    (row,) = later[0]
    assert (row["prefill"], row["decode"]) == (0, 1)
    assert 2 < row["streamed"] < 40 and row["sent_s"] <= row["prefilled_s"] <= row["first_token_s"]
    assert later[1]["instance"].tolist() == [0] and later[2]["instance"].tolist() == [0, 1]
    assert (later[2]["capacity_tokens"] == 1055 * 16).all()


def test_warming_up_leaves_the_policy_as_it_is_and_shows_a_copy_of_it_a_request_in_flight(tmp_path):
    async def story():
        async with scripted_pools(2, 3) as (prefill, decode):
            seen = []

            class Noting(RoundRobinPair):
                def choose(self, request, cluster, rng):
                    seen.append((len(cluster.prefill), len(cluster.decode), cluster.in_flight.copy()))
                    return super().choose(request, cluster, rng)

            async with routed((prefill, decode), tmp_path / "j", Noting()) as (router, _, _):
                router.warm_up()
                assert router.policy.count == 0 and len(router.pairs.rows) == 0
        return seen

    ((n_prefill, n_decode, flying),) = run(story())
    assert (n_prefill, n_decode, len(flying)) == (2, 3, 1) and flying["streamed"] == 1


def test_nothing_is_compiled_for_a_live_request_that_warming_up_or_the_simulator_has_not_compiled(tmp_path):
    from astrolabe_lab.disagg.price import price

    async def story():
        pools = scripted_pools(1, 2, token_s=0.02)
        async with (
            pools as (prefill, decode),
            routed((prefill, decode), tmp_path / "j", routers.parse("marginal_cost")) as (router, session, url),
        ):
            router.warm_up()
            compiled = [*price.signatures]
            await asyncio.gather(*(ask(session, url) for _ in range(3)))
            return compiled, [*price.signatures]

    trace = with_arrivals(length.attach(families.generate("mixed", 5, seed=0, text=False), "oracle"), 5, "poisson", 0)
    simulate_pools(trace, "marginal_cost")
    warmed, live = run(story())
    assert warmed == live and len(live) == 1


def test_chaos_loses_nothing_and_leaks_nothing(tmp_path):
    dice = random.Random(5)
    n = 160
    limits = Limits(probe_s=0.05, first_byte_s=0.5, between_bytes_s=0.5, drain_s=1.0)

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
            routed((prefill, decode), tmp_path / "j", LeastLoadedPair(), limits) as (router, session, url),
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


def test_occupancy_and_failed_transfers_are_the_engines_own_numbers(tmp_path):
    told = (
        'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_waiting{engine="0"} 2.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:nixl_num_failed_transfers_total{engine="0"} 4.0\n'
    )

    async def story():
        async with scripted_pools(1, 2) as (prefill, decode), routed((prefill, decode), tmp_path / "j") as found:
            router, session, url = found
            decode[1].metrics = told
            while router.occupancy.rows["running"][2] != 3 or 2 not in router.occupancy.failed:
                await asyncio.sleep(0.02)
            row = router.occupancy.rows[2]
            assert row["instance"] == 1 and row["waiting"] == 2
            assert row["used_tokens"] == round(0.25 * 1055) * 16
            assert 0 <= router.now_s() - row["taken_s"] < 1.0
            async with session.get(url + "/metrics") as answer:
                assert 'astrolabe_failed_transfers_total{instance="2"} 4.0' in await answer.text()
            await decode[1].stop()
            await asyncio.sleep(0.3)
            assert router.occupancy.rows["running"][2] == 3  # an engine that is silent is not idle

    run(story())


@pytest.mark.parametrize("spec", ["least_loaded", "random", "marginal_cost"])
def test_a_journal_replays_to_the_choices_that_were_made(tmp_path, spec):
    async def story():
        pools = scripted_pools(2, 3, token_s=0.005)
        async with (
            pools as (prefill, decode),
            routed((prefill, decode), tmp_path / "j", routers.parse(spec)) as (_, session, url),
        ):
            await asyncio.gather(*(ask(session, url, prompt="x" * 40 * j, max_tokens=8) for j in range(1, 25)))

    run(story())
    again = replay(tmp_path / "j", routers.parse(spec))
    assert len(again) == 24 and again["same"].all()
    if spec == "least_loaded":
        assert not replay(tmp_path / "j", routers.parse("random"))["same"].all()


def test_the_command_that_decides_a_journal_again_knows_those_of_pools(tmp_path, capsys):
    async def story():
        pools = scripted_pools(2, 3, token_s=0.005)
        async with pools as engines, routed(engines, tmp_path / "j", routers.parse("random")) as (_, session, url):
            await asyncio.gather(*(ask(session, url) for _ in range(30)))

    run(story())
    out = tmp_path / "again.parquet"
    assert main(["replay", str(tmp_path / "j"), "--policy", "random", "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["decisions"], told["agreement"]) == (30, 1.0) and len(pd.read_parquet(out)) == 30
    assert main(["replay", str(tmp_path / "j"), "--policy", "random", "--seed", "9"]) == 0
    assert "under random, 100.0%" not in capsys.readouterr().out
    assert main(["replay", str(tmp_path / "j")]) == 0
    assert "30 decisions over pools under marginal_cost" in capsys.readouterr().out
    for words, said in ((["--policy", "astrolabe"], "unknown for pools"), (["--preset", "llama2-7b-a30"], "--preset")):
        assert main(["replay", str(tmp_path / "j"), *words]) == 2
        assert said in capsys.readouterr().err


def test_bodies_of_the_two_steps_leave_the_client_s_own_alone():
    body = {"model": "m", "messages": [], "max_completion_tokens": 9, "stream": True, "stream_options": {}, "n": 1}
    before = json.dumps(body)
    first = handoff.prefill_body(body)
    assert first["max_completion_tokens"] == 1 and "max_tokens" not in first and first["stream"] is False
    assert "stream_options" not in first and first["kv_transfer_params"]["do_remote_decode"] is True
    assert handoff.decode_body(body, None) == body
    assert handoff.decode_body(body | {"kv_transfer_params": {"a": 1}}, None) == body  # a client's own go nowhere
    assert json.dumps(body) == before
    assert handoff.handle_of({"kv_transfer_params": None}) is None
    assert handoff.blocks_of({"remote_block_ids": [[4, 5, 6]]}) == 3 and handoff.blocks_of(None) == 0


def test_a_router_of_pools_needs_both_pools_and_constants(tmp_path):
    instances = [Instance(i, "http://127.0.0.1:1", EngineConfig()) for i in range(2)]
    with pytest.raises(InputError, match="leave no pair"):
        PoolRouter(instances, RoundRobinPair(), "t", [MODEL], ByBytes(), constant, n_prefill=2, constants=PAPER)
    with pytest.raises(InputError, match="give a calibration"):
        PoolRouter(instances, RoundRobinPair(), "t", [MODEL], ByBytes(), constant, n_prefill=1)
    assert np.isneginf(
        PoolRouter(
            instances, RoundRobinPair(), "t", [MODEL], ByBytes(), constant, n_prefill=1, constants=PAPER
        ).occupancy.rows["taken_s"]
    ).all()
