"""Two policies, A and B, on the same requests: how far B lies from A, and from what chance alone does."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from astrolabe_lab.errors import InputError

from .families import holm
from .frames import listed, require_columns
from .intervals import interval, p_value
from .latency import summarise
from .lost import higher_is_better, lost, lost_more, of_all_sent
from .paired import NO_WINNER
from .power import seeds_needed
from .slo import SLO

METRICS = (
    *("ttft_mean_s", "ttft_p99_s", "ttft_p99_all_s", "tpot_mean_s", "e2e_mean_s", "e2e_p99_s"),
    *("e2e_per_token_mean_s", "throughput_rps", "preemptions"),
)
PROMISED = ("goodput_rps", "goodput_share")  # beside them, where targets are known
KINDS = {"policy": "same requests, other luck of the router", "arrivals": "other arrivals"}
OF_LUCK = "over the router's luck alone: every seed has the same requests at the same times"
TENTHS = 10
OF_REQUESTS = ("ttft_", "tpot_", "e2e_", "itl_")  # metrics that are of each request, so that a tenth of a run has them
EFFECT_PCT = 2.0


def compare(
    a: pd.DataFrame,
    b: pd.DataFrame,
    *,
    again: Mapping[str, pd.DataFrame] | None = None,
    metrics: Sequence[str] | None = None,
    slo: SLO | None = None,
    level: float = 0.95,
    effect_pct: float = EFFECT_PCT,
) -> pd.DataFrame:
    """B minus A, a row per metric (and rate), with its interval, beside A's difference from itself.

    `a` and `b` are result frames (one row per request, of one seed or several) or summaries (one row per run),
    each of one policy. Their runs are paired by `qps` and `seed` and have to have served the same requests at
    the same times. `again` holds A run again, as a frame of the same kind: `policy`, with another
    `policy_seed` on the same requests (paired by seed), and `arrivals`, with other arrivals and lengths (paired
    in order of seed). Without the latter, A's own seeds are compared with one another, half with half.

    Columns: `metric`, `qps` where there are several rates; `a, b` (means over seeds), `difference`, and in
    percent of A's mean `pct, low_pct, high_pct`; `interval` (what that is), `seeds`, `p` and `p_holm`
    (corrected for the rows of the table); `winner` ("A", "B" or "no winner": p_holm at least 1 - level);
    `aa_policy_pct, aa_policy_low_pct, aa_policy_high_pct`, the same of A against itself, and `aa_arrivals_...`;
    `seeds_needed`, to show a difference of `effect_pct` percent with 80 % power as one of the rows of the table,
    corrected for them (Bonferroni: no row needs more); `a_lost, b_lost`, the requests of
    each side that did not end well.

    Where one side lost more requests than the other (by over a thousandth of those sent), it wins no row that is of
    the requests that are left, such as `e2e_mean_s`: shedding load makes those fast. The rows that count all sent
    (`..._all_s`, throughput, goodput, and then `ok`, how many ended well) are as always.

    The interval is `interval` over seeds; where all of them have the same requests at the same times, it tells of
    the router's luck alone, says so, and A has no other arrivals to be compared with. With one seed, a latency's is
    that over ten successive tenths of the run, which tells about that run alone; past capacity, or in a short run,
    where tenths are unlike, there is none. Raises InputError where runs are unpaired, or a frame holds several
    policies.
    """
    a, b = _Side("A", a, slo), _Side("B", b, slo)
    if metrics is None:
        metrics = [name for name in (*METRICS, *PROMISED) if a.knows(name) and b.knows(name)]
        metrics += ["ok"] * (a.lost > 0 or b.lost > 0)
    metrics = list(dict.fromkeys(metrics))
    for side in (a, b):
        require_columns(side.summary, metrics)
        if words := [name for name in metrics if not is_numeric_dtype(side.summary[name])]:
            raise InputError(f"metrics: {listed(words)} of {side.name} holds no numbers, and has no difference")
    others = {kind: _Side(f"A again ({kind})", frame, slo) for kind, frame in (again or {}).items()}
    if unknown := sorted(set(others) - set(KINDS)):
        raise InputError(f"again holds {listed(unknown)}; allowed are {listed(KINDS)}")
    _forget_lone_rate(a, b, *others.values())
    _check_paired(a, b)
    if "policy" in others:
        _check_paired(a, others["policy"])
    rows, rates = [], a.summary["qps"].unique().tolist()
    strict = 1 - (1 - level) / (len(metrics) * len(rates)) if metrics else level
    for qps in rates:
        one, two = a.at(qps), b.at(qps)
        same = {kind: side.at(qps) for kind, side in others.items()}
        for metric in metrics:
            rows.append({"qps": qps} | _row(metric, one, two, same, level, strict, effect_pct))
    found = pd.DataFrame(rows)
    found["p_holm"] = holm(found["p"])
    better = np.where([higher_is_better(name) for name in found["metric"]], -1, 1) * found["difference"]
    winner = np.where(better < 0, "B", "A")
    of_all = [of_all_sent(name) for name in found["metric"]]
    shed = ~np.array(of_all) & (winner == found.pop("lost_more"))
    found["winner"] = np.where((found["p_holm"] < 1 - level) & ~shed, winner, NO_WINNER)
    first = ["metric", "qps", "a", "b", "difference", "pct", "low_pct", "high_pct", "interval", "seeds"]
    if found["qps"].nunique() < 2:
        first.remove("qps")
    first += ["p", "p_holm", "winner"]
    return found[first + [name for name in found if name not in (*first, "qps")]]


class _Side:
    """One of the two: its runs as summary rows, and its requests where the frame has them."""

    def __init__(self, name: str, frame: pd.DataFrame, slo: SLO | None) -> None:
        self.name = name
        self.requests: pd.DataFrame | None = None
        if frame.empty:
            raise InputError(f"{name} holds no run: its frame has no rows")
        if "status" in frame and "arrived_s" in frame:
            self.requests = frame if "qps" in frame else frame.assign(qps=math.nan)
            self.requests = self.requests if "seed" in frame else self.requests.assign(seed=0)
            summary = summarise(self.requests, by=["qps", "seed"], slo=slo)
        else:
            require_columns(frame, ("seed", "n"))
            if "workload" not in frame:
                raise InputError(
                    f"{name} does not say which requests its runs served (no column workload): make it again with "
                    "this version"
                )
            summary = frame if "qps" in frame else frame.assign(qps=math.nan)
        policies = [str(policy) for policy in frame["policy"].unique()] if "policy" in frame else []
        if len(policies) > 1:
            raise InputError(f"{name} holds {len(policies)} policies, {listed(policies)}: choose one")
        self.policy = policies[0] if policies else name
        if (twice := summary.duplicated(["qps", "seed"])).any():
            row = summary[twice].iloc[0]
            raise InputError(f"{name} has several runs of {_point(row['qps'], row['seed'])}: keep one")
        self.summary = summary.sort_values(["qps", "seed"], ignore_index=True)

    def knows(self, metric: str) -> bool:
        return metric in self.summary and bool(self.summary[metric].notna().any())

    @property
    def lost(self) -> int:
        """Requests sent that did not end well; 0 where the summary does not tell."""
        return lost(self.summary)

    @property
    def same_requests(self) -> bool:
        """Whether several seeds faced one and the same set of requests: they tell of that set, and of luck."""
        return len(self.summary) > 1 and self.summary["workload"].nunique() == 1

    def at(self, qps: float) -> "_Side":
        """The runs at one rate."""
        side = object.__new__(_Side)
        side.name, side.policy, side.requests = self.name, self.policy, self.requests
        side.summary = self.summary[_equal(self.summary["qps"], qps)].reset_index(drop=True)
        if self.requests is not None:
            side.requests = self.requests[_equal(self.requests["qps"], qps)]
        return side


def _forget_lone_rate(*sides: _Side) -> None:
    """Where one side does not know its rate and none has several, the requests themselves have to agree."""
    rates = [side.summary["qps"] for side in sides]
    if any(one.isna().any() for one in rates) and all(one.nunique() <= 1 for one in rates):
        for side in sides:
            side.summary = side.summary.assign(qps=math.nan)
            side.requests = None if side.requests is None else side.requests.assign(qps=math.nan)


def _equal(values: pd.Series, qps: float) -> pd.Series:
    return values.isna() if isinstance(qps, float) and math.isnan(qps) else values == qps


def _point(qps: float, seed: int) -> str:
    return f"seed {seed}" if qps != qps else f"qps {qps:g}, seed {seed}"


def _check_paired(a: _Side, b: _Side) -> None:
    """Raise InputError where runs of one side have no partner, or one that served other requests."""
    keys = ["qps", "seed"]
    both = a.summary[[*keys, "n", "workload"]].merge(
        b.summary[[*keys, "n", "workload"]], on=keys, how="outer", suffixes=("_a", "_b"), indicator=True
    )
    if len(alone := both[both["_merge"] != "both"]):
        row = alone.iloc[0]
        name, other = (a.name, b.name) if row["_merge"] == "left_only" else (b.name, a.name)
        raise InputError(
            f"{other} has no run of {_point(row['qps'], row['seed'])}, which {name} has: paired comparisons need the "
            "same seeds (and rates) on both sides"
        )
    if len(unlike := both[both["workload_a"] != both["workload_b"]]):
        row = unlike.iloc[0]
        what = "other numbers of requests" if row["n_a"] != row["n_b"] else "other arrivals or lengths"
        raise InputError(
            f"at {_point(row['qps'], row['seed'])} {a.name} and {b.name} served {what} "
            f"({row['n_a']:,} and {row['n_b']:,} requests): pair runs of one trace, rate and seed"
        )


def _row(
    metric: str, a: _Side, b: _Side, again: Mapping[str, _Side], level: float, strict: float, effect_pct: float
) -> dict:
    """One row; `strict` is the level at which it would be clear among all rows, wherever its p stands among theirs."""
    base = float(a.summary[metric].mean())
    row = {"metric": metric, "a": base, "b": float(b.summary[metric].mean())}
    row |= _difference(metric, a, b, base, level)
    row |= {"a_lost": a.lost, "b_lost": b.lost}
    row["lost_more"] = {1: "A", -1: "B", 0: ""}[lost_more(a.summary, b.summary)]
    for kind in KINDS:
        if kind in again:
            aa = _difference(metric, a, again[kind], base, level, paired=kind == "policy")
        elif kind == "arrivals" and len(a.summary) >= 4 and not a.same_requests:
            aa = _halves(a.summary[metric].to_numpy(float), base, level)
        else:
            aa = dict.fromkeys(("pct", "low_pct", "high_pct"), math.nan)
        row |= {f"aa_{kind}_{name}": aa[name] for name in ("pct", "low_pct", "high_pct")}
    spread = row.pop("spread")
    effect = abs(base) * effect_pct / 100
    row["seeds_needed"] = seeds_needed(spread, effect, strict) if effect > 0 and math.isfinite(effect) else math.nan
    return row


def _difference(metric: str, a: _Side, b: _Side, base: float, level: float, paired: bool = True) -> dict:
    """B - A: mean, interval, p, and the spread between seeds."""
    n = min(len(a.summary), len(b.summary))
    one, two = (side.summary[metric].to_numpy(float)[:n] for side in (a, b))
    with np.errstate(invalid="ignore"):
        gaps = two - one
    if n == 1 and paired:
        mean, low, high, p, spread, name = _within(metric, a, b, float(gaps[0]), level)
    else:
        mean, low, high = interval(gaps, level)
        spread = float(gaps.std(ddof=1)) if n > 1 and np.isfinite(gaps).all() else math.nan
        p = p_value(gaps)
        name = "none: one seed" if n < 2 else OF_LUCK if a.same_requests and b.same_requests else "over seeds"
    return {"difference": mean, "interval": name, "seeds": n, "p": p, "spread": spread} | _percent(
        mean, low, high, base
    )


def _percent(mean: float, low: float, high: float, base: float) -> dict[str, float]:
    scale = 100 / base if base and math.isfinite(base) else math.nan
    return {"pct": mean * scale, "low_pct": low * scale, "high_pct": high * scale}


def _halves(values: np.ndarray, base: float, level: float) -> dict:
    """A's seeds against one another: the second half minus the first."""
    half = len(values) // 2
    with np.errstate(invalid="ignore"):  # infinitely late on both sides
        return _percent(*interval(values[half : 2 * half] - values[:half], level), base)


