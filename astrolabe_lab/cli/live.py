"""``astrolabe launch`` and ``astrolabe route``: engines and routers as processes that stay until told to end.

Both print one JSON line on stdout when they are ready, everything else on stderr, and end with exit code 0 on SIGTERM
or Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import threading
from pathlib import Path

from astrolabe_lab.cli.limits import add_limits, limits_of
from astrolabe_lab.cli.values import number, port, whole
from astrolabe_lab.errors import InputError
from astrolabe_lab.urls import urls_of

LAUNCH_SUMMARY = "start vLLM engines and keep them until SIGTERM"
LAUNCH_EXAMPLE = "astrolabe launch --world emulated --instances 2 --preset llama2-7b-a30 --time-scale 4"
LAUNCH_DETAILS = (
    "Prints one JSON line with every engine's URL when all are ready. Emulated engines are real vLLM engines that "
    "sleep the modelled step instead of running a model. Real ones (--world hardware) take a GPU each, or "
    "--tensor-parallel of them, or cores of their own; what --engine does not say is vLLM's own default."
)
ROUTE_SUMMARY = "serve an OpenAI-compatible router in front of running engines"
ROUTE_EXAMPLE = "astrolabe route --cluster /tmp/astrolabe-cluster-x --policy astrolabe:k=2 --port 8000"
ROUTE_DETAILS = "Prints one JSON line with its URL when it serves."
DEADLINE_MS = 50.0


def add_launch(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--world", choices=("emulated", "hardware"), default="emulated", help="what runs (default: emulated)")
    many = parser.add_mutually_exclusive_group(required=True)
    many.add_argument("--instances", type=whole(1), metavar="N", help="how many engines")
    many.add_argument("--pools", metavar="P+D", help="prefill and decode engines that hand KV blocks over, like 2+4")
    add(
        "--hand-off",
        metavar="key=value,...",
        help="how emulated pools hand over: base_s, per_block_s, expiry_s (until prefill gives up blocks that nobody "
        "pulls), fail_share (of pulls)",
    )
    add("--preset", metavar="NAME", help="model and GPU to emulate (llama2-7b-a30; pools: qwen2.5-3b-a40)")
    add("--engine", default="", metavar="key=value,...", help="change the preset's engine flags, or vLLM's defaults")
    add("--cost", default="", metavar="key=value,...", help="change the preset's step cost; of real engines, theirs")
    add("--time-scale", type=number(above=0), default=1.0, metavar="X", help="wall s per modelled s (default: 1)")
    add("--model", metavar="DIR|NAME", help="hardware: model folder or hub name (default: a small random Llama)")
    add("--model-name", metavar="NAME", help="as clients call it (default: emulated, or the model's own name)")
    add("--device", choices=("auto", "gpu", "cpu"), default="auto", help="hardware: where (default: what there is)")
    add("--tensor-parallel", type=whole(1), default=1, metavar="N", help="hardware: GPUs an engine")
    add("--gpus", metavar="ID,...", help="hardware: which (default: CUDA_VISIBLE_DEVICES, or all)")
    add("--cores", metavar="0-3|4-7", help="hardware on the CPU: cores of each engine (default: equal shares)")
    add("--flags", default="", metavar="'WORDS'", help="hardware: more flags of vLLM, like '--dtype bfloat16'")
    add("--restart", action="store_true", help="start an engine again that ends (default: say so, and end)")
    add("--out", metavar="DIR", help="folder for logs and status files (default: a temporary one)")
    add("--timeout-s", type=number(above=0), default=600.0, metavar="S", help="until all must serve")


def launch(args):
    from astrolabe_lab.engines.engine_process import EngineError
    from astrolabe_lab.engines.launch import launch as start
    from astrolabe_lab.engines.placement import parse_cores

    many, more = (args.instances,), {}
    if args.pools:
        from astrolabe_lab.disagg.settings import parse_pools
        from astrolabe_lab.serve.pools.launch import Handover
        from astrolabe_lab.serve.pools.launch import launch_pools as start

        many, more = parse_pools(args.pools), {"handover": Handover.parse(args.hand_off or "")}
    if args.hand_off and not (args.pools and args.world == "emulated"):
        raise InputError("--hand-off is of emulated pools (--pools P+D): others hand over nothing, or take their time")
    with start(
        *many, preset=args.preset, engine=args.engine, cost=args.cost, time_scale=args.time_scale, folder=args.out,
        model_name=args.model_name, timeout_s=args.timeout_s, world=args.world, model=args.model, device=args.device,
        tensor_parallel=args.tensor_parallel, gpus=args.gpus.split(",") if args.gpus else None,
        cores=parse_cores(args.cores) if args.cores else None, flags=_words(args.flags), restart=args.restart, **more,
    ) as cluster:  # fmt: skip
        _announce(cluster.describe())
        if _until_told(lambda: next(iter(cluster.lost), None)) is not None:
            lost = ", ".join(str(engine.index) for engine in cluster.lost)
            raise EngineError(f"engine {lost} ended (see above): the others are ended too")
    return None, None


def _words(flags: str) -> list[str]:
    try:
        return shlex.split(flags)
    except ValueError as error:
        raise InputError(f"--flags {flags!r} are no words of a shell: {error}") from None


def add_route(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--engines", metavar="URL,...", help="engines to route to")
    source.add_argument("--cluster", metavar="DIR", help="folder of a cluster that astrolabe launch started")
    source.add_argument("--prefill", metavar="URL,...", help="engines of a prefill pool (with --decode)")
    parser.add_argument("--decode", metavar="URL,...", help="engines of the decode pool (with --prefill)")
    parser.add_argument(
        "--policy",
        metavar="NAME[:key=value,...]",
        help="see astrolabe policies (default: astrolabe, for pools marginal_cost)",
    )
    parser.add_argument(
        "--calibration", metavar="FILE", help="of this cluster (astrolabe calibrate); others are refused"
    )
    parser.add_argument(
        "--constants-from",
        metavar="FILE|NAME",
        help="a calibration of whatever cluster, unchecked; for pools also paper, paper-simulator or constants alone",
    )
    parser.add_argument("--preset", metavar="NAME", help="step cost for the Predictors; of --engines, their flags too")
    parser.add_argument("--engine", default="", metavar="key=value,...", help="flags of --engines, if not the preset's")
    parser.add_argument("--cost", default="", metavar="key=value,...", help="change the step cost, or give it")
    parser.add_argument("--model", metavar="NAME,...", help="that --engines serve (default: emulated)")
    parser.add_argument(
        "--device", metavar="NAME", help="of --engines, which --calibration must be of (default: this machine's)"
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="tokenizer to count prompts with (default: learned ratio)")
    parser.add_argument(
        "--lengths",
        default="constant:256",
        metavar="SPEC",
        help="constant:N, or tagger:DIR or tagger:URL with ,constant=N,deadline_ms=X (default: constant:256)",
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=port, default=0, metavar="P", help="to listen on (default: a free one)")
    parser.add_argument(
        "--sidecars", metavar="URL,...", help="ask these Predictors (astrolabe sidecar), one an engine, in its order"
    )
    parser.add_argument(
        "--deadline-ms", type=number(above=0), metavar="X", help=f"for the sidecars' answers (default: {DEADLINE_MS:g})"
    )
    parser.add_argument(
        "--poll-s", type=number(above=0), metavar="S", help="of pools: modelled s between two polls of occupancy (0.05)"
    )
    parser.add_argument("--journal", metavar="FILE", help="append every decision and outcome to this file")
    parser.add_argument("--journal-prompts", action="store_true", help="with their prompts, to train a length model on")
    parser.add_argument(
        "--time-scale", type=number(above=0), metavar="X", help="of --engines: wall s per modelled s (default: 1)"
    )
    parser.add_argument("--seed", type=whole(0), default=0, metavar="S", help="of the policy's draws (default: 0)")
    add_limits(parser.add_argument)


def route(args):
    import asyncio

    from astrolabe_lab import event_loop
    from astrolabe_lab.cli import route_pools
    from astrolabe_lab.serve.listen import listening

    _check(args)
    router = route_pools.pool_router(args) if route_pools.are_meant(args) else _router(args)
    key = os.environ.get("ASTROLABE_API_KEY")
    router.api_key = key or None
    router.warm_up()

    async def serve():
        async with listening(router, args.host, args.port) as url:
            done = asyncio.Event()
            loop = asyncio.get_running_loop()
            for name in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(name, done.set)
            told = {"policy": args.policy, "engines": len(router.instances), "loop": event_loop.NAME}
            _announce({"url": url} | told)
            await done.wait()

    event_loop.run(serve())
    return None, None


def _check(args) -> None:
    """Raise InputError for options that would say nothing beside others."""
    if args.cluster:
        of_engines = {"--engine": args.engine, "--model": args.model, "--time-scale": args.time_scale,
                      "--device": args.device}  # fmt: skip
        if given := [name for name, value in of_engines.items() if value]:
            raise InputError(f"{given[0]} is of engines at URLs (--engines): the folder of --cluster says its own")
    if args.device and not args.calibration:
        raise InputError("--device is what a calibration must be of: give --calibration FILE too")
    if args.sidecars:
        costs = ("calibration", "constants_from", "preset", "cost")
        if given := [name for name in costs if getattr(args, name)]:
            option = f"--{given[0].replace('_', '-')}"
            raise InputError(
                f"{option} does not reach the sidecars, which predict: astrolabe sidecar has --preset, --cost"
            )
    if args.deadline_ms and not args.sidecars:
        raise InputError("--deadline-ms is for the answers of sidecars: give --sidecars too")
    if args.journal_prompts and not args.journal:
        raise InputError("--journal-prompts go into the journal: give --journal FILE too")


def _router(args):
    if args.poll_s:
        raise InputError("--poll-s is of prefill and decode pools: of whole engines a router reads the status")
    from astrolabe_lab import policies
    from astrolabe_lab.cli.calibrate import calibrated, step_cost
    from astrolabe_lab.cost import StepCost
    from astrolabe_lab.cost import preset as preset_of
    from astrolabe_lab.engines.cluster_file import read_cluster
    from astrolabe_lab.serve.in_process import instances_of
    from astrolabe_lab.serve.journal import Journal
    from astrolabe_lab.serve.lengths import lengths_of
    from astrolabe_lab.serve.prompt_tokens import ByBytes, ByTokenizer
    from astrolabe_lab.serve.router import Router
    from astrolabe_lab.sim.config import EngineConfig

    args.policy = args.policy or "astrolabe"
    policy = policies.parse(args.policy)
    tokenizer, models, time_scale = args.tokenizer, (args.model or "emulated").split(","), args.time_scale or 1.0
    if args.cluster:
        cluster = read_cluster(args.cluster)
        config, time_scale, own = cluster.config, cluster.time_scale, cluster.cost
        places = [(e["url"], Path(e["status"])) for e in cluster.engines]
        tokenizer, models = tokenizer or cluster.tokenizer, [cluster.model]
    else:
        base = EngineConfig.from_dict(preset_of(args.preset).engine) if args.preset else None
        config, own = EngineConfig.parse(args.engine, base), None
        places = [(url, None) for url in urls_of(args.engines, "--engines")]
    cost = step_cost(args, own)
    config, calibration = calibrated(args, models[0], config, own)
    if calibration is not None:
        cost = StepCost.parse(args.cost, calibration.cost) if args.cost else calibration.cost
    instances, foresight = instances_of(places, policy, config, cost)
    router = Router(
        instances,
        policy,
        args.policy,
        models,
        ByTokenizer(tokenizer) if tokenizer else ByBytes(),
        lengths_of(args.lengths),
        time_scale=time_scale,
        limits=limits_of(args),
        journal=Journal(args.journal, waits=True) if args.journal is not None else None,
        keep_prompts=args.journal_prompts,
        seed=args.seed,
        name_requests=bool(args.cluster),
        source=cluster.world if args.cluster else "hardware",
        foresight=foresight,
        ask=_sidecars(args, len(places), time_scale),
    )
    if calibration is not None:
        router.watch_drift(calibration.cost)
    return router


def _sidecars(args, engines: int, time_scale: float):
    """What asks the sidecars, or None where the router predicts itself."""
    if args.sidecars is None:
        return None
    import time

    from astrolabe_lab.serve.remote import RemotePredictors

    urls = urls_of(args.sidecars, "--sidecars")
    if len(urls) != engines:
        raise InputError(f"--sidecars {args.sidecars!r} must name {engines} URLs, one an engine, in its order")
    deadline_s = (args.deadline_ms or DEADLINE_MS) / 1e3
    return RemotePredictors(dict(enumerate(urls)), deadline_s, lambda: time.monotonic() / time_scale)


def _announce(record: dict) -> None:
    """The one JSON line, on the process' own stdout."""
    print(json.dumps(record), file=sys.__stdout__, flush=True)


def _until_told(trouble):
    """Wait for Ctrl-C or SIGTERM; or return what ``trouble()`` finds before."""
    wait = threading.Event()
    try:
        while True:
            if (found := trouble()) is not None:
                return found
            wait.wait(0.5)
    except KeyboardInterrupt:
        return None
