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
    points, reached = distribution(values, censored)
    # Half the step at each point, stretched to 0..1 as NumPy's linear rule does when nothing is cut.
    n = len(values)
    at = np.clip((reached * n - 1) / max(n - 1, 1), 0.0, 1.0)
    return np.interp(levels, at, points)


def distribution(values, censored) -> tuple[np.ndarray, np.ndarray]:
    """The distinct uncut values in order, with the largest value of all, and P(value <= each) by Kaplan-Meier."""
    import numpy as np

    order = np.lexsort((censored, values))  # at a tie the uncut come first: the cut one outlived them
    sorted_values, cut = values[order], censored[order]
    at_risk = np.arange(len(values), 0, -1)
    survival = np.cumprod(np.where(cut, 1.0, 1.0 - 1.0 / at_risk))
    last = np.r_[sorted_values[1:] != sorted_values[:-1], True]
    known = last & (np.r_[0.0, np.cumsum(~cut)][1:] > 0)
    return sorted_values[known], 1.0 - survival[known]
