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

VERSION = 1
CLUSTER_FILE = "cluster.json"


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
    """The cluster of ``folder``. Raises InputError where there is none."""
    path = Path(folder) / CLUSTER_FILE
    raw = json_object(path, "this cluster", " (astrolabe launch makes it)")
    try:
        if raw["version"] != VERSION:
            raise InputError(f"cluster {str(folder)!r}: version {raw['version']!r} where {VERSION} is understood")
        return ClusterFile(
            raw["engines"], EngineConfig(**raw["engine"]), raw["cost"] and StepCost.from_dict(raw["cost"]),
            float(raw["time_scale"]), raw["model"], raw["tokenizer"], raw["world"], raw.get("handover"),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cluster {str(folder)!r}: {path.name} is damaged ({error!r})") from None
