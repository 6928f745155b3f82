"""What to do about what was observed: say how the length model fares, recalibrate it, train it anew."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.length.drift import LEAST_REFERENCE, Drift, DriftAlarm
from astrolabe_lab.length.estimator import Estimator
from astrolabe_lab.length.observed import require_rows
from astrolabe_lab.length.recalibrated import Recalibrated, Verdict, check_judged, compare

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

HELD_OUT = 0.2
REFERENCE = 1000  # answers, where there are enough
FROM_A_MODEL = ("tagger", "simulated")  # of all that a journal's ``predicted_tokens_from`` may say


@dataclass(frozen=True, slots=True)
class Fare:
    """How a length model fares: over the last ``window`` whole answers that it predicted, its mean absolute error, the
    constant's, and the median of log(observed / predicted); over all, the drift that the alarm found, if any, in
    ``watched`` answers after the ``reference``. Left out are ``censored`` answers, which were cut off, and
    ``not_predicted`` ones, of which the router was told a length by a client or a constant."""

    window: int
    mae_tokens: float
    constant_mae_tokens: float
    log_bias: float
    reference: int
    watched: int
    drift: Drift | None
    censored: int
    not_predicted: int


def fare(
    observed: pd.DataFrame,
    constant: float,
    *,
    window: int = 500,
    reference: int | None = None,
    false_alarm_every: int = 100_000,
) -> Fare:
    """How the predictions in ``observed`` (that of ``read_observed``) fare against telling ``constant`` to all.

    The first ``reference`` whole answers that the length model predicted are what the alarm compares the rest with
    (None: 1,000, or half of fewer than 2,000); requests in ``drift`` count from the first of them. Raises InputError
    for too few.
    """
    import numpy as np

    predicted = observed["predicted_from"].isin(FROM_A_MODEL)
    whole = observed[predicted & ~observed["censored"]]
    not_predicted, censored = int((~predicted).sum()), int((predicted & observed["censored"]).sum())
    whole.attrs = observed.attrs | {"not predicted by a length model": not_predicted, "cut off": censored}
    if reference is None:
        require_rows(whole, 2 * LEAST_REFERENCE, "an alarm")
        reference = min(REFERENCE, len(whole) // 2)
    elif reference < LEAST_REFERENCE:
        raise InputError(f"reference={reference} should be at least {LEAST_REFERENCE} answers")
    require_rows(whole, reference + 1, f"an alarm with a reference of {reference:,}")
    told, true = (whole[name].to_numpy(float) for name in ("predicted_tokens", "output_tokens"))
    alarm = DriftAlarm(told[:reference], true[:reference], false_alarm_every=false_alarm_every)
    found = alarm.update(told[reference:], true[reference:])
    latest = slice(max(0, len(whole) - window), None)
    return Fare(
        window=min(window, len(whole)),
        mae_tokens=float(np.abs(true - told)[latest].mean()),
        constant_mae_tokens=float(np.abs(true - constant)[latest].mean()),
        log_bias=float(np.median(np.log(true / told)[latest])),
        reference=reference,
        watched=len(whole) - reference,
        drift=found and Drift(found.kind, found.at + reference, found.since + reference),
        censored=censored,
        not_predicted=not_predicted,
    )


def rows_of(observed: pd.DataFrame, estimator: Estimator) -> tuple[list[str], np.ndarray, list[str] | None, np.ndarray]:
    """(prompts, lengths, models or None, censored), as ``fit`` takes them, of rows whose prompts the journal kept.

    Raises InputError where it kept none, or where the estimator tells serving models apart and it kept no names.
    """
    kept = observed[observed["prompt"].notna()]
    if kept.empty:
        raise InputError(
            "the journal holds no prompts, so there is nothing to learn from: have the router keep them "
            "(astrolabe route --journal-prompts)"
        )
    models = None
    if estimator.models_:
        if kept["model"].isna().any():
            raise InputError("the length model tells serving models apart, and the journal does not say which answered")
        models = kept["model"].tolist()
    return kept["prompt"].tolist(), kept["output_tokens"].to_numpy(float), models, kept["censored"].to_numpy(bool)


def held_out(prompts: list[str], seed: int, share: float = HELD_OUT) -> np.ndarray:
    """True for the rows whose prompt is held out, about ``share`` of the distinct prompts: by its hash, so that a
    prompt is on the same side wherever it comes again. bool (n,)."""
    import numpy as np

    digests = (hashlib.blake2b(f"{seed}\0{p}".encode("utf-8", "replace"), digest_size=8).digest() for p in prompts)
    return np.fromiter((int.from_bytes(d, "big") < share * 2**64 for d in digests), dtype=bool, count=len(prompts))


@dataclass(frozen=True, slots=True)
class Retrained:
    """A model trained on what was observed, and what its held-out rows say: against the model before it, and
    against telling them the median of the training rows; ``unknown_model``: how many more there were, by serving
    models that one of the two does not know."""

    model: Estimator
    against_old: Verdict
    against_constant: Verdict
    trained_on: int
    unknown_model: int


def retrain(estimator: Estimator, observed: pd.DataFrame, *, seed: int = 0, window: int | None = None) -> Retrained:
    """A new model of the same kind and options as ``estimator``, trained on the observed rows, and its merits.

    ``window``: the latest so many rows only. A fifth of the distinct prompts is held out (``held_out``); answers
    that were cut off are learned from as such, and left out of errors. A recalibrated model gives way to a new one
    of the kind beneath it. Raises InputError for too few rows, or rows without prompts.
    """
    import numpy as np

    observed = observed if window is None else observed.tail(window)
    require_rows(observed, 200, "training")
    prompts, lengths, models, censored = rows_of(observed, estimator)
    out = held_out(prompts, seed)
    beneath = estimator.model if isinstance(estimator, Recalibrated) else estimator
    new = type(beneath)(**copy.deepcopy(beneath.get_params()))

    def of(rows):
        return [prompts[i] for i in np.flatnonzero(rows)], models and [models[i] for i in np.flatnonzero(rows)]

    learned, learned_names = of(~out)
    judged, unknown = out & ~censored, 0
    if models:
        known = np.isin(models, sorted(set(learned_names) & set(estimator.models_)))
        judged, unknown = judged & known, int((judged & ~known).sum())
    some, names = of(judged)
    check_judged(some)  # before the training, not after it
    new.fit(learned, lengths[~out], models=learned_names, censored=censored[~out])
    true, told = lengths[judged], new.predict(some, names)
    against_old = compare(true, estimator.predict(some, names), told, some)
    against_constant = compare(true, np.full(len(true), new.median_tokens_), told, some)
    new.metrics = {
        "held_out": len(true),
        "mae_tokens": against_old.mae_after,
        "mae_tokens_before": against_old.mae_before,
        "constant_mae_tokens": against_constant.mae_before,
    }
    return Retrained(new, against_old, against_constant, new.n_samples_, unknown)
