"""Least squares on relative residuals: a 10 % miss weighs the same at 20 ms and at 80 ms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from astrolabe_lab.errors import InputError


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients of a fit (seconds per unit of each regressor, in order) and how well it holds.

    error_pct and worst_pct are the mean and largest absolute residual in percent of the timing, over `points`
    timings; `dropped` more were missing or not physically possible.
    """

    coefficients: tuple[float, ...]
    error_pct: float
    worst_pct: float
    points: int
    dropped: int = 0

    def quality(self, over):
        """The entry of a preset's `error` for this fit; `over` says on what it was made."""
        return {
            "over": over,
            "mean_abs_pct": round(self.error_pct, 2),
            "worst_pct": round(self.worst_pct, 1),
            "points": self.points,
            "dropped": self.dropped,
        }


def relative_least_squares(regressors, seconds, known=0.0, non_negative=False):
    """The Fit of least squared relative residuals of `seconds` (n,) on a list of regressors (n,).

    `known` (n,) is a part of the seconds whose cost is fixed already. `non_negative` keeps every coefficient at 0
    or above. Raises InputError for too few timings.
    """
    seconds = np.asarray(seconds, float)
    design = np.column_stack([np.asarray(r, float) for r in regressors])
    if len(seconds) <= design.shape[1]:
        raise InputError(f"{len(seconds)} timings cannot fit {design.shape[1]} coefficients; widen the range")
    target = 1 - np.asarray(known, float) / seconds
    design /= seconds[:, None]
    coefficients = solve(design, target) if non_negative else np.linalg.lstsq(design, target, rcond=None)[0]
    residual = 100 * np.abs(design @ coefficients - target)
    return Fit(tuple(map(float, coefficients)), float(residual.mean()), float(residual.max()), len(seconds))


def solve(design, target):
    """Coefficients >= 0 (k,) of least squares of `target` (n,) on `design` (n, k), whatever the columns' scales."""
    from scipy.optimize import nnls

    scale = np.linalg.norm(design, axis=0)
    scale[scale == 0] = 1.0
    return nnls(design / scale, target)[0] / scale


def hats(values, knots):
    """Columns (n, len(knots)): the weights of a piecewise linear function's values at the knots, constant beyond."""
    return np.column_stack([np.interp(values, knots, one) for one in np.eye(len(knots))])
