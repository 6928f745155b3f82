"""Policies that use measured mean latencies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from astrolabe_lab.policies import scores
from astrolabe_lab.policies.draw import argmin


@dataclass(frozen=True, slots=True)
class LeastLatency:
    """AIBrix's rule: lowest mean queue time + mean prefill time per prompt token * prompt tokens + mean decode time per
    token * predicted tokens, of means that each engine publishes (since its start; 0 before the first)."""

    needs_lengths: ClassVar[bool] = True

    def choose(self, request, cluster, rng):
        values = scores.latency(cluster.signals, request.prompt_tokens, request.predicted_tokens)
        return argmin(values.tolist(), rng)
