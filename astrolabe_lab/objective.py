"""Objectives: what a policy can ask the Predictors for, by name. Lower is better.

``e2e_s, ttft_s, tpot_s`` are the newcomer's own. ``added_delay_s`` is the change in the summed E2E of all requests of
the instance, the newcomer's own included: what it costs everybody. ``blend:W`` mixes the two, (1 - W) e2e_s +
W added_delay_s, with 0 <= W <= 1: its own latency, and the delay of the others at the price W.
"""

from __future__ import annotations

from typing import NamedTuple

from astrolabe_lab.errors import InputError

METRICS = ("e2e_s", "ttft_s", "tpot_s", "added_delay_s")
E2E, TTFT, TPOT, ADDED_DELAY = range(4)
FORESIGHTS = ("none", "arrivals", "learned", "both")  # the kinds of ``astrolabe_lab.foresight``
ALLOWED = f"{', '.join(METRICS)}, blend:W (W from 0 to 1)"


class Objective(NamedTuple):
    """``code``: the simulation that is needed, a number of METRICS; ``weight``: that of the others' delay."""

    code: int
    weight: float


def objective(metric) -> Objective:
    """The Objective that the name ``metric`` stands for. Raises InputError listing what is allowed."""
    if metric == "added_delay_s":
        return Objective(ADDED_DELAY, 1.0)
    if isinstance(metric, str) and metric in METRICS:
        return Objective(METRICS.index(metric), 0.0)
    if isinstance(metric, str) and metric.startswith("blend:"):
        try:
            weight = float(metric.removeprefix("blend:"))
        except ValueError:
            weight = -1.0
        if 0.0 <= weight <= 1.0:
            return Objective(ADDED_DELAY, weight)
    raise InputError(f"metric={metric!r} is not one of {ALLOWED}")


def check_foresight(kind) -> None:
    """Raise InputError for a ``foresight`` that is none of FORESIGHTS."""
    if kind not in FORESIGHTS:
        raise InputError(f"foresight={kind!r} is not one of {', '.join(FORESIGHTS)}")
