"""What predicting costs on emulated engines: the router's share of E2E, and the processor time of each Predictor.

    python tests/speed_live.py [--engines 4] [--requests 120] [--json]

The same trace three times through ``astrolabe route``: predicting in the router, and asking one sidecar an engine, two
of them a request (k=2) or all (full fan-out). The overhead of a request is the wall time from its arrival to its
dispatch, set against its E2E at life size, so that a slow time scale hides nothing. A Predictor's processor time is
that of its sidecar's process, HTTP included, a second of the run. Only a machine that does nothing else gives numbers
that count.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil
from speed import machine

from astrolabe_lab import arrivals, bench, length
from astrolabe_lab.engines.launch import launch
from astrolabe_lab.engines.pace import read_pace
from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.serve import journal
from astrolabe_lab.serve.routing import routing

CAPACITY_QPS = 31.6 / 12  # of an engine: Llama-2-7B on an A30, the paper's setting
SHARE, CPU_SHARE = 0.03, 0.20  # of E2E; of a core (the paper's: 20 %)


@contextmanager
def sidecar(folder, instance):
    """(URL, process) of the Predictor of one engine."""
    command = [sys.executable, "-m", "astrolabe_lab.cli", "sidecar", "--cluster", str(folder)]
    process = subprocess.Popen([*command, "--instance", str(instance)], stdout=subprocess.PIPE, text=True)
    try:
        yield json.loads(process.stdout.readline())["url"], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(20)


def cpu_s(process):
    times = process.cpu_times()
    return times.user + times.system


def shares(path, time_scale):
    """Of each answered request: wall time until its dispatch / its E2E at life size."""
    decided = {e["rid"]: e for e in journal.read(path) if e["event"] == "decision"}
    ended = [e for e in journal.read(path) if e["event"] == "outcome" and e["status"] == "ok"]
    waited_s = np.array([decided[e["rid"]]["decided_s"] - e["arrived_s"] for e in ended])
    return waited_s * time_scale / np.array([e["e2e_s"] for e in ended])


def one(cluster, trace, policy, by_sidecars, folder):
    path = Path(folder) / f"{policy.replace(':', '-')}-{by_sidecars}.jsonl"
    with ExitStack() as stack:
        engines = range(len(cluster.engines)) if by_sidecars else ()
        sidecars = [stack.enter_context(sidecar(cluster.folder, i)) for i in engines]
        options = ["--deadline-ms", "2000", "--sidecars", ",".join(url for url, _ in sidecars)] if sidecars else []
        url = stack.enter_context(routing(cluster, policy, journal=path, options=options))
        warm_up = trace.head(2 * len(cluster.engines)).assign(output_tokens=4)
        bench.run(url, warm_up, bench.Load(cluster.model, time_scale=cluster.time_scale))
        before, began = [cpu_s(process) for _, process in sidecars], time.monotonic()
        frame = bench.run(url, trace, bench.Load(cluster.model, exact=False, time_scale=cluster.time_scale))
        seconds = time.monotonic() - began
        after = [cpu_s(process) for _, process in sidecars]
    used = [b - a for a, b in zip(before, after, strict=True)]
    found = shares(path, cluster.time_scale)
    per_second = seconds / cluster.time_scale  # modelled: the load of a second at life size
    return {
        "policy": policy,
        "predicts": "sidecars" if by_sidecars else "router",
        "answered": int((frame["status"] == "ok").sum()),
        "overhead_share_mean": float(found.mean()),
        "overhead_share_p99": float(np.percentile(found, 99)),
        "decision_median_ms": 1e3 * float(frame["decision_s"].median()),
        "cpu_share_of_a_predictor": float(np.mean(used) / per_second) if used else float("nan"),
    }


def run(args):
    qps = args.share * CAPACITY_QPS * args.engines
    requests = sharegpt_like.generate(args.requests, seed=0, text=False)
    requests["output_tokens"] = requests["output_tokens"].clip(upper=args.longest)
    trace = length.attach(arrivals.with_arrivals(requests, qps=qps, seed=0), "oracle")
    engines = launch(args.engines, time_scale=args.time_scale, timeout_s=300)
    with tempfile.TemporaryDirectory() as folder, engines as cluster:
        runs = [("astrolabe:k=2", False), ("astrolabe:k=2", True), ("astrolabe:k=all", True)]
        rows = [one(cluster, trace, policy, by_sidecars, folder) for policy, by_sidecars in runs]
        late = max(read_pace(engine.pace)["late_share"] for engine in cluster.engines)
    return rows, late


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--requests", type=int, default=120, help="of each of the three runs")
    parser.add_argument("--longest", type=int, default=300, help="tokens of an answer")
    parser.add_argument("--share", type=float, default=0.6, help="of capacity (default: 0.6)")
    parser.add_argument("--time-scale", type=float, default=3.0, help="wall s per modelled s (default: 3)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the table")
    args = parser.parse_args()
    before = machine()
    rows, late = run(args)
    own, two, every = rows
    ratio = every["cpu_share_of_a_predictor"] / two["cpu_share_of_a_predictor"]
    verdicts = {
        "overhead < 3 % of E2E": own["overhead_share_mean"] < SHARE,
        "a Predictor takes far less than 20 % of a core": two["cpu_share_of_a_predictor"] < CPU_SHARE / 2,
    }
    if args.json:
        told = {"machine": before, "rows": rows, "fan_out_over_two": ratio, "late_share": late, "verdicts": verdicts}
        print(json.dumps(told))
        return
    print(f"{before['processor']}, {before['cores']} cores, load average {before['load_average_1min']} before")
    for row in rows:
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    print(
        f"a Predictor's processor time, full fan-out over k=2: {ratio:.2f} (paper: 2.8); steps end late by {late:.1%}"
    )
    for what, met in verdicts.items():
        print(f"{what}: {'reached' if met else 'missed'}")


if __name__ == "__main__":
    main()
