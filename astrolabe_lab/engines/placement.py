"""Where engines run: one GPU or tensor-parallel group each, or cores of their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from astrolabe_lab import machine
from astrolabe_lab.errors import InputError

DEVICES = ("auto", "gpu", "cpu")


@dataclass(frozen=True)
class Place:
    """One engine's: GPUs as CUDA_VISIBLE_DEVICES names them, or the ids of the cores that compute (empty: any)."""

    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """What tells vLLM."""
        if self.gpus:
            return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
        if self.cores:
            return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, self.cores))}
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

    @property
    def flags(self) -> list[str]:
        return ["--tensor-parallel-size", str(len(self.gpus))] if len(self.gpus) > 1 else []

    def __str__(self) -> str:
        if self.gpus:
            return f"GPU {','.join(self.gpus)}"
        return f"core {','.join(map(str, self.cores))}" if self.cores else "any core, one thread"


def device_of(wanted: str = "auto") -> str:
    """``gpu`` or ``cpu``: the one wanted, or what the installed vLLM and this machine have.

    Raises InputError where vLLM is built for the other one."""
    if wanted not in DEVICES:
        raise InputError(f"device {wanted!r} is unknown; allowed are {', '.join(DEVICES)}")
    cpu_build = _installed("vllm-cpu") and not _installed("vllm")
    if wanted == "auto":
        return "cpu" if cpu_build or not machine.gpus() else "gpu"
    if wanted == "gpu" and cpu_build:
        raise InputError("device gpu: the vLLM installed here is its CPU build; install the extra vllm for GPUs")
    if wanted == "cpu" and not cpu_build and _installed("vllm"):
        raise InputError("device cpu: the vLLM installed here is its GPU build; install the extra vllm-cpu (make vllm)")
    return wanted


def gpu_places(instances: int, tensor_parallel: int = 1, gpus: Sequence[str] | None = None) -> list[Place]:
    """Places of ``tensor_parallel`` GPUs each, in order: of ``gpus``, else CUDA_VISIBLE_DEVICES, else all there are.

    Raises InputError for too few, or one given twice."""
    if isinstance(tensor_parallel, bool) or not isinstance(tensor_parallel, int) or tensor_parallel < 1:
        raise InputError(f"tensor_parallel={tensor_parallel!r} must be a whole number >= 1")
    visible = list(gpus) if gpus is not None else visible_gpus()
    if len(set(visible)) < len(visible):
        raise InputError(f"gpus {','.join(visible)}: one is given twice")
    need = instances * tensor_parallel
    if len(visible) < need:
        have = f"{len(visible)} ({','.join(visible)})" if visible else "none (nvidia-smi)"
        raise InputError(
            f"{instances} engines on {tensor_parallel} GPU{'s' * (tensor_parallel > 1)} each need {need} GPUs; "
            f"there are {have}: start {len(visible) // tensor_parallel} engines at most"
        )
    return [Place(gpus=tuple(visible[i * tensor_parallel : (i + 1) * tensor_parallel])) for i in range(instances)]


def visible_gpus(listed: list[dict] | None = None) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; all that are ``listed`` without it."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is not None:
        return [name.strip() for name in told.split(",") if name.strip()]
    return [str(gpu["index"]) for gpu in (machine.gpus() if listed is None else listed)]


def cpu_places(instances: int, cores: Sequence[Sequence[int]] | None = None) -> list[Place]:
    """Places of cores: those given, one list an engine, else equal shares of the cores of this process.

    With two cores to spare, one is left to routers and clients. More engines than cores: none is pinned, each computes
    in one thread. Raises InputError for another number of lists, or a core that is not there."""
    own = machine.cores()
    if cores is not None:
        if len(cores) != instances:
            raise InputError(f"cores: {len(cores)} lists for {instances} engines; give one an engine, as 0-3|4-7")
        if missing := sorted({core for share in cores for core in share} - set(own)):
            raise InputError(f"cores {', '.join(map(str, missing))} are not this process' own ({_span(own)})")
        return [Place(cores=tuple(share)) for share in cores]
    spare = len(own) - instances
    each = (len(own) - (spare >= 2)) // instances
    return [Place(cores=tuple(own[i * each : (i + 1) * each])) for i in range(instances)]


def parse_cores(text: str) -> list[list[int]]:
    """``0-3|4,6``: one list of core ids an engine. Raises InputError for another text."""
    lists = []
    for share in text.split("|"):
        found: list[int] = []
        for part in share.split(","):
            low, dash, high = part.partition("-")
            if not low.isdigit() or (dash and not high.isdigit()) or (dash and int(high) < int(low)):
                raise InputError(f"cores {text!r}: {part!r} is no core or range; write 0-3|4-7, one share an engine")
            found += range(int(low), int(high if dash else low) + 1)
        lists.append(found)
    return lists


def _span(ids: list[int]) -> str:
    whole = ids == list(range(ids[0], ids[-1] + 1))
    return f"{ids[0]}-{ids[-1]}" if whole and len(ids) > 1 else ", ".join(map(str, ids))


def _installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False
