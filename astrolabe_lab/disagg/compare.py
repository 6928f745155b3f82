"""Who wins, and by how much: goodput of policies paired over seeds, with no winner inside the noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

GOODPUT = "goodput_share"
AGAIN = " (again)"  # behind a policy's name: its second run
EMULATED, SIMULATED = "emulated", "simulated"  # sources
SLOPE_S, SLOPE = "decode_slope_s", "decode slope (ms a stream)"


def winners(summary: pd.DataFrame, by: Sequence[str] = (), metric: str = GOODPUT) -> pd.DataFrame:
    """The best policy of each group by its mean ``metric`` (higher is better), and whether that is clear.

    ``summary``: rows of a sweep. Columns: ``*by, best, mean, undecided`` (the policies that paired seeds, corrected for
    the number of comparisons in all groups, cannot tell from it) and ``winner``: the best where nobody is undecided,
    else "".
    """
    import pandas as pd

    from astrolabe_lab import measure

    measure.require_columns(summary, (*by, "policy", "qps", "seed", metric))
    rows = []
    groups, level = _groups(summary, by)
    for key, runs in groups:
        loss = f"{metric}_loss"  # named so that measure knows whether requests that were lost are in it
        found = measure.best_and_undecided(runs.assign(**{loss: -runs[metric]}), loss, level)
        if len(found) > 1:
            raise InputError(f"by={list(by)} leaves several rates in one group: add qps to it")
        row = found.iloc[0]
        rows.append((*key, row["best"], -row["mean"], row["undecided"], "" if row["undecided"] else row["best"]))
    return pd.DataFrame(rows, columns=[*by, "best", "mean", "undecided", "winner"])


def gains(
    summary: pd.DataFrame, baseline: str, by: Sequence[str] = (), metric: str = GOODPUT, scale: float = 100.0
) -> pd.DataFrame:
    """How many points of ``metric`` each policy lies above ``baseline``: ``*by, policy, mean, low, high, clear``.

    ``scale``: how many points one is, 100 of a share, 1,000 of seconds that are told in ms.
    ``low``, ``high``: 95 % intervals of the paired differences that hold together for all groups, so that whoever
    picks the lowest or highest row of the table may believe its interval; ``clear``: it leaves out zero, and the paired
    test is as sure.
    """
    import pandas as pd

    from astrolabe_lab import measure

    parts = []
    groups, level = _groups(summary, by)
    for key, runs in groups:
        points = f"{metric}_points"
        found = measure.paired_difference(runs.assign(**{points: scale * runs[metric]}), points, baseline, level)
        keys = dict(zip(by, key, strict=True))
        parts.append(found.assign(**keys)[[*by, "policy", "mean", "low_all", "high_all", "clear"]])
    found = pd.concat(parts, ignore_index=True).rename(columns={"low_all": "low", "high_all": "high"})
    return found.assign(clear=found["clear"] & ((found["low"] > 0) | (found["high"] < 0)))


def _groups(summary: pd.DataFrame, by: Sequence[str]) -> tuple[list, float]:
    """(the groups of ``by`` with their keys, how sure each has to be for all of them together to be sure at 95 %)."""
    groups = list(summary.groupby(list(by), sort=False)) if by else [((), summary)]
    return groups, 1 - 0.05 / len(groups)


def told(row) -> str:
    """A row of ``gains`` as text: its mean and interval."""
    return f"{row['mean']:+.1f} [{row['low']:+.1f}, {row['high']:+.1f}]"


def slope(slope_s: float) -> str:
    """A decode slope in words."""
    return f"{_ms(slope_s):g} ms a stream"


def rounded(table: pd.DataFrame, digits: int = 3) -> pd.DataFrame:
    """``table`` for the eye: numbers to ``digits`` places, and decode slopes (a column, or a level of the index or of
    the columns) in ms and whole, for in seconds they would all be 0.0."""
    whole = table.get(SLOPE_S)
    table = table.round(digits)
    if whole is not None:
        table = table.assign(**{SLOPE_S: whole.map(_ms)}).rename(columns={SLOPE_S: SLOPE})
    for axis in ("index", "columns"):
        if SLOPE_S in getattr(table, axis).names:
            table = table.rename(**{axis: _ms}, level=SLOPE_S).rename_axis(**{axis: {SLOPE_S: SLOPE}})
    return table


def _ms(slope_s: float) -> float:
    return round(1e3 * slope_s, 9)


def shown(found: pd.DataFrame, columns: str | list[str], rows: str | list[str] = "policy") -> pd.DataFrame:
    """Rows of ``gains`` as a table of ``told``, with a star where the difference is clear; columns are sorted by the
    first of ``columns``, then the next."""
    texts = [told(row) + " *" * bool(row["clear"]) for row in found.to_dict("records")]
    return rounded(found.assign(text=texts).pivot(index=rows, columns=columns, values="text").sort_index(axis=1))


def means(summary: pd.DataFrame, by: Sequence[str], metric: str = GOODPUT) -> pd.DataFrame:
    """Mean of ``metric`` with its 95 % interval over seeds, and how far its seeds lie apart: ``*by, mean, low, high,
    seeds, spread`` (highest minus lowest)."""
    from astrolabe_lab import measure

    table = measure.over_seeds(summary, metric, by=by)
    apart = summary.groupby(list(by), sort=False, dropna=False)[metric].agg(lambda values: values.max() - values.min())
    return table.assign(spread=apart.to_numpy())


def several(summary: pd.DataFrame, by: Sequence[str], metrics: Sequence[str]) -> pd.DataFrame:
    """A table of what ``means`` says of each metric, as text: a row a point of ``by``, intervals each by itself."""
    import pandas as pd

    texts = {}
    for metric in metrics:
        table = means(summary, by, metric).set_index(list(by))
        texts[metric] = [f"{row.mean:.4g} [{row.low:.4g}, {row.high:.4g}]" for row in table.itertuples()]
    return rounded(pd.DataFrame(texts, index=table.index))


def beside(live: pd.DataFrame, simulated: pd.DataFrame, metric: str = GOODPUT) -> pd.DataFrame:
    """Means of ``metric`` over seeds in two worlds: a row for each setting of the live runs, indexed by what varies
    (``policy`` last), a column a source. Of no live runs it is empty, and their column is called EMULATED."""
    import pandas as pd

    from astrolabe_lab.sweep.cell import varied

    source = next(iter(live["source"]), EMULATED)
    both = pd.concat([live, simulated], ignore_index=True)
    by = sorted(varied(both), key="policy".__eq__)
    table = both.groupby([*by, "source"], sort=False)[metric].mean().unstack("source")
    return table.reindex(columns=pd.Index([source, SIMULATED], name="source")).dropna(subset=source)


def disagreements(table: pd.DataFrame, policy: str, rival: str) -> tuple[int, int]:
    """(in how many settings of ``beside``'s table the two worlds disagree about which of two policies is better, of how
    many)."""
    runs, rest = table.reset_index(), [name for name in table.index.names if name != "policy"]
    one, other = (runs[runs["policy"] == name].drop(columns="policy") for name in (policy, rival))
    pairs = one.merge(other, "inner" if rest else "cross", on=rest or None)
    ahead = [pairs[f"{source}_x"] - pairs[f"{source}_y"] for source in table.columns]
    return int((ahead[0] * ahead[1] < 0).sum()), len(pairs)


def apart(summary: pd.DataFrame, metric: str = GOODPUT) -> pd.Series:
    """How far two runs of one policy lie apart, wherever one ran twice (``NAME (again)``): A/A, of live runs."""
    from astrolabe_lab.sweep.cell import varied

    runs = summary.assign(policy=summary["policy"].str.removesuffix(AGAIN))
    twice = runs.groupby([*varied(runs), "seed"], sort=False)[metric].agg(["size", "min", "max"])
    return (twice["max"] - twice["min"])[twice["size"] == 2]


def rolling_tail(
    results: pd.DataFrame, window_s: float = 10.0, share: float = 0.95, by: Sequence[str] = ("policy",)
) -> pd.DataFrame:
    """The ``share`` quantile of TTFT of the requests that arrived in each window: ``*by, at_s, ttft_s, sent``.

    ``results``: a result frame, or several one under another that the columns ``by`` tell apart. A request without a
    first token counts as infinitely late.
    """
    import numpy as np
    import pandas as pd

    if not window_s > 0:
        raise InputError(f"window_s={window_s!r} must be a number > 0, in s")
    late = results["ttft_s"].fillna(np.inf)
    window = np.floor(results["arrived_s"] / window_s)
    rows = []
    for (*key, at), values in late.groupby([*(results[name] for name in by), window], sort=False):
        rows.append((*key, (at + 0.5) * window_s, np.quantile(values, share, method="higher"), len(values)))
    return pd.DataFrame(rows, columns=[*by, "at_s", "ttft_s", "sent"]).sort_values([*by, "at_s"])
