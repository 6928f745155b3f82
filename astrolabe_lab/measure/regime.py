"""Warm-up, steady window and drain of a run, and whether its queues kept growing."""

import math
from typing import NamedTuple

import numpy as np
import pandas as pd

from astrolabe_lab.errors import InputError

from .frames import NEEDED, require_columns

WARM_UP_S, WARM_UP_E2E = 60.0, 3.0  # dropped at first: 60 s, or three times the mean E2E where that is longer
BATCHES, LOOKS = 20, 50  # means whose trend is tested, and moments that each averages over
TREND_LEVEL = 0.05
MATERIAL = 1 / 200  # of the arrivals: a queue that grows more slowly is no trend
PHASES = ("warm-up", "steady", "drain")


class Window(NamedTuple):
    """The steady window in the run's own seconds: requests that arrive in [start_s, end_s) are measured, and
    arrivals go on until the last of them has ended, at latest at `last_arrival_s`."""

    start_s: float
    end_s: float
    last_arrival_s: float


def steady_window(results: pd.DataFrame, warm_up_s: float | None = None) -> Window:
    """When the run (one run's result frame) was neither filling nor draining.

    It opens max(60 s, 3 mean E2E) after the first arrival, or `warm_up_s` after it, and closes with the first
    arrival of a request that was still there when arrivals stopped. Empty (end_s <= start_s) where the run
    was too short, or past capacity, where ever later requests are still waiting when arrivals stop.
    """
    require_columns(results, NEEDED)
    if results.empty:
        raise InputError("a frame without requests has no steady window")
    arrived_s, finished_s = results["arrived_s"].to_numpy(), results["finished_s"].to_numpy()
    first_s, last_s = arrived_s.min(), arrived_s.max()
    if warm_up_s is None:
        ok = (results["status"] == "ok").to_numpy()
        mean_e2e_s = float((finished_s[ok] - arrived_s[ok]).mean()) if ok.any() else 0.0
        warm_up_s = max(WARM_UP_S, WARM_UP_E2E * mean_e2e_s)
    elif not warm_up_s >= 0:
        raise InputError(f"warm_up_s={warm_up_s!r} is not a number of seconds >= 0")
    late = finished_s > last_s
    end_s = arrived_s[late].min() if late.any() else last_s
    return Window(float(first_s + warm_up_s), float(end_s), float(last_s))


def phases(results: pd.DataFrame, warm_up_s: float | None = None) -> pd.Series:
    """The phase that each request of one run arrived in: `warm-up`, `steady` or `drain` (see `steady_window`)."""
    start_s, end_s, _ = steady_window(results, warm_up_s)
    arrived_s = results["arrived_s"]
    which = np.where(arrived_s < start_s, PHASES[0], np.where(arrived_s < end_s, PHASES[1], PHASES[2]))
    return pd.Series(which, results.index, name="phase")


def steady(results: pd.DataFrame, warm_up_s: float | None = None) -> pd.DataFrame:
    """The requests that arrived in the steady window of one run; `attrs["window"]` is that window.

    `summarise` then gives the steady latencies. Rates are another matter: of a window, count what ended in
    it (`steady_rates`). Raises InputError where the window is empty.
    """
    window = steady_window(results, warm_up_s)
    measured = results[(results["arrived_s"] >= window.start_s) & (results["arrived_s"] < window.end_s)].copy()
    if measured.empty:
        span_s = window.last_arrival_s - results["arrived_s"].min()
        raise InputError(
            f"arrivals over {span_s:.0f} s leave no steady window: warm-up takes until "
            f"{window.start_s - results['arrived_s'].min():.0f} s after the first, and requests that arrived from "
            f"{window.end_s - results['arrived_s'].min():.0f} s on were still there when arrivals stopped. Give more "
            "requests or a lower rate (past capacity there is no steady state)"
        )
    measured.attrs["window"] = window._asdict()
    return measured


def steady_rates(results: pd.DataFrame, warm_up_s: float | None = None) -> dict[str, float]:
    """What ended between the end of warm-up and the last arrival, a second: `throughput_rps, output_tokens_per_s`.

    Raises InputError where no time is left after warm-up.
    """
    start_s, _, last_s = steady_window(results, warm_up_s)
    if last_s <= start_s:
        raise InputError(f"arrivals stop before warm-up ends, {start_s - last_s:.0f} s later: give more requests")
    finished_s = results["finished_s"]
    ended = results[(results["status"] == "ok") & (finished_s >= start_s) & (finished_s < last_s)]
    span_s = last_s - start_s
    return {
        "throughput_rps": len(ended) / span_s,
        "output_tokens_per_s": float(ended["generated_tokens"].sum()) / span_s,
    }


