"""A router's view of the cluster: all that a policy can reach.

The view holds signals and instance numbers. Predictions are asked for through a number that names the simulation, not
through a reference to it: no attribute, closure or bound method of what a policy is given leads to the true output
lengths or to the simulator's clock.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import count

import numpy as np

from astrolabe_lab.errors import InputError
from astrolabe_lab.prefix_record import PrefixOverlap
from astrolabe_lab.sim.signals import Signals

_asked = {}  # number of a simulation -> its answers to predict() and prefix_overlap(), until it ends
_numbers = count()


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of several instances for one request: float64 arrays in s, inf where it does not fit."""

    ttft_s: np.ndarray
    e2e_s: np.ndarray
    tpot_s: np.ndarray


class ClusterView:
    """The healthy instances as one router sees them at one decision."""

    __slots__ = ("_number", "instances", "signals")

    def __init__(self, number: int):
        self._number = number
        self.instances: tuple[int, ...] = ()
        self.signals: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.instances)

    def __getitem__(self, i) -> Signals:
        """Signals of the i-th healthy instance. Raises IndexError past the last."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"instance index {i} is outside 0..{len(self) - 1}")
        return Signals(*self.signals[i].item())

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def predict(self, request, metric, instances) -> np.ndarray:
        """Predicted ``metric`` (e2e_s, ttft_s, tpot_s, added_delay_s, or a callable of Predictions) of the request on
        each of ``instances`` (indices into this view): float64, lower is better, inf where it does not fit."""
        return self._ask("predict")(request, metric, instances)

    def prefix_overlap(self, request) -> PrefixOverlap:
        """What this router takes each instance to have cached of the request's prompt, by its record of what it sent
        where; arrays in the order of this view."""
        return self._ask("prefix_overlap")(request)

    def _ask(self, what: str):
        if self._number not in _asked:
            raise InputError(f"{what}: the simulation of this cluster has ended")
        return _asked[self._number][what]


def register(predict, prefix_overlap) -> int:
    """Name a simulation by a number under which its views find ``predict(request, metric, instances)`` and
    ``prefix_overlap(request)``."""
    number = next(_numbers)
    _asked[number] = {"predict": predict, "prefix_overlap": prefix_overlap}
    return number


def forget(number: int) -> None:
    _asked.pop(number, None)


def check_choice(chosen, n: int, name: str) -> int:
    """The policy's choice as an int in 0..n-1. Raises InputError naming the policy otherwise."""
    try:
        index = None if isinstance(chosen, (bool, np.bool_)) else operator.index(chosen)
    except TypeError:
        index = None
    if index is None:
        raise InputError(f"policy {name}: choose() returned {chosen!r}; it must return an index in 0..{n - 1}")
    if not 0 <= index < n:
        raise InputError(f"policy {name}: choose() returned {index}; the cluster has {n} healthy instances, 0..{n - 1}")
    return index
