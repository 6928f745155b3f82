"""The router over scripted engines: every request gets one outcome and one row, whatever the engines do."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest
from scripted_engine import QUICK, scripted_engines

from astrolabe_lab import policies
from astrolabe_lab.serve import journal
from astrolabe_lab.serve.instance import Instance
from astrolabe_lab.serve.limits import Limits
from astrolabe_lab.serve.listen import listening
from astrolabe_lab.serve.openai_api import Refusal, parse
from astrolabe_lab.serve.prompt_tokens import ByBytes
from astrolabe_lab.serve.router import Router
from astrolabe_lab.sim.config import EngineConfig

MODEL = "m"


async def constant(asked):
    return asked.predicted_tokens or 64, "constant"


@asynccontextmanager
async def routed(engines, path, policy="round_robin", **options):
    limits = options.pop("limits", QUICK)
    config, predictors = options.pop("config", EngineConfig()), options.pop("predictors", lambda: None)
    statuses = options.pop("statuses", [None] * len(engines))
    router = Router(
        [Instance(i, engine.url, config, predictors(), statuses[i]) for i, engine in enumerate(engines)],
        policies.parse(policy),
        policy,
        [MODEL],
        ByBytes(),
        options.pop("lengths", constant),
        limits=limits,
        journal=journal.Journal(path),
        **options,
    )
    async with listening(router) as url, aiohttp.ClientSession() as session:
        yield router, session, url


def outcomes(path):
    entries = [entry for entry in journal.read(path) if entry["event"] == "outcome"]
    return {status: [e for e in entries if e["status"] == status] for status in {e["status"] for e in entries}}


async def ask(session, url, stream=True, **more):
    body = {"model": MODEL, "prompt": "hello there", "max_tokens": 6, "stream": stream, **more}
    async with session.post(url + "/v1/completions", json=body) as answer:
        return answer.status, await answer.read(), answer.headers


async def healthz(session, url, status):
    """Wait until the router says so of itself."""
    while True:
        async with session.get(url + "/healthz") as answer:
            if answer.status == status:
                return
        await asyncio.sleep(0.02)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_passes_through_unchanged_and_leaves_one_row(tmp_path, stream):
    async def story():
        async with scripted_engines(2) as engines, routed(engines, tmp_path / "j") as (router, session, url):
            status, body, headers = await ask(session, url, stream)
            async with session.post(
                engines[0].url + "/v1/completions", json={"model": MODEL, "max_tokens": 6, "stream": stream}
            ) as direct:
                assert body == await direct.read()
            assert status == 200
            assert headers["X-Astrolabe-Instance"] == "0"
            assert [len(i.ledger) for i in router.instances] == [0, 0]

    run(story())
    (row,) = outcomes(tmp_path / "j")["ok"]
    assert row["output_tokens"] == 6
    assert row["instance"] == 0


@pytest.mark.parametrize(("given", "kept"), [("abc-1", "abc-1"), ("\xe9" * 300, "\xe9" * 200), ("", None)])
def test_what_a_client_calls_its_request_is_in_the_journal_beside_the_router_s_number(tmp_path, given, kept):
    async def story():
        async with scripted_engines(1) as engines, routed(engines, tmp_path / "j") as (_, session, url):
            session.headers["X-Request-Id"] = given
            return (await ask(session, url))[2]["X-Request-Id"]

    answered = run(story())
    (made,) = [entry for entry in journal.read(tmp_path / "j") if entry["event"] == "decision"]
    assert (made["rid"], made["client_rid"]) == (int(answered), kept)


def test_an_engine_that_may_compress_is_asked_not_to(tmp_path):
    """What it compressed would reach the client as garbage, and tell the router nothing."""

    async def story():
        async with scripted_engines(1) as engines, routed(engines, tmp_path / "j") as (_, session, url):
            engines[0].compresses = True
            for accepts in ("gzip", "identity"):
                session.headers["Accept-Encoding"] = accepts
                status, body, _ = await ask(session, url, stream=False)
                assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 6

    run(story())
    assert [row["output_tokens"] for row in outcomes(tmp_path / "j")["ok"]] == [6, 6]


def test_an_engine_that_fails_before_its_first_byte_is_passed_over(tmp_path):
    async def story():
        limits = replace(QUICK, first_byte_s=1.0)
        async with scripted_engines(2) as engines, routed(engines, tmp_path / "j", limits=limits) as (
            router, session, url,
        ):  # fmt: skip
            for script in ("http:500", "refuse", "silent"):
                engines[0].script = script
                status, body, headers = await ask(session, url)
                assert status == 200, (script, body)
                assert headers["X-Astrolabe-Instance"] == "1"
                router.policy.count = 0
                router.instances[0].breaker.succeeded()
            assert router.counters.retries == 3
            engines[0].script = engines[1].script = "refuse"  # two fail it: nothing is tried after the second
            assert (await ask(session, url))[0] >= 500
            assert router.counters.retries == 4
            assert [len(i.ledger) for i in router.instances] == [0, 0]

    run(story())
    found = outcomes(tmp_path / "j")
    assert len(found["ok"]) == 3
    assert len(found["retried"]) == 5


def test_an_engine_that_dies_in_mid_stream_fails_the_request_once_and_says_so(tmp_path):
    async def story():
        async with (
            scripted_engines(1, token_s=0.03) as engines,
            routed(engines, tmp_path / "j") as (router, session, url),
        ):
            engines[0].script = "break"
            status, body, _ = await ask(session, url)
            assert status == 200  # its head was sent already
            last = json.loads(body.rstrip().rpartition(b"data: ")[2])
            assert "ended before its answer did" in last["error"]["message"]
            assert len(router.instances[0].ledger) == 0

    run(story())
    found = outcomes(tmp_path / "j")
    assert {status: len(rows) for status, rows in found.items()} == {"failed": 1}


def test_a_request_that_the_engine_refuses_is_passed_on_and_never_opens_the_breaker(tmp_path):
    async def story():
        async with scripted_engines(1) as engines, routed(engines, tmp_path / "j") as (router, session, url):
            engines[0].script = "http:400"
            for _ in range(10):
                status, body, _ = await ask(session, url, stream=False)
                assert status == 400
                assert json.loads(body)["error"]["type"] == "told"
            assert router.instances[0].breaker.opened_s is None

    run(story())
    assert len(outcomes(tmp_path / "j")["rejected"]) == 10


def test_a_client_that_goes_away_ends_the_request_at_the_engine(tmp_path):
    async def story():
        async with (
            scripted_engines(1, token_s=0.05) as engines,
            routed(engines, tmp_path / "j") as (router, session, url),
        ):
            body = {"model": MODEL, "prompt": "x", "max_tokens": 500, "stream": True}
            answer = await session.post(url + "/v1/completions", json=body)
            await answer.content.readany()
            answer.close()
            for _ in range(100):
                await asyncio.sleep(0.02)
                if engines[0].aborted and not len(router.instances[0].ledger):
                    break
            assert engines[0].aborted == 1
            assert len(router.instances[0].ledger) == 0

    run(story())
    assert len(outcomes(tmp_path / "j")["aborted"]) == 1


def test_all_engines_down_is_a_503_and_they_come_back(tmp_path):
    async def story():
        async with scripted_engines(2) as engines, routed(engines, tmp_path / "j") as (router, session, url):
            for engine in engines:
                await engine.stop()
            await healthz(session, url, 503)
            status, body, headers = await ask(session, url)
            assert (status, headers["Retry-After"]) == (503, "1")
            for engine in engines:
                await engine.start()
            await healthz(session, url, 200)
            assert (await ask(session, url))[0] == 200

    run(story())


@pytest.mark.parametrize(
    ("raw", "kind", "status", "words"),
    [
        (b"{", "application/json", 400, "not JSON"),
        (b"[1]", "application/json", 400, "send an object"),
        (b'{"model": "m", "prompt": "\xff"}', "application/json", 400, "not UTF-8"),
        (b"model=m", "application/x-www-form-urlencoded", 415, "content-type"),
        (b'{"model": "other", "prompt": "x"}', "application/json", 404, "does not exist"),
        (b'{"model": 5, "prompt": "x"}', "application/json", 400, "model=5 must be a string; served here: m"),
        (b'{"model": "m"}', "application/json", 400, "prompt must be"),
        (b'{"model": "m", "vllm_xargs": {"output_tokens": "7"}}', "application/json", 400, "output_tokens='7' must be"),
        (b'{"model": "m", "prompt": "' + b"x" * (9 << 20) + b'"}', "application/json", 413, "larger than"),
    ],
)
def test_bad_requests_get_one_openai_shaped_error(tmp_path, raw, kind, status, words):
    async def story():
        async with scripted_engines(1) as engines, routed(engines, tmp_path / "j") as (router, session, url):
            async with session.post(url + "/v1/completions", data=raw, headers={"Content-Type": kind}) as answer:
                error = (await answer.json())["error"]
                assert answer.status == status, error
                assert words in error["message"]
            assert engines[0].seen == []

    run(story())
    assert sum(len(rows) for rows in outcomes(tmp_path / "j").values()) == 1


@pytest.mark.parametrize("given", [{}, {"model": None}, {"model": ""}])
def test_who_names_no_model_gets_the_one_that_is_served_and_where_several_are_is_asked_which(given):
    raw = json.dumps({"prompt": "x", **given}).encode()
    asked = parse("/v1/completions", raw, {}, [MODEL])
    assert asked.model == asked.body["model"] == MODEL
    with pytest.raises(Refusal, match="served here: m, n"):
        parse("/v1/completions", raw, {}, [MODEL, "n"])


def test_past_its_bound_a_router_answers_429_and_counts_nothing_twice(tmp_path):
    async def story():
        async with (
            scripted_engines(1, first_s=0.2) as engines,
            routed(engines, tmp_path / "j", limits=Limits(in_flight=4, probe_s=0.05)) as (router, session, url),
        ):
            answers = await asyncio.gather(*(ask(session, url) for _ in range(10)))
            found = sorted(status for status, _, _ in answers)
            assert found == [200] * 4 + [429] * 6
            assert len(router.instances[0].ledger) == 0

    run(story())


def test_an_api_key_is_asked_for_and_does_not_reach_the_engines(tmp_path):
    async def story():
        async with (
            scripted_engines(1) as engines,
            routed(engines, tmp_path / "j", api_key="secret") as (router, session, url),
        ):
            assert (await ask(session, url))[0] == 401
            session.headers["Authorization"] = "Bearer secret"
            assert (await ask(session, url))[0] == 200

    run(story())
    assert "secret" not in (tmp_path / "j").read_text()