def waiting_trend(results: pd.DataFrame, warm_up_s: float = 0.0) -> tuple[float, float]:
    """(growth, p): requests that the queues of one run gain a second, and how easily chance does that.

    Counts requests without a first token at 1,000 moments from warm-up to the last arrival, takes 20 means and
    fits a line. p is one-sided, of a t-test whose degrees of freedom are cut by the residuals' first
    autocorrelation: successive means are not independent. NaN for a run without a span.
    """
    require_columns(results, NEEDED)
    held = results[results["status"] != "rejected"]
    arrived_s = np.sort(held["arrived_s"].to_numpy())
    begun_s = np.sort(held["first_token_s"].fillna(held["finished_s"]).to_numpy())
    if len(arrived_s) < 2 or (span_s := arrived_s[-1] - arrived_s[0] - warm_up_s) <= 0:
        return math.nan, math.nan
    moments = arrived_s[0] + warm_up_s + span_s * (np.arange(BATCHES * LOOKS) + 0.5) / (BATCHES * LOOKS)
    waiting = np.searchsorted(arrived_s, moments, side="right") - np.searchsorted(begun_s, moments, side="right")
    slope, p = trend(waiting.reshape(BATCHES, LOOKS).mean(axis=1))
    with np.errstate(over="ignore"):
        return float(np.float64(slope * BATCHES) / span_s), p


def trend(means: np.ndarray) -> tuple[float, float]:
    """(slope, p) of a line through successive means: the slope a step, and the one-sided p of an upward trend.

    The residuals' lag-1 autocorrelation r, corrected for its bias in short series, leaves n (1 - r) / (1 + r)
    independent values, 3 at least.
    """
    from scipy.special import stdtr  # scipy.stats takes a second to load, which every simulation would wait for

    n = len(means)
    x = np.arange(n) - (n - 1) / 2
    slope = float(x @ means / (x @ x))
    rest = means - means.mean() - slope * x
    left = float(rest @ rest)
    if left <= 1e-18 * max(1.0, float(means @ means)):  # a perfect line
        return slope, 0.0 if slope > 1e-12 else 1.0
    r = min(max(float(rest[1:] @ rest[:-1]) / left + 3 / n, 0.0), 0.9)
    inflation = (1 + r) / (1 - r)
    error = math.sqrt(left / (n - 2) / float(x @ x) * inflation)
    return slope, float(stdtr(max(n / inflation, 3.0) - 2, -slope / error))


def grows(growth_rps: float, p: float, arrival_rps: float) -> bool:
    """True where waiting gains more than one request in 200 that arrive, and chance seldom (p < 5 %) does that."""
    return p < TREND_LEVEL and growth_rps > MATERIAL * arrival_rps


def summary(results: pd.DataFrame) -> dict[str, object]:
    """What `summarise` says of how a run went on.

    `regime`: `finite-trace` where its queues kept growing after the first minute, so that its latencies grow with
    the number of requests; else `short` where no request is measured between warm-up and drain, or arrivals stop
    within two minutes; else `steady`.
    `{ttft,tpot,e2e}_p99_third_s`: the highest P99 of the three thirds of the requests, in order of arrival (one
    that did not end well counts as inf). `waiting_growth_rps`, `waiting_growth_p`: `waiting_trend`.
    """
    arrived_s = results["arrived_s"].to_numpy()
    span_s = arrived_s.max() - arrived_s.min() if len(arrived_s) else 0.0
    growth_rps, p = waiting_trend(results, min(WARM_UP_S, span_s / 2))
    regime = "short"
    if span_s >= 2 * WARM_UP_S:
        window = steady_window(results)
        if grows(growth_rps, p, len(arrived_s) / span_s):
            regime = "finite-trace"
        elif ((arrived_s >= window.start_s) & (arrived_s < window.end_s)).any():
            regime = "steady"
    return {
        "regime": regime,
        **{f"{name}_p99_third_s": worst_third(results, name) for name in ("ttft", "tpot", "e2e")},
        "waiting_growth_rps": growth_rps,
        "waiting_growth_p": p,
    }


def worst_third(results: pd.DataFrame, name: str = "ttft") -> float:
    """The highest P99 of `ttft`, `tpot` or `e2e`, in s, of the three thirds of one run's requests in order of arrival.

    One that did not end well counts as infinitely late, one without a TPOT not at all.
    """
    from .latency import latencies, percentile

    if results.empty:
        return math.nan
    order = np.argsort(results["arrived_s"].to_numpy(), kind="stable")
    ok = (results["status"] == "ok").to_numpy()
    values = np.full(len(results), np.inf)
    values[ok] = latencies(results)[f"{name}_s"].to_numpy()
    thirds = [part[~np.isnan(part)] for part in np.array_split(values[order], 3)]
    marks = [percentile(third[np.isfinite(third)], 99, int(np.isinf(third).sum())) for third in thirds]
    return float(np.nanmax(marks)) if not np.isnan(marks).all() else math.nan
