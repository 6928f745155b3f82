"""Pools of real vLLM engines behind their router: emulated hand-offs, and real ones by NIXL on the CPU."""

import asyncio
import json
import subprocess
import sys
import time
from contextlib import contextmanager

import pandas as pd
import pytest
from marks import by_the_clock, measures_time

from astrolabe_lab import arrivals, bench, length
from astrolabe_lab.calibrate import Transfer
from astrolabe_lab.calibrate.live import targets_of
from astrolabe_lab.calibrate.plan import roughly
from astrolabe_lab.calibrate.streamed import measure_streamed
from astrolabe_lab.cli import main
from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.rng import stream
from astrolabe_lab.serve.pools.gates import check_pools, failed_transfers
from astrolabe_lab.serve.pools.launch import Handover, launch_pools, of_role
from astrolabe_lab.serve.pools.records import rows

pytestmark = [pytest.mark.vllm, pytest.mark.long]
TIME_SCALE = 3.0
SMALL = (
    "max_num_seqs=16,max_num_batched_tokens=512,max_model_len=1024,block_size=32,num_gpu_blocks=256,"
    "enable_prefix_caching=true"
)


@contextmanager
def routed(pools, journal, policy="least_loaded"):
    """The URL of a router process over the pools, priced with the paper's constants."""
    command = [
        sys.executable, "-m", "astrolabe_lab.cli", "route", "--cluster", str(pools.folder), "--policy", policy,
        "--constants-from", "paper", "--journal", str(journal),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        assert process.wait(60) == 0


def urls(pools, role):
    return [engine.url for engine in of_role(pools, role)]


def verdicts(pools):
    found = asyncio.run(check_pools(urls(pools, "prefill"), urls(pools, "decode"), pools.model, pools.time_scale))
    return {each.gate: each for each in found}


def transfers(pools):
    """What the emulated engines noted of their hand-offs."""
    paths = [engine.folder / "transfers.jsonl" for engine in pools.engines]
    return [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]


def trace_of(n, qps, longest=40):
    requests = sharegpt_like.generate(n, seed=0, text=False)
    requests["prompt_tokens"] = requests["prompt_tokens"].clip(8, 300)
    requests["output_tokens"] = requests["output_tokens"].clip(2, longest)
    return length.attach(arrivals.with_arrivals(requests, qps=qps, seed=0), "oracle")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """One prefill and two decode engines of Llama-2-7B on an A30, slowed down; blocks expire after 6 s."""
    handover = Handover(Transfer(0.02, 5e-4), expiry_s=6.0)
    folder = tmp_path_factory.mktemp("pools") / "c"
    options = {"preset": "llama2-7b-a30", "time_scale": TIME_SCALE, "timeout_s": 600, "folder": folder}
    with launch_pools(1, 2, handover=handover, **options) as running:
        yield running


def test_emulated_pools_pass_their_gates_and_lose_nothing(emulated, tmp_path):
    found = verdicts(emulated)
    assert all(each.ok for each in found.values()), [str(each) for each in found.values()]
    trace = trace_of(40, qps=4.0)
    before = len(transfers(emulated))
    with routed(emulated, tmp_path / "j", "marginal_cost") as url:
        live = bench.run(url, trace, bench.Load(emulated.model, exact=False, time_scale=TIME_SCALE))
    assert (live["status"] == "ok").all(), live["reason"].unique()
    assert (live["generated_tokens"] == live["output_tokens"]).all()
    frame = rows(tmp_path / "j")
    assert len(frame) == len(trace) and (frame["status"] == "ok").all()
    assert set(frame["decode_instance"]) == {0, 1}
    noted = transfers(emulated)[before:]
    assert len(noted) == len(trace) and all(each["ok"] for each in noted)
    for each in noted:  # no transfer is faster than the model of it
        assert each["seconds"] > 0.99 * (0.02 + 5e-4 * each["blocks"])


def test_a_grid_runs_on_emulated_pools_from_the_command_line(emulated, tmp_path, capsys):
    grid, out = tmp_path / "grid.yaml", tmp_path / "out"
    grid.write_text(
        "defaults: {trace: family:chat, requests: 10, qps: 4, seed: 0, pools: 1+2, preset: llama2-7b-a30,\n"
        "  policy: round_robin, hand_off: {base_s: 0.02, per_block_s: 5.0e-4}}\n"
    )
    words = ["sweep", str(grid), "--out", str(out), "--cluster", str(emulated.folder)]
    assert main(words) == 0
    assert "this says nothing of what is in the blocks" in capsys.readouterr().err
    rows = pd.read_parquet(out / "summary.parquet")
    assert rows["policy"].tolist() == ["round_robin", "round_robin (again)"] and (rows["ok"] == 10).all()
    assert set(rows["source"]) == {"emulated"} and rows["workload"].nunique() == 1
    for path in out.glob("*/*.parquet"):
        gates = pd.read_parquet(path).attrs["astrolabe"]["pool_gates"]
        assert len(gates) == 6 and all(each["ok"] for each in gates)
    grid.write_text(grid.read_text().replace("0.02", "0.04"))
    assert main(words) == 2
    assert "hand_off (0.02, 0.0005, 0.0) (grid: (0.04, 0.0005, 0.0))" in capsys.readouterr().err


def test_blocks_that_expired_are_computed_again_and_a_client_that_left_leaves_none(emulated):
    import urllib.error
    import urllib.request

    from astrolabe_lab.serve.pools import handoff

    def post(url, body):
        raw = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode())
        raw.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(raw, timeout=120) as answer:
            return json.loads(answer.read())

    (prefill,), decode = urls(emulated, "prefill"), urls(emulated, "decode")[0]
    prompt = [(7 * j) % 250 + 5 for j in range(100)]
    body = {"model": emulated.model, "prompt": prompt, "max_tokens": 5, "min_tokens": 5, "ignore_eos": True}
    held = handoff.handle_of(post(prefill, handoff.prefill_body(body)))
    time.sleep(8 * TIME_SCALE)
    answer = post(decode, handoff.decode_body(body, held))
    assert answer["usage"]["completion_tokens"] == 5
    noted = transfers(emulated)
    assert any(each.get("gone") for each in noted) and any("expired" in each for each in noted)

    again = handoff.handle_of(post(prefill, handoff.prefill_body(body)))
    with pytest.raises(urllib.error.HTTPError, match="400"):
        post(decode, handoff.release_body(body, again))
    deadline = time.monotonic() + 30
    used = 1.0
    while used > 0 and time.monotonic() < deadline:
        time.sleep(0.2)
        text = urllib.request.urlopen(prefill + "/metrics").read().decode()
        (line,) = [each for each in text.splitlines() if each.startswith("vllm:kv_cache_usage_perc{")]
        used = float(line.rsplit(" ", 1)[1])
    assert used == 0.0
    assert sum("expired" in each for each in transfers(emulated)) == 1  # let go, not left to expire


