"""``astrolabe simulate``: replay a trace on N simulated engines under one policy."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
import warnings
from pathlib import Path

from astrolabe_lab.cli import pools
from astrolabe_lab.cli.requests import add_arrivals, add_loading, load_requests
from astrolabe_lab.cli.values import noise, number, output_file, span, whole
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import SPECS

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


REGIMES = {
    "steady": "a longer run would show much the same",
    "short": "too short to say whether queues keep growing; throughput counts the time to drain",
    "finite-trace": "queues kept growing: latencies grow with the number of requests",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser the options of ``simulate``."""
    parser.usage = "%(prog)s --trace FILE --policy NAME (--instances N | --pools P+D) --out FILE [option ...]"
    arrives = parser.add_argument_group("what arrives").add_argument
    arrives("--trace", required=True, metavar="FILE|GENERATOR", help=f"a trace file, also .gz; or {SPECS}")
    add_loading(arrives)
    add_arrivals(arrives)
    arrives(
        "--lengths",
        metavar="SPEC",
        help="predicted lengths: trace, oracle, constant:N, noisy:REL or tagger:DIR (default: the trace's, if any)",
    )

    goes = parser.add_argument_group("where it goes").add_argument
    goes("--policy", required=True, metavar="NAME[:key=value,...]", help="`astrolabe policies` lists them")
    goes("--instances", type=whole(1), metavar="N", help="number of engines")
    goes("--pools", metavar="P+D", help="instead: so many prefill and decode engines, such as 2+4")
    add_engine(goes, "with --pools: the second paper's Qwen2.5-3B on A40")
    add_knowledge(parser)
    pools.add_pools(parser)
    parser.add_argument("--seed", type=whole(0), default=0, metavar="S", help="of every random stream (0)")
    parser.add_argument(
        "--policy-seed",
        type=whole(0),
        metavar="S",
        help="of the routers' own draws: the same requests under other luck (default: --seed)",
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="the result: .parquet, .csv or .csv.gz")


def add_engine(goes, also: str = "") -> None:
    """Give an option group what says which engines run, read by ``engine_and_cost``. ``also``: another default of
    --preset, and when."""
    default = "; ".join(filter(None, (f"default: {DEFAULT_PRESET}", also)))
    goes(
        "--preset",
        metavar="NAME",
        help=f"step cost and engine of a measured device ({default}, unless --cost is given)",
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
        "both regimes, decode.KEY or mixed.KEY one; keys left out are the preset's, or 0; also pad_sizes=1/2/4/8 "
        "(CUDA graphs) and frontend_s (delays the client, not the step)",
    )


def add_knowledge(parser: argparse.ArgumentParser) -> None:
    """Give the parser what says which delays and errors routers have, read by ``control_plane``."""
    knows = parser.add_argument_group("what the router knows, and when").add_argument
    knows(
        "--delays",
        choices=("none", "paper"),
        default="none",
        help="paper: the Astrolabe paper's measured delays, for those not given here",
    )
    knows("--status-interval-s", type=number(), metavar="S", help="refresh of status (0: at each decision)")
    knows("--tag-s", type=number(), metavar="S", help="time to predict a length")
    knows(
        "--predict-s",
        type=span,
        metavar="S|LOW,HIGH",
        help="time of one latency prediction; a range is drawn from uniformly",
    )
    knows("--dispatch-s", type=number(), metavar="S", help="time from decision to engine")
    knows("--routers", type=whole(1), metavar="N", help="routers, blind to each other's dispatches")
    knows(
        "--latency-noise",
        type=noise,
        default={},
        metavar="common=REL,candidate=REL",
        help="relative error of predicted latencies: one draw a decision, one an instance",
    )


