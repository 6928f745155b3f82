"""How far predicted latencies were from what came true."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from astrolabe_lab.errors import InputError

from .frames import NEEDED, require_columns


def relative_errors(results: pd.DataFrame) -> pd.Series:
    """(predicted - measured E2E) / measured E2E of every request that was predicted and ended well.

    Positive where the prediction was too high. The prediction is the one for the instance that was chosen.
    """
    require_columns(results, (*NEEDED, "predicted_e2e_s"))
    known = results[(results["status"] == "ok") & results["predicted_e2e_s"].notna()]
    e2e_s = known["finished_s"] - known["arrived_s"]
    return (known["predicted_e2e_s"] - e2e_s) / e2e_s


def summary(results: pd.DataFrame) -> dict[str, float]:
    """`predicted` (requests), `prediction_mae_pct` (mean of |error|) and `prediction_signed_pct` (mean error);
    empty where nothing was predicted."""
    errors = 100 * relative_errors(results).to_numpy()
    if not len(errors):
        return {}
    return {
        "predicted": len(errors),
        "prediction_mae_pct": float(np.abs(errors).mean()),
        "prediction_signed_pct": float(errors.mean()),
    }


def prediction_error(results: pd.DataFrame, by: Sequence[str] = ("policy", "qps")) -> pd.DataFrame:
    """The error of predicted E2E, a row per group, in percent of the measured E2E.

    Columns: `*by, predicted, mae_pct` (mean of |error|: the papers' prediction error), `signed_pct` (mean
    error: below 0 where predictions were too low), `p50_abs_pct, p90_abs_pct`. Of the default `by`, columns
    that the frame lacks are passed over. `by=["in_system"]` after `load_at_arrival` gives the error by load.
    Raises InputError where a column is missing, or nothing was predicted.
    """
    by = [key for key in by if key in results] if tuple(by) == ("policy", "qps") else list(by)
    require_columns(results, by)
    errors = relative_errors(results)
    if errors.empty:
        raise InputError("no request has a predicted_e2e_s and an end: prediction errors need a policy that predicts")
    known = (results["status"] == "ok") & results["predicted_e2e_s"].notna()
    table = results.loc[known.to_numpy(), by].assign(error_pct=100 * errors.to_numpy())
    whole = [((), table["error_pct"])]
    groups = table.groupby(by, sort=False, dropna=False, observed=True)["error_pct"] if by else whole
    rows = []
    for key, own in groups:
        marks = np.percentile(own.abs(), (50, 90))
        rows.append((*key, len(own), own.abs().mean(), own.mean(), *marks))
    columns = ["predicted", "mae_pct", "signed_pct", "p50_abs_pct", "p90_abs_pct"]
    return pd.DataFrame(rows, columns=[*by, *columns])


def load_at_arrival(results: pd.DataFrame, bins: int | Sequence[float] | None = None) -> pd.DataFrame:
    """The frame with `in_system`: requests of the same instance that had arrived before and not yet ended.

    `bins` turns the counts into intervals, by their edges or into so many of equal population
    (`pandas.cut`, `pandas.qcut`). Runs (`policy, qps, seed`) and instances are kept apart.
    """
    require_columns(results, (*NEEDED, "instance"))
    keys = [key for key in ("policy", "qps", "seed", "instance") if key in results]
    counts = np.zeros(len(results), np.int64)
    held = results.reset_index(drop=True)
    for _, rows in held[held["finished_s"].notna()].groupby(keys, sort=False):
        at = rows["arrived_s"].to_numpy()
        came = np.searchsorted(np.sort(at), at, side="left")  # those of the same instant are no load yet
        gone = np.searchsorted(np.sort(rows["finished_s"].to_numpy()), at, side="right")
        counts[rows.index] = came - gone
    if bins is not None:
        counts = pd.qcut(counts, bins, duplicates="drop") if isinstance(bins, int) else pd.cut(counts, bins)
    return results.assign(in_system=counts)
