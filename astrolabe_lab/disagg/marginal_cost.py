"""The marginal-cost router of "Calibrate, Then Route", with every term switchable, and what its authors left undone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from astrolabe_lab.disagg.policies import decode_counts, prefill_counts
from astrolabe_lab.errors import InputError
from astrolabe_lab.policies.draw import argmin, sample_k

PROGRESS = ("estimated", "streamed")
GUARDS = ("off", "rotate", "least")


@dataclass(slots=True)
class MarginalCost:
    """The pair on which the request costs the fewest seconds, by ``price.price``.

    ``backlog``, ``own``, ``cache``, ``slo``, ``others``: weights of the terms, 0 leaves one out. ``lengths=False``:
    every request is taken to have the mean length predicted so far. ``progress``: what a request in flight has left is
    estimated from the time since its first token at the constants' pace, as the paper's proxy had to, or known from
    what it has ``streamed``. ``k``: so many pairs drawn at random are priced, 0: all.

    ``guard``: what is done where every pair is overloaded: the request would miss its TTFT target, or find no memory
    for its prompt at decode, or steps there already take longer than tight requests may. Prices then pile requests up
    (above all the slo term). ``rotate`` takes each pool's engines in turn, ``least`` those with the fewest requests in
    flight; ``off`` takes the cheapest regardless, as the paper's router did.
    """

    backlog: float = 1.0
    own: float = 1.0
    cache: float = 1.0
    slo: float = 1.0
    others: float = 0.0
    lengths: bool = True
    progress: str = "estimated"
    k: int = 0
    guard: str = "off"
    count: int = field(default=0, repr=False)
    seen: int = field(default=0, repr=False)
    tokens: float = field(default=0.0, repr=False)
    packed: tuple = field(default=(None, None), repr=False)
    needs_lengths: ClassVar[bool] = True

    def __post_init__(self):
        for name in ("backlog", "own", "cache", "slo", "others"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not (math.isfinite(value) and value >= 0):
                raise InputError(f"policy marginal_cost: {name}={value!r} must be a weight >= 0")
        if self.progress not in PROGRESS:
            raise InputError(f"policy marginal_cost: progress={self.progress!r} is not one of {', '.join(PROGRESS)}")
        if self.guard not in GUARDS:
            raise InputError(f"policy marginal_cost: guard={self.guard!r} is not one of {', '.join(GUARDS)}")
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 0:
            raise InputError(f"policy marginal_cost: k={self.k!r} must be a whole number >= 1, or 0 for all pairs")

    def choose(self, request, cluster, rng):
        prices_s, ttft_s, target_s = self.prices(request, cluster)
        n_p, n_d = prices_s.shape
        if self.guard != "off" and ttft_s.min() > target_s:
            if self.guard == "least":
                return argmin(prefill_counts(cluster), rng), argmin(decode_counts(cluster), rng)
            self.count += 1
            return self.count % n_p, self.count % n_d
        flat = prices_s.ravel()
        drawn = sample_k(flat.size, min(self.k or flat.size, flat.size), rng)
        at = int(drawn[argmin(flat[drawn].tolist(), rng)])
        return at // n_d, at % n_d

    def prices(self, request, cluster):
        """((P, D) seconds, (P, D) TTFT expected in s, the TTFT target of the request in s)."""
        from astrolabe_lab.disagg.price import beliefs, price

        if request.predicted_tokens < 1:
            raise InputError(f"policy marginal_cost: request {request.rid} has no predicted length: attach one")
        if self.packed[0] is not cluster.constants:
            weights = np.array([self.backlog, self.own, self.cache, self.slo, self.others], float)
            self.packed = cluster.constants, (beliefs(cluster.constants), weights)
        b, weights = self.packed[1]
        self.seen += 1
        self.tokens += request.predicted_tokens
        usual = 0.0 if self.lengths else self.tokens / self.seen
        out = np.empty((2 * len(cluster.prefill), len(cluster.decode)))
        target_s = price(
            cluster.prefill, cluster.decode, cluster.in_flight, b, float(request.prompt_tokens),
            float(request.predicted_tokens), request.slo == "tight", cluster.now_s, weights,
            self.progress == "streamed", usual, out,
        )  # fmt: skip
        n_p = len(cluster.prefill)
        return out[:n_p], out[n_p:], target_s
