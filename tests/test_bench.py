"""The load generator: one row a request, on schedule, and honest about itself."""

import asyncio
import json
import math
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scripted_engine import scripted_engines
from test_router import MODEL, routed

from astrolabe_lab import bench, cli
from astrolabe_lab.bench import engines
from astrolabe_lab.bench.host import HostPace
from astrolabe_lab.bench.kept import Kept
from astrolabe_lab.engines.pace import PaceWriter
from astrolabe_lab.errors import InputError
from astrolabe_lab.measure.slo import SLO
from astrolabe_lab.serve.limits import Limits

PATIENT = {"limits": Limits(drain_s=1.0)}  # a router that gives up after a second judges the machine


def trace_of(n, gap_s, output=5):
    return pd.DataFrame(
        {
            "rid": range(n),
            "arrived_s": np.arange(n) * gap_s,
            "prompt_tokens": 10,
            "output_tokens": output,
            "predicted_tokens": 9,
        }
    )


def drive(tmp_path, trace, load, script="ok", **options):
    async def story():
        async with (
            scripted_engines(2, **options) as engines,
            routed(engines, tmp_path / "j", **PATIENT) as (router, _, url),
        ):
            for engine in engines:
                engine.script = script
            frame = await bench.drive(url, trace, load)
            return frame, [body for engine in engines for body in engine.seen]

    return asyncio.run(asyncio.wait_for(story(), 60))


def test_every_request_has_one_row_and_leaves_on_schedule(tmp_path):
    trace = trace_of(40, 0.02)
    frame, seen = drive(tmp_path, trace, bench.Load(MODEL))
    assert list(frame["rid"]) == list(range(40))
    assert (frame["status"] == "ok").all()
    assert (frame["generated_tokens"] == 5).all()
    assert np.allclose(frame["arrived_s"], trace["arrived_s"])
    assert (frame["send_late_s"] >= 0).all()
    assert (frame["e2e_s"] >= frame["ttft_s"]).all()
    assert (frame["ttft_s"] >= frame["ttft_from_send_s"]).all()
    assert set(frame["instance"]) == {0, 1}
    assert all(body["min_tokens"] == body["max_tokens"] == 5 and body["ignore_eos"] for body in seen)
    assert all(len(body["prompt"]) == 10 for body in seen)


def test_gaps_between_tokens_are_pooled_over_all_requests(tmp_path):
    frame, _ = drive(tmp_path, trace_of(6, 0.0), bench.Load(MODEL), token_s=0.02)
    told, spans_s = frame.attrs["itl"], frame["finished_s"] - frame["first_token_s"]
    # Tokens that arrive together have no gap between them, and the next one is longer: their sum stays.
    assert 0.005 < told["mean"] <= spans_s.sum() / (6 * 4) + 1e-4
    assert 0 <= told["p50"] <= told["p90"] <= told["p99"] <= spans_s.max()


def test_the_same_seed_makes_the_same_prompts_and_another_seed_others(tmp_path):
    def prompts(seed, folder):
        (tmp_path / folder).mkdir()
        _, seen = drive(tmp_path / folder, trace_of(6, 0.0), bench.Load(MODEL, seed=seed))
        return sorted(tuple(body["prompt"]) for body in seen)

    first = prompts(1, "a")
    assert prompts(1, "b") == first
    assert len(set(first)) == 6
    assert prompts(2, "c") != first


def test_without_exact_lengths_nothing_that_the_router_reads_tells_the_true_length(tmp_path):
    _, seen = drive(tmp_path, trace_of(3, 0.0, output=777), bench.Load(MODEL, exact=False, time_scale=1.0))
    for body in seen:
        assert body["max_tokens"] == 4096 - 10
        assert body["vllm_xargs"]["output_tokens"] == 777
        assert "777" not in json.dumps({k: v for k, v in body.items() if k not in ("vllm_xargs", "prompt")})


def test_what_engines_count_of_prompts_is_compared_with_the_trace(tmp_path):
    trace = trace_of(4, 0.0).assign(prompt=list("abcd"))  # of 10 tokens, the trace says; the engine counts 7
    frame, _ = drive(tmp_path, trace, bench.Load(MODEL, text=True))
    told = frame.attrs["validity"]
    assert frame["counted_prompt_tokens"].tolist() == [7] * 4 and frame["prompt_tokens"].tolist() == [10] * 4
    assert told["valid"] and told["wrong_prompts"] == 4
    assert "in 4 of 4 requests, -30.0% in sum" in told["notes"][0]
    wrong = bench.validity(frame, bench.Load(MODEL))  # as if ids had been sent
    assert not wrong["valid"] and "4 prompts had another number of tokens" in wrong["why"][0]
    (tmp_path / "ids").mkdir()
    frame, _ = drive(tmp_path / "ids", trace, bench.Load(MODEL))
    assert frame.attrs["validity"]["wrong_prompts"] == 0 and frame.attrs["validity"]["notes"] == []


