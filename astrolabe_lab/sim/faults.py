"""Faults of a run: planned at its start, each takes effect at its own time."""

from __future__ import annotations

import numpy as np

from astrolabe_lab.errors import InputError
from astrolabe_lab.sim import kernel
from astrolabe_lab.sim.world import Outage, Slowdown


def check_faults(faults, n: int) -> None:
    """Raise InputError for faults that are none, of no instance among n, or that overlap with one of their kind."""
    windows: dict[tuple, list] = {}
    if not isinstance(faults, (list, tuple)):
        raise InputError(f"faults: {faults!r} is no list; write faults=[...]")
    for fault in faults:
        if not isinstance(fault, (Outage, Slowdown)):
            raise InputError(f"fault {fault!r} is neither an Outage nor a Slowdown")
        if fault.instance >= n:
            raise InputError(f"fault: instance={fault.instance} is outside 0..{n - 1}")
        kind = type(fault)
        for other in windows.setdefault((kind, fault.instance), []):
            if fault.start_s < other.end_s and other.start_s < fault.end_s:
                raise InputError(
                    f"fault: two {kind.__name__.lower()}s of instance {fault.instance} overlap; separate them"
                )
        windows[kind, fault.instance].append(fault)


class Faults:
    """The faults of one run. ``down``: instances that have stopped, with their outage."""

    def __init__(self, run, faults):
        self.run = run
        self.knowledge = run.knowledge
        self.down: dict[int, Outage] = {}
        check_faults(faults, len(run.state.engines))
        for fault in faults:
            if isinstance(fault, Slowdown):
                run.at(fault.start_s, run.START, self._slow, fault.instance, fault.factor)
                run.at(fault.end_s, run.END, self._slow, fault.instance, 1.0)
                continue
            run.at(fault.start_s, run.START, self._stop, fault)
            run.at(fault.start_s + fault.detected_after_s, run.START, self._detect, fault)
            if np.isfinite(fault.end_s):
                run.at(fault.end_s, run.END, self._come_back, fault)

    def refuses(self, i: int) -> bool:
        """Whether a dispatch to instance i finds nobody there (a hung one takes it, and answers when it is back)."""
        return i in self.down and i not in self.knowledge.paused

    def leave_out(self, i: int) -> None:
        """The routers have found out that instance i is down; they take its cache for lost."""
        for router in self.run.routers:
            router.prefixes.forget(i)
        self.knowledge.set_healthy(x for x in self.knowledge.healthy if x != i)

    def _slow(self, now_s: float, i: int, factor: float) -> None:
        self.knowledge.bring_to(now_s)
        self.run.state.engines["slow_factor"][i] = factor

    def _stop(self, now_s: float, fault: Outage) -> None:
        i = fault.instance
        self.knowledge.bring_to(now_s)
        self.knowledge.read(i, now_s)
        self.knowledge.keep_status(i, now_s)
        self.knowledge.reachable[i] = False
        self.down[i] = fault
        if fault.on_stop == "pause":
            self.knowledge.paused.add(i)
            return
        redispatch = fault.on_stop == "redispatch"
        for r in kernel.stop(*self.run.state, i, now_s, redispatch):
            if redispatch:
                self.run.at(now_s, self.run.RETRY, self.run.decide, int(r))

    def _detect(self, _, fault: Outage) -> None:
        if self.down.get(fault.instance) is fault:
            self.leave_out(fault.instance)

    def _come_back(self, now_s: float, fault: Outage) -> None:
        i = fault.instance
        self.knowledge.bring_to(now_s)
        engine = self.run.state.engines[i]
        if i in self.knowledge.paused:
            self.knowledge.paused.remove(i)
            for field in ("start_s", "end_s", "now_s"):
                engine[field] += now_s - fault.start_s
        engine["now_s"] = max(engine["now_s"], now_s)
        del self.down[i]
        self.knowledge.reachable[i] = True
        self.knowledge.statuses[i] = None
        if self.knowledge.interval_s > 0.0:
            self.knowledge.read(i, now_s)
            self.knowledge.keep_status(i, now_s)
        self.knowledge.set_healthy({*self.knowledge.healthy, i})
