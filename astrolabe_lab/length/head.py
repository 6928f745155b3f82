"""From rows of numbers to quantiles of a length: a ridge on the log scale, and how far the truth lies from it.

log(length) = location(x) + spread(x) * error. Location and spread are linear in x; the penalty is the one whose
leave-one-prompt-out error in tokens is smallest, and the error's distribution is that of the same held-out
residuals, so that a quantile means what it says on prompts that were not seen. Answers that were cut off enter at
the mean of what they may have been (Schmee and Hahn, 1979) and, in the residuals, by Kaplan-Meier.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from astrolabe_lab.length import survival

if TYPE_CHECKING:
    import numpy as np

ALPHAS = tuple(10.0**e for e in (-2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2))
_ROUNDS = 8  # of filling in what was cut off
_LEVELS = 401


class Ridge:
    """Least squares with ``alpha`` times the squared slope, one decomposition for every alpha and target.

    The smaller of the two forms is decomposed, d by d or n by n. ``groups`` (n,) numbers the prompts: rows of one
    prompt are left out together. ``weights`` (n,) count a row as so many.
    """

    def __init__(self, x: np.ndarray, groups: np.ndarray, weights: np.ndarray | None = None):
        import numpy as np

        weights = np.ones(len(x)) if weights is None else np.asarray(weights, dtype=np.float64)
        self.weights, self.root = weights, np.sqrt(weights)
        self.mean = np.average(x, axis=0, weights=weights)
        centered = (x - self.mean.astype(x.dtype)) * self.root[:, None].astype(x.dtype)
        if len(x) < x.shape[1]:
            values, u = np.linalg.eigh(centered @ centered.T)
            keep = values > values[-1] * 10 * np.finfo(x.dtype).eps
            u, root = u[:, keep], np.sqrt(values[keep].astype(np.float64))
            self.values, self.scores = root**2, u * root
            self._axes = centered.T, u / root.astype(x.dtype)
        else:
            values, v = np.linalg.eigh((centered.T @ centered).astype(np.float64))
            keep = values > values[-1] * 1e-10
            self.values, v = values[keep], v[:, keep].astype(x.dtype)
            self.scores = (centered @ v).astype(np.float64)
            self._axes = None, v
        order = np.argsort(groups, kind="stable")
        starts = np.flatnonzero(np.r_[True, np.diff(groups[order]) != 0])
        several = [rows for rows in np.split(order, starts[1:]) if len(rows) > 1]
        # Prompts of as many answers are solved for at once, so many of them that their scores fit in the cache.
        self.blocks = []
        for size in sorted({len(rows) for rows in several}):
            alike = np.array([rows for rows in several if len(rows) == size])
            self.blocks += np.array_split(alike, math.ceil(alike.size / 512))

    def along(self, inner: np.ndarray) -> np.ndarray:
        """What weights of the axes are as weights of the columns: (axes,) or (axes, k) to (d,) or (d, k)."""
        rows, axes = self._axes
        columns = axes @ inner.astype(axes.dtype)
        return columns if rows is None else rows @ columns

    def leading(self, most: int) -> np.ndarray:
        """The axes on which the rows differ most, at most so many, (d, k)."""
        import numpy as np

        return self.along(np.eye(len(self.values), dtype=np.float32)[:, -most:])  # eigenvalues rise

    def solve(self, y: np.ndarray, alpha: float) -> tuple[np.ndarray, float]:
        """Slope (d,) and intercept."""
        import numpy as np

        center = float(np.average(y, weights=self.weights))
        inner = (self.scores.T @ (self.root * (y - center))) / (self.values + alpha)
        slope = self.along(inner).astype("float64")
        return slope, center - float(self.mean @ slope)

    def held_out(self, y: np.ndarray, alpha: float) -> np.ndarray:
        """What each y is predicted from the rows of the other prompts, exactly, without fitting again."""
        import numpy as np

        shrunk = 1.0 / (self.values + alpha)
        scaled = self.root * (y - np.average(y, weights=self.weights))
        residual = scaled - self.scores @ (shrunk * (self.scores.T @ scaled))
        share = self.root / math.sqrt(self.weights.sum())  # of the intercept
        leverage = share**2 + self.scores**2 @ shrunk
        out = residual / np.maximum(1.0 - leverage, 1e-6)
        for rows in self.blocks:
            scores = self.scores[rows]
            of_intercept = share[rows][:, :, None] * share[rows][:, None, :]
            hat = of_intercept + (scores * shrunk) @ scores.transpose(0, 2, 1)
            solved = np.linalg.solve(np.eye(rows.shape[1]) * (1 + 1e-9) - hat, residual[rows][..., None])
            out[rows] = solved[..., 0]
        return y - out / self.root


class Head:
    """The fitted distribution; ``quantiles`` reads it."""

    def __init__(self, slope, intercept, spread_slope, spread_intercept, spread_range, levels, errors, alpha, loss):
        self.slope, self.intercept = slope, intercept
        self.spread_slope, self.spread_intercept, self.spread_range = (
            spread_slope,
            spread_intercept,
            spread_range,
        )
        self.levels, self.errors, self.alpha, self.loss = levels, errors, alpha, loss

    @classmethod
    def learn(cls, x, lengths, censored, groups, alpha: float | None = None) -> Head:
        """Fit to rows x (n, d), lengths (n,) in tokens, censored (n,) and the prompts' numbers ``groups`` (n,)."""
        import numpy as np

        y = np.log(lengths)
        ridge = Ridge(x, groups)
        if alpha is None:
            losses = [held_out_mae(y, ridge.held_out(y, a), censored) for a in ALPHAS]
            alpha = ALPHAS[int(np.argmin(losses))]
        filled = _fill(ridge, y, censored, alpha)
        slope, intercept = ridge.solve(filled, alpha)
        held = ridge.held_out(filled, alpha)
        # log |residual| is far noisier than y: it takes a larger penalty.
        size = np.log(np.maximum(np.abs(filled - held), 1e-3))
        spread_slope, spread_intercept = ridge.solve(size, 10 * alpha)
        fitted = ridge.held_out(size, 10 * alpha)
        low_high = np.quantile(fitted, [0.01, 0.99])
        levels = (np.arange(_LEVELS) + 0.5) / _LEVELS
        errors = survival.quantiles((y - held) / np.exp(np.clip(fitted, *low_high)), censored, levels)
        loss = held_out_mae(y, held, censored)
        return cls(slope, intercept, spread_slope, spread_intercept, low_high, levels, errors, alpha, loss)

    def quantiles(self, x, levels) -> np.ndarray:
        """Tokens, float64 (n, q)."""
        import numpy as np

        location = x @ self.slope + self.intercept
        spread = np.exp(np.clip(x @ self.spread_slope + self.spread_intercept, *self.spread_range))
        errors = np.interp(levels, self.levels, self.errors)
        return np.exp(np.clip(location[:, None] + spread[:, None] * errors, 0.0, 25.0))

    def through(self, reread) -> Head:
        """The same for other rows: ``reread`` turns weights of those it was learned from into weights of these."""
        changed = {name: reread(getattr(self, name)) for name in ("slope", "spread_slope")}
        return Head(**vars(self) | changed)

    def arrays(self) -> dict:
        """The state as arrays, which ``from_arrays`` takes."""
        return dict(vars(self))

    @classmethod
    def from_arrays(cls, arrays: dict) -> Head:
        return cls(**arrays)


