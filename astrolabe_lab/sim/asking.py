"""Asking the instances' Predictors: side by side, each with its delay and its noise."""

from __future__ import annotations

import numpy as np

from astrolabe_lab.errors import InputError
from astrolabe_lab.predictor import ADDED_DELAY, E2E, METRICS, PENDING, TPOT, TTFT, predict
from astrolabe_lab.request import Request
from astrolabe_lab.rng import stream
from astrolabe_lab.sim.knowledge import Knowledge
from astrolabe_lab.sim.state import new_engines, new_state
from astrolabe_lab.sim.view import Predictions
from astrolabe_lab.sim.world import ControlPlane, LatencyNoise

ATTACH = "attach them with length.attach (on the command line: --lengths oracle, constant:N or noisy:REL)"


class Asking:
    """Answers ``ClusterView.predict`` of the decision that ``begin`` opened.

    ``asked``: predicted E2E in s by instance, as the router saw it; ``wait_s``: how long the answers took.
    """

    def __init__(
        self, knowledge: Knowledge, configs, costs, control: ControlPlane, noise: LatencyNoise, seed, extension
    ):
        self.knowledge = knowledge
        self.control = control
        self.noise = noise
        self.extension = extension
        self.templates, grids = new_engines(configs, costs)
        most_seats = max(range(len(configs)), key=lambda i: configs[i].max_num_seqs)
        self.widest = [configs[most_seats]], [costs[most_seats]]
        self.scratch = new_state(*self.widest, 256)._replace(grids=grids)
        self.noise_rng = stream(seed, "noise")
        self.delay_rng = stream(seed, "delays")
        self.out = np.zeros(5)

    def begin(self, policy: str, j: int, now_s: float) -> None:
        """Router j decides at now_s, by the policy of that name."""
        self.policy, self.j, self.now_s = policy, j, now_s
        self.asked: dict[int, float] = {}
        self.wait_s = 0.0

    def answer(self, request: Request, metric, indices) -> np.ndarray:
        """The predicted metric of the request on the healthy instances at ``indices``; inf where it does not fit."""
        healthy = self.knowledge.healthy
        self._check(request, metric, indices, len(healthy))
        code = E2E if callable(metric) else METRICS.index(metric)
        low, high = self.control.predict_range_s
        ready_s = self.now_s + 0.5 * (low + high) + self.control.dispatch_s
        common = self.noise.common * self.noise_rng.standard_normal() if self.noise.common > 0.0 else 0.0
        answers = np.full((4, len(indices)), np.inf)  # in the order of METRICS
        slowest_s = 0.0
        for column, index in enumerate(indices):
            i = healthy[index]
            fits = self._predict(i, ready_s, request, code)
            if high > 0.0:
                slowest_s = max(slowest_s, self.delay_rng.uniform(low, high))
            own = self.noise.candidate * self.noise_rng.standard_normal() if self.noise.candidate > 0.0 else 0.0
            if fits:
                ttft, e2e, tpot, _, added = self.out
                wait_s = ready_s - request.arrived_s
                answers[TTFT, column] = (ttft + wait_s) * (1.0 + common) * (1.0 + own)
                answers[E2E, column] = (e2e + wait_s) * (1.0 + common) * (1.0 + own)
                answers[TPOT, column] = tpot * (1.0 + common) * (1.0 + own)
                answers[ADDED_DELAY, column] = (added + wait_s) * (1.0 + common) * (1.0 + own)
                if code != TTFT:
                    self.asked[i] = float(answers[E2E, column])
        self.wait_s += slowest_s  # calls after one another add up
        return self._objective(metric, answers, len(indices)) if callable(metric) else answers[code]

    def _check(self, request: Request, metric, indices, n: int) -> None:
        if request.predicted_tokens < 1:
            raise InputError(
                f"policy {self.policy} asks for a prediction; request {request.rid} has no predicted length: {ATTACH}"
            )
        if not callable(metric) and metric not in METRICS:
            raise InputError(f"metric={metric!r} is not one of {', '.join(METRICS)}, nor a callable")
        for index in indices:
            if not isinstance(index, (int, np.integer)) or not 0 <= index < n:
                raise InputError(
                    f"policy {self.policy}: predict() was asked for instance {index!r}; the cluster has "
                    f"{n} healthy instances, 0..{n - 1}"
                )

    def _objective(self, objective, answers: np.ndarray, n: int) -> np.ndarray:
        """The values of a callable of Predictions, checked."""
        found = objective(Predictions(answers[TTFT], answers[E2E], answers[TPOT]))
        try:
            values = np.asarray(found, dtype=np.float64)
        except (TypeError, ValueError):
            raise InputError(f"policy {self.policy}: the metric returned {found!r}, not numbers") from None
        if values.shape != (n,):
            raise InputError(f"policy {self.policy}: the metric returned shape {values.shape} for {n} instances")
        return values

    def _predict(self, i: int, ready_s: float, request: Request, code: int) -> bool:
        header, rows = self.knowledge.status(i, self.now_s)
        known = self.knowledge.in_transit(self.j, i, self.now_s, header["taken_s"][0])
        pending = np.zeros(len(known) + 1, PENDING)
        for row, sent in enumerate(known):
            pending[row] = sent
        pending[-1] = (ready_s, request.prompt_tokens, request.predicted_tokens)
        self.make_room(len(rows) + len(pending))
        template = self.templates[i : i + 1]
        return predict(self.scratch, template, header, rows, pending, code, self.extension, self.out)

    def make_room(self, n_requests: int) -> None:
        """Let the scratch state hold ``n_requests``."""
        if n_requests > len(self.scratch.requests):
            grown = new_state(*self.widest, 2 * n_requests)
            self.scratch = self.scratch._replace(requests=grown.requests)
