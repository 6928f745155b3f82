"""Random choices that a policy in Python and its compiled twin make alike, draw for draw.

Both use ``rng.random()`` only, so that the same generator gives the same choice in either.
"""

from __future__ import annotations

import numpy as np


def uniform(n, rng):
    """An index of 0..n-1, uniform; one draw."""
    return int(rng.random() * n)


def sample_k(n, k, rng):
    """k distinct indices of 0..n-1, in random order; k draws, none when k == n (then all, in order)."""
    indices = np.arange(n)
    if k < n:
        for j in range(k):
            m = j + int(rng.random() * (n - j))
            chosen = indices[m]
            indices[m] = indices[j]
            indices[j] = chosen
    return indices[:k]


def argmin(values, rng):
    """Position of the smallest of ``values`` (a list, at least one; NaN counts as inf); ties are a uniform draw."""
    best = min(values)
    if best != best:  # min() of a list that begins with NaN
        return argmin_loop(values, rng)
    ties = values.count(best)
    if ties == 1:
        return values.index(best)
    pick = int(rng.random() * ties)
    at = values.index(best)
    for _ in range(pick):
        at = values.index(best, at + 1)
    return at


def softmin(values, temperature, rng):
    """A position drawn with probability ~ exp(-value / temperature), the values scaled to 0..1 first; one draw."""
    values = np.asarray(values, np.float64)
    span = values.max() - values.min()
    weights = np.exp((values.min() - values) / (span * temperature)) if span > 0 else np.ones(len(values))
    total = np.cumsum(weights)
    return min(int(np.searchsorted(total, rng.random() * total[-1], side="right")), len(values) - 1)


def argmin_loop(values, rng):
    """``argmin`` of an array, in the form that compiles; the same draw and the same answer."""
    best = np.inf
    ties = 0
    for i in range(len(values)):
        value = values[i]
        if value < best:
            best = value
            ties = 1
        elif value == best:
            ties += 1
    if ties == 0:  # all NaN
        return int(rng.random() * len(values))
    pick = int(rng.random() * ties) if ties > 1 else 0
    for i in range(len(values)):
        value = values[i]
        if value == best:
            if pick == 0:
                return i
            pick -= 1
    return 0
