"""How engines serve: exactly, or as one of the two models that the second paper's simulators had."""

from __future__ import annotations

from dataclasses import replace

from astrolabe_lab.errors import InputError

SERVICES = ("exact", "batching", "serial")
PLENTY = 2**24  # KV tokens, more than any trace has in flight


def service_of(name: str, configs, hand_off):
    """((prefill, decode) EngineConfigs, HandOff) of the service model ``name``.

    ``exact``: as given. ``batching``: engines serve whatever is there in one batch, whole prompts at once, and memory
    has no end. ``serial``: one request at a time, first come, first served, whole prompts, and memory has no end. In
    both a KV cache moves as soon as its prefill has ended, and its request waits for a seat with it. The paper does not
    print its models ("Calibrate, Then Route", section VI): these are our reading of what it says of them.
    """
    if name not in SERVICES:
        raise InputError(f"service={name!r} is not one of {', '.join(SERVICES)}")
    if name == "exact":
        return configs, hand_off
    seats = 1 if name == "serial" else 4096
    simple = [
        replace(
            config,
            max_num_seqs=seats,
            max_num_batched_tokens=2**21,
            num_gpu_blocks=PLENTY // config.block_size,
            watermark=0.0,
            async_scheduling=False,
        )
        for config in configs
    ]
    return tuple(simple), replace(hand_off, pull_at_once=True, polls="end")
