"""What the Astrolabe paper measured, and the same worked out from a sweep of ours.

Source: "Astrolabe: Balancing Load in LLM Serving with Randomized Prediction-Guided Scheduling": 12 instances of
Llama-2-7B on A30 GPUs under vLLM 0.7.2, 10,000 ShareGPT requests, Poisson arrivals at 20 to 36 QPS; P99 TTFT is to
stay within 10 s, and a figure of a single run wobbles by 4 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

LIMIT_S = 10.0  # of P99 TTFT
SATURATED_QPS = 32.0  # where the paper counts preemptions
TRUE_LENGTHS = ", true lengths"  # what the label of a policy ends in that is told exact lengths
LLUMNIX = "llumnix_minus_a"
PO2, PO4, PO8, FAN_OUT = (f"astrolabe:k={k}" for k in (2, 4, 8, "all"))


@dataclass(frozen=True)
class Figure:
    """One number of the paper: what it says, its value and how far it may be off (NaN: it does not say)."""

    what: str
    value: float
    within: float
    unit: str
    here: Callable[[Runs], Mapping[int, float]]  # by seed; empty where a policy of it did not run


class Runs:
    """The rows of a sweep as the figures ask for them, by seed."""

    def __init__(self, summary: pd.DataFrame) -> None:
        self.summary = summary
        self.sides: set[str] = set()  # on which seeds' values may lie further out: a crossing beyond the rates that ran

    def of(self, policy: str, metric: str, qps: float | None = None) -> pd.Series:
        """`metric` of the policy's runs, indexed by (seed, qps), or by seed at one rate."""
        rows = self.summary[self.summary["policy"] == policy]
        values = rows.set_index(["seed", "qps"])[metric].sort_index()
        return values if qps is None else values[values.index.get_level_values("qps") == qps].droplevel("qps")

    def capacity(self, policy: str) -> dict[int, float]:
        """The rate at which each seed's P99 TTFT first crosses the limit, or the end of the rates before that."""
        found = self._crossings(policy)
        self.sides |= {side for _, side in found.values() if side}
        return {seed: rate for seed, (rate, _) in found.items()}

    def gain(self, policy: str, other: str) -> dict[int, float]:
        """How many QPS more the first policy bears, seed by seed."""
        mine, theirs = self._crossings(policy), self._crossings(other)
        seeds = mine.keys() & theirs.keys()
        self.sides |= {mine[seed][1] for seed in seeds} | {OPPOSITE[theirs[seed][1]] for seed in seeds}
        self.sides -= {""}
        return {seed: mine[seed][0] - theirs[seed][0] for seed in sorted(seeds)}

    def _crossings(self, policy: str) -> dict[int, tuple[float, str]]:
        from astrolabe_lab import measure

        column = "ttft_p99_all_s" if "ttft_p99_all_s" in self.summary else "ttft_p99_s"
        found = {}
        for seed, values in self.of(policy, column).groupby(level="seed"):
            rates = values.index.get_level_values("qps").to_numpy()
            at_s = values.to_numpy()
            found[seed] = measure.crossing(rates, at_s, ~(at_s <= LIMIT_S), LIMIT_S)
        return found

    def peak(self, metric: str, sign: float = -1.0) -> dict[int, float]:
        """By how many percent Po2's mean over seeds lies below (sign -1) or above llumnix_minus's, at the rate where
        that is most; each seed's percentage at that rate."""
        mine, theirs = (self.of(policy, metric).unstack("qps") for policy in (PO2, LLUMNIX))
        rates = [qps for qps in mine if qps in theirs]
        if not rates:
            return {}
        change = {qps: sign * 100 * (mine[qps].mean() / theirs[qps].mean() - 1) for qps in rates}
        best = max(change, key=change.get)
        return (sign * 100 * (mine[best] / theirs[best] - 1)).dropna().to_dict()

    def preemptions(self, policy: str) -> dict[int, float]:
        return self.of(policy, "preemptions", SATURATED_QPS).to_dict()

    def tail(self) -> dict[int, float]:
        """By how many percent Po2's P99 TTFT lies below llumnix_minus's where the paper is saturated."""
        mine, theirs = (self.of(policy, "ttft_p99_s", SATURATED_QPS) for policy in (PO2, LLUMNIX))
        return (100 * (1 - mine / theirs)).dropna().to_dict()


def _capacity(policy: str) -> Callable[[Runs], Mapping[int, float]]:
    return lambda runs: runs.capacity(policy)


