"""The P/D policies by name, as text: ``marginal_cost:cache=0`` and the like."""

from __future__ import annotations

import difflib
from dataclasses import fields

from astrolabe_lab.disagg.marginal_cost import MarginalCost
from astrolabe_lab.disagg.policies import LeastLoadedPair, LengthThreshold, RandomPair, RoundRobinPair
from astrolabe_lab.disagg.predicted import PredictedPair
from astrolabe_lab.errors import InputError

NAMES = {
    "random": RandomPair,
    "round_robin": RoundRobinPair,
    "least_loaded": LeastLoadedPair,
    "length_threshold": LengthThreshold,
    "marginal_cost": MarginalCost,
    "predicted": PredictedPair,
}


def parse(text: str):
    """The P/D policy that ``NAME[:key=value,...]`` describes. Raises InputError listing what is allowed."""
    name, _, rest = str(text).strip().partition(":")
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, n=1)
        meant = f". Did you mean {close[0]}?" if close else ""
        raise InputError(f"policy {name!r} is unknown for pools; allowed: {', '.join(NAMES)}{meant}")
    kind = NAMES[name]
    allowed = {f.name: f.default for f in fields(kind) if f.repr}
    values: dict[str, object] = {}
    for part in filter(None, (p.strip() for p in rest.split(","))):
        key, equals, value = (p.strip() for p in part.partition("="))
        if not equals or key not in allowed:
            options = f"its options: {', '.join(allowed)}" if allowed else "it has no options"
            raise InputError(f"policy {name}: {part!r} is not key=value with an option of it; {options}")
        if key in values:
            raise InputError(f"policy {name}: {key} is given twice")
        values[key] = _typed(name, key, value, allowed[key])
    return kind(**values)


def spec(policy) -> str:
    """The text that ``parse`` turns into ``policy``; for a class of the user's own, its name."""
    for name, kind in NAMES.items():
        if type(policy) is kind:
            shown = [(f, getattr(policy, f.name)) for f in fields(kind) if f.repr]
            options = [f"{f.name}={_text(value)}" for f, value in shown if value != f.default]
            return name + (":" + ",".join(options) if options else "")
    return getattr(policy, "__name__", type(policy).__name__)


def _text(value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _typed(name: str, key: str, value: str, default):
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[value.lower()]
        return type(default)(value)
    except (KeyError, ValueError):
        what = "true or false" if isinstance(default, bool) else "a number"
        raise InputError(f"policy {name}: {key}={value} must be {what}") from None
