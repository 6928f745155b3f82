"""Many comparisons at once: p-values and intervals that stay honest together."""

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd

from .intervals import MANY, flips, interval


def holm(p_values: Iterable[float]) -> np.ndarray:
    """Holm's adjusted p-values, in the order given: reject those below alpha, and at most alpha of families with
    no true difference see any rejected. NaN, of a comparison that could not be made, stays NaN."""
    p = np.asarray(list(p_values), float)
    order = np.argsort(p, kind="stable")[: np.count_nonzero(~np.isnan(p))]  # NaN last
    result = np.full(len(p), np.nan)
    result[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)), 1.0)
    return result


def simultaneous(differences: pd.DataFrame, level: float = 0.95) -> pd.DataFrame:
    """Intervals that hold together: at most 1 - level of such tables miss any true mean. Columns `low, high`.

    `differences` has a column per comparison and a row per seed. Fewer than ten seeds: t-intervals at
    Bonferroni's level. From ten: the highest |t| of all columns when seeds flip their signs around the means
    together, which uses how the comparisons move together; never narrower than `interval`.
    """
    n, m = differences.shape
    rows = []
    if n >= MANY and m > 1:
        values = differences.to_numpy(float)
        usable = np.isfinite(values).all(axis=0) & (values.std(axis=0) > 0)
        most = _highest_flipped_t(values[:, usable], level) if usable.any() else math.nan
    for name in differences:
        column = differences[name].to_numpy(float)
        mean, low, high = interval(column, level if n >= MANY else 1 - (1 - level) / m)
        if n >= MANY and m > 1 and low < high:
            half = max(high - mean, most * column.std(ddof=1) / math.sqrt(n))
            low, high = mean - half, mean + half
        rows.append((low, high))
    return pd.DataFrame(rows, columns=["low", "high"], index=differences.columns)


def _highest_flipped_t(values: np.ndarray, level: float) -> float:
    n = len(values)
    rest = values - values.mean(axis=0)
    means = flips(n) @ rest / n
    squares = (rest**2).sum(axis=0)
    error = np.sqrt(np.maximum(squares - n * means**2, 1e-18 * squares) / (n - 1) / n)
    return float(np.quantile(np.abs(means / error).max(axis=1), level))
