"""``astrolabe calibrate``: five minutes against a cluster, and its constants in one file."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from astrolabe_lab.cli.values import number, output_file, whole
from astrolabe_lab.errors import InputError

SUMMARY = "measure a cluster's constants: step cost, prefill, decode, transfers, KV capacity, SLO targets"
EXAMPLE = "astrolabe calibrate --cluster /tmp/cluster --out C.json"
DETAILS = (
    "Streams requests of exact lengths, as a router would, for at most --budget-s; the engines should serve nothing "
    "else meanwhile. Measured on the first engine (of each pool), and at last through a router process."
)

BUSY = "was too busy to stamp tokens in time; calibrate again while this machine does nothing else"
MISSED = {
    "worst_cell": "steps of one kind are off by that share; calibrate again with more --budget-s, or where no one else "
    "asks the engines",
    "loop_lag_p99_s": f"this command {BUSY}",
    "proxy_loop_lag_p99_s": f"the router that tokens were streamed through {BUSY}",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--cluster", metavar="DIR", help="folder of a cluster that astrolabe launch started")
    where.add_argument("--engines", metavar="URL,...", help="running vLLM engines, all of one kind")
    where.add_argument("--prefill", metavar="URL,...", help="engines of the prefill pool (with --decode)")
    where.add_argument("--simulate", metavar="PRESET", help="a simulated engine: what would be found, in no time")
    add("--decode", metavar="URL,...", help="engines of the decode pool (with --prefill)")
    add("--model", metavar="NAME", help="the served model (with URLs; default: the only one served)")
    add("--device", metavar="NAME", help="what the engines run on (with URLs; default: this machine's)")
    add(
        "--engine",
        default="",
        metavar="key=value,...",
        help="engine flags (of URLs, default: as the engine says; of --simulate, default: the preset's)",
    )
    add("--time-scale", type=number(above=0), metavar="X", help="wall s per modelled s (with URLs; default: 1)")
    add(
        "--budget-s",
        type=number(above=0),
        default=300.0,
        metavar="S",
        help="at most about so long, wall time (of --simulate: simulated time); one round must fit (default: 300)",
    )
    add("--rounds", type=whole(1), default=8, metavar="N", help="at most so many passes over all cells (default: 8)")
    add("--seed", type=whole(0), default=0, metavar="S", help="of the order of what is measured")
    add("--out", required=True, metavar="FILE", help="the calibration, a .json file")
    add("--figures", metavar="FILE", help="also its figures, an .html file")


def calibrate(args: argparse.Namespace) -> tuple[dict, str]:
    from astrolabe_lab.calibrate import calibrate as measure

    output_file(args.out, "--out", (".json",), make=True)
    page = output_file(args.figures, "--figures", (".html",), make=True)
    if bool(args.prefill) != bool(args.decode):
        raise InputError("--prefill and --decode go together: the URLs of both pools")
    _refuse_what_is_told_already(args)
    target = _target(args)
    try:
        found = measure(target, budget_s=args.budget_s, seed=args.seed, rounds=args.rounds)
    finally:
        for each in target if isinstance(target, tuple) else (target,):
            if hasattr(each, "close"):
                each.close()
    path = found.save(args.out)
    if page:
        from astrolabe_lab.calibrate.figures import write_figures

        page.parent.mkdir(parents=True, exist_ok=True)
        write_figures(found, args.figures)
    record = {
        "out": str(path), "valid": found.valid, "gates": found.gates, "seconds": found.seconds,
        "rounds": found.rounds, "residuals": found.residuals, "bends": list(found.bends),
        "constants": found.constants().to_dict(), "decode_slope_s": found.decode_slope_s,
        "streamed": found.streamed and asdict(found.streamed), "figures": args.figures,
    }  # fmt: skip
    return record, describe(found, path)


def _refuse_what_is_told_already(args) -> None:
    """Raise InputError for options of engines at URLs where a cluster's folder or a simulated engine says its own."""
    at_urls = {"--model": args.model, "--device": args.device, "--time-scale": args.time_scale, "--engine": args.engine}
    if args.simulate:
        del at_urls["--engine"]
    if not (args.cluster or args.simulate):
        return
    if given := [name for name, value in at_urls.items() if value]:
        where = "the folder of --cluster says its own" if args.cluster else "an engine of --simulate has none"
        raise InputError(f"{given[0]} is of engines at URLs (--engines, --prefill): {where}; leave it out")


def _target(args):
    if args.simulate:
        from astrolabe_lab.calibrate import SimulatedTarget
        from astrolabe_lab.cost import preset
        from astrolabe_lab.sim.config import EngineConfig

        chosen = preset(args.simulate)
        config = EngineConfig.parse(args.engine, EngineConfig.from_dict(chosen.engine))
        return SimulatedTarget(config, chosen.cost, overhead_s=0.007, jitter_s=0.002, seed=args.seed)
    if args.cluster:
        return args.cluster
    from astrolabe_lab.calibrate.live import engines_at

    return engines_at(
        args.engines or args.prefill, args.decode, args.model, args.engine, args.device, args.time_scale or 1.0
    )  # fmt: skip


