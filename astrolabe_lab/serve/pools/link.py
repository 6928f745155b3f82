"""A link that carries KV blocks as modelled: a latency for each transfer, a bandwidth shared by all under way.

Each emulated decode engine has a link of its own, which knows nothing of the others: pulls of several of them from one
prefill engine do not slow each other down. Simulated pools (``disagg.state.HandOff``) share the busier of both ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from astrolabe_lab.calibrate.artifact import Transfer


@dataclass
class Link:
    """``start`` transfers and ``poll`` which have ended, at rising times (modelled s).

    k transfers under way at once each take k times ``transfer.per_block_s`` a block.
    """

    transfer: Transfer
    _now_s: float = 0.0
    _waiting: dict[str, tuple[float, float]] = field(default_factory=dict)  # (moves from, seconds of work alone)
    _moving: dict[str, float] = field(default_factory=dict)  # seconds of work left alone

    def start(self, name: str, blocks: int, now_s: float) -> None:
        self._waiting[name] = (now_s + self.transfer.latency_s, blocks * self.transfer.per_block_s)

    def poll(self, now_s: float) -> list[str]:
        """Names of the transfers that have ended since the last poll."""
        ended = []
        while True:
            begins = min((at for at, _ in self._waiting.values()), default=float("inf"))
            first = min(self._moving, key=self._moving.get, default=None)
            ends = self._now_s + self._moving[first] * len(self._moving) if self._moving else float("inf")
            at = min(begins, ends, now_s)
            if self._moving:
                for name in self._moving:
                    self._moving[name] -= max(0.0, at - self._now_s) / len(self._moving)
            self._now_s = max(self._now_s, at)
            if ends <= begins and ends <= now_s:
                del self._moving[first]
                ended.append(first)
            elif begins <= now_s:
                for name in [name for name, (when, _) in self._waiting.items() if when <= begins]:
                    self._moving[name] = self._waiting.pop(name)[1]
            else:
                return ended

    def __len__(self) -> int:
        return len(self._waiting) + len(self._moving)
