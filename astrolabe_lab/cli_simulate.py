"""``astrolabe simulate``: replay a trace on N simulated engines under one policy."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from pathlib import Path

from astrolabe_lab.errors import InputError

DEFAULT_PRESET = "llama2-7b-a30"
SUMMARY = "replay a trace on N simulated engines under one dispatch policy"
EXAMPLE = (
    "astrolabe simulate --trace T.csv --qps 28 --lengths oracle --policy astrolabe:k=2 --instances 12 \\\n"
    "    --out R.parquet"
)
DETAILS = (
    "A CSV or Parquet trace has the columns arrived_s (s, non-decreasing; or give --qps), prompt_tokens and "
    "output_tokens, and optionally rid, predicted_tokens, slo (tight or loose), family and prompt. "
    "The result has one row per arrived request, also for those that were rejected; times are modelled "
    "seconds. Unless the options below say otherwise, every router sees fresh state and decides in no time."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser the options of ``simulate``."""
    parser.usage = "%(prog)s --trace FILE --policy NAME --instances N --out FILE [option ...]"
    arrives = parser.add_argument_group("what arrives").add_argument
    arrives("--trace", required=True, metavar="FILE", help="CSV, Parquet, Azure, Vidur, ShareGPT; also .gz")
    arrives("--format", help="csv, parquet, azure, vidur or sharegpt (default: the content tells)")
    arrives(
        "--on-bad", choices=("error", "drop"), default="error", help="bad rows: refuse them, or drop them"
    )
    arrives(
        "--unsorted", choices=("error", "sort"), default="error", help="times that go back: refuse or sort"
    )
    arrives("--limit", type=_whole(1), metavar="N", help="only the first N requests")
    arrives("--qps", type=_number(above=0), help="requests a second (default: the trace's own times)")
    arrives(
        "--arrivals",
        choices=("poisson", "gamma", "constant", "trace"),
        help="with --qps (default: poisson); trace stretches the trace's own times to the rate",
    )
    arrives("--alpha", type=_number(above=0), help="shape of gamma gaps; below 1 is burstier than Poisson")
    arrives(
        "--lengths",
        metavar="SPEC",
        help="predicted lengths: trace, oracle, constant:N, noisy:REL or tagger:DIR (default: the trace's, if any)",
    )

    goes = parser.add_argument_group("where it goes").add_argument
    goes("--policy", required=True, metavar="NAME[:key=value,...]", help="`astrolabe policies` lists them")
    goes("--instances", required=True, type=_whole(1), metavar="N", help="number of engines")
    goes(
        "--preset",
        metavar="NAME",
        help=f"step cost and engine of a measured device (default: {DEFAULT_PRESET}, unless --cost is given)",
    )
    goes(
        "--engine",
        default="",
        metavar="key=value,...",
        help="vLLM's own flags, such as max_num_seqs=48; also scheduler=v1|v0_chunked|v0_prefill_first",
    )
    goes(
        "--cost",
        metavar="key=value,...",
        help="step cost: host_s, base_s, per_token_s, per_seq_s, per_kv_token_s, attention_s; a key sets "
        "both regimes, decode.KEY or mixed.KEY one; keys left out are the preset's, or 0",
    )

    knows = parser.add_argument_group("what the router knows, and when").add_argument
    knows(
        "--delays",
        choices=("none", "paper"),
        default="none",
        help="paper: the Astrolabe paper's measured delays, for those not given here",
    )
    knows("--status-interval-s", type=_number(), metavar="S", help="refresh of status (0: at each decision)")
    knows("--tag-s", type=_number(), metavar="S", help="time to predict a length")
    knows(
        "--predict-s",
        type=_span,
        metavar="S|LOW,HIGH",
        help="time of one latency prediction; a range is drawn from uniformly",
    )
    knows("--dispatch-s", type=_number(), metavar="S", help="time from decision to engine")
    knows("--routers", type=_whole(1), metavar="N", help="routers, blind to each other's dispatches")
    knows(
        "--latency-noise",
        type=_noise,
        default={},
        metavar="common=REL,candidate=REL",
        help="relative error of predicted latencies: one draw a decision, one an instance",
    )

    parser.add_argument("--seed", type=_whole(0), default=0, metavar="S", help="of every random stream (0)")
    parser.add_argument("--out", required=True, metavar="FILE", help="the result: .parquet, .csv or .csv.gz")


def simulate(args: argparse.Namespace) -> tuple[dict, str]:
    """Replay the trace, write the result, return the record and the table. Raises InputError."""
    from astrolabe_lab import length, policies, result
    from astrolabe_lab.measure import summarise
    from astrolabe_lab.sim.cluster import LatencyNoise
    from astrolabe_lab.sim.cluster import simulate as replay

    out = result.check_output(args.out)
    if out.exists() and Path(args.trace).exists() and out.samefile(args.trace):
        raise InputError(f"--out {out} is the trace itself, which the result would replace; give another name")
    policy = policies.parse(args.policy)
    engine, cost, preset = _engine_and_cost(args)
    control = _control(args)
    noise = LatencyNoise(**args.latency_noise)
    requests = _arrivals(args)
    if args.lengths:
        requests = length.attach(requests, args.lengths, seed=args.seed)

    began = time.perf_counter()
    frame = replay(
        requests,
        policy,
        instances=args.instances,
        engine=engine,
        cost=cost,
        control=control,
        seed=args.seed,
        latency_noise=noise,
        progress=_Progress(),
    )
    wall_s = time.perf_counter() - began

    asked = {
        name: getattr(args, name) for name in "trace qps arrivals alpha lengths policy instances seed".split()
    }
    settings = asked | {
        "preset": preset,
        "engine": dataclasses.asdict(engine),
        "cost": cost.to_dict(),
        "control": dataclasses.asdict(control),
        "latency_noise": dataclasses.asdict(noise),
    }
    result.save(frame, out, **settings)
    summary = summarise(frame, by=()).to_dict("records")[0]
    record = {
        "out": str(out),
        "rows": len(frame),
        "source": "simulated",
        "wall_s": wall_s,
        "summary": summary,
    }
    return record | settings, _table(args, engine, preset, summary, wall_s, out)