def test_a_closed_loop_never_has_more_than_its_concurrency_under_way(tmp_path):
    frame, _ = drive(tmp_path, trace_of(30, 0.0), bench.Load(MODEL, concurrency=3), first_s=0.02)
    starts, ends = frame["sent_s"].to_numpy(), frame["finished_s"].to_numpy()
    assert max((starts <= t).sum() - (ends <= t).sum() for t in starts) <= 3
    assert (frame["status"] == "ok").all()


def test_what_fails_has_its_row_and_its_reason(tmp_path):
    frame, _ = drive(tmp_path, trace_of(4, 0.0), bench.Load(MODEL), script="http:400")
    assert (frame["status"] == "rejected").all()
    assert frame["reason"].str.contains("HTTP 400").all()
    assert frame["ttft_s"].isna().all()


@pytest.mark.parametrize(("script", "said"), [("late-error", "EngineDeadError"), ("cut", "ended before its answer")])
def test_an_engine_that_dies_in_mid_answer_has_not_answered(tmp_path, script, said):
    frame, _ = drive(tmp_path, trace_of(4, 0.0), bench.Load(MODEL, exact=False), script=script)
    assert (frame["status"] == "failed").all()
    assert frame["reason"].str.contains(said).all()
    assert frame["e2e_s"].isna().all()


def test_an_engine_that_ends_its_error_properly_has_not_answered_a_bench_without_a_router_either(tmp_path):
    async def story():
        async with scripted_engines(1) as (engine,):
            engine.script = "error"
            return await bench.drive(engine.url, trace_of(2, 0.0), bench.Load(MODEL, exact=False))

    assert (asyncio.run(story())["status"] == "failed").all()


def test_a_generator_that_is_late_says_that_its_run_is_invalid(tmp_path):
    frame, _ = drive(tmp_path, trace_of(10, 0.0), bench.Load(MODEL, ttft_slo_s=1e-9))
    assert not frame.attrs["validity"]["valid"]
    assert "left late" in frame.attrs["validity"]["why"][0]


def test_a_server_that_is_not_there_and_a_model_that_is_not_served_are_named(tmp_path):
    with pytest.raises(InputError, match=r"http://127.0.0.1:9.*is it up"):
        bench.run("http://127.0.0.1:9", trace_of(1, 0.0), bench.Load(MODEL))
    with pytest.raises(InputError, match="'other' is not served"):
        drive(tmp_path, trace_of(1, 0.0), bench.Load("other"))


def test_a_run_that_is_broken_off_goes_on_with_what_is_missing(tmp_path):
    trace, keep = trace_of(30, 0.02), tmp_path / "rows.jsonl"

    async def story():
        async with scripted_engines(2) as engines, routed(engines, tmp_path / "j", **PATIENT) as (_, _, url):
            load = bench.Load(MODEL)
            first = asyncio.create_task(bench.drive(url, trace, load, keep=keep))
            while not keep.exists() or len(keep.read_text().splitlines()) < 11:
                await asyncio.sleep(0.01)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            kept = [json.loads(line) for line in keep.read_text().splitlines()[1:]]
            with keep.open("a") as file:
                file.write('{"row": 3, "sched')  # torn by the end of the process
            frame = await bench.drive(url, trace, load, keep=keep)
            with pytest.raises(InputError, match="rows of another run"):
                await bench.drive(url, trace_of(30, 0.03), load, keep=keep)
            return frame, kept

    frame, kept = asyncio.run(asyncio.wait_for(story(), 60))
    assert 10 <= len(kept) < 30
    assert list(frame["rid"]) == list(range(30)) and (frame["status"] == "ok").all()
    assert frame["segment"].value_counts().to_dict() == {0: len(kept), 1: 30 - len(kept)}
    assert all(frame["finished_s"][row["row"]] == row["finished_s"] for row in kept)  # nothing was asked twice
    assert np.allclose(frame["arrived_s"], trace["arrived_s"])
    assert frame["send_late_s"].between(0, 0.5).all()  # the second part has a clock of its own
    assert frame.attrs["validity"]["notes"][0].startswith("the run was broken off and went on 1 times")