FIGURES = (
    Figure("capacity, Llumnix-", 31.5, 0.3, "QPS", _capacity(LLUMNIX)),
    Figure("capacity, Po2", 31.6, 0.3, "QPS", _capacity(PO2)),
    Figure("capacity, Po4", 31.9, 0.3, "QPS", _capacity(PO4)),
    Figure("capacity, Po8", 31.7, 0.3, "QPS", _capacity(PO8)),
    Figure("capacity, fan-out", 31.7, 0.3, "QPS", _capacity(FAN_OUT)),
    Figure("capacity, Po2 with true lengths", 32.4, 0.3, "QPS", _capacity(PO2 + TRUE_LENGTHS)),
    Figure("capacity, fan-out with true lengths", 32.6, 0.3, "QPS", _capacity(FAN_OUT + TRUE_LENGTHS)),
    Figure("capacity, round robin", math.nan, math.nan, "QPS", _capacity("round_robin")),
    Figure("capacity, random", math.nan, math.nan, "QPS", _capacity("random")),
    Figure("Po2 over Llumnix-", 0.1, 0.6, "QPS", lambda runs: runs.gain(PO2, LLUMNIX)),
    Figure("Po4 over Po2", 0.3, 0.6, "QPS", lambda runs: runs.gain(PO4, PO2)),
    Figure("true lengths, Po2", 0.8, 0.6, "QPS", lambda runs: runs.gain(PO2 + TRUE_LENGTHS, PO2)),
    Figure("most that Po2 takes off mean TTFT", 38.0, 4.0, "%", lambda runs: runs.peak("ttft_mean_s")),
    Figure("most that Po2 takes off P99 TTFT", 78.0, 4.0, "%", lambda runs: runs.peak("ttft_p99_s")),
    Figure("most that Po2 takes off mean E2E", 7.0, 4.0, "%", lambda runs: runs.peak("e2e_mean_s")),
    Figure("most that Po2 takes off P99 E2E", 12.0, 4.0, "%", lambda runs: runs.peak("e2e_p99_s")),
    Figure("most that Po2 adds to throughput", 5.0, 4.0, "%", lambda runs: runs.peak("throughput_rps", 1.0)),
    Figure("P99 TTFT that Po2 takes off at 32 QPS", math.nan, math.nan, "%", Runs.tail),
    Figure("preemptions at 32 QPS, Llumnix-", 1800, 72, "", lambda runs: runs.preemptions(LLUMNIX)),
    Figure("preemptions at 32 QPS, Po2", 300, 12, "", lambda runs: runs.preemptions(PO2)),
)
NOTES = {True: "agrees", False: "differs", None: ""}
OPPOSITE = {"": "", "above": "below", "below": "above"}
BOUNDS = {"": "", "above": ">= ", "below": "<= "}


def compare(summary: pd.DataFrame) -> pd.DataFrame:
    """A row per figure of the paper: `what, paper, here, interval, difference, verdict, seeds, n`, for people.

    `summary` is the frame of a sweep over policies under their own names; one that is told exact lengths has a label
    that ends in `TRUE_LENGTHS`. `here` is the mean over seeds, `interval` its 95 % t-interval. The verdict is
    "agrees" where that interval and the paper's own margin overlap. "Most that" figures are those at the rate where
    they are largest, as the paper picks them: picked after looking, they are high by luck. Where a seed does not cross
    the limit within the rates that ran, `here` is a bound (">= 33.00 QPS"), without interval and verdict. `seeds` is
    how many `here` is the mean of, `n` the requests of a run. Raises InputError for a frame without policies, rates
    and seeds.
    """
    import pandas as pd

    rows = [(f"{row.what}", *_shown(row)) for row in measured(summary).itertuples()]
    names = ["what", "paper", "here", "interval", "difference", "verdict", "seeds", "n"]
    return pd.DataFrame(rows, columns=names).set_index("what")


def measured(summary: pd.DataFrame) -> pd.DataFrame:
    """The numbers behind `compare`: `what, paper, within, unit, here, low, high, censored, seeds, n, agrees, why_not`.

    `censored` is "above" or "below" where `here` is a bound, with the truth on that side of it, as in
    `measure.Capacity`.
    """
    import pandas as pd

    from astrolabe_lab import measure

    measure.require_columns(summary, ("policy", "qps", "seed", "n", "ttft_p99_s", "preemptions"))
    rows = []
    for figure in FIGURES:
        runs = Runs(summary)
        values = list(figure.here(runs).values())
        why_not = "beyond the rates" if len(runs.sides) > 1 else "" if values else "not run"
        here, low, high = measure.t_interval(values) if not why_not else (math.nan,) * 3
        agrees, censored = None, "" if why_not else "".join(runs.sides)
        if censored:
            low = high = math.nan
        elif not why_not and not math.isnan(figure.value):
            half = 0.0 if math.isnan(low) else high - here
            agrees = abs(here - figure.value) <= figure.within + half
        given = (figure.what, figure.value, figure.within, figure.unit)
        rows.append((*given, here, low, high, censored, len(values), int(summary["n"].max()), agrees, why_not))
    names = ["what", "paper", "within", "unit", "here", "low", "high", "censored", "seeds", "n", "agrees", "why_not"]
    return pd.DataFrame(rows, columns=names)


def _shown(row) -> tuple[str, str, str, str, str, int, str]:
    unit = f" {row.unit}" if row.unit else ""
    digits = 0 if not row.unit or row.unit == "%" else 2
    paper = "several QPS lower" if math.isnan(row.paper) and row.unit == "QPS" else "lower"
    if not math.isnan(row.paper):
        paper = f"{row.paper:,.{min(digits, 1)}f}{unit}" + (f" ± {row.within:.1f}" if row.unit == "QPS" else "")
    size = row.seeds, f"{row.n:,}"
    here = row.why_not or f"{BOUNDS[row.censored]}{row.here:,.{digits}f}{unit}"
    if row.why_not or row.censored:
        return paper, here, "", "", "", *size
    interval = "one seed" if math.isnan(row.low) else f"{row.low:,.{digits}f} .. {row.high:,.{digits}f}"
    difference = "" if math.isnan(row.paper) else f"{row.here - row.paper:+,.{digits}f}{unit}"
    return paper, here, interval, difference, NOTES[row.agrees], *size
