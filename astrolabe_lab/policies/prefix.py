"""Policies that weigh the prefixes which instances may have cached against their load.

What is cached where they know from ``cluster.prefix_overlap(request)``, the router's own record of what it sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from astrolabe_lab.errors import InputError
from astrolabe_lab.policies import scores
from astrolabe_lab.policies.draw import argmin, softmin


@dataclass(frozen=True, slots=True)
class CacheAware:
    """SGLang's rule. While the router's own in-flight requests are out of balance (most - fewest > ``imbalance`` and
    most > ``ratio`` * fewest): fewest of them. Else the longest cached prefix, where it is more than ``threshold`` of
    the prompt; else the instance for which the router remembers the least."""

    imbalance: int = 64
    ratio: float = 1.5
    threshold: float = 0.3

    def __post_init__(self):
        for name in ("imbalance", "ratio", "threshold"):
            _check_number("cache_aware", name, getattr(self, name))

    def choose(self, request, cluster, rng):
        load = cluster.signals["in_flight"]
        most, fewest = int(load.max()), int(load.min())
        if most - fewest > self.imbalance and most > self.ratio * fewest:
            return argmin(load.tolist(), rng)
        overlap = cluster.prefix_overlap(request)
        if overlap.tokens.max() > self.threshold * request.prompt_tokens:
            return argmin((-overlap.tokens).tolist(), rng)
        return argmin(overlap.remembered_tokens.tolist(), rng)


@dataclass(frozen=True, slots=True)
class KvCost:
    """Dynamo's rule: lowest max(prefill tokens + prompt - cached, 0) / block size + used blocks, that is KV blocks to
    compute plus those in use; prefill tokens are those of prompts that the instance has still to compute.

    With a ``temperature`` > 0 the choice is drawn, each instance with probability ~ exp(-cost / temperature) after the
    costs are scaled to 0..1; at 0 the lowest cost wins. ``overlap_weight`` multiplies the blocks to compute.
    """

    temperature: float = 0.0
    overlap_weight: float = 1.0

    def __post_init__(self):
        for name in ("temperature", "overlap_weight"):
            _check_number("kv_cost", name, getattr(self, name))

    def choose(self, request, cluster, rng):
        cached = cluster.prefix_overlap(request).tokens
        costs = scores.kv_cost(cluster.signals, request.prompt_tokens, cached, self.overlap_weight)
        if self.temperature > 0.0:
            return softmin(costs, self.temperature, rng)
        return argmin(costs.tolist(), rng)


@dataclass(frozen=True, slots=True)
class WeightedScore:
    """llm-d's rule: highest ``queue`` * queue score + ``kv`` * (1 - share of the KV blocks in use) + ``prefix`` *
    cached share of the prompt. The queue score is (most - waiting) / (most - fewest), 1 where all wait alike."""

    queue: float = 2.0
    kv: float = 2.0
    prefix: float = 3.0

    def __post_init__(self):
        for name in ("queue", "kv", "prefix"):
            _check_number("weighted_score", name, getattr(self, name))

    def choose(self, request, cluster, rng):
        cached = cluster.prefix_overlap(request).tokens / request.prompt_tokens
        return argmin((-scores.weighted(cluster.signals, cached, self.queue, self.kv, self.prefix)).tolist(), rng)


def _check_number(policy: str, name: str, value) -> None:
    good = isinstance(value, (int, float, np.floating, np.integer)) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or value < 0:
        raise InputError(f"policy {policy}: {name}={value!r} must be a finite number >= 0")
