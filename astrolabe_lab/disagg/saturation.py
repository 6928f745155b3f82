"""The rate at which round robin is in mid-collapse: where routers are told apart, found for each workload."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


def find(
    settings: Mapping[str, object],
    *,
    target: float = TARGET,
    policy: str = "round_robin",
    seeds: Sequence[int] = (0, 1, 2),
    start_qps: float = 8.0,
    tolerance: float = 0.02,
    workers: int | None = 1,
) -> Anchor:
    """The Anchor of ``settings`` (a grid's defaults: trace, pools, requests, ...), by bisection with repeats.

    Rates double or halve from ``start_qps`` until they lie on both sides of ``target``, then halve the gap until it is
    ``tolerance`` of the rate; every rate is run at each seed. Raises InputError for a target outside (0, 1), a
    tolerance or first rate that is not > 0, no seeds, and where no rate up to 4,096 a second crosses the target.
    """
    import pandas as pd

    from astrolabe_lab import measure, sweep

    if not isinstance(target, (int, float)) or not 0 < target < 1:
        raise InputError(f"target={target!r} must be a goodput share between 0 and 1, such as 0.8")
    for name, value in (("tolerance", tolerance), ("start_qps", start_qps)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise InputError(f"{name}={value!r} must be a finite number > 0")
    if not seeds:
        raise InputError("seeds are none: give one at least, such as (0, 1, 2)")
    seen: dict[float, pd.DataFrame] = {}

    def goodput(qps: float) -> float:
        if qps not in seen:
            grid = {"defaults": {**settings, "policy": policy, "qps": qps}, "grid": {"seed": [*seeds]}}
            seen[qps] = sweep.run(grid, workers=workers, progress=False)
        return float(seen[qps]["goodput_share"].mean())

    low = high = float(start_qps)
    if goodput(low) >= target:
        while goodput(high) >= target:
            low, high = high, 2 * high
            if high > MOST_QPS:
                raise InputError(
                    f"{policy} keeps {target:.0%} up to {low:g} requests a second: it never collapses here"
                )
    else:
        while goodput(low) < target:
            low, high = low / 2, low
            if low < 1 / MOST_QPS:
                raise InputError(f"{policy} keeps less than {target:.0%} at any rate: the targets are out of reach")
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if goodput(middle) >= target else (low, middle)
    qps = min((low, high), key=lambda rate: abs(goodput(rate) - target))
    mean, below, above = measure.interval(seen[qps]["goodput_share"], 0.95, "auto")
    return Anchor(qps, float(mean), float(below), float(above), target, pd.concat(seen.values(), ignore_index=True))


def anchors(
    families: Sequence[str],
    slopes_s: Sequence[float],
    requests: int,
    seeds: Sequence[int] = (0, 1, 2),
    **options: object,
) -> tuple[dict[str, dict[float, float]], pd.DataFrame]:
    """({family: {decode slope in s: requests a second}}, a row per anchor): the paper's pools at every slope.

    ``options`` go to ``find``. Columns of the frame: ``family, decode_slope_s, qps, goodput, low, high, runs``.
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
            rows.append((family, slope_s, anchor.qps, anchor.goodput, anchor.low, anchor.high, len(anchor.probes)))
    names = ["family", "decode_slope_s", "qps", "goodput", "low", "high", "runs"]
    return found, pd.DataFrame(rows, columns=names)


def service_anchors(
    services: Sequence[str],
    families: Sequence[str],
    slopes_s: Sequence[float],
    requests: int,
    seeds: Sequence[int] = (0, 1, 2),
    *,
    targets: Mapping[str, float],
    **options: object,
) -> dict[tuple[str, str, float], float]:
    """{(service, family, decode slope in s): requests a second}, as ``studies.services`` takes it.

    ``targets``: round robin's goodput share by family (default: 0.8). ``options`` go to ``find``.
    """
    from astrolabe_lab.disagg.studies import settings

    found = {}
    for service in services:
        for family in families:
            start_qps = 1.0 if service == "serial" else 16.0
            for slope_s in slopes_s:
                given = settings(requests, family, service=service, decode_slope_s=slope_s)
                anchor = find(given, target=targets.get(family, TARGET), seeds=seeds, start_qps=start_qps, **options)
                found[service, family, slope_s] = start_qps = anchor.qps
    return found
