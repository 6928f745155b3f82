"""What a router has dispatched to one instance and not seen the end of.

Every entry is opened once and closed once, by whoever ends it first; closing again changes nothing. So the counts are
never negative and never leak, however a request ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

ENTRY = np.dtype(
    [
        ("rid", "i8"),
        ("sent_s", "f8"),
        ("prompt", "i8"),
        ("predicted", "i8"),
        ("streamed", "i8"),  # answer tokens that have passed; at least 1 once the first has
        ("streams", "?"),  # tokens pass one by one, not all at the end
        ("open", "?"),
    ]
)


@dataclass(slots=True)
class InFlight:
    """A request on its way. Times in modelled s; ``streamed``: answer tokens that have passed through the router."""

    rid: int
    prompt_tokens: int
    predicted_tokens: int
    sent_s: float
    streamed: int = 0
    first_token_s: float | None = None
    row: int = -1  # in the ledger's table


@dataclass
class Ledger:
    """The requests in flight at one instance, in the order in which they were sent. ``opened, prompts, predictions``:
    how many ever were, and the sums of their tokens."""

    entries: dict[int, InFlight] = field(default_factory=dict)
    tokens: int = 0  # prompt and predicted tokens of the entries
    opened: int = 0
    prompts: int = 0
    predictions: int = 0
    _table: np.ndarray = field(default_factory=lambda: np.zeros(64, ENTRY), repr=False)
    _used: int = field(default=0, repr=False)

    def __len__(self) -> int:
        return len(self.entries)

    def open(self, rid: int, prompt_tokens: int, predicted_tokens: int, now_s: float, streams: bool = True) -> InFlight:
        """Enter a request. Raises KeyError for a rid that is in flight here already."""
        if rid in self.entries:
            raise KeyError(f"request {rid} is in flight at this instance already")
        if self._used == len(self._table):
            self._make_room()
        entry = self.entries[rid] = InFlight(rid, prompt_tokens, predicted_tokens, now_s, row=self._used)
        self._table[self._used] = (rid, now_s, prompt_tokens, predicted_tokens, 0, streams, True)
        self._used += 1
        self.tokens += prompt_tokens + predicted_tokens
        self.opened += 1
        self.prompts += prompt_tokens
        self.predictions += predicted_tokens
        return entry

    def progress(self, entry: InFlight, streamed: int, now_s: float) -> None:
        """So many tokens of its answer have passed."""
        if streamed > 0 and entry.first_token_s is None:
            entry.first_token_s = now_s
        entry.streamed = streamed
        if self.entries.get(entry.rid) is entry:
            self._table["streamed"][entry.row] = streamed

    def close(self, rid: int) -> bool:
        """Strike a request. False where it was struck before."""
        entry = self.entries.pop(rid, None)
        if entry is None:
            return False
        self._table["open"][entry.row] = False
        self.tokens -= entry.prompt_tokens + entry.predicted_tokens
        return True

    def table(self) -> np.ndarray:
        """ENTRY rows of the requests in flight, in the order in which they were sent; a copy."""
        used = self._table[: self._used]
        return used[used["open"]]

    def _make_room(self) -> None:
        kept = self.table()
        size = max(64, 2 * len(kept))
        self._table = np.zeros(size, ENTRY)
        self._table[: len(kept)] = kept
        self._used = len(kept)
        for row, rid in enumerate(kept["rid"].tolist()):
            self.entries[rid].row = row
