"""What a P/D router knows when it decides: its ledger of requests in flight, polled occupancy, its constants.

The simulator and the live proxy fill the same arrays, so that a policy cannot tell which of them it runs in.
"""

from __future__ import annotations

import operator

import numpy as np

from astrolabe_lab.disagg.constants import Constants
from astrolabe_lab.errors import InputError

IN_FLIGHT = np.dtype(
    [
        ("rid", "i8"),
        ("prompt_tokens", "i8"),
        ("predicted_tokens", "i8"),
        ("tight", "i8"),  # 1: the class tight, 0: loose
        ("prefill", "i8"),  # number of the engine in its pool
        ("decode", "i8"),
        ("sent_s", "f8"),  # when the router sent it to prefill
        ("prefilled_s", "f8"),  # when prefill answered, and it went on to decode; NaN: not yet
        ("first_token_s", "f8"),  # when decode streamed the first token; NaN: not yet
        ("streamed", "i8"),  # tokens streamed to the client so far
    ]
)
POLLED = np.dtype(
    [
        ("instance", "i8"),  # number in its pool; stays the same when others fail
        ("taken_s", "f8"),  # when these were read
        ("used_tokens", "i8"),  # KV cache in use, whole blocks
        ("capacity_tokens", "i8"),
        ("running", "i8"),
        ("waiting", "i8"),
    ]
)


class PoolsView:
    """The healthy engines of both pools as one router sees them at one decision.

    ``prefill`` and ``decode``: arrays of POLLED, one element a healthy engine, as of the last poll. ``in_flight``: an
    array of IN_FLIGHT, the requests that this router has sent and not seen end, in the order they were sent; exact up
    to ``now_s``. All three are read-only. ``constants``: what it takes the cluster to cost. A policy returns a pair of
    indices into ``prefill`` and ``decode``.
    """

    __slots__ = ("now_s", "prefill", "decode", "in_flight", "constants")

    def __init__(self, now_s: float, prefill, decode, in_flight, constants: Constants):
        self.now_s = now_s
        self.prefill = _read_only(prefill)
        self.decode = _read_only(decode)
        self.in_flight = _read_only(in_flight)
        self.constants = constants


def _read_only(array: np.ndarray) -> np.ndarray:
    """A view that nobody writes through. Compiled policies tell it from a writable one: one kind for all worlds."""
    shown = array.view()
    shown.flags.writeable = False
    return shown


class Ledger:
    """A live router's record of its requests in flight; ``rows`` is the array that views show.

    ``sent`` before the request goes to prefill, ``prefilled`` when that answered, ``streamed`` at each chunk of tokens,
    ``ended`` exactly once or more (later calls do nothing), whatever became of it.
    """

    def __init__(self):
        self._rows = np.zeros(64, IN_FLIGHT)
        self._at: dict[int, int] = {}
        self._n = 0

    @property
    def rows(self) -> np.ndarray:
        return self._rows[: self._n]

    def sent(self, request, prefill: int, decode: int, now_s: float) -> None:
        """Request (a ``Request``) goes to engine ``prefill``, then ``decode`` (numbers in their pools)."""
        if request.rid in self._at:
            raise InputError(f"request {request.rid} is already in flight: give each its own rid")
        if self._n == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        self._rows[self._n] = (
            request.rid, request.prompt_tokens, request.predicted_tokens, request.slo == "tight", prefill, decode,
            now_s, np.nan, np.nan, 0,
        )  # fmt: skip
        self._at[request.rid] = self._n
        self._n += 1

    def prefilled(self, rid: int, now_s: float) -> None:
        self._rows["prefilled_s"][self._at[rid]] = now_s

    def streamed(self, rid: int, tokens: int, now_s: float) -> None:
        """``tokens`` more have been streamed."""
        row = self._rows[self._at[rid]]
        if row["streamed"] == 0 and tokens > 0:
            row["first_token_s"] = now_s
        row["streamed"] += tokens

    def ended(self, rid: int) -> bool:
        """Forget the request; False where it was not in flight any more."""
        at = self._at.pop(rid, None)
        if at is None:
            return False
        self._rows[at : self._n - 1] = self._rows[at + 1 : self._n]  # keeps the order they were sent in
        self._n -= 1
        for other, place in self._at.items():
            if place > at:
                self._at[other] = place - 1
        return True


def check_pair(chosen, n_prefill: int, n_decode: int, name: str) -> tuple[int, int]:
    """The policy's choice as two ints. Raises InputError naming the policy where it is no pair of indices."""
    try:
        p, d = chosen
        pair = (operator.index(p), operator.index(d))
    except (TypeError, ValueError):
        pair = None
    if pair is None or isinstance(p, (bool, np.bool_)) or isinstance(d, (bool, np.bool_)):
        raise InputError(
            f"policy {name}: choose() returned {chosen!r}; it must return a pair of indices (prefill, decode)"
        )
    if not (0 <= pair[0] < n_prefill and 0 <= pair[1] < n_decode):
        raise InputError(
            f"policy {name}: choose() returned {pair}; the cluster has {n_prefill} healthy prefill engines and "
            f"{n_decode} healthy decode engines, numbered from 0"
        )
    return pair
