"""What a calibration asks of a cluster and what it hears: requests with exact lengths, and when their tokens came.

A target is anything with ``burst(probes) -> [Answer]`` on an otherwise idle engine, a clock (``now_s``), and the facts
of a ``Described``. ``simulated.SimulatedTarget`` and ``live.LiveTarget`` are two; what is measured is read from the
answers alone, by the same code.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from astrolabe_lab.sim.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Probe:
    """A request of exactly ``output_tokens``, sent ``after_s`` seconds into its burst; its prompt is like no other."""

    prompt_tokens: int
    output_tokens: int
    after_s: float = 0.0


@dataclass(slots=True)
class Answer:
    """When a probe was sent and what arrived of it: at ``times`` (n,) there were ``tokens`` (n,) in all.

    Seconds of the target's clock; several tokens may arrive at once.
    """

    probe: Probe
    sent_s: float
    times: np.ndarray
    tokens: np.ndarray

    @property
    def first_s(self) -> float:
        """When its first token came; NaN where none did."""
        return float(self.times[0]) if len(self.times) else float("nan")

    @property
    def last_s(self) -> float:
        return float(self.times[-1]) if len(self.times) else float("nan")


@dataclass(frozen=True)
class Described:
    """What is calibrated. ``flags``: engine settings beside those of ``engine`` that change what a step takes;
    ``source``: simulated, emulated or hardware; ``time_scale``: wall seconds a modelled second."""

    model: str
    device: str
    engine: EngineConfig
    source: str
    time_scale: float = 1.0
    flags: dict = field(default_factory=dict)
