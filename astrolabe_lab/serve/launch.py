"""Start N vLLM engines, tell when they serve, and end them, whatever happens.

with launch(4, preset="llama2-7b-a30", time_scale=4.0) as cluster:
    print(cluster.urls)
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from astrolabe_lab.cost import StepCost
from astrolabe_lab.cost import preset as preset_of
from astrolabe_lab.errors import InputError
from astrolabe_lab.serve import engine_process, model_files
from astrolabe_lab.serve.cluster_file import write_cluster
from astrolabe_lab.serve.emulation import Emulation
from astrolabe_lab.serve.engine_process import MARK, Engine, EngineError
from astrolabe_lab.sim.config import EngineConfig

EMULATED_BYTES = 1.4e9  # of memory an engine, measured


@dataclass
class Cluster:
    """Running engines. A context manager: leaving it ends them."""

    engines: list[Engine]
    folder: Path
    config: EngineConfig
    cost: StepCost
    world: str
    time_scale: float
    model: str

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines]

    def describe(self) -> dict:
        """What others need to use the cluster, JSON-ready."""
        return {
            "world": self.world,
            "model": self.model,
            "time_scale": self.time_scale,
            "folder": str(self.folder),
            "engines": [
                {"url": e.url, "role": e.role, "status": str(e.status), "log": str(e.log)} for e in self.engines
            ],
        }

    def close(self) -> None:
        """End all engines and wait for them. Logs stay in ``folder``."""
        for engine in self.engines:
            engine.close()
        for engine in self.engines:
            engine.wait()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def launch(
    instances: int,
    preset: str = "llama2-7b-a30",
    engine: str | EngineConfig = "",
    cost: str | StepCost = "",
    time_scale: float = 1.0,
    async_scheduling: bool = False,
    folder: str | Path | None = None,
    model_name: str = "emulated",
    timeout_s: float = 300.0,
    progress: Callable[[str], None] | None = None,
) -> Cluster:
    """Start ``instances`` emulated engines and return when all serve.

    ``engine`` and ``cost`` change the preset's (``key=value,...``, or the object). ``time_scale``: wall seconds per
    modelled second. ``folder``: for logs and status files (default: a new temporary one). ``progress`` gets one line at
    a time (default: standard error). Raises InputError for what cannot start here (no vLLM, too little memory), and
    EngineError with the tail of the log for an engine that ended.
    """
    say = progress or (lambda line: print(line, file=sys.stderr, flush=True))
    chosen = preset_of(preset)
    config = engine
    if not isinstance(config, EngineConfig):
        base = EngineConfig.from_dict({k: v for k, v in chosen.engine.items() if k not in ("scheduler", "watermark")})
        config = EngineConfig.parse(engine, base)
    if config.scheduler != "v1":
        raise InputError(f"scheduler={config.scheduler} is simulated only: a live vLLM has scheduler=v1")
    step_cost = cost if isinstance(cost, StepCost) else StepCost.parse(cost, chosen.cost)
    emulation = Emulation(step_cost, float(time_scale), async_scheduling or config.async_scheduling)
    config = replace(config, async_scheduling=emulation.async_scheduling)
    _check(instances)
    for line in leftovers():
        say(line)
    root = Path(folder) if folder else Path(tempfile.mkdtemp(prefix="astrolabe-cluster-"))
    root.mkdir(parents=True, exist_ok=True)
    model = model_files.write(root / "model", config.max_model_len)
    engines = [
        engine_process.emulated(i, root / f"engine-{i}", model, config, emulation, model_name) for i in range(instances)
    ]
    cluster = Cluster(engines, root, config, step_cost, "emulated", emulation.time_scale, model_name)
    try:
        for each in engines:
            each.start()
        _await(engines, timeout_s, say)
        described = cluster.describe()["engines"]
        write_cluster(root, described, config, step_cost, emulation.time_scale, model_name, model, "emulated")
    except BaseException:
        cluster.close()
        raise
    return cluster


def _await(engines: list[Engine], timeout_s: float, say) -> None:
    started = time.monotonic()
    spoken = started
    waiting = list(engines)
    while waiting:
        waiting = [engine for engine in waiting if not engine.ready()]
        seconds = time.monotonic() - started
        if waiting and seconds > timeout_s:
            slow = waiting[0]
            raise EngineError(
                f"engine {slow.index} does not serve after {timeout_s:.0f} s; the end of {slow.log}:\n{slow.tail()}"
            )
        if not waiting or time.monotonic() - spoken > 10:
            spoken = time.monotonic()
            say(f"engines: {len(engines) - len(waiting)} of {len(engines)} serve after {seconds:.0f} s")
        if waiting:
            time.sleep(0.25)


def _check(instances: int) -> None:
    import psutil

    if isinstance(instances, bool) or not isinstance(instances, int) or instances < 1:
        raise InputError(f"instances={instances!r} must be a whole number >= 1")
    if importlib.util.find_spec("vllm") is None:
        raise InputError("live engines need vLLM, which is not installed: make vllm (CPU), or pip install vllm (GPU)")
    free = psutil.virtual_memory().available
    if free < instances * EMULATED_BYTES:
        most = int(free // EMULATED_BYTES)
        raise InputError(
            f"{instances} emulated engines need {instances * EMULATED_BYTES / 2**30:.1f} GiB, of which "
            f"{free / 2**30:.1f} are available: start {max(most, 0)} at most, or free memory"
        )


def leftovers() -> list[str]:
    """One line for every engine of an earlier cluster that still runs although its guard is gone."""
    import psutil

    found = []
    for process in psutil.process_iter(["pid", "ppid", "uids"]):
        try:
            if process.info["uids"].real != os.getuid() or process.info["ppid"] != 1:
                continue
            cluster = process.environ().get(MARK)
        except (psutil.Error, AttributeError):
            continue
        if cluster:
            found.append(f"left over from {cluster}: process {process.pid}; end it with: kill {process.pid}")
    return found


def remove(folder: str | Path) -> None:
    """Remove a cluster's folder."""
    shutil.rmtree(folder, ignore_errors=True)
