"""`Up to x % better`: the largest of many differences, against what the largest is by chance."""

from collections.abc import Iterable

import numpy as np
import pandas as pd

from astrolabe_lab.errors import InputError

from .families import holm
from .frames import listed, require_columns
from .intervals import flips
from .lost import flattered, higher_is_better
from .paired import NO_WINNER, paired_table

DRAWS = 4999
TOO_FEW = "too few seeds"


def up_to(
    summary: pd.DataFrame,
    metric: str,
    baseline: str,
    again: pd.DataFrame | None = None,
    others: pd.DataFrame | None = None,
    level: float = 0.95,
    seed: int = 0,
) -> pd.DataFrame:
    """By how many percent `metric` is better at the rate where that is most, a row per policy, and how much of that is
    chance.

    The mean over seeds at each rate is compared with the baseline's (lower is better, but of throughput, goodput and
    requests that ended well). The largest gain of a sweep is positive also for a policy compared with itself, the
    more so the more rates it is picked from. So the same maximum is taken where there is no difference:

    - `p_swapped`: the two policies' labels swapped seed by seed, at all rates together (no difference means that
      either could have been either);
    - `p_policy` from `again`, summaries of the baseline on the same requests with other `policy_seed`s: pairs of
      its runs drawn at each seed;
    - `p_arrivals` from `others`, summaries of the baseline at other seeds, as many at least as in `summary`: two
      groups of seeds drawn from all, none in both. That is what a reader sees who cannot pair, and the
      hardest.

    Columns: `policy, up_to_pct, at_qps, seeds`; `swapped_pct, policy_pct, arrivals_pct`, which chance exceeds
    in 1 - level of cases; the p-values; `p_holm`, of the largest of them, corrected for the policies; `least_p`,
    below which so many seeds (and runs again) cannot bring it; `winner`: the policy, "no winner" (p_holm at least
    1 - level, or at that rate it lost more requests and `metric` is of those that are left: `lost_more`), or "too few
    seeds" (`least_p` at least 1 - level). NaN for what was not given. Raises InputError where runs are unpaired or
    missing, or the baseline's mean is not above 0 at some rate.
    """
    require_columns(summary, ("policy", "qps", "seed", metric))
    if baseline not in (names := list(summary["policy"].unique())):
        raise InputError(f"baseline={baseline!r} is not among the policies: {listed(names)}")
    table = paired_table(summary, metric)
    if holes := [name for name in names if not np.isfinite(table[name]).all()]:
        raise InputError(f"{listed(holes)}: {metric} is missing or infinite at some qps and seed")
    rng = np.random.default_rng(seed)
    sign = 1 if higher_is_better(metric) else -1
    base = _wide(table[baseline])
    if (none := base.columns[~(base.mean() > 0)]).size:
        raise InputError(f"{metric} of {baseline} is not above 0 at qps {none[0]:g}: there is no percentage of it")
    nulls = {"policy": np.empty(0), "arrivals": np.empty(0)}
    if again is not None:
        nulls["policy"] = _same_requests(base, again, metric, sign, rng)
    if others is not None:
        nulls["arrivals"] = _other_seeds(base, others, metric, sign, rng)
    rows = []
    for name in (one for one in names if one != baseline):
        values = _wide(table[name])
        gains = _gains(values.to_numpy().mean(axis=0), base.to_numpy().mean(axis=0), sign)
        largest = float(gains.max())
        swapped = _swapped(values.to_numpy(), base.to_numpy(), sign)
        at_qps = base.columns[int(gains.argmax())]
        row = {"policy": name, "up_to_pct": largest, "at_qps": at_qps, "seeds": len(base)}
        floors = [2 / (1 + len(swapped)), *(1 / (1 + len(null)) for null in nulls.values() if len(null))]
        row["least_p"] = max(floors)  # the labels as they are, are one of the ways to swap them
        for kind, null in (("swapped", swapped), *nulls.items()):
            row[f"{kind}_pct"] = float(np.quantile(null, level)) if len(null) else np.nan
            row[f"p_{kind}"] = (1 + float((null >= largest - 1e-9).sum())) / (1 + len(null)) if len(null) else np.nan
        rows.append(row)
    found = pd.DataFrame(rows)
    if found.empty:
        return found
    found["p_holm"] = holm(found[["p_swapped", "p_policy", "p_arrivals"]].max(axis=1))
    found["least_p"] = np.minimum(1.0, found["least_p"] * len(found))
    by_loss = flattered(found, summary, metric, baseline, rate="at_qps") > 0
    won = (found["p_holm"] < 1 - level) & ~by_loss
    found["winner"] = np.where(won, found["policy"], np.where(found["least_p"] < 1 - level, NO_WINNER, TOO_FEW))
    return found


