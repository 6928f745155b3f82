"""Quantiles of values some of which are known only to be at least so large (right-censored)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def quantiles(values, censored, levels) -> np.ndarray:
    """The quantiles of what the values would be uncut, at ``levels`` (0..1), float64 like ``levels``.

    Without censoring these are NumPy's (linear between order statistics). With it, the Kaplan-Meier estimate of
    the distribution function, inverted the same way; a level that it never reaches, because the longest values
    were cut, gets the largest value: a lower bound. Source: Kaplan and Meier, 1958.
    """
    import numpy as np

    values, censored = np.asarray(values, dtype=np.float64), np.asarray(censored, dtype=bool)
    levels = np.asarray(levels, dtype=np.float64)
    if not censored.any():
        return np.quantile(values, levels)
    if censored.all():
        return np.full(levels.shape, values.max())
    points, reached = distribution(values, censored)
    # Each point from the first of its order statistics to the last, stretched to 0..1 as NumPy does; then the largest.
    n = len(values)
    first, last = np.r_[0.0, reached] * n / (n - 1), (reached * n - 1) / (n - 1)
    at = np.r_[np.column_stack([first[:-1], last]).ravel(), first[-1]]
    return np.interp(levels, np.maximum.accumulate(at), np.r_[np.repeat(points, 2), values.max()])


def distribution(values, censored) -> tuple[np.ndarray, np.ndarray]:
    """The distinct uncut values in order, and P(value <= each) by Kaplan-Meier; one cut at a value outlived it."""
    import numpy as np

    points, ended = np.unique(values[~censored], return_counts=True)
    at_risk = len(values) - np.searchsorted(np.sort(values), points)
    return points, 1.0 - np.cumprod(1.0 - ended / at_risk)
