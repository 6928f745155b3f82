"""A long run at half capacity: nothing lost, nothing left in flight, no memory that grows.

    make soak                                   # 30 minutes, four emulated engines
    make soak SOAK_ARGS='--minutes 5 --engines 2'

Emulated engines behind ``astrolabe route``, a load generator here; the router's memory is sampled, and at the end its
counters, its journal and the client's rows must tell of the same requests. The record is written whatever the verdict;
exit code 1 where a claim failed.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
from speed import machine

from astrolabe_lab import arrivals, bench, length
from astrolabe_lab.engines.launch import launch
from astrolabe_lab.engines.pace import read_pace
from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.serve import journal

CAPACITY_QPS = 31.6 / 12  # of an engine: Llama-2-7B on an A30, the paper's setting
SETTLE_SHARE = 0.25  # of the run, before memory counts
GROWTH = 0.05  # of the router's memory that is no trend: allocator and caches
EVERY_S = 2.0


def instances(url):
    with urllib.request.urlopen(url + "/instances", timeout=30) as answer:
        return json.load(answer)["instances"]


async def sample(router, url, begun, into):
    """Memory of the router, and what it has in flight, until cancelled."""
    while True:
        seen = await asyncio.to_thread(instances, url)
        memory = router.memory_info().rss / 1e6
        files = router.num_fds()
        into.append(
            {
                "time_s": time.monotonic() - begun, "router_mb": memory, "router_files": files,
                "in_flight": sum(each["in_flight"] for each in seen),
            }
        )  # fmt: skip
        await asyncio.sleep(EVERY_S)


async def load(url, router, trace, model, time_scale):
    samples = []
    sampling = asyncio.create_task(sample(router, url, time.monotonic(), samples))
    frame = await bench.drive(url, trace, bench.Load(model, exact=False, time_scale=time_scale))
    sampling.cancel()
    return frame, samples


def trend(samples):
    """Memory in the last quarter against the first after settling, as a share; MB an hour by least squares."""
    table = pd.DataFrame(samples)
    settled = table[table["time_s"] >= SETTLE_SHARE * table["time_s"].max()]
    quarter = max(1, len(settled) // 4)
    first, last = settled["router_mb"].iloc[:quarter].median(), settled["router_mb"].iloc[-quarter:].median()
    slope = np.polyfit(settled["time_s"] / 3600, settled["router_mb"], 1)[0] if len(settled) > 2 else float("nan")
    return {"first_mb": first, "last_mb": last, "growth": last / first - 1.0, "mb_per_hour": float(slope)}


def run(args, folder):
    seconds = args.minutes * 60
    qps = args.share * CAPACITY_QPS * args.engines  # modelled
    requests = sharegpt_like.generate(max(10, int(seconds / args.time_scale * qps)), seed=args.seed, text=False)
    trace = length.attach(arrivals.with_arrivals(requests, qps=qps, seed=args.seed), "oracle")
    path = folder / "journal.jsonl"
    path.unlink(missing_ok=True)
    with launch(args.engines, time_scale=args.time_scale, folder=folder / "cluster", timeout_s=300) as cluster:
        command = [sys.executable, "-m", "astrolabe_lab.cli", "route", "--cluster", str(cluster.folder)]
        command += ["--policy", args.policy, "--journal", str(path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            url = json.loads(process.stdout.readline())["url"]
            print(f"soak: {len(trace)} requests in {seconds / 60:.1f} minutes", file=sys.stderr, flush=True)
            router = psutil.Process(process.pid)
            frame, samples = asyncio.run(load(url, router, trace, cluster.model, args.time_scale))
            left = instances(url)
        finally:
            process.terminate()
            code = process.wait(60)
        pace = [read_pace(engine.pace)["late_share"] for engine in cluster.engines]
    entries = list(journal.read(path))
    ended = [e for e in entries if e["event"] == "outcome" and e["status"] != "retried"]
    decided = {e["rid"] for e in entries if e["event"] == "decision"}
    memory = trend(samples)
    claims = {
        "every request has one row at the client": len(frame) == len(trace) and not frame["rid"].duplicated().any(),
        "every request was answered": bool((frame["status"] == "ok").all()),
        "every answer has its true length": bool((frame["generated_tokens"] == frame["output_tokens"]).all()),
        "every request has one outcome in the journal": len(ended) == len({e["rid"] for e in ended}) == len(trace),
        "every decision has an outcome": decided == {e["rid"] for e in ended},
        "nothing is left in flight": sum(each["in_flight"] + each["running"] + each["waiting"] for each in left) == 0,
        "every KV block is free again": all(each["free_blocks"] == cluster.config.usable_blocks for each in left),
        "the router's memory is flat": memory["growth"] <= GROWTH,
        "the router ended well": code == 0,
    }
    return {
        "claims": claims,
        "verdict": "passed" if all(claims.values()) else "failed",
        "minutes": args.minutes,
        "requests": len(trace),
        "qps_modelled": qps,
        "engines": args.engines,
        "time_scale": args.time_scale,
        "policy": args.policy,
        "memory": memory,
        "files": {"first": samples[0]["router_files"], "last": samples[-1]["router_files"]},
        "statuses": frame["status"].value_counts().to_dict(),
        "reasons": frame.loc[frame["status"] != "ok", "reason"].value_counts().head(5).to_dict(),
        "most_in_flight": max(s["in_flight"] for s in samples),
        "late_share": max(pace),
        "journal_bytes": path.stat().st_size,
        "samples": samples,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="of load (default: 30)")
    parser.add_argument("--engines", type=int, default=4, help="emulated engines (default: 4)")
    parser.add_argument("--share", type=float, default=0.5, help="of capacity (default: 0.5)")
    parser.add_argument("--time-scale", type=float, default=3.0, help="wall s per modelled s (default: 3)")
    parser.add_argument("--policy", default="astrolabe:k=2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("outputs/soak"), help="folder (default: outputs/soak)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    before = machine()
    record = {"machine": before, **run(args, args.out), "load_average_after": machine()["load_average_1min"]}
    unfinished = args.out / "soak.json.new"
    unfinished.write_text(json.dumps(record, indent=1, default=float))
    unfinished.replace(args.out / "soak.json")
    for claim, holds in record["claims"].items():
        print(f"{'yes' if holds else 'NO ':3s} {claim}")
    memory = record["memory"]
    print(f"memory of the router: {memory['first_mb']:.1f} -> {memory['last_mb']:.1f} MB ({memory['growth']:+.1%})")
    print(f"soak {record['verdict']}: {record['requests']} requests, {args.minutes:g} minutes; {args.out}/soak.json")
    sys.exit(record["verdict"] != "passed")


if __name__ == "__main__":
    main()
