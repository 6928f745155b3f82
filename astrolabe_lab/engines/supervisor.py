"""Watches the engines of a running cluster: says when one has ended, starts it again where that is wished, and says
when the host does not keep up with the emulated ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from astrolabe_lab.errors import InputError

from .engine_process import Engine
from .pace import LATE_SHARE, read_pace

MOST_RESTARTS = 3  # of one engine within FORGIVEN_S, then it stays down: it dies of something that lasts
FORGIVEN_S = 600.0
PACE_S = 10.0


@dataclass
class Watched:
    """An engine and what has befallen it."""

    engine: Engine
    ended: bool = False
    starting_since: float | None = None
    restarts: list[float] = field(default_factory=list)
    late_s: float = 0.0
    modelled_s: float = 0.0


class Supervisor(threading.Thread):
    """``restart``: start an engine again that ended (``restarted`` counts), on the same port. ``say`` gets one line an
    event; ``every_s``: wall s between looks."""

    def __init__(self, engines: list[Engine], restart: bool, say: Callable[[str], None], every_s: float = 0.5):
        super().__init__(name="astrolabe-supervisor", daemon=True)
        self._watched = [Watched(engine) for engine in engines]
        self._restart = restart
        self._say = say
        self._every_s = every_s
        self._ended = threading.Event()
        self.restarted = 0

    @property
    def lost(self) -> list[Engine]:
        """Engines that ended and will not be started again."""
        return [one.engine for one in self._watched if one.ended]

    def stop(self) -> None:
        """Look no more; returns when the last look is over."""
        self._ended.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        look_at_pace = time.monotonic() + PACE_S
        while not self._ended.wait(self._every_s):
            for one in self._watched:
                if not one.ended:
                    self._look(one)
            if time.monotonic() > look_at_pace:
                look_at_pace = time.monotonic() + PACE_S
                for one in self._watched:
                    self._pace(one)

    def _look(self, one: Watched) -> None:
        engine = one.engine
        if engine.alive:
            if one.starting_since is not None and engine.serves():
                self._say(f"engine {engine.index} serves again after {time.monotonic() - one.starting_since:.0f} s")
                one.starting_since = None
            return
        now = time.monotonic()
        self._say(f"engine {engine.index} ended with code {engine.code}; the end of {engine.log}:\n{engine.tail(8)}")
        one.restarts = [at for at in one.restarts if now - at < FORGIVEN_S]
        if not self._restart:
            one.ended = True
        elif len(one.restarts) >= MOST_RESTARTS:
            one.ended = True
            self._say(
                f"engine {engine.index} ended {len(one.restarts) + 1} times within {FORGIVEN_S / 60:.0f} minutes: "
                "it is not started again"
            )
        else:
            one.restarts.append(now)
            one.starting_since = now
            self.restarted += 1
            self._say(f"engine {engine.index} is started again on {engine.url}")
            engine.start()

    def _pace(self, one: Watched) -> None:
        try:
            pace = read_pace(one.engine.pace)
        except InputError:
            return  # a real engine, or one that is starting
        late_s, modelled_s = pace["late_s"] - one.late_s, pace["modelled_s"] - one.modelled_s
        if modelled_s < 0:  # a new life
            late_s, modelled_s = pace["late_s"], pace["modelled_s"]
        one.late_s, one.modelled_s = pace["late_s"], pace["modelled_s"]
        if modelled_s > 1.0 and late_s > LATE_SHARE * modelled_s:
            self._say(
                f"engine {one.engine.index}: the host does not keep up: steps ended {late_s / modelled_s:.0%} later "
                f"than modelled in the last {PACE_S:.0f} s; start with a larger time scale, or fewer engines"
            )
