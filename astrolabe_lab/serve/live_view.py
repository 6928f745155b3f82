"""The cluster as a policy sees it at one decision of a running router: the same interface as in the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from astrolabe_lab.objective import objective
from astrolabe_lab.predictor import Prediction
from astrolabe_lab.prefix_record import PrefixOverlap, PrefixRecord
from astrolabe_lab.sim.signals import SIGNALS, Signals
from astrolabe_lab.sim.view import Predictions

from .instance import Instance


class LiveView:
    """The available instances, their statuses as read now, and what their Predictors answer.

    ``predictions``: by instance, what a Predictor answered in this decision; ``late``: how many did not answer before
    the deadline (``ask`` gives None). ``prefixes``: the router's record of what it sent where.
    """

    def __init__(self, instances: list[Instance], now_s: float, ask=None, prefixes: PrefixRecord | None = None):
        self._instances = instances
        self._ask = ask
        self._prefixes = prefixes
        self.now_s = now_s
        self.instances = tuple(instance.index for instance in instances)
        self.signals = np.zeros(len(instances), SIGNALS)
        self.statuses = []
        self.sources = []
        self.gauges = []  # of each instance, what its status was reckoned with; None where it was published
        self.unseen = []  # of each instance, what was sent there and its status does not show
        self.predictions: dict[int, Prediction] = {}
        self.late = 0
        for row, instance in zip(self.signals, instances, strict=True):
            status, source = instance.status(now_s)
            instance.signals(status, now_s, row)
            self.statuses.append(status)
            self.gauges.append(None if source == "published" else replace(instance.gauges))
            self.unseen.append(instance.unseen(status))
            self.sources.append(source)

    def __len__(self) -> int:
        return len(self._instances)

    def __getitem__(self, i) -> Signals:
        if not -len(self) <= i < len(self):
            raise IndexError(f"instance index {i} is outside 0..{len(self) - 1}")
        return Signals(*self.signals[i].item())

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    @property
    def predicted_e2e_s(self) -> dict[int, float]:
        """By instance, where its Predictor was asked for it."""
        return {i: found.e2e_s for i, found in self.predictions.items() if found.e2e_s is not None}

    def predict(self, request, metric, instances) -> np.ndarray:
        """As ``sim.view.ClusterView.predict``: inf where it does not fit, came too late or failed."""
        if not callable(metric):
            objective(metric)
        wanted = None if callable(metric) else metric
        answers = self._answers(request, wanted, instances)
        for i, answer in zip(instances, answers, strict=True):
            if answer is None:
                self.late += 1
            elif answer.fits:
                self.predictions[self.instances[i]] = answer
        if callable(metric):
            columns = [
                np.array([getattr(a, name) if a is not None and a.fits else np.inf for a in answers])
                for name in ("ttft_s", "e2e_s", "tpot_s")
            ]
            return np.asarray(metric(Predictions(*columns)), dtype=np.float64)
        return np.array([np.inf if a is None else a.value(metric) for a in answers], dtype=np.float64)

    def prefix_overlap(self, request) -> PrefixOverlap:
        """As ``sim.view.ClusterView.prefix_overlap``."""
        return self._prefixes.overlap(request, self.instances, self.now_s)

    def _answers(self, request, metric, instances):
        if self._ask is not None:
            return self._ask([self._instances[i] for i in instances], request, metric)
        return [self._answer(i, request, metric) for i in map(int, instances)]

    def _answer(self, i: int, request, metric) -> Prediction:
        if self.sources[i] == "stale":
            return Prediction(False, reason="its status is stale: a step has begun and does not end")
        return self._instances[i].predict(self.statuses[i], request, metric, self.now_s, self.unseen[i])
