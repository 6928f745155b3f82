"""How sure seeds make us: intervals and p-values.

Every function takes the values of independent runs, one a seed; paired runs as their differences.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import pandas as pd

from astrolabe_lab.errors import InputError

from .frames import require_columns

MANY = 10  # seeds from which resampling says more than Student's t
DRAWS = 4999
METHODS = ("auto", "t", "bootstrap", "sign_flip")


def t_interval(values: Iterable[float], level: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high): the mean of independent runs and Student's t-interval for its true value.

    One value has no interval: low and high are NaN. A value that is NaN or infinite leaves none either. Raises
    InputError for no value, or a level outside (0, 1).
    """
    return interval(values, level, method="t")


def wilson(hits: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """(low, high): Wilson's interval for a share of which `hits` in `n` independent trials were seen."""
    from scipy import stats

    found = stats.binomtest(hits, n).proportion_ci(level, method="wilson")
    return float(found.low), float(found.high)


def interval(values: Iterable[float], level: float = 0.95, method: str = "auto") -> tuple[float, float, float]:
    """(mean, low, high): the mean of independent runs and an interval that covers its true value.

    `method`: `t`; `bootstrap`, the symmetric studentised one, which covers skewed values better (a percentile
    bootstrap of ten covers 82-91 % where 95 are promised); `sign_flip`, the values that a sign-flip test would
    not reject, exact where errors are symmetric; or `auto`, t for fewer than ten values, else the bootstrap.
    Below six values a sign-flip test at 95 % rejects nothing, so its interval is infinite. Resampling has a
    fixed seed: the same values give the same interval. Raises as `t_interval` does.
    """
    values = _checked(values, level, method)
    mean = float(values.mean())
    if len(values) == 1 or not np.isfinite(values).all():
        return mean, math.nan, math.nan
    chosen = _chosen(method, values)
    if chosen == "sign_flip":
        return mean, _flip_border(values, level, -1.0), _flip_border(values, level, 1.0)
    half = _half_width(values, level, chosen)
    return mean, mean - half, mean + half


def p_value(values: Iterable[float], method: str = "auto") -> float:
    """How easily independent runs whose true mean is zero would lie as far from it: two-sided, NaN for one run.

    `method` as in `interval`, whose test this is.
    """
    values = _checked(values, 0.95, method)
    if len(values) == 1 or not np.isfinite(values).all():
        return math.nan
    if not values.any():
        return 1.0
    chosen = _chosen(method, values)
    if chosen == "sign_flip":
        means = np.abs(flips(len(values)) @ values)
        return float((means >= abs(values.sum()) * (1 - 1e-12)).mean())
    error = values.std(ddof=1) / math.sqrt(len(values))
    if error == 0:
        return 0.0 if chosen == "t" else 1 / (DRAWS + 1)
    t = abs(values.mean()) / error
    if chosen == "t":
        from scipy import stats

        return float(2 * stats.t.sf(t, len(values) - 1))
    return float((1 + (_bootstrapped_t(values) >= t).sum()) / (DRAWS + 1))


def over_seeds(
    summary: pd.DataFrame,
    metric: str,
    by: Sequence[str] = ("policy", "qps"),
    level: float = 0.95,
    method: str = "auto",
) -> pd.DataFrame:
    """Mean and `interval` of `metric` over seeds, a row per point: `*by, mean, low, high, seeds`."""
    require_columns(summary, (*by, metric))
    rows = []
    for key, runs in summary.groupby(list(by), sort=False, dropna=False):
        rows.append((*key, *interval(runs[metric], level, method), len(runs)))
    return pd.DataFrame(rows, columns=[*by, "mean", "low", "high", "seeds"])


def _checked(values: Iterable[float], level: float, method: str) -> np.ndarray:
    values = np.asarray(list(values), float)
    if not 0 < level < 1:
        raise InputError(f"level={level} is outside (0, 1), e.g. 0.95")
    if not len(values):
        raise InputError("an interval needs at least one value, got none")
    if method not in METHODS:
        raise InputError(f"method={method!r} is not one of {', '.join(METHODS)}")
    return values


def _chosen(method: str, values: np.ndarray) -> str:
    """The method for these values. Where hardly any two differ, most resamples have no spread to divide by."""
    if method != "auto":
        return method
    commonest = np.unique(values, return_counts=True)[1].max()
    return "bootstrap" if len(values) >= MANY and commonest <= len(values) / 2 else "t"


def _half_width(values: np.ndarray, level: float, method: str) -> float:
    n = len(values)
    error = float(values.std(ddof=1)) / math.sqrt(n)
    if method == "t":
        from scipy import stats

        return float(stats.t.ppf((1 + level) / 2, n - 1)) * error
    return float(np.quantile(_bootstrapped_t(values), level)) * error if error else 0.0


def _bootstrapped_t(values: np.ndarray) -> np.ndarray:
    """|t| around the mean of `DRAWS` resamples."""
    n = len(values)
    drawn = values[_resamples(n)]
    error = drawn.std(axis=1, ddof=1) / math.sqrt(n)
    smallest = 1e-9 * values.std(ddof=1)  # a resample of one value n times: as far off as it gets
    return np.abs(drawn.mean(axis=1) - values.mean()) / np.maximum(error, smallest)


@lru_cache(maxsize=8)
def _resamples(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, n, (DRAWS, n))


def flips(n: int) -> np.ndarray:
    """All 2**n rows of signs, or `DRAWS` random ones (and the one of no flip) where that is more."""
    if n <= 13:
        return 1.0 - 2.0 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
    drawn = np.random.default_rng(0).integers(0, 2, (DRAWS, n)) * 2.0 - 1.0
    return np.vstack([np.ones(n), drawn])


def _flip_border(values: np.ndarray, level: float, side: float) -> float:
    """The furthest from the mean, on that side, that a sign-flip test of the values does not reject."""
    mean, signs = float(values.mean()), flips(len(values))
    near, far = 0.0, 4.0 * float(np.abs(values - mean).max()) * len(values)

    def rejects(distance: float) -> bool:
        tested = values - (mean + side * distance)
        return (np.abs(signs @ tested) >= abs(tested.sum()) * (1 - 1e-12)).mean() <= 1 - level

    if far == 0:
        return mean
    if not rejects(far):
        return side * math.inf
    for _ in range(50):
        middle = (near + far) / 2
        near, far = (near, middle) if rejects(middle) else (middle, far)
    return mean + side * far
