"""A cluster of running engines: where they are, what they run with, how to disturb and to end them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.cost import StepCost
from astrolabe_lab.errors import InputError
from astrolabe_lab.sim.config import EngineConfig

from . import emulation, step_log
from .cluster_file import CLUSTER_FILE, write_cluster
from .engine_process import Engine
from .supervisor import Supervisor

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class Cluster:
    """Running engines. A context manager: leaving it ends them.

    ``config``: the flags they run with; ``cost``: of a step, None for real engines until one is known
    (``set_cost``); ``model``: its name at the engines; ``tokenizer``: a folder or hub name; ``handover``: of emulated
    pools, as ``cluster.json`` tells it.
    """

    engines: list[Engine]
    folder: Path
    config: EngineConfig
    cost: StepCost | None
    world: str
    time_scale: float
    model: str
    tokenizer: str
    handover: dict | None = None
    temporary: bool = False  # the folder goes when all went well
    supervisor: Supervisor | None = field(default=None, repr=False)

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines]

    @property
    def restarts(self) -> int:
        """How many times an engine that had ended was started again."""
        return self.supervisor.restarted if self.supervisor else 0

    @property
    def lost(self) -> list[Engine]:
        """Engines that ended and will not be started again."""
        return self.supervisor.lost if self.supervisor else []

    def describe(self) -> dict:
        """What others need to use the cluster, JSON-ready."""
        return {
            "world": self.world,
            "model": self.model,
            "time_scale": self.time_scale,
            "folder": str(self.folder),
            "engines": [
                {
                    "url": e.url, "role": e.role, "status": str(e.status), "steps": str(e.steps), "pace": str(e.pace),
                    "place": str(e.place), "log": str(e.log),
                }
                for e in self.engines
            ],
        }  # fmt: skip

    def save(self) -> None:
        """Write ``cluster.json``, from which routers and load generators learn of the cluster."""
        write_cluster(
            self.folder, self.describe()["engines"], self.config, self.cost, self.time_scale, self.model,
            self.tokenizer, self.world, self.handover,
        )  # fmt: skip

    def set_cost(self, cost: StepCost) -> None:
        """Let routers that start from now on predict with ``cost``."""
        self.cost = cost
        self.save()

    def steps(self, since: list[int] | None = None) -> pd.DataFrame:
        """The last steps of all engines as ``fit.fit`` takes them, with ``instance``; from ``marks()`` on, if given."""
        import pandas as pd

        since = since or [0] * len(self.engines)
        engines = zip(self.engines, since, strict=True)
        frames = [step_log.read_steps(engine.steps, n).assign(instance=engine.index) for engine, n in engines]
        return pd.concat(frames, ignore_index=True)

    def marks(self) -> list[int]:
        """How many steps each engine has logged so far."""
        return [step_log.written(engine.steps) for engine in self.engines]

    def disturb(self, instance: int, **changes) -> emulation.Disturbed:
        """Set an emulated engine's ``slowdown``, ``jitter`` or ``stalled`` from now on. Raises InputError."""
        if self.world != "emulated":
            raise InputError("only emulated engines can be disturbed")
        return emulation.disturb(self.engines[instance].control, **changes)

    def forget(self) -> None:
        """Remove what an earlier cluster in this folder left for others to read, or was told; its logs stay."""
        (self.folder / CLUSTER_FILE).unlink(missing_ok=True)
        for engine in self.engines:
            engine.forget()

    def watch(self, restart: bool, say: Callable[[str], None]) -> None:
        """Have the engines watched from now on (``supervisor``)."""
        self.supervisor = Supervisor(self.engines, restart, say)
        self.supervisor.start()

    def close(self) -> None:
        """End all engines and wait for them. Logs stay in ``folder``, unless it is temporary and no engine was lost."""
        if self.supervisor is not None:
            self.supervisor.stop()
        for engine in self.engines:
            engine.close()
        for engine in self.engines:
            engine.wait()
        if self.temporary and not self.lost and self.supervisor is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind, *_) -> None:
        self.temporary = self.temporary and kind is None  # after a failure the logs may say why
        self.close()
