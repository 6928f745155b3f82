"""Asking the instances' Predictors: side by side, each with its delay and its noise."""

from __future__ import annotations

import numpy as np

from astrolabe_lab.errors import InputError
from astrolabe_lab.foresight import BASIS, LEARNED, new_foresight, note_dispatch, open_prediction, settle
from astrolabe_lab.forward import ANSWER, PENDING, predict, room_ahead, value_of
from astrolabe_lab.objective import E2E, TTFT, Objective, objective
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
    ``foresight``: kind of the Predictors' foresight. What it knows is what the asking router has dispatched itself and
    seen finish; where there are several routers, each takes itself for one like the others.
    """

    def __init__(
        self, knowledge: Knowledge, configs, costs, control: ControlPlane, noise: LatencyNoise, seed, extension,
        foresight: str = "none",
    ):  # fmt: skip
        self.knowledge = knowledge
        self.control = control
        self.noise = noise
        self.extension = extension
        self.templates, grids = new_engines(configs, costs)
        self.foresights = [new_foresight(foresight) for _ in range(control.routers)]
        self.opened = [np.zeros(256, BASIS) for _ in range(control.routers)]
        self.room_ahead = room_ahead(self.foresights[0])
        most_seats = max(range(len(configs)), key=lambda i: configs[i].max_num_seqs)
        self.widest = [configs[most_seats]], [costs[most_seats]]
        self.scratch = new_state(*self.widest, 256 + self.room_ahead)._replace(grids=grids)
        self.noise_rng = stream(seed, "noise")
        self.delay_rng = stream(seed, "delays")
        self.out = np.zeros(ANSWER)

    def begin(self, policy: str, j: int, now_s: float, r: int) -> None:
        """Router j decides on request r at now_s, by the policy of that name."""
        self.policy, self.j, self.now_s, self.r = policy, j, now_s, r
        self.asked: dict[int, float] = {}
        self.wait_s = 0.0
        self.foresight = self.foresights[j]
        self.bases: dict[int, np.ndarray] = {}
        if self.foresight["kind"][0]:
            self.foresight["share"] = self.control.routers / len(self.knowledge.healthy)
            settle(self.foresight[0], self.opened[j], self.knowledge.state.requests)

    def dispatched(self, r: int, i: int, request: Request) -> None:
        """The decision that ``begin`` opened: request r goes to instance i."""
        f = self.foresight[0]
        if f["kind"] == 0:
            return
        note_dispatch(f, self.now_s, request.prompt_tokens, request.predicted_tokens)
        if i not in self.bases:
            return
        opened = self.opened[self.j]
        if (opened["request"][: f["n_open"]] == r).any():
            return  # a second attempt, after an outage: its first prediction stands
        if f["n_open"] == len(opened):
            opened = self.opened[self.j] = np.concatenate([opened, np.zeros_like(opened)])
        open_prediction(f, opened, r, self.bases[i])

    def answer(self, request: Request, metric, indices) -> np.ndarray:
        """The predicted metric of the request on the healthy instances at ``indices``; inf where it does not fit."""
        healthy = self.knowledge.healthy
        self._check(request, metric, indices, len(healthy))
        wanted = Objective(E2E) if callable(metric) else objective(metric)
        code = wanted.code
        low, high = self.control.predict_range_s
        ready_s = self.now_s + 0.5 * (low + high) + self.control.dispatch_s
        common = self.noise.common * self.noise_rng.standard_normal() if self.noise.common > 0.0 else 0.0
        values = np.full(len(indices), np.inf)
        ttft_s, e2e_s, tpot_s = (np.full(len(indices), np.inf) for _ in range(3))
        out = self.out
        slowest_s = 0.0
        for column, index in enumerate(indices):
            i = healthy[index]
            fits = self._predict(i, ready_s, request, code)
            if high > 0.0:
                slowest_s = max(slowest_s, self.delay_rng.uniform(low, high))
            own = self.noise.candidate * self.noise_rng.standard_normal() if self.noise.candidate > 0.0 else 0.0
            if not fits:
                continue
            if self.foresight["kind"][0] & LEARNED and code != TTFT:
                self.bases[i] = out[5:].copy()
            out[[0, 1, 4]] += ready_s - request.arrived_s
            values[column] = value_of(out, *wanted) * (1.0 + common) * (1.0 + own)
            ttft_s[column], e2e_s[column], tpot_s[column] = out[:3] * (1.0 + common) * (1.0 + own)
            if code != TTFT:
                self.asked[i] = float(e2e_s[column])
        self.wait_s += slowest_s  # calls after one another add up
        if callable(metric):
            return self._objective(metric, Predictions(ttft_s, e2e_s, tpot_s))
        return values

    def _check(self, request: Request, metric, indices, n: int) -> None:
        if request.predicted_tokens < 1:
            raise InputError(
                f"policy {self.policy} asks for a prediction; request {request.rid} has no predicted length: {ATTACH}"
            )
        if not callable(metric):
            objective(metric)
        for index in indices:
            if not isinstance(index, (int, np.integer)) or not 0 <= index < n:
                raise InputError(
                    f"policy {self.policy}: predict() was asked for instance {index!r}; the cluster has "
                    f"{n} healthy instances, 0..{n - 1}"
                )

    def _objective(self, metric, predictions: Predictions) -> np.ndarray:
        """The values of a callable of Predictions, checked."""
        n = len(predictions.e2e_s)
        found = metric(predictions)
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
        for row, (sent_ready_s, prompt, predicted, r) in enumerate(known):
            pending[row] = (sent_ready_s, prompt, predicted, *self.knowledge.cached(i, r))
        cached = self.knowledge.cached(i, self.r)
        pending[-1] = (ready_s, request.prompt_tokens, request.predicted_tokens, *cached)
        self.make_room(len(rows) + len(pending))
        template = self.templates[i : i + 1]
        return predict(self.scratch, template, header, rows, pending, self.foresight, code, self.extension, self.out)

    def make_room(self, n_requests: int) -> None:
        """Let the scratch state hold ``n_requests`` and those that foresight assumes."""
        n_requests += self.room_ahead
        if n_requests > len(self.scratch.requests):
            grown = new_state(*self.widest, 2 * n_requests)
            self.scratch = self.scratch._replace(requests=grown.requests)
