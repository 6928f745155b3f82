"""Start N vLLM engines, tell when they serve, and end them, whatever happens.

with launch(4, preset="llama2-7b-a30", time_scale=4.0) as cluster:      # emulated: they sleep the modelled step
    print(cluster.urls)
with launch(2, world="hardware", model="Qwen/Qwen2.5-0.5B-Instruct") as cluster:      # real ones, on GPUs or the CPU
    print(cluster.config)
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from astrolabe_lab.cost import StepCost
from astrolabe_lab.cost import preset as preset_of
from astrolabe_lab.errors import InputError
from astrolabe_lab.sim.config import EngineConfig

from . import engine_facts, engine_process, hardware, leftovers, model_files, needs
from .emulation import Emulation
from .engine_process import Engine, EngineError
from .running import Cluster

WORLDS = ("emulated", "hardware")
PRESET = "llama2-7b-a30"


def launch(
    instances: int,
    preset: str | None = None,
    engine: str | EngineConfig = "",
    cost: str | StepCost = "",
    time_scale: float = 1.0,
    async_scheduling: bool = False,
    folder: str | Path | None = None,
    model_name: str | None = None,
    timeout_s: float = 600.0,
    progress: Callable[[str], None] | None = None,
    *,
    world: str = "emulated",
    model: str | Path | None = None,
    device: str = "auto",
    tensor_parallel: int = 1,
    gpus: Sequence[str] | None = None,
    cores: Sequence[Sequence[int]] | None = None,
    flags: Sequence[str] = (),
    restart: bool = False,
    prepare: Callable[[Cluster], None] | None = None,
) -> Cluster:
    """Start ``instances`` engines and return when all serve.

    ``engine`` and ``cost`` (``key=value,...``, or the object) change those of ``preset`` (llama2-7b-a30) where engines
    are emulated; ``time_scale``: wall seconds per modelled second. Real ones (``world="hardware"``) take ``engine`` on
    top of vLLM's own defaults, ``cost`` for Predictors, and ``model, device, tensor_parallel, gpus, cores, flags`` as
    ``hardware.Hardware`` says. ``folder``: for logs and status files (default: a temporary one, which stays when
    something went wrong). ``restart``: start an engine again that ends. ``progress`` gets one line at a time (default:
    standard error). ``prepare`` gets the cluster before its engines start, to change their commands.

    Raises InputError for what cannot start here (no vLLM, too little memory, no such GPU, a folder whose engines still
    run), and EngineError with the tail of the log for an engine that ended, or does not serve after ``timeout_s``.
    """
    say = progress or (lambda line: print(line, file=sys.stderr, flush=True))
    if world not in WORLDS:
        raise InputError(f"world {world!r} is unknown; allowed are {' and '.join(WORLDS)}")
    if isinstance(instances, bool) or not isinstance(instances, int) or instances < 1:
        raise InputError(f"instances={instances!r} must be a whole number >= 1")
    if importlib.util.find_spec("vllm") is None:
        raise InputError("live engines need vLLM, which is not installed: make vllm (CPU), or pip install vllm (GPU)")
    for line in leftovers.describe(leftovers.leftovers()):
        say(line)
    wants = hardware.Hardware(model, device, tensor_parallel, gpus, cores, flags)
    if world == "emulated":
        if wants != hardware.Hardware():
            raise InputError("model, device, tensor_parallel, gpus, cores and flags are for world='hardware'")
        make = _emulated(preset or PRESET, engine, cost, time_scale, async_scheduling, model_name, instances)
    else:
        if preset is not None or time_scale != 1.0:
            raise InputError("preset and time_scale are for emulated engines: real ones run in real time")
        make = _hardware(wants, engine, cost, async_scheduling, model_name, instances)
    root = Path(folder).expanduser().resolve() if folder else Path(tempfile.mkdtemp(prefix="astrolabe-cluster-"))
    if running := leftovers.processes_of(root):
        raise InputError(
            f"folder {str(root)!r} is that of a cluster whose processes {' '.join(map(str, running))} still run: end "
            "them, or name another folder"
        )
    root.mkdir(parents=True, exist_ok=True)
    cluster = make(root)
    cluster.forget()
    cluster.temporary = folder is None
    if prepare is not None:
        prepare(cluster)
    try:
        for each in cluster.engines:
            each.start()
        _await(cluster.engines, timeout_s, say)
        _settle(cluster)
        cluster.save()
        cluster.watch(restart, say)
    except BaseException:
        cluster.close()
        raise
    return cluster


def _emulated(preset, engine, cost, time_scale, async_scheduling, name, instances):
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
    needs.check_memory(instances, needs.EMULATED_BYTES, "emulated")
    name = name or "emulated"

    def make(root: Path) -> Cluster:
        model = model_files.write(root / "model", config.max_model_len)
        engines = [
            engine_process.emulated(i, root / f"engine-{i}", model, config, emulation, name) for i in range(instances)
        ]
        return Cluster(engines, root, config, step_cost, "emulated", emulation.time_scale, name, str(model))

    return make


def _hardware(wants, engine, cost, async_scheduling, name, instances):
    told = hardware.told(engine) | ({"async_scheduling": True} if async_scheduling else {})
    step_cost = cost if isinstance(cost, StepCost) else StepCost.parse(cost) if cost else None

    def make(root: Path) -> Cluster:
        engines, model = wants.engines(instances, root, told, name)
        return Cluster(engines, root, None, step_cost, "hardware", 1.0, model.name, model.source)

    return make


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


def _settle(cluster: Cluster) -> None:
    """Learn the flags that the engines run with; an emulated one must run with those it was told.

    Of engines that found different KV blocks (GPUs with different free memory) the fewest count."""
    facts = [engine_facts.read_facts(engine.facts) for engine in cluster.engines]
    if cluster.config is None:
        configs = [engine_facts.config_of(one) for one in facts]
        cluster.config = min(configs, key=lambda config: config.num_gpu_blocks)
        return
    for engine, one in zip(cluster.engines, facts, strict=True):
        if wrong := engine_facts.differences(one, cluster.config):
            raise EngineError(f"engine {engine.index} does not run as it was told: {'; '.join(wrong)}")
