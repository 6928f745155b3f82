"""The running stack: real vLLM engines with emulated steps behind the router, asked by clients not written here."""

import json
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from marks import by_the_clock, measures_time

from astrolabe_lab import arrivals, bench, length, policies
from astrolabe_lab.engines.pace import read_pace
from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.serve import journal
from astrolabe_lab.sim.cluster import simulate
from astrolabe_lab.status.published import StatusReader

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@contextmanager
def router(cluster, policy="astrolabe:k=2", path=None, *words, stderr=None):
    """The URL of a router process over the cluster."""
    command = [
        sys.executable, "-m", "astrolabe_lab.cli", "route", "--cluster", str(cluster.folder), "--policy", policy,
    ]  # fmt: skip
    command += [*words, "--journal", str(path)] if path else words
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        assert process.wait(30) == 0


@pytest.fixture(scope="module")
def url(cluster):
    with router(cluster) as address:
        yield address


def trace_of(n, qps, seed=0):
    requests = sharegpt_like.generate(n, seed=seed, text=False)
    requests["output_tokens"] = requests["output_tokens"].clip(upper=120)  # short answers: a test, not a study
    return length.attach(arrivals.with_arrivals(requests, qps=qps, seed=seed), "oracle")


def test_the_openai_package_streams_and_does_not_stream(cluster, url):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == [cluster.model]
    whole = client.completions.create(model=cluster.model, prompt="Where does it go?", max_tokens=12, temperature=0)
    assert whole.usage.completion_tokens == 12
    parts = list(
        client.chat.completions.create(
            model=cluster.model,
            messages=[{"role": "user", "content": "Ünïcode 🤖?"}],
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert parts[-1].usage.completion_tokens == 9
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="another", prompt="x")
    with pytest.raises(openai.BadRequestError):  # the engine's own refusal passes through
        client.completions.create(model=cluster.model, prompt="x", max_tokens=10**6)


def test_vllm_s_own_load_client_runs_against_the_router(cluster, url, tmp_path):
    script = (
        "import argparse, asyncio\n"
        "from vllm.benchmarks.serve import add_cli_args, main\n"
        "parser = argparse.ArgumentParser(); add_cli_args(parser)\n"
        "result = main(parser.parse_args())\n"
    )
    command = [
        sys.executable, "-c", script, "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions",
        "--model", cluster.model, "--tokenizer", str(cluster.folder / "model"), "--dataset-name", "random",
        "--random-input-len", "64", "--random-output-len", "16", "--num-prompts", "24", "--request-rate", "8",
        "--ignore-eos", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json",
        "--disable-tqdm",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["completed"] == 24
    assert result["total_output_tokens"] == 24 * 16


@measures_time
def test_a_trace_leaves_one_row_a_request_and_the_simulator_says_much_the_same(cluster, tmp_path):
    trace = trace_of(60, qps=8.0)
    with router(cluster, "astrolabe:k=2", tmp_path / "journal") as address:
        live = bench.run(address, trace, bench.Load(cluster.model, exact=False, time_scale=cluster.time_scale))
    assert (live["status"] == "ok").all(), live["reason"].unique()
    assert (live["generated_tokens"] == live["output_tokens"]).all()
    assert set(live["instance"]) == {0, 1, 2, 3}
    ended = [e for e in journal.read(tmp_path / "journal") if e["event"] == "outcome"]
    assert sorted(e["status"] for e in ended) == ["ok"] * len(trace)
    lateness = max(read_pace(engine.pace)["late_share"] for engine in cluster.engines)
    if lateness > 0.03:
        pytest.skip(f"the host does not keep up: steps end {lateness:.0%} late")
    simulated = simulate(trace, policies.parse("astrolabe:k=2"), instances=4, engine=cluster.config, cost=cluster.cost)
    with by_the_clock():
        assert live["tpot_s"].mean() == pytest.approx(simulated["tpot_s"].mean(), rel=0.15)
        assert live["e2e_s"].mean() == pytest.approx(simulated["e2e_s"].mean(), rel=0.15)
        error = (live["predicted_e2e_s"] - live["e2e_s"]).abs() / live["e2e_s"]
        assert error.mean() < 0.20


def test_the_published_status_agrees_with_the_engine_s_own_metrics(cluster, url):
    import urllib.request

    engine = cluster.engines[0]
    trace = trace_of(16, qps=50.0)
    frame = bench.run(url, trace, bench.Load(cluster.model, exact=False, time_scale=cluster.time_scale))
    assert (frame["status"] == "ok").all()
    deadline = time.monotonic() + 30
    running = None
    while running != 0 and time.monotonic() < deadline:  # the metrics follow the last step
        time.sleep(0.1)
        text = urllib.request.urlopen(engine.url + "/metrics").read().decode()
        (gauge,) = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
        running = float(gauge.rsplit(" ", 1)[1])
    status = StatusReader(engine.status).read()
    assert running == status.running == len(status.rows) == 0
    assert status.free_blocks == cluster.config.usable_blocks


def test_two_routers_serve_one_cluster(cluster, url):
    trace = trace_of(30, qps=6.0, seed=1)
    with router(cluster, "least_loaded") as second:
        import asyncio

        async def both():
            load = bench.Load(cluster.model, exact=False, time_scale=cluster.time_scale)
            return await asyncio.gather(bench.drive(url, trace, load), bench.drive(second, trace, load))

        for frame in asyncio.run(both()):
            assert (frame["status"] == "ok").all()
