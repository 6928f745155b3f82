"""Small clusters for tests: traces that fill them, engines short of memory, a policy that records what it sees."""

import copy
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from astrolabe_lab import arrivals, length, policies
from astrolabe_lab.cost import StepCost
from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.sim.cluster import ControlPlane, simulate
from astrolabe_lab.sim.config import EngineConfig

# One of each policy and variant, as text.
POLICIES = (
    *("random", "round_robin", "min_qps", "least_loaded", "min_memory", "infaas_a", "infaas_b", "infaas_c"),
    *("llumnix_minus_a", "llumnix_minus_b", "llumnix_minus_b:defrag=false", "min_tokens", "po2_requests"),
    *("cache_aware", "kv_cost", "kv_cost:temperature=0.5", "weighted_score", "least_latency"),
    *("astrolabe", "astrolabe:k=all"),
)
COST = StepCost.parse("base_s=0.01,per_token_s=1e-4,per_kv_token_s=1e-6,mixed.attention_s=1e-7")
SECOND = StepCost.parse("base_s=1")  # every step takes a second
# 39 blocks of 4 tokens: a few requests of ``short_trace`` fill it, its longest are rejected
TIGHT = EngineConfig(max_num_seqs=6, max_num_batched_tokens=32, block_size=4, num_gpu_blocks=40, max_model_len=160)
AMPLE = EngineConfig(max_num_seqs=64, max_num_batched_tokens=256, block_size=4, num_gpu_blocks=4000, max_model_len=400)


def sharegpt_trace(n, qps, seed=0, lengths="noisy:0.25"):
    """``n`` ShareGPT-like requests at ``qps``, with predicted lengths."""
    frame = arrivals.with_arrivals(sharegpt_like.generate(n, seed, text=False), qps, seed=seed)
    return length.attach(frame, lengths, seed=seed)


def short_trace(n, qps, seed=0, lengths="noisy:0.25"):
    """``n`` requests of a few dozen tokens at ``qps``; one in 20 has up to 150 output tokens."""
    rng = np.random.default_rng(seed)
    output = np.where(rng.random(n) < 0.05, rng.integers(90, 151, n), rng.integers(1, 40, n))
    frame = requests(np.zeros(n), rng.integers(1, 60, n), output)
    return length.attach(arrivals.with_arrivals(frame, qps, seed=seed), lengths, seed=seed)


def requests(arrived_s, prompt_tokens, output_tokens, predicted_tokens=None):
    """A trace frame of these columns (numbers or sequences); predicted lengths are the true ones unless given."""
    n = len(arrived_s)
    columns = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    columns["predicted_tokens"] = output_tokens if predicted_tokens is None else predicted_tokens
    whole = {name: np.broadcast_to(np.asarray(values, np.int64), n) for name, values in columns.items()}
    return pd.DataFrame({"rid": np.arange(n), "arrived_s": np.asarray(arrived_s, np.float64), **whole})


BUSY = short_trace(250, 40)
CHOICE_COLUMNS = ("policy", "predicted_e2e_s")
DELAYED = ControlPlane(tag_s=0.01, predict_s=(0.05, 0.2), dispatch_s=0.01)


def busy(policy, **settings):
    """The result of BUSY on three tight engines."""
    return simulate(BUSY, policy, **{"instances": 3, "engine": TIGHT, "cost": COST, **settings})


def policy_of(policy):
    return policies.parse(policy) if isinstance(policy, str) else policy


class Constant:
    """Always the healthy instance at the same position."""

    def __init__(self, index=0):
        self.index = index

    def choose(self, request, cluster, rng):
        return min(self.index, len(cluster) - 1)


@dataclass(frozen=True)
class Decision:
    """What a router saw at one decision, and the number of the instance that it chose."""

    router: int
    request: object
    signals: np.ndarray
    instances: tuple
    chosen: int


class Spy:
    """Decides as ``policy`` does; ``seen`` lists the decisions of a run, of all routers."""

    def __init__(self, policy="round_robin"):
        self.policy = policy_of(policy)
        self.seen = []
        self.copies = [0]
        self.router = None

    def __deepcopy__(self, memo):
        spy = Spy(copy.deepcopy(self.policy))
        spy.seen, spy.copies, spy.router = self.seen, self.copies, self.copies[0]
        self.copies[0] += 1
        return spy

    def choose(self, request, cluster, rng):
        signals = cluster.signals.copy()
        index = self.policy.choose(request, cluster, rng)
        self.seen.append(Decision(self.router, request, signals, cluster.instances, cluster.instances[index]))
        return index


def same(a, b, without=()):
    """Assert that two result frames are equal to the last bit."""
    pd.testing.assert_frame_equal(a.drop(columns=list(without)), b.drop(columns=list(without)), check_exact=True)


def status_time(now_s, interval_s):
    return math.floor(now_s / interval_s) * interval_s if interval_s else now_s
