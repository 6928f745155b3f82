"""The Predictor sidecar answers what the Predictor says; a router that asks sidecars survives them."""

import asyncio
import threading
import time
from contextlib import asynccontextmanager, contextmanager

import pytest
import uvicorn
from fastapi.testclient import TestClient
from published_engines import publish
from scripted_engine import scripted_engines
from test_router import ask, outcomes, routed

from astrolabe_lab.cost import StepCost
from astrolabe_lab.predictor import Predictor
from astrolabe_lab.request import Request
from astrolabe_lab.serve import journal
from astrolabe_lab.serve.instance import Instance
from astrolabe_lab.serve.remote import RemotePredictors
from astrolabe_lab.serve.sidecar import application
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.status.published import StatusReader, StatusWriter

CONFIG, COST = EngineConfig(), StepCost.parse("base_s=0.02,per_kv_token_s=1e-6")


def instance_at(path):
    return Instance(0, "http://127.0.0.1:9", EngineConfig(), Predictor(CONFIG, COST), path)


def test_a_sidecar_answers_what_the_predictor_says_of_the_published_status(tmp_path):
    path = tmp_path / "status"
    publish(StatusWriter(path), time.monotonic(), [(1, 100, 5, 200), (2, 40, 9, 60)])
    client = TestClient(application(instance_at(path)))
    client.post("/predict", json={"prompt_tokens": 64, "predicted_tokens": 128})  # compiles, in its time
    publish(StatusWriter(path), time.monotonic(), [(1, 100, 5, 200), (2, 40, 9, 60)])
    answer = client.post("/predict", json={"prompt_tokens": 64, "predicted_tokens": 128}).json()
    status = StatusReader(path).read()
    now_s = time.monotonic()
    own = Predictor(CONFIG, COST).predict(status, Request(-1, now_s, 64, 128), now_s=now_s)
    assert answer["fits"]
    assert answer["e2e_s"] == pytest.approx(own.e2e_s, rel=0.02)  # asked at another moment of the step
    assert answer["ttft_s"] == pytest.approx(own.ttft_s, abs=0.03)
    assert client.get("/status").json()["requests"][0]["rid"] == 1
    assert client.get("/healthz").json()["ok"]
    assert "astrolabe_predictions_total" in client.get("/metrics").text


def test_dispatches_that_the_status_shows_already_are_not_counted_twice(tmp_path):
    path = tmp_path / "status"
    publish(StatusWriter(path), time.monotonic(), [(1, 2000, 5, 400)])
    client = TestClient(application(instance_at(path)))
    question = {"prompt_tokens": 64, "predicted_tokens": 128, "metric": "e2e_s"}
    sent = {"rid": 1, "age_s": 0.5, "prompt_tokens": 2000, "predicted_tokens": 400}
    alone = client.post("/predict", json=question).json()["e2e_s"]
    shown = client.post("/predict", json=question | {"dispatched": [sent]}).json()["e2e_s"]
    unseen = client.post("/predict", json=question | {"dispatched": [sent | {"rid": 7}]}).json()["e2e_s"]
    assert shown == pytest.approx(alone, rel=0.01)
    assert unseen > alone * 1.01


def test_an_engine_that_publishes_nothing_is_a_503_not_a_guess(tmp_path):
    client = TestClient(application(instance_at(tmp_path / "nothing")))
    assert client.post("/predict", json={"prompt_tokens": 1, "predicted_tokens": 1}).status_code == 503
    assert client.get("/status").status_code == 503
    assert client.get("/healthz").status_code == 503


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"prompt_tokens": 0, "predicted_tokens": 1}, "prompt_tokens"),
        ({"prompt_tokens": "7", "predicted_tokens": 1}, "prompt_tokens"),
        ({"prompt_tokens": 1}, "predicted_tokens"),
        ({"prompt_tokens": 1, "predicted_tokens": 1, "metric": "speed"}, "metric"),
        ({"prompt_tokens": 1, "predicted_tokens": 1, "version": 2}, "version"),
        ({"prompt_tokens": 1, "predicted_tokens": 1, "prompt": 3}, "prompt"),
    ],
)
def test_a_bad_question_names_its_field(tmp_path, body, names):
    path = tmp_path / "status"
    publish(StatusWriter(path), time.monotonic())
    answer = TestClient(application(instance_at(path))).post("/predict", json=body)
    assert answer.status_code in (400, 422)
    assert names in answer.json()["error"]["message"]


@contextmanager
def served(app):
    """The application on a port of its own, in a thread."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


async def answering(reader, writer, payload, after_s):
    """An HTTP server by hand: any answer, at any time."""
    await reader.readuntil(b"\r\n\r\n")
    await asyncio.sleep(after_s)
    head = ["HTTP/1.1 200 OK", "Content-Type: application/json", "Connection: close", f"Content-Length: {len(payload)}"]
    writer.write("\r\n".join([*head, "", ""]).encode() + payload)
    await writer.drain()
    writer.close()


@asynccontextmanager
async def lying(payload, after_s=0.0):
    server = await asyncio.start_server(lambda r, w: answering(r, w, payload, after_s), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.mark.parametrize(
    ("payload", "after_s", "wrong"),
    [
        (b'{"fits": true, "e2e_s": -5, "ttft_s": 1, "tpot_s": 1}', 0.0, True),
        (b'{"fits": true, "e2e_s": NaN, "ttft_s": 1, "tpot_s": 1}', 0.0, True),
        (b'["no"]', 0.0, True),
        (b'{"fits": true, "e2e_s": 0.001', 0.0, False),
        (b'{"fits": true, "e2e_s": 0.001, "ttft_s": 0.001, "tpot_s": 0.001}', 5.0, False),
    ],
)
def test_a_sidecar_that_is_slow_or_lies_loses_to_one_that_answers(tmp_path, payload, after_s, wrong):
    path = tmp_path / "status"
    publish(StatusWriter(path), time.monotonic())

    async def story(good):
        async with scripted_engines(2) as engines, lying(payload, after_s) as bad:
            remote = RemotePredictors({0: bad, 1: good}, 1.0, time.monotonic)
            async with routed(engines, tmp_path / "j", "astrolabe:k=2", ask=remote) as (router, session, url):
                for _ in range(3):
                    status, _, headers = await ask(session, url)
                    assert status == 200
                    assert headers["X-Astrolabe-Instance"] == "1"
                assert router.counters.late_predictions == 3
                assert remote.wrong == (3 if wrong else 0)

    with served(application(instance_at(path))) as good:
        asyncio.run(asyncio.wait_for(story(good), 60))
    assert len(outcomes(tmp_path / "j")["ok"]) == 3


def test_with_all_sidecars_down_requests_still_find_an_engine(tmp_path):
    async def story():
        async with scripted_engines(2) as engines:
            remote = RemotePredictors({0: "http://127.0.0.1:9", 1: "http://127.0.0.1:9"}, 0.5, time.monotonic)
            async with routed(engines, tmp_path / "j", "astrolabe:k=2", ask=remote) as (router, session, url):
                answers = await asyncio.gather(*(ask(session, url) for _ in range(20)))
                assert {status for status, _, _ in answers} == {200}
                assert {headers["X-Astrolabe-Instance"] for _, _, headers in answers} == {"0", "1"}

    asyncio.run(asyncio.wait_for(story(), 60))
    assert next(e for e in journal.read(tmp_path / "j") if e["event"] == "decision")["late"] == 2
