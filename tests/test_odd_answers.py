"""Answers that no engine should give: it is at fault, another is tried, nothing is held without bound."""

import asyncio
import json
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import routed_pools
from scripted_engine import QUICK, scripted_engines
from scripted_pools import scripted_pools
from test_faults import idle, one_row_each
from test_router import ask, outcomes, routed, run

from astrolabe_lab.serve import journal
from astrolabe_lab.serve.stream import Watcher

SMALL = replace(QUICK, answer_bytes=200_000, line_bytes=100_000, prefill_bytes=100_000)
EVENT = b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
DEEP = b"[" * 60_000
ERROR = b'{"error": {"message": "out of memory"}}'
COMPLETION = {
    "choices": [{"text": "a", "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1},
}


def http(body, status="200 OK", *headers):
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def streaming(body):
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + body


class OddEngine:
    """Answers requests with ``answer``, as it is, a moment later with ``more``, and then closes, or ``stays``; whoever
    looks gets ``page``. ``asked``, ``looked``: what it got."""

    def __init__(self, answer):
        self.answer, self.more, self.stays, self.page = answer, b"", False, http(b"", "200 OK", "Connection: close")
        self.asked, self.looked, self.url = [], [], ""

    async def talk(self, reader, writer):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                self.looked.append(head)
                writer.write(self.page)
                return await writer.drain()
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            self.asked.append(head + await reader.readexactly(int(length)))
            writer.write(self.answer)
            await writer.drain()
            if self.more:
                await asyncio.sleep(0.2)
                writer.write(self.more)
                await writer.drain()
            if self.stays:
                await asyncio.sleep(3600)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def odd(answer):
    engine = OddEngine(answer)
    server = await asyncio.start_server(engine.talk, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield engine
    server.close()


WHOLE = {
    "empty": http(b""),
    "html": http(b"<html>busy</html>", "200 OK", "Content-Type: text/html"),
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "an error": http(ERROR),
    "no completion": http(b"{}"),
    "deep": http(DEEP),
    "elsewhere": http(b"", "307 Temporary Redirect", "Location: http://127.0.0.1:9/v1/completions"),
    "endless": http(b'{"choices": [], "x": "' + b"x" * 300_000 + b'"}'),
}
STREAMS = WHOLE | {
    "an error in two": streaming(b'data: {"error": {"message": "no"}' + b" " * 90_000 + b"}\n\n" + DONE),
    "an endless line": streaming(b"data: " + b"x" * 300_000),
    "endless lines": streaming(b"x\n" * 100_000),
}


@pytest.mark.parametrize(("stream", "what"), [*((False, what) for what in WHOLE), *((True, what) for what in STREAMS)])
def test_an_answer_that_is_none_is_passed_over_and_its_engine_is_blamed(tmp_path, stream, what):
    async def story():
        async with (
            odd(STREAMS[what]) as engine,
            scripted_engines(1) as sound,
            routed([engine, *sound], tmp_path / "j", limits=SMALL) as (router, session, url),
        ):
            status, body, headers = await ask(session, url, stream)
            assert (status, headers["X-Astrolabe-Instance"]) == (200, "1"), body
            assert [i.breaker.in_a_row for i in router.instances] == [1, 0]
            await idle(router, sound)

    run(story())
    assert [row["status"] for row in one_row_each(tmp_path / "j")] == ["ok"]
    (passed_over,) = outcomes(tmp_path / "j")["retried"]
    assert passed_over["reason"].startswith("EngineFault")


@pytest.mark.parametrize("what", ["empty", "an error", "deep", "endless"])
def test_where_no_engine_answers_soundly_the_client_gets_a_502(tmp_path, what):
    async def story():
        async with (
            odd(WHOLE[what]) as one,
            odd(WHOLE[what]) as other,
            routed([one, other], tmp_path / "j", limits=SMALL) as (_, session, url),
        ):
            assert (await ask(session, url, stream=False))[0] == 502

    run(story())
    assert [row["status"] for row in one_row_each(tmp_path / "j")] == ["failed"]


def test_an_engine_that_refuses_in_an_answer_of_200_is_well_and_the_request_rejected(tmp_path):
    refusal = http(b'{"error": {"message": "too long", "code": 400}}')

    async def story():
        async with odd(refusal) as engine, routed([engine], tmp_path / "j") as (router, session, url):
            status, body, _ = await ask(session, url, stream=False)
            assert status == 200 and b"too long" in body
            assert router.instances[0].breaker.in_a_row == 0

    run(story())
    assert [row["status"] for row in one_row_each(tmp_path / "j")] == ["rejected"]


def test_a_line_without_end_in_mid_stream_is_a_failure_of_the_engine(tmp_path):
    async def story():
        async with (
            odd(streaming(EVENT)) as engine,
            routed([engine], tmp_path / "j", limits=SMALL) as (router, session, url),
        ):
            engine.more = b"data: " + b"x" * 500_000
            status, body, _ = await ask(session, url)
            assert status == 200 and b"ended before its answer did" in body
            assert router.instances[0].breaker.in_a_row == 1

    run(story())
    assert [row["status"] for row in one_row_each(tmp_path / "j")] == ["failed"]


@pytest.mark.parametrize("event", [DEEP, b"\xff\xfe", b'{"usage": {"completion_tokens": ' + b"9" * 300 + b"}}"])
def test_an_event_that_cannot_be_read_passes_and_counts_for_nothing(tmp_path, event):
    async def story():
        async with (
            odd(streaming(EVENT + b"data: " + event + b"\n\n" + DONE)) as engine,
            routed([engine], tmp_path / "j") as (_, session, url),
        ):
            assert event in (await ask(session, url))[1]

    run(story())
    (row,) = one_row_each(tmp_path / "j")
    assert (row["status"], row["output_tokens"]) == ("ok", 1)


@pytest.mark.parametrize("after", [b"", b"data: more", b"x" * 300_000])
def test_a_stream_ends_with_its_end_though_the_engine_stays(tmp_path, after):
    async def story():
        async with (
            odd(streaming(EVENT + DONE + after)) as engine,
            routed([engine], tmp_path / "j") as (router, session, url),
        ):
            engine.stays = True
            started = time.monotonic()
            status, body, _ = await ask(session, url)
            assert status == 200 and body.startswith(EVENT + DONE) and b"error" not in body
            await idle(router)
            assert time.monotonic() - started < 5
            assert router.instances[0].breaker.in_a_row == 0

    run(story())
    assert [row["status"] for row in one_row_each(tmp_path / "j")] == ["ok"]


@pytest.mark.parametrize("stream", [True, False])
def test_what_nobody_foresaw_in_a_dispatch_is_a_failure_and_not_the_client_s_leaving(tmp_path, monkeypatch, stream):
    def fails(self, chunk):
        raise ZeroDivisionError("odd")

    async def story():
        async with scripted_engines(1) as engines, routed(engines, tmp_path / "j") as found:
            router, session, url = found
            monkeypatch.setattr(Watcher, "feed", fails)
            status, body, _ = await ask(session, url, stream)
            assert status == 500 and b"ZeroDivisionError" in body
            await idle(router)
            assert router.instances[0].breaker.in_a_row == 0

    run(story())
    (row,) = one_row_each(tmp_path / "j")
    assert (row["status"], row["reason"]) == ("failed", "ZeroDivisionError: odd")


def test_long_answers_are_read_in_linear_time():
    for stream in (True, False):
        watcher, started = Watcher(stream), time.process_time()
        for _ in range(20_000):
            watcher.feed(b"x" * 1000)
        assert watcher.unread == 20_000_000 and time.process_time() - started < 2


@pytest.mark.parametrize("pools", [False, True])
def test_engines_are_told_of_the_body_that_is_sent_whatever_the_client_called_its_own(tmp_path, pools):
    async def story():
        answer = http(json.dumps(COMPLETION).encode())
        async with odd(answer) as one, odd(answer) as other:
            if pools:
                way = routed_pools.routed(([one], [other]), tmp_path / "j")
            else:
                way = routed([one], tmp_path / "j")
            async with way as (_, session, url):
                session.headers["Content-Type"] = "application/json; charset=utf-16"
                assert (await ask(session, url, stream=False))[0] == 200
            for head in [*one.asked, *other.asked]:
                assert b"application/json\r\n" in head and b"utf-16" not in head

    run(story())


HANDLE = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r", "remote_block_ids": [[1, 2]]}
ODD_BLOCKS = {f"blocks {ids}": COMPLETION | {"kv_transfer_params": HANDLE | {"remote_block_ids": ids}}
              for ids in (5, True, 1.5, "abc", {"a": 1}, [1.5], [[True]], [None])}  # fmt: skip
PREFILLS = WHOLE | {what: http(json.dumps(answer).encode()) for what, answer in ODD_BLOCKS.items()}
PREFILLS["refused"] = http(b'{"error": {"message": "too long", "code": 400}}')


@pytest.mark.parametrize("what", PREFILLS)
def test_a_prefill_s_answer_that_is_none_is_passed_over_and_its_engine_is_blamed(tmp_path, what):
    async def story():
        async with (
            odd(PREFILLS[what]) as engine,
            scripted_pools(1, 1) as (prefill, decode),
            routed_pools.routed(([engine, *prefill], decode), tmp_path / "j", limits=SMALL) as (router, session, url),
        ):
            status, body, headers = await routed_pools.ask(session, url)
            assert (status, headers["X-Astrolabe-Prefill-Instance"]) == (200, "1"), body
            assert [i.breaker.in_a_row for i in router.instances] == [1, 0, 0]
            assert len(decode[0].pulled) == 1 and router.counters.recomputed == 0
            await routed_pools.settled(router, prefill)

    run(story())
    prefilled = [e for e in journal.read(tmp_path / "j") if e["event"] == "prefilled"]
    assert [(e["status"], e["blocks"]) for e in prefilled] == [("failed", 0), ("ok", 3)]


@pytest.mark.parametrize("handle", [None, {}, HANDLE | {"do_remote_prefill": False}])
def test_a_prefill_that_keeps_no_blocks_is_well_and_decode_computes_the_prompt(tmp_path, handle):
    async def story():
        async with (
            odd(http(json.dumps(COMPLETION | {"kv_transfer_params": handle}).encode())) as engine,
            scripted_pools(0, 1) as (_, decode),
            routed_pools.routed(([engine], decode), tmp_path / "j") as (router, session, url),
        ):
            assert (await routed_pools.ask(session, url))[0] == 200
            assert router.counters.recomputed == decode[0].alone == 1
            assert router.instances[0].breaker.in_a_row == 0

    run(story())


def test_what_nobody_foresaw_in_a_prefill_is_a_failure_and_not_the_client_s_leaving(tmp_path, monkeypatch):
    def fails(answer):
        raise ZeroDivisionError("odd")

    async def story():
        async with scripted_pools(1, 1) as pools, routed_pools.routed(pools, tmp_path / "j") as (router, session, url):
            monkeypatch.setattr("astrolabe_lab.serve.pools.handoff.handle_of", fails)
            assert (await ask(session, url))[0] == 500
            assert not router.in_flight and not len(router.pairs.rows)

    run(story())
    (row,) = [e for e in journal.read(tmp_path / "j") if e["event"] == "prefilled"]
    assert (row["status"], row["reason"]) == ("failed", "ZeroDivisionError: odd")


def test_health_and_gauges_are_not_looked_for_elsewhere(tmp_path):
    async def story():
        async with odd(b"") as engine, routed([engine], tmp_path / "j") as (router, _, _):
            engine.page = http(b"", "302 Found", f"Location: {engine.url}/away", "Connection: close")
            while router.instances[0].health.healthy:
                await asyncio.sleep(0.01)
            assert {head.split()[1] for head in engine.looked} == {b"/health", b"/metrics"}

    run(story())
