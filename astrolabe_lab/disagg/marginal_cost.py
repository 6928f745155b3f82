"""The marginal-cost router of "Calibrate, Then Route", with every term switchable, and what its authors left undone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np

from astrolabe_lab.disagg.policies import decode_counts, prefill_counts
from astrolabe_lab.errors import InputError
from astrolabe_lab.policies.draw import argmin, sample_k

PROGRESS = ("estimated", "streamed")
GUARDS = ("off", "rotate", "least", "spare")
PART = 0.8  # of a pace, or of memory, that a decode engine is filled to on purpose: steps vary, and answers grow


class Priced(NamedTuple):
    """What a request would meet, in s: (P, D) ``seconds`` it costs and ``ttft_s``, its TTFT target ``target_s``; and at
    each decode engine (D,) ``step_s``, a step shared with what is there, and ``filled``, the share of memory taken."""

    seconds: np.ndarray
    ttft_s: np.ndarray
    step_s: np.ndarray
    filled: np.ndarray
    target_s: float


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
    flight; ``off`` takes the cheapest regardless, as the paper's router did. ``spare`` is ``least``, but when decode
    engines become too slow for tight requests it gives up the fullest of them instead of all: while that one keeps the
    pace of loose requests and has memory, it gets those, and tight ones that no engine can serve in time. So the
    others stay fast: a pace is kept or broken, and a little less of too much helps nobody.
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
        seen, c = self.prices(request, cluster), cluster.constants
        if self.guard == "off":
            return self._cheapest(seen.seconds, rng)
        open_to = _open_to(seen, request.slo == "tight", c) if self.guard == "spare" else None
        usable = (seen.filled <= 1.0) & (seen.step_s <= c.tpot_s) if open_to is None else open_to
        if usable.any() and seen.ttft_s[:, usable].min() <= seen.target_s:
            return self._cheapest(seen.seconds, rng, open_to)
        if self.guard == "rotate":
            self.count += 1
            return self.count % len(cluster.prefill), self.count % len(cluster.decode)
        counts = np.array(decode_counts(cluster), float)
        if open_to is not None:
            counts[~open_to] = np.inf
        return argmin(prefill_counts(cluster), rng), argmin(counts.tolist(), rng)

    def _cheapest(self, seconds, rng, open_to=None):
        """The pair of the fewest seconds, of ``k`` drawn; ``open_to``: (D,) the decode engines that are asked about."""
        flat = seconds.ravel()
        among = np.arange(flat.size) if open_to is None else np.flatnonzero(np.broadcast_to(open_to, seconds.shape))
        drawn = among[sample_k(among.size, min(self.k or among.size, among.size), rng)]
        at = int(drawn[argmin(flat[drawn].tolist(), rng)])
        return divmod(at, seconds.shape[1])

    def prices(self, request, cluster) -> Priced:
        """What the request would meet on each pair. Raises InputError for one without a predicted length."""
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
        n_p = len(cluster.prefill)
        out = np.empty((2 * n_p + 2, len(cluster.decode)))
        target_s = price(
            cluster.prefill, cluster.decode, cluster.in_flight, b, float(request.prompt_tokens),
            float(request.predicted_tokens), request.slo == "tight", cluster.now_s, weights,
            self.progress == "streamed", usual, out,
        )  # fmt: skip
        return Priced(out[:n_p], out[n_p : 2 * n_p], out[2 * n_p], out[2 * n_p + 1], target_s)


def _open_to(seen: Priced, tight: bool, constants) -> np.ndarray | None:
    """(D,) which decode engines a request may go to, so that others keep the pace of tight ones; None: to any."""
    pace_s = PART * constants.tpot_s
    keeps = seen.step_s <= pace_s
    given_up = ~keeps & (seen.filled <= PART) & (seen.step_s <= pace_s * constants.loose_factor)
    if not given_up.any():
        return None
    if tight and keeps.any():
        return keeps
    return np.arange(len(keeps)) == np.argmax(np.where(given_up, seen.step_s, 0.0))
