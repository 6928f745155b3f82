"""``astrolabe bench``: a trace's requests against a running router or engine."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import time
from pathlib import Path

from astrolabe_lab.alone import alone
from astrolabe_lab.cli import requests as cli_requests
from astrolabe_lab.cli.values import number, output_file, whole
from astrolabe_lab.urls import url_of, urls_of

SUMMARY = "send a trace's requests to a running router and measure what comes back"
EXAMPLE = (
    "astrolabe bench --cluster /tmp/cluster --url http://127.0.0.1:8000 --trace sharegpt_like --requests 200 --qps 6 "
    "--out live.parquet"
)
DETAILS = (
    "Open loop unless --concurrency is given. Every request leaves at its time; a run in which the generator itself "
    "was late says that it is invalid. Before it, gates: the engines are idle and warm, count tokens as asked, give "
    "equal answers and hold no prefix. Rows are kept as they come: a run that was ended goes on by the same command."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", required=True, metavar="URL", help="of the router or engine, without /v1")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--cluster", metavar="DIR", help="of astrolabe launch: engines, model and time scale")
    where.add_argument("--engines", metavar="URL,...", help="the engines behind the router, for the gates")
    add("--gates", choices=("require", "report", "off"), default="require", help="before measuring (default: require)")
    add("--model", metavar="NAME", help="the served model (default: the cluster's, or emulated)")
    add("--trace", required=True, metavar="FILE|GENERATOR", help="as for astrolabe simulate")
    cli_requests.add_loading(add)
    cli_requests.add_arrivals(add)
    add("--lengths", default="trace", metavar="SPEC", help="predicted lengths to send along: as for simulate, or none")
    add("--exact", action="store_true", help="every answer exactly as long as the trace says (ignore_eos)")
    add("--concurrency", type=whole(0), default=0, metavar="N", help="closed loop of N requests (default: open)")
    add("--ramp-s", type=number(), default=0.0, metavar="S", help="of a closed loop: until all N are under way")
    add("--time-scale", type=number(above=0), metavar="X", help="wall s per modelled s (default: the cluster's, or 1)")
    add("--timeout-s", type=number(above=0), default=600.0, metavar="S", help="for one request, modelled")
    add("--ttft-slo-s", type=number(above=0), default=10.0, metavar="S", help="1 %% of it bounds our own lateness")
    add("--slo", metavar="ttft_s=X,...", help="targets (ttft_s, tpot_s, e2e_s): report goodput, from schedule and send")
    add("--seed", type=whole(0), default=0, metavar="S", help="of arrivals, lengths and made-up prompts")
    add("--out", required=True, metavar="FILE", help="result frame: .parquet, .csv or .csv.gz")


def bench(args: argparse.Namespace) -> tuple[dict, str]:

    out = output_file(args.out)
    keep = out.with_name(out.name + ".rows.jsonl")
    with alone(keep):  # before the gates: two runs would ask the same engines
        return _measured(args, out, keep)


def _measured(args: argparse.Namespace, out: Path, keep: Path) -> tuple[dict, str]:
    from astrolabe_lab import length
    from astrolabe_lab.bench import Load, both_goodputs, run
    from astrolabe_lab.bench.engines import preemptions
    from astrolabe_lab.bench.host import HostPace
    from astrolabe_lab.measure import summarise
    from astrolabe_lab.measure.slo import SLO
    from astrolabe_lab.result import save

    slo = SLO.parse(args.slo) if args.slo else None
    args.url = url_of(args.url, "--url")
    engines, paces = _places(args)
    trace = cli_requests.load_requests(args)
    tells = args.lengths != "none" and (args.lengths != "trace" or "predicted_tokens" in trace)
    if tells and args.lengths != "trace":
        trace = length.attach(trace, args.lengths, args.seed)
    load = Load(
        args.model, args.exact, args.concurrency, tells, args.time_scale, args.timeout_s, args.seed, args.ttft_slo_s,
        args.ramp_s, False, args.source, os.environ.get("ASTROLABE_API_KEY") or None,
    )  # fmt: skip
    if out.exists() and not keep.exists():
        _say(f"{out} holds a finished run, which this one will replace")
    verdicts = asyncio.run(_gates(args, engines, load))
    before = asyncio.run(preemptions(engines))
    pace = HostPace(paces)
    try:
        results = run(args.url, trace, load, _progress(), keep)
    except KeyboardInterrupt:
        _say(f"rows so far are kept in {keep}; the same command goes on")
        raise
    validity = pace.judge(results.attrs["validity"])
    gates = [{"gate": one.gate, "ok": one.ok, "detail": one.detail} for one in verdicts]
    if failed := [one.gate for one in verdicts if not one.ok]:
        validity = validity | {"valid": False, "why": [*validity["why"], f"gates failed: {', '.join(failed)}"]}
    if not verdicts:
        validity = validity | {"notes": [*validity["notes"], "no gate was asked: the engines may be cold or cached"]}
    whole = results["segment"].max() == 0  # else the engines' counts of the first part are not known
    counted = asyncio.run(preemptions(engines)) - before if whole else math.nan
    preempted = int(counted) if counted >= 0 else None  # below 0: an engine has started anew
    about = {key: value for key, value in vars(args).items() if key not in ("command", "api_key")}
    save(results, out, url=args.url, validity=validity, gates=gates, preemptions=preempted, load=about)
    keep.unlink(missing_ok=True)
    row = summarise(results).iloc[0].to_dict() | (both_goodputs(results, slo) if slo else {})
    row["preemptions"] = preempted
    row |= {f"itl_{which}_s": value if whole else math.nan for which, value in results.attrs["itl"].items()}
    counts = results["status"].value_counts().to_dict()
    record = {"out": str(out), "validity": validity, "gates": gates, "status": counts, **row}
    text = [
        f"wrote {out}: {', '.join(f'{n} {status}' for status, n in counts.items())}",
        f"{row['duration_s']:.1f} s{_which_seconds(load.time_scale)}, {row['throughput_rps']:.3g} requests/s, "
        f"{row['output_tokens_per_s']:.4g} output tokens/s, {row['total_tokens_per_s']:.4g} tokens/s in all",
        f"{'':5s} {'mean':>10s} {'p50':>10s} {'p90':>10s} {'p99':>10s}",
    ]
    for stem in ("ttft", "tpot", "itl", "e2e"):
        values = [row[f"{stem}_{which}_s"] for which in ("mean", "p50", "p90", "p99")]
        text.append(f"{stem:5s} " + " ".join(f"{value:8.4f} s" for value in values))
    if slo:
        for name, since in (("", "schedule"), ("_from_send", "send")):
            text.append(
                f"goodput from {since}: {row[f'goodput_rps{name}']:.2f} requests/s, "
                f"{row[f'goodput_share{name}']:.1%} of those sent"
            )
    text += [f"note: {note}" for note in validity["notes"]]
    text += [f"INVALID: {why}" for why in validity["why"]] or ["valid: requests left on time and the engines kept up"]
    return record, "\n".join(text)


def _which_seconds(time_scale: float) -> str:
    return "" if time_scale == 1 else f" of modelled time ({time_scale:g} wall s each, in all that follows)"


def _places(args) -> tuple[list[str], list[str]]:
    """(the engines' URLs, their pace files); fills in model, time scale and source."""
    args.source = "hardware"
    if not args.cluster:
        args.model, args.time_scale = args.model or "emulated", args.time_scale or 1.0
        return [] if args.engines is None else urls_of(args.engines, "--engines"), []
    from astrolabe_lab.engines.cluster_file import read_cluster

    cluster = read_cluster(args.cluster)
    args.model, args.time_scale = args.model or cluster.model, args.time_scale or cluster.time_scale
    args.source = cluster.world
    return [e["url"] for e in cluster.engines], [e["pace"] for e in cluster.engines if "pace" in e]


async def _gates(args, engines: list[str], load) -> list:
    import aiohttp

    from astrolabe_lab.bench import ask_served, check, require

    async with aiohttp.ClientSession() as session:
        served = await ask_served(session, args.url, load.model, load.headers)
    if args.gates == "off":
        return []
    if not engines and served.router:
        _say("no gate is asked: name the engines behind the router by --cluster or --engines (or say --gates off)")
        return []
    verdicts = await check(engines or [args.url], load.model, time_scale=load.time_scale, say=_say)
    if args.gates == "require":
        require(verdicts)
    return verdicts


def _progress():
    started = time.monotonic()
    spoken = started

    def progress(done: int, of: int) -> None:
        nonlocal spoken
        if done == of or time.monotonic() - spoken > 5.0:
            spoken = time.monotonic()
            _say(f"{done} of {of} answers after {spoken - started:.0f} s")

    return progress


def _say(line: object) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)
