"""What clients do to a router: leave, dawdle, come in thousands, ask for nonsense; nothing leaks, one row each."""

import asyncio
import json
import random
import socket
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest
from scripted_engine import QUICK, scripted_engines
from test_faults import idle, one_row_each
from test_router import MODEL, ask, outcomes, routed, run

from astrolabe_lab.serve.limits import Limits
from astrolabe_lab.serve.listen import allow_open_files

BODY = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 6, "stream": True}).encode()


def request_bytes(body=BODY, path="/v1/completions", **headers):
    lines = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


@asynccontextmanager
async def connection(url):
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def slowly(answer, seconds):
    await asyncio.sleep(seconds)
    return answer


@pytest.mark.parametrize(
    "leaves", ["in its head", "in its body", "while counted", "while tagged", "before the first byte", "in the stream"]
)
def test_a_client_that_leaves_at_any_moment_leaves_nothing_behind(tmp_path, leaves):
    whole = request_bytes()
    part = {"in its head": 20, "in its body": len(whole) - 10}.get(leaves, len(whole))
    reached = leaves in ("before the first byte", "in the stream")

    async def story():
        async with (
            scripted_engines(1) as engines,
            routed(engines, tmp_path / "j") as (router, session, url),
        ):
            engines[0].hold_at = 1 if leaves == "in the stream" else 0
            engines[0].going.clear()
            if leaves == "while counted":
                router.count_tokens = lambda asked: slowly((5, "bytes"), 3600.0)
            if leaves == "while tagged":
                router.lengths = lambda asked: slowly((5, "constant"), 3600.0)
            for j in range(5):
                async with connection(url) as (reader, writer):
                    writer.write(whole[:part])
                    await writer.drain()
                    while leaves != "in its head" and not router.in_flight or reached and len(engines[0].seen) == j:
                        await asyncio.sleep(0.01)
                    if leaves == "in the stream":
                        await reader.readuntil(b"data:")
                    await asyncio.sleep(0.05)
                await idle(router, engines)
            assert router.counters.outcomes["aborted"] == (0 if leaves == "in its head" else 5)
            assert len(engines[0].seen) == (5 if reached else 0)
            assert engines[0].aborted == (5 if reached else 0)
            assert router.instances[0].breaker.in_a_row == 0, list(router.counters.outcomes)

    run(story())
    rows = one_row_each(tmp_path / "j")
    assert [row["status"] for row in rows] == ["aborted"] * (0 if leaves == "in its head" else 5)


def test_a_client_that_leaves_with_the_last_token_has_had_its_answer(tmp_path):
    async def story():
        async with scripted_engines(1) as engines, routed(engines, tmp_path / "j") as (_, session, url):
            engines[0].script = "lingers"  # so that the router is still reading when the client leaves
            body = {"model": MODEL, "prompt": "hello there", "max_tokens": 6, "stream": True}
            async with session.post(url + "/v1/completions", json=body) as answer:
                seen = b""
                while b"[DONE]" not in seen:
                    seen += await answer.content.readany()
                answer.close()
            while not outcomes(tmp_path / "j"):
                await asyncio.sleep(0.05)

    run(story())
    (row,) = outcomes(tmp_path / "j")["ok"]
    assert row["output_tokens"] == 6 and row["finish_reason"] == "length"


def test_a_client_that_leaves_while_sidecars_are_asked_leaves_nothing_behind(tmp_path):
    from astrolabe_lab.serve.remote import RemotePredictors

    async def story():
        async with scripted_engines(2) as engines:
            deaf = await asyncio.start_server(lambda r, w: asyncio.sleep(3600), "127.0.0.1", 0)
            where = f"http://127.0.0.1:{deaf.sockets[0].getsockname()[1]}"
            remote = RemotePredictors({0: where, 1: where}, 0.3, time.monotonic)
            async with routed(engines, tmp_path / "j", "astrolabe:k=2", ask=remote) as (router, _, url):
                for _ in range(3):
                    async with connection(url) as (_, writer):
                        writer.write(request_bytes())
                        await writer.drain()
                        await asyncio.sleep(0.05)
                await idle(router, engines)
                assert [engine.seen for engine in engines] == [[], []]
            deaf.close()

    run(story())
    assert [row["status"] for row in one_row_each(tmp_path / "j")] == ["aborted"] * 3