def _within(metric: str, a: _Side, b: _Side, gap: float, level: float) -> tuple:
    """The interval of one run's difference, from ten successive tenths of its requests (sectioning).

    Source: Asmussen and Glynn, Stochastic Simulation, chapter IV: sections long against the run's memory are
    nearly independent, and spread around the estimate of the whole.
    """
    from scipy import stats

    none = gap, math.nan, math.nan, math.nan, math.nan
    latency = metric.startswith(OF_REQUESTS) and not metric.endswith("_third_s")
    if a.requests is None or b.requests is None or not latency:
        return *none, "none: one seed"
    regimes = {a.summary["regime"].iloc[0], b.summary["regime"].iloc[0]}
    if "finite-trace" in regimes:
        return *none, "none: one seed, past capacity"
    if "short" in regimes or len(a.requests) < 20 * TENTHS:
        return *none, "none: one seed, a short run"
    parts = [_tenths(metric, side.requests) for side in (a, b)]
    with np.errstate(invalid="ignore"):
        apart = parts[1] - parts[0] - gap
    if not np.isfinite(apart).all():
        return *none, "none: one seed"
    error = math.sqrt(float(apart @ apart) / (TENTHS - 1) / TENTHS)
    half = float(stats.t.ppf((1 + level) / 2, TENTHS - 1)) * error
    p = float(2 * stats.t.sf(abs(gap) / error, TENTHS - 1)) if error else float(gap == 0)
    return gap, gap - half, gap + half, p, error, "over tenths of one run"


def _tenths(metric: str, requests: pd.DataFrame) -> np.ndarray:
    order = requests.iloc[np.argsort(requests["arrived_s"].to_numpy(), kind="stable")]
    tenth = np.arange(len(order)) * TENTHS // len(order)
    return summarise(order.assign(tenth=tenth), by=["tenth"])[metric].to_numpy(float)
