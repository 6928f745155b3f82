"""Random engines and workloads, most of them short of memory, for the tests of the engine and the Predictor."""

import numpy as np
import pandas as pd

from astrolabe_lab.cost import Regime, StepCost
from astrolabe_lab.sim import kernel
from astrolabe_lab.sim.engine import EngineConfig, load_requests
from astrolabe_lab.sim.prefixes import with_pools
from astrolabe_lab.sim.state import NONE, new_state
from astrolabe_lab.sim.status import HEADER, ROW, Status, write_status

KINDS = ("v1", "v1_unchunked", "v1_async", "v1_async_unchunked", "v0_chunked", "v0_prefill_first")
CACHING = ("v1_caching", "v1_async_caching", "v1_unchunked_caching")  # beside KINDS: they share prefixes
SYNCHRONOUS = tuple(kind for kind in KINDS if "async" not in kind)


def frame(arrived_s, prompt_tokens, output_tokens):
    """A trace frame of these columns (arrays, or one number for all)."""
    n = max(np.size(arrived_s), np.size(prompt_tokens), np.size(output_tokens))
    return pd.DataFrame(
        {
            "rid": np.arange(n),
            "arrived_s": np.broadcast_to(np.asarray(arrived_s, float), n),
            "prompt_tokens": np.broadcast_to(np.asarray(prompt_tokens, np.int64), n),
            "output_tokens": np.broadcast_to(np.asarray(output_tokens, np.int64), n),
        }
    )


def cost_of(array):
    """The StepCost of a (2, 6) array."""
    return StepCost(Regime(*map(float, array[0])), Regime(*map(float, array[1])))


def flags_of(kind, whole_prompts_up_to):
    """The engine flags of this kind; one without chunked prefill takes prompts of up to so many tokens."""
    whole_prompts = "unchunked" in kind or kind == "v0_prefill_first"
    return {
        "enable_chunked_prefill": not whole_prompts,
        "max_num_batched_tokens": whole_prompts_up_to if whole_prompts else 16,
        "async_scheduling": "async" in kind,
        "scheduler": "v1" if kind.startswith("v1") else kind,
        "enable_prefix_caching": "caching" in kind,
    }


CONSTANT = cost_of([[0, 1.0, 0, 0, 0, 0]] * 2)  # every step takes one second


def random_cost(rng):
    array = rng.uniform(0, 1, (2, 6)) * [1e-3, 1e-2, 1e-4, 1e-4, 1e-6, 1e-8]
    array[:, 1] += 1e-3
    if rng.random() < 0.3:
        array[:] = 0
        array[:, 1] = 2.0**-7  # sums are exact: arrivals on this grid fall on the very ends of steps
    return array