def simulate(args: argparse.Namespace) -> tuple[dict, str]:
    """Replay the trace, write the result, return the record and the table. Raises InputError."""
    from astrolabe_lab import length, policies, result
    from astrolabe_lab.cost import RangeWarning
    from astrolabe_lab.measure import summarise
    from astrolabe_lab.sim.cluster import LatencyNoise
    from astrolabe_lab.sim.cluster import simulate as replay
    from astrolabe_lab.sweep.identity import code

    out = output_file(args.out)
    if out.exists() and Path(args.trace).exists() and out.samefile(args.trace):
        raise InputError(f"--out {out} is the trace itself, which the result would replace; give another name")
    if (args.instances is None) == (args.pools is None):
        raise InputError("give --instances N for engines that do both phases, or --pools P+D for prefill and decode")
    if args.pools is not None:
        return _simulate_pools(args, out)
    pools.refuse_without_pools(args)
    policy = policies.parse(args.policy)
    engine, cost, preset = engine_and_cost(args)
    control = control_plane(args)
    latency_noise = LatencyNoise(**args.latency_noise)
    requests = load_requests(args, text=False)
    if args.lengths:
        requests = length.attach(requests, args.lengths, seed=args.seed)

    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RangeWarning)  # said already
        frame = replay(
            requests,
            policy,
            instances=args.instances,
            engine=engine,
            cost=cost,
            control=control,
            seed=args.seed,
            policy_seed=args.policy_seed,
            latency_noise=latency_noise,
            progress=_Progress(),
        )
    wall_s = time.perf_counter() - began

    named = "trace qps arrivals alpha lengths policy instances seed policy_seed".split()
    asked = {name: getattr(args, name) for name in named}
    settings = asked | {
        "preset": preset,
        "engine": dataclasses.asdict(engine),
        "cost": cost.to_dict(),
        "control": dataclasses.asdict(control),
        "latency_noise": dataclasses.asdict(latency_noise),
        "code": code(),
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


def _simulate_pools(args, out):
    from astrolabe_lab import length, result
    from astrolabe_lab.disagg.simulate import paper_world
    from astrolabe_lab.measure import summarise
    from astrolabe_lab.sweep.identity import code

    preset = None
    engine, cost = paper_world()
    if args.preset is not None or args.cost is not None:
        engine, cost, preset = engine_and_cost(args)
    elif args.engine:
        engine = type(engine).parse(args.engine, base=engine)
    requests = load_requests(args, text=False)
    if args.lengths:
        requests = length.attach(requests, args.lengths, seed=args.seed)
    frame, own, lines = pools.simulate(args, requests, engine, cost, preset, _Progress())
    named = "trace qps arrivals alpha lengths policy seed policy_seed".split()
    settings = {name: getattr(args, name) for name in named} | own
    settings |= {"engine": dataclasses.asdict(engine), "cost": cost.to_dict(), "code": code()}
    result.save(frame, out, **settings)
    summary = summarise(frame, by=()).to_dict("records")[0]
    table = _table(args, engine, preset, summary, own["wall_s"], out).splitlines()
    at = next(i for i, line in enumerate(table) if line.startswith("throughput"))
    record = {"out": str(out), "rows": len(frame), "source": "simulated", "summary": summary}
    return record | settings, "\n".join([*table[:at], *lines, *table[at:]])


class _Progress:
    """Says on stderr, at most every two seconds, how far the replay is."""

    def __init__(self):
        self.said = time.monotonic()

    def __call__(self, done, total):
        if time.monotonic() - self.said >= 2.0:
            self.said = time.monotonic()
            _log(f"{done:,} of {total:,} requests dispatched")


def control_plane(args):
    """The ControlPlane of the options that ``add_knowledge`` gave the parser."""
    from astrolabe_lab.sim.world import ControlPlane

    base = ControlPlane.paper() if args.delays == "paper" else ControlPlane()
    names = (field.name for field in dataclasses.fields(ControlPlane))
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return dataclasses.replace(base, **given)


def engine_and_cost(args):
    """(EngineConfig, StepCost, preset name or None) of the options that ``add_engine`` gave the parser."""
    from astrolabe_lab.cost import StepCost, preset
    from astrolabe_lab.sim.config import EngineConfig

    name = args.preset
    if name is None and args.cost is None:
        name = DEFAULT_PRESET
    known = preset(name) if name is not None else None
    engine = EngineConfig.from_dict(known.engine) if known else EngineConfig()
    cost = StepCost.parse(args.cost or "", base=known.cost if known else None)
    engine = EngineConfig.parse(args.engine, base=engine)
    for line in cost.outside(engine):
        _log(f"warning: {line}; past it the cost is a guess")
    return engine, cost, name


def _table(args, engine, preset, summary, wall_s, out):
    where = f"{args.pools} simulated prefill and decode engines"
    if args.pools is None:
        where = f"{args.instances} simulated instance{'s' * (args.instances > 1)}"
    kind = f"preset {preset}" if preset else "cost as given"
    if preset is None and args.cost is None:
        kind = "Qwen2.5-3B on A40 as in Calibrate, Then Route"
    unwell = "".join(f", {summary[name]:,} {name}" for name in ("rejected", "failed", "aborted") if summary[name])
    arrivals = "the trace's own times" if args.arrivals == "trace" else args.arrivals
    rate = "" if args.qps is None else f" at {args.qps:g} requests/s"
    lines = [
        f"{args.policy} on {where}, seed {args.seed}",
        f"arrivals    {arrivals}{rate}",
        f"engine      {kind}, scheduler {engine.scheduler}",
        f"requests    {summary['n']:,}: {summary['ok']:,} ok{unwell}",
        f"            {'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}",
    ]
    if summary["rejected"]:
        lines.insert(
            4,
            f"rejected    at arrival: they can never run with max_model_len={engine.max_model_len} "
            f"and num_gpu_blocks={engine.num_gpu_blocks}",
        )
    for name in ("ttft", "tpot", "e2e"):
        cells = "".join(f"{_seconds(summary[f'{name}_{which}_s']):>10}" for which in ("mean", "p50", "p90", "p99"))
        lines.append(f"{name.upper() + ' s':12}{cells}")
    if unwell:
        lines.append(f"            of the {summary['ok']:,} that ended well")
    lines += [
        f"throughput  {summary['throughput_rps']:.4g} requests/s, "
        f"{summary['output_tokens_per_s']:,.0f} output tokens/s",
        f"preemptions {summary['preemptions']:,}",
        f"regime      {summary['regime']}: {REGIMES[summary['regime']]}",
        f"wrote {out} ({summary['n']:,} rows; simulated in {wall_s:.2f} s)",
    ]
    return "\n".join(lines)


def _seconds(value):
    return "-" if math.isnan(value) else f"{value:.4f}"


def _log(line):
    print(f"astrolabe: {line}", file=sys.stderr, flush=True)
