"""The names under which a grid sets what `simulate` takes: those of `astrolabe simulate`'s options.

An engine flag, a coefficient of the step cost, an option of the policy has a dotted name: `engine.max_num_seqs`,
`cost.host_s`, `policy.k`. A mapping under the first part, `engine: {max_num_seqs: 24}`, says the same.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import fields
from functools import cache

from astrolabe_lab.errors import InputError

PLAIN = {
    "trace": "a file (a relative path starts at the grid's folder), sharegpt_like, family:NAME or servegen:PATH",
    "format": "the trace file's format (default: the content tells)",
    "on_bad": "bad rows of a trace file: error (the default) or drop",
    "unsorted": "times of a trace file that go back: error (the default) or sort",
    "requests": "how many requests: the trace's first so many, or so many drawn",
    "sample": "which requests of a trace each seed gets: head (the default: the first), permute or resample",
    "lengths": "predicted lengths: oracle (the default), trace, constant:N, noisy:REL, tagger:DIR",
    "qps": "requests a second, over all instances; null keeps the trace's own times",
    "arrivals": "poisson (mostly the default), gamma, constant, bursts, ramp, diurnal, trace, as in bursts:high=1.7",
    "alpha": "shape of gamma gaps; below 1 is burstier than Poisson",
    "policy": "NAME:key=value,... as `astrolabe policies` lists them",
    "label": "what the column policy says (default: the policy as given)",
    "instances": "number of engines (12)",
    "pools": "instead: prefill and decode engines, as in 2+4; the second paper's, unless preset or cost say else",
    "decode_slope_s": "pools: seconds that each further stream adds to a decode step (5.5e-5)",
    "service": "pools: exact (the default), batching or serial",
    "signals": "pools: own (the default), or leaked: the router is told true lengths",
    "poll_s": "pools: how often the router polls the engines' occupancy (0.05)",
    "constants": "pools: what the router believes: calibrated (the default), paper, paper-simulator, or a file",
    "preset": "step cost and engine of a measured device (llama2-7b-a30), one for all or a list; none: cost keys alone",
    "delays": "none (the default) or paper: the Astrolabe paper's measured delays",
    "status_interval_s": "refresh of status (0: at each decision)",
    "tag_s": "time to predict a length",
    "predict_s": "time of one latency prediction, or [low, high] to draw from",
    "dispatch_s": "time from decision to engine",
    "routers": "routers, blind to each other's dispatches",
    "faults": "a list of {kind: outage or slowdown, instance: 0, start_s: 10, ...}",
    "slo": 'adds goodput: ttft_s, tpot_s, e2e_s, loose_factor, as in {ttft_s: 0.2, tpot_s: 0.04} or "ttft_s=0.2"',
    "extension_tokens": "how much longer a request is taken to last that has outrun its predicted length",
    "seed": "of every random stream (0)",
}
GROUPS = {
    "engine": "an engine flag, under vLLM's name or `scheduler`, on top of the preset's",
    "cost": "a coefficient of the step cost, both regimes or decode.KEY, mixed.KEY, on top of the preset's",
    "predictor_cost": "the same, as the Predictors believe it (default: the truth)",
    "filter": "which rows of a trace file: min_prompt_tokens, max_total_tokens, model, ... (`trace.load`)",
    "latency_noise": "relative error of predicted latencies: common or candidate",
    "policy": "an option of the policy, such as k",
    "hand_off": "pools: how KV caches move: base_s, per_block_s, polls, lease_s, ...",
    "constants": "pools: one of the constants, on top of those named",
}
BOTH = ("policy", "constants")  # groups whose text is a name
WHOLE_STEP = ("pad_sizes", "frontend_s")  # of a step cost: the same in both regimes
CONTROL = ("status_interval_s", "tag_s", "predict_s", "dispatch_s", "routers")
OBJECTS = ("engine", "cost", "predictor_cost", "control", "latency_noise", "hand_off")  # what Python may give whole
SINGLE = (
    "format",
    "on_bad",
    "unsorted",
    "requests",
    "sample",
    "lengths",
    "qps",
    "arrivals",
    "alpha",
    "label",
    "delays",
)
SINGLE += ("delays", "status_interval_s", "tag_s", "dispatch_s", "routers", "extension_tokens", "seed", "policy_seed")
NOT_KEYS = ("compiled", "leaps", "progress")  # of `simulate`: they change no result


@cache
def others() -> tuple[str, ...]:
    """Further keyword arguments of `simulate`, which a grid passes on as they are."""
    from astrolabe_lab.sim.cluster import simulate

    known = {*PLAIN, *OBJECTS, *NOT_KEYS}
    named = inspect.signature(simulate).parameters.values()
    return tuple(p.name for p in named if p.kind is p.KEYWORD_ONLY and p.name not in known)


@cache
def members(group: str) -> tuple[str, ...]:
    """The keys of a group."""
    from astrolabe_lab import cost, policies, trace
    from astrolabe_lab.disagg import routers
    from astrolabe_lab.disagg.constants import Constants
    from astrolabe_lab.disagg.state import HandOff
    from astrolabe_lab.sim.config import EngineConfig
    from astrolabe_lab.sim.world import LatencyNoise

    if group == "engine":
        return tuple(field.name for field in fields(EngineConfig))
    if group == "latency_noise":
        return tuple(field.name for field in fields(LatencyNoise))
    if group == "policy":
        kinds = (*policies.NAMES.values(), *routers.NAMES.values())
        options = (field.name for kind in kinds for field in fields(kind) if field.repr)
        return tuple(dict.fromkeys(options))
    if group == "hand_off":
        return tuple(field.name for field in fields(HandOff))
    if group == "constants":
        return tuple(field.name for field in fields(Constants))
    if group == "filter":
        return (*trace.FILTERS, *trace.CHOICES)
    return (*cost.KEYS, *WHOLE_STEP, *(f"{regime}.{key}" for regime in cost.REGIMES for key in cost.KEYS))


def check_single(settings: Mapping[str, object]) -> None:
    """Raise InputError for a list or mapping where one value belongs."""
    for key, value in settings.items():
        if isinstance(value, (list, tuple, set, Mapping)) and (key in SINGLE or key.startswith("filter.")):
            raise InputError(f"{key}={value!r} should be one value; what varies goes under grid, {key}: [...]")


def flat(settings: Mapping[str, object], where: str) -> dict[str, object]:
    """`settings` with every key known and dotted. Raises InputError, opening with `where`."""
    found: dict[str, object] = {}
    for key, value in settings.items():
        for name, item in _spread(key, value, where):
            if name in found:
                raise InputError(f"{where}: {name} is given twice")
            found[name] = item
    return found


def _spread(key: object, value: object, where: str):
    if not isinstance(key, str):
        raise InputError(f"{where}: the key {key!r} is no name; put it in quotes")
    head, dot, rest = key.partition(".")
    if key in GROUPS and isinstance(value, Mapping):
        for inner, item in value.items():
            yield from _spread(f"{key}.{inner}", item, where)
    elif key in GROUPS and key not in BOTH and isinstance(value, str):
        for part in filter(None, (part.strip() for part in value.split(","))):
            inner, equals, item = (piece.strip() for piece in part.partition("="))
            if not equals or not item:
                raise InputError(f"{where}: {key}: {part!r} is not key=value")
            yield from _spread(f"{key}.{inner}", _typed(item), where)
    elif dot and head in GROUPS and isinstance(value, Mapping):  # cost: {decode: {base_s: ...}}
        for inner, item in value.items():
            yield from _spread(f"{key}.{inner}", item, where)
    elif (dot and head in GROUPS and _is_member(head, rest)) or (not dot and _is_plain(key)):
        yield key, value
    else:
        raise InputError(f"{where}: {unknown(key)}")


def _typed(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def _is_member(group: str, key: str) -> bool:
    from astrolabe_lab.sim.config import UNMODELLED

    return key in members(group) or (group == "engine" and key in UNMODELLED)  # those have a message of their own


def _is_plain(key: str) -> bool:
    return key in PLAIN or key in OBJECTS or key in others()


def unknown(key: str) -> str:
    """What to say of a key that does not exist."""
    head, dot, rest = key.partition(".")
    if dot and head in GROUPS:
        allowed = members(head)
        close = [f"{head}.{name}" for name in difflib.get_close_matches(rest, allowed, n=1)]
        listed = f"{head} has {', '.join(allowed)}"
    else:
        listed = f"allowed are {', '.join([*PLAIN, *others()])}, and KEYs of {', '.join(GROUPS)} as in engine.KEY"
        names = [*PLAIN, *others()]
        inside = {name: f"{group}.{name}" for group in reversed(GROUPS) for name in members(group)}
        close = [inside[key]] if key in inside else difflib.get_close_matches(key, names, n=1)
        close = close or [inside[name] for name in difflib.get_close_matches(key, inside, n=1)]
    meant = f"Did you mean {close[0]}? " if close else ""
    return f"unknown key {key!r}. {meant}({listed})"


def described() -> str:
    """The table of all keys, for people."""
    rows = [*PLAIN.items(), *((f"{group}.KEY", text) for group, text in GROUPS.items())]
    rows += [(name, "as `simulate` takes it") for name in others()]
    return "\n".join(f"  {name:20} {text}" for name, text in rows)
