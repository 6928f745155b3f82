"""``astrolabe tag`` as a process: its one line, its answers, its end; and a router that asks it."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import pytest
from taggers import CountsLetters, served

from astrolabe_lab import length, policies
from astrolabe_lab.cli import main
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.length.remote import RemoteTagger
from astrolabe_lab.serve.instance import Instance
from astrolabe_lab.serve.lengths import lengths_of
from astrolabe_lab.serve.openai_api import Asked
from astrolabe_lab.serve.prompt_tokens import ByBytes
from astrolabe_lab.serve.router import Router
from astrolabe_lab.sim.config import EngineConfig


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    drawn = sharegpt_like.generate(300, seed=0)
    model = length.make("prompt_ridge:vocabulary=100,alpha=0.3").fit(drawn["prompt"].tolist(), drawn["output_tokens"])
    return model.save(tmp_path_factory.mktemp("model") / "length")


@contextmanager
def tagging(saved, *words):
    """(the process, its ready line) of ``astrolabe tag`` at a free port; killed at the end if it still runs."""
    command = [sys.executable, "-m", "astrolabe_lab.cli", "tag", "--model", str(saved), "--port", "0", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process, json.loads(process.stdout.readline() or json.dumps({"error": process.stderr.read()}))
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ask(url, prompt):
    request = urllib.request.Request(url + "/tag", json.dumps({"prompt": prompt}).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def test_it_says_where_it_listens_answers_as_the_model_does_and_ends_well(saved):
    model = length.load(saved)
    with tagging(saved) as (process, ready):
        assert ready["url"].startswith("http://127.0.0.1:") and ready["role"] == "tagger"
        assert ready["kind"] == "prompt_ridge" and ready["constant"] == round(model.median_tokens_)
        answer = ask(ready["url"], "List 8 facts about tea.")
        p50, p90 = model.predict_quantiles(["List 8 facts about tea."])[0]
        assert (answer["predicted_tokens"], answer["p90_tokens"]) == (round(p50), round(p90))
        assert answer["model_hash"] == ready["model_hash"]
        process.send_signal(signal.SIGTERM)
        rest, said = process.communicate(timeout=30)
        assert process.returncode == 0 and rest == "" and "the tagger has ended" in said


def test_a_request_in_progress_is_answered_before_it_ends(saved):
    # half a body is sent, then SIGTERM comes, then the other half
    with tagging(saved, "--timeout-ms", "5000") as (process, ready):
        host, port = ready["url"].removeprefix("http://").split(":")
        body = b'{"prompt": "hello"}'
        with socket.create_connection((host, int(port)), timeout=30) as raw:
            head = b"POST /tag HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            raw.sendall(head % len(body) + body[:5])
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            raw.sendall(body[5:])
            assert raw.recv(4096).startswith(b"HTTP/1.1 200")
        assert process.wait(30) == 0


def test_killed_it_leaves_the_router_with_the_constant(saved):
    async def tags(process, url):
        async with RemoteTagger(url, deadline_s=10, fallback=77) as tagger:
            first = await tagger.tag("hello")
            process.kill()
            process.wait(30)
            return first, await tagger.tag("hello")

    with tagging(saved) as (process, ready):
        alive, dead = asyncio.run(tags(process, ready["url"]))
    assert alive.source == "model"
    assert (dead.predicted_tokens, dead.source, dead.reason) == (77, "constant", "unreachable")


@pytest.mark.parametrize(
    "words, said",
    [
        (["--model", "nowhere"], "nowhere is no folder"),
        (["--model", "SAVED", "--port", "70000"], "--port 70000"),
        (["--model", "SAVED", "--host", "256.0.0.1"], "cannot listen at 256.0.0.1"),
        (["--model", "nowhere", "--constant", "0"], "--constant 0 should be from 1 to 1,000,000"),
        (["--model", "nowhere", "--max-batch", "0"], "--max-batch 0 should be 1 or more"),
        (["--model", "nowhere", "--max-wait-ms", "-1"], "--max-wait-ms -1 should be from 0 to 60,000"),
        (["--model", "nowhere", "--timeout-ms", "nan"], "--timeout-ms nan should be from 1 to 60,000"),
        (["--model", "nowhere", "--threads", "0"], "--threads 0 should be 1 or more"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(capsys, saved, words, said):
    words = [str(saved) if word == "SAVED" else word for word in words]
    assert main(["tag", "--port", "0", *words, "--json"]) == 2
    assert said in json.loads(capsys.readouterr().out)["error"]


# --- a router's lengths -------------------------------------------------------------------------------------


def told(spec, *asked):
    async def run():
        lengths = lengths_of(spec)
        try:
            return [await lengths(one) for one in asked]
        finally:
            await lengths.close()

    return asyncio.run(run())


def request(text="four", **more):
    return Asked(body={}, path="/v1/completions", model="m", stream=False, text=text, **more)


def test_a_router_takes_lengths_from_the_service():
    with served(CountsLetters()) as url:
        spec = f"tagger:{url},deadline_ms=5000,constant=99"
        known = request(), request(predicted_tokens=5), request(max_tokens=12)
        answers = told(spec, *known, request("", prompt_ids=7), request("crash"))
    assert answers[:3] == [(14, "tagger"), (5, "client"), (12, "tagger")]
    assert answers[3:] == [(99, "constant: token ids"), (99, "constant: failed")]


def test_a_router_takes_lengths_from_a_model_in_its_own_process(saved):
    model = length.load(saved)
    ((tokens, source),) = told(f"tagger:{saved},deadline_ms=20000", request("List 8 facts about tea."))
    assert (tokens, source) == (round(model.predict(["List 8 facts about tea."])[0]), "tagger")


def test_a_serving_model_that_is_unknown_gets_the_constant(tmp_path):
    named = length.make("constant").fit(["a", "b"], [10, 30], models=["m", "n"])
    spec = f"tagger:{named.save(tmp_path / 'named')},constant=5,deadline_ms=20000"
    other = Asked(body={}, path="/v1/completions", model="other", stream=False, text="a")
    assert told(spec, request(), other) == [(10, "tagger"), (5, "constant: refused")]


def test_a_router_whose_models_are_all_unknown_to_its_length_model_does_not_start(tmp_path):
    named = length.make("constant").fit(["a", "b"], [10, 30], models=["m", "n"])
    lengths = lengths_of(f"tagger:{named.save(tmp_path / 'named')}")
    engines = [Instance(0, "http://127.0.0.1:9", EngineConfig())]

    def router(models):
        return Router(engines, policies.parse("random"), "random", models, ByBytes(), lengths)

    assert router(["m"]) and router(["other", "n"])
    with pytest.raises(InputError, match="knows the serving models m, n, and the router answers for other"):
        router(["other"])
    asyncio.run(lengths.close())


def test_a_model_in_a_routers_process_is_prepared_as_that_of_the_service_is(saved, monkeypatch):
    prepared = []
    monkeypatch.setattr("astrolabe_lab.serve.lengths.prepare", lambda model, **how: prepared.append((model.kind, how)))
    asyncio.run(lengths_of(f"tagger:{saved}").close())
    assert prepared == [("prompt_ridge", {"max_batch": 32})]


@pytest.mark.parametrize(
    "spec, said",
    [
        ("oracle", "unknown to a router"),
        ("tagger:", "unknown to a router"),
        ("constant:0", "whole number of tokens"),
        ("constant:0000000000019999999999", "whole number of tokens"),
        ("constant:12,constant=3", "unknown to a router"),
        ("tagger:http://x,konstant=3", "konstant=3"),
        ("tagger:http://x,constant=none", "whole number"),
        ("tagger:http://x,deadline_ms=soon", "milliseconds"),
        ("tagger:http://x,deadline_ms=0", "deadline_ms should be a number of milliseconds above 0"),
        ("tagger:http://x,deadline_ms=", "deadline_ms should be a number of milliseconds above 0"),
        ("tagger:nowhere", "is no folder"),
    ],
)
def test_a_spec_that_is_none_is_refused(spec, said):
    with pytest.raises(InputError, match=said):
        lengths_of(spec)


def test_the_command_line_stays_light():
    code = "import sys; from astrolabe_lab.cli import build_parser; build_parser(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ).stdout.split()
    assert not {"fastapi", "uvicorn", "aiohttp", "torch", "pandas", "scipy"} & set(loaded)
