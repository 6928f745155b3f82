"""Dynamo's replay and ours, side by side: the same trace, the same engines, in one run.

    python tests/peers.py [--requests N] [--instances N] [--qps Q] [--repeats N] [--json]

Dynamo's mocker (`ai-dynamo-runtime`, Rust) replays a trace offline in virtual time, as `simulate` does. Both get the
same arrivals and lengths and the same engine flags, and both price steps by two constants (Dynamo's `fixed` timing),
so that they do the same work; the table says how nearly. Calls are timed alternately, from outside, and the best of
each counts; for Dynamo the lower of that and the time that it reports itself. CPU seconds, of all threads, stand
beside: on a busy machine they say more.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path

import numba
from speed import machine, paper_lengths

from astrolabe_lab.arrivals import with_arrivals
from astrolabe_lab.cost import StepCost
from astrolabe_lab.length import attach
from astrolabe_lab.sim.cluster import simulate
from astrolabe_lab.sim.config import EngineConfig

ENGINE = EngineConfig()  # the Astrolabe paper's: 1056 blocks of 16, batch 48, chunk 512, 4096 tokens
DECODE_MS, PREFILL_MS = 25.0, 15.0  # a step that decodes; what a prefill in it adds
COST = StepCost.parse(f"decode.base_s={DECODE_MS / 1e3},mixed.base_s={(DECODE_MS + PREFILL_MS) / 1e3}")
TRACE_BLOCK = 512  # tokens that one hash of Mooncake's format stands for
DIFFERENCES = (
    "Dynamo prices a step with prefills and no decode at the prefill's time alone, ours at the mixed step's",
    "vLLM V1 keeps one KV block back as its null block: ours has 1,055 to give, Dynamo's 1,056",
    "Dynamo reads the trace from a file inside the timed call (its own figure leaves that out); ours is in memory",
)


@dataclass
class Replay:
    """One simulator with one policy. `run` replays once and gives (summary, seconds by its own account or None)."""

    name: str
    run: object
    reach: float | None = None  # times as fast as Dynamo's round robin
    best_s: float = float("inf")
    cpu_s: float = float("inf")
    summary: dict = field(default_factory=dict)


def mooncake(frame, path):
    """Write the frame as a Mooncake trace in which no two prompts share a block; returns the path."""
    used = 0
    with open(path, "w") as lines:
        columns = (frame[name].tolist() for name in ("arrived_s", "prompt_tokens", "output_tokens"))
        for arrived_s, prompt, output in zip(*columns, strict=True):
            blocks = -(-prompt // TRACE_BLOCK)
            row = {"timestamp": 1e3 * arrived_s, "input_length": prompt, "output_length": output}
            lines.write(json.dumps(row | {"hash_ids": list(range(used, used + blocks))}) + "\n")
            used += blocks
    return path


def dynamo(path, mode, instances):
    """Replay the file in Dynamo's mocker."""
    os.environ.setdefault("DYN_LOG", "error")  # else it logs every choice of its KV router
    from dynamo._core import run_mocker_trace_replay

    engine = {
        "backend": "vllm",
        "enable_prefix_caching": False,
        "timing_model": {"type": "fixed", "prefill_ms": PREFILL_MS, "decode_ms": DECODE_MS},
    }
    for name in (
        "max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks", "max_model_len",
        "enable_chunked_prefill",
    ):  # fmt: skip
        engine[name] = getattr(ENGINE, name)
    replayed = run_mocker_trace_replay(
        [str(path)],
        extra_engine_args={"engine": engine},
        num_workers=instances,
        router_mode=mode,
        trace_block_size=TRACE_BLOCK,
        capture_planner_details=False,
    ).summary
    summary = {
        "requests": replayed["completed_requests"],
        "output_tokens": replayed["total_output_tokens"],
        "ttft_mean_s": replayed["mean_ttft_ms"] / 1e3,
        "tpot_mean_s": replayed["mean_tpot_ms"] / 1e3,
        "e2e_mean_s": replayed["mean_e2e_latency_ms"] / 1e3,
        "duration_s": replayed["duration_ms"] / 1e3,
    }
    return summary, replayed["wall_time_ms"] / 1e3


def ours(frame, policy, compiled, instances):
    """Replay the frame here."""
    result = simulate(frame, policy, instances=instances, engine=ENGINE, cost=COST, compiled=compiled)
    ok = result[result["status"] == "ok"]
    summary = {
        "requests": len(ok),
        "output_tokens": int(ok["generated_tokens"].sum()),
        "ttft_mean_s": ok["ttft_s"].mean(),
        "tpot_mean_s": ok["tpot_s"].mean(),
        "e2e_mean_s": ok["e2e_s"].mean(),
        "duration_s": ok["finished_s"].max() - frame["arrived_s"].iloc[0],
    }
    return summary, None


