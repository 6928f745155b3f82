"""How the rate of arrivals moves about its mean: bursts, a ramp, a day.

A profile is a factor on the rate, 1 on average. It turns *load* (the seconds that the arrivals so far would have
taken at the mean rate) into time, so the same unit-rate sequence, sent through the profile, gives the same
pattern of requests at every mean rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.rng import stream

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Bursts:
    """Calm for ``low_s``, then a burst of ``high_s`` at ``high`` times the mean rate, over and over.

    The calm rate makes up for it, (high_s + low_s - high * high_s) / low_s, so that the mean over a cycle is
    exactly 1: 0.7667 by default, which the second paper's "1 s at 1.7x, 3 s at 0.77x" rounds. ``durations``:
    ``fixed``, or ``random`` for exponential ones with these means (a Markov-modulated process), drawn from the
    stream ``arrivals bursts``; there the mean is 1 in expectation.
    """

    high: float = 1.7
    high_s: float = 1.0
    low_s: float = 3.0
    durations: str = "fixed"

    def __post_init__(self):
        _check(self, "high", self.high >= 1, "a factor >= 1")
        _check(self, "high_s", self.high_s > 0, "seconds > 0")
        _check(self, "low_s", self.low_s > 0, "seconds > 0")
        _check(self, "durations", self.durations in ("fixed", "random"), "fixed or random")
        if self.low < 0:
            most = 1 + self.low_s / self.high_s
            raise InputError(
                f"bursts: high={self.high:g} for {self.high_s:g} of {self.high_s + self.low_s:g} s is more than all "
                f"there is at the mean rate: at most {most:g}"
            )

    @property
    def low(self) -> float:
        """The factor while it is calm."""
        return (self.high_s + self.low_s - self.high * self.high_s) / self.low_s

    def when(self, load_s: np.ndarray, span_s: float, seed: int) -> np.ndarray:
        """The times, in s, at which so much load has arrived; ``span_s`` plays no part."""
        import numpy as np

        cycle_s, calm_load_s = self.high_s + self.low_s, self.low * self.low_s
        if self.durations == "fixed":
            cycles, rest_s = np.divmod(load_s, cycle_s)
            in_burst = self.low_s + (rest_s - calm_load_s) / self.high
            in_calm = rest_s / (self.low or 1.0)
            return cycles * cycle_s + np.where(rest_s < calm_load_s, in_calm, in_burst)
        rng, lengths_s = stream(seed, "arrivals bursts"), np.zeros((0, 2))
        while (lengths_s @ [self.low, self.high]).sum() <= load_s.max(initial=0.0):
            more = rng.standard_exponential((int(load_s.max() / cycle_s) + 16, 2))
            lengths_s = np.concatenate([lengths_s, more * [self.low_s, self.high_s]])
        ends_s = np.concatenate([[0.0], np.cumsum(lengths_s)])
        loads_s = np.concatenate([[0.0], np.cumsum(lengths_s * [self.low, self.high])])
        return np.interp(load_s, loads_s, ends_s)


@dataclass(frozen=True, slots=True)
class Ramp:
    """The rate goes evenly from ``start`` times the mean to 2 - ``start`` times it over the trace, n / qps seconds.

    ``start`` from 0 to 1.9; above 1 the rate falls. A request that comes after the span finds the last rate.
    The first requests of a longer trace are not the same ones: its ramp is longer.
    """

    start: float = 0.5

    def __post_init__(self):
        _check(self, "start", 0 <= self.start <= 1.9, "a factor from 0 to 1.9")

    def when(self, load_s: np.ndarray, span_s: float, seed: int) -> np.ndarray:
        """The times, in s, at which so much load has arrived; ``seed`` plays no part."""
        import numpy as np

        within = np.minimum(load_s, span_s)
        root = np.sqrt(np.maximum(self.start**2 + 4 * (1 - self.start) * within / span_s, 0.0))
        times = np.where(within > 0, 2 * within / np.maximum(self.start + root, np.finfo(float).tiny), 0.0)
        return times + (load_s - within) / (2 - self.start)


@dataclass(frozen=True, slots=True)
class Diurnal:
    """A wave, 1 + amplitude * cos: highest at ``peak_s`` of each period; the trace starts at ``start_s`` of it."""

    amplitude: float = 0.5
    period_s: float = 86_400.0
    peak_s: float = 54_000.0
    start_s: float = 0.0

    def __post_init__(self):
        _check(self, "amplitude", 0 <= self.amplitude <= 1, "a factor from 0 to 1")
        _check(self, "period_s", self.period_s > 0, "seconds > 0")
        _check(self, "peak_s", True, "finite seconds")
        _check(self, "start_s", True, "finite seconds")

    def when(self, load_s: np.ndarray, span_s: float, seed: int) -> np.ndarray:
        """The times, in s, at which so much load has arrived; ``span_s`` and ``seed`` play no part."""
        import numpy as np

        turn = 2 * math.pi / self.period_s
        swing_s, at_start = self.amplitude / turn, math.sin(turn * (self.start_s - self.peak_s))
        low, high = np.maximum(load_s - 2 * swing_s, 0.0), load_s + 2 * swing_s
        for _ in range(64):  # bisection: the load has no inverse in closed form
            middle = (low + high) / 2
            load = middle + swing_s * (np.sin(turn * (middle + self.start_s - self.peak_s)) - at_start)
            low, high = np.where(load < load_s, middle, low), np.where(load < load_s, high, middle)
        return (low + high) / 2


PROFILES = {"bursts": Bursts, "ramp": Ramp, "diurnal": Diurnal}


def _check(profile, name: str, good: bool, allowed: str) -> None:
    value = getattr(profile, name)
    if not good or (isinstance(value, float) and not math.isfinite(value)):
        raise InputError(f"{type(profile).__name__.lower()}: {name}={value!r} is not usable: {allowed}")