def describe(found, path) -> str:
    """What a person reads."""
    scaled = found.time_scale != 1
    modelled = f"; what follows is modelled time ({found.time_scale:g} wall s each)" if scaled else ""
    lines = [
        f"{found.model} on {found.device} ({found.source}), {found.rounds} round{'s' * (found.rounds > 1)} in "
        f"{found.seconds:.0f} s of {'simulated' if found.source == 'simulated' else 'wall'} time{modelled}",
        f"prefill  {_ms(found.prefill_base_s)} + {found.prefill_token_s * 1e6:.1f} us a token, of a first token",
        f"decode   {_ms(found.decode_s)} a step of one stream, {found.decode_slope_s * 1e3:.4f} ms each further one "
        f"(contexts of {found.reference_tokens})",
        f"KV cache {found.kv_blocks} blocks, {found.kv_tokens} tokens",
        f"targets  TTFT {_ms(found.slo.ttft_s)}, TPOT {_ms(found.slo.tpot_s)} (tight; loose: {found.slo.loose:g} x)",
    ]
    if seen := found.streamed:
        low, high = (1e3 * end for end in seen.slope_interval_s)
        lines.insert(
            3,
            f"streamed {_ms(seen.base_s)} a step of one stream, {1e3 * seen.slope_s:.4f} ms each further one "
            f"({low:.4f} to {high:.4f}), through a router",
        )
    if found.transfer:
        lines.insert(2, f"transfer {_ms(found.transfer.latency_s)} + {_ms(found.transfer.per_block_s)} a block")
    for regime, each in found.residuals.items():
        unseen = each.get("unseen_mean_abs_pct")  # files of before have none
        others = "" if unseen is None else f", {unseen:.1f} % where priced by the other bursts alone"
        lines.append(
            f"{regime:8} {each['windows']} windows of steps, off by {each['mean_abs_pct']:.1f} % (mean), "
            f"{each['worst_cell_pct']:.1f} % (worst cell){others}{', tabulated' if regime in found.bends else ''}"
        )
    for name, gate in found.gates.items():
        if not gate["ok"]:
            why = MISSED.get(name, "measure again on a quiet machine, or with more --budget-s")
            lines.append(f"not valid: {name} is {gate['value']:.4f}, allowed {gate['bound']:g}: {why}")
    return "\n".join([*lines, f"wrote {path}"])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def step_cost(args, own=None):
    """The step cost to predict with by --preset and --cost, of engines whose cluster tells its ``own`` or None; None
    where nobody says. Raises InputError for a preset where the cluster tells."""
    from astrolabe_lab.cost import StepCost, preset

    if args.preset and own is not None:
        raise InputError(
            f"--preset {args.preset}: cluster {args.cluster!r} tells its step cost; --cost key=value,... changes it"
        )
    cost = preset(args.preset).cost if args.preset else own
    return StepCost.parse(args.cost, cost) if args.cost else cost


def calibrated(args, model: str, config, cost=None):
    """(engine flags, calibration) of a router with these options; without a calibration (``config``, None).

    Checked against the cluster, unless it came as --constants-from: of engines at URLs, what they tell of their flags,
    with --engine on top; what neither says is taken from the calibration. Raises InputError where it is of another
    model, device or flag.
    """
    from astrolabe_lab.calibrate.artifact import load
    from astrolabe_lab.calibrate.live import device_of_cluster, flags_of, step_flags
    from astrolabe_lab.engines.cluster_file import read_cluster
    from astrolabe_lab.sim.config import EngineConfig

    refuse_two_calibrations(args)
    if not args.calibration and not args.constants_from:
        return config, None
    if args.preset:
        raise InputError("--preset and a calibration both tell flags and step cost of engines: give one of them")
    if args.constants_from:
        _warn(f"constants from {args.constants_from}, whatever they belong to")
        found = load(args.constants_from, edited=True)
        return config if args.cluster else EngineConfig.parse(args.engine, found.config), found
    found = load(args.calibration)
    wanted = {"model": model}
    url = None if args.cluster else (args.engines or args.prefill).split(",")[0].strip()
    if args.device or url is None or url.partition("//")[2].startswith(("127.0.0.1", "localhost")):
        wanted["device"] = args.device or device_of_cluster(args.cluster, cost)
    else:
        _warn(f"{url} is on another machine, so its device is not checked; --device NAME tells it")
    if url is not None:
        told = flags_of(url)
        if not told:
            _warn(f"{url} does not tell its flags, so the calibration's are believed where --engine says nothing")
        config = EngineConfig.parse(args.engine, EngineConfig.from_dict(told) if told else found.config)
    wanted["engine"] = config
    if flags := step_flags(url or read_cluster(args.cluster).engines[0]["url"]):
        wanted["flags"] = flags
    found.require(**wanted)
    if not found.valid:
        failed = ", ".join(name for name, gate in found.gates.items() if not gate["ok"])
        _warn(f"the calibration missed its own gates ({failed}): its constants may be off; calibrate again to be sure")
    return config, found


def refuse_two_calibrations(args) -> None:
    if args.calibration and args.constants_from:
        raise InputError("give --calibration, or --constants-from, which is not checked; not both")


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)
