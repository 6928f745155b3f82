"""Claims about collecting answers, against a server that follows a script."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
from aiohttp import web

from astrolabe_lab import cli
from astrolabe_lab.errors import InputError
from astrolabe_lab.length import data
from astrolabe_lab.length.collect import Asking, Collected, collect


class Server:
    """Answers ``len(prompt)`` tokens; ``script(server, body)`` may answer instead. Counts what it sees."""

    def __init__(self, script=None):
        self.script, self.asked, self.at_once, self.most, self.headers = script, [], 0, 0, []

    async def _complete(self, request):
        body = await request.json()
        self.headers.append(request.headers)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
            self.asked.append(prompt)
            said = self.script(self, body, prompt) if self.script else None
            if asyncio.iscoroutine(said):
                said = await said
            return said or self.answer(prompt, body)
        finally:
            self.at_once -= 1

    def answer(self, prompt, body):
        tokens, limit = len(prompt), body.get("max_tokens")
        cut = limit is not None and tokens > limit
        return web.json_response(
            {
                "choices": [{"finish_reason": "length" if cut else "stop", "message": {"content": "..."}}],
                "usage": {"prompt_tokens": 3, "completion_tokens": limit if cut else tokens},
            }
        )

    async def _models(self, request):
        return web.json_response({"object": "list", "data": [{"id": "tiny"}]})

    @contextlib.asynccontextmanager
    async def running(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def run(server, prompts, out, **options) -> Collected:
    async def go():
        async with server.running() as url:
            return await collect(prompts, out, Asking(url, **options))

    return asyncio.run(go())


def rows(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


PROMPTS = [f"prompt {'x' * i}" for i in range(12)]


@pytest.fixture
def quick(monkeypatch):
    """Retries without the waits."""
    monkeypatch.setattr("astrolabe_lab.length.collect._FIRST_WAIT_S", 0.001)


@pytest.mark.length
def test_every_prompt_is_answered_once_with_the_length_that_usage_says(tmp_path):
    async def slow(server, body, prompt):
        await asyncio.sleep(0.02)

    server = Server(slow)
    done = run(server, [*PROMPTS, PROMPTS[0], "  "], tmp_path / "a.jsonl", concurrency=3)
    assert sorted(server.asked) == sorted(PROMPTS)
    assert (done.model, done.asked, done.answered, done.cut_off, done.failed) == ("tiny", 12, 12, 0, 0)
    assert 1 < server.most <= 3
    found = data.load(tmp_path / "a.jsonl")
    assert {row.prompt: row.response_tokens for row in found.itertuples()} == {p: len(p) for p in PROMPTS}
    assert set(found["model"]) == {"tiny"} and not found["censored"].any()


def test_answers_end_by_themselves_and_no_seed_is_sent(tmp_path):
    bodies = []
    run(Server(lambda server, body, prompt: bodies.append(body)), PROMPTS[:2], tmp_path / "a.jsonl")
    assert all(set(body) == {"model", "stream", "messages"} for body in bodies)
    assert not any(body["stream"] for body in bodies)


@pytest.mark.length
def test_answers_cut_by_a_limit_are_marked_so(tmp_path):
    done = run(Server(), PROMPTS, tmp_path / "a.jsonl", max_tokens=10)
    found = data.load(tmp_path / "a.jsonl")
    assert done.cut_off == found["censored"].sum() == sum(len(p) > 10 for p in PROMPTS)
    assert found.loc[found["censored"], "response_tokens"].eq(10).all()


@pytest.mark.length
def test_samples_are_asked_apart_and_tell_apart(tmp_path):
    done = run(Server(), PROMPTS[:3], tmp_path / "a.jsonl", samples=2, api="completions", max_tokens=99)
    assert done.answered == 6 and sorted(data.load(tmp_path / "a.jsonl")["sample"]) == [0, 0, 0, 1, 1, 1]


def test_the_key_goes_into_the_header_and_nowhere_else(tmp_path):
    server = Server()
    run(server, PROMPTS[:1], tmp_path / "a.jsonl", api_key="secret")
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert "secret" not in (tmp_path / "a.jsonl").read_text()


def test_passing_failures_are_tried_again(tmp_path, quick):
    seen = Counter()

    def script(server, body, prompt):
        seen[prompt] += 1
        if seen[prompt] <= 2:
            return web.json_response({"error": {"message": "busy"}}, status=(503, 429)[seen[prompt] % 2])

    done = run(Server(script), PROMPTS, tmp_path / "a.jsonl")
    assert done.answered == 12 and done.failed == 0 and set(seen.values()) == {3}


@pytest.mark.length
def test_a_refused_prompt_is_noted_and_the_others_go_on(tmp_path, quick):
    def script(server, body, prompt):
        if prompt == PROMPTS[4]:
            return web.json_response({"error": {"message": "the prompt is too long"}}, status=400)

    server = Server(script)
    done = run(server, PROMPTS, tmp_path / "a.jsonl")
    assert (done.answered, done.failed) == (11, 1) and Counter(server.asked)[PROMPTS[4]] == 1
    assert [row["error"] for row in rows(tmp_path / "a.jsonl") if "error" in row] == [
        "HTTP 400: the prompt is too long"
    ]
    found = data.load(tmp_path / "a.jsonl")
    assert len(found) == 11 and found.attrs["cleaning"]["failed requests"] == 1
    server.script = None  # now it is taken
    again = run(server, PROMPTS, tmp_path / "a.jsonl")
    assert (again.already, again.asked, again.answered) == (11, 1, 1)
    assert len(data.load(tmp_path / "a.jsonl")) == 12


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"choices": [{"finish_reason": "stop"}]}, "lacks choices or usage"),
        ({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}, "lacks choices or usage"),
        (
            {"choices": [{"finish_reason": "abort"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
            "neither a natural end nor a cut",
        ),
    ],
)
def test_an_answer_without_what_a_length_needs_is_no_length(tmp_path, answer, says):
    def script(server, body, prompt):
        if prompt == "odd":
            return web.json_response(answer)

    done = run(Server(script), ["odd", "even"], tmp_path / "a.jsonl")
    assert (done.answered, done.failed) == (1, 1)
    assert says in next(row["error"] for row in rows(tmp_path / "a.jsonl") if "error" in row)


def test_a_server_that_fails_every_request_ends_the_run(tmp_path, quick):
    server = Server(lambda server, body, prompt: web.json_response({"error": "no"}, status=500))
    many = [f"p{i}" for i in range(200)]
    with pytest.raises(RuntimeError, match="10 requests in a row have failed.*run the same again to go on"):
        run(server, many, tmp_path / "a.jsonl", retries=0, concurrency=4)
    assert len(server.asked) < 20


def test_prompts_that_are_refused_hold_up_nobody_now_or_when_the_run_goes_on(tmp_path, quick):
    refused, sound = [f"refused {i}" for i in range(30)], [f"sound {i}" for i in range(10)]

    def script(server, body, prompt):
        if prompt in refused:
            return web.json_response({"error": {"message": "the prompt is too long"}}, status=400)

    out = tmp_path / "a.jsonl"
    done = run(Server(script), refused, out, concurrency=1)
    assert (done.answered, done.failed) == (0, 30)
    again = Server(script)
    done = run(again, refused + sound, out, concurrency=1)
    assert (done.answered, done.failed) == (10, 30)
    assert again.asked == sound + refused  # what failed before is asked last


@pytest.mark.length
def test_prompts_that_break_the_server_are_asked_after_all_others(tmp_path, quick):
    breaking, sound = [f"breaking {i}" for i in range(12)], [f"sound {i}" for i in range(10)]

    def script(server, body, prompt):
        if prompt in breaking:
            return web.json_response({"error": "no"}, status=500)

    out = tmp_path / "a.jsonl"
    for _ in range(2):
        with pytest.raises(RuntimeError, match="10 requests in a row have failed"):
            run(Server(script), breaking + sound, out, retries=0, concurrency=1)
    assert len(data.load(out)) == 10


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refused_key_or_model_ends_the_run_at_once(tmp_path, status):
    server = Server(lambda server, body, prompt: web.json_response({"error": {"message": "no"}}, status=status))
    with pytest.raises(InputError, match=f"refuses model 'other': HTTP {status}: no"):
        run(server, PROMPTS, tmp_path / "a.jsonl", model="other", concurrency=1)
    assert len(server.asked) == 1


def test_nothing_at_the_url_is_said_so(tmp_path):
    with pytest.raises(InputError, match="nothing answers at http://127.0.0.1:9/v1"):
        asyncio.run(collect(PROMPTS, tmp_path / "a.jsonl", Asking("http://127.0.0.1:9")))


def test_a_torn_last_line_is_asked_again(tmp_path):
    out = tmp_path / "a.jsonl"
    run(Server(), PROMPTS, out)
    out.write_bytes(out.read_bytes()[:-20])
    again = run(Server(), PROMPTS, out)
    assert (again.already, again.answered) == (11, 1) and len(rows(out)) == 12


def test_answers_to_other_questions_are_not_mixed(tmp_path):
    out = tmp_path / "a.jsonl"
    run(Server(), PROMPTS, out)
    for other in ({"max_tokens": 5}, {"temperature": 0.5}, {"model": "large"}):
        with pytest.raises(InputError, match="asked for in another way .model=tiny, api=chat"):
            run(Server(), PROMPTS, out, **other)
    (tmp_path / "b.jsonl").write_text("hello\n")
    with pytest.raises(InputError, match="line 1: no line that collect wrote"):
        run(Server(), PROMPTS, tmp_path / "b.jsonl")
    assert (tmp_path / "b.jsonl").read_text() == "hello\n"


def test_two_runs_never_write_to_one_file(tmp_path):
    out = tmp_path / "a.jsonl"

    async def go():
        async with Server().running() as url:
            held = asyncio.Event()

            async def slow(server, body, prompt):
                held.set()
                await asyncio.sleep(1)

            async with Server(slow).running() as other:
                first = asyncio.create_task(collect(PROMPTS[:1], out, Asking(other)))
                await held.wait()
                with pytest.raises(InputError, match="another process is collecting into it"):
                    await collect(PROMPTS, out, Asking(url))
                await first

    asyncio.run(go())
    assert len(rows(out)) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"url": "localhost:8000"}, "is not a URL like http"),
        ({"api": "embeddings"}, "allowed are chat and completions"),
        ({"api": "completions"}, "cuts answers at 16 tokens"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"timeout_s": 0}, "timeout_s=0"),
    ],
)
def test_wrong_ways_to_ask_are_refused(options, says):
    with pytest.raises(InputError, match=says):
        Asking(**{"url": "http://127.0.0.1:1"} | options)


@pytest.fixture
def serving():
    """Starts a Server in a thread; ``serving(server)`` gives its URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    stack = contextlib.AsyncExitStack()

    def start(server):
        return asyncio.run_coroutine_threadsafe(stack.enter_async_context(server.running()), loop).result(20)

    yield start
    asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)


