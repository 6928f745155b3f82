"""Whether an instance gets requests: health with hysteresis, and a circuit breaker on what requests experience."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Breaker:
    """Opens after ``failures`` in a row, lets one trial through after ``cool_s``, closes when a trial succeeds.

    Only what says something about the instance counts: no connection, no answer in time, HTTP 5xx. An engine that
    refuses a request (4xx) is well.
    """

    failures: int = 3
    cool_s: float = 5.0
    in_a_row: int = 0
    opened_s: float | None = None
    trial_s: float | None = None

    def allows(self, now_s: float) -> bool:
        """Whether a request may go there now."""
        if self.opened_s is None:
            return True
        if now_s - self.opened_s < self.cool_s:
            return False
        return self.trial_s is None or now_s - self.trial_s >= self.cool_s  # a trial that never ended frees the next

    def sent(self, now_s: float) -> None:
        """A request goes there."""
        if self.opened_s is not None:
            self.trial_s = now_s

    def answers(self) -> None:
        """An answer has begun: the next trial need not wait for its end."""
        self.trial_s = None

    def succeeded(self) -> None:
        """An answer has ended as it should."""
        self.in_a_row, self.opened_s, self.trial_s = 0, None, None

    def failed(self, now_s: float) -> None:
        """No connection, no answer in time, HTTP 5xx, or an answer that broke off."""
        self.in_a_row += 1
        if self.opened_s is not None or self.in_a_row >= self.failures:
            self.opened_s, self.trial_s = now_s, None


@dataclass
class Health:
    """Healthy until ``down_after`` probes in a row fail; healthy again after ``up_after`` in a row succeed."""

    down_after: int = 3
    up_after: int = 2
    healthy: bool = True
    against: int = 0  # probes in a row that contradict ``healthy``

    def probed(self, ok: bool) -> bool:
        """Take in a probe's result; True when it changed the verdict."""
        if ok == self.healthy:
            self.against = 0
            return False
        self.against += 1
        if self.against < (self.down_after if self.healthy else self.up_after):
            return False
        self.healthy, self.against = ok, 0
        return True
