"""A simulated engine as a calibration's target: our engine's steps, seen through noise, on a clock of its own."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field

import numpy as np

from astrolabe_lab.calibrate.probe import Answer, Described, Probe
from astrolabe_lab.cost import StepCost
from astrolabe_lab.errors import InputError
from astrolabe_lab.rng import stream
from astrolabe_lab.sim.config import EngineConfig


@dataclass
class SimulatedTarget:
    """One simulated engine of ``engine`` and ``cost``; its time is modelled and costs none.

    ``overhead_s``: of every request, before its first step; ``jitter_s``: mean of the exponential delay of every
    arrival; ``step_noise``: relative standard deviation of a step's time. ``transfer``: (seconds a hand-off, seconds
    a KV block) of a pool behind it, or None.
    """

    engine: EngineConfig
    cost: StepCost
    overhead_s: float = 0.0
    jitter_s: float = 0.0
    step_noise: float = 0.0
    transfer: tuple[float, float] | None = None
    seed: int = 0
    model: str = "simulated"
    loop_lag_s: float | None = field(default=None, init=False)
    _now_s: float = field(default=0.0, init=False)

    def __post_init__(self):
        for name in ("overhead_s", "jitter_s", "step_noise"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise InputError(f"{name}={value!r} must be a finite number >= 0")
        self._rng = stream(self.seed, "calibration")

    def now_s(self) -> float:
        return self._now_s

    def describe(self) -> Described:
        return Described(self.model, modelled_device("simulated", self.cost), self.engine, "simulated")

    def kv_blocks(self) -> int:
        return self.engine.num_gpu_blocks

    def burst(self, probes: list[Probe]) -> list[Answer]:
        """The answers to ``probes`` (in their order) from an engine that does nothing else."""
        import pandas as pd

        from astrolabe_lab.sim.engine import run_one

        order = sorted(range(len(probes)), key=lambda j: probes[j].after_s)
        trace = pd.DataFrame({
            "rid": range(len(probes)),
            "arrived_s": [probes[j].after_s + self.overhead_s for j in order],
            "prompt_tokens": [probes[j].prompt_tokens for j in order],
            "output_tokens": [probes[j].output_tokens for j in order],
        })  # fmt: skip
        results, log = run_one(trace, self.engine, self.cost)
        if not (results["status"] == "ok").all() or results["preemptions"].any():
            raise InputError(f"a burst of {len(probes)} probes does not fit the engine ({self.engine})")
        warp = self._warp(log)
        answers: list[Answer | None] = [None] * len(probes)
        for rid, rows in log.groupby("rid", sort=False):
            probe = probes[order[rid]]
            emits = rows["tokens"].cumsum().to_numpy() >= probe.prompt_tokens
            times = warp(rows["end_s"].to_numpy()[emits]) + self.cost.frontend_s
            times = np.maximum.accumulate(times + self._rng.exponential(self.jitter_s, len(times)))
            tokens = np.arange(1, len(times) + 1)
            sent = float(warp(np.array([probe.after_s])).item())
            answers[order[rid]] = Answer(probe, self._now_s + sent, self._now_s + times, tokens)
        self._now_s = max(answer.last_s for answer in answers)
        return answers

    def handoff(self, prompt_tokens: int) -> float:
        """Seconds from the request at the decode engine, its prompt computed elsewhere, to its first token."""
        if self.transfer is None:
            raise InputError("this simulated engine has no pool behind it: give transfer=(seconds, seconds a block)")
        latency_s, block_s = self.transfer
        blocks = -(-prompt_tokens // self.engine.block_size)
        before = prompt_tokens - 1  # the last token is computed where it decodes
        step = self.cost.step_seconds(1, 1, before, before + 0.5, mixed=True)
        step *= 1 + self._rng.normal(0, self.step_noise)
        seconds = self.overhead_s + latency_s + blocks * block_s + step + self._rng.exponential(self.jitter_s)
        self._now_s += seconds
        return seconds

    def _warp(self, log):
        """The map from the engine's time to that of steps with noise: every step stretched on its own."""
        steps = log.drop_duplicates("step")
        start, end = steps["start_s"].to_numpy(), steps["end_s"].to_numpy()
        stretched = (end - start) * np.maximum(0.2, 1 + self._rng.normal(0, self.step_noise, len(start)))
        idle = start - np.concatenate([[0.0], end[:-1]])
        knots = np.concatenate([[0.0], np.column_stack([start, end]).ravel()])
        moved = np.concatenate([[0.0], np.cumsum(np.column_stack([idle, stretched]).ravel())])
        return lambda at: np.interp(at, knots, moved)


def modelled_device(world: str, cost: StepCost) -> str:
    """The name of a device that exists as a step cost only, such as "emulated 1f0c..."."""
    digest = hashlib.sha256(json.dumps(cost.to_dict(), sort_keys=True).encode()).hexdigest()
    return f"{world} {digest[:12]}"
