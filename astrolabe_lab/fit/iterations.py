"""From measured iterations to a step cost, with everything one must know before trusting it.

fitted = fit(iterations)         # new_tokens, sequences, context_tokens, attention or chunks, seconds, mixed
fitted.cost                      # a StepCost
fitted.summary()                 # residuals, ranges and intervals by regime
fitted.outside(other_steps)      # what lies where nothing was measured
"""

from __future__ import annotations

import warnings as python_warnings
from dataclasses import dataclass, field, replace

import numpy as np

from astrolabe_lab.cost import COUNTS, KEYS, REGIMES, Regime, StepCost
from astrolabe_lab.errors import InputError
from astrolabe_lab.fit.regression import solve
from astrolabe_lab.rng import stream

COUNT_OF = dict(zip(KEYS[2:], COUNTS, strict=True))  # coefficient -> what it is a price of
COLLINEAR = 1e-6  # share of a column's length that other columns do not explain, below which it is dropped
WIDE = 0.5  # an interval wider than this share of its coefficient is said to be uncertain


class FitWarning(UserWarning):
    """Something about a fit, or about using it, that its numbers do not show."""


@dataclass(frozen=True)
class RegimeFit:
    """One regime of a step cost and how well it holds.

    intervals: coefficient -> (low, high), 95 % by resampling the iterations. error_pct, worst_pct and bias_pct are
    the mean absolute, largest absolute and mean signed residual in percent of the measured time. ranges: count ->
    (lowest, highest) measured. condition: of the design with columns scaled to one length (above 30, coefficients
    are worth less than predictions). notes: what the data could not tell.
    """

    coefficients: Regime
    intervals: dict[str, tuple[float, float]]
    error_pct: float
    worst_pct: float
    bias_pct: float
    points: int
    condition: float
    ranges: dict[str, tuple[float, float]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepFit:
    """A step cost fitted to iterations: `cost`, the `regimes`' RegimeFits, and `residuals`, one row an iteration."""

    cost: StepCost
    regimes: dict[str, RegimeFit]
    residuals: object = field(repr=False)  # DataFrame: the iterations with predicted_s and residual_pct

    @property
    def warnings(self):
        """Every note, with its regime."""
        return tuple(f"{name}: {note}" for name, one in self.regimes.items() for note in one.notes)

    @property
    def ranges(self):
        """{regime: {count: (lowest, highest)}} that was measured."""
        return {name: one.ranges for name, one in self.regimes.items()}

    def summary(self):
        """A frame with one row a regime and coefficient: value, low, high, error_pct, worst_pct, bias_pct, points."""
        import pandas as pd

        rows = [
            {
                "regime": name,
                "coefficient": key,
                "value_s": getattr(one.coefficients, key),
                "low_s": one.intervals.get(key, (np.nan, np.nan))[0],
                "high_s": one.intervals.get(key, (np.nan, np.nan))[1],
                "error_pct": one.error_pct,
                "worst_pct": one.worst_pct,
                "bias_pct": one.bias_pct,
                "points": one.points,
            }
            for name, one in self.regimes.items()
            for key in KEYS
            if getattr(one.coefficients, key) > 0 or key in one.intervals
        ]
        return pd.DataFrame(rows)

    def outside(self, iterations):
        """Sentences on how many of other iterations lie outside the measured ranges; empty where none does."""
        return outside(self.ranges, check_iterations(iterations, timed=False))


def fit(iterations, *, host_s=0.0, base=None, draws=200, seed=0, quiet=False):
    """The StepFit of a frame of measured iterations, one row each.

    Columns: new_tokens, sequences, context_tokens, seconds, and `attention` (sum of c * kv + c**2 / 2 over the
    prefill chunks) or `chunks` (a list of (c, kv) pairs a row); `mixed` where it is not to be told from new_tokens >
    sequences. Each regime is a least squares of relative residuals with coefficients >= 0. `host_s` is a part of
    every step that is known from elsewhere. A regime without iterations is `base`'s (a StepCost), with its grid and
    padding, and so is `frontend_s`. `draws` resamples of the rows (stream "fit") give the intervals.

    What the data cannot tell apart is dropped and named in the notes, which are also given as FitWarnings unless
    `quiet`. Raises InputError for a column that is missing or breaks its contract, or a regime with too few
    iterations.
    """
    frame = check_iterations(iterations)
    host_s = Regime(host_s=host_s).host_s
    regimes, predicted = {}, np.full(len(frame), np.nan)
    for name in REGIMES:
        rows = (frame["mixed"] == (name == "mixed")).to_numpy()
        if not rows.any():
            if base is None:
                raise InputError(f"iterations: none is {name}; measure some, or give base=StepCost to take it from")
            continue
        regimes[name] = one = _fit_regime(frame[rows], name, host_s, draws, seed)
        predicted[rows] = _seconds(one.coefficients, frame[rows])
    cost = _cost(regimes, base)
    residuals = frame.assign(predicted_s=predicted, residual_pct=100 * (predicted / frame["seconds"] - 1))
    fitted = StepFit(cost, regimes, residuals)
    for note in () if quiet else fitted.warnings:
        python_warnings.warn(note, FitWarning, stacklevel=2)
    return fitted


def _cost(regimes, base):
    """The regimes that were fitted, and all else as `base` has it."""
    measured = {name: one.coefficients for name, one in regimes.items()}
    ranges = {name: one.ranges for name, one in regimes.items()}
    if base is None:
        return StepCost(**measured, fitted=ranges)
    grids = {f"{name}_grid": None for name in measured}
    padded = {"pad_sizes": ()} if "decode" in measured else {}  # fitted to the counts as they are
    return replace(base, **measured, **grids, **padded, fitted=base.fitted | ranges)


def check_iterations(iterations, timed=True):
    """The iterations as a frame with `attention` and `mixed` filled in. Raises InputError as `fit` does."""
    import pandas as pd

    if not isinstance(iterations, pd.DataFrame):
        raise InputError(f"iterations are a DataFrame, one row a step, not {type(iterations).__name__}")
    frame = iterations.reset_index(drop=True)
    if "attention" not in frame and "chunks" in frame:
        frame = frame.drop(columns="chunks").assign(attention=[_pairs(chunks) for chunks in frame["chunks"]])
    need = [*COUNTS, *(["seconds"] if timed else [])]
    if missing := [name for name in need if name not in frame]:
        raise InputError(
            f"iterations lack {', '.join(missing)}; needed are {', '.join(need)} (attention may be given as chunks)"
        )
    for name in need:
        values = pd.to_numeric(frame[name], errors="coerce").to_numpy(np.float64)
        least = {"new_tokens": 1, "sequences": 1}.get(name, 0)
        bad = np.flatnonzero(~(np.isfinite(values) & (values >= least)) | ((name == "seconds") & (values == 0)))
        if bad.size:
            allowed = "above 0" if name == "seconds" else f"{least} or more"
            raise InputError(
                f"iterations: row {bad[0]} has {name}={frame[name].iloc[bad[0]]!r}; every row needs a number {allowed}"
            )
        frame[name] = values
    if (short := np.flatnonzero(frame["sequences"] > frame["new_tokens"])).size:
        row = frame.iloc[short[0]]
        raise InputError(
            f"iterations: row {short[0]} schedules {row.sequences:g} sequences with {row.new_tokens:g} new tokens; "
            "each gets at least one"
        )
    if "mixed" not in frame:
        frame["mixed"] = (frame["new_tokens"] > frame["sequences"]) | (frame["attention"] > 0)
    elif not set(frame["mixed"].unique()) <= {True, False}:
        raise InputError("iterations: mixed must be true or false in every row")
    frame["mixed"] = frame["mixed"].astype(bool)
    return frame


def outside(ranges, frame):
    """Sentences on the iterations (checked) that lie outside {regime: {count: (lowest, highest)}}."""
    said = []
    for name, rows in ((name, frame[frame["mixed"] == (name == "mixed")]) for name in ranges):
        for count, (low, high) in ranges[name].items():
            beyond = (rows[count] < low) | (rows[count] > high)
            if beyond.any():
                said.append(
                    f"{name}: {count} of {beyond.mean():.1%} of {len(rows):,} steps (up to {rows[count].max():g}) "
                    f"lies outside the fitted {low:g}..{high:g}"
                )
    return said


def _pairs(chunks):
    try:
        return float(sum(c * kv + c * c / 2 for c, kv in chunks))
    except TypeError:
        raise InputError(
            f"iterations: chunks={chunks!r} is no list of (chunk tokens, context tokens), like [(512, 0)]"
        ) from None


def _seconds(regime, frame):
    return StepCost(regime, regime).step_seconds(*(frame[name].to_numpy() for name in COUNTS))


def _fit_regime(frame, name, host_s, draws, seed):
    seconds = frame["seconds"].to_numpy()
    columns = {"base_s": np.ones(len(frame))} | {key: frame[count].to_numpy() for key, count in COUNT_OF.items()}
    columns, notes = _told_apart(columns, seconds)
    if len(frame) <= len(columns):
        raise InputError(
            f"iterations: {len(frame)} {name} ones cannot fit {len(columns)} coefficients; measure more of them"
        )
    design = np.column_stack(list(columns.values())) / seconds[:, None]
    target = 1 - host_s / seconds
    values = solve(design, target)
    low, high = _intervals(design, target, draws, seed, name)
    regime = Regime(host_s=host_s, **dict(zip(columns, values.tolist(), strict=True)))
    for key, value, lowest, highest in zip(columns, values, low, high, strict=True):
        if value == 0:
            notes.append(f"{key} is 0: the iterations ask for none, or for less than none")
        elif highest - lowest > WIDE * value:
            notes.append(f"{key}={value:.3g} is uncertain ({lowest:.3g}..{highest:.3g}); spread {_count(key)} wider")
    if (condition := float(np.linalg.cond(design / np.linalg.norm(design, axis=0)))) > 30:
        notes.append(f"condition {condition:.0f}: coefficients trade off against each other; trust their sum alone")
    residual = 100 * (design @ values - target)
    return RegimeFit(
        regime,
        {key: (float(a), float(b)) for key, a, b in zip(columns, low, high, strict=True)},
        float(np.abs(residual).mean()),
        float(np.abs(residual).max()),
        float(residual.mean()),
        len(frame),
        condition,
        {count: (float(frame[count].min()), float(frame[count].max())) for count in COUNTS},
        tuple(notes),
    )


def _count(key):
    return COUNT_OF.get(key, "the counts")


def _told_apart(columns, seconds):
    """The columns that say something of their own, in order, and a note for each that does not."""
    kept, notes = {}, []
    for key, column in columns.items():
        if not column.any():
            if key != "attention_s":
                notes.append(f"{key} is unknown: {_count(key)} is 0 in every iteration")
            continue
        weighted = column / seconds
        if kept:
            others = np.column_stack(list(kept.values())) / seconds[:, None]
            others /= np.linalg.norm(others, axis=0)
            rest = weighted - others @ np.linalg.lstsq(others, weighted, rcond=None)[0]
            if np.linalg.norm(rest) < COLLINEAR * np.linalg.norm(weighted):
                notes.append(f"{key} is counted in {', '.join(kept)}: {_count(key)} never varies apart from them")
                continue
        kept[key] = column
    return kept, notes


def _intervals(design, target, draws, seed, name):
    """95 % intervals (low (k,), high (k,)) of the coefficients, by resampling rows."""
    rng = stream(seed, f"fit-{name}")
    n, scale = len(target), np.linalg.norm(design, axis=0)
    both = np.hstack([design / scale, target[:, None]])
    drawn = np.empty((draws, design.shape[1]))
    for i in range(draws):
        times = np.bincount(rng.integers(0, n, n), minlength=n)
        gram = both.T @ (both * times[:, None])
        root = np.linalg.cholesky(gram + 1e-13 * np.trace(gram) * np.eye(len(gram))).T  # k rows, the same solution
        drawn[i] = solve(root[:, :-1], root[:, -1]) / scale
    return np.quantile(drawn, [0.025, 0.975], axis=0)
