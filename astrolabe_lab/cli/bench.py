"""``astrolabe bench``: a trace's requests against a running router or engine."""

from __future__ import annotations

import argparse
import sys
import time

from astrolabe_lab.cli import requests as cli_requests
from astrolabe_lab.cli.values import number, whole

SUMMARY = "send a trace's requests to a running router and measure what comes back"
EXAMPLE = "astrolabe bench --url http://127.0.0.1:8000 --trace sharegpt_like --requests 200 --qps 6 --out live.parquet"
DETAILS = (
    "Open loop unless --concurrency is given. Every request leaves at its time; a run in which the generator itself "
    "was late says that it is invalid."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", required=True, metavar="URL", help="of the router or engine, without /v1")
    add("--model", default="emulated", metavar="NAME", help="the served model (default: emulated)")
    add("--trace", required=True, metavar="FILE|GENERATOR", help="as for astrolabe simulate")
    cli_requests.add_loading(add)
    cli_requests.add_arrivals(add)
    add("--lengths", default="trace", metavar="SPEC", help="predicted lengths to send along: as for simulate, or none")
    add("--exact", action="store_true", help="every answer exactly as long as the trace says (ignore_eos)")
    add("--concurrency", type=whole(0), default=0, metavar="N", help="closed loop of N requests (default: open)")
    add("--time-scale", type=number(above=0), default=1.0, metavar="X", help="wall s per modelled s (default: 1)")
    add("--timeout-s", type=number(above=0), default=600.0, metavar="S", help="for one request, modelled")
    add("--ttft-slo-s", type=number(above=0), default=10.0, metavar="S", help="1 %% of it bounds our own lateness")
    add("--seed", type=whole(0), default=0, metavar="S", help="of arrivals, lengths and made-up prompts")
    add("--out", required=True, metavar="FILE", help="result frame: .parquet, .csv or .csv.gz")


def bench(args: argparse.Namespace) -> tuple[dict, str]:
    from astrolabe_lab import length
    from astrolabe_lab.bench import Load, run
    from astrolabe_lab.measure import summarise
    from astrolabe_lab.result import check_output, save

    out = check_output(args.out)
    trace = cli_requests.load_requests(args)
    tells = args.lengths != "none" and (args.lengths != "trace" or "predicted_tokens" in trace)
    if tells and args.lengths != "trace":
        trace = length.attach(trace, args.lengths, args.seed)
    load = Load(
        args.model, args.exact, args.concurrency, tells, args.time_scale, args.timeout_s, args.seed, args.ttft_slo_s
    )
    started = time.monotonic()
    spoken = started

    def progress(done: int, of: int) -> None:
        nonlocal spoken
        if done == of or time.monotonic() - spoken > 5.0:
            spoken = time.monotonic()
            print(f"bench: {done} of {of} answers after {spoken - started:.0f} s", file=sys.stderr, flush=True)

    results = run(args.url.rstrip("/"), trace, load, progress)
    validity = results.attrs["validity"]
    save(results, out, url=args.url, validity=validity, load=vars(args) | {"command": None})
    row = summarise(results).iloc[0].to_dict()
    counts = results["status"].value_counts().to_dict()
    record = {"out": str(out), "validity": validity, "status": counts, **row}
    text = [f"wrote {out}: {', '.join(f'{n} {status}' for status, n in counts.items())}"]
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        stem = name.removesuffix("_s")
        text.append(f"{stem:5s} mean {row[f'{stem}_mean_s']:.4f} s   p99 {row[f'{stem}_p99_s']:.4f} s")
    text += [f"INVALID: {why}" for why in validity["why"]]
    return record, "\n".join(text)
