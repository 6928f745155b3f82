"""A cheap correction of a length model: a monotone map of its predictions, applied where it is shown to help."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.length import survival
from astrolabe_lab.length.baselines import Constant
from astrolabe_lab.length.estimator import Estimator

if TYPE_CHECKING:
    import numpy as np

MOST_KNOTS, ROWS_A_KNOT = 20, 40
LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
LEAST_ROWS, LEAST_JUDGED = 100, 30
CHECKED = 0.4  # the share of the latest rows on which a map has to show that it helps


@dataclass(frozen=True, slots=True)
class MonotoneMap:
    """A non-decreasing map of predicted lengths: linear on the log scale between knots, of slope 1 outside them.

    ``predicted`` and ``observed``: the knots, tokens, float64 (k,). One knot is a constant factor. It never turns the
    order of two requests round.
    """

    predicted: np.ndarray
    observed: np.ndarray

    @classmethod
    def learn(cls, predicted, lengths, censored, knots: int) -> MonotoneMap:
        """The map through the median lengths of ``knots`` equal shares of the rows, made monotone by least squares
        on the log scale (isotonic regression); medians are Kaplan-Meier's where answers were cut off."""
        import numpy as np
        from scipy.optimize import isotonic_regression

        shares = np.array_split(np.argsort(predicted, kind="stable"), knots)
        shares = [rows for rows in shares if not censored[rows].all()]  # a share of cut answers alone tells no median
        if len(shares) < 2:  # a factor, which suits short and long answers alike
            return cls(np.ones(1), survival.quantiles(lengths / predicted, censored, [0.5]))
        told = np.array([np.median(predicted[rows]) for rows in shares])
        came = np.array([survival.quantiles(lengths[rows], censored[rows], [0.5])[0] for rows in shares])
        weights = np.array([len(rows) for rows in shares])
        told, first = np.unique(told, return_index=True)  # a share of equal predictions may repeat its neighbour's
        came = np.exp(isotonic_regression(np.log(came[first]), weights=weights[first]).x)
        return cls(told, came)

    def __call__(self, predicted) -> np.ndarray:
        import numpy as np

        told, came = np.log(self.predicted), np.log(self.observed)
        asked = np.log(np.asarray(predicted, dtype=np.float64))
        inside = np.interp(asked, told, came)
        return np.exp(inside + np.minimum(asked - told[0], 0) + np.maximum(asked - told[-1], 0))