class _Progress:
    """Says on stderr, at most every two seconds, how far the replay is."""

    def __init__(self):
        self.said = time.monotonic()

    def __call__(self, done, total):
        if time.monotonic() - self.said >= 2.0:
            self.said = time.monotonic()
            _log(f"{done:,} of {total:,} requests dispatched")


def _control(args):
    from astrolabe_lab.sim.world import ControlPlane

    base = ControlPlane.paper() if args.delays == "paper" else ControlPlane()
    names = (field.name for field in dataclasses.fields(ControlPlane))
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return dataclasses.replace(base, **given)


def _engine_and_cost(args):
    from astrolabe_lab.cost import StepCost, preset
    from astrolabe_lab.sim.config import EngineConfig

    name = args.preset
    if name is None and args.cost is None:
        name = DEFAULT_PRESET
    known = preset(name) if name is not None else None
    engine = EngineConfig.from_dict(known.engine) if known else EngineConfig()
    cost = StepCost.parse(args.cost or "", base=known.cost if known else None)
    return EngineConfig.parse(args.engine, base=engine), cost, name


def _arrivals(args):
    """The requests of the trace with their times."""
    from astrolabe_lab import trace
    from astrolabe_lab.arrivals import with_arrivals

    kind = args.arrivals = args.arrivals or ("trace" if args.qps is None else "poisson")
    if args.qps is None and kind != "trace":
        raise InputError(f"--arrivals {kind} needs a rate: give --qps")
    if args.alpha is not None and kind != "gamma":
        raise InputError("--alpha is the shape of gamma gaps: give --arrivals gamma with it")
    if args.alpha is None and kind == "gamma":
        raise InputError("--arrivals gamma needs its shape: give --alpha (1 is Poisson, below 1 is burstier)")
    requests = trace.load(args.trace, args.format, args.on_bad, unsorted=args.unsorted)
    for count, what in (
        ("bad_rows", "bad rows left out"),
        ("out_of_order_rows", "rows out of order, sorted"),
    ):
        if requests.attrs.get(count):
            n = requests.attrs[count]
            _log(f"{args.trace}: {n:,} {what if n > 1 else what.replace('rows', 'row', 1)}")
    if kind == "trace" and "arrived_s" not in requests:
        raise InputError(f"{args.trace} has no arrival times: give --qps")
    if args.limit:
        requests = requests.head(args.limit)
    return (
        requests
        if kind == "trace" and args.qps is None
        else with_arrivals(requests, args.qps, kind, seed=args.seed, alpha=args.alpha)
    )


def _table(args, engine, preset, summary, wall_s, out):
    unwell = "".join(
        f", {summary[name]:,} {name}" for name in ("rejected", "failed", "aborted") if summary[name]
    )
    lines = [
        f"{args.policy} on {args.instances} simulated instance{'s' * (args.instances > 1)}, seed {args.seed}",
        f"engine      {f'preset {preset}' if preset else 'cost as given'}, scheduler {engine.scheduler}",
        f"requests    {summary['n']:,}: {summary['ok']:,} ok{unwell}",
        f"            {'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}",
    ]
    if summary["rejected"]:
        lines.insert(
            3,
            f"rejected    at arrival: they can never run with max_model_len={engine.max_model_len} "
            f"and num_gpu_blocks={engine.num_gpu_blocks}",
        )
    for name in ("ttft", "tpot", "e2e"):
        cells = "".join(f"{_seconds(summary[f'{name}_{which}_s']):>10}" for which in ("mean", "p50", "p90", "p99"))
        lines.append(f"{name.upper() + ' s':12}{cells}")
    lines += [
        f"throughput  {summary['throughput_rps']:.4g} requests/s, "
        f"{summary['output_tokens_per_s']:,.0f} output tokens/s",
        f"preemptions {summary['preemptions']:,}",
        f"wrote {out} ({summary['n']:,} rows; simulated in {wall_s:.2f} s)",
    ]
    return "\n".join(lines)


def _seconds(value):
    return "-" if math.isnan(value) else f"{value:.4f}"


def _log(line):
    print(f"astrolabe: {line}", file=sys.stderr, flush=True)


# --- values of options ------------------------------------------------------------------------------------


def _whole(low):
    def whole(text):
        if not (text.isascii() and text.isdigit()) or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} up")
        return int(text)

    return whole


def _number(above=None):
    def number(text):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (above is not None and value <= above):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number {'>= 0' if above is None else f'> {above}'}"
            )
        return value

    return number


def _span(text):
    """``S`` as a number, ``LOW,HIGH`` as a pair of numbers."""
    parts = [_number()(part) for part in text.split(",")]
    if len(parts) > 2 or parts != sorted(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is neither S nor LOW,HIGH with LOW <= HIGH")
    return parts[0] if len(parts) == 1 else tuple(parts)


def _noise(text):
    noise = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if key not in ("common", "candidate") or not equals or key in noise:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not common=REL, candidate=REL or both with a comma"
            )
        noise[key] = _number()(value)
    return noise
