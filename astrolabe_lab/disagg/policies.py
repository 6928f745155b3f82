"""P/D routing policies: objects with ``choose(request, cluster, rng) -> (prefill, decode)``.

``request`` is an ``astrolabe_lab.request.Request``, ``cluster`` a ``view.PoolsView``; what is returned are indices into
``cluster.prefill`` and ``cluster.decode``. A class of your own with that one method runs wherever these do; one that
needs predicted lengths says so with a class attribute ``needs_lengths = True``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from astrolabe_lab.errors import InputError
from astrolabe_lab.policies.draw import argmin, uniform


def prefill_counts(cluster) -> list[int]:
    """Own requests in flight at each prefill engine: sent there and not answered."""
    flying = cluster.in_flight
    at = flying["prefill"][np.isnan(flying["prefilled_s"])]
    return _counts(at, cluster.prefill["instance"])


def decode_counts(cluster) -> list[int]:
    """Own requests in flight for each decode engine, from their dispatch on."""
    return _counts(cluster.in_flight["decode"], cluster.decode["instance"])


def _counts(at, instances) -> list[int]:
    counts = np.bincount(at, minlength=int(instances.max()) + 1)
    return counts[instances].tolist()


@dataclass(frozen=True, slots=True)
class RandomPair:
    """Uniform over prefill and decode engines."""

    def choose(self, request, cluster, rng):
        return uniform(len(cluster.prefill), rng), uniform(len(cluster.decode), rng)


@dataclass(slots=True)
class RoundRobinPair:
    """The next of each pool after the one chosen last, by one own counter."""

    count: int = field(default=0, repr=False)

    def choose(self, request, cluster, rng):
        at = self.count
        self.count += 1
        return at % len(cluster.prefill), at % len(cluster.decode)


@dataclass(frozen=True, slots=True)
class LeastLoadedPair:
    """Fewest own requests in flight, in each pool (join the shortest queue)."""

    def choose(self, request, cluster, rng):
        return argmin(prefill_counts(cluster), rng), argmin(decode_counts(cluster), rng)


@dataclass(slots=True)
class LengthThreshold:
    """Requests predicted longer than usual go to the decode engine with the fewest in flight, the others in turn; to
    the prefill engine with the fewest in flight either way.

    Usual is the median of the last ``window`` predictions. ``reserve``: so many decode engines, the last ones, are kept
    for long requests; a short one goes there only when all others have more in flight (0: none are kept).
    """

    window: int = 1000
    reserve: int = 0
    count: int = field(default=0, repr=False)
    recent: list = field(default_factory=list, repr=False)
    ranked: list = field(default_factory=list, repr=False)  # the same, sorted
    needs_lengths: ClassVar[bool] = True

    def __post_init__(self):
        for name, least in (("window", 1), ("reserve", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"policy length_threshold: {name}={value!r} must be a whole number >= {least}")

    def choose(self, request, cluster, rng):
        usual = self._usual(request.predicted_tokens)
        n = len(cluster.decode)
        p = argmin(prefill_counts(cluster), rng)
        counts = decode_counts(cluster)
        kept = min(self.reserve, n - 1)
        if request.predicted_tokens > usual:
            kept_counts = counts[n - kept :] if kept else counts
            return p, (n - kept if kept else 0) + argmin(kept_counts, rng)
        d = self.count % (n - kept)
        self.count += 1
        if kept and min(counts[n - kept :]) < min(counts[: n - kept]):
            d = n - kept + argmin(counts[n - kept :], rng)
        return p, d

    def _usual(self, tokens: int) -> float:
        """The median of the last predictions, this one among them."""
        self.recent.append(tokens)
        insort(self.ranked, tokens)
        if len(self.recent) > self.window:
            del self.ranked[bisect_left(self.ranked, self.recent.pop(0))]
        middle = len(self.ranked) // 2
        return (self.ranked[middle] + self.ranked[~middle]) / 2
