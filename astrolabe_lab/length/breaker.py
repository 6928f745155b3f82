"""A circuit breaker: what fails time after time is left alone for a while, so that it costs nothing."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from astrolabe_lab.errors import InputError


class Breaker:
    """Says whether to ask at all: ``ask()`` before, then exactly one of ``succeeded()``, ``failed()``, ``gave_up()``.

    After ``failures`` in a row ``ask()`` is False for ``cool_s``. Then a single probe may ask: if it succeeds
    all may, if it fails the pause doubles, up to ``longest_s``. ``gave_up()`` is for who stopped waiting for
    reasons of its own and learned nothing. ``clock`` gives seconds. Safe to share between threads.
    """

    def __init__(
        self,
        failures: int = 5,
        cool_s: float = 1.0,
        longest_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if isinstance(failures, bool) or not isinstance(failures, int) or failures < 1:
            raise InputError(f"failures={failures!r} should be a whole number >= 1")
        if not (0 < cool_s <= longest_s < math.inf):
            raise InputError(f"cool_s={cool_s!r} and longest_s={longest_s!r}: want 0 < cool_s <= longest_s, in s")
        self.failures, self.cool_s, self.longest_s, self.clock = failures, cool_s, longest_s, clock
        self._lock = threading.Lock()
        self._in_a_row, self._pause_s, self._until_s, self._probing = 0, cool_s, None, False

    @property
    def open(self) -> bool:
        """True from the last failure of a row until a probe succeeds."""
        return self._until_s is not None

    def ask(self) -> bool:
        """Whether to ask now."""
        with self._lock:
            if self._until_s is None:
                return True
            if self._probing or self.clock() < self._until_s:
                return False
            self._probing = True
            return True

    def succeeded(self) -> None:
        """The answer was right and in time."""
        with self._lock:
            self._in_a_row, self._pause_s, self._until_s, self._probing = 0, self.cool_s, None, False

    def failed(self) -> None:
        """The answer was wrong, late or none."""
        with self._lock:
            self._in_a_row += 1
            if self._probing:
                self._pause_s, self._probing = min(2 * self._pause_s, self.longest_s), False
            elif self._until_s is not None or self._in_a_row < self.failures:
                return  # asked before the pause began, or too few yet
            self._until_s = self.clock() + self._pause_s

    def gave_up(self) -> None:
        """Nobody waits for the answer any more: it says nothing."""
        with self._lock:
            self._probing = False
