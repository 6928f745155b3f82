"""Has the work changed since the length model was made? Rolling errors, and an alarm with a known false-alarm rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

KINDS = ("longer", "shorter", "worse")
BETS = (0.1, 0.3, 0.6, 0.9)  # shares of the largest bet that cannot ruin
LEAST_REFERENCE = 200


def rolling_error(observed: pd.DataFrame, constant: float, window: int = 500) -> pd.DataFrame:
    """The error over the last ``window`` requests, a row for each request from the first full window on.

    Columns: ``request`` (its number, from 1), ``arrived_s``, ``mae_tokens``, ``constant_mae_tokens`` (of telling
    ``constant`` to all), ``ratio`` (of the two: above 1 the model does harm) and ``log_bias``, the median of
    log(observed / predicted): 0.1 says that answers are 10 % longer than predicted. ``observed`` is that of
    ``read_observed``; rows that were cut off are left out. Raises InputError where there is no full window.
    """
    import numpy as np
    import pandas as pd

    whole = observed[~observed["censored"]] if "censored" in observed else observed
    if isinstance(window, bool) or not isinstance(window, int) or not 1 <= window <= len(whole):
        raise InputError(f"window={window!r} should be a whole number from 1 to {len(whole):,}, the requests observed")
    true, told = (whole[name].to_numpy(float) for name in ("output_tokens", "predicted_tokens"))
    rolled = pd.DataFrame(
        {
            "mae_tokens": np.abs(true - told),
            "constant_mae_tokens": np.abs(true - constant),
            "log_bias": np.log(true / told),
        }
    ).rolling(window)
    out = rolled[["mae_tokens", "constant_mae_tokens"]].mean()
    out["ratio"] = out["mae_tokens"] / out["constant_mae_tokens"]
    out["log_bias"] = rolled["log_bias"].median()
    out.insert(0, "request", np.arange(1, len(whole) + 1))
    out.insert(1, "arrived_s", whole["arrived_s"].to_numpy())
    return out.iloc[window - 1 :].reset_index(drop=True)


@dataclass(frozen=True, slots=True)
class Drift:
    """What the alarm found: ``kind`` (answers ``longer`` or ``shorter`` than predicted, or predictions ``worse``
    either way), after ``at`` requests, and ``since``, its guess of the last request before the change."""

    kind: str
    at: int
    since: int


class DriftAlarm:
    """Goes off when answers come out longer or shorter than predicted, or errors larger, than they were.

        alarm = DriftAlarm(reference.predicted_tokens, reference.output_tokens)
        found = alarm.update(latest.predicted_tokens, latest.output_tokens)   # None, or a Drift

    **False alarms.** While nothing changes, the mean number of requests up to a false alarm is at least
    ``false_alarm_every``, and the probability of one within n requests at most n / ``false_alarm_every``,
    whatever the distribution of errors. Two things are assumed: that errors do not depend on those before, and that
    mean ranks are within ``tolerance`` of the reference's, beside three standard errors of the reference.

    **How.** A request's log error, log(observed / predicted), and its absolute value are ranked among those of the
    reference, requests that nothing was wrong with (the more the better, at least 200). A rank has the mean 1/2
    until something changes. Against "at most 1/2 + tolerance" the alarm bets in three directions: after each
    request R becomes (1 + R) * (1 + bet * (rank - 1/2 - tolerance)). Such an R grows by at most 1 a request in
    expectation, so by optional stopping it takes ``false_alarm_every`` requests on average to reach that value;
    the mean of several R's keeps this. A real change lets it grow geometrically. ``tolerance`` is how far a mean
    rank may move for nothing: 0.03 lets pass answers that are some 4 % longer, at errors of 35 %.

    Source: the Shiryaev-Roberts procedure as an e-detector (Shin, Ramdas and Rinaldo, E-detectors, 2024).
    """

    def __init__(self, predicted, observed, *, false_alarm_every: int = 100_000, tolerance: float = 0.03) -> None:
        import numpy as np

        errors = log_errors(predicted, observed)
        if len(errors) < LEAST_REFERENCE:
            raise InputError(f"the reference has {len(errors)} requests: an alarm needs at least {LEAST_REFERENCE}")
        if not (isinstance(false_alarm_every, (int, float)) and 1 < false_alarm_every < math.inf):
            raise InputError(f"false_alarm_every={false_alarm_every!r} should be a number of requests above 1")
        if not (isinstance(tolerance, (int, float)) and 0 <= tolerance <= 0.3):
            raise InputError(f"tolerance={tolerance!r} should be a mean rank from 0 to 0.3")
        self.false_alarm_every, self.tolerance = false_alarm_every, tolerance
        self._signed, self._sizes = np.sort(errors), np.sort(np.abs(errors))
        self._centre = 0.5 + tolerance + 3 / math.sqrt(12 * len(errors))
        self._bets = np.array(BETS) / self._centre
        self.reset()

    def reset(self) -> None:
        """Begin anew, with the same reference."""
        import numpy as np

        self.found: Drift | None = None
        self.requests = 0
        self._r = np.zeros((len(KINDS), len(BETS)))
        self._climb, self._foot = np.zeros(len(KINDS)), np.zeros(len(KINDS), dtype=int)

    @property
    def level(self) -> float:
        """How near the alarm is: it goes off where this reaches 1."""
        return float(self._r.mean()) / self.false_alarm_every

    def update(self, predicted, observed) -> Drift | None:
        """Take in requests in the order of their arrival; the drift found, now or before. Requests after the alarm
        are not looked at; ``reset`` begins anew."""
        import numpy as np

        for ranks in self._ranks(log_errors(predicted, observed)):
            if self.found:
                break
            self.requests += 1
            factors = 1.0 + self._bets * (ranks[:, None] - self._centre)
            self._r = (1.0 + self._r) * factors
            self._climb += np.log(factors[:, len(BETS) // 2])
            fell = self._climb <= 0
            self._climb[fell], self._foot[fell] = 0.0, self.requests
            if self.level >= 1:
                kind = int(self._r.mean(axis=1).argmax())
                self.found = Drift(KINDS[kind], self.requests, int(self._foot[kind]))
        return self.found

    def _ranks(self, errors) -> np.ndarray:
        """(n, 3): the share of the reference below each error, half of what ties; as KINDS have it."""
        import numpy as np

        def among(reference, values):
            below, upto = (np.searchsorted(reference, values, side=side) for side in ("left", "right"))
            return (below + upto) / (2 * len(reference))

        longer = among(self._signed, errors)
        return np.column_stack([longer, 1 - longer, among(self._sizes, np.abs(errors))])


def log_errors(predicted, observed) -> np.ndarray:
    """log(observed / predicted), float64 (n,). Raises InputError unless both are n numbers of tokens >= 1."""
    import numpy as np

    told, true = np.atleast_1d(np.asarray(predicted, float)), np.atleast_1d(np.asarray(observed, float))
    if told.shape != true.shape or told.ndim != 1:
        raise InputError(f"predicted {told.shape} and observed {true.shape} differ in shape: give both of each")
    for name, values in (("predicted", told), ("observed", true)):
        if not (np.isfinite(values) & (values >= 1)).all():
            raise InputError(f"{name} holds what is no number of tokens >= 1")
    return np.log(true / told)
