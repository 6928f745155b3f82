"""Dispatch policies: objects with ``choose(request, cluster, rng) -> index``.

``request`` is an ``astrolabe_lab.request.Request``; ``cluster`` holds the healthy instances: ``len(cluster)``,
``cluster[i]`` (one instance's signals), ``cluster.signals`` (all of them, as a structured array), ``cluster.instances``
(their stable numbers), ``cluster.predict(request, metric, indices)`` and ``cluster.prefix_overlap(request)`` (arrays
tokens, age_s and remembered_tokens: what the router takes each instance to have cached of the prompt). A class of your
own with that one method runs wherever these do. A policy that needs predicted lengths says so with a class attribute
``needs_lengths = True``.

The signals of an instance: ``instance, age_s, running, waiting, free_blocks, total_blocks, block_size, waiting_blocks,
first_waiting_blocks, pending_tokens, prefill_tokens, queue_s, prefill_s_per_token, decode_s_per_token, in_flight,
in_flight_tokens`` (what they mean: ``astrolabe_lab.sim.signals``).
"""

from __future__ import annotations

import difflib
from dataclasses import fields

from astrolabe_lab.errors import InputError
from astrolabe_lab.policies.counting import LeastLoaded, MinQps, Po2Requests, Random, RoundRobin
from astrolabe_lab.policies.latency import LeastLatency
from astrolabe_lab.policies.memory import Infaas, LlumnixMinus, MinMemory
from astrolabe_lab.policies.predicted import Astrolabe, MinTokens
from astrolabe_lab.policies.prefix import CacheAware, KvCost, WeightedScore

__all__ = [
    "NAMES",
    "Astrolabe",
    "CacheAware",
    "Infaas",
    "KvCost",
    "LeastLatency",
    "LeastLoaded",
    "LlumnixMinus",
    "MinMemory",
    "MinQps",
    "MinTokens",
    "Po2Requests",
    "Random",
    "RoundRobin",
    "WeightedScore",
    "parse",
    "spec",
]

NAMES = {
    "random": Random,
    "round_robin": RoundRobin,
    "min_qps": MinQps,
    "least_loaded": LeastLoaded,
    "min_memory": MinMemory,
    "infaas": Infaas,
    "llumnix_minus": LlumnixMinus,
    "min_tokens": MinTokens,
    "po2_requests": Po2Requests,
    "cache_aware": CacheAware,
    "kv_cost": KvCost,
    "weighted_score": WeightedScore,
    "least_latency": LeastLatency,
    "astrolabe": Astrolabe,
}
_SHORT = {
    f"{name}_{variant}": (name, variant)
    for name, variants in (("infaas", "abc"), ("llumnix_minus", "ab"))
    for variant in variants
}


def parse(text: str):
    """The policy that ``NAME[:key=value,...]`` describes, e.g. ``astrolabe:k=4,metric=ttft_s``; ``k=all`` is full
    fan-out and ``infaas_b`` short for ``infaas:variant=b``. Raises InputError listing what is allowed."""
    name, _, rest = str(text).strip().partition(":")
    values = {}
    if name in _SHORT:
        name, values["variant"] = _SHORT[name]
    if name not in NAMES:
        close = difflib.get_close_matches(name, [*NAMES, *_SHORT], n=1)
        meant = f". Did you mean {close[0]}?" if close else ""
        raise InputError(
            f"policy {name!r} is unknown; allowed: {', '.join(NAMES)}, with options as NAME:key=value,...; "
            f"short forms: {', '.join(_SHORT)}{meant}"
        )
    kind = NAMES[name]
    allowed = {f.name: f for f in fields(kind) if f.repr}
    for part in filter(None, (p.strip() for p in rest.split(","))):
        key, equals, value = (p.strip() for p in part.partition("="))
        if not equals or not value:
            raise InputError(f"policy {name}: {part!r} is not key=value")
        if key not in allowed:
            options = f"its options: {', '.join(allowed)}" if allowed else "it has no options"
            raise InputError(f"policy {name}: unknown option {key!r}; {options}")
        if key in values:
            raise InputError(f"policy {name}: {key} is given twice")
        values[key] = _typed(name, key, value, allowed[key].default)
    return kind(**values)


def spec(policy) -> str:
    """The text that ``parse`` turns into ``policy``; for a class of the user's own, its name."""
    for name, kind in NAMES.items():
        if type(policy) is kind:
            shown = [(f.name, getattr(policy, f.name)) for f in fields(kind) if f.repr]
            options = [
                f"{key}={'all' if key == 'k' and value == 0 else _text(value)}"
                for key, value in shown
                if key in ("k", "variant") or value != kind.__dataclass_fields__[key].default
            ]
            return name + (":" + ",".join(options) if options else "")
    return getattr(policy, "__name__", type(policy).__name__)


def _text(value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return getattr(value, "__name__", None) or str(value)


def _typed(name: str, key: str, value: str, default):
    try:
        if key == "k" and value.lower() in ("all", "n"):
            return 0
        if isinstance(default, bool):
            return {"true": True, "false": False}[value.lower()]
        if isinstance(default, (int, float)):
            return type(default)(value)
    except (KeyError, ValueError):
        what = "true or false" if isinstance(default, bool) else "a number"
        raise InputError(f"policy {name}: {key}={value} must be {what}") from None
    return value