def held_out_mae(y, held, censored) -> float:
    """The mean absolute error in tokens of held-out log lengths, once their median error is taken off."""
    import numpy as np

    shift = survival.quantiles(y - held, censored, [0.5])[0]
    off = np.exp(np.minimum(held + shift, 25.0)) - np.exp(y)
    return float(np.abs(off[~censored]).mean())


def _fill(ridge: Ridge, y, censored, alpha: float):
    """y with each cut-off value replaced by its mean given that it is larger, under a normal error."""
    import numpy as np

    filled = y.copy()
    if not censored.any():
        return filled
    for _ in range(_ROUNDS):
        location = ridge.held_out(filled, alpha)
        sd = max(float(np.sqrt(np.mean((filled - location)[~censored] ** 2))), 1e-6)
        filled[censored] = location[censored] + sd * mean_above((y - location)[censored] / sd)
    return filled


def mean_above(a: np.ndarray) -> np.ndarray:
    """The mean of a standard normal draw that is above a, for each of a."""
    import numpy as np

    tail = 0.5 * np.array([math.erfc(value / math.sqrt(2)) for value in a])
    density = np.exp(-0.5 * a * a) / math.sqrt(2 * math.pi)
    return np.where(a > 8, a + 1.0 / np.maximum(a, 1.0), density / np.maximum(tail, 1e-300))
