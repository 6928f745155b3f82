"""What a router adds to a request's first token: direct and routed side by side, in processes of their own.

    python tests/speed_router.py [--seconds 20] [--json]

Four scripted engines in one process, a router in another, the client here. 64-token streams leave at 50 a second, in
turns of four seconds directly to the engines and through the router, so both ways meet the same minute. What is added
is a difference of medians, and of 99th percentiles. Only a machine that does nothing else gives numbers that count.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import numpy as np
import psutil
from speed import machine

from astrolabe_lab.serve.listen import allow_open_files

ENGINES, QPS, TOKENS, FIRST_S, TOKEN_S = 4, 50.0, 64, 0.02, 0.02
TURN_S = 4.0
KINDS = {
    "no prediction": ["--policy", "po2_requests"],
    "po-2 prediction": ["--policy", "astrolabe:k=2", "--preset", "llama2-7b-a30"],
}
REACH = {"median": 3.0, "p99": 20.0, "prediction": 1.0}  # ms
ENGINE_PROCESS = """
import asyncio, json, sys
from scripted_engine import scripted_engines
async def main():
    async with scripted_engines({n}, first_s={first}, token_s={token}) as engines:
        print(json.dumps([engine.url for engine in engines]), flush=True)
        while True:
            await asyncio.sleep(30)
            for engine in engines:
                engine.seen.clear()
asyncio.run(main())
"""


@contextmanager
def process(command):
    """A process that says with one JSON line that it is ready: that line."""
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)
    try:
        line = running.stdout.readline()
        if not line:
            sys.exit(f"speed_router: {' '.join(command[:4])} did not start")
        yield json.loads(line), psutil.Process(running.pid)
    finally:
        running.terminate()
        running.wait(20)


async def ttft_s(session, url):
    """Seconds from sending to the first token."""
    body = {"model": "m", "prompt": "Where should it go? " * 20, "max_tokens": TOKENS, "stream": True}
    first = None
    sent = time.perf_counter()
    async with session.post(url + "/v1/completions", json=body) as answer:
        async for chunk in answer.content.iter_any():
            if first is None and b'"text"' in chunk:
                first = time.perf_counter() - sent
    return first, dict(answer.headers)


async def measure(engines, routers, seconds):
    """By kind of way, the TTFTs and the decision times that the router told."""
    ways = ["direct", *routers]
    found = {way: [] for way in ways}
    decisions = {way: [] for way in ways}

    async def one(session, way, url):
        first, headers = await ttft_s(session, url)
        found[way].append(first)
        decisions[way].append(float(headers.get("X-Astrolabe-Decision-Ms", "nan")))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for _ in range(3):  # connections, and whatever compiles
            await asyncio.gather(*(one(session, way, routers.get(way, engines[0])) for way in ways))
        for way in ways:
            found[way].clear(), decisions[way].clear()
        for turn in range(2 * round(seconds / TURN_S)):
            way = ways[turn % len(ways)]
            begun = time.perf_counter()
            async with asyncio.TaskGroup() as group:  # ends when the turn's streams have: turns do not overlap
                for j in range(int(QPS * TURN_S)):
                    if (left := begun + j / QPS - time.perf_counter()) > 0:
                        await asyncio.sleep(left)
                    group.create_task(one(session, way, routers.get(way, engines[j % ENGINES])))
    return found, decisions


def run(seconds):
    code = ENGINE_PROCESS.format(n=ENGINES, first=FIRST_S, token=TOKEN_S)
    rows = []
    with process([sys.executable, "-c", code]) as (engines, _):
        for name, options in KINDS.items():
            command = [sys.executable, "-m", "astrolabe_lab.cli", "route", "--engines", ",".join(engines)]
            with process([*command, "--model", "m", *options]) as (router, running):
                before = running.cpu_times()
                found, decisions = asyncio.run(measure(engines, {name: router["url"]}, seconds))
                after = running.cpu_times()
                cpu_s = after.user + after.system - before.user - before.system
            direct, routed = np.array(found["direct"]) * 1e3, np.array(found[name]) * 1e3
            rows.append(
                {
                    "router": name,
                    "requests": len(direct) + len(routed),
                    "direct_median_ms": np.median(direct),
                    "direct_p99_ms": np.percentile(direct, 99),
                    "routed_median_ms": np.median(routed),
                    "routed_p99_ms": np.percentile(routed, 99),
                    "added_median_ms": np.median(routed) - np.median(direct),
                    "added_p99_ms": np.percentile(routed, 99) - np.percentile(direct, 99),
                    "decision_median_ms": np.median(decisions[name]),
                    "router_cpu_ms_per_request": 1e3 * cpu_s / len(routed),
                    "decision_p99_ms": np.percentile(decisions[name], 99),
                }
            )
    return [{k: v if isinstance(v, str | int) else round(float(v), 3) for k, v in row.items()} for row in rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of load, each way, for each of the two routers")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the table")
    args = parser.parse_args()
    allow_open_files()
    before = machine()
    rows = run(args.seconds)
    after = machine()
    plain, predicting = rows
    verdicts = {
        "added median <= 3 ms": predicting["added_median_ms"] <= REACH["median"],
        "added p99 <= 20 ms": predicting["added_p99_ms"] <= REACH["p99"],
        "prediction adds <= 1 ms": predicting["decision_median_ms"] - plain["decision_median_ms"]
        <= REACH["prediction"],
    }
    if args.json:
        print(json.dumps({"machine": before, "rows": rows, "verdicts": verdicts}))
        return
    loads = f"{before['load_average_1min']} before, {after['load_average_1min']} after"
    print(f"{before['processor']}, {before['cores']} cores, load average {loads}")
    print(f"{QPS:g} requests/s of {TOKENS} tokens, in turns directly and through the router")
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    for what, met in verdicts.items():
        print(f"{what}: {'reached' if met else 'missed'}")


if __name__ == "__main__":
    main()
