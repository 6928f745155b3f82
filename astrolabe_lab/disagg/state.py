"""The state of a P/D cluster: two pools of exact engines, and what is between them, as flat arrays.

``prefill`` and ``decode`` are ``sim.state.State``s over the same requests: at prefill each has one token to generate,
which is dropped; at decode all of its own. A request's way through ``Pools.way`` is its phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from astrolabe_lab.errors import InputError
from astrolabe_lab.sim.state import NONE, State, new_state

# where a request is; READY: its blocks are noticed, LOCAL: decode's own, pulled or to be recomputed
UNSENT, PREFILL, MOVING, QUEUED, PULLING, LANDED, READY, LOCAL, ENDED = range(9)

WAY = np.dtype(
    [
        ("phase", "i4"),
        ("prefill", "i4"),
        ("decode", "i4"),
        ("tight", "i4"),
        ("held", "i4"),  # blocks held for it at prefill
        ("seen_in", "i4"),  # slot of the step in flight that reports its blocks, + 1; 0: none does
        ("failed", "i4"),  # 1: its pull failed; 2: and its blocks at decode are given back
        ("sent_s", "f8"),
        ("prefilled_s", "f8"),
        ("pull_s", "f8"),
        ("landed_s", "f8"),
    ],
    align=True,
)
PULL = np.dtype(
    [
        ("request", "i8"),
        ("joins_s", "f8"),  # when its blocks begin to move
        ("left_s", "f8"),  # of moving them alone
        ("joined", "i8"),
    ]
)
HEADER = np.dtype(
    [
        ("polls_at_launch", "i8"),
        ("pull_at_once", "i8"),
        ("recompute", "i8"),
        ("base_s", "f8"),
        ("per_block_s", "f8"),
        ("proxy_s", "f8"),
        ("lease_s", "f8"),  # inf: decode's heartbeats keep it
        ("n_pulls", "i8"),
        ("moved_s", "f8"),  # up to when ``left_s`` are
        ("n_prefilled", "i8"),
        ("n_delivered", "i8"),
        ("n_leases", "i8"),  # of those prefilled, whose leases have been looked at
        ("n_open", "i8"),
        ("polled_s", "f8"),
    ],
    align=True,
)
POLLS = ("launch", "end")
ON_FAILURE = ("recompute", "fail")


@dataclass(frozen=True)
class HandOff:
    """How a KV cache gets from prefill to decode, as vLLM's NIXL connector pulls it; times in s.

    A pull starts with a decode step, takes ``base_s``, then ``per_block_s`` a block; blocks that move at once share the
    bandwidth of the prefill engine they leave and of the decode engine they go to. ``proxy_s``: from prefill's answer
    to the request's arrival at decode. ``polls``: a worker looks for ended pulls when a step is launched (GPUs) or when
    it ends (CPUs); its scheduler hears of them when that step has ended, and without a step at once. ``lease_s``: after
    so long prefill frees blocks that nobody has begun to pull; ``heartbeat``: decode renews the lease of every request
    that it has. ``on_failure``: what decode does about blocks it cannot get, recompute or fail (vLLM's default is to
    fail). ``pull_at_once``: decode pulls without a free seat, as vLLM does not. Emulated pools do otherwise in two
    things: ``serve.pools.launch.Handover``.
    """

    base_s: float = 0.040
    per_block_s: float = 16 * 36_864 / 10e9
    proxy_s: float = 0.0
    polls: str = "launch"
    lease_s: float = 30.0
    heartbeat: bool = True
    on_failure: str = "recompute"
    pull_at_once: bool = False

    def __post_init__(self):
        for name in ("base_s", "per_block_s", "proxy_s", "lease_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise InputError(f"hand-off: {name}={value!r} must be a finite number >= 0, in s")
        for name, allowed in (("polls", POLLS), ("on_failure", ON_FAILURE)):
            if getattr(self, name) not in allowed:
                raise InputError(f"hand-off: {name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        for name in ("heartbeat", "pull_at_once"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"hand-off: {name}={getattr(self, name)!r} must be true or false")


class Pools(NamedTuple):
    """Two pools and what is between them; R requests, P prefill and D decode engines."""

    header: np.ndarray  # (1,) HEADER
    way: np.ndarray  # (R,) WAY
    prefilled: np.ndarray  # (R,) int64: requests in the order their prefills ended
    open: np.ndarray  # (R,) int64: the router's requests in flight, in the order it sent them
    pulls: np.ndarray  # (R,) PULL
    holding: np.ndarray  # (D, 3) int64: head, tail and length of the list of requests that hold blocks without a seat
    wake_s: np.ndarray  # (P + D,) when each engine's scheduler runs next; inf: not before something happens
    pulled: np.ndarray  # (P, 3) int64: blocks pulled that are still held: not seen, and seen by the step in a slot
    prefill: State
    decode: State


def new_pools(trace, prefill, decode, hand_off: HandOff) -> Pools:
    """Idle pools; ``prefill`` and ``decode``: (configs, costs), one each an engine."""
    n = len(trace)
    header = np.zeros(1, HEADER)
    header["polls_at_launch"] = hand_off.polls == "launch"
    header["pull_at_once"] = hand_off.pull_at_once
    header["recompute"] = hand_off.on_failure == "recompute"
    for name in ("base_s", "per_block_s", "proxy_s"):
        header[name] = getattr(hand_off, name)
    header["lease_s"] = np.inf if hand_off.heartbeat else hand_off.lease_s
    header["polled_s"] = -np.inf
    way = np.zeros(n, WAY)
    way["prefill"] = way["decode"] = NONE
    for name in ("sent_s", "prefilled_s", "pull_s", "landed_s"):
        way[name] = np.nan
    if "slo" in trace:
        way["tight"] = trace["slo"].to_numpy() == "tight"
    holding = np.full((len(decode[0]), 3), NONE, np.int64)
    holding[:, 2] = 0
    states = [new_state(*pool, n) for pool in (prefill, decode)]
    for state in states:
        state.requests["prompt"] = trace["prompt_tokens"].to_numpy()
    states[0].requests["output"] = 1
    states[1].requests["output"] = trace["output_tokens"].to_numpy()
    if "predicted_tokens" in trace:
        states[1].requests["predicted"] = trace["predicted_tokens"].to_numpy()
    return Pools(
        header,
        way,
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.zeros(n, PULL),
        holding,
        np.full(len(prefill[0]) + len(decode[0]), np.inf),
        np.zeros((len(prefill[0]), 3), np.int64),
        *states,
    )
