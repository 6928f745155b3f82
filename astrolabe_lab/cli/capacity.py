"""``astrolabe capacity``: the highest rate at which P99 TTFT keeps its limit, policy by policy."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from astrolabe_lab.cli import simulate as cli_simulate
from astrolabe_lab.cli.values import number, output_folder, whole
from astrolabe_lab.errors import InputError

SUMMARY = "find the highest rate at which P99 TTFT keeps its limit"
EXAMPLE = (
    "astrolabe capacity --trace T.csv --lengths oracle --policy least_loaded --policy astrolabe:k=2 \\\n"
    "    --instances 12 --out outputs/capacity"
)
DETAILS = (
    "Two capacities: finite(n), of runs of n requests that start in an empty cluster, and sustained, of runs of 30,000 "
    "in which each third keeps the limit and queues do not keep growing. A coarse scan finds the knee, steps of 0.25 "
    "QPS follow; each seed's first crossing is interpolated, and the mean over seeds has an interval. Requests that "
    "are rejected or fail count as late. With --out every run is kept: the same command goes on where it was ended. "
    "It is of whole engines; the rates that prefill and decode pools bear are found by `astrolabe studies`."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser the options of ``capacity``."""
    parser.usage = "%(prog)s --trace FILE --policy NAME [--policy NAME ...] --instances N [option ...]"
    arrives = parser.add_argument_group("what arrives").add_argument
    arrives("--trace", required=True, metavar="FILE|GENERATOR", help="a trace file or generator, without its times")
    arrives("--lengths", default="oracle", metavar="SPEC", help="predicted lengths (default: oracle)")
    arrives("--arrivals", metavar="SPEC", help="as of `astrolabe simulate` (default: poisson, or the generator's own)")
    arrives("--alpha", type=number(above=0), help="shape of gamma gaps; below 1 is burstier than Poisson")
    arrives(
        "--sample",
        choices=("auto", "head", "permute", "resample"),
        default="auto",
        help="how a seed draws its requests (default: permute where the trace has enough, else resample)",
    )
    goes = parser.add_argument_group("where it goes").add_argument
    goes("--policy", required=True, action="append", metavar="NAME[:key=value,...]", help="may be given several times")
    goes("--instances", required=True, type=whole(1), metavar="N", help="number of engines")
    goes("--pools", type=_no_pools, help=argparse.SUPPRESS)
    cli_simulate.add_engine(goes)
    cli_simulate.add_knowledge(parser)
    search = parser.add_argument_group("the search").add_argument
    search("--metric", choices=("ttft_p99", "tpot_p99", "e2e_p99"), default="ttft_p99", help="(default: ttft_p99)")
    search("--limit-s", type=number(above=0), default=10.0, metavar="S", help="that it is to stay within (default: 10)")
    search("--kind", choices=("both", "finite", "sustained"), default="both", help="(default: both)")
    search("--requests", type=whole(1), metavar="N", help="of a finite run (default: as many as the trace has)")
    search("--sustained-requests", type=whole(1), default=30_000, metavar="N", help="of a sustained run (30000)")
    search("--seeds", type=whole(1), default=10, metavar="N", help="seeds 0 .. N-1 (default: 10)")
    search("--qps", type=_range, metavar="LOW,HIGH", help="rates searched (default: 0.5 to 10 an instance)")
    search("--coarse-qps", type=number(above=0), default=2.0, metavar="QPS", help="step of the coarse scan (2)")
    search("--fine-qps", type=number(above=0), default=0.25, metavar="QPS", help="step around the knee (0.25)")
    search("--baseline", metavar="NAME", help="also tell how far the others lie from this policy, seed by seed")
    search("--workers", type=whole(1), metavar="N", help="runs at once (default: one a core)")
    search("--mix", action="store_true", help="take runs in --out that other code made")
    parser.add_argument("--out", metavar="DIR", help="folder that keeps the runs, capacity.json and capacity.parquet")


def capacity(args: argparse.Namespace) -> tuple[dict, str]:
    """Search; return the record and what a person reads. Raises InputError."""
    from astrolabe_lab import capacity, policies
    from astrolabe_lab.sim.cluster import LatencyNoise

    output_folder(args.out, files=("capacity.json", "capacity.parquet"))
    labels = list(args.policy)
    for label in labels:
        policies.parse(label)
    if args.baseline is not None and args.baseline not in labels:
        raise InputError(f"--baseline {args.baseline} is not among the policies: {', '.join(labels)}")
    engine, cost, preset = cli_simulate.engine_and_cost(args)
    kinds = ("finite", "sustained") if args.kind == "both" else (args.kind,)
    chosen = ({"mix": True} if args.mix else {}) | ({"arrivals": args.arrivals} if args.arrivals else {})
    found = capacity.find(
        args.trace, labels, kinds=kinds, metric=args.metric, limit_s=args.limit_s, requests=args.requests,
        sustained_requests=args.sustained_requests, seeds=range(args.seeds), qps_range=args.qps,
        coarse_qps=args.coarse_qps, fine_qps=args.fine_qps, sample=args.sample, instances=args.instances,
        workers=args.workers, out=args.out, lengths=args.lengths, alpha=args.alpha,
        engine=engine, cost=cost, control=cli_simulate.control_plane(args),
        latency_noise=LatencyNoise(**args.latency_noise), **chosen,
    )  # fmt: skip
    record = {
        "source": "simulated",
        "lengths": args.lengths,
        "metric": args.metric,
        "limit_s": args.limit_s,
        "instances": args.instances,
        "preset": preset,
        "engine": dataclasses.asdict(engine),
        "cost": cost.to_dict(),
        "capacities": [one.to_dict() for one in found],
    }
    text = f"predicted lengths: {args.lengths}\n" + "\n".join(map(str, found))
    if kinds == ("finite",):
        text += "\na finite capacity overstates what the cluster bears for good, the more the shorter the runs"
    bounds = [f"{one.policy}, {one.kind}" for one in found if one.censored]
    if args.baseline is not None and bounds:
        record["differences"] = None
        text += f"\nno differences: of a bound ({'; '.join(bounds)}) there is none; search wider with --qps LOW,HIGH"
    elif args.baseline is not None and len(labels) > 1:
        apart = capacity.differences(found, args.baseline)
        record["differences"] = apart.to_dict("records")
        text += f"\n\nagainst {args.baseline}, seed by seed (p corrected for {len(apart)} comparisons):"
        for row in apart.itertuples():
            verdict = "clear" if row.clear else "no winner"
            text += (
                f"\n{row.policy}, {row.kind}: {row.mean:+.2f} [{row.low:+.2f}, {row.high:+.2f}] requests/s, "
                f"p {row.p_holm:.3f}: {verdict}"
            )
    if args.out:
        text += f"\nwrote {_save(record, capacity.table(found), Path(args.out))}"
    return record, text


def _save(record, table, folder: Path) -> Path:
    from astrolabe_lab import result
    from astrolabe_lab.cli import plain
    from astrolabe_lab.record import write_whole

    result.save(table, folder / "capacity.parquet")
    write_whole(folder / "capacity.json", json.dumps(plain(record), indent=1, allow_nan=False) + "\n")
    return folder / "capacity.json"


def _no_pools(text: str):
    raise argparse.ArgumentTypeError(
        f"{text}: a capacity is of whole engines (--instances N); the rate at which prefill and decode pools keep a "
        "share of their targets is found by `astrolabe studies`, or in Python by disagg.saturation.find"
    )


def _range(text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW,HIGH in requests a second") from None
    return low, high
