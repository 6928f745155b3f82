"""Capacity: the highest rate at which a percentile stays within its limit, seed by seed."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import pandas as pd

from astrolabe_lab.errors import InputError

from .frames import listed, require_columns
from .intervals import MANY, interval
from .regime import grows

KINDS = ("finite", "sustained")
LIMIT_S = 10.0  # the Astrolabe paper's: P99 TTFT <= 10 s
SUSTAINED_REQUESTS = 30_000
METRICS = ("ttft_p99", "tpot_p99", "e2e_p99")
COLUMN = {"finite": "{}_all_s", "sustained": "{}_third_s"}  # of `summarise`
MOST_STEPS = 100_000  # of the range
SCOUTS = 3  # seeds of the coarse scan

Runs = Callable[[Sequence[float], Sequence[int]], pd.DataFrame]  # (rates, seeds) -> a summary row for each pair


@dataclass(frozen=True)
class Capacity:
    """The highest rate, requests/s, at which `metric` stays within `limit_s`: its mean over seeds, and interval.

    `kind`: `finite`, of runs of exactly `n` requests from an empty system, nothing trimmed; it falls as n grows,
    because past the steady limit queues grow for as long as requests come. `sustained`: of runs in which each
    third of the requests kept the limit and queues did not keep growing; what a cluster bears for good.

    `per_seed` has a row per seed: `seed, capacity_qps, censored` ("" or "above", "below": no crossing within the
    rates searched, so that the capacity is at least, or at most, what is said). With any censored, `mean_qps` is
    a bound too and there is no interval. `runs` are the summary rows behind it.
    """

    kind: str
    policy: str
    n: int
    metric: str  # ttft_p99, tpot_p99 or e2e_p99, over all requests sent
    limit_s: float
    mean_qps: float
    low_qps: float
    high_qps: float
    seeds: int
    censored: str  # "", "above", "below" or "both"
    per_seed: pd.DataFrame = field(repr=False, compare=False)
    runs: pd.DataFrame = field(repr=False, compare=False)

    def __str__(self) -> str:
        kind = f"finite({self.n:,})" if self.kind == "finite" else f"sustained, {self.n:,} requests"
        bound = {"": "", "above": ">= ", "below": "<= ", "both": "about "}[self.censored]
        ends = f" [{self.low_qps:.2f}, {self.high_qps:.2f}]" if math.isfinite(self.low_qps) else ""
        cut = (self.per_seed["censored"] != "").sum()
        says = f"; {cut} cross outside the rates searched" if cut else ""
        few = f", fewer than the {MANY} that an interval should have" if self.seeds < MANY else ""
        return (
            f"{self.policy}: {bound}{self.mean_qps:.2f}{ends} requests/s at {named(self.metric)} <= {self.limit_s:g} s "
            f"({kind}, {self.seeds} seeds{few}{says})"
        )

    def to_dict(self) -> dict[str, object]:
        """All but the frames, and the capacities by seed."""
        names = [one.name for one in fields(self) if one.compare]
        plain = {name: getattr(self, name) for name in names}
        return plain | {"per_seed": self.per_seed.to_dict("records")}


def capacity(
    runs: Runs,
    *,
    kind: str = "finite",
    metric: str = "ttft_p99",
    limit_s: float = LIMIT_S,
    qps_range: tuple[float, float] = (1.0, 100.0),
    seeds: Sequence[int] = tuple(range(10)),
    coarse_qps: float = 2.0,
    fine_qps: float = 0.25,
    level: float = 0.95,
) -> Capacity:
    """The capacity of what `runs` runs: a coarse scan, fine steps around its knee, and a crossing for each seed.

    `metric` is the P99 of TTFT, TPOT or E2E that has to stay within `limit_s`; a request that does not end well is
    infinitely late. `runs(rates, seeds)` gives a frame with a row of `summarise` for each pair of a rate and a seed,
    in any order (`sweep.sweep` does); one seed has to mean the same arrivals and lengths at all rates. A few seeds scan
    `qps_range` in steps of `coarse_qps` upwards, no further than they have to; then all seeds run in steps of
    `fine_qps` from the last rate at which every scout was fine to the first at which none was, and wider for
    seeds whose crossing lies outside.

    A seed's capacity lies where its curve first crosses the limit: between the last rate before and the first
    one past it, log-linear in latency. `sustained` also ends at a rate whose queues keep growing
    (`regime.grows`); where those alone end it, half way between the two rates. A seed that never crosses up to
    the end of the range is right-censored, one past the limit at its start left-censored. Raises InputError for
    arguments that are none of these, and for `sustained` runs of fewer than 30,000 requests.
    """
    if metric not in METRICS:
        raise InputError(f"metric={metric!r} is not one of {listed(METRICS)}")
    if kind not in KINDS:
        raise InputError(f"kind={kind!r} is not one of {listed(KINDS)}")
    seeds = [int(seed) for seed in seeds]
    if not seeds or len(set(seeds)) < len(seeds):
        raise InputError(f"seeds={seeds} should be some, each once")
    grid = _Grid(*qps_range, coarse_qps, fine_qps)
    if not limit_s > 0:
        raise InputError(f"limit_s={limit_s!r} is not a number of seconds > 0")
    table = _Table(runs, kind, metric, limit_s)
    low, high = _bracket(table, grid, seeds[:SCOUTS])
    table.add(grid.fine(low, high), seeds)
    while outside := [seed for seed in seeds if table.starts_late(seed) and low > grid.low]:
        low, before = grid.below(low), low
        table.add(grid.fine(low, before), outside)
    while outside := [seed for seed in seeds if table.never_fails(seed) and high < grid.high]:
        high, before = grid.above(high), high
        table.add(grid.fine(before, high), outside)
    return _found(table, seeds, level)


def check_sustained(n: int) -> None:
    """Raise InputError where runs of n requests are too short for a sustained capacity."""
    if n < SUSTAINED_REQUESTS:
        raise InputError(
            f"sustained capacity needs runs of {SUSTAINED_REQUESTS:,} requests or more, got {n:,}: shorter ones end "
            "before their queues show whether they grow"
        )


def named(metric: str) -> str:
    """A metric's name for people: P99 TTFT."""
    name, _, mark = metric.partition("_")
    return f"{mark.upper()} {name.upper()}"


