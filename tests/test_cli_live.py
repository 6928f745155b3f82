"""``astrolabe route`` and ``astrolabe sidecar`` as processes, over scripted engines and published statuses."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import aiohttp
from published_engines import publish
from scripted_engine import scripted_engines

from astrolabe_lab.cli import _parse, live, main
from astrolabe_lab.cost import preset
from astrolabe_lab.engines.cluster_file import write_cluster
from astrolabe_lab.serve import journal
from astrolabe_lab.serve.limits import Limits
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.status.published import StatusWriter

PRESET = preset("llama2-7b-a30")
CONFIG = EngineConfig.from_dict(PRESET.engine)


@contextmanager
def command(*words):
    """(what it announces, its process) of an astrolabe command; it must end with code 0 on SIGTERM."""
    process = subprocess.Popen([sys.executable, "-m", "astrolabe_lab.cli", *words], stdout=subprocess.PIPE, text=True)
    try:
        yield json.loads(process.stdout.readline()), process
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_router_asks_the_sidecars_of_its_cluster_and_goes_where_they_say(tmp_path):
    statuses = [tmp_path / "status-0", tmp_path / "status-1"]
    publish(StatusWriter(statuses[0]), time.monotonic() + 0.5, [(j, 400, 5, 400) for j in range(20)])

    async def ask(session, url, j):
        body = {"model": "m", "prompt": "hello", "max_tokens": 4, "stream": True}
        async with session.post(url + "/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
            return answer.headers["X-Astrolabe-Instance"], float(answer.headers["X-Astrolabe-Predicted-E2E-S"])

    async def story():
        async with scripted_engines(2) as engines:
            places = [
                {"url": e.url, "role": "engine", "status": str(s), "log": ""}
                for e, s in zip(engines, statuses, strict=True)
            ]
            write_cluster(tmp_path, places, CONFIG, PRESET.cost, 1.0, "m", "", "emulated")
            with ExitStack() as stack:
                urls = []
                for i in range(2):
                    started = ("sidecar", "--cluster", str(tmp_path), "--instance", str(i))
                    told, _ = await asyncio.to_thread(stack.enter_context, command(*started))
                    urls.append(told["url"])
                words = ["route", "--cluster", str(tmp_path), "--policy", "astrolabe:k=2", "--journal"]
                words += [str(tmp_path / "j"), "--sidecars", ",".join(urls), "--deadline-ms", "20000"]
                told, _ = await asyncio.to_thread(stack.enter_context, command(*words))
                async with aiohttp.ClientSession() as session:
                    for writer in (StatusWriter(s) for s in statuses):  # both idle: compiles, in its time
                        publish(writer, time.monotonic())
                    await ask(session, told["url"], 0)
                    publish(StatusWriter(statuses[0]), time.monotonic(), [(j, 400, 5, 400) for j in range(20)])
                    found = await ask(session, told["url"], 1)
                await asyncio.to_thread(stack.close)
            return found

    instance, predicted_e2e_s = asyncio.run(asyncio.wait_for(story(), 400))
    assert instance == "1" and predicted_e2e_s > 0  # the other is busy
    decisions = [e for e in journal.read(tmp_path / "j") if e["event"] == "decision"]
    assert decisions[-1]["late"] == 0 and len(decisions[-1]["predicted_e2e_s"]) == 2


def test_wrong_words_are_answered_with_what_is_allowed(tmp_path, capsys):
    places = [{"url": "http://127.0.0.1:9", "role": "engine", "status": str(tmp_path / "s"), "log": ""}]
    write_cluster(tmp_path, places, CONFIG, PRESET.cost, 1.0, "m", "", "emulated")
    cluster, pools = ["--cluster", str(tmp_path)], ["--prefill", "http://127.0.0.1:8", "--decode", "http://127.0.0.1:9"]
    for words, told in (
        (["sidecar", *cluster, "--instance", "3"], "engines 0..0"),
        (["route", *cluster, "--sidecars", "http://a,http://b"], "must name 1 URLs"),
        (["route", *cluster, "--sidecars", "http://a", "--deadline-ms", "0"], "--deadline-ms"),
        (["route", *cluster, "--deadline-ms", "20"], "give --sidecars too"),
        (["route", *cluster, "--sidecars", "http://a", "--policy", "astrolabe:foresight=both"], "without foresight"),
        (["route", *cluster, "--sidecars", "http://a", "--cost", "base_s=1"], "--cost does not reach the sidecars"),
        (
            ["route", *cluster, "--sidecars", "http://a", "--constants-from", "C.json"],
            "--constants-from does not reach",
        ),
        (["route", *cluster, "--journal-prompts"], "give --journal FILE too"),
        (["route", *cluster, "--device", "A40"], "--device is of engines at URLs"),
        (["route", "--engines", "http://127.0.0.1:9", "--device", "A40"], "give --calibration FILE too"),
        (["route", *cluster, "--preset", "llama2-7b-a30"], "tells its step cost; --cost key=value,... changes it"),
        (["route", *cluster, "--engine", "max_num_seqs=8"], "--engine is of engines at URLs"),
        (["route", *cluster, "--model", "m"], "--model is of engines at URLs"),
        (["route", *cluster, "--time-scale", "1"], "--time-scale is of engines at URLs"),
        (["route", *cluster, "--time-scale", "nan"], "argument --time-scale: 'nan' is not a number > 0"),
        (["route", *cluster, "--port", "70000"], "argument --port: '70000' is not a whole number from 0"),
        (["route", *cluster, "--seed", "-1"], "argument --seed: '-1' is not a whole number from 0 up"),
        (["route", *cluster, "--tries", "0"], "argument --tries: '0' is not a whole number from 1 up"),
        (["route", *cluster, "--max-in-flight", "many"], "argument --max-in-flight: 'many' is not a whole number"),
        (["route", *cluster, "--first-byte-s", "0"], "argument --first-byte-s: '0' is not a number > 0"),
        (["route", *pools, "--cost", "base_s=1"], "the policies of pools price with constants"),
        (["sidecar", *cluster, "--instance", "0", "--cost", "base_s=1"], "leave --preset and --cost out"),
        (
            ["route", *pools[:3], "http://127.0.0.1:7,http://127.0.0.1:8/", "--constants-from", "paper"],
            "--prefill and --decode together ['http://127.0.0.1:8', 'http://127.0.0.1:7', 'http://127.0.0.1:8']: names "
            "http://127.0.0.1:8 more than once",
        ),
        (["route", *cluster, "--poll-s", "1"], "--poll-s is of prefill and decode pools"),
        (["launch", "--instances", "1", "--hand-off", "base_s=1"], "--hand-off is of emulated pools (--pools P+D)"),
        (["launch", "--pools", "1+1", "--world", "hardware", "--hand-off", "base_s=1"], "--hand-off is of emulated"),
        (["launch", "--pools", "1+1", "--hand-off", "polls=end"], "allowed: base_s, per_block_s, expiry_s, fail_share"),
        (["launch", "--pools", "1+1", "--hand-off", "expiry_s=soon"], "hand-off: expiry_s=soon must be a number"),
        (["launch", "--pools", "1+1", "--hand-off", "fail_share=2"], "fail_share=2.0 must be from 0 to 1"),
        (["launch", "--instances", "1", "--world", "hardware", "--flags", "'unclosed"], '--flags "\'unclosed" are no'),
        (
            ["route", "--engines", "http://127.0.0.1:9", "--policy", "astrolabe"],
            "no Predictor: give the router a preset",
        ),
    ):
        assert main(words) == 2
        assert told in capsys.readouterr().err


def test_a_preset_gives_the_step_cost_that_a_cluster_does_not_tell(tmp_path, capsys):
    places = [{"url": "http://127.0.0.1:9", "role": "engine", "status": str(tmp_path / "s"), "log": ""}]
    write_cluster(tmp_path, places, CONFIG, None, 1.0, "m", "", "hardware")
    cluster = ["--cluster", str(tmp_path)]

    def cost(*words):
        return live._router(_parse(["route", *cluster, *words])).instances[0].predictor.cost

    assert cost("--preset", "llama2-7b-a30") == PRESET.cost
    assert cost("--cost", "base_s=0.5").to_dict()["decode"]["base_s"] == 0.5
    assert main(["route", *cluster, "--preset", "llama2-7b-a30", "--calibration", "C.json"]) == 2
    assert "give one of them" in capsys.readouterr().err
    assert main(["sidecar", *cluster, "--instance", "0"]) == 2
    assert "has no step cost to predict with: give --cost, or --preset" in capsys.readouterr().err


def test_a_router_begins_its_journal_when_it_listens_and_lets_no_other_in(tmp_path):
    """The first ends, the next goes on in the same journal."""
    kept = tmp_path / "j"
    words = ("route", "--engines", "http://127.0.0.1:9", "--policy", "round_robin", "--journal", str(kept))
    pools = ("route", "--prefill", "http://127.0.0.1:8", "--decode", "http://127.0.0.1:9", "--constants-from", "paper")

    def refused(*words):
        done = subprocess.run([sys.executable, "-m", "astrolabe_lab.cli", *words], capture_output=True, text=True)
        assert done.returncode == 2
        return done.stderr

    with socket.create_server(("127.0.0.1", 0)) as taken:
        for router in (words, (*pools, "--policy", "random", "--journal", str(kept))):
            assert "cannot listen on" in refused(*router, "--port", str(taken.getsockname()[1]))
    assert not kept.read_bytes()
    with command(*words):
        assert "is being written by another router: give each its own" in refused(*words)
    with command(*words):
        pass
    assert [e["event"] for e in journal.read(kept)] == ["router", "router"]
    assert "journal '' cannot be written" in refused(*words[:-1], "")


def test_a_router_is_bounded_as_its_options_say(tmp_path):
    words = ["route", "--engines", "http://127.0.0.1:9", "--policy", "round_robin"]
    assert live._router(_parse(words)).limits == Limits()
    bounded = live._router(
        _parse([*words, "--max-in-flight", "7", "--first-byte-s", "1.5", "--whole-answer-s", "9", "--tries", "1"])
    )
    assert bounded.limits == Limits(in_flight=7, first_byte_s=1.5, whole_answer_s=9.0, tries=1)
