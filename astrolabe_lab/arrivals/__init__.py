"""When requests arrive: a sequence at rate 1 for each seed, stretched to the rate wanted, perhaps in bursts."""

from __future__ import annotations

import dataclasses
import math
import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING

from astrolabe_lab.arrivals.profiles import PROFILES, Bursts, Diurnal, Ramp
from astrolabe_lab.errors import InputError
from astrolabe_lab.rng import stream
from astrolabe_lab.trace.columns import as_floats, checked_requests

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

KINDS = ("poisson", "gamma", "constant")
SPECS = "poisson, gamma, constant, bursts, ramp, diurnal or trace"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process without its rate: gaps of a ``kind`` at rate 1, and how the rate moves, if it does."""

    kind: str
    alpha: float | None = None
    profile: Bursts | Ramp | Diurnal | None = None

    def times(self, n: int, qps: float, seed: int) -> np.ndarray:
        """Return n arrival times in seconds at a mean of ``qps`` a second: float64 (n,), in order."""
        import numpy as np

        load_s = unit_arrivals(self.kind, n, seed, self.alpha) / qps
        if self.profile is None:
            return load_s
        return np.maximum.accumulate(self.profile.when(load_s, n / qps, seed))


def parse(spec: str, alpha: float | None = None) -> Arrivals:
    """Return the process that ``NAME[:key=value,...]`` names.

    ``poisson``; ``gamma:alpha=0.25``; ``constant``; ``trace`` (the trace's own times); ``bursts:high=1.7,
    high_s=1,low_s=3,durations=fixed``, ``ramp:start=0.5`` and ``diurnal:amplitude=0.5,period_s=86400,
    peak_s=54000,start_s=0`` with their defaults (`arrival_profiles`), each of which also takes ``alpha`` for
    gamma instead of exponential gaps. ``alpha`` may come as an argument as well. Raises InputError for another
    name or option.
    """
    name, colon, text = str(spec).partition(":")
    if name not in (*KINDS, *PROFILES, "trace"):
        raise InputError(f"arrivals {spec!r} are unknown: allowed are {SPECS}, e.g. bursts:high=1.7,high_s=1,low_s=3")
    profile = PROFILES.get(name)
    fields = {field.name: field.type for field in dataclasses.fields(profile)} if profile else {}
    allowed = {**fields, "alpha": "float"} if profile or name == "gamma" else {}
    options: dict[str, object] = {}
    for part in text.split(",") if colon else ():
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in allowed or key in options:
            known = ", ".join(allowed) or "none"
            raise InputError(f"arrivals {spec!r}: {part!r} is no option of {name}, each once: its options are {known}")
        options[key] = value if allowed[key] == "str" else _number(spec, key, value)
    if "alpha" in options and alpha is not None:
        raise InputError(f"arrivals {spec!r}: alpha={alpha!r} is given as well; give it once")
    alpha = options.pop("alpha", alpha)
    if profile is None:
        _check_alpha(name, alpha)
        return Arrivals(name, alpha)
    kind = "poisson" if alpha is None else "gamma"
    _check_alpha(kind, alpha)
    return Arrivals(kind, alpha, profile(**options))


def unit_arrivals(kind: str, n: int, seed: int, alpha: float | None = None) -> np.ndarray:
    """Return ``n`` arrival times at rate 1: float64 (n,), in order, the first after a first gap and not at 0.

    kind: ``poisson`` (exponential gaps), ``gamma`` (gaps of shape ``alpha``, mean 1, coefficient of variation
    1/sqrt(alpha); alpha < 1 is burstier than Poisson) or ``constant`` (1, 2, 3, ...). The first n of a longer
    sequence are the same. Raises InputError for another kind, n < 1, or an alpha missing, not finite, <= 0 or
    out of place.
    Source: the burstiness experiment of the Astrolabe paper draws gamma arrivals with alpha from 0.25 to 2.
    """
    import numpy as np

    if kind not in KINDS:
        more = "; with_arrivals takes the others" if kind in (*PROFILES, "trace") else ""
        raise InputError(f"arrivals kind={kind!r} is unknown: allowed are {', '.join(KINDS)}{more}")
    checked_requests(n)
    _check_alpha(kind, alpha)
    rng = stream(seed, "arrivals")
    if kind == "constant":
        return np.arange(1.0, n + 1.0)
    gaps = rng.standard_exponential(n) if kind == "poisson" else rng.standard_gamma(alpha, n) / alpha
    return np.cumsum(gaps)


def with_arrivals(
    frame: pd.DataFrame, qps: float | None, kind: str = "poisson", seed: int = 0, alpha: float | None = None
) -> pd.DataFrame:
    """Return a new frame whose requests, in their order, arrive at ``qps`` requests a second.

    ``kind`` is any spec that ``parse`` takes. ``arrived_s`` is ``unit_arrivals(...) / qps``, sent through the
    profile where the rate moves: one seed gives the same pattern at every rate, so the points of a sweep are
    paired. A profile keeps its seconds: bursts of one second last one second at every rate.
    ``kind="trace"`` stretches the frame's own times instead, so that (n - 1) / (last - first) becomes ``qps``;
    there ``qps=None`` keeps them as they are. Raises InputError for a qps that is not finite or <= 0, and where
    ``trace`` has no times to stretch.
    """
    import numpy as np

    process = parse(kind, alpha)
    if qps is None:
        if process.kind != "trace":
            raise InputError(f"qps=None with kind={kind!r}: give a rate in requests/s; only kind='trace' has its own")
    elif not _is_positive(qps):
        raise InputError(f"qps={qps!r} is not usable: the rate is a finite number > 0, in requests/s")
    if process.kind == "trace":
        times = _own_times(frame)
        if qps is not None:
            span = times[-1] - times[0]
            if span <= 0:
                raise InputError(
                    "kind='trace' cannot be scaled: all requests arrive at once; use poisson, gamma or constant"
                )
            times = times * ((len(times) - 1) / span) / qps
    else:
        times = process.times(len(frame), qps, seed)
    arrived = frame.drop(columns="arrived_s", errors="ignore")
    arrived.insert(1 if "rid" in arrived else 0, "arrived_s", np.asarray(times, dtype=np.float64))
    return arrived


def _own_times(frame):
    import numpy as np

    if "arrived_s" not in frame or not len(frame):
        raise InputError(
            "kind='trace' needs the trace's own arrived_s, and it has none; use poisson, gamma or constant"
        )
    times = frame["arrived_s"].to_numpy(dtype=np.float64)
    if not np.isfinite(times).all() or (np.diff(times) < 0).any() or times[0] < 0:
        raise InputError("kind='trace' needs arrived_s finite, >= 0 and non-decreasing; trace.check names the row")
    return times


def _check_alpha(kind: str, alpha) -> None:
    if kind != "gamma":
        if alpha is not None:
            raise InputError(f"alpha={alpha!r} has no meaning for kind={kind!r}: leave it out, or use kind='gamma'")
    elif not _is_positive(alpha):
        raise InputError(f"alpha={alpha!r} is not usable: kind='gamma' needs a finite shape > 0 (1 is Poisson)")


def _number(spec, key: str, text: str) -> float:
    value = as_floats([text])[0]
    if not math.isfinite(value):
        raise InputError(f"arrivals {spec!r}: {key}={text!r} is not a finite number")
    return float(value)


def _is_positive(value) -> bool:
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and math.isfinite(value) and value > 0
