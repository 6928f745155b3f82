"""What a router has dispatched to one instance and not seen the end of.

Every entry is opened once and closed once, by whoever ends it first; closing again changes nothing. So the counts are
never negative and never leak, however a request ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class InFlight:
    """A request on its way. Times in modelled s; ``streamed``: answer tokens that have passed through the router;
    ``streams``: whether they pass one by one, or all at the end."""

    rid: int
    prompt_tokens: int
    predicted_tokens: int
    sent_s: float
    streamed: int = 0
    first_token_s: float | None = None
    streams: bool = True


@dataclass
class Ledger:
    """The requests in flight at one instance, in the order in which they were sent. ``opened, prompts, predictions``:
    how many ever were, and the sums of their tokens."""

    entries: dict[int, InFlight] = field(default_factory=dict)
    tokens: int = 0  # prompt and predicted tokens of the entries
    opened: int = 0
    prompts: int = 0
    predictions: int = 0

    def __len__(self) -> int:
        return len(self.entries)

    def open(self, rid: int, prompt_tokens: int, predicted_tokens: int, now_s: float, streams: bool = True) -> InFlight:
        """Enter a request. Raises KeyError for a rid that is in flight here already."""
        if rid in self.entries:
            raise KeyError(f"request {rid} is in flight at this instance already")
        entry = self.entries[rid] = InFlight(rid, prompt_tokens, predicted_tokens, now_s, streams=streams)
        self.tokens += prompt_tokens + predicted_tokens
        self.opened += 1
        self.prompts += prompt_tokens
        self.predictions += predicted_tokens
        return entry

    def close(self, rid: int) -> bool:
        """Strike a request. False where it was struck before."""
        entry = self.entries.pop(rid, None)
        if entry is None:
            return False
        self.tokens -= entry.prompt_tokens + entry.predicted_tokens
        return True
