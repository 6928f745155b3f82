"""Policies that use predicted lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from astrolabe_lab.errors import InputError
from astrolabe_lab.objective import check_foresight, objective
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

    ``k``: how many are asked, or 0 for all of them (full fan-out). ``metric``: the name of an ``objective``, or a
    callable of a ``Predictions`` (arrays ttft_s, e2e_s, tpot_s of the asked instances, inf where the request does not
    fit) that returns one value an instance, lower is better. ``foresight``: none (the paper's method), arrivals,
    learned or both: what the Predictors assume of later arrivals. Instances that do not fit are dropped; when none is
    left the choice is uniform over all. Where fewer than k are healthy, these are asked.
    """

    k: int = 2
    metric: str | Callable = "e2e_s"
    foresight: str = "none"
    needs_lengths: ClassVar[bool] = True

    def __post_init__(self):
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 0:
            raise InputError(f"policy astrolabe: k={self.k!r} must be a whole number >= 1, or 0 for all instances")
        try:
            check_foresight(self.foresight)
            if not callable(self.metric):
                objective(self.metric)
        except InputError as error:
            raise InputError(f"policy astrolabe: {error}") from None

    def choose(self, request, cluster, rng):
        n = len(cluster)
        drawn = sample_k(n, min(self.k or n, n), rng)
        predicted = cluster.predict(request, self.metric, drawn)
        if not np.isfinite(predicted).any():
            return uniform(n, rng)
        return int(drawn[argmin(predicted.tolist(), rng)])