def test_a_run_does_not_go_on_under_another_policy_or_with_other_prompts(tmp_path):
    keep, trace = tmp_path / "rows.jsonl", trace_of(3, 0.0).assign(prompt=["a", "b", "c"])
    served = bench.Served(4096, True, "emulated", 1.0, "random", 0)
    text, ids = bench.Load(MODEL, exact=False), bench.Load(MODEL)
    begin(keep, trace, text, served)
    assert begin(keep, trace, text, served).segment == 1
    for other, said in [
        (replace(served, policy="least_loaded"), "server.policy was 'random', is 'least_loaded'"),
        (replace(served, seed=1), "server.seed was 0, is 1"),
        (replace(served, source="hardware"), "server.source was 'emulated', is 'hardware'"),
    ]:
        with pytest.raises(InputError, match=f"rows of another run .{said}.: remove it, or name another"):
            begin(keep, trace, text, other)
    reworded = trace.assign(prompt=["a", "b", "d"])
    with pytest.raises(InputError, match="prompts was"):
        begin(keep, reworded, text, served)
    keep.unlink()
    begin(keep, trace, ids, served)
    assert begin(keep, reworded, ids, served).segment == 1  # token ids are sent, whatever the texts are


@pytest.mark.parametrize(
    "line", ["[1]", '{"x": 1}', '{"row": 0}', '{"run": 3}', "[" * 100_000, '{"row": 0, "scheduled_s": "soon"}', "null"]
)
@pytest.mark.parametrize("first", [True, False])
def test_a_kept_file_with_a_line_of_something_else_is_refused_by_file_and_line(tmp_path, line, first):
    keep, trace, served = tmp_path / "rows.jsonl", trace_of(3, 0.0), bench.Served(4096, True, "emulated", 1.0)
    begin(keep, trace, bench.Load(MODEL), served)
    keep.write_text(f"{line}\n" if first else f"{keep.read_text()}{line}\n")
    with pytest.raises(InputError, match=rf"rows.jsonl, line {1 if first else 2}: no row"):
        begin(keep, trace, bench.Load(MODEL), served)
    keep.unlink()
    begin(keep, trace, bench.Load(MODEL), served)  # whoever refused has let go of it


def test_a_second_run_with_the_same_output_is_refused_in_one_line_and_the_first_ends_well(tmp_path, capsys):
    out, codes = tmp_path / "r.parquet", {}
    with serving(tmp_path / "j") as url:
        words = ["bench", "--url", url, "--model", MODEL, "--trace", "sharegpt_like", "--requests", "30", "--exact"]
        words += ["--qps", "20", "--gates", "off", "--out", str(out)]
        first = threading.Thread(target=lambda: codes.update(first=cli.main(words)))
        first.start()
        while not (keep := tmp_path / "r.parquet.rows.jsonl").exists():
            time.sleep(0.01)
        capsys.readouterr()
        assert cli.main(words) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
        assert errors == [
            f"astrolabe: error: {keep} is in use by another run: wait for its end, or give another output"
        ]
        first.join()
    assert codes == {"first": 0} and len(pd.read_parquet(out)) == 30
    assert [path.name for path in tmp_path.iterdir() if "rows" in path.name] == []


def begin(keep, trace, load, served):
    kept = Kept(keep, trace, load, "http://127.0.0.1:1", served)
    kept.close()
    return kept


def test_a_closed_loop_that_ramps_reaches_its_concurrency_over_the_ramp(tmp_path):
    load = bench.Load(MODEL, concurrency=4, ramp_s=0.8)
    frame, _ = drive(tmp_path, trace_of(40, 0.0), load, first_s=0.05)
    first = frame.sort_values("sent_s")
    under_way = [((first["sent_s"] <= t) & (first["finished_s"] > t)).sum() for t in (0.1, 0.3, 0.5, 0.7)]
    assert under_way[0] == 1 and max(under_way) <= 4
    assert frame["sent_s"].max() > 0.6


def test_goodput_counts_from_the_schedule_and_from_the_sending():
    frame = pd.DataFrame(
        {"arrived_s": [0.0, 1.0], "sent_s": [0.0, 2.0], "first_token_s": [0.5, 2.5], "finished_s": [1.0, 3.0],
         "generated_tokens": 2, "status": "ok"}
    )  # fmt: skip
    found = bench.both_goodputs(frame, SLO(ttft_s=1.0))
    assert (found["goodput_share"], found["goodput_share_from_send"]) == (0.5, 1.0)


