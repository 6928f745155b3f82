"""Policies that look at free KV blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from astrolabe_lab.errors import InputError
from astrolabe_lab.policies import scores
from astrolabe_lab.policies.draw import argmin


@dataclass(frozen=True, slots=True)
class MinMemory:
    """Most free KV blocks."""

    def choose(self, request, cluster, rng):
        return argmin((-cluster.signals["free_blocks"]).tolist(), rng)


@dataclass(frozen=True, slots=True)
class Infaas:
    """INFaaS++ as published in three variants: (a) most free blocks per running request; (b) fewest used blocks per
    request of the batch; (c) most free blocks per request, waiting ones included."""

    variant: str = "a"

    def __post_init__(self):
        _check_variant("infaas", self.variant, "abc")

    def choose(self, request, cluster, rng):
        s = cluster.signals
        if self.variant == "a":
            values = -s["free_blocks"] / np.maximum(s["running"], 1)
        elif self.variant == "b":
            values = (s["total_blocks"] - s["free_blocks"]) / np.maximum(s["running"], 1)
        else:
            values = -s["free_blocks"] / np.maximum(s["running"] + s["waiting"], 1)
        return argmin(values.tolist(), rng)


@dataclass(frozen=True, slots=True)
class LlumnixMinus:
    """Llumnix' dispatch rule without migration: most free blocks per request, net of what waiting ones need.

    Variant a is the Astrolabe paper's comparator; variant b Llumnix v0's, with ``defrag`` (only the first waiting
    request's blocks count) or without. The public comparator's order is not transitive on ties; this one is.
    """

    variant: str = "a"
    defrag: bool = True

    def __post_init__(self):
        _check_variant("llumnix_minus", self.variant, "ab")
        if not isinstance(self.defrag, bool):
            raise InputError(f"policy llumnix_minus: defrag={self.defrag!r} must be true or false")

    def choose(self, request, cluster, rng):
        if self.variant == "a":
            values = scores.llumnix_minus_a(cluster.signals)
        else:
            values = scores.llumnix_minus_b(cluster.signals, self.defrag)
        return argmin(values.tolist(), rng)


def _check_variant(name: str, variant: str, allowed: str) -> None:
    if not isinstance(variant, str) or len(variant) != 1 or variant not in allowed:
        raise InputError(f"policy {name}: variant={variant!r} is not one of {', '.join(allowed)}")