def test_slow_clients_are_let_go_whatever_they_are_slow_at(tmp_path):
    async def trickle(writer, data, every_s):
        for j in range(len(data)):
            writer.write(data[j : j + 1])
            await writer.drain()
            await asyncio.sleep(every_s)

    async def story():
        limits = replace(QUICK, head_s=0.4, body_s=0.5)
        async with scripted_engines(1) as engines, routed(engines, tmp_path / "j", limits=limits) as (router, _, url):
            whole = request_bytes()
            head = whole.index(b"\r\n\r\n") + 4
            async with connection(url) as (reader, writer):  # a head that never ends
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await asyncio.gather(trickle(writer, whole[:head], 0.05), reader.readexactly(1))
            async with connection(url) as (reader, writer):  # nothing at all
                assert await asyncio.wait_for(reader.read(1), 3) == b""
            async with connection(url) as (reader, writer):  # a body that never ends
                writer.write(whole[:head])
                await trickle(writer, b'{"mo', 0.01)
                assert b" 408 " in await asyncio.wait_for(reader.readline(), 3)
            await idle(router, engines)
            assert engines[0].seen == []

    run(story())
    assert [row["reason"][:8] for row in one_row_each(tmp_path / "j")] == ["HTTP 408"]


def test_a_client_that_does_not_read_its_answer_is_let_go_and_its_engine_freed(tmp_path):
    async def story():
        async with (
            scripted_engines(1, token_s=0.001) as engines,
            routed(engines, tmp_path / "j", limits=replace(QUICK, write_s=0.5)) as (router, _, url),
        ):
            engines[0].text = "t" * 50_000
            host, _, port = url.removeprefix("http://").partition(":")
            deaf = socket.socket()
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect((host, int(port)))
            body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 10_000, "stream": True}).encode()
            deaf.sendall(request_bytes(body))
            while not engines[0].seen:
                await asyncio.sleep(0.01)
            await idle(router, engines)
            deaf.close()
            assert router.instances[0].breaker.in_a_row == 0, list(router.counters.outcomes)

    run(story())
    (row,) = one_row_each(tmp_path / "j")
    assert (row["status"], row["reason"]) == ("aborted", "the client did not read its answer")


def test_ten_thousand_requests_with_random_ends_leave_exactly_nothing_in_flight(tmp_path):
    """Clients that leave at any moment, engines that break in every way."""
    n, dice = 10_000, random.Random(0)
    scripts = ["ok"] * 24 + ["http:500", "http:400", "break", "refuse", "error", "late-error", "cut", "twice", "silent"]

    async def one(session, url, engines):
        dice.choice(engines).script = dice.choice(scripts)
        body = {"model": MODEL, "prompt": "x", "max_tokens": dice.randrange(1, 4), "stream": dice.random() < 0.7}
        limit = aiohttp.ClientTimeout(total=dice.choice([0.001, 0.01, 0.05, 9.0]))
        try:
            async with session.post(url + "/v1/completions", json=body, timeout=limit) as answer:
                await answer.read()
        except (TimeoutError, aiohttp.ClientError):
            pass

    async def story():
        limits = Limits(probe_s=1.0, first_byte_s=0.3, whole_answer_s=0.3, between_bytes_s=0.3, drain_s=1.0)
        async with scripted_engines(4) as engines, routed(engines, tmp_path / "j", "least_loaded", limits=limits) as (
            router, session, url,
        ):  # fmt: skip
            for instance in router.instances:
                instance.breaker.failures = 10**9  # they fail all the time here, and shall be asked
            waiting = iter(range(n))

            async def client():
                for _ in waiting:
                    await one(session, url, engines)

            async def watch():
                while True:
                    assert all(len(i.ledger) >= 0 and i.ledger.tokens >= 0 for i in router.instances)
                    assert sum(len(i.ledger) for i in router.instances) <= router.in_flight
                    await asyncio.sleep(0.02)

            watching = asyncio.create_task(watch())
            await asyncio.gather(*(client() for _ in range(48)))
            for engine in engines:
                engine.script = "ok"
            await idle(router, engines)
            assert not watching.done()
            watching.cancel()
            return dict(router.counters.outcomes)

    counted = asyncio.run(asyncio.wait_for(story(), 900))
    rows = one_row_each(tmp_path / "j")
    assert sum(n for status, n in counted.items() if status != "retried") == len(rows)
    assert {"ok", "failed", "aborted", "rejected"} <= {row["status"] for row in rows}
    assert min(counted[status] for status in ("ok", "aborted", "retried", "failed")) > 20, counted