def test_a_server_that_asks_for_a_key_gets_it_and_no_file_does(tmp_path, monkeypatch):
    async def story(key):
        with_key = PATIENT | {"api_key": "k3y"}
        async with scripted_engines(1) as engines, routed(engines, tmp_path / "j", **with_key) as (_, _, url):
            return await bench.drive(url, trace_of(3, 0.0), bench.Load(MODEL, api_key=key), keep=tmp_path / "rows")

    with pytest.raises(InputError, match="ASTROLABE_API_KEY"):
        asyncio.run(story(None))
    frame = asyncio.run(story("k3y"))
    assert (frame["status"] == "ok").all()
    assert "k3y" not in (tmp_path / "rows").read_text() + repr(bench.Load(MODEL, api_key="k3y"))


@contextmanager
def serving(path):
    """A router over scripted engines in a thread of its own; gives its URL."""
    ready, stop, where = threading.Event(), None, {}

    async def serve():
        nonlocal stop
        stop = asyncio.Event()
        where["loop"] = asyncio.get_running_loop()
        async with scripted_engines(2) as engines, routed(engines, path, **PATIENT) as (_, _, where["url"]):
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(30)
        yield where["url"]
    finally:
        where["loop"].call_soon_threadsafe(stop.set)
        thread.join()


def test_the_command_writes_a_result_frame_that_says_where_it_came_from(tmp_path, capsys):
    out = tmp_path / "r.parquet"
    with serving(tmp_path / "j") as url:
        words = ["bench", "--url", url, "--model", MODEL, "--trace", "sharegpt_like", "--requests", "20"]
        assert cli.main([*words, "--qps", "200", "--lengths", "oracle", "--exact", "--out", str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["status"] == {"ok": 20}
    frame = pd.read_parquet(out)
    assert set(frame["source"]) == {"hardware"}
    assert set(frame["policy"]) == {"round_robin"}
    assert frame.attrs["astrolabe"]["url"].startswith("http://127.0.0.1")


@pytest.mark.parametrize(("told", "found"), [((3.0, 8.0), 5), ((8.0, 3.0), None), ((math.nan, math.nan), None)])
def test_the_command_tells_preemptions_as_far_as_the_engines_do(tmp_path, capsys, monkeypatch, told, found):
    counts = iter(told)

    async def preemptions(urls):
        return next(counts)

    monkeypatch.setattr(engines, "preemptions", preemptions)
    out = tmp_path / "r.parquet"
    with serving(tmp_path / "j") as url:
        words = ["bench", "--url", url, "--model", MODEL, "--trace", "sharegpt_like", "--requests", "5", "--qps", "200"]
        assert cli.main([*words, "--gates", "off", "--exact", "--out", str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["preemptions"], record["preempted"]) == (found, None)
    assert 0 <= record["itl_p50_s"] <= record["itl_p99_s"]
    assert pd.read_parquet(out).attrs["astrolabe"]["preemptions"] == found


def test_preemptions_are_those_of_all_engines_or_not_known():
    async def story(*metrics):
        async with scripted_engines(len(metrics)) as asked:
            for engine, text in zip(asked, metrics, strict=True):
                engine.metrics = text
            return await engines.preemptions([engine.url for engine in asked])

    one, other = (f'vllm:num_preemptions_total{{engine="0"}} {n}.0\n' for n in (2, 5))
    assert asyncio.run(story(one, other)) == 7
    assert math.isnan(asyncio.run(story(one, "vllm:num_requests_running 1.0\n")))
    assert math.isnan(asyncio.run(story(one, None)))
    assert math.isnan(asyncio.run(story()))


def test_what_is_measured_under_a_host_that_did_not_keep_up_says_so(tmp_path):
    slow, fast = PaceWriter(tmp_path / "slow"), PaceWriter(tmp_path / "fast")
    slow.step(1.0, 0.5)  # before the run
    pace = HostPace([tmp_path / "slow", tmp_path / "fast", tmp_path / "absent"])
    sound = {"valid": True, "why": [], "notes": []}
    assert pace.judge(sound) == sound | {"host_late_share": 0.0}
    for _ in range(10):
        slow.step(1.0, 0.2)
        fast.step(1.0, 0.01)
    judged = pace.judge(sound)
    assert not judged["valid"] and judged["host_late_share"] == pytest.approx(0.2)
    assert "20% later than modelled" in judged["why"][0]


def test_an_engine_without_a_router_is_of_the_world_that_the_load_says(tmp_path):
    async def story(source):
        async with scripted_engines(1) as engines:
            return await bench.drive(engines[0].url, trace_of(2, 0.0), bench.Load(MODEL, source=source))

    assert set(asyncio.run(story("emulated"))["source"]) == {"emulated"}
    with pytest.raises(InputError, match="allowed are hardware and emulated"):
        bench.Load(MODEL, source="simulated")
