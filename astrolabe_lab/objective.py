"""Objectives: what a policy can ask the Predictors for, by name. Lower is better.

``e2e_s, ttft_s, tpot_s`` are the newcomer's own. ``added_delay_s`` is the change in the summed E2E of all requests of
the instance, the newcomer's own included: what it costs everybody who is there. ``blend:W:C`` is
(1 - W) e2e_s + W added_delay_s + C ttft_s: the delay of the others at the price W, 0 to 1, and waiting at the extra
price C, 0 unless given. Behind a queue a newcomer delays nobody who is there, but all who come later: C stands for
them.

What each buys, `make objectives` measures (12 instances, the paper's lengths, 24 to 38 QPS). With true lengths, and on
20 other seeds than it was chosen on, ``blend:0.1:0.3`` takes 0.4 to 1.4 % off mean E2E at every rate and 3 % off P99
TTFT past capacity, and raises P99 TTFT nowhere clearly. ``blend:0.25:0.3`` takes 4 % and 5 to 6 % off past capacity,
for 4 % more P99 TTFT well below it. With lengths that are 25 % off neither gains more than a percent or so.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from astrolabe_lab.errors import InputError

METRICS = ("e2e_s", "ttft_s", "tpot_s", "added_delay_s")
E2E, TTFT, TPOT, ADDED_DELAY = range(4)
FORESIGHTS = ("none", "arrivals", "learned", "both")  # the kinds of ``astrolabe_lab.foresight``
ALLOWED = f"{', '.join(METRICS)}, blend:W or blend:W:C (W from 0 to 1, C >= 0)"


class Objective(NamedTuple):
    """``code``: the simulation that is needed, a number of METRICS; ``others``: the price of the others' delay;
    ``wait``: the extra price of the newcomer's TTFT."""

    code: int
    others: float = 0.0
    wait: float = 0.0


def objective(metric) -> Objective:
    """The Objective that the name ``metric`` stands for. Raises InputError listing what is allowed."""
    if metric == "added_delay_s":
        return Objective(ADDED_DELAY, 1.0)
    if isinstance(metric, str) and metric in METRICS:
        return Objective(METRICS.index(metric))
    if isinstance(metric, str) and metric.startswith("blend:"):
        prices = metric.split(":")[1:]
        try:
            others, wait = float(prices[0]), float(prices[1]) if len(prices) == 2 else 0.0
        except ValueError:
            others = wait = math.nan
        if len(prices) <= 2 and 0.0 <= others <= 1.0 and 0.0 <= wait < math.inf:
            return Objective(ADDED_DELAY, others, wait)
    raise InputError(f"metric={metric!r} is not one of {ALLOWED}")


def check_foresight(kind) -> None:
    """Raise InputError for a ``foresight`` that is none of FORESIGHTS."""
    if kind not in FORESIGHTS:
        raise InputError(f"foresight={kind!r} is not one of {', '.join(FORESIGHTS)}")