def test_two_thousand_connections_at_once_all_get_their_answer(tmp_path):
    allow_open_files()

    async def story():
        limits = Limits(probe_s=0.2, connect_s=60.0, drain_s=1.0)
        async with (
            scripted_engines(4, first_s=1.0, tokens=2) as engines,
            routed(engines, tmp_path / "j", "least_loaded", limits=limits) as (router, _, url),
        ):
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as session:
                answers = await asyncio.gather(*(ask(session, url, max_tokens=2) for _ in range(2000)))
            assert {status for status, _, _ in answers} == {200}
            assert all(i.health.healthy for i in router.instances)  # a burst is no illness
            await idle(router, engines)

    asyncio.run(asyncio.wait_for(story(), 600))
    assert len(one_row_each(tmp_path / "j")) == 2000


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/v1/embeddings", {}, 404),
        ("POST", "/reset_prefix_cache", {}, 404),  # engines' own pages are not reachable
        ("POST", "/sleep", {}, 404),
        ("GET", "/v1/completions", {}, 405),
        ("POST", "/v1/completions", {"x-slo-class": "urgent"}, 400),
        ("POST", "/v1/completions", {"x-predicted-tokens": "many"}, 400),
        ("POST", "/v1/completions", {"content-encoding": "gzip"}, 400),
    ],
)
def test_what_is_not_served_is_told_in_openai_s_shape(tmp_path, method, path, headers, status):
    async def story():
        async with scripted_engines(1) as engines, routed(engines, tmp_path / "j") as (_, session, url):
            headers["content-type"] = "application/json"
            async with session.request(method, url + path, data=BODY, headers=headers) as answer:
                error = (await answer.json())["error"]
                assert answer.status == status, error
                assert set(error) == {"message", "type", "param", "code"}
            assert engines[0].seen == []

    run(story())


@pytest.mark.parametrize("value", ["0", "-1", "1e3", "2147483648", "0" * 13 + "19999999999", "1" + "9" * 5000, "\xb2"])
def test_a_predicted_length_that_is_none_is_refused_however_it_is_padded(tmp_path, value):
    async def story():
        async with scripted_engines(1) as engines, routed(engines, tmp_path / "j") as (_, session, url):
            session.headers["X-Predicted-Tokens"] = value
            async with session.post(url + "/v1/completions", json={"model": MODEL, "prompt": "x"}) as answer:
                assert answer.status == 400 and b"x-predicted-tokens" in await answer.read()

    run(story())


@pytest.mark.parametrize("index", ["0" * 12 + "9", "0" * 13, "9" * 5000, "1", "\xb2"])
def test_an_instance_that_is_none_is_not_found_however_it_is_padded(tmp_path, index):
    async def story():
        async with (
            scripted_engines(1) as engines,
            routed(engines, tmp_path / "j") as (_, session, url),
            session.post(f"{url}/instances/{index}", json={"draining": True}) as answer,
        ):
            assert answer.status == 404

    run(story())


@pytest.mark.parametrize("path", ["/instances/0", "/v1/completions"])
def test_a_body_that_is_not_compressed_as_it_says_is_refused(tmp_path, path):
    async def story():
        async with scripted_engines(1) as engines, routed(engines, tmp_path / "j") as (_, session, url):
            headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
            async with session.post(url + path, data=b"no gzip", headers=headers) as answer:
                assert answer.status == 400 and "error" in await answer.json()

    run(story())


def test_heads_are_bounded(tmp_path):
    async def story():
        async with scripted_engines(1) as engines, routed(engines, tmp_path / "j") as (_, _, url):
            for headers in ({"X-Long": "x" * 20_000}, {f"X-{j}": "x" for j in range(500)}):
                async with connection(url) as (reader, writer):
                    writer.write(request_bytes(**headers))
                    assert b" 400 " in await asyncio.wait_for(reader.readline(), 3)
            assert engines[0].seen == []

    run(story())