@dataclass
class Recalibrated(Estimator):
    """Another length model whose medians go through a MonotoneMap, the other quantiles with them.

    ``fit`` keeps the fitted ``model`` as it is and learns the map alone, from as few as 100 rows. Quantiles keep
    their ratio to the median that the model gave them, times a factor a level that makes them hold on these rows.
    """

    model: Estimator = field(default_factory=Constant)
    knots: int | None = None
    kind = "recalibrated"

    def __post_init__(self):
        if not isinstance(self.model, Estimator) or isinstance(self.model, Recalibrated):
            raise InputError(f"recalibrated: model={self.model!r} should be a length model, not recalibrated itself")
        if self.knots is not None and (isinstance(self.knots, bool) or not 1 <= self.knots <= MOST_KNOTS):
            raise InputError(f"recalibrated: knots={self.knots!r} should be from 1 (a factor) to {MOST_KNOTS}, or None")

    def _learn(self, samples):
        self._learn_from(self._base(samples.prompts, samples.models), samples.lengths, samples.censored)

    def _base(self, prompts, models) -> np.ndarray:
        """What the model says: the median, then LEVELS, float64 (n, 1 + levels)."""
        return self.model.predict_quantiles(prompts, (0.5, *LEVELS), models)

    def _learn_from(self, base, lengths, censored) -> None:
        import numpy as np

        knots = self.knots or max(1, min(MOST_KNOTS, len(lengths) // ROWS_A_KNOT))
        self._map = MonotoneMap.learn(base[:, 0], lengths, censored, knots)
        ratios = lengths[:, None] / (self._map(base[:, 0])[:, None] * base[:, 1:] / base[:, :1])
        columns = zip(ratios.T, LEVELS, strict=True)
        self._factors = np.array([survival.quantiles(ratio, censored, [level])[0] for ratio, level in columns])
        self._factors[LEVELS.index(0.5)] = 1.0

    def _note(self, samples):
        super()._note(samples)
        self.models_ = list(self.model.models_)  # the map is one for all

    def _quantiles(self, prompts, models, levels):
        import numpy as np

        base = self.model.predict_quantiles(prompts, (0.5, *levels), models)
        factors = np.exp(np.interp(levels, LEVELS, np.log(self._factors)))
        return self._map(base[:, 0])[:, None] * base[:, 1:] / base[:, :1] * factors

    def _write(self, folder: Path) -> dict:
        self.model.save(folder / "model")
        return {
            "predicted": self._map.predicted.tolist(),
            "observed": self._map.observed.tolist(),
            "factors": self._factors.tolist(),
        }

    def _read(self, folder: Path, noted: dict) -> None:
        import numpy as np

        from astrolabe_lab.length import artifact

        self.model = artifact.load(folder / "model")
        self._map = MonotoneMap(np.array(noted["predicted"]), np.array(noted["observed"]))
        self._factors = np.array(noted["factors"])


@dataclass(frozen=True, slots=True)
class Verdict:
    """What held-out rows say of a new model beside the old: ``helps``, the mean absolute errors in tokens on the same
    ``rows``, and ``low``, ``high``: the interval of how much the error fell."""

    helps: bool
    mae_before: float
    mae_after: float
    low: float
    high: float
    rows: int


def compare(lengths, before, after, prompts=None, tests: int = 1, level: float = 0.95) -> Verdict:
    """Whether ``after`` has clearly smaller absolute errors than ``before`` on the rows: a paired interval over the
    prompts (``metrics.mean_over_prompts``).

    ``prompts`` (n,): None where no two rows answer the same. ``tests``: how many such comparisons are made at once;
    the level is corrected for it. Raises InputError as ``check_judged`` does.
    """
    import numpy as np

    from astrolabe_lab.length.metrics import mean_over_prompts

    prompts = range(len(lengths)) if prompts is None else prompts
    check_judged(prompts)
    lengths, before, after = (np.asarray(values, dtype=np.float64) for values in (lengths, before, after))
    errors_before, errors_after = np.abs(lengths - before), np.abs(lengths - after)
    if np.array_equal(before, after):
        mean = float(errors_before.mean())
        return Verdict(False, mean, mean, 0.0, 0.0, len(lengths))
    _, low, high = mean_over_prompts(errors_before - errors_after, prompts, 1 - (1 - level) / tests)
    return Verdict(low > 0, float(errors_before.mean()), float(errors_after.mean()), low, high, len(lengths))


def check_judged(prompts) -> None:
    """Raise InputError for fewer than 30 distinct prompts, whose interval means little with errors so skewed."""
    if len(set(prompts)) < LEAST_JUDGED:
        raise InputError(
            f"{len(set(prompts))} held-out prompts tell nothing: at least {LEAST_JUDGED} with whole answers are needed"
        )


def recalibrate(estimator: Estimator, prompts, lengths, *, models=None, censored=None) -> tuple[Estimator, Verdict]:
    """(the recalibrated model, verdict) if a map helps on the latest rows, else (the estimator as it was, verdict).

    Rows are recent answers, oldest first, at least 100. A factor and a map of several knots are learned on the first
    60 % and each compared with the estimator on the last 40 %, answers that were cut off apart. The one of smaller
    error is taken if its error is clearly smaller than the estimator's (95 %, corrected for two tries), so that where
    nothing is to be gained at most one in twenty calls changes the model. An estimator that is recalibrated already is
    compared with a new map of the model beneath it. Raises InputError for too few rows, or rows that do not fit.
    """
    import numpy as np

    from astrolabe_lab.length.samples import Samples, check_samples

    rows = check_samples(prompts, lengths, models, censored)
    if len(rows) < LEAST_ROWS:
        raise InputError(f"{len(rows)} rows are too few to recalibrate on: at least {LEAST_ROWS} are needed")
    beneath = estimator.model if isinstance(estimator, Recalibrated) else estimator
    names = rows.models if beneath.models_ else None
    base = Recalibrated(beneath)._base(rows.prompts, names)  # once: the model is what takes time
    told = estimator._map(base[:, 0]) if isinstance(estimator, Recalibrated) else base[:, 0]
    cut = len(rows) - int(len(rows) * CHECKED)
    seen = Samples(rows.prompts[:cut], rows.lengths[:cut], names and names[:cut], rows.censored[:cut])
    checked = np.flatnonzero(~rows.censored[cut:]) + cut
    tried = []
    for knots in (1, None):
        new = Recalibrated(beneath, knots)
        new._learn_from(base[:cut], seen.lengths, seen.censored)
        new._note(seen)
        mapped = np.maximum(new._map(base[checked, 0]), 1)
        verdict = compare(rows.lengths[checked], told[checked], mapped, [rows.prompts[i] for i in checked], tests=2)
        tried.append((verdict, new))
    verdict, new = min(tried, key=lambda one: one[0].mae_after)
    return (new if verdict.helps else estimator), verdict
