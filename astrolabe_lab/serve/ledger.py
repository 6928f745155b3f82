"""What a router has dispatched to one instance and not seen the end of.

Every entry is opened once and closed once, by whoever ends it first; closing again changes nothing. So the counts are
never negative and never leak, however a request ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class InFlight:
    """A request on its way. Times in modelled s; ``streamed``: answer tokens that have passed through the router."""

    rid: int
    prompt_tokens: int
    predicted_tokens: int
    sent_s: float
    streamed: int = 0
    first_token_s: float | None = None


@dataclass
class Ledger:
    """The requests in flight at one instance, in the order in which they were sent."""

    entries: dict[int, InFlight] = field(default_factory=dict)
    tokens: int = 0  # prompt and predicted tokens of the entries

    def __len__(self) -> int:
        return len(self.entries)

    def open(self, rid: int, prompt_tokens: int, predicted_tokens: int, now_s: float) -> InFlight:
        """Enter a request. Raises KeyError for a rid that is in flight here already."""
        if rid in self.entries:
            raise KeyError(f"request {rid} is in flight at this instance already")
        entry = self.entries[rid] = InFlight(rid, prompt_tokens, predicted_tokens, now_s)
        self.tokens += prompt_tokens + predicted_tokens
        return entry

    def close(self, rid: int) -> bool:
        """Strike a request. False where it was struck before."""
        entry = self.entries.pop(rid, None)
        if entry is None:
            return False
        self.tokens -= entry.prompt_tokens + entry.predicted_tokens
        return True

    def after(self, taken_s: float) -> list[tuple[float, int, int]]:
        """(sent_s, prompt_tokens, predicted_tokens) of what was sent after ``taken_s``."""
        return [(e.sent_s, e.prompt_tokens, e.predicted_tokens) for e in self.entries.values() if e.sent_s > taken_s]
