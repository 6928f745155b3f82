"""Predictor: an instance's status -> TTFT, E2E and TPOT of one more request.

It rebuilds the engine from the status, completes the step in flight, adds what the router has dispatched since the
status was taken, then the newcomer, and runs the engine forward, as it would run with the predicted lengths and no
later arrival (Astrolabe, section on the Predictor), or with the arrivals that ``foresight`` expects. The simulator, the
sidecar and notebooks call the same object.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from astrolabe_lab.cost import StepCost
from astrolabe_lab.errors import InputError, check_kind
from astrolabe_lab.foresight import LEARNED, Foresight, new_foresight
from astrolabe_lab.forward import ANSWER, PENDING, predict, room_ahead, value_of
from astrolabe_lab.objective import ADDED_DELAY, E2E, TTFT, objective
from astrolabe_lab.request import Request
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.sim.state import new_state
from astrolabe_lab.sim.status import HEADER, ROW, Status
from astrolabe_lab.sim.status_check import check_status

EXTENSION_TOKENS = 10


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
    basis: tuple = field(default=(), repr=False, compare=False)  # what Foresight.observe_outcome needs of it

    def value(self, metric: str) -> float:
        """What the objective of this name compares, in s; inf where the request does not fit or the prediction did not
        compute it. Raises InputError for a name that is none."""
        wanted = objective(metric)
        if wanted.code != ADDED_DELAY:
            own = getattr(self, metric)
            return math.inf if own is None else own
        if self.added_delay_s is None:
            return math.inf
        return float(value_of(np.array([self.ttft_s, self.e2e_s, 0.0, 0.0, self.added_delay_s]), *wanted))


class Predictor:
    """Predicts for one instance. ``engine``: its flags; ``cost``: a StepCost; a request past its predicted length is
    assumed to end ``extension_tokens`` later (the paper's rule: 10). ``foresight``: a Foresight, which whoever holds
    the Predictor tells of dispatches and outcomes; None, the paper's method, assumes no later arrival."""

    def __init__(
        self,
        engine: EngineConfig,
        cost,
        extension_tokens: int = EXTENSION_TOKENS,
        foresight: Foresight | None = None,
    ):
        check_kind("engine", engine, EngineConfig, "EngineConfig(...)")
        check_kind("cost", cost, StepCost, "StepCost.parse(...)")
        check_extension(extension_tokens)
        self.engine = engine
        self.cost = cost
        if foresight is not None:
            check_kind("foresight", foresight, Foresight, 'Foresight("arrivals")')
        self.extension_tokens = extension_tokens
        self.foresight = new_foresight("none") if foresight is None else foresight.record
        self._scratch = new_state([engine], [cost], 256)
        self.template = self._scratch.engines.copy()
        self._out = np.zeros(ANSWER)

    def scratch(self, n_requests: int):
        """The scratch state, grown to hold ``n_requests`` and the arrivals that foresight assumes."""
        n_requests += room_ahead(self.foresight)
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
        cached_tokens: int = 0,
    ) -> Prediction:
        """What ``request`` would see if dispatched now.

        ``now_s``: when it would reach the engine (default: its arrival, or the status' time if that is later).
        ``dispatched``: what the router has sent there that the status does not show yet, as (ready_s, prompt_tokens,
        predicted_tokens). ``cached_tokens``: leading tokens of its prompt that the engine has cached (it takes whole
        blocks of them, and computes the last token). ``metric``: the name of an objective, to compute no more than
        that needs; default: TTFT, E2E and TPOT.
        Raises InputError for a request without predicted length or a status that is not this engine's.
        """
        if request.predicted_tokens < 1:
            raise InputError(f"request {request.rid} has no predicted length: attach one (length.attach), e.g. oracle")
        code = E2E if metric is None else objective(metric).code
        check_status(status, self.template)
        if now_s is None:
            now_s = max(request.arrived_s, status.taken_s)
        if self.engine.rejects(request.prompt_tokens, request.predicted_tokens):
            return Prediction(False, reason=self._why_not(request))
        if isinstance(cached_tokens, bool) or not isinstance(cached_tokens, int) or not 0 <= cached_tokens < 2**31:
            raise InputError(f"cached_tokens={cached_tokens!r} must be a whole number >= 0")
        pending = self._pending([*dispatched, (now_s, request.prompt_tokens, request.predicted_tokens)])
        pending["cached"][-1] = min(cached_tokens, request.prompt_tokens) // self.engine.block_size
        state = self.scratch(len(status.rows) + len(pending))
        fits = predict(
            state, self.template, status.header, status.rows, pending, self.foresight, code, self.extension_tokens,
            self._out,
        )  # fmt: skip
        if not fits:
            return Prediction(False, reason=self._why_not(request))
        wait_s = now_s - request.arrived_s
        ttft, e2e, tpot, _, added = self._out[:5]
        if code == TTFT:
            return Prediction(True, ttft_s=float(ttft + wait_s))
        return Prediction(
            True,
            float(ttft + wait_s),
            float(e2e + wait_s),
            float(tpot),
            float(added + wait_s) if code == ADDED_DELAY else None,
            basis=tuple(self._out[5:].tolist()) if self.foresight["kind"][0] & LEARNED else (),
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
        return np.array([(*dispatch, 0, 0) for dispatch in dispatches], PENDING)

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
