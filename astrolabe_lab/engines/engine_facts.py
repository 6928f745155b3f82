"""The flags that a running engine has, as its own scheduler found them: written once by the engine, read by launch.

What vLLM derives by itself (KV blocks from memory, a model's longest context, its defaults by device) is known no
other way; and what it was told can be compared with what it does.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from astrolabe_lab.errors import InputError
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.text_files import json_object

DOUBTFUL = ("long_prefill_token_threshold", "policy", "speculative_config", "pipeline_parallel_size")  # off as a rule


def write_facts(path: str | Path, scheduler) -> None:
    """Write what ``scheduler``, one of vLLM's, runs with."""
    config = scheduler.vllm_config
    cache, scheduling = config.cache_config, config.scheduler_config
    engine = {
        "max_num_seqs": scheduler.max_num_running_reqs,
        "max_num_batched_tokens": scheduler.max_num_scheduled_tokens,
        "block_size": scheduler.block_size,
        "num_gpu_blocks": cache.num_gpu_blocks,
        "max_model_len": scheduler.max_model_len,
        "enable_chunked_prefill": scheduling.enable_chunked_prefill,
        "watermark": getattr(scheduling, "watermark", 0.0),
        "async_scheduling": bool(scheduling.async_scheduling),
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "long_prefill_token_threshold": scheduling.long_prefill_token_threshold,
        "policy": scheduling.policy,
        "speculative_config": config.speculative_config is not None,
        "pipeline_parallel_size": max(0, config.parallel_config.pipeline_parallel_size - 1),
    }
    model = config.model_config
    record = {
        "engine": engine, "pid": os.getpid(), "model": model.model, "dtype": str(model.dtype).removeprefix("torch."),
        "device": config.device_config.device_type, "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "kv_cache_groups": len(scheduler.kv_cache_config.kv_cache_groups),
    }  # fmt: skip
    path = Path(path)
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(json.dumps(record))
    os.replace(unfinished, path)


def read_facts(path: str | Path) -> dict:
    """``engine`` (flags under vLLM's names), ``model, dtype, device, tensor_parallel, pid``. Raises InputError."""
    return json_object(path, "the facts of an engine", "; is the engine up?")


def config_of(facts: dict) -> EngineConfig:
    """The EngineConfig of an engine's facts. Raises InputError for a flag that our engine does not model."""
    if facts["kv_cache_groups"] != 1:
        raise InputError(
            f"engine: {facts['model']} keeps {facts['kv_cache_groups']} kinds of KV cache (sliding windows, state "
            "space layers); our engine models one, full attention"
        )
    return EngineConfig.from_dict({k: str(v) if k in DOUBTFUL else v for k, v in facts["engine"].items()})


def differences(facts: dict, config: EngineConfig) -> list[str]:
    """Sentences on the flags that an engine runs with although ``config`` says otherwise."""
    told, found = asdict(config), facts["engine"]
    return [
        f"{key} is {found[key]}, not {told[key]}"
        for key in told
        if key in found and key != "scheduler" and found[key] != told[key]
    ]
