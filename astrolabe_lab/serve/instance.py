"""One engine as a router sees it: its status, the router's own ledger, whether it gets requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from astrolabe_lab.errors import InputError
from astrolabe_lab.predictor import Prediction, Predictor
from astrolabe_lab.request import Request
from astrolabe_lab.serve.breaker import Breaker, Health
from astrolabe_lab.serve.ledger import Ledger
from astrolabe_lab.serve.published import StatusReader
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.sim.state import RUNNING, WAITING
from astrolabe_lab.sim.status import HEADER, ROW, Status


@dataclass
class Instance:
    """An upstream engine.

    ``status_path``: the file of its published status (engines of ours); without it the status is the router's own
    ledger (``ledger_status``). ``predictor``: None where nobody predicts for it.
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
    status_faults: int = 0  # reads of the published status that failed
    restarts: int = 0  # of the engine, as its published status shows them
    scraped: dict = field(default_factory=dict)  # the engine's own gauges, where the status is not published
    _reader: StatusReader | None = field(default=None, repr=False)
    _epoch: tuple | None = field(default=None, repr=False)

    def available(self, now_s: float) -> bool:
        return self.health.healthy and not self.draining and self.breaker.allows(now_s)

    def status(self, now_s: float) -> tuple[Status, str]:
        """(its status, where that came from: published or ledger)."""
        if self.status_path is not None:
            try:
                return self._published(), "published"
            except (InputError, TimeoutError):
                self.status_faults += 1
                self._reader = None  # a restarted engine publishes in a new file
        return self.ledger_status(now_s), "ledger"

    def _published(self) -> Status:
        if self._reader is None or not self._reader.current():
            self._reader = StatusReader(self.status_path)
            if self._epoch is not None and self._reader.epoch != self._epoch:
                self.restarts += 1
            self._epoch = self._reader.epoch
        return self._reader.read()

    def ledger_status(self, now_s: float) -> Status:
        """The status as this router can reckon it from what it dispatched and streamed.

        Requests whose first token has passed are running and hold their tokens; the oldest of the others that still
        fit are running too, their prompts not yet computed; the rest waits. Where the engine's gauges are known
        (``scraped``), no more run than it says. Other routers' requests are unknown.
        """
        block = self.engine.block_size
        free = self.engine.usable_blocks
        seats = self.engine.max_num_seqs
        if self.scraped.get("waiting", 0) > 0:  # the engine has a queue: what runs is what it says
            seats = min(seats, int(self.scraped["running"]))
        running, waiting = [], []
        for entry in self.ledger.entries.values():
            decoding = entry.first_token_s is not None
            computed = entry.prompt_tokens + entry.streamed - 1 if decoding else 0
            held = entry.prompt_tokens + max(entry.streamed, 0)
            blocks = -(-held // block)
            fits = len(running) < seats and blocks <= free
            row = (
                entry.rid, RUNNING if fits else WAITING, entry.prompt_tokens, max(computed, 0) if fits else 0,
                entry.streamed, 0, 0, 0, entry.predicted_tokens, blocks if fits else 0, 0, 0, 0,
            )  # fmt: skip
            if fits:
                free -= blocks
                running.append(row)
            else:
                waiting.append(row)
        header = np.zeros(1, HEADER)
        header["taken_s"], header["step_started_s"] = now_s, np.nan
        header["free_blocks"], header["n_running"] = free, len(running)
        header["n_rows"] = len(running) + len(waiting)
        return Status(header, np.array(running + waiting, ROW))

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
        into["in_flight"], into["in_flight_tokens"] = len(self.ledger), self.ledger.tokens

    def predict(self, status: Status, request: Request, metric: str, now_s: float) -> Prediction:
        """What the request would see here. Raises InputError where nobody predicts for this instance."""
        if self.predictor is None:
            raise InputError(f"instance {self.index} has no Predictor: give the router a preset or a calibration")
        shown = set(status.rows["rid"].tolist())
        unseen = [
            (entry.sent_s, entry.prompt_tokens, entry.predicted_tokens)
            for entry in self.ledger.entries.values()
            if entry.rid not in shown and entry.streamed == 0
        ]
        return self.predictor.predict(status, request, metric, now_s=now_s, dispatched=unseen)