def measure(frame, instances, repeats):
    """The Replays, timed alternately."""
    here = partial(ours, frame, instances=instances)
    with tempfile.TemporaryDirectory() as folder:
        path = mooncake(frame, Path(folder) / "trace.jsonl")
        replays = [
            Replay("Dynamo, round robin", partial(dynamo, path, "round_robin", instances)),
            Replay("Dynamo, KV router", partial(dynamo, path, "kv_router", instances)),
            Replay("round_robin, compiled twin", partial(here, "round_robin", True), 20.0),
            Replay("least_loaded, compiled twin", partial(here, "least_loaded", True), 20.0),
            Replay("least_loaded, Python object", partial(here, "least_loaded", False), 3.0),
            Replay("astrolabe k=2, compiled twin", partial(here, "astrolabe:k=2", True)),
        ]
        for replay in replays:
            replay.run()  # compiles, loads
        for _ in range(repeats):
            for replay in replays:
                began, began_cpu = time.perf_counter(), time.process_time()
                replay.summary, own_s = replay.run()
                took_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
                replay.cpu_s = min(replay.cpu_s, cpu_s)
                replay.best_s = min(replay.best_s, took_s, own_s or took_s)
    return replays


def check(replays, frame):
    """Sentences that say where the two did not simulate the same work; empty when they did."""
    wrong = []
    wanted = {"requests": len(frame), "output_tokens": int(frame["output_tokens"].sum())}
    for replay in replays:
        for name, value in wanted.items():
            if replay.summary[name] != value:
                wrong.append(f"{replay.name}: {replay.summary[name]:,} {name}, of {value:,}")
    theirs, own = (next(r.summary for r in replays if name in r.name) for name in ("Dynamo, round", "round_robin"))
    for name in ("tpot_mean_s", "e2e_mean_s", "duration_s"):
        if abs(own[name] / theirs[name] - 1) > 0.05:
            wrong.append(f"round robin: {name} {own[name]:.4g} here, {theirs[name]:.4g} in Dynamo: over 5 % apart")
    return wrong


def show(replays, frame, source, args, before, after):
    print(f"{len(frame):,} requests, {args.qps:g} QPS, {args.instances} instances; {source}")
    print(f"ai-dynamo-runtime {metadata.version('ai-dynamo-runtime')}, numba {numba.__version__}, ", end="")
    print(f"Python {platform.python_version()}; load average {before:.2f} before, {after:.2f} after\n")
    print(f"{'':28} {'best s':>8} {'times':>6} {'CPU s':>8} {'times':>6}  {'reach':5} {'':7} ", end="")
    print(f"{'TTFT s':>7} {'TPOT ms':>8} {'E2E s':>7}")
    theirs = replays[0]
    for r in replays:
        ratio = theirs.best_s / r.best_s
        verdict = "" if r.reach is None else "reached" if ratio >= r.reach else "missed"
        reach = "" if r.reach is None else f">= {r.reach:g}"
        s = r.summary
        print(f"{r.name:28} {r.best_s:8.4f} {ratio:6.1f} {r.cpu_s:8.4f} {theirs.cpu_s / r.cpu_s:6.1f}  ", end="")
        print(f"{reach:5} {verdict:7} {s['ttft_mean_s']:7.3f} {1e3 * s['tpot_mean_s']:8.2f} {s['e2e_mean_s']:7.3f}")
    print("\nWhat differs:")
    for line in DIFFERENCES:
        print(f"  {line}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--instances", type=int, default=12)
    parser.add_argument("--qps", type=float, default=28.0)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the table")
    args = parser.parse_args()
    try:
        metadata.version("ai-dynamo-runtime")
    except metadata.PackageNotFoundError:
        sys.exit("peers: ai-dynamo-runtime is not installed; make bench-peers installs it (Linux only)")
    lengths, source = paper_lengths()
    lengths = lengths[~ENGINE.rejects(lengths["prompt_tokens"], lengths["output_tokens"])].head(args.requests)
    frame = attach(with_arrivals(lengths.reset_index(drop=True), args.qps, seed=0), "oracle")
    before = machine()["load_average_1min"]
    replays = measure(frame, args.instances, args.repeats)
    after = machine()["load_average_1min"]
    wrong = check(replays, frame)
    if args.json:
        theirs_s = replays[0].best_s
        rows = [
            {"name": r.name, "best_s": r.best_s, "cpu_s": r.cpu_s, "times": theirs_s / r.best_s} | r.summary
            for r in replays
        ]
        about = {"requests": len(frame), "instances": args.instances, "qps": args.qps, "lengths": source}
        print(json.dumps({**about, "load_average_1min": [before, after], "replays": rows, "not_the_same": wrong}))
    else:
        show(replays, frame, source, args, before, after)
    if wrong:
        sys.exit("peers: the two did not simulate the same work:\n  " + "\n  ".join(wrong))


if __name__ == "__main__":
    main()
