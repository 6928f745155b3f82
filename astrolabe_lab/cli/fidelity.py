"""``astrolabe fidelity``: layer timings and a measured vLLM run -> how far the replayed run is from the real one."""

from __future__ import annotations

import argparse

SUMMARY = "replay a measured vLLM run on a step cost made of layer timings, and print the errors"
EXAMPLE = "astrolabe fidelity --timings RTXPRO6000_Llama-3.1-8B_bf16_tp1 --run measured_vllm/RTXPRO6000_Llama-3.1-8B"
DETAILS = (
    "The timings are a folder with attention.csv, dense.csv and per_sequence.csv, the run one with meta.json and "
    "requests.jsonl, both as LLMServingSim's profiler and bench write them; the errors in the run's summary.txt, if "
    "any, are printed beside ours. Of the requests, lengths and arrivals are used, never their times."
)
UNITS = {"ttft": ("TTFT", "s", 1.0), "tpot": ("TPOT", "ms", 1e3), "latency": ("latency", "s", 1.0)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser the options of ``fidelity``."""
    from astrolabe_lab.cli.values import number

    add = parser.add_argument
    add("--timings", required=True, metavar="DIR", help="layer timings of the model on the GPU")
    add("--run", required=True, metavar="DIR", help="a measured run of one vLLM engine on it")
    add("--model", metavar="NAME|FILE", help="the model's shape: a known name or a config.json (default: the run's)")
    add("--device", metavar="NAME", help="the GPU, for its KV capacity (default: what the run's folder names)")
    add("--engine", default="", metavar="key=value,...", help="engine flags that win over the run's own")
    add("--host-s", type=number(), metavar="S", help="host overhead of a step (default: 160e-6, from its source)")
    add(
        "--spread", type=number(), metavar="SHARE",
        help="how far a batch of unequal contexts is from the time of its mean to that of its longest "
        "(default: 0.0535, from its source; 0: by the mean alone)",
    )  # fmt: skip
    add("--out", metavar="FILE", help="write one row a request, measured and simulated: .parquet, .csv or .csv.gz")


def fidelity(args: argparse.Namespace) -> tuple[dict, str]:
    """Compare, return the record and the table. Raises InputError."""
    from astrolabe_lab import result
    from astrolabe_lab.cli.values import output_file
    from astrolabe_lab.cost import shapes
    from astrolabe_lab.fidelity import HOST_S, SPREAD_SHARE, compare
    from astrolabe_lab.fidelity.layers import LayerTimings
    from astrolabe_lab.fidelity.measured_run import MeasuredRun

    out = output_file(args.out)
    run = MeasuredRun.load(args.run)
    check = compare(
        LayerTimings.load(args.timings), run,
        shape=shapes.model(args.model or run.model),
        gpu=shapes.device(args.device) if args.device else None,
        host_s=HOST_S if args.host_s is None else args.host_s,
        spread_share=SPREAD_SHARE if args.spread is None else args.spread,
        engine=args.engine,
    )  # fmt: skip
    if out:
        result.save(check.requests, out, fidelity=check.record() | {"table": None})
    asked = {"timings": args.timings, "run": args.run, "out": str(out) if out else None}
    return check.record() | asked, describe(check)


def describe(check) -> str:
    """The comparison as a person reads it."""
    peers = bool(check.table.peer_error_pct.notna().any())
    lines = [f"{'':18}{'measured':>10}{'here':>10}{'error':>9}" + f"{'its own simulator':>20}" * peers]
    for row in check.table.itertuples():
        name, unit, factor = UNITS[row.metric]
        peer = f"{row.peer_error_pct:+19.1f}%" if row.peer_error_pct == row.peer_error_pct else ""
        lines.append(
            f"{name + ' ' + row.statistic:<14}{unit:>4}{row.measured_s * factor:10.2f}{row.simulated_s * factor:10.2f}"
            f"{row.error_pct:+8.1f}%{peer}"
        )
    fits = ", ".join(f"{name} {fit.error_pct:.1f} % (worst {fit.worst_pct:.0f} %)" for name, fit in check.fits.items())
    lines += ["", f"{len(check.requests)} requests replayed in {check.wall_s:.3f} s; steps against timings: {fits}"]
    return "\n".join(lines + [f"- {note}" for note in check.notes])
