"""One engine as a router sees it: its status, the router's own ledger, whether it gets requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from astrolabe_lab.engines.step_log import in_flight_s
from astrolabe_lab.errors import InputError
from astrolabe_lab.predictor import Prediction, Predictor
from astrolabe_lab.request import Request
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.sim.state import WAITING
from astrolabe_lab.sim.status import Status
from astrolabe_lab.sim.status_check import check_status
from astrolabe_lab.status.published import StatusReader
from astrolabe_lab.status.reckoned import reckon
from astrolabe_lab.status.scrape import Gauges

from .breaker import Breaker, Health
from .ledger import Ledger

STALE_S = 5.0  # modelled: after it, a step whose price nobody knows is taken for one that does not end
STALE_PRICES = 3.0  # and one whose price is known after so many times that, if it is longer


@dataclass
class Instance:
    """An upstream engine.

    ``status_path``: the file of its published status (engines of ours); without it, and while it cannot be believed,
    the status is ``reckoned`` from the router's own ledger. ``predictor``: None where nobody predicts for it. Of pools:
    ``role``: prefill or decode, ``place``: its number in its pool, ``polled_s``: when its occupancy was last read.
    """

    index: int
    url: str
    engine: EngineConfig
    predictor: Predictor | None = None
    status_path: Path | None = None
    ledger: Ledger = field(default_factory=Ledger)
    breaker: Breaker = field(default_factory=Breaker)
    health: Health = field(default_factory=Health)
    draining: bool = False
    role: str | None = None
    place: int = 0
    polled_s: float | None = None
    status_faults: int = 0  # reads of the published status that failed, or gave none that can be believed
    restarts: int = 0  # of the engine, as its published status shows them
    gauges: Gauges = field(default_factory=Gauges)  # the engine's own, as last asked for
    coming: Gauges = field(default_factory=Gauges)  # those that it is being asked for: only when, and what ended since
    gauge_faults: int = 0  # answers at /metrics that told nothing
    _reader: StatusReader | None = field(default=None, repr=False)
    _epoch: tuple | None = field(default=None, repr=False)

    @property
    def labels(self) -> dict[str, str]:
        """What tells it from others in metrics."""
        return {"instance": str(self.index)} | ({"role": self.role} if self.role else {})

    def available(self, now_s: float) -> bool:
        """Whether it gets requests; one that has failed is tried again only once a probe has found it well."""
        trial = self.breaker.opened_s is not None
        if trial and self.health.against:
            return False
        return self.health.healthy and not self.draining and self.breaker.allows(now_s)

    def status(self, now_s: float) -> tuple[Status, str]:
        """(its status, where that came from: published, ledger, or stale).

        ``stale``: it publishes, but its step has not ended in good time. Its requests are still there, so it is
        reckoned from the ledger, lest a hung engine look as if it had finished them.
        """
        if self.status_path is None:
            return self.ledger_status(now_s), "ledger"
        try:
            status = self._published()
            self._check(status, now_s)
        except (InputError, TimeoutError):
            self.status_faults += 1
            self._reader = None  # a restarted engine publishes in a new file
            return self.ledger_status(now_s), "ledger"
        age_s = now_s - status.taken_s
        if status.running and age_s > STALE_S and age_s > STALE_PRICES * self._step_s(status):
            self.status_faults += 1
            return self.ledger_status(now_s), "stale"
        return status, "published"

    def _published(self) -> Status:
        if self._reader is None or not self._reader.current():
            self._reader = StatusReader(self.status_path)
            if self._epoch is not None and self._reader.epoch != self._epoch:
                self.restarts += 1
            self._epoch = self._reader.epoch
        return self._reader.read()

    def _step_s(self, status: Status) -> float:
        """The predicted seconds of the step in flight; 0 where nobody predicts."""
        return 0.0 if self.predictor is None else in_flight_s(status, self.predictor.cost)

    def _check(self, status: Status, now_s: float) -> None:
        """Raise InputError for a status that cannot be one of this engine's at this time."""
        if status.taken_s > now_s + 1.0:
            raise InputError(f"status of instance {self.index}: taken {status.taken_s - now_s:.1f} s from now")
        if self.predictor is not None:
            check_status(status, self.predictor.template)

    def ledger_status(self, now_s: float) -> Status:
        """The status as this router can reckon it."""
        return reckon(self.ledger, self.gauges, self.engine, now_s)

    def settle(self, rid: int) -> bool:
        """Strike a request that has ended from the ledger. False where it was struck before."""
        entry = self.ledger.entries.get(rid)
        if entry is not None:
            for gauges in (self.gauges, self.coming):
                gauges.ended_since += entry.sent_s <= gauges.taken_s
        return self.ledger.close(rid)

    def signals(self, status: Status, now_s: float, into: np.ndarray) -> None:
        """Fill ``into``, a record of SIGNALS."""
        rows = status.rows
        waiting = rows[rows["state"] == WAITING]
        held = -(-(waiting["prompt"] + waiting["generated"]) // self.engine.block_size)
        left = np.maximum(0, rows["prompt"] + rows["predicted"] - rows["computed"])
        into["instance"] = self.index
        into["age_s"] = max(0.0, now_s - status.taken_s)
        into["running"], into["waiting"] = status.running, len(waiting)
        into["free_blocks"], into["total_blocks"] = status.free_blocks, self.engine.usable_blocks
        into["block_size"] = self.engine.block_size
        into["waiting_blocks"] = int(held.sum())
        into["first_waiting_blocks"] = int(held[0]) if len(held) else 0
        into["pending_tokens"] = int(left.sum())
        into["prefill_tokens"] = int(np.maximum(0, rows["prompt"] - rows["computed"]).sum())
        for name in ("queue_s", "prefill_s_per_token", "decode_s_per_token"):
            into[name] = getattr(self.gauges, name)
        into["in_flight"], into["in_flight_tokens"] = len(self.ledger), self.ledger.tokens

    def unseen(self, status: Status) -> list[tuple[float, int, int]]:
        """(sent_s, prompt_tokens, predicted_tokens) of what was sent there and ``status`` does not show yet, but for
        what the engine will refuse."""
        shown = set(status.rows["rid"].tolist())
        return [
            (entry.sent_s, entry.prompt_tokens, entry.predicted_tokens)
            for entry in self.ledger.entries.values()
            if entry.rid not in shown
            and entry.streamed == 0
            and not self.engine.rejects(entry.prompt_tokens, max(1, entry.predicted_tokens))
        ]

    def predict(
        self, status: Status, request: Request, metric: str | None, now_s: float, unseen: list | None = None
    ) -> Prediction:
        """What the request would see here; ``unseen``, as of that status, is found where it is not given. Raises
        InputError where nobody predicts for this instance."""
        if self.predictor is None:
            raise InputError(f"instance {self.index} has no Predictor: give the router a preset or a calibration")
        dispatched = self.unseen(status) if unseen is None else unseen
        return self.predictor.predict(status, request, metric, now_s=now_s, dispatched=dispatched)
