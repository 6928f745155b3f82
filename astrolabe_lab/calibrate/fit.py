"""From timed windows to a step cost: robust, never negative, with intervals.

Every window is a sum of steps, and a step's time is linear in its counts, so a window is one row of a linear system in
both regimes' coefficients. Rows weigh by their own noise (of arrivals, and of steps); outliers count less (Huber). A
regime is linear where that explains it; where it does not (tiles, graph sizes), new tokens are tabulated instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from astrolabe_lab.calibrate.cells import Observation
from astrolabe_lab.cost import Grid, Regime, StepCost
from astrolabe_lab.errors import InputError
from astrolabe_lab.fit.regression import hats, solve
from astrolabe_lab.rng import stream

STEP_NOISE = 0.004  # relative noise of a window that arrivals do not explain
BEND = 0.02  # a regime whose cells miss a linear model by more is tabulated
RESAMPLES = 120
FLOOR = 0.005  # no interval is narrower than this share of its estimate, on either side
COUNTS = {"decode": ("per_seq_s", "per_kv_token_s"), "mixed": ("per_seq_s", "per_kv_token_s", "attention_s")}


@dataclass(frozen=True)
class Fitted:
    """``cost``: the step cost; ``intervals``: by name ("decode.base_s") (low, high) at 95 %; ``bends``: the regimes
    that are tabulated; ``residuals``: of each window (seconds measured, seconds priced, mixed?, cell); ``unseen_s``: of
    each window what the other bursts alone would price it at (NaN where they do not tell); ``resampled``: the step
    costs of resampled bursts."""

    cost: StepCost
    intervals: dict[str, tuple[float, float]]
    bends: tuple[str, ...]
    residuals: list[tuple[float, float, bool, object]] = field(repr=False)
    unseen_s: np.ndarray = field(repr=False)
    resampled: list[StepCost] = field(repr=False)
    freedom: int = 1

    def interval(self, value) -> tuple[float, float]:
        """The interval at 95 % of what the function ``value`` makes of the step cost."""
        best = value(self.cost)
        half = _half([value(cost) for cost in self.resampled], best, self.freedom)
        return float(max(0.0, best - half)), float(best + half)


def fit(observations: list[Observation], seed: int = 0, bends: tuple[str, ...] | None = None) -> Fitted:
    """The step cost that explains the windows. ``bends``: which regimes to tabulate (default: as they need it).

    Raises InputError where a regime was not measured often enough.
    """
    for regime, mixed in (("decode", False), ("mixed", True)):
        cells = {o.cell for o in observations if any(s.mixed == mixed for s in o.steps)}
        if len(cells) < 5:
            raise InputError(
                f"calibration: {len(cells)} usable {regime} measurements, and 5 are needed; give it more time "
                "(budget_s), or see whether the engine serves others meanwhile"
            )
    if bends is None:
        bends = _bends(observations)
    model = _Model(observations, bends)
    best = model.solve()
    draws, freedom = model.resample(best, seed)
    half = _half(draws, best, freedom)
    intervals = {
        name: (float(max(0.0, value - width)), float(value + width))
        for name, value, width in zip(model.names, best, half, strict=True)
        if not name.count("@")
    }
    priced = model.design @ best
    residuals = [
        (o.seconds, float(p), any(s.mixed for s in o.steps), o.cell) for o, p in zip(observations, priced, strict=True)
    ]
    costs = [model.cost(draw) for draw in draws]
    return Fitted(model.cost(best), intervals, bends, residuals, model.unseen_s(), costs, freedom)


def _bends(observations: list[Observation]) -> tuple[str, ...]:
    """The regimes that a line misses by more than BEND, where a table explains enough more to be worth its size."""
    straight = _Model(observations, ())
    solved, found = straight.solve(), ()
    for regime, mixed in (("decode", False), ("mixed", True)):
        if straight.misses(solved, mixed) <= BEND:
            continue
        table = _Model(observations, (*found, regime))
        without = _Model(observations, found)
        tabulated = table.solve()
        if table.badness(tabulated, table.weights) < without.badness(without.solve(), table.weights):
            found = (*found, regime)
    return found


def line(x, y):
    """((base, slope), [their intervals]) of a line through ``y`` over ``x``, through medians and robust (Theil-Sen),
    nothing negative; intervals at 95 %."""
    from scipy.stats import theilslopes

    sizes = np.unique(x)
    middle = np.array([np.median(y[x == each]) for each in sizes])
    slope, _, low, high = theilslopes(middle, sizes, 0.95)

    def base(slope: float) -> float:
        return max(0.0, float(np.median(middle - slope * sizes)))

    return (base(slope), max(0.0, float(slope))), [(base(high), base(low)), (max(0.0, float(low)), float(high))]


def _half(draws, best, freedom: int):
    """Half the width of a 95 % interval, of values resampled on bursts."""
    from scipy.stats import t

    spread = np.sqrt(np.mean((np.asarray(draws) - best) ** 2, axis=0))
    return np.maximum(t.ppf(0.975, max(freedom, 4)) * spread, FLOOR * np.abs(best))


class _Model:
    """The linear system of some windows; ``bends``: regimes with a table over new tokens in place of base and slope."""

    def __init__(self, observations: list[Observation], bends: tuple[str, ...]):
        self.bends = bends
        self.observations = observations
        self.seconds = np.array([o.seconds for o in observations])
        self.knots = {
            regime: sorted({s.new_tokens for o in observations for s in o.steps if s.mixed == (regime == "mixed")})
            for regime in bends
        }
        columns, names = [], []
        for regime in ("decode", "mixed"):
            part, part_names = self._regime(regime)
            columns.append(part)
            names += part_names
        self.design = np.hstack(columns)
        self.names = names
        self.bursts = np.array([o.burst for o in observations])

    def _regime(self, regime: str):
        mixed = regime == "mixed"
        bent = regime in self.bends
        alike = len({s.sequences for o in self.observations for s in o.steps if s.mixed == mixed}) < 2
        # What is the same everywhere, or goes with another count, has no price of its own.
        counts = COUNTS[regime][1:] if alike or (bent and not mixed) else COUNTS[regime]
        names = [f"{regime}.{name}" for name in counts]
        if bent:
            names += [f"{regime}@{knot:g}" for knot in self.knots[regime]]
        else:
            names += [f"{regime}.base_s"] + [f"{regime}.per_token_s"] * mixed
        rows = np.zeros((len(self.observations), len(names)))
        of = {"per_seq_s": "sequences", "per_kv_token_s": "context_tokens", "attention_s": "attention"}
        for row, observation in zip(rows, self.observations, strict=True):
            for step in observation.steps:
                if step.mixed != mixed:
                    continue
                values = [getattr(step, of[name]) for name in counts]
                if bent:
                    values += hats([step.new_tokens], self.knots[regime])[0].tolist()
                else:
                    values += [1.0] + [step.new_tokens] * mixed
                row += step.times * np.array(values)
        return rows, names

    def solve(self) -> np.ndarray:
        """Coefficients of weighted, robust, non-negative least squares; keeps the weights for ``resample``."""
        arrivals_s = 1e-3
        robust = np.ones(len(self.seconds))
        for _ in range(8):
            noise = np.hypot(arrivals_s, STEP_NOISE * self.seconds)
            self.weights = np.sqrt(robust) / noise
            found = solve(self.design * self.weights[:, None], self.seconds * self.weights)
            off = np.abs(self.design @ found - self.seconds)
            arrivals_s = max(1.4826 * float(np.median(off)), 1e-9)
            robust = np.minimum(1.0, 2.0 * noise / np.maximum(off, 1e-12))
        return found

    def misses(self, found: np.ndarray, mixed: bool) -> float:
        """The largest relative miss of the median of a cell that is of this regime."""
        cells: dict[object, list[float]] = {}
        for observation, price in zip(self.observations, self.design @ found, strict=True):
            if any(s.mixed for s in observation.steps) == mixed:
                cells.setdefault(observation.cell, []).append(price / observation.seconds - 1)
        return max((abs(float(np.median(each))) for each in cells.values()), default=0.0)

    def badness(self, found: np.ndarray, weights: np.ndarray) -> float:
        """The Bayesian information criterion of these coefficients, outliers clipped."""
        off = np.abs(self.design @ found - self.seconds) * weights
        clipped = np.minimum(off, 4 * max(float(np.median(off)), 1e-9))
        n = len(off)
        return n * np.log(max(float(np.mean(clipped**2)), 1e-18)) + len(found) * np.log(n)

    def resample(self, best: np.ndarray, seed: int) -> tuple[np.ndarray, int]:
        """(coefficients of RESAMPLES draws, degrees of freedom).

        Each burst's residuals are kept or turned round as one (the wild bootstrap by clusters): what disturbs a burst
        disturbs all its windows, and every draw keeps all that was measured.
        """
        rng = stream(seed, "calibration resamples")
        bursts, of = np.unique(self.bursts, return_inverse=True)
        columns = len(best)
        priced = self.design @ best
        design = self.design * self.weights[:, None]
        pull = np.sum(np.linalg.qr(design / np.linalg.norm(design, axis=0).clip(1e-300))[0] ** 2, axis=1)
        residuals = (self.seconds - priced) / (
            1 - np.minimum(pull, 0.9)
        )  # a window that pulls hides its own error (HC3)
        draws = np.empty((RESAMPLES, columns))
        for draw in draws:
            signs = rng.choice([-1.0, 1.0], len(bursts))[of]
            draw[:] = solve(design, (priced + signs * residuals) * self.weights)
        return draws, len(bursts) - columns

    def unseen_s(self) -> np.ndarray:
        """What each window costs by the windows of all other bursts; NaN where those do not tell (a table's entry that
        nothing else has measured)."""
        design, seconds = self.design * self.weights[:, None], self.seconds * self.weights
        priced = np.empty(len(seconds))
        for burst in np.unique(self.bursts):
            own = self.bursts == burst
            told = np.any(self.design[~own] != 0, axis=0)
            priced[own] = self.design[own][:, told] @ solve(design[~own][:, told], seconds[~own])
            priced[own & np.any(self.design[:, ~told] != 0, axis=1)] = np.nan
        return priced

    def cost(self, found: np.ndarray) -> StepCost:
        values: dict[str, dict[str, float]] = {"decode": {}, "mixed": {}}
        tables: dict[str, list[float]] = {regime: [] for regime in self.bends}
        for name, value in zip(self.names, found, strict=True):
            regime, _, key = name.partition(".")
            if key:
                values[regime][key] = float(value)
            else:
                tables[name.partition("@")[0]].append(float(value))
        grids = {}
        for regime, seconds in tables.items():
            base = min(seconds)
            values[regime]["base_s"] = base
            rows = tuple((second - base,) for second in seconds)
            grids[f"{regime}_grid"] = Grid(tuple(self.knots[regime]), (0.0,), rows)
        return StepCost(Regime(**values["decode"]), Regime(**values["mixed"]), fitted=self.range(), **grids)

    def range(self) -> dict:
        """Where it was measured, as StepCost.fitted says it."""
        found = {}
        for regime, mixed in (("decode", False), ("mixed", True)):
            steps = [s for o in self.observations for s in o.steps if s.mixed == mixed]
            found[regime] = {
                count: (min(getattr(s, count) for s in steps), max(getattr(s, count) for s in steps))
                for count in ("new_tokens", "sequences", "context_tokens", "attention")
            }
        return found
