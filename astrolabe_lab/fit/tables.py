"""The table form of a step cost: a regressor of any kind, trained on iterations and tabulated for the engine."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np

from astrolabe_lab.cost import COUNTS, REGIMES, Regime, StepCost, tabulate
from astrolabe_lab.errors import InputError
from astrolabe_lab.fit.iterations import check_iterations
from astrolabe_lab.fit.regression import Fit


@dataclass(frozen=True)
class TableFit:
    """A tabulated step cost: `cost`; `fits`, how far the table is from the iterations (regime -> Fit without
    coefficients); `residuals`, one row an iteration, with predicted_s and residual_pct."""

    cost: StepCost
    fits: dict[str, Fit]
    residuals: object = field(repr=False)


def fit_table(iterations, regressor, *, new_tokens, context_tokens, host_s=0.0):
    """The TableFit of a regressor trained on the iterations of each regime and tabulated at the given points.

    iterations: as `fit` takes them. `regressor`: an estimator with fit(X, y) and predict(X), X (n, 2) of new and
    context tokens, y (n,) seconds; each regime trains a copy. `new_tokens` and `context_tokens` are the grid's rising
    points. Tabulated are new and context tokens alone: the Astrolabe paper's memo has the same blind spot, as steps
    of equal counts may differ in their chunks; `residuals` shows what that costs.

    Raises InputError for iterations that break their contract, a regime without any, or a regressor that gives no
    seconds.
    """
    frame = check_iterations(iterations)
    if not all(callable(getattr(regressor, name, None)) for name in ("fit", "predict")):
        raise InputError(f"{regressor!r} is no estimator; give one with fit and predict, like scikit-learn's")
    grids, fitted = {}, {}
    for name in REGIMES:
        rows = frame[frame["mixed"] == (name == "mixed")]
        if rows.empty:
            raise InputError(f"iterations: none is {name}; a table needs some of both regimes")
        trained = copy.deepcopy(regressor)
        trained.fit(rows[["new_tokens", "context_tokens"]].to_numpy(), rows["seconds"].to_numpy() - host_s)
        grids[f"{name}_grid"] = tabulate(trained, new_tokens, context_tokens)
        fitted[name] = {count: (rows[count].min(), rows[count].max()) for count in COUNTS}
    host = Regime(host_s=host_s)
    cost = StepCost(host, host, **grids, fitted=fitted)
    counts = frame[[*COUNTS, "mixed"]].itertuples(index=False)
    predicted = np.array([cost.step_seconds(*row) for row in counts])
    residuals = frame.assign(predicted_s=predicted, residual_pct=100 * (predicted / frame["seconds"] - 1))
    fits = {}
    for name in REGIMES:
        off = residuals.loc[residuals["mixed"] == (name == "mixed"), "residual_pct"].abs()
        fits[name] = Fit((), float(off.mean()), float(off.max()), len(off))
    return TableFit(cost, fits, residuals)