def crossing(rates: Sequence[float], values: Sequence[float], fails: Sequence[bool], limit: float) -> tuple[float, str]:
    """(rate, censored): where a curve, given at rising `rates`, first fails; log-linear between neighbours.

    A point that fails with its value within the limit (its queues grew) is met half way. Censored is "above"
    where no point fails, "below" where the first does, else "".
    """
    fails = np.asarray(fails, bool)
    if not fails.any():
        return float(rates[-1]), "above"
    at = int(np.argmax(fails))
    if at == 0:
        return float(rates[0]), "below"
    before, after = float(rates[at - 1]), float(rates[at])
    if values[at] <= limit:
        return (before + after) / 2, ""
    if not np.isfinite(values[at]) or values[at - 1] <= 0:
        return before, ""
    share = math.log(limit / values[at - 1]) / math.log(values[at] / values[at - 1])
    return before + (after - before) * min(max(share, 0.0), 1.0), ""


class _Grid:
    """The rates that are ever run: multiples of the fine step from the start of the range."""

    def __init__(self, low: float, high: float, coarse: float, fine: float) -> None:
        if not (0 < low < high < math.inf and 0 < fine <= coarse < math.inf):
            raise InputError(
                f"qps_range=({low}, {high}) with steps of {coarse} and {fine}: want 0 < low < high and "
                "0 < fine_qps <= coarse_qps, all finite"
            )
        if (high - low) / fine > MOST_STEPS:
            raise InputError(
                f"qps_range=({low}, {high}) holds more than {MOST_STEPS:,} steps of {fine}: narrow it, or take "
                "larger steps"
            )
        self.fine_qps, self.stride = fine, max(round(coarse / fine), 1)
        self.low, self.high = low, low + fine * math.floor((high - low) / fine + 1e-9)
        if self.high <= low:
            raise InputError(f"qps_range=({low}, {high}) is narrower than a step of {fine}")

    def at(self, step: int) -> float:
        return round(self.low + step * self.fine_qps, 9)

    def step(self, rate: float) -> int:
        return round((rate - self.low) / self.fine_qps)

    def below(self, rate: float) -> float:
        return self.at(max(self.step(rate) - self.stride, 0))

    def above(self, rate: float) -> float:
        return self.at(min(self.step(rate) + self.stride, self.step(self.high)))

    def fine(self, low: float, high: float) -> list[float]:
        return [self.at(step) for step in range(self.step(low), self.step(high) + 1)]


