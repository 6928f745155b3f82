"""What a launched cluster writes for routers and load generators: ``cluster.json`` in its folder."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from astrolabe_lab.cost import StepCost
from astrolabe_lab.errors import InputError
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.text_files import json_object
from astrolabe_lab.urls import urls_of

VERSION = 1
CLUSTER_FILE = "cluster.json"
WORLDS = ("emulated", "hardware")
ROLES = ("prefill", "decode")
HANDOVER = ("latency_s", "per_block_s", "expiry_s", "fail_share")


@dataclass(frozen=True)
class ClusterFile:
    """``engines``: of each its url, role, place and the files of its status, steps, pace and log; ``cost``: None where
    it is not known; ``tokenizer``: the served model's folder or hub name; ``handover``: of emulated pools, as
    ``serve.pools.launch.Handover.to_dict`` tells it."""

    engines: list[dict]
    config: EngineConfig
    cost: StepCost | None
    time_scale: float
    model: str
    tokenizer: str
    world: str
    handover: dict | None = None


def write_cluster(folder: Path, engines, config, cost, time_scale, model, tokenizer, world, handover=None) -> None:
    record = {
        "version": VERSION, "world": world, "model": model, "tokenizer": str(tokenizer), "time_scale": time_scale,
        "engine": asdict(config), "cost": cost and cost.to_dict(), "engines": engines,
        "handover": handover,
    }  # fmt: skip
    unfinished = folder / (CLUSTER_FILE + ".new")
    unfinished.write_text(json.dumps(record, indent=1))
    os.replace(unfinished, folder / CLUSTER_FILE)


def read_cluster(folder: str | Path) -> ClusterFile:
    """The cluster of ``folder``. Raises InputError where there is none, or its file does not tell one."""
    path = Path(folder) / CLUSTER_FILE
    raw = json_object(path, "this cluster", " (astrolabe launch makes it)")
    where = f"cluster {str(folder)!r}"
    try:
        if raw["version"] != VERSION:
            raise InputError(f"{where}: version {raw['version']!r} where {VERSION} is understood")
        cost = None if raw["cost"] is None else StepCost.from_dict(raw["cost"])
        found = ClusterFile(
            raw["engines"], EngineConfig(**raw["engine"]), cost, raw["time_scale"],
            raw["model"], raw["tokenizer"], raw["world"], raw.get("handover"),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise InputError(f"{where}: {path.name} is damaged: {error}") from None
        raise InputError(f"{where}: {path.name} is damaged ({error!r})") from None
    if damage := _damage(found):
        raise InputError(f"{where}: {path.name} is damaged: {damage}")
    urls_of([engine["url"] for engine in found.engines], f"{where}: {path.name}: engines")
    return found


def _damage(found: ClusterFile) -> str | None:
    """What of it is none of what a cluster tells."""
    if not isinstance(found.model, str) or not found.model:
        return f"model={found.model!r} is no name"
    if not isinstance(found.tokenizer, str):
        return f"tokenizer={found.tokenizer!r} is no text"
    if found.world not in WORLDS:
        return f"world={found.world!r} is not one of {', '.join(WORLDS)}"
    if not _number(found.time_scale) or not found.time_scale > 0:
        return f"time_scale={found.time_scale!r} is no number > 0"
    if not isinstance(found.engines, list) or not found.engines:
        return "engines is no list of at least one"
    for i, engine in enumerate(found.engines):
        if not isinstance(engine, dict):
            return f"engine {i} is {engine!r:.40}, no object"
        for name in ("url", "status"):
            if not isinstance(engine.get(name), str):
                return f"engine {i}: {name}={engine.get(name)!r} is no text"
    roles = {str(engine.get("role")) for engine in found.engines}
    if roles & set(ROLES) and roles != set(ROLES):
        return f"pools have engines of the roles {' and '.join(ROLES)}, not of {', '.join(sorted(roles))}"
    told = {} if found.handover is None else found.handover
    if not isinstance(told, dict) or told and not all(_number(told.get(name)) and told[name] >= 0 for name in HANDOVER):
        return f"handover={told!r:.80} is no object of {', '.join(HANDOVER)}, numbers >= 0"
    return None


def _number(value) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300
