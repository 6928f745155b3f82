"""The tagging service over HTTP, its client, and what goes wrong between them."""

import asyncio
import gc
import http.client
import json
import socket
import threading
import time
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from taggers import CountsLetters, served

from astrolabe_lab.errors import InputError
from astrolabe_lab.length.breaker import Breaker
from astrolabe_lab.length.remote import RemoteTagger
from astrolabe_lab.length.service import Limits
from astrolabe_lab.length.serving import listen
from astrolabe_lab.length.tagging import Tag

JSON = {"Content-Type": "application/json"}
HEAD = b"POST /tag HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
ANY_TEXT = st.text(st.characters(codec=None), max_size=300)


@pytest.fixture(scope="module")
def service():
    with served(CountsLetters(), max_body_bytes=10_000, max_prompts=8, body_timeout_s=0.5) as url:
        yield url


def ask(url, body=b"", headers=JSON, method="POST", path="/tag"):
    """(status, JSON answer) of one request; ``body`` is bytes, or what becomes JSON."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    raw = answer.read()
    connection.close()
    return answer.status, json.loads(raw) if answer.getheader("Content-Type") == "application/json" else raw.decode()


def samples(url):
    """The metrics of a service as {line up to its value: value}."""
    _, text = ask(url, method="GET", path="/metrics")
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def waited_for(condition, seconds=5.0):
    until_s = time.monotonic() + seconds
    while not condition() and time.monotonic() < until_s:
        time.sleep(0.01)
    return condition()


# --- what it answers ----------------------------------------------------------------------------------------


def test_a_prompt_is_tagged_with_median_p90_and_the_model_that_said_so(service):
    status, answer = ask(service, {"prompt": "four", "model": None})
    assert status == 200
    assert answer == {
        "predicted_tokens": 14, "p90_tokens": 28, "source": "model", "model_hash": "abc", "late": False
    }  # fmt: skip


def test_many_prompts_are_tagged_in_their_order(service):
    status, answer = ask(service, {"prompts": ["", "a" * 5, "b"], "models": ["m", None, "n"]})
    assert status == 200 and answer["model_hash"] == "abc" and answer["late"] is False
    assert [tag["predicted_tokens"] for tag in answer["tags"]] == [10, 15, 11]


@settings(max_examples=40, deadline=None)
@given(ANY_TEXT)
def test_any_unicode_survives_the_way_there(service, text):
    async def there_and_back():
        async with RemoteTagger(service, deadline_s=10, fallback=9999) as tagger:
            return await tagger.tag(text)

    # halves of a pair that stand together arrive as the one character they are
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert asyncio.run(there_and_back()).predicted_tokens == 10 + len(joined)


@pytest.mark.parametrize(
    "body, status, code, said",
    [
        (b'{"prompt": "a"', 400, "not_json", "Expecting"),
        (b"", 400, "not_json", "Expecting"),
        (b"[" * 9_000, 400, "not_json", "not JSON"),
        (b'{"prompt": "\xff"}', 400, "not_utf8", "byte 12"),
        ("{'prompt'}".encode("utf-16"), 400, "not_utf8", "byte 0"),
        ([1], 400, "invalid", "should be an object"),
        ({}, 400, "invalid", "the prompt is missing"),
        ({"prompt": None}, 400, "invalid", "NoneType"),
        ({"prompt": ["a"]}, 400, "invalid", "list"),
        ({"prompt": "a", "model": 3}, 400, "invalid", "model is of type int"),
        ({"prompt": "a", "promt": "b"}, 400, "invalid", "'promt' is unknown"),
        ({"prompt": "a", "\ud83d": "b"}, 400, "invalid", "is unknown"),
        ({"prompts": []}, 400, "invalid", "1 to 8"),
        ({"prompts": ["a"] * 9}, 400, "invalid", "1 to 8"),
        ({"prompts": "a"}, 400, "invalid", "list of 1 to 8"),
        ({"prompts": ["a", 1]}, 400, "invalid", "int"),
        ({"prompts": ["a", "b"], "models": ["m"]}, 400, "invalid", "list of 2 names"),
        ({"prompt": "a" * 10_000}, 413, "too_large", "10,000 bytes"),
        ({"prompt": "crash"}, 500, "model_failed", "RuntimeError: boom"),
        ({"prompt": "lie"}, 500, "model_failed", "nan"),
    ],
)
def test_what_is_wrong_is_said_in_json_and_harms_nobody(service, body, status, code, said):
    got, answer = ask(service, body)
    assert (got, answer["error"]["code"]) == (status, code)
    assert answer["error"]["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert said in answer["error"]["message"]
    assert ask(service, {"prompt": "four"})[1]["predicted_tokens"] == 14


@pytest.mark.parametrize(
    "headers, code",
    [
        ({}, "content_type"),
        ({"Content-Type": "text/plain"}, "content_type"),
        ({"Content-Type": "application/json; charset=latin-1"}, "content_type"),
        (JSON | {"Content-Encoding": "gzip"}, "content_encoding"),
    ],
)
def test_what_is_not_plain_json_is_refused_unread(service, headers, code):
    status, answer = ask(service, {"prompt": "a"}, headers)
    assert (status, answer["error"]["code"]) == (415, code)


@pytest.mark.parametrize("method, path, status", [("GET", "/tag", 405), ("GET", "/", 404), ("POST", "/tags", 404)])
def test_other_addresses_are_told_what_there_is(service, method, path, status):
    got, answer = ask(service, method=method, path=path)
    assert got == status and "POST /tag" in answer["error"]["message"]


def test_a_body_without_a_length_is_cut_off_where_it_gets_too_large(service):
    with socket.create_connection(urlsplit(service).netloc.split(":"), timeout=20) as raw:
        raw.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(3):
            raw.sendall(b"fa0\r\n" + b" " * 4000 + b"\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_body_that_never_ends_is_given_up(service):
    with socket.create_connection(urlsplit(service).netloc.split(":"), timeout=20) as raw:
        raw.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        assert raw.recv(4096).startswith(b"HTTP/1.1 408")


def test_a_model_out_of_time_is_replaced_by_the_constant_and_said_to_be_late():
    gate = threading.Event()
    with served(CountsLetters(gate=gate), fallback=77, timeout_s=0.1) as url:
        status, answer = ask(url, {"prompt": "a"})
        assert status == 200 and answer["late"] is True
        assert (answer["predicted_tokens"], answer["p90_tokens"], answer["source"]) == (77, None, "constant")
        gate.set()
        assert waited_for(lambda: ask(url, {"prompt": "a"})[1]["late"] is False)
        assert samples(url)['astrolabe_tag_requests_total{outcome="late"}'] >= 1


def test_late_answers_leave_no_complaint_of_asyncio(caplog):
    gate = threading.Event()
    with served(CountsLetters(gate=gate), timeout_s=0.05) as url:
        assert all(ask(url, {"prompts": ["a", "b"]})[1]["late"] for _ in range(3))
        gate.set()
        gc.collect()
    gc.collect()
    assert not [record for record in caplog.records if "never retrieved" in record.getMessage()]


def test_a_full_queue_is_503_with_the_time_to_come_back():
    gate = threading.Event()
    model = CountsLetters(gate=gate)
    with served(model, max_waiting=2, timeout_s=5) as url:
        blocked = threading.Thread(target=ask, args=(url, {"prompt": "a"}))
        blocked.start()
        assert waited_for(lambda: model.batches)
        status, answer = ask(url, {"prompts": ["b", "c", "d"]})
        assert status == 503 and answer["error"]["code"] == "overloaded"
        gate.set()
        blocked.join(10)
        assert ask(url, {"prompts": ["b", "c"]})[0] == 200  # what was refused has left the queue
        assert not any("d" in batch for batch in model.batches)


def test_a_serving_model_that_the_length_model_does_not_know_is_refused():
    model = CountsLetters()
    model.models_ = ["llama", "qwen"]
    with served(model) as url:
        status, answer = ask(url, {"prompt": "a", "model": "gpt"})
        assert (status, answer["error"]["code"]) == (400, "unknown_model")
        assert "llama, qwen" in answer["error"]["message"]
        assert ask(url, {"prompt": "a", "model": "qwen"})[0] == 200


def test_health_and_metrics_tell_what_happened():
    with served(CountsLetters()) as url:
        assert ask(url, {"prompts": ["a", "b"]})[0] == 200
        ask(url, b"{")
        status, health = ask(url, method="GET", path="/healthz")
        assert status == 200 and health["status"] == "ok" and health["model_hash"] == "abc"
        found = samples(url)
        assert found['astrolabe_tag_requests_total{outcome="ok"}'] == 1
        assert found['astrolabe_tag_requests_total{outcome="not_json"}'] == 1
        assert found["astrolabe_tag_batch_prompts_sum"] == 2
        assert found["astrolabe_tag_waiting_prompts"] == 0
        assert found['astrolabe_tag_model_info{model_hash="abc"}'] == 1


def test_a_model_that_is_stuck_makes_the_service_unhealthy(monkeypatch):
    monkeypatch.setattr("astrolabe_lab.length.service.STUCK_S", 0.05)
    gate = threading.Event()
    with served(CountsLetters(gate=gate), timeout_s=0.05) as url:
        ask(url, {"prompt": "a"})
        assert waited_for(lambda: ask(url, method="GET", path="/healthz")[0] == 503)
        gate.set()
        assert waited_for(lambda: ask(url, method="GET", path="/healthz")[0] == 200)


# --- many at once, and clients that leave -------------------------------------------------------------------


def test_two_hundred_clients_at_once_get_their_own_answers_in_batches():
    model = CountsLetters(pause_s=0.005)

    async def all_of_them(url):
        async with RemoteTagger(url, deadline_s=30, fallback=9999) as tagger:
            return await asyncio.gather(*(tagger.tag("x" * n) for n in range(200))), tagger.counts

    with served(model, timeout_s=30) as url:
        tags, counts = asyncio.run(all_of_them(url))
    assert [tag.predicted_tokens for tag in tags] == [10 + n for n in range(200)]
    assert counts == {"model": 200}
    assert 1 < max(map(len, model.batches)) <= 32


def test_the_loop_answers_while_the_model_works():
    gate = threading.Event()
    model = CountsLetters(gate=gate)
    with served(model, timeout_s=20) as url:
        blocked = threading.Thread(target=ask, args=(url, {"prompt": "a"}))
        blocked.start()
        assert waited_for(lambda: model.batches)
        assert ask(url, method="GET", path="/healthz")[0] == 200
        gate.set()
        blocked.join(10)


def test_a_client_that_left_is_counted_and_its_prompt_not_computed():
    gate = threading.Event()
    model = CountsLetters(gate=gate)
    with served(model, timeout_s=20) as url:
        blocked = threading.Thread(target=ask, args=(url, {"prompt": "first"}))
        blocked.start()
        assert waited_for(lambda: model.batches)
        body = json.dumps({"prompt": "gone"}).encode()
        with socket.create_connection(urlsplit(url).netloc.split(":"), timeout=20) as raw:
            raw.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert waited_for(lambda: samples(url)["astrolabe_tag_waiting_prompts"] == 1)
        assert waited_for(lambda: samples(url).get('astrolabe_tag_requests_total{outcome="client_gone"}') == 1)
        gate.set()
        blocked.join(10)
        assert ask(url, {"prompt": "next"})[0] == 200
    assert model.batches == [["first"], ["next"]]


# --- the client against services that are down, slow, lying, or killed ----------------------------------------


@asynccontextmanager
async def lying(answer):
    """The URL of a service whose /tag is the coroutine ``answer(request)``."""
    app = web.Application(client_max_size=2**30)
    app.router.add_post("/tag", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


def tags_from(answer, n=1, pause_s=0.0, **given):
    """The tags that a client gets of a service, and what it counted."""

    async def run():
        options = {"deadline_s": 10, "fallback": 256} | given
        async with lying(answer) as url, RemoteTagger(url, **options) as tagger:
            tags = []
            for _ in range(n):
                tags.append(await tagger.tag("a"))
                await asyncio.sleep(pause_s)
            return tags, tagger.counts

    return asyncio.run(run())


@pytest.mark.parametrize(
    "text, reason",
    [
        ("nonsense", "garbage"),
        ("", "garbage"),
        ("[]", "garbage"),
        ("{}", "garbage"),
        ('{"predicted_tokens": null}', "absurd"),
        ('{"predicted_tokens": "12"}', "absurd"),
        ('{"predicted_tokens": true}', "absurd"),
        ('{"predicted_tokens": -5, "p90_tokens": 10}', "absurd"),
        ('{"predicted_tokens": 0, "p90_tokens": 10}', "absurd"),
        ('{"predicted_tokens": NaN, "p90_tokens": 10}', "absurd"),
        ('{"predicted_tokens": Infinity, "p90_tokens": 10}', "absurd"),
        ('{"predicted_tokens": 5, "p90_tokens": NaN}', "absurd"),
        ('{"predicted_tokens": 20000000, "p90_tokens": 30000000}', "absurd"),
        ('{"predicted_tokens": 1%s}' % ("0" * 4000), "absurd"),
        ('{"predicted_tokens": 1%s}' % ("0" * 5000), "garbage"),
        ('{"predicted_tokens": 5, "x": "%s"}' % ("y" * 70_000), "garbage"),
        ("[" * 60_000, "garbage"),
        ('{"predicted_tokens": 9, "p90_tokens": null, "source": "constant", "late": true}', "late"),
    ],
)
def test_a_lying_service_is_not_believed(text, reason):
    async def answer(request):
        return web.Response(text=text, content_type="application/json")

    assert tags_from(answer) == ([Tag(256, "constant", reason)], {reason: 1})


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=200))
def test_no_answer_whatsoever_raises(raw):
    async def answer(request):
        return web.Response(body=raw)

    tags, counts = tags_from(answer)
    assert 1 <= tags[0].predicted_tokens <= 10**6 and sum(counts.values()) == 1


@pytest.mark.parametrize(
    "status, reason", [(500, "failed"), (302, "failed"), (404, "refused"), (503, "overloaded"), (429, "overloaded")]
)
def test_a_refusal_is_told_from_overload_and_failure(status, reason):
    async def answer(request):
        return web.json_response({"error": {}}, status=status)

    assert tags_from(answer) == ([Tag(256, "constant", reason)], {reason: 1})


def test_requests_that_the_service_refuses_do_not_open_the_breaker():
    async def answer(request):
        return web.json_response({"error": {"code": "unknown_model"}}, status=400)

    tags, counts = tags_from(answer, n=20, breaker=Breaker(failures=2))
    assert counts == {"refused": 20}


def test_an_endless_answer_is_cut_off():
    async def answer(request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 10_000)

    tags, _ = tags_from(answer, deadline_s=20)
    assert tags == [Tag(256, "constant", "garbage")]


def test_a_service_that_drips_costs_the_deadline_and_no_more():
    async def answer(request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.01)

    began_s = time.monotonic()
    tags, _ = tags_from(answer, deadline_s=0.1)
    assert tags == [Tag(256, "constant", "late")] and time.monotonic() - began_s < 5


def test_a_service_that_is_down_gives_the_constant_and_soon_costs_nothing():
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]

    async def run():
        async with RemoteTagger(f"http://127.0.0.1:{port}", deadline_s=1, fallback=256) as tagger:
            tags = [await tagger.tag("a") for _ in range(1000)]
            began_s = time.perf_counter()
            for _ in range(1000):
                await tagger.tag("a")
            return tags, tagger.counts, time.perf_counter() - began_s

    tags, counts, seconds = asyncio.run(run())
    assert {tag.predicted_tokens for tag in tags} == {256}
    assert counts["unreachable"] < 10 and counts["breaker"] > 1900
    assert seconds < 0.5


def test_a_silent_host_costs_the_deadline_only_until_the_breaker_opens():
    with listen("127.0.0.1", 0) as silent:  # takes connections, never answers

        async def run():
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            breaker = Breaker(failures=3, cool_s=30)
            async with RemoteTagger(url, deadline_s=0.05, fallback=256, breaker=breaker) as tagger:
                return [(await tagger.tag("a")).reason for _ in range(100)]

        began_s = time.monotonic()
        assert asyncio.run(run()) == ["late"] * 3 + ["breaker"] * 97
        assert time.monotonic() - began_s < 3


def test_a_service_killed_while_it_answers_is_missed_and_found_again_when_it_is_back():
    asked = 0

    async def answer(request):
        nonlocal asked
        asked += 1
        if asked <= 3:
            response = web.StreamResponse(headers={"Content-Length": "100"})
            await response.prepare(request)
            await response.write(b'{"predicted')
            request.transport.abort()
            return response
        return web.json_response({"predicted_tokens": 33, "p90_tokens": 44})

    tags, counts = tags_from(answer, n=6, pause_s=0.02, breaker=Breaker(failures=3, cool_s=0.001))
    assert [tag.reason for tag in tags[:3]] == ["unreachable"] * 3
    assert tags[-1] == Tag(33, "model", p90_tokens=44)


def test_the_tag_runs_beside_the_request():
    async def answer(request):
        await asyncio.sleep(0.2)
        return web.json_response({"predicted_tokens": 33, "p90_tokens": 44})

    async def run():
        async with lying(answer) as url, RemoteTagger(url, deadline_s=10, fallback=256) as tagger:
            tagging = asyncio.create_task(tagger.tag("a"))
            steps = 0
            while not tagging.done():
                steps += 1
                await asyncio.sleep(0.001)
            return steps, await tagging

    steps, tag = asyncio.run(run())
    assert steps > 5 and tag.predicted_tokens == 33


def test_a_request_that_is_given_up_says_nothing_about_the_service():
    async def answer(request):
        await asyncio.sleep(0.2)
        return web.json_response({"predicted_tokens": 33, "p90_tokens": 44})

    async def run():
        breaker = Breaker(failures=1, cool_s=30)
        async with lying(answer) as url, RemoteTagger(url, 10, 256, breaker=breaker) as tagger:
            tagging = asyncio.create_task(tagger.tag("a"))
            await asyncio.sleep(0.05)
            tagging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await tagging
            return (await tagger.tag("a")).source, tagger.counts

    assert asyncio.run(run()) == ("model", {"model": 1})


# --- settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["127.0.0.1:8100", "ftp://x", None])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(InputError, match="is not a URL like http"):
        RemoteTagger(url, deadline_s=1, fallback=1)


@pytest.mark.parametrize("name, value", [("max_batch", 0), ("max_waiting", 1.5), ("max_wait_s", -1), ("timeout_s", 0)])
def test_limits_that_are_none_are_refused(name, value):
    with pytest.raises(InputError, match=name):
        Limits(**{name: value})


def test_a_port_that_is_taken_is_named():
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(InputError, match=f"127.0.0.1:{port}.*another --port"):
            listen("127.0.0.1", port)
