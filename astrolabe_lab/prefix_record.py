"""What a router remembers of the prefixes that it has sent to each instance: its guess at what their caches hold.

No engine is asked. A prefix that was sent is taken to be cached there until the record of that instance is full, then
the longest unused goes first, as in the engines; the router does not hear of what they forget, nor of what other
routers send (SGLang's router keeps such an approximate tree).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from astrolabe_lab.request import Request


class PrefixOverlap(NamedTuple):
    """By instance: leading tokens of the request's prompt that the router takes to be cached there (int64), s since it
    sent the last request that begins with all of them (float64, NaN where there are none), and tokens of all prefixes
    that it remembers of that instance (int64)."""

    tokens: np.ndarray
    age_s: np.ndarray
    remembered_tokens: np.ndarray


class PrefixRecord:
    """One router's record. ``block_tokens``: tokens that an id of ``Request.prefix_blocks`` stands for;
    ``capacity_tokens``: by instance, how many are remembered at most."""

    def __init__(self, block_tokens: int, capacity_tokens: dict[int, int]):
        self.block_tokens = block_tokens
        self._most = {i: max(1, tokens // block_tokens) for i, tokens in capacity_tokens.items()}
        # A block is known by its number: that of the block before it and its id give it, so equal numbers mean that
        # all up to there is equal. Each instance's blocks are in the order in which they will be forgotten.
        self._numbers: dict[tuple[int, int], int] = {}
        self._keys: dict[int, tuple[int, int]] = {}
        self._holders: dict[int, int] = {}
        self._held: dict[int, OrderedDict[int, float]] = {i: OrderedDict() for i in self._most}
        self._next = 1

    def overlap(self, request: Request, instances, now_s: float) -> PrefixOverlap:
        """What the instances of these numbers are taken to have of the request's prompt."""
        blocks = self._known(request)
        tokens = np.zeros(len(instances), np.int64)
        age_s = np.full(len(instances), np.nan)
        for k, i in enumerate(instances):
            held = self._held[i]
            found = 0
            while found < len(blocks) and blocks[found] in held:
                found += 1
            if found:
                tokens[k] = min(found * self.block_tokens, request.prompt_tokens)
                age_s[k] = now_s - held[blocks[found - 1]]
        remembered = [len(self._held[i]) * self.block_tokens for i in instances]
        return PrefixOverlap(tokens, age_s, np.array(remembered, np.int64))

    def sent(self, request: Request, instance: int, now_s: float) -> None:
        """The request was sent to the instance of this number."""
        held = self._held[instance]
        path = []
        before = 0
        for block in request.prefix_blocks[: min(self._listed(request), self._most[instance])]:
            key = (before, block)
            if key not in self._numbers:
                self._numbers[key], self._keys[self._next] = self._next, key
                self._next += 1
            before = self._numbers[key]
            path.append(before)
        for number in reversed(path):  # the last goes first: what remains is a prefix
            if number not in held:
                self._holders[number] = self._holders.get(number, 0) + 1
            held[number] = now_s
            held.move_to_end(number)
        while len(held) > self._most[instance]:
            self._drop(held.popitem(last=False)[0])

    def forget(self, instance: int) -> None:
        """The instance has lost its cache."""
        held = self._held[instance]
        while held:
            self._drop(held.popitem(last=False)[0])

    def __len__(self) -> int:
        """Blocks remembered of any instance."""
        return len(self._numbers)

    def _listed(self, request: Request) -> int:
        return min(len(request.prefix_blocks), -(-request.prompt_tokens // self.block_tokens))

    def _known(self, request: Request) -> list[int]:
        """The numbers of the request's leading blocks, as far as any instance is remembered to have them."""
        found = []
        before = 0
        for block in request.prefix_blocks[: self._listed(request)]:
            before = self._numbers.get((before, block), 0)
            if before == 0:
                break
            found.append(before)
        return found

    def _drop(self, number: int) -> None:
        self._holders[number] -= 1
        if self._holders[number] == 0:
            del self._holders[number]
            del self._numbers[self._keys.pop(number)]
