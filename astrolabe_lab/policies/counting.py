"""Policies that count requests or dispatches."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from astrolabe_lab.errors import InputError
from astrolabe_lab.policies import scores
from astrolabe_lab.policies.draw import argmin, sample_k, uniform


@dataclass(frozen=True, slots=True)
class Random:
    """Uniform over the healthy instances."""

    def choose(self, request, cluster, rng):
        return uniform(len(cluster), rng)


@dataclass(slots=True)
class RoundRobin:
    """The next instance after the one chosen last, by an own counter."""

    count: int = field(default=0, repr=False)

    def choose(self, request, cluster, rng):
        chosen = self.count % len(cluster)
        self.count += 1
        return chosen


@dataclass(slots=True)
class MinQps:
    """Fewest own dispatches to the instance in the last ``window_s`` seconds."""

    window_s: float = 60.0
    sent: dict = field(default_factory=dict, repr=False)

    def __post_init__(self):
        if isinstance(self.window_s, bool) or not isinstance(self.window_s, (int, float)) or not self.window_s > 0:
            raise InputError(f"policy min_qps: window_s={self.window_s!r} must be a number > 0, in seconds")

    def choose(self, request, cluster, rng):
        counts = []
        for instance in cluster.instances:
            times = self.sent.setdefault(instance, deque())
            while times and times[0] <= request.arrived_s - self.window_s:
                times.popleft()
            counts.append(len(times))
        chosen = argmin(counts, rng)
        self.sent[cluster.instances[chosen]].append(request.arrived_s)
        return chosen


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """Fewest running plus waiting requests (join the shortest queue)."""

    def choose(self, request, cluster, rng):
        return argmin(scores.requests(cluster.signals).tolist(), rng)


@dataclass(frozen=True, slots=True)
class Po2Requests:
    """Of two random instances the one with fewer running + waiting + own in-flight requests (Ray Serve, SGLang and
    vLLM's router). With one instance: that one."""

    def choose(self, request, cluster, rng):
        drawn = sample_k(len(cluster), min(2, len(cluster)), rng)
        loads = [cluster[i].running + cluster[i].waiting + cluster[i].in_flight for i in drawn]
        return int(drawn[argmin(loads, rng)])