def _wide(values: pd.Series) -> pd.DataFrame:
    """A row per seed, a column per rate."""
    wide = values.unstack("qps")
    if wide.isna().any().any():
        raise InputError("some seeds lack some rates: a maximum over rates needs every seed at every rate")
    return wide


def _gains(values: np.ndarray, base: np.ndarray, sign: int) -> np.ndarray:
    """By how many percent each is better than the base; ``sign`` 1 where higher is better, else -1."""
    return sign * 100 * (values - base) / base


def _swapped(values: np.ndarray, base: np.ndarray, sign: int) -> np.ndarray:
    signs = flips(len(base)) > 0
    kept = signs[:, :, None]
    one = np.where(kept, values, base).mean(axis=1)
    two = np.where(kept, base, values).mean(axis=1)
    return _gains(one, two, sign).max(axis=1)


def _same_requests(
    base: pd.DataFrame, again: pd.DataFrame, metric: str, sign: int, rng: np.random.Generator
) -> np.ndarray:
    require_columns(again, ("qps", "seed", "policy_seed", metric))
    stack = [base.to_numpy()]
    for number, runs in again.groupby("policy_seed"):
        wide = runs.pivot(index="seed", columns="qps", values=metric).reindex(index=base.index, columns=base.columns)
        if not np.isfinite(wide).all().all():
            raise InputError(f"again: a seed or rate of the baseline is missing, or infinite, at policy_seed {number}")
        stack.append(wide.to_numpy())
    if len(stack) < 2:
        raise InputError("again holds no run")
    runs = np.stack(stack)  # (runs again, seeds, rates)
    found = []
    for _ in range(DRAWS):
        first = rng.integers(len(runs), size=len(base))
        second = (first + rng.integers(1, len(runs), size=len(base))) % len(runs)
        one, two = (runs[which, np.arange(len(base))].mean(axis=0) for which in (first, second))
        found.append(_gains(one, two, sign).max())
    return np.array(found)


def _other_seeds(
    base: pd.DataFrame, others: pd.DataFrame, metric: str, sign: int, rng: np.random.Generator
) -> np.ndarray:
    require_columns(others, ("qps", "seed", metric))
    wide = others.pivot(index="seed", columns="qps", values=metric).reindex(columns=base.columns)
    if not np.isfinite(wide).all().all():
        raise InputError("others lacks some rate of the baseline at some seed, or is infinite there")
    if known := _common(wide.index, base.index):
        raise InputError(f"others holds seeds of the baseline itself, {listed(known)}: give other ones")
    if len(wide) < len(base):
        raise InputError(f"others holds {len(wide)} seeds; {len(base)} or more are needed, as many as are compared")
    runs = np.vstack([base.to_numpy(), wide.to_numpy()])
    found = []
    for _ in range(DRAWS):
        order = rng.permutation(len(runs))[: 2 * len(base)]
        one, two = (runs[part].mean(axis=0) for part in np.split(order, 2))
        found.append(_gains(one, two, sign).max())
    return np.array(found)


def _common(some: Iterable, others: Iterable) -> list:
    return sorted(set(some) & set(others))
