"""Engine settings, under vLLM's own names."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from astrolabe_lab.errors import InputError

SCHEDULERS = ("v1", "v0_chunked", "v0_prefill_first")

# Engine arguments of vLLM that change its schedule and that this engine does not model: refused when switched on.
UNMODELLED = {
    "speculative_config": "speculative decoding",
    "max_num_partial_prefills": "concurrent partial prefills",
    "max_long_partial_prefills": "concurrent partial prefills",
    "long_prefill_token_threshold": "a cap on long prefills",
    "num_scheduler_steps": "multi-step scheduling",
    "preemption_mode": "swapping (preemption is by recomputation)",
    "swap_space": "swapping (preemption is by recomputation)",
    "pipeline_parallel_size": "pipeline parallelism",
    "prefill_schedule_interval": "data-parallel prefill balancing",
    "scheduling_policy": "priority scheduling (requests are served first come, first served)",
    "policy": "priority scheduling (requests are served first come, first served)",
}
FLAGS = ("enable_chunked_prefill", "async_scheduling", "enable_prefix_caching")
_OFF = {"", "0", "false", "no", "off", "none", "fcfs", "recompute"}


@dataclass(frozen=True)
class EngineConfig:
    """The flags of one engine; names and meanings are vLLM's, ``scheduler`` is ours.

    Sizes are in tokens (``max_num_batched_tokens``, ``block_size``, ``max_model_len``), requests (``max_num_seqs``)
    or KV blocks (``num_gpu_blocks``); ``watermark`` is a fraction of the blocks. The defaults are the Astrolabe
    paper's Llama-2-7B on one A30 (1056 blocks of 16 tokens, batch 48, chunk 512).

    ``scheduler``: ``v1`` is vLLM V1's default scheduler, step by step; ``v0_chunked`` and ``v0_prefill_first`` are
    the two of vLLM 0.7, whose watermark is 1 % unless given. ``enable_prefix_caching`` is off unless given, as in the
    paper; vLLM V1's own default is on. Raises InputError on values that vLLM refuses.
    """

    max_num_seqs: int = 48
    max_num_batched_tokens: int = 512
    block_size: int = 16
    num_gpu_blocks: int = 1056
    max_model_len: int = 4096
    enable_chunked_prefill: bool | None = None
    watermark: float | None = None
    async_scheduling: bool = False
    scheduler: str = "v1"
    enable_prefix_caching: bool = False

    def __post_init__(self):
        if self.scheduler not in SCHEDULERS:
            raise InputError(f"engine: scheduler={self.scheduler!r} is not one of {', '.join(SCHEDULERS)}")
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "num_gpu_blocks",
            "max_model_len",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise InputError(f"engine: {name}={value!r} must be a whole number from 1 to {2**31 - 1}")
        if self.watermark is None:
            object.__setattr__(self, "watermark", 0.0 if self.scheduler == "v1" else 0.01)
        if not isinstance(self.watermark, (int, float)) or not 0.0 <= self.watermark < 1.0:
            raise InputError(f"engine: watermark={self.watermark!r} must be in [0, 1), a fraction of the KV blocks")
        if self.enable_chunked_prefill is None:
            object.__setattr__(self, "enable_chunked_prefill", self.scheduler != "v0_prefill_first")
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"engine: {name}={getattr(self, name)!r} must be true or false")
        if self.scheduler == "v0_chunked" and not self.enable_chunked_prefill:
            raise InputError("engine: scheduler=v0_chunked has chunked prefill on; for it off use v0_prefill_first")
        if self.scheduler == "v0_prefill_first" and self.enable_chunked_prefill:
            raise InputError("engine: scheduler=v0_prefill_first has no chunked prefill; for it use v0_chunked")
        if self.async_scheduling and self.scheduler != "v1":
            raise InputError(f"engine: async_scheduling is vLLM V1's; scheduler={self.scheduler} has none")
        if self.enable_prefix_caching and self.scheduler != "v1":
            raise InputError(
                f"engine: enable_prefix_caching is modelled as vLLM V1 has it; scheduler={self.scheduler} had another "
                "block allocator, and it was off there by default"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InputError(
                f"engine: max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs} (vLLM's own rule)"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise InputError(
                f"engine: without chunked prefill max_num_batched_tokens={self.max_num_batched_tokens} must be at "
                f"least max_model_len={self.max_model_len} (vLLM's own rule): raise one or lower the other"
            )
        if self.request_blocks < 1:
            kept = self.num_gpu_blocks - self.request_blocks
            why = "one is vLLM's null block" if self.scheduler == "v1" else f"V0 keeps {kept} free"
            raise InputError(f"engine: num_gpu_blocks={self.num_gpu_blocks} leaves no usable block ({why})")

    @property
    def usable_blocks(self) -> int:
        """KV blocks that requests can hold; vLLM V1 keeps one as its null block."""
        return self.num_gpu_blocks - (1 if self.scheduler == "v1" else 0)

    @property
    def watermark_blocks(self) -> int:
        return int(self.watermark * self.num_gpu_blocks)

    @property
    def request_blocks(self) -> int:
        """KV blocks that one request can hold.

        Under V0 the watermark must stay free: a request without that room could not be admitted again after a
        preemption. So must one block in any case, for which every decode asks: a request that holds all others would
        preempt itself for ever.
        """
        return self.usable_blocks - (0 if self.scheduler == "v1" else max(self.watermark_blocks, 1))

    def rejects(self, prompt_tokens, output_tokens):
        """True where a request (int or array, tokens) can never run on this engine: it is rejected at arrival.

        Too long for ``max_model_len``, or in need of more than ``request_blocks``. The last generated token is never
        computed, hence the ``- 1``.
        """
        blocks = (prompt_tokens + output_tokens - 1 + self.block_size - 1) // self.block_size
        return (prompt_tokens + output_tokens > self.max_model_len) | (blocks > self.request_blocks)

    @classmethod
    def parse(cls, text: str, base: EngineConfig | None = None) -> EngineConfig:
        """The configuration ``base`` (default: the defaults) with ``key=value,...`` applied. Raises InputError."""
        return cls.from_dict(pairs(text), base)

    @classmethod
    def from_dict(cls, values: dict, base: EngineConfig | None = None) -> EngineConfig:
        """As ``parse``, from a dict whose values may be text or already typed."""
        known = {f.name: f for f in fields(cls)}
        chosen = {}
        for key, value in values.items():
            if key in UNMODELLED:
                if str(value).strip().lower() not in _OFF and not (key.startswith("max_") and str(value) == "1"):
                    raise InputError(f"engine: {key}={value} is not modelled: {UNMODELLED[key]}. Leave it out")
                continue
            if key not in known:
                raise InputError(f"engine: unknown key {key!r}; allowed: {', '.join(known)}")
            chosen[key] = _typed(key, value)
        if base is None:
            return cls(**chosen)
        if "scheduler" in chosen and chosen["scheduler"] != base.scheduler:
            # The base's watermark and chunking may only be its scheduler's defaults; let the new one choose its own.
            for key in ("watermark", "enable_chunked_prefill"):
                chosen.setdefault(key, None)
        return replace(base, **chosen)


def pairs(text: str) -> dict[str, str]:
    """The settings in ``key=value,...``, as text. Raises InputError for what is none, or is given twice."""
    pairs: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise InputError(f"engine: {part!r} is not key=value (example: max_num_seqs=48,block_size=16)")
        if key.strip() in pairs:
            raise InputError(f"engine: {key.strip()} is given twice")
        pairs[key.strip()] = value.strip()
    return pairs


def _typed(key: str, value):
    if not isinstance(value, str) or key == "scheduler":
        return value
    if key in FLAGS:
        low = value.lower()
        if low in ("true", "1", "yes", "on"):
            return True
        if low in ("false", "0", "no", "off"):
            return False
        raise InputError(f"engine: {key}={value} must be true or false")
    try:
        return float(value) if key == "watermark" else int(value)
    except ValueError:
        raise InputError(
            f"engine: {key}={value} must be a {'number' if key == 'watermark' else 'whole number'}"
        ) from None
