"""A cluster of engines behind a router, simulated: ``simulate`` is its one entrance.

Its parts: ``world`` (delays, noise, faults as settings), ``run`` (a request's way: arrive, choose, batch, finish),
``knowledge`` (what the routers know), ``view`` (what a policy gets of that), ``asking`` (the Predictors), ``faults``,
and ``twin`` (whole runs in compiled code).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import numpy as np

from astrolabe_lab import policies
from astrolabe_lab.cost import StepCost, warn_outside
from astrolabe_lab.errors import InputError, check_kind
from astrolabe_lab.predictor import EXTENSION_TOKENS, check_extension
from astrolabe_lab.sim import view
from astrolabe_lab.sim.asking import ATTACH
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.sim.run import Run
from astrolabe_lab.sim.world import ControlPlane, LatencyNoise, Outage, Slowdown

MOST = 100_000  # instances

__all__ = ["ControlPlane", "LatencyNoise", "Outage", "Slowdown", "simulate"]


def simulate(
    trace,
    policy,
    *,
    instances: int = 12,
    engine: EngineConfig | Sequence[EngineConfig] | None = None,
    cost=None,
    predictor_cost=None,
    control: ControlPlane = ControlPlane(),
    faults: Sequence[Outage | Slowdown] = (),
    seed: int = 0,
    policy_seed: int | None = None,
    latency_noise: LatencyNoise = LatencyNoise(),
    extension_tokens: int = EXTENSION_TOKENS,
    compiled: bool | None = None,
    leaps: bool = True,
    progress: Callable[[int, int], None] | None = None,
):
    """The result frame of ``trace`` dispatched by ``policy`` over a simulated cluster: one row a request.

    ``trace``: a trace frame with arrival times, and ``predicted_tokens`` where the policy needs them. ``policy``: an
    object with ``choose(request, cluster, rng)``, or text for ``policies.parse``; a run works on a copy. ``engine``,
    ``cost`` (a StepCost) and ``predictor_cost`` (what the Predictors believe; default: the truth) are one for all
    ``instances``, or a sequence of one each; engine and cost default to the preset llama2-7b-a30.
    ``policy_seed``: of what the routers draw (choices, noise, delays), where that shall differ from ``seed``: the same
    run with other luck.
    ``compiled``: True demands the policy's compiled twin, False forbids it, None takes it where there is one; the
    outcome is the same. ``leaps=False`` single-steps the engines, with the same outcome. ``progress`` is called with
    (requests dispatched, requests in all). Times are in s; ``decision_s`` is the modelled delay of the decision.
    Raises InputError for a trace, policy, choice or setting that breaks its contract.
    """
    run = prepare(
        trace, policy, instances, engine, cost, predictor_cost, control, faults,
        seed if policy_seed is None else policy_seed, latency_noise, extension_tokens, leaps,
    )  # fmt: skip
    if compiled and not run.has_twin:
        raise InputError(f"policy {run.name}: no compiled twin under these settings; leave compiled=None")
    try:
        if run.has_twin and compiled is not False:
            run.compiled(progress)
        else:
            run.decide_all(progress)
    finally:
        view.forget(run.number)
    return run.frame(run.name, seed)


def prepare(
    trace, policy, instances, engine, cost, predictor_cost, control, faults, seed, latency_noise, extension_tokens,
    leaps,
) -> Run:  # fmt: skip
    """The run that ``simulate`` with these arguments makes, checked, before its first request. Who prepares one has to
    ``view.forget(run.number)``."""
    from astrolabe_lab import trace as trace_module

    trace = trace_module.check(trace)
    if "arrived_s" not in trace:
        raise InputError(
            "trace: arrived_s is missing; give it arrival times with arrivals.with_arrivals(trace, qps=...)"
        )
    if isinstance(policy, str):
        policy = policies.parse(policy)
    check_kind("control", control, ControlPlane, "ControlPlane(status_interval_s=0.1)")
    check_kind("latency_noise", latency_noise, LatencyNoise, "LatencyNoise(common=0.3)")
    check_extension(extension_tokens)
    engines = _engines(instances, engine, cost, predictor_cost)
    warn_outside(zip(*engines[:2], strict=True))
    _check_policy(policy, instances, "predicted_tokens" in trace)
    return Run(trace, policy, engines, control, faults, seed, latency_noise, extension_tokens, leaps)


def _engines(instances, engine, cost, predictor_cost):
    """(configs, costs, predictor costs), one an instance."""
    if isinstance(instances, bool) or not isinstance(instances, (int, np.integer)) or not 1 <= instances <= MOST:
        raise InputError(f"instances={instances!r} must be a whole number >= 1, at most {MOST:,}")
    if engine is None or cost is None:
        from astrolabe_lab.cost import preset

        default = preset("llama2-7b-a30")
        engine = EngineConfig.from_dict(default.engine) if engine is None else engine
        cost = default.cost if cost is None else cost
    spread = []
    for what, value in (("engine", engine), ("cost", cost), ("predictor_cost", predictor_cost)):
        if value is None:
            value = spread[1]
        values = list(value) if isinstance(value, (list, tuple)) else [value] * instances
        kind, example = (EngineConfig, "EngineConfig(...)") if what == "engine" else (StepCost, "StepCost.parse(...)")
        for one in values:
            check_kind(what, one, kind, f"{example}, one for all, or one each")
        if len(values) != instances:
            raise InputError(f"{what}: {len(values)} given for {instances} instances; give one for all, or one each")
        spread.append(values)
    return spread


def _check_policy(policy, n: int, lengths: bool) -> None:
    """Raise InputError for a policy that cannot decide among n instances, or without predicted lengths."""
    if isinstance(policy, type):
        raise InputError(f"policy {policy.__name__} is a class; give an object of it: {policy.__name__}(...)")
    if not callable(getattr(policy, "choose", None)):
        raise InputError(f"policy {policy!r} has no method choose(request, cluster, rng)")
    name = policies.spec(policy)
    try:
        inspect.signature(policy.choose).bind("request", "cluster", "rng")
    except TypeError as error:
        raise InputError(f"policy {name}: choose(request, cluster, rng) cannot be called so: {error}") from None
    except ValueError:
        pass  # a builtin that tells no signature
    if getattr(policy, "needs_lengths", False) and not lengths:
        raise InputError(f"policy {name} needs predicted lengths and the trace has no predicted_tokens: {ATTACH}")
    if isinstance(policy, policies.Astrolabe) and policy.k > n:
        raise InputError(f"policy {name}: k={policy.k} is outside 1..{n} (the cluster has {n} instances)")