class _Table:
    """What has been run: value and verdict by seed and rate."""

    def __init__(self, runs: Runs, kind: str, metric: str, limit_s: float) -> None:
        self.runs, self.kind, self.metric, self.limit_s = runs, kind, metric, limit_s
        self.column = COLUMN[kind].format(metric)
        self.rows: dict[tuple[int, float], Mapping] = {}

    def add(self, rates: Sequence[float], seeds: Sequence[int]) -> None:
        """Run these rates at these seeds, as far as they have not been: a rectangle for all that lack the same."""
        lacking: dict[tuple, list[float]] = {}
        for rate in rates:
            lacking.setdefault(tuple(seed for seed in seeds if (seed, rate) not in self.rows), []).append(rate)
        for those, at in lacking.items():
            if those:
                self._run(at, list(those))

    def _run(self, rates: list[float], seeds: list[int]) -> None:
        found = self.runs(rates, seeds)
        require_columns(found, ("qps", "seed", "n", self.column, "waiting_growth_rps", "waiting_growth_p"))
        for row in found.to_dict("records"):
            if self.kind == "sustained":
                check_sustained(row["n"])
            self.rows[int(row["seed"]), round(float(row["qps"]), 9)] = row
        if lacking := [(seed, rate) for rate in rates for seed in seeds if (seed, rate) not in self.rows]:
            raise InputError(f"runs gave no row for seed {lacking[0][0]} at qps {lacking[0][1]:g}")

    def value(self, seed: int, rate: float) -> float:
        return float(self.rows[seed, rate][self.column])

    def fails(self, seed: int, rate: float) -> bool:
        row = self.rows[seed, rate]
        growing = self.kind == "sustained" and grows(row["waiting_growth_rps"], row["waiting_growth_p"], rate)
        return growing or not self.value(seed, rate) <= self.limit_s

    def curve(self, seed: int) -> list[float]:
        return sorted(rate for one, rate in self.rows if one == seed)

    def starts_late(self, seed: int) -> bool:
        """True where the seed's first rate is past its capacity already."""
        return self.fails(seed, self.curve(seed)[0])

    def never_fails(self, seed: int) -> bool:
        return not any(self.fails(seed, rate) for rate in self.curve(seed))


def _bracket(table: _Table, grid: _Grid, scouts: list[int]) -> tuple[float, float]:
    """The last coarse rate before which no scout fails, and the first at which all do (or the range's ends)."""
    low, rate = None, grid.low
    while True:
        table.add([rate], scouts)
        failing = [table.fails(seed, rate) for seed in scouts]
        if any(failing) and low is None:
            low = grid.below(rate)
        if all(failing) or rate >= grid.high:
            return grid.below(rate) if low is None else low, rate
        rate = grid.above(rate)


def _found(table: _Table, seeds: list[int], level: float) -> Capacity:
    rows = []
    for seed in seeds:
        rates = table.curve(seed)
        values, fails = zip(*((table.value(seed, r), table.fails(seed, r)) for r in rates), strict=True)
        rows.append((seed, *crossing(rates, values, fails, table.limit_s)))
    per_seed = pd.DataFrame(rows, columns=["seed", "capacity_qps", "censored"])
    sides = sorted(set(per_seed["censored"]) - {""})
    mean, low, high = interval(per_seed["capacity_qps"], level)
    if sides:
        low = high = math.nan
    runs = pd.DataFrame(list(table.rows.values())).sort_values(["seed", "qps"], ignore_index=True)
    return Capacity(
        table.kind, str(runs["policy"].iloc[0]) if "policy" in runs else "", int(runs["n"].max()), table.metric,
        table.limit_s, mean, low, high, len(seeds), "both" if len(sides) == 2 else "".join(sides), per_seed, runs,
    )  # fmt: skip
