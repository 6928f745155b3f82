"""What the routers know of the engines: signals and statuses with their ages, own ledgers, and who is healthy."""

from __future__ import annotations

import numpy as np

from astrolabe_lab.sim import kernel
from astrolabe_lab.sim.caching import look_up_newcomer
from astrolabe_lab.sim.observe import observe, reveal
from astrolabe_lab.sim.signals import SIGNALS, read_signals
from astrolabe_lab.sim.state import NONE, State
from astrolabe_lab.sim.status import HEADER, ROW, write_status
from astrolabe_lab.sim.world import ControlPlane


class Knowledge:
    """Advances the engines to the instants at which somebody looks, and keeps what was seen.

    ``sent[i, j]``: (requests, tokens) that router j has dispatched to instance i; with the state's ``done`` its ledger.
    ``unseen[j][i]``: router j's dispatches to i that i's status may not show yet, as (decided_s, ready_s,
    prompt_tokens, predicted_tokens, request).
    """

    def __init__(self, state: State, control: ControlPlane, leaps: bool):
        n = len(state.engines)
        self.state = state
        self.interval_s = control.status_interval_s
        self.leaps = leaps
        self.base = np.zeros(n, SIGNALS)
        self.taken_s = np.zeros(n)
        self.reachable = np.ones(n, np.bool_)
        self.paused: set[int] = set()  # instances whose time stands still
        self.statuses: list = [None] * n  # (header, rows) where the current state cannot be read,
        self.pools: list = [None] * n  # and what its cache held then
        self.refreshed_s = -np.inf
        self.sent = np.zeros((n, control.routers, 2), np.int64)
        self.unseen: list[list[list]] = [[[] for _ in range(n)] for _ in range(control.routers)]
        self.shown = np.zeros(n, SIGNALS)
        self.header = np.zeros(1, HEADER)
        self.rows = np.zeros(256, ROW)
        self.set_healthy(range(n))

    def set_healthy(self, instances) -> None:
        """From now on the routers choose among ``instances``."""
        self.healthy = tuple(sorted(instances))
        self.order = np.array(self.healthy, np.int64)
        self.signals = self.shown[: len(self.healthy)].view()
        self.signals.flags.writeable = False

    def look(self, j: int, now_s: float) -> None:
        """Bring router j's signals to now_s: fresh ones, or those of the last refresh, and its own ledger."""
        if self.interval_s == 0.0 and not self.paused:
            known = self.reachable, self.base, self.taken_s
            observe(self.state, now_s, self.leaps, *known, self.sent, j, self.order, self.shown)
            return
        self.bring_to(now_s)
        if self.interval_s == 0.0:
            for i in np.flatnonzero(self.reachable):
                self.read(i, now_s)
        reveal(self.base, self.taken_s, now_s, self.sent, self.state.done, j, self.order, self.shown)

    def bring_to(self, now_s: float) -> None:
        """Bring everything up to now_s, where something is about to happen: refreshes that were due before, engines."""
        at_s = -np.inf
        if self.interval_s > 0.0:
            at_s = min(np.floor(now_s / self.interval_s) * self.interval_s, now_s)
        if at_s > self.refreshed_s:
            self.refreshed_s = at_s
            self.advance(at_s)
            for i in np.flatnonzero(self.reachable):
                self.read(i, at_s)
                self.keep_status(i, at_s)
        self.advance(now_s)

    def advance(self, until_s: float) -> None:
        if not self.paused:
            kernel.advance_all(*self.state, until_s, self.leaps)
            return
        for i in range(len(self.state.engines)):
            if i not in self.paused:
                kernel.advance(*self.state, i, until_s, NONE, self.leaps)

    def read(self, i: int, now_s: float) -> None:
        """Take instance i's signals."""
        read_signals(*self.state[:4], i, now_s, self.base[i])
        self.taken_s[i] = now_s

    def keep_status(self, i: int, now_s: float) -> None:
        """Take instance i's status, which its Predictor works from until the next one."""
        header, rows = self._write_status(i, now_s)
        self.statuses[i] = (header.copy(), rows.copy())
        e = self.state.engines[i]
        if e["pool_at"] != NONE:
            self.pools[i] = self.state.pool[e["pool_at"] :][: e["usable_blocks"] + 1].copy()
        for unseen in self.unseen:
            unseen[i] = [sent for sent in unseen[i] if sent[1] > now_s]

    def status(self, i: int, now_s: float):
        """(header, rows) of the status that instance i's Predictor has at now_s."""
        return self.statuses[i] or self._write_status(i, now_s)

    def cached(self, i: int, r: int) -> tuple[int, int]:
        """(leading blocks of request r in instance i's cache, those of them that running requests hold), as of i's
        status: its Predictor, beside the engine, hashes the prompt and looks."""
        state = self.state
        pool, at = state.pool, int(state.engines["pool_at"][i])
        if self.statuses[i] is not None:
            pool, at = self.pools[i], 0
        found, idle = look_up_newcomer(state.engines, state.requests, pool, at, state.lists, i, r)
        return found, found - idle

    def in_transit(self, j: int, i: int, now_s: float, taken_s: float) -> list:
        """(ready_s, prompt_tokens, predicted_tokens, request) of router j's dispatches that a status of i, taken at
        taken_s, does not show."""
        unseen = self.unseen[j][i]
        if unseen:
            unseen = self.unseen[j][i] = [sent for sent in unseen if sent[1] > taken_s]
        return [sent[1:] for sent in unseen if sent[0] <= now_s]

    def _write_status(self, i: int, now_s: float):
        while not write_status(*self.state, i, now_s, self.header, self.rows):
            self.rows = np.zeros(2 * int(self.header["n_rows"][0]), ROW)
        return self.header, self.rows[: int(self.header["n_rows"][0])]
