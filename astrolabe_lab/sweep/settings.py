"""What the settings of a run stand for, in the simulator's own terms."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError

from . import keys, pools

if TYPE_CHECKING:
    from astrolabe_lab.measure import SLO

PRESET = "llama2-7b-a30"


def policy_of(given: Mapping[str, object]) -> object:
    """The policy that the settings describe: text, or an object as given."""
    from astrolabe_lab import policies

    if (policy := given.get("policy")) is None:
        raise InputError("policy is missing: say which, e.g. policy: [least_loaded, astrolabe:k=2]")
    extra = [f"{key}={value}" for key, value in members(given, "policy").items()]
    if not isinstance(policy, str):
        if extra:
            raise InputError(f"policy.KEY goes with a policy given as text, not with {policies.spec(policy)}")
        return policy
    text = policy + (("," if ":" in policy else ":") + ",".join(extra) if extra else "")
    parse = pools.parse if "pools" in given else policies.parse
    parse(text)  # a misspelt one is told before anything runs
    return text


def slo_of(given: Mapping[str, object]) -> SLO | None:
    """What the requests were promised: an SLO, its text, or its targets by name; None where nothing was."""
    from astrolabe_lab.measure import SLO

    value = given.get("slo")
    if isinstance(value, Mapping):
        value = ",".join(f"{key}={item}" for key, item in value.items())
    return value if value is None or isinstance(value, SLO) else SLO.parse(value)


def options_of(given: Mapping[str, object], folder: Path | None) -> dict[str, object]:
    """The keyword arguments of `simulate`."""
    from astrolabe_lab.sim.cluster import ControlPlane, LatencyNoise

    if "pools" in given:
        return pools.options_of(given, lambda base: _engine_and_cost(base | dict(given), base["preset"], folder))
    pools.refuse(given)
    name = given.get("preset", PRESET)
    engine, cost = _engine_and_cost(given, name, folder)
    options: dict[str, object] = {"instances": given.get("instances", 12), "engine": engine, "cost": cost}
    believed = members(given, "predictor_cost")
    if "predictor_cost" in given or believed:
        options["predictor_cost"] = _changed(given.get("predictor_cost", cost), believed, "predictor_cost")
    control = given.get("control", _delays(given.get("delays", "none")))
    delays = {key: _pair(given[key]) for key in keys.CONTROL if key in given}
    options["control"] = replace(control, **delays) if isinstance(control, ControlPlane) else control
    noise = members(given, "latency_noise")
    start = given.get("latency_noise", LatencyNoise())
    options["latency_noise"] = replace(start, **noise) if isinstance(start, LatencyNoise) else start
    if "faults" in given:
        options["faults"] = _faults(given["faults"])
    passed_on = ("extension_tokens", "compiled", "leaps", *keys.others())
    return options | {key: given[key] for key in passed_on if key in given and key not in options}


def _engine_and_cost(given: Mapping[str, object], name: object, folder: Path | None) -> tuple[object, object]:
    from astrolabe_lab.cost import preset
    from astrolabe_lab.sim.config import EngineConfig

    flags = members(given, "engine")
    if isinstance(name, (list, tuple)):  # one an instance
        pairs = [_engine_and_cost(given, one, folder) for one in name]
        return [engine for engine, _ in pairs], [cost for _, cost in pairs]
    if str(name).endswith(".json") and folder:
        name = folder / str(name)
    known = None if name in (None, "none") else preset(name)
    engine, cost = given.get("engine"), given.get("cost")
    if engine is None:
        engine = EngineConfig.from_dict(known.engine) if known else EngineConfig()
    if flags:
        if not isinstance(engine, EngineConfig):
            raise InputError("engine.KEY goes with one engine for all instances")
        engine = EngineConfig.from_dict(flags, base=engine)
    if cost is None and known:
        cost = known.cost
    cost = _changed(cost, members(given, "cost"), "cost")
    return engine, cost


def members(given: Mapping[str, object], group: str) -> dict[str, object]:
    """The settings of a group, without its name before them."""
    return {key.partition(".")[2]: value for key, value in given.items() if key.startswith(f"{group}.")}


def _changed(cost: object, coefficients: dict[str, object], group: str) -> object:
    """The step cost (None: all zero) with these coefficients in it."""
    from astrolabe_lab.cost import StepCost

    if not coefficients and cost is not None:
        return cost
    if not isinstance(cost, (StepCost, type(None))):
        raise InputError(f"{group}.KEY goes with one cost for all instances")
    whole_step = {key: coefficients.pop(key) for key in keys.WHOLE_STEP if key in coefficients}
    cost = StepCost.from_dict(coefficients, base=cost)
    return replace(cost, **{key: _pair(value) for key, value in whole_step.items()})


def _delays(name: object):
    from astrolabe_lab.sim.cluster import ControlPlane

    if name not in ("none", "paper"):
        raise InputError(f"delays={name!r} is unknown: allowed are none and paper")
    return ControlPlane.paper() if name == "paper" else ControlPlane()


def _pair(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _faults(value: object) -> tuple:
    from astrolabe_lab.sim.cluster import Outage, Slowdown

    kinds = {"outage": Outage, "slowdown": Slowdown}
    if not isinstance(value, (list, tuple)):
        raise InputError(f"faults={value!r} should be a list of {{kind: outage or slowdown, instance: 0, ...}}")
    faults = []
    for entry in value:
        if isinstance(entry, Mapping):
            settings = dict(entry)
            kind = settings.pop("kind", None)
            if not isinstance(kind, str) or kind not in kinds:
                raise InputError(f"faults: kind={kind!r} is unknown: allowed are {' and '.join(kinds)}")
            allowed = [one.name for one in fields(kinds[kind])]
            for key in settings:
                if key not in allowed:
                    close = difflib.get_close_matches(str(key), allowed, n=1)
                    meant = f" Did you mean {close[0]}?" if close else ""
                    raise InputError(f"faults: {kind} has no {key!r}; it has {', '.join(allowed)}.{meant}")
            try:
                entry = kinds[kind](**settings)
            except TypeError as error:
                raise InputError(f"faults: {kind}: {str(error).partition('() ')[2]}") from None
        faults.append(entry)
    return tuple(faults)
