"""``astrolabe simulate --pools P+D``: replay a trace on simulated prefill and decode pools."""

from __future__ import annotations

import argparse
import dataclasses
import time
import warnings

from astrolabe_lab.cli.values import number
from astrolabe_lab.errors import InputError

OPTIONS = ("service", "signals", "poll_s", "constants", "hand_off")
NOT_FOR_POOLS = ("delays", "status_interval_s", "tag_s", "predict_s", "dispatch_s", "routers", "latency_noise")


def add_pools(parser: argparse.ArgumentParser) -> None:
    """Give the parser the options of disaggregated serving."""
    pools = parser.add_argument_group("prefill and decode pools, with --pools").add_argument
    pools(
        "--service",
        choices=("exact", "batching", "serial"),
        help="how engines serve: vLLM's schedule (the default), or the second paper's simplifications",
    )
    pools("--signals", choices=("own", "leaked"), help="leaked: the router is told true lengths, as no proxy could be")
    pools("--poll-s", type=number(), metavar="S", help="how often the router polls the engines' occupancy (0.05)")
    pools(
        "--constants",
        metavar="FILE|NAME",
        help="what the router believes: calibrated (the default: what is true of these pools), a calibration's file, "
        "paper or paper-simulator (miscalibrated)",
    )
    pools(
        "--hand-off",
        metavar="key=value,...",
        help="how KV caches move: base_s, per_block_s, proxy_s, polls=launch|end, lease_s, heartbeat, "
        "on_failure=recompute|fail",
    )


def refuse_without_pools(args: argparse.Namespace) -> None:
    """Raise InputError for options that go with pools only."""
    for name in OPTIONS:
        if getattr(args, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} goes with --pools P+D")


def simulate(args: argparse.Namespace, requests, engine, cost, preset, progress) -> tuple[object, dict, list[str]]:
    """(result frame, settings, lines for people) of the pools that the options describe. Raises InputError."""
    from astrolabe_lab.cost import RangeWarning
    from astrolabe_lab.disagg import routers, settings
    from astrolabe_lab.disagg.simulate import calibrated, simulate_pools
    from astrolabe_lab.measure import attainment

    for name in NOT_FOR_POOLS:
        if getattr(args, name) not in (None, {}, "none"):
            raise InputError(f"--{name.replace('_', '-')} is not modelled for --pools; leave it out")
    pools = settings.parse_pools(args.pools)
    policy = routers.parse(args.policy)
    hand_off = settings.hand_off(args.hand_off or "")
    own = {"service": args.service or "exact", "signals": args.signals or "own"}
    true = calibrated(engine, cost, hand_off, own["service"])
    constants = settings.constants(args.constants or "calibrated", true)
    own["poll_s"] = 0.05 if args.poll_s is None else args.poll_s
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RangeWarning)  # said already
        frame = simulate_pools(
            requests, policy, pools=pools, engine=engine, cost=cost, hand_off=hand_off, constants=constants,
            seed=args.seed, policy_seed=args.policy_seed, progress=progress, **own,
        )  # fmt: skip
    wall_s = time.perf_counter() - began
    slo = settings.slo_of(true)
    kept = attainment(frame, slo)
    lines = [
        f"SLO         TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s for tight requests, {slo.loose_factor:g}x loose"
    ]
    for row in kept.itertuples():
        lines.append(
            f"  {row.slo:9} {row.all:8.2%} of {row.sent:,} sent within; TTFT {row.ttft:.2%}, TPOT {row.tpot:.2%}"
        )
    record = own | {
        "pools": f"{pools[0]}+{pools[1]}",
        "constants": constants.to_dict(),
        "hand_off": dataclasses.asdict(hand_off),
        "goodput_share": float(kept["all"].iloc[-1]),
        "wall_s": wall_s,
        "preset": preset,
    }
    return frame, record, lines
