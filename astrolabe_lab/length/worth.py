"""What a predicted length is worth to a router: how wrong predictions are, and what runs lose by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError

if TYPE_CHECKING:
    import pandas as pd


def errors_of(frame: pd.DataFrame, lengths: Sequence[str], seed: int = 0) -> pd.DataFrame:
    """How wrong each way to predict is on a trace frame, a row each: ``lengths`` (specs of ``length.attach``).

    Columns: ``mae_tokens``; ``mape_pct``; ``log_bias``, the median of log(predicted / true); ``concordance``, that of
    ``metrics.concordance``: 1 is the right order, 0 is none. Raises InputError as ``attach`` does.
    """
    import numpy as np
    import pandas as pd

    from astrolabe_lab.length import attach, metrics

    true = frame["output_tokens"].to_numpy(float)
    rows = []
    for spec in lengths:
        told = attach(frame, spec, seed)["predicted_tokens"].to_numpy(float)
        rows.append(
            {
                "lengths": spec,
                "mae_tokens": np.abs(told - true).mean(),
                "mape_pct": 100 * (np.abs(told - true) / true).mean(),
                "log_bias": np.median(np.log(told / true)),
                "concordance": metrics.concordance(true, told, np.zeros(len(true), dtype=bool)),
            }
        )
    return pd.DataFrame(rows)


def by_lengths(summary: pd.DataFrame, policy: str) -> pd.DataFrame:
    """The runs of one policy, told apart by ``lengths`` in the column ``policy``, as comparisons and figures have it.

    Raises InputError for a policy without runs.
    """
    mine = summary[summary["policy"] == policy]
    if mine.empty:
        raise InputError(f"policy {policy!r} has no runs here; there are {', '.join(summary['policy'].unique())}")
    return mine.assign(policy=mine["lengths"])


def capacities(summary: pd.DataFrame, limit_s: float = 10.0, metric: str = "ttft_p99_all_s") -> pd.DataFrame:
    """The rate at which each policy's ``metric`` first exceeds ``limit_s``, seed by seed, from runs at several rates.

    Columns: ``policy, capacity_qps, censored, seed``; ``censored`` as ``measure.crossing`` has it, "above" or
    "below" where the curve crosses outside the rates that were run, so that the capacity is a bound. It is one of
    runs of just so many requests: it falls as runs get longer. Raises InputError for missing columns.
    """
    import pandas as pd

    from astrolabe_lab.measure import crossing, require_columns

    require_columns(summary, ("policy", "qps", "seed", metric))
    rows = []
    for (policy, seed), runs in summary.groupby(["policy", "seed"], sort=False):
        runs = runs.sort_values("qps")
        values = runs[metric].to_numpy(float)
        rows.append((policy, *crossing(runs["qps"].to_list(), values, values > limit_s, limit_s), seed))
    return pd.DataFrame(rows, columns=["policy", "capacity_qps", "censored", "seed"])


def gaps(values: pd.DataFrame, metric: str, baseline: str, level: float = 0.95) -> pd.DataFrame:
    """How far ``metric`` of each policy lies from the baseline's, paired over seeds: a row a policy.

    ``values`` has one row for each ``policy`` and ``seed``. Columns: ``policy``; ``own``, its mean; ``mean, low, high``
    of the difference; ``seeds``; and ``clear``, corrected for the comparisons made, as ``measure.paired_difference``.
    """
    from astrolabe_lab.measure import paired_difference

    one_point = values[["policy", "seed", metric]].assign(qps=0.0)
    found = paired_difference(one_point, metric, baseline, level)
    own = values.groupby("policy", sort=False)[metric].mean()
    return found.assign(own=found["policy"].map(own))[["policy", "own", "mean", "low", "high", "seeds", "clear"]]


def regained(values: pd.DataFrame, metric: str, best: str, worst: str, cured: str, level: float = 0.95) -> tuple:
    """(share, low, high): how much of the loss of policy ``worst`` against ``best`` the policy ``cured`` gets back.

    ``values`` has one row for each ``policy`` and ``seed``, at least two seeds. Loss and gain share their seeds and are
    both uncertain, so the interval is Fieller's (1954) for a ratio of means; where the loss itself is not clear of zero
    any share may be true, and the interval is infinite.
    """
    import numpy as np
    from scipy.stats import t

    table = values.pivot(index="seed", columns="policy", values=metric)
    loss, gain = table[worst] - table[best], table[worst] - table[cured]
    n, a, b = len(table), gain.mean(), loss.mean()
    (aa, ab), (_, bb) = np.cov(gain, loss) * t.ppf((1 + level) / 2, n - 1) ** 2 / n
    if b * b <= bb:
        return a / b, -math.inf, math.inf
    # The shares r for which the mean of gain - r * loss is not clear of zero lie between the roots of a quadratic.
    centre, half = a * b - ab, math.sqrt(max((a * b - ab) ** 2 - (a * a - aa) * (b * b - bb), 0.0))
    return a / b, (centre - half) / (b * b - bb), (centre + half) / (b * b - bb)
