"""Two policies on the same requests: paired differences, and who may be called the winner."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from astrolabe_lab.errors import InputError

from .families import holm, simultaneous
from .frames import listed, require_columns
from .intervals import interval, over_seeds, p_value
from .lost import flattered

NO_WINNER = "no winner"


def paired_difference(
    summary: pd.DataFrame, metric: str, baseline: str, level: float = 0.95, method: str = "auto"
) -> pd.DataFrame:
    """How far each policy's `metric` lies from the baseline's at the same qps and seed, and whether that is clear.

    Two policies at one seed see the same arrivals and lengths, so the luck of the draw cancels in their
    difference: its interval is far narrower than what two separate intervals suggest.

    Columns: `policy, qps, mean`; `low, high`, the `interval` of this comparison alone (`method` as there);
    `seeds`; `p`, and `p_holm`, corrected for the number of comparisons in the table; `low_all, high_all`,
    intervals that hold for all of them together; `clear`, True where p_holm < 1 - level. A reader who looks
    over the table for what is clear finds something in at most 1 - level of the tables without any true
    difference. Nothing is clear in favour of a side that lost more requests (`lost_more`), where `metric` is of
    those that are left. Raises InputError when the baseline is absent, or runs are unpaired: some are missing, or
    at one qps and seed policies saw different requests (`workload` of the summary).
    """
    require_columns(summary, ("policy", "qps", "seed", metric))
    if baseline not in (names := list(summary["policy"].unique())):
        raise InputError(f"baseline={baseline!r} is not among the policies: {listed(names)}")
    table = paired_table(summary, metric)
    if holes := [name for name in names if table[name].isna().any()]:
        raise InputError(f"{listed(holes)}: {metric} is missing at some qps and seed, so it cannot be paired")
    columns = ["policy", "qps", "mean", "low", "high", "seeds", "p", "p_holm", "low_all", "high_all", "clear"]
    rows, by_point = [], {}
    for name in (n for n in names if n != baseline):
        with np.errstate(invalid="ignore"):  # inf - inf: both missed; NaN is then no interval and no winner
            gaps = table[name] - table[baseline]
        for qps, values in gaps.groupby("qps"):
            by_point[name, qps] = values.droplevel("qps")
            p = p_value(values, method)
            rows.append([name, qps, *interval(values, level, method), len(values), p, *[np.nan] * 3, False])
    found = pd.DataFrame(rows, columns=columns)
    if len(found):
        found["p_holm"] = holm(found["p"])
        together = _together(by_point, level)
        found["low_all"], found["high_all"] = together["low"].to_numpy(), together["high"].to_numpy()
        by_loss = flattered(found, summary, metric, baseline) * found["mean"] < 0
        found["clear"] = (found["p_holm"] < 1 - level) & ~by_loss
    return found


def best_and_undecided(summary: pd.DataFrame, metric: str, level: float = 0.95) -> pd.DataFrame:
    """At each qps the policy of the lowest mean `metric`, and those that the seeds cannot tell from it.

    Columns: `qps, best, mean, undecided` (their names, empty where the best is clear of all others), corrected
    for the comparisons at that qps. With one seed nothing can be told apart, so all others are undecided.
    """
    means = over_seeds(summary, metric, level=level)
    rows = []
    for qps, points in means.groupby("qps"):
        if not points["mean"].notna().any():
            raise InputError(f"{metric} is missing of every policy at qps {qps:g}: none can be called best")
        best = points.loc[points["mean"].idxmin()]
        at_qps = summary[summary["qps"] == qps]
        others = paired_difference(at_qps, metric, best["policy"], level)
        rows.append((qps, best["policy"], best["mean"], ", ".join(others.loc[~others["clear"], "policy"])))
    return pd.DataFrame(rows, columns=["qps", "best", "mean", "undecided"])


def verdicts(summary: pd.DataFrame, metric: str, baseline: str, level: float = 0.95) -> pd.DataFrame:
    """At how many rates each policy's `metric` is clearly lower than the baseline's, clearly higher, or undecided.

    Indexed by policy; `paired_difference` decides, and raises InputError.
    """
    differences = paired_difference(summary, metric, baseline, level)
    signs = np.where(differences["clear"], np.sign(differences["mean"]), 0)
    counted = differences.assign(lower=signs < 0, higher=signs > 0, undecided=signs == 0)
    return counted.groupby("policy", sort=False)[["lower", "higher", "undecided"]].sum()


def paired_table(summary: pd.DataFrame, metric: str) -> pd.DataFrame:
    """`metric` by `(qps, seed)` and policy, after a check that each pair saw the same requests.

    Raises InputError for a run that is there twice, or runs of one qps and seed whose `workload` differs.
    """
    keys = ["policy", "qps", "seed"]
    if (twice := summary.duplicated(keys)).any():
        policy, qps, seed = summary.loc[twice, keys].iloc[0]
        raise InputError(f"{policy} at qps {qps:g}, seed {seed} is there more than once: keep one run of each")
    if "workload" in summary:
        seen = summary.groupby(["qps", "seed"])["workload"].nunique()
        if (unlike := seen > 1).any():
            qps, seed = seen.index[unlike][0]
            raise InputError(
                f"at qps {qps:g}, seed {seed} policies saw different arrivals or lengths, so their runs cannot be "
                "paired: run them on one trace with the same seeds"
            )
    return summary.pivot(index=["qps", "seed"], columns="policy", values=metric)


def beside(guesses, measured) -> pd.DataFrame:
    """A table of what was guessed and what was measured, a row for each of `measured`."""
    rows = [(question, str(guesses.get(question, "-")), str(answer)) for question, answer in measured.items()]
    return pd.DataFrame(rows, columns=["question", "you guessed", "measured"]).set_index("question").rename_axis(None)


def first_above(summary: pd.DataFrame, metric: str, limit: float) -> dict[str, float | str]:
    """For each policy the lowest qps at which the mean of `metric` over seeds exceeds `limit`, or "never"."""
    means = over_seeds(summary, metric)
    above = means[means["mean"] > limit].groupby("policy")["qps"].min()
    return {policy: above.get(policy, "never") for policy in means["policy"].unique()}


def _together(by_point: dict[tuple, Sequence[float]], level: float) -> pd.DataFrame:
    """`simultaneous` over all comparisons; over those of the same seeds apart where rates have different seeds."""
    wide = pd.DataFrame(by_point)
    if not wide.isna().any().any():
        return simultaneous(wide, level)
    share = 1 - (1 - level) / len(wide.columns)
    rows = [interval(values, share)[1:] for values in by_point.values()]
    return pd.DataFrame(rows, columns=["low", "high"])
