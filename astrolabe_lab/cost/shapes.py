"""The shapes of models and devices: bytes of weights and keys, peaks of GPUs, KV blocks that fit."""

from __future__ import annotations

from dataclasses import dataclass, fields

from astrolabe_lab.errors import InputError
from astrolabe_lab.text_files import json_object

FP16_BYTES = 2
GIB = 2**30

# What vLLM 0.19 kept beside weights and keys (CUDA context, graphs, the peak of activations) when it served
# Llama-3.1-8B on an RTX 4090: 2588 blocks of 16 tokens in 0.9 of 23.52 GiB (LLMServingSim's bench, meta.json).
RESERVE_BYTES = 1.15 * GIB


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a dense Llama-like decoder in 16-bit weights. `tied`: the output head is the embedding."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    max_model_len: int = 4096
    tied: bool = False

    @property
    def weights(self):
        """Weights of one layer's four matrix products, by the name of the timing."""
        query, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        return {
            "attn_pre_proj": self.hidden * (query + 2 * kv),
            "attn_post_proj": query * self.hidden,
            "mlp_up_proj": 2 * self.hidden * self.ffn,
            "mlp_down_proj": self.ffn * self.hidden,
        }

    @property
    def head_weights(self):
        """Weights of the output head."""
        return self.vocabulary * self.hidden

    @property
    def weight_bytes(self):
        """Bytes of all weights: the layers, the embedding and the head."""
        layers = self.layers * sum(self.weights.values())
        return FP16_BYTES * (layers + self.head_weights * (1 if self.tied else 2))

    @property
    def kv_bytes(self):
        """Bytes of keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_size * FP16_BYTES

    @property
    def pair_flops(self):
        """Floating-point operations of one (query, key) pair in one layer: the score and the weighted sum."""
        return 4 * self.heads * self.head_size

    @classmethod
    def from_config(cls, path):
        """The shape in a Hugging Face config.json. Raises InputError for a file that lacks a size."""
        config = json_object(path, "this model config")
        try:
            heads = config["num_attention_heads"]
            shape = {
                "layers": config["num_hidden_layers"],
                "hidden": config["hidden_size"],
                "ffn": config["intermediate_size"],
                "heads": heads,
                "kv_heads": config.get("num_key_value_heads", heads),
                "head_size": config.get("head_dim") or config["hidden_size"] // heads,
                "vocabulary": config["vocab_size"],
                "max_model_len": config["max_position_embeddings"],
            }
            tied = bool(config.get("tie_word_embeddings", False))
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise InputError(
                f"model config {str(path)!r} is not a Hugging Face config.json of a dense decoder ({error!r})"
            ) from None
        if "num_experts" in config or "num_local_experts" in config:
            raise InputError(f"model config {str(path)!r} is a mixture of experts; only dense decoders are modelled")
        for name, value in shape.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"model config {str(path)!r}: {name} is {value!r}; it must be a whole number >= 1")
        return cls(**shape, tied=tied)


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU by its datasheet: bytes of memory, peak bytes per second, peak dense FP16 operations per second."""

    memory_bytes: float
    bytes_s: float
    flops_s: float


MODELS = {
    "meta-llama/Llama-2-7b-hf": Model(32, 4096, 11008, 32, 32, 128, 32000),
    "meta-llama/Llama-2-70b-hf": Model(80, 8192, 28672, 64, 8, 128, 32000),
    "meta-llama/Llama-3.1-8B": Model(32, 4096, 14336, 32, 8, 128, 128256, 131072),
    "Qwen/Qwen2-7B": Model(28, 3584, 18944, 28, 4, 128, 152064, 131072),
    "Qwen/Qwen2.5-3B": Model(36, 2048, 11008, 16, 2, 128, 151936, 32768, tied=True),
}

DEVICES = {
    "A30": Device(23.5 * GIB, 933e9, 165e12),
    "A40": Device(44.4 * GIB, 696e9, 149.7e12),
    "A100-40GB": Device(39.4 * GIB, 1555e9, 312e12),
    "A100-80GB": Device(79.1 * GIB, 2039e9, 312e12),
    "RTX4090": Device(23.52 * GIB, 1008e9, 165.2e12),
    "RTXPRO6000": Device(94.97 * GIB, 1597e9, 503.8e12),
}


def model(name):
    """The Model of that Hugging Face name, or of the config.json that `name` is the path of. Raises InputError."""
    if str(name).endswith(".json"):
        return Model.from_config(name)
    if name not in MODELS:
        raise InputError(f"unknown model {name!r}; known: {', '.join(MODELS)}, or give its config.json")
    return MODELS[name]


def device(name):
    """The Device of that name. Raises InputError that lists the known ones."""
    if name not in DEVICES:
        raise InputError(f"unknown device {name!r}; known: {', '.join(DEVICES)}")
    return DEVICES[name]


def kv_blocks(shape, gpu, *, utilisation=0.9, block_size=16, tensor_parallel=1, reserve_bytes=RESERVE_BYTES):
    """KV blocks that fit beside the weights: (utilisation * memory - weights - reserve) / bytes of a block.

    Per GPU of `tensor_parallel`, which share weights and KV heads evenly. This is vLLM's own rule with the peak of
    activations, which it measures at start, replaced by `reserve_bytes`. Raises InputError where nothing fits.
    """
    block = block_size * shape.layers * shape.kv_bytes / tensor_parallel
    free = utilisation * gpu.memory_bytes - shape.weight_bytes / tensor_parallel - reserve_bytes
    if free < block:
        raise InputError(
            f"{shape.weight_bytes / tensor_parallel / GIB:.1f} GiB of weights leave no room for KV blocks in "
            f"{utilisation:g} of {gpu.memory_bytes / GIB:.1f} GiB; give num_gpu_blocks"
        )
    return int(free // block)


def describe(shape):
    """The shape as one line of name=value."""
    return ", ".join(f"{f.name}={getattr(shape, f.name)}" for f in fields(shape))
