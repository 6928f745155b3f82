"""Policies that use predicted lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from astrolabe_lab.errors import InputError
from astrolabe_lab.policies.draw import argmin, sample_k, uniform


@dataclass(frozen=True, slots=True)
class MinTokens:
    """Fewest tokens left to compute, by the predicted lengths (the paper's NoSim: prediction without simulation)."""

    needs_lengths: ClassVar[bool] = True

    def choose(self, request, cluster, rng):
        return argmin(cluster.signals["pending_tokens"].tolist(), rng)


@dataclass(frozen=True, slots=True)
class Astrolabe:
    """Sample k instances, ask their Predictors for ``metric``, take the lowest.

    ``k``: how many are asked, or 0 for all of them (full fan-out). ``metric``: e2e_s, ttft_s, tpot_s, added_delay_s,
    or a callable of a ``Predictions`` (arrays ttft_s, e2e_s, tpot_s of the asked instances, inf where the request
    does not fit) that returns one value an instance, lower is better. Instances that do not fit are dropped; when
    none is left the choice is uniform over all. Where fewer than k are healthy, these are asked.
    """

    k: int = 2
    metric: str | Callable = "e2e_s"
    needs_lengths: ClassVar[bool] = True

    def __post_init__(self):
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 0:
            raise InputError(f"policy astrolabe: k={self.k!r} must be a whole number >= 1, or 0 for all instances")
        if not callable(self.metric) and self.metric not in ("e2e_s", "ttft_s", "tpot_s", "added_delay_s"):
            raise InputError(
                f"policy astrolabe: metric={self.metric!r} is no callable, nor e2e_s, ttft_s, tpot_s, added_delay_s"
            )

    def choose(self, request, cluster, rng):
        n = len(cluster)
        drawn = sample_k(n, min(self.k or n, n), rng)
        predicted = cluster.predict(request, self.metric, drawn)
        if not np.isfinite(predicted).any():
            return uniform(n, rng)
        return int(drawn[argmin(predicted.tolist(), rng)])
