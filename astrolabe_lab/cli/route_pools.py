"""A router of pools from the options of ``astrolabe route``."""

from __future__ import annotations

from pathlib import Path

from astrolabe_lab.errors import InputError
from astrolabe_lab.text_files import json_object
from astrolabe_lab.urls import urls_of


def are_meant(args) -> bool:
    """Whether the options name pools: URLs of both, or a cluster that has them."""
    if args.prefill is not None or args.decode is not None:
        if args.prefill is None or args.decode is None:
            raise InputError("--prefill and --decode go together: the URLs of both pools")
        return True
    if not args.cluster:
        return False
    from astrolabe_lab.engines.cluster_file import read_cluster

    return {engine.get("role") for engine in read_cluster(args.cluster).engines} == {"prefill", "decode"}


def pool_router(args):
    """The PoolRouter. Raises InputError for options that do not fit together, or a calibration of another cluster."""
    from astrolabe_lab.cli.calibrate import calibrated, refuse_two_calibrations
    from astrolabe_lab.cli.limits import limits_of
    from astrolabe_lab.disagg import routers
    from astrolabe_lab.disagg.constants import NAMED, Constants
    from astrolabe_lab.engines.cluster_file import read_cluster
    from astrolabe_lab.serve.instance import Instance
    from astrolabe_lab.serve.journal import Journal
    from astrolabe_lab.serve.lengths import lengths_of
    from astrolabe_lab.serve.pools.router import PoolRouter
    from astrolabe_lab.serve.prompt_tokens import ByBytes, ByTokenizer
    from astrolabe_lab.sim.config import EngineConfig

    args.policy = args.policy or "marginal_cost"
    policy = routers.parse(args.policy)
    if args.sidecars:
        raise InputError("--sidecars predict for whole engines; the policies of pools price with constants")
    if args.preset or args.cost:
        raise InputError(
            "--preset and --cost are of Predictors; the policies of pools price with constants (--calibration)"
        )
    cost, source = None, "hardware"
    if args.cluster:
        cluster = read_cluster(args.cluster)
        config, cost, time_scale, source = cluster.config, cluster.cost, cluster.time_scale, cluster.world
        places = [
            [(engine["url"], Path(engine["status"])) for engine in cluster.engines if engine["role"] == role]
            for role in ("prefill", "decode")
        ]
        tokenizer, models = args.tokenizer or cluster.tokenizer, [cluster.model]
    else:
        config, time_scale = EngineConfig.parse(args.engine), args.time_scale or 1.0
        pools = urls_of(args.prefill, "--prefill"), urls_of(args.decode, "--decode")
        urls_of([*pools[0], *pools[1]], "--prefill and --decode together")
        places = [[(url, None) for url in urls] for urls in pools]
        tokenizer, models = args.tokenizer, (args.model or "emulated").split(",")
    refuse_two_calibrations(args)
    if args.constants_from in NAMED or _are_constants(args.constants_from):
        calibration, constants = None, Constants.read(args.constants_from)
    else:
        config, calibration = calibrated(args, models[0], config, cost)
        if calibration is None:
            raise InputError(
                "a router of pools prices with constants: give --calibration C.json (astrolabe calibrate makes it), or "
                f"--constants-from with a file or one of {', '.join(NAMED)}"
            )
        constants = calibration.constants()
    prefill, decode = places
    router = PoolRouter(
        [Instance(i, url, config, None, status) for i, (url, status) in enumerate([*prefill, *decode])],
        policy, args.policy, models, ByTokenizer(tokenizer) if tokenizer else ByBytes(), lengths_of(args.lengths),
        time_scale=time_scale, limits=limits_of(args),
        journal=Journal(args.journal, waits=True) if args.journal is not None else None,
        keep_prompts=args.journal_prompts, seed=args.seed, name_requests=bool(args.cluster), source=source,
        n_prefill=len(prefill), constants=constants, poll_s=args.poll_s or PoolRouter.poll_s,
    )  # fmt: skip
    if calibration:
        router.watch_drift(calibration.cost)
    return router


def _are_constants(path: str | None) -> bool:
    """Whether the file holds constants alone, and no calibration to check or to watch for drift."""
    try:
        return bool(path) and "kind" not in json_object(path, "these constants")
    except InputError:
        return False
