"""Predictor: an instance's status -> TTFT, E2E and TPOT of one more request.

It rebuilds the engine from the status, completes the step in flight, adds what the router has dispatched since the
status was taken, then the newcomer, and runs the engine forward, as it would run with the predicted lengths and no
later arrival (Astrolabe, section on the Predictor). The simulator, the sidecar and notebooks call the same object.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from astrolabe_lab.cost import StepCost
from astrolabe_lab.errors import InputError, check_kind
from astrolabe_lab.request import Request
from astrolabe_lab.sim import kernel
from astrolabe_lab.sim.compiled import compiled
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.sim.restore import assumed_output, restore
from astrolabe_lab.sim.state import FINISHED, NONE, new_state
from astrolabe_lab.sim.status import HEADER, ROW, Status
from astrolabe_lab.sim.status_check import check_status

EXTENSION_TOKENS = 10
METRICS = ("e2e_s", "ttft_s", "tpot_s", "added_delay_s")
E2E, TTFT, TPOT, ADDED_DELAY = range(4)

PENDING = np.dtype([("ready_s", "f8"), ("prompt", "i4"), ("predicted", "i4")], align=True)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one more request would see; times in s from its arrival, None where ``fits`` is False (``reason`` says
    why). ``tpot_s`` is 0 for a request of one token."""

    fits: bool
    ttft_s: float | None = None
    e2e_s: float | None = None
    tpot_s: float | None = None
    added_delay_s: float | None = None
    reason: str = ""


@compiled
def forward(scratch, template, header, rows, pending, newcomer, metric, extension, out):
    """Simulate forward until the newcomer (``pending[newcomer]``, or -1 for none) has finished.

    Writes (ttft, e2e, tpot) of the newcomer, in s from its ready time, to out[:3], and the summed finish times of all
    to out[3] when the metric asks for them. Returns False when the newcomer does not fit.
    """
    engines, requests, running, batch, done, log, grids, pool, lists = scratch
    restore(engines, requests, running, batch, grids, template, header, rows, extension)
    n = header[0].n_rows
    target = NONE
    for p in range(pending.size):
        if newcomer < 0 and p == pending.size - 1:
            break
        q = requests[n + p]
        q.prompt = pending[p].prompt
        q.predicted = pending[p].predicted
        q.output = max(pending[p].predicted, 1)
        if p != newcomer:
            q.output = assumed_output(engines[0], q.prompt, 0, q.predicted, extension)
        q.computed = 0
        q.generated = 0
        q.placeholders = 0
        q.in_flight = 0
        q.stale = 0
        q.blocks = 0
        q.preemptions = 0
        q.router = 0
        q.first_token_s = np.nan
        q.finished_s = np.nan
        ready_s = pending[p].ready_s
        fits = kernel.deliver(engines, requests, running, batch, done, log, grids, pool, lists, 0, n + p, ready_s)
        if p == newcomer:
            if not fits:
                return False
            target = n + p
            if metric == TTFT:
                q.output = 1  # what follows its first token does not change when that comes
    if metric == ADDED_DELAY:
        kernel.advance(engines, requests, running, batch, done, log, grids, pool, lists, 0, np.inf, NONE, True)
    else:
        kernel.advance(engines, requests, running, batch, done, log, grids, pool, lists, 0, np.inf, target, True)
    if engines[0].stuck == 1:
        return False
    total = 0.0
    if metric == ADDED_DELAY:
        for r in range(n + pending.size - (1 if newcomer < 0 else 0)):
            if requests[r].state == FINISHED and r != target:
                total += requests[r].finished_s
    out[3] = total
    if target != NONE:
        q = requests[target]
        ready_s = pending[newcomer].ready_s
        frontend_s = engines[0].frontend_s
        out[0] = q.first_token_s + frontend_s - ready_s
        out[1] = q.finished_s + frontend_s - ready_s
        out[2] = (q.finished_s - q.first_token_s) / (q.output - 1) if q.output > 1 else 0.0
    return True


@compiled
def predict(scratch, template, header, rows, pending, metric, extension, out):
    """Predict for the newcomer, the last of ``pending``; out (5,) gets ttft, e2e, tpot, (scratch), added delay in s
    from its ready time. Returns False when it does not fit. The scratch state needs room for all rows and pending."""
    newcomer = pending.size - 1
    if not forward(scratch, template, header, rows, pending, newcomer, metric, extension, out):
        return False
    if metric == ADDED_DELAY:
        others_with = out[3]
        ttft, e2e, tpot = out[0], out[1], out[2]
        forward(scratch, template, header, rows, pending, -1, metric, extension, out)
        out[4] = e2e + others_with - out[3]
        out[0], out[1], out[2] = ttft, e2e, tpot
    return True


