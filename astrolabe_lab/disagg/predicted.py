"""Forward simulation as the price of a pair: Astrolabe's Predictor, for prefill and decode pools.

Everything is rebuilt from what a proxy knows: its ledger and its constants. The engines run forward, as they would with
the predicted lengths and no later arrival, until the newcomer has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from astrolabe_lab.errors import InputError
from astrolabe_lab.policies.draw import argmin, sample_k
from astrolabe_lab.predictor import EXTENSION_TOKENS

METRICS = ("late_s", "e2e_s", "ttft_s")


@dataclass(slots=True)
class PredictedPair:
    """Of ``k`` pairs drawn at random (0: all) the one with the lowest predicted ``metric``.

    ``late_s``: by how much the request would miss its targets (TTFT, and its tokens together), then E2E; or ``e2e_s``,
    ``ttft_s``. A pair on which it can never run is dropped; where none is left all are drawn from.
    """

    k: int = 2
    metric: str = "late_s"
    scratch: tuple = field(default=(None, None), repr=False)
    needs_lengths: ClassVar[bool] = True

    def __post_init__(self):
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 0:
            raise InputError(f"policy predicted: k={self.k!r} must be a whole number >= 1, or 0 for all pairs")
        if self.metric not in METRICS:
            raise InputError(f"policy predicted: metric={self.metric!r} is not one of {', '.join(METRICS)}")

    def choose(self, request, cluster, rng):
        n_d = len(cluster.decode)
        n = len(cluster.prefill) * n_d
        drawn = sample_k(n, min(self.k or n, n), rng)
        values = [self.value(request, cluster, int(pair) // n_d, int(pair) % n_d) for pair in drawn]
        at = int(drawn[argmin(values, rng)])
        return at // n_d, at % n_d

    def value(self, request, cluster, p: int, d: int) -> float:
        """The metric of the request on that pair, in s; inf where it can never run."""
        ttft_s, e2e_s = self.predict(request, cluster, p, d)
        if self.metric != "late_s":
            return e2e_s if self.metric == "e2e_s" else ttft_s
        ttft_target_s, tpot_target_s = cluster.constants.targets_s(request.slo)
        after = max(request.predicted_tokens, 1) - 1
        late_s = max(ttft_s - ttft_target_s, 0.0) + max(e2e_s - ttft_s - after * tpot_target_s, 0.0)
        return 1e3 * late_s + e2e_s

    def predict(self, request, cluster, p: int, d: int) -> tuple[float, float]:
        """(TTFT, E2E) in s from now of the request on the pair of indices; (inf, inf) where it can never run."""
        if request.predicted_tokens < 1:
            raise InputError(f"policy predicted: request {request.rid} has no predicted length: attach one")
        if self.scratch[0] is not cluster.constants:
            self.scratch = cluster.constants, Scratch(cluster.constants)
        flying = cluster.in_flight
        here = cluster.prefill[p]["instance"], cluster.decode[d]["instance"]
        at_prefill = np.isnan(flying["prefilled_s"])
        known = flying[(at_prefill & (flying["prefill"] == here[0])) | (flying["decode"] == here[1])]
        return self.scratch[1].forward(known, *here, request, cluster.now_s)


class Scratch:
    """Two engines a pool, the pair's own and all others, that are set to a ledger and run forward."""

    def __init__(self, constants):
        from astrolabe_lab.disagg.state import HandOff
        from astrolabe_lab.sim.config import EngineConfig

        blocks = constants.kv_capacity_tokens // constants.block_size + 1
        limits = {name: getattr(constants, name) for name in ("max_num_seqs", "max_num_batched_tokens", "block_size")}
        self.config = EngineConfig(**limits, num_gpu_blocks=blocks, max_model_len=2**30)
        self.cost = constants.step_cost()
        self.hand_off = HandOff(constants.transfer_base_s, constants.transfer_per_block_s)
        self.blank = None

    def _room(self, n: int) -> None:
        """Idle pools with room for n requests."""
        import pandas as pd

        from astrolabe_lab.disagg.state import new_pools

        if self.blank is None or len(self.blank.way) < n:
            room = 2 * n
            trace = pd.DataFrame({"prompt_tokens": np.ones(room, int), "output_tokens": np.ones(room, int)})
            engines = [self.config] * 2, [self.cost] * 2
            self.blank, self.pools = (new_pools(trace, engines, engines, self.hand_off) for _ in range(2))
        for blank, array in zip(_arrays(self.blank), _arrays(self.pools), strict=True):
            array[...] = blank

    def forward(self, known, prefill: int, decode: int, request, now_s: float) -> tuple[float, float]:
        """(TTFT, E2E) of the request, sent now to its own pair of engines; ``known``: IN_FLIGHT rows that matter to
        them.

        By the constants an engine may have no room for what is in flight there: a request that is too large already is
        left out, one that will be is taken to end when it fills the memory.
        """
        from astrolabe_lab.disagg import kernel
        from astrolabe_lab.disagg.state import ENDED, LOCAL, MOVING
        from astrolabe_lab.sim.state import RUNNING

        prompt, output = request.prompt_tokens, request.predicted_tokens
        if self.config.rejects(prompt, output):
            return np.inf, np.inf
        most = self.config.request_blocks * self.config.block_size + 1 - known["prompt_tokens"]
        fits = most > known["streamed"]
        known, most = known[fits], most[fits]
        n = len(known)
        self._room(n + 1)
        pools, way = self.pools, self.pools.way
        ours = (known["prefill"] != prefill).astype(np.int64), (known["decode"] != decode).astype(np.int64)
        way["prefill"][:n], way["decode"][:n] = ours
        for state in (pools.prefill, pools.decode):
            state.requests["prompt"][:n] = known["prompt_tokens"]
            state.requests["prompt"][n] = prompt
        left = np.maximum(known["predicted_tokens"] - known["streamed"], 0)
        q, e = pools.decode.requests, pools.decode.engines
        q["output"][:n] = np.minimum(known["streamed"] + np.where(left > 0, left, EXTENSION_TOKENS), most)
        q["output"][n] = output
        started = ~np.isnan(known["prefilled_s"])
        # Decode has no more seats and memory than it says: who finds none there is taken to wait.
        running = np.flatnonzero(started & (known["streamed"] > 0))[: self.config.max_num_seqs]
        computed = known["prompt_tokens"][running] + known["streamed"][running] - 1
        blocks = -(-computed // self.config.block_size)
        running = running[np.cumsum(blocks) <= self.config.usable_blocks]
        m = len(running)
        q["computed"][running], q["blocks"][running] = computed[:m], blocks[:m]
        q["generated"][running] = known["streamed"][running]
        q["state"][running], q["first_token_s"][running], way["phase"][running] = RUNNING, now_s, LOCAL
        pools.decode.running[0, :m] = running
        e["n_running"][0], e["free_blocks"][0] = m, self.config.usable_blocks - blocks[:m].sum()
        pools.wake_s[2] = now_s
        waiting = np.flatnonzero(started & (way["phase"][:n] != LOCAL))
        way["phase"][waiting], way["prefilled_s"][waiting], way["held"][waiting] = MOVING, now_s, 1
        pools.prefill.engines["free_blocks"][:] -= np.bincount(ours[0][waiting], minlength=2)
        pools.prefilled[: len(waiting)] = waiting
        pools.header["n_prefilled"] = len(waiting)
        for r in np.flatnonzero(~started):
            kernel.send(pools, int(r), int(ours[0][r]), int(ours[1][r]), now_s)
        kernel.send(pools, n, 0, 0, now_s)
        step_s = self.cost.decode.base_s + self.cost.decode.per_seq_s * (m + 1)
        until_s = now_s + self.cost.mixed.base_s + output * step_s
        while way["phase"][n] != ENDED:
            if until_s == np.inf:
                return np.inf, np.inf
            kernel.run(pools, until_s)
            until_s = now_s + 2 * (until_s - now_s)
        return float(q["first_token_s"][n] - now_s), float(q["finished_s"][n] - now_s)


def _arrays(pools) -> list[np.ndarray]:
    """All arrays of Pools, those of its two states among them."""
    parts = [*pools[:-2], *pools.prefill, *pools.decode]
    return [array for array in parts if array is not None]