@measures_time
def test_the_decode_slope_through_a_router_is_that_of_the_emulated_steps(emulated):
    until = time.monotonic() + 60
    prefill, decode = targets_of(emulated.folder)
    with prefill, decode:
        roughs, rng = (roughly(prefill), roughly(decode)), stream(0, "test")
        seen, rows = measure_streamed(
            prefill, decode, emulated.cost, roughs, 256, 2, lambda: until - time.monotonic(), rng
        )
    one_s, all_s = (emulated.cost.step_seconds(n, n, n * 256) for n in (1, emulated.config.max_num_seqs))
    with by_the_clock():
        assert seen.slope_s == pytest.approx((all_s - one_s) / (emulated.config.max_num_seqs - 1), rel=0.25)
        assert seen.base_s == pytest.approx(one_s, rel=0.1) and len(rows) >= 5


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Two prefill and two decode engines with a small random Llama, and NIXL between them."""
    folder = tmp_path_factory.mktemp("nixl") / "c"
    options = {"device": "cpu", "engine": SMALL, "timeout_s": 600, "folder": folder}
    with launch_pools(2, 2, world="hardware", **options) as running:
        yield running


@pytest.mark.nixl
def test_real_transfers_give_the_answers_of_an_engine_that_computes_alone(real, tmp_path):
    found = verdicts(real)
    assert all(each.ok for each in found.values()), [str(each) for each in found.values()]
    assert "were taken over" in found["pairs"].detail  # the engines themselves count what came from elsewhere
    trace = trace_of(500, qps=50.0, longest=12)
    with routed(real, tmp_path / "j", "marginal_cost") as url:
        live = bench.run(url, trace, bench.Load(real.model, exact=True, concurrency=12))
    assert (live["status"] == "ok").all() and (live["generated_tokens"] == live["output_tokens"]).all()
    frame = rows(tmp_path / "j")
    assert len(frame) == frame["rid"].nunique() == 500 and (frame["status"] == "ok").all()
    assert (frame["blocks"] > 0).all()
    assert set(frame["prefill_instance"]) == set(frame["decode_instance"]) == {0, 1}
    assert asyncio.run(failed_transfers(urls(real, "decode"), real.model)) == 0
