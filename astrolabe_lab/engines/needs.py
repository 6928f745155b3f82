"""What engines need of memory, and whether it is there: asked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from astrolabe_lab import machine
from astrolabe_lab.errors import InputError

from .placement import Place

EMULATED_BYTES = 1.4e9  # an engine's, measured
CPU_ENGINE_BYTES = 1.9e9  # a real one's on the CPU, measured, without weights and KV cache
CPU_KV_BYTES = 2**30  # unless VLLM_CPU_KVCACHE_SPACE says otherwise
GPU_SHARE = 0.92  # of a GPU's memory, which vLLM 0.32 takes unless told otherwise
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def cpu_engine_bytes(weights: int) -> float:
    """What a real engine on the CPU takes, with a model whose files have so many bytes."""
    told = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    return CPU_ENGINE_BYTES + weights + (int(told) * 2**30 if told.isdigit() else CPU_KV_BYTES)


def weights_bytes(folder: str | Path) -> int:
    """The bytes of a model folder's weights: of the first kind of file that it has."""
    for pattern in WEIGHTS:
        if found := sum(path.stat().st_size for path in Path(folder).glob(pattern)):
            return found
    return 0


def check_memory(instances: int, each: float, kind: str) -> None:
    """Raise InputError unless ``instances`` engines of ``each`` bytes fit into what is available."""
    _, free = machine.memory_bytes()
    if free < instances * each:
        raise InputError(
            f"{instances} {kind} engine{'s' * (instances > 1)} need {instances * each / 2**30:.1f} GiB, of which "
            f"{free / 2**30:.1f} are available: start {int(free // each)} at most, or free memory"
        )


def check_gpus(places: Sequence[Place], weights: int, flags: Sequence[str]) -> None:
    """Raise InputError where a GPU has less free memory than vLLM takes, or the weights do not fit.

    GPUs that nvidia-smi does not list by number (MIG slices, UUIDs) are left to vLLM's own check."""
    share = _share(flags)
    listed = {str(gpu["index"]): gpu for gpu in machine.gpus()}
    for place in places:
        for name in place.gpus:
            gpu = listed.get(name)
            if gpu is None or gpu["memory_mib"] is None or gpu["memory_free_mib"] is None:
                continue
            wanted = share * gpu["memory_mib"]
            if not is_free(gpu, share):
                raise InputError(
                    f"GPU {name} ({gpu['name']}) has {gpu['memory_free_mib'] / 1024:.1f} of "
                    f"{gpu['memory_mib'] / 1024:.1f} GiB free, and vLLM takes {share:.0%}: end what holds it "
                    "(nvidia-smi shows it), choose others (gpus), or lower --gpu-memory-utilization"
                )
            if weights / len(place.gpus) > wanted * 2**20:
                raise InputError(
                    f"the model's weights are {weights / 2**30:.1f} GiB, more than {share:.0%} of "
                    f"{len(place.gpus)} x {gpu['memory_mib'] / 1024:.1f} GiB: raise tensor_parallel, or take another"
                )


def is_free(gpu: dict, share: float = GPU_SHARE) -> bool:
    """Whether a GPU of ``machine.gpus`` has so much of its memory free; True where nvidia-smi does not tell."""
    total, free = gpu["memory_mib"], gpu["memory_free_mib"]
    return total is None or free is None or free >= share * total


def _share(flags: Sequence[str]) -> float:
    for flag, value in zip(flags, [*flags[1:], ""], strict=False):
        name, equals, told = flag.partition("=")
        if name == "--gpu-memory-utilization":
            told = told if equals else value
            try:
                return float(told)
            except ValueError:
                raise InputError(f"--gpu-memory-utilization {told!r} is no number, like 0.8") from None
    return GPU_SHARE