class Predictor:
    """Predicts for one instance. ``engine``: its flags; ``cost``: a StepCost; a request past its predicted length is
    assumed to end ``extension_tokens`` later (the paper's rule: 10)."""

    def __init__(self, engine: EngineConfig, cost, extension_tokens: int = EXTENSION_TOKENS):
        check_kind("engine", engine, EngineConfig, "EngineConfig(...)")
        check_kind("cost", cost, StepCost, "StepCost.parse(...)")
        check_extension(extension_tokens)
        self.engine = engine
        self.cost = cost
        self.extension_tokens = extension_tokens
        self._scratch = new_state([engine], [cost], 256)
        self.template = self._scratch.engines.copy()
        self._out = np.zeros(5)

    def scratch(self, n_requests: int):
        """The scratch state, grown to hold ``n_requests``."""
        if n_requests > len(self._scratch.requests):
            self._scratch = new_state([self.engine], [self.cost], 2 * n_requests)
        return self._scratch

    def predict(
        self,
        status: Status,
        request: Request,
        metric: str | None = None,
        now_s: float | None = None,
        dispatched=(),
    ) -> Prediction:
        """What ``request`` would see if dispatched now.

        ``now_s``: when it would reach the engine (default: its arrival, or the status' time if that is later).
        ``dispatched``: what the router has sent there that the status does not show yet, as (ready_s, prompt_tokens,
        predicted_tokens). ``metric``: one of METRICS to compute no more than that needs; default: TTFT, E2E and TPOT.
        Raises InputError for a request without predicted length or a status that is not this engine's.
        """
        if request.predicted_tokens < 1:
            raise InputError(f"request {request.rid} has no predicted length: attach one (length.attach), e.g. oracle")
        if metric is not None and metric not in METRICS:
            raise InputError(f"metric={metric!r} is not one of {', '.join(METRICS)}")
        check_status(status, self.template)
        if now_s is None:
            now_s = max(request.arrived_s, status.taken_s)
        if self.engine.rejects(request.prompt_tokens, request.predicted_tokens):
            return Prediction(False, reason=self._why_not(request))
        pending = self._pending([*dispatched, (now_s, request.prompt_tokens, request.predicted_tokens)])
        code = E2E if metric is None else METRICS.index(metric)
        state = self.scratch(len(status.rows) + len(pending))
        fits = predict(
            state, self.template, status.header, status.rows, pending, code, self.extension_tokens, self._out
        )
        if not fits:
            return Prediction(False, reason=self._why_not(request))
        wait_s = now_s - request.arrived_s
        ttft, e2e, tpot, _, added = self._out
        if code == TTFT:
            return Prediction(True, ttft_s=float(ttft + wait_s))
        return Prediction(
            True,
            float(ttft + wait_s),
            float(e2e + wait_s),
            float(tpot),
            float(added + wait_s) if code == ADDED_DELAY else None,
        )

    @staticmethod
    def _pending(dispatches) -> np.ndarray:
        """PENDING rows of (ready_s, prompt_tokens, predicted_tokens)."""
        for ready_s, prompt, predicted in dispatches:
            if not (math.isfinite(ready_s) and 1 <= prompt < 2**31 and 0 <= predicted < 2**31):
                raise InputError(
                    f"dispatch ({ready_s}, {prompt}, {predicted}) must be (finite ready_s, prompt_tokens >= 1, "
                    "predicted_tokens >= 0)"
                )
        return np.array([tuple(dispatch) for dispatch in dispatches], PENDING)

    def _why_not(self, request: Request) -> str:
        total = request.prompt_tokens + request.predicted_tokens
        if total > self.engine.max_model_len:
            return f"prompt + predicted output = {total} tokens exceed max_model_len={self.engine.max_model_len}"
        blocks = self.engine.request_blocks
        return f"prompt + predicted output = {total} tokens need more than the {blocks} KV blocks a request can hold"


def check_extension(tokens) -> None:
    """Raise InputError for an ``extension_tokens`` that is none."""
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens < 2**31:
        raise InputError(f"extension_tokens={tokens!r} must be a whole number >= 1, below 2**31")


def empty_status(now_s: float, engine: EngineConfig) -> Status:
    """The status of an idle engine at ``now_s``."""
    header = np.zeros(1, HEADER)
    header["taken_s"] = now_s
    header["step_started_s"] = np.nan
    header["free_blocks"] = engine.usable_blocks
    return Status(header, np.zeros(0, ROW))
