"""The rate at which round robin is in mid-collapse: where routers are told apart, found for each workload."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

TARGET = 0.8  # goodput share in mid-collapse: half of what round robin loses before it stops to matter
MOST_QPS = 4096.0


@dataclass(frozen=True)
class Anchor:
    """``qps``: where the policy's mean goodput share is ``goodput``, of the two last rates the one next to ``target``;
    ``low``, ``high``: its 95 % interval over seeds; ``probes``: a row per run that was made to find it."""

    qps: float
    goodput: float
    low: float
    high: float
    target: float
    probes: pd.DataFrame = field(repr=False)

    @property
    def bracket_qps(self) -> tuple[float, float]:
        """(highest rate tried whose goodput reached the target, lowest whose did not)."""
        shares = self.probes.groupby("qps")["goodput_share"].mean()
        reached = shares >= self.target
        return float(shares.index[reached].max()), float(shares.index[~reached].min())


def crossing(
    goodput: Callable[[float], float],
    *,
    target: float = TARGET,
    start_qps: float = 8.0,
    tolerance: float = 0.02,
    rates: int | None = None,
    policy: str = "round_robin",
) -> float:
    """Of two rates on both sides of ``target`` and ``tolerance`` apart, the one whose goodput share is next to it.

    ``goodput``: the share at a rate, which falls as rates grow; it is asked once a rate. Rates double or halve from
    ``start_qps`` until they lie on both sides, then halve the gap; ``rates``: at most so many, then the gap is as it
    is. Raises InputError for a target outside (0, 1), a tolerance or first rate that is not > 0, fewer than two rates,
    and where no rate up to 4,096 a second, or none of those tried, crosses the target.
    """
    if not isinstance(target, (int, float)) or not 0 < target < 1:
        raise InputError(f"target={target!r} must be a goodput share between 0 and 1, such as 0.8")
    for name, value in (("tolerance", tolerance), ("start_qps", start_qps)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise InputError(f"{name}={value!r} must be a finite number > 0")
    if rates is not None and (isinstance(rates, bool) or not isinstance(rates, int) or rates < 2):
        raise InputError(f"rates={rates!r} must be a whole number >= 2: one on each side of the target")
    seen: dict[float, float] = {}

    def keeps(qps: float) -> bool:
        if qps not in seen:
            if len(seen) == rates:
                raise InputError(
                    f"{policy} crosses {target:.0%} at none of the {rates} rates tried, {min(seen):g} to "
                    f"{max(seen):g} requests a second: start elsewhere (start_qps, --start-qps), or try more "
                    "(rates, --rates)"
                )
            seen[qps] = goodput(qps)
        return seen[qps] >= target

    low = high = float(start_qps)
    if keeps(low):
        while keeps(high):
            low, high = high, 2 * high
            if high > MOST_QPS:
                raise InputError(
                    f"{policy} keeps {target:.0%} up to {low:g} requests a second: it never collapses here"
                )
    else:
        while not keeps(low):
            low, high = low / 2, low
            if low < 1 / MOST_QPS:
                raise InputError(f"{policy} keeps less than {target:.0%} at any rate: the targets are out of reach")
    while high / low > 1 + tolerance and len(seen) != rates:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return min((low, high), key=lambda rate: abs(seen[rate] - target))


def search(runs: Callable[[float], pd.DataFrame], *, target: float = TARGET, **options: object) -> Anchor:
    """The Anchor of a policy whose runs at a rate are the rows of ``runs(qps)``, one a seed; ``options`` go to
    ``crossing``."""
    import pandas as pd

    from astrolabe_lab import measure

    probes: dict[float, pd.DataFrame] = {}

    def goodput(qps: float) -> float:
        probes[qps] = runs(qps)
        return float(probes[qps]["goodput_share"].mean())

    qps = crossing(goodput, target=target, **options)
    mean, low, high = measure.interval(probes[qps]["goodput_share"], 0.95, "auto")
    return Anchor(qps, float(mean), float(low), float(high), target, pd.concat(probes.values(), ignore_index=True))


def at_rate(settings: Mapping[str, object], policy: str, qps: float, seeds: Sequence[int]) -> dict[str, dict]:
    """The grid of one step of a search. Raises InputError for no seeds."""
    if not seeds:
        raise InputError("seeds are none: give one at least, such as (0, 1, 2)")
    return {"defaults": {**settings, "policy": policy, "qps": qps}, "grid": {"seed": [*seeds]}}


def find(
    settings: Mapping[str, object],
    *,
    policy: str = "round_robin",
    seeds: Sequence[int] = (0, 1, 2),
    workers: int | None = 1,
    **options: object,
) -> Anchor:
    """The Anchor of ``settings`` (a grid's defaults: trace, pools, requests, ...), simulated at each seed at every
    rate. ``options`` (target, start_qps, tolerance, rates) are those of ``crossing``, and so is what it raises."""
    from astrolabe_lab import sweep

    def runs(qps: float) -> pd.DataFrame:
        return sweep.run(at_rate(settings, policy, qps, seeds), workers=workers, progress=False)

    return search(runs, policy=policy, **options)


def anchors(
    families: Sequence[str],
    slopes_s: Sequence[float],
    requests: int,
    seeds: Sequence[int] = (0, 1, 2),
    **options: object,
) -> tuple[dict[str, dict[float, float]], pd.DataFrame]:
    """({family: {decode slope in s: requests a second}}, a row per anchor): the paper's pools at every slope.

    ``options`` go to ``find``. Columns of the frame: ``family, decode_slope_s, qps, reached_qps, missed_qps`` (the
    anchor's ``bracket_qps``), ``goodput, low, high, runs, arrivals_s`` (how long the requests of a run take to arrive).
    """
    import pandas as pd

    from astrolabe_lab.disagg.studies import settings

    found: dict[str, dict[float, float]] = {}
    rows = []
    for family in families:
        start_qps = options.get("start_qps", 8.0)
        for slope_s in slopes_s:
            given = settings(requests, family, decode_slope_s=slope_s)
            anchor = find(given, seeds=seeds, **options | {"start_qps": start_qps})
            start_qps = anchor.qps  # the next slope's is not far
            found.setdefault(family, {})[slope_s] = anchor.qps
            rows.append({"family": family, "decode_slope_s": slope_s, **_columns(anchor, requests)})
    return found, pd.DataFrame(rows)


def service_anchors(
    services: Sequence[str],
    families: Sequence[str],
    slopes_s: Sequence[float],
    requests: int,
    seeds: Sequence[int] = (0, 1, 2),
    *,
    targets: Mapping[str, float],
    **options: object,
) -> tuple[dict[tuple[str, str, float], float], pd.DataFrame]:
    """({(service, family, decode slope in s): requests a second}, as ``studies.services`` takes it, a row per anchor).

    ``targets``: round robin's goodput share by family (default: 0.8). ``options`` go to ``find``. Columns of the frame:
    ``service``, then as those of ``anchors``.
    """
    import pandas as pd

    from astrolabe_lab.disagg.studies import settings

    found, rows = {}, []
    for service in services:
        for family in families:
            start_qps = 1.0 if service == "serial" else 16.0
            for slope_s in slopes_s:
                given = settings(requests, family, service=service, decode_slope_s=slope_s)
                anchor = find(given, target=targets.get(family, TARGET), seeds=seeds, start_qps=start_qps, **options)
                found[service, family, slope_s] = start_qps = anchor.qps
                setting = {"service": service, "family": family, "decode_slope_s": slope_s}
                rows.append({**setting, **_columns(anchor, requests)})
    return found, pd.DataFrame(rows)


def _columns(anchor: Anchor, requests: int) -> dict[str, float]:
    reached_qps, missed_qps = anchor.bracket_qps
    return {
        "qps": anchor.qps, "reached_qps": reached_qps, "missed_qps": missed_qps, "goodput": anchor.goodput,
        "low": anchor.low, "high": anchor.high, "runs": len(anchor.probes), "arrivals_s": requests / anchor.qps,
    }  # fmt: skip
