"""Requests that did not end well: shedding load makes those that are left fast, which is no win."""

import numpy as np
import pandas as pd

LOST_SHARE = 0.001  # of the requests sent: losing so much more changes a latency of those that are left
HIGHER_IS_BETTER = ("ok", "throughput_rps", "output_tokens_per_s", "total_tokens_per_s", "goodput")


def higher_is_better(metric: str) -> bool:
    """Whether more of the summary's `metric` is better."""
    return metric.startswith(HIGHER_IS_BETTER)


def of_all_sent(metric: str) -> bool:
    """Whether a request that was lost makes the summary's `metric` worse, as in `..._all_s`, throughput and goodput."""
    return metric.endswith("_all_s") or higher_is_better(metric)


def lost(summary: pd.DataFrame) -> int:
    """Requests sent that did not end well; 0 where the summary does not tell."""
    return int((summary["n"] - summary["ok"]).sum()) if {"n", "ok"} <= set(summary) else 0


def lost_more(a: pd.DataFrame, b: pd.DataFrame) -> int:
    """1 where the runs of summary `a` lost more of their requests than those of `b`, -1 where fewer, 0 where about
    as many (within a thousandth of those sent)."""
    more = lost(a) - lost(b)
    return 0 if abs(more) <= LOST_SHARE * (a["n"].sum() if "n" in a else 0) else 1 if more > 0 else -1


def flattered(found: pd.DataFrame, summary: pd.DataFrame, metric: str, baseline: str, rate: str = "qps") -> np.ndarray:
    """Of each row of `found` (`policy`, and its qps in the column `rate`) whom its losses flatter: 1 the policy, -1
    the baseline, 0 neither, and nobody where `metric` is of all requests sent."""
    if of_all_sent(metric):
        return np.zeros(len(found), int)
    runs = dict(list(summary.groupby(["policy", "qps"])))
    rows = zip(found["policy"], found[rate], strict=True)
    return np.array([lost_more(runs[name, qps], runs[baseline, qps]) for name, qps in rows])
