"""Seconds tabulated over the new and the context tokens of a step: any regressor, at the points of a grid.

The Astrolabe paper's memo of predictions per (batch size, token count) is one such table; here its points are chosen
once, what lies between them is interpolated, and the compiled engine reads it.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

from astrolabe_lab.errors import InputError


@dataclass(frozen=True, slots=True)
class Grid:
    """Seconds tabulated over new tokens (rows) and context tokens (columns) of a step; bilinear in between.

    Beyond its edges it keeps its value there. Raises InputError unless both axes rise, from 0 or above, and
    `seconds` has one finite value >= 0 for each of their pairs.
    """

    new_tokens: tuple[float, ...]
    context_tokens: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self):
        for name in ("new_tokens", "context_tokens"):
            axis = np.asarray(getattr(self, name), dtype=np.float64)
            rising = axis.ndim == 1 and len(axis) and np.isfinite(axis).all() and (np.diff(axis) > 0).all()
            if not rising or axis[0] < 0:
                raise InputError(f"grid: {name} must be rising finite numbers from 0 on, not {getattr(self, name)!r}")
            object.__setattr__(self, name, tuple(axis.tolist()))
        seconds = np.asarray(self.seconds, dtype=np.float64)
        shape = (len(self.new_tokens), len(self.context_tokens))
        if seconds.shape != shape or not (np.isfinite(seconds) & (seconds >= 0)).all():
            raise InputError(
                f"grid: seconds must be {shape[0]} rows of {shape[1]} finite numbers >= 0 (new_tokens x context_tokens)"
            )
        object.__setattr__(self, "seconds", tuple(map(tuple, seconds.tolist())))

    @property
    def array(self):
        """A new float64 array for the kernel: both axes' lengths, both axes, and the seconds row by row."""
        axes = self.new_tokens, self.context_tokens
        return np.concatenate([[len(axis) for axis in axes], *axes, np.ravel(self.seconds)])

    def at(self, new_tokens, context_tokens):
        """Seconds of a step, interpolated by the compiled engine's operations (equal to the last bit)."""
        i, right = _bracket(self.new_tokens, new_tokens)
        j, up = _bracket(self.context_tokens, context_tokens)
        low = self.seconds[i]
        high = self.seconds[min(i + 1, len(self.new_tokens) - 1)]
        above = min(j + 1, len(self.context_tokens) - 1)
        before = low[j] + right * (high[j] - low[j])
        after = low[above] + right * (high[above] - low[above])
        return before + up * (after - before)

    def to_dict(self):
        """{"new_tokens": [...], "context_tokens": [...], "seconds": [[...], ...]}, as `from_dict` reads it."""
        return {
            "new_tokens": list(self.new_tokens),
            "context_tokens": list(self.context_tokens),
            "seconds": [list(row) for row in self.seconds],
        }

    @classmethod
    def from_dict(cls, entries):
        """The grid of `to_dict`. Raises InputError for other keys, or values that are no grid."""
        if not isinstance(entries, dict) or set(entries) != set(KEYS):
            raise InputError(f"a grid is an object of {', '.join(KEYS)}, not {str(entries):.80}")
        try:
            return cls(**entries)
        except (TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"a grid holds lists of numbers, and rows of one length ({error})") from None

    def __str__(self):
        """new tokens * context tokens * seconds row by row, each joined by "/": what `parse` reads back."""
        parts = self.new_tokens, self.context_tokens, np.ravel(self.seconds).tolist()
        return "*".join("/".join(map(repr, part)) for part in parts)

    @classmethod
    def parse(cls, text):
        """The grid written as "1/64/512*0*0.018/0.022/0.070": three new tokens, one context, three seconds."""
        try:
            new_tokens, context_tokens, seconds = ([float(v) for v in part.split("/")] for part in text.split("*"))
        except ValueError:
            raise InputError(
                f"grid {text!r:.80} is not NEW_TOKENS*CONTEXT_TOKENS*SECONDS with / between numbers, like "
                "1/512*0*0.02/0.07"
            ) from None
        if len(seconds) != len(new_tokens) * len(context_tokens):
            raise InputError(
                f"grid {text!r:.80} has {len(seconds)} seconds for {len(new_tokens)} x {len(context_tokens)} points"
            )
        return cls(new_tokens, context_tokens, np.reshape(seconds, (len(new_tokens), -1)).tolist())


KEYS = ("new_tokens", "context_tokens", "seconds")


def tabulate(regressor, new_tokens, context_tokens):
    """The Grid of what `regressor` says at every pair of new and context tokens (two rising lists).

    `regressor`: a function of two arrays (n,), or an estimator whose `predict` takes rows of (new tokens, context
    tokens) (n, 2); both give seconds (n,). Raises InputError where it gives anything but finite seconds >= 0.
    """
    new, context = (part.ravel() for part in np.meshgrid(new_tokens, context_tokens, indexing="ij"))
    if callable(getattr(regressor, "predict", None)):
        seconds = regressor.predict(np.column_stack([new, context]))
    elif callable(regressor):
        seconds = regressor(new, context)
    else:
        raise InputError(f"{regressor!r} is neither a function nor an estimator with predict")
    seconds = np.asarray(seconds, float)
    if seconds.shape != new.shape:
        raise InputError(f"the regressor gave {seconds.shape} values for {new.shape} points; give one for each")
    if (bad := np.flatnonzero(~(np.isfinite(seconds) & (seconds >= 0)))).size:
        raise InputError(
            f"the regressor gives {seconds[bad[0]]:g} s for {new[bad[0]]:g} new and {context[bad[0]]:g} context "
            "tokens; seconds must be finite and not negative"
        )
    return Grid(tuple(new_tokens), tuple(context_tokens), tuple(map(tuple, seconds.reshape(len(new_tokens), -1))))


def _bracket(axis, value):
    """(i, share): `value` lies between axis[i] and axis[i + 1], `share` of the way; at an end where outside."""
    if len(axis) == 1 or value <= axis[0]:
        return 0, 0.0
    if value >= axis[-1]:
        return len(axis) - 2, 1.0
    i = bisect.bisect_right(axis, value) - 1
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])