@pytest.mark.length
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_a_run_that_is_ended_goes_on_and_asks_nothing_twice(how, tmp_path, serving):
    async def slow(server, body, prompt):
        await asyncio.sleep(0.05)

    server = Server(slow)
    prompts = [f"prompt number {i}" for i in range(80)]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    words = ["length", "collect", "--url", serving(server), "--prompts", str(tmp_path / "p.jsonl")]
    words += ["--out", str(tmp_path / "a.jsonl"), "--concurrency", "2", "--json"]
    command = [sys.executable, "-m", "astrolabe_lab.cli", *words]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while len(server.asked) < 10 and first.poll() is None:
        time.sleep(0.02)
    os.kill(first.pid, how)
    _, said = first.communicate(timeout=60)
    assert first.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[how]
    assert "Traceback" not in said
    if how != signal.SIGKILL:
        assert "run the same again to go on" in said
    kept = len(rows(tmp_path / "a.jsonl"))
    assert 5 <= kept < 80
    second = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    record = json.loads(second.stdout)
    assert record["already"] == kept and record["answered"] == 80 - kept
    found = data.load(tmp_path / "a.jsonl")
    assert sorted(found["prompt"]) == sorted(prompts)
    # At most what was under way when it ended was asked a second time.
    assert len(server.asked) <= 80 + 2


@pytest.mark.length
def test_the_command_says_what_came_of_it(tmp_path, serving, capsys):
    url = serving(Server())
    words = ["length", "collect", "--url", url, "--prompts", "sharegpt_like:20", "--out", str(tmp_path / "a.jsonl")]
    assert cli.main([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["model"] == "tiny" and record["answered"] == record["asked"] == 20
    assert cli.main([*words, "--max-tokens", "4"]) == 2
    assert "give another file" in capsys.readouterr().err
