"""The router of pools over scripted engines: two steps, what a policy sees of them, and what a journal keeps."""

import asyncio
import json

import numpy as np
import pandas as pd
import pytest
from routed_pools import MODEL, ask, constant, routed, run
from scripted_pools import scripted_pools

from astrolabe_lab import InputError, bench, length
from astrolabe_lab.arrivals import with_arrivals
from astrolabe_lab.cli import main
from astrolabe_lab.disagg import routers, simulate_pools
from astrolabe_lab.disagg.constants import PAPER
from astrolabe_lab.disagg.policies import RoundRobinPair
from astrolabe_lab.generators import families
from astrolabe_lab.serve.instance import Instance
from astrolabe_lab.serve.pools import handoff
from astrolabe_lab.serve.pools.records import rows
from astrolabe_lab.serve.pools.replay import replay
from astrolabe_lab.serve.pools.router import PoolRouter
from astrolabe_lab.serve.prompt_tokens import ByBytes
from astrolabe_lab.sim.config import EngineConfig


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
                assert 'astrolabe_failed_transfers_total{instance="2",role="decode"} 4.0' in await answer.text()
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


async def get(session, url, path):
    async with session.get(url + path) as answer:
        return answer.status, await answer.json()


def test_health_says_whether_a_request_can_be_served_with_the_engines_that_are_left(tmp_path):
    async def story():
        async with scripted_pools(1, 2) as pools, routed(pools, tmp_path / "j") as (router, session, url):
            assert await get(session, url, "/health") == (
                200, {"ok": True, "available": 3, "engines": 3, "prefill_available": 1, "decode_available": 2}
            )  # fmt: skip
            router.instances[0].draining = True
            status, told = await get(session, url, "/health")
            assert (status, told["prefill_available"]) == (200, 0) and "compute prompts themselves" in told["note"]
            assert (await ask(session, url))[0] == 200
            router.instances[0].draining = False
            router.instances[1].draining = router.instances[2].draining = True
            status, told = await get(session, url, "/health")
            assert (status, told["ok"], told["available"]) == (503, False, 1)
            assert told["note"] == "no decode engine is available"
            assert (await ask(session, url))[0] == 503

    run(story())


def test_engines_tell_their_role_and_place_wherever_they_are_listed(tmp_path):
    async def story():
        async with scripted_pools(1, 2) as pools, routed(pools, tmp_path / "j") as (router, session, url):
            while any(instance.polled_s is None for instance in router.instances):
                await asyncio.sleep(0.02)
            told = (await get(session, url, "/instances"))[1]["instances"]
            assert [each["role"] for each in told] == ["prefill", "decode", "decode"]
            assert [each.get("prefill_instance") for each in told] == [0, None, None]
            assert [each.get("decode_instance") for each in told] == [None, 0, 1]
            assert all(each["poll_age_s"] < 1.0 and "status_age_s" not in each for each in told)
            status, one = await get(session, url, "/instances/2")
            assert (status, one["instance"], one["decode_instance"]) == (200, 2, 1)
            assert (await get(session, url, "/instances/3"))[0] == 404
            async with session.get(url + "/metrics") as answer:
                text = await answer.text()
            for index, role in enumerate(("prefill", "decode", "decode")):
                assert f'astrolabe_instance_available{{instance="{index}",role="{role}"}} 1.0' in text

    run(story())


@pytest.mark.parametrize("given", [None, ""])
def test_who_names_no_model_gets_the_one_that_is_served(tmp_path, given):
    async def story():
        async with scripted_pools(1, 1) as (prefill, decode), routed((prefill, decode), tmp_path / "j") as found:
            _, session, url = found
            assert (await ask(session, url, model=given))[0] == 200
            assert prefill[0].seen[0]["model"] == decode[0].seen[0]["model"] == MODEL

    run(story())


def test_a_measured_run_keeps_both_engines_of_every_request_numbered_in_their_pools(tmp_path):
    async def story():
        async with scripted_pools(2, 2) as pools, routed(pools, tmp_path / "j") as (router, _, url):
            frame = await bench.drive(url, trace, bench.Load(MODEL), keep=tmp_path / "rows")
            router.instances[0].draining = router.instances[1].draining = True
            alone = await bench.drive(url, trace, bench.Load(MODEL))
            kept = json.loads((tmp_path / "rows").read_text().splitlines()[1])
            return frame, alone, kept

    trace = pd.DataFrame({"rid": range(8), "arrived_s": 0.0, "prompt_tokens": 10, "output_tokens": 5})
    frame, alone, kept = run(story())
    assert set(frame["prefill_instance"]) == {0, 1} == set(frame["decode_instance"])
    assert (frame["instance"] == frame["decode_instance"] + 2).all()
    assert kept["prefill_instance"] in (0, 1) and set(alone["prefill_instance"]) == {-1}


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