def random_config(rng, kind, longest):
    """An engine of this kind whose memory holds the longest request (``longest`` tokens) at least."""
    block_size = int(rng.choice([1, 3, 4, 8, 16]))
    most = -(-(longest - 1) // block_size)
    blocks = 2 + int(most * rng.choice([1.0, 1.2, 1.6, 2.5, 5.0], p=[0.25, 0.25, 0.25, 0.15, 0.1]))
    watermark = float(rng.choice([0.0, 0.01, 0.05, 0.1]))
    blocks += int(watermark * (blocks + 1) / (1 - watermark)) + 2 * (watermark > 0)
    seats = int(rng.choice([1, 2, 5, 12, 40], p=[0.1, 0.1, 0.25, 0.3, 0.25]))
    flags = flags_of(kind, longest)
    least = max(seats, 0 if flags["enable_chunked_prefill"] else longest)
    flags["max_num_batched_tokens"] = least + int(rng.choice([0, 1, 7, 40, 150]))
    return EngineConfig(
        max_num_seqs=seats,
        block_size=block_size,
        num_gpu_blocks=blocks,
        max_model_len=longest,
        watermark=watermark,
        **flags,
    )


def random_workload(seed, kind, requests=(10, 60)):
    """(trace, config, cost): every request can run; prompts and outputs from one token up; arrivals at once, in
    bursts, Poisson, or with long idle gaps, sometimes on the grid of step ends."""
    rng = np.random.default_rng([seed, (*KINDS, *CACHING).index(kind)])
    longest = int(rng.choice([24, 60, 150, 300]))
    n = int(rng.integers(*requests))
    config = random_config(rng, kind, longest)
    prompt = 1 + np.floor(rng.beta(1, rng.uniform(0.7, 4), n) * (longest - 1)).astype(np.int64)
    output = 1 + np.floor(rng.beta(1, rng.uniform(0.7, 4), n) * (longest - prompt)).astype(np.int64)
    prompt = np.where(prompt + output > longest, prompt - 1, prompt)
    cost = random_cost(rng)
    spacing = float(rng.choice([0.0, 0.003, 0.02, 0.1]))
    gaps = rng.exponential(spacing, n) if spacing else np.zeros(n)
    shape = rng.integers(4)
    if shape == 1:
        gaps *= rng.random(n) < 0.2
    elif shape == 2:
        gaps += 50.0 * (rng.random(n) < 0.1)
    arrived = np.cumsum(gaps)
    if cost[0, 1] == 2.0**-7 and not cost[0, 0]:
        arrived = np.round(arrived * 2.0**7) / 2.0**7
    trace = frame(arrived, prompt, output)
    if kind in CACHING:
        share_prefixes(rng, trace, config.block_size)
    return trace, config, cost_of(cost)


def share_prefixes(rng, trace, block_size):
    """Give most prompts of the trace a prefix that others have too: a path in a tree with few branches, of listed
    blocks that are smaller, larger or as large as the engine's."""
    tokens = int(rng.choice([block_size, 1, 3, 2 * block_size, 50]))
    depth = int(trace["prompt_tokens"].max()) // tokens + 1
    paths = np.where(rng.random((len(trace), depth)) < 0.1, rng.integers(3, size=(len(trace), depth)), 0)
    listed = -(-trace["prompt_tokens"] // tokens) * (rng.random(len(trace)) < 0.8)
    trace["prefix_blocks"] = [tuple(path[:n].tolist()) for path, n in zip(paths, listed, strict=True)]
    trace.attrs["prefix_block_tokens"] = tokens


class Engine:
    """One engine under the test's hand: the compiled kernel's calls on a state of one engine."""

    def __init__(self, trace, config, cost, predicted=None, log_rows=0):
        self.trace = trace
        self.config = config
        self.state = with_pools(new_state([config], [cost], len(trace), log_rows=log_rows), trace)
        load_requests(self.state, trace["prompt_tokens"], trace["output_tokens"], predicted)
        self.delivered = 0

    def deliver_until(self, now_s):
        """Hand over every request that arrives by ``now_s``."""
        arrived = self.trace["arrived_s"].to_numpy()
        while self.delivered < len(arrived) and arrived[self.delivered] <= now_s:
            kernel.deliver(*self.state, 0, self.delivered, arrived[self.delivered])
            self.delivered += 1

    def advance(self, until_s, leaps=False):
        kernel.advance(*self.state, 0, until_s, NONE, leaps)

    def serve(self, leaps=False):
        """Run to the last request's end; returns self."""
        self.deliver_until(np.inf)
        self.advance(np.inf, leaps)
        return self

    def status(self, now_s):
        """The engine's Status at ``now_s``, up to which it has been advanced."""
        header, rows = np.zeros(1, HEADER), np.zeros(len(self.trace), ROW)
        assert write_status(*self.state, 0, now_s, header, rows)
        return Status(header, rows[: int(header["n_rows"][0])].copy())

    def outcome(self):
        """What must not depend on how the engine was driven: per request, and the engine's counters."""
        q, e = self.state.requests, self.state.engines[0]
        columns = ("state", "generated", "preemptions", "blocks", "first_token_s", "finished_s")
        counters = (
            "steps",
            "tokens",
            "preemptions",
            "finished",
            "free_blocks",
            "stuck",
            "n_running",
            "n_waiting",
        )
        return {name: q[name].copy() for name in columns} | {f"engine.{name}": int(e[name]) for name in counters}


def differences(one, other):
    """Names of the entries in which two outcomes differ, to the last bit."""
    return [name for name in one if not np.array_equal(one[name], other[name], equal_nan=name.endswith("_s"))]
