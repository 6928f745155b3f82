"""Our engine against a measured vLLM run: fitted on layer timings alone, replayed, compared request by request.

timings = LayerTimings.load("timings")        # attention.csv, dense.csv, per_sequence.csv
run = MeasuredRun.load("run")                 # meta.json, requests.jsonl; summary.txt of another simulator, if any
check = compare(timings, run)
check.table                                   # measured_s, simulated_s, error_pct by metric and statistic
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from astrolabe_lab.cost import shapes
from astrolabe_lab.errors import InputError
from astrolabe_lab.fidelity.layers import Spread, tabulated
from astrolabe_lab.fidelity.measured_run import STATISTICS, MeasuredRun
from astrolabe_lab.sim.config import pairs
from astrolabe_lab.sim.engine import EngineConfig, run_one

# Stated before any comparison. Of vLLM's engine with asynchronous scheduling and CUDA graphs, the GPU waits 150..170
# us between two decodes of Llama-2-7B at batch 256 (vllm-project/vllm, pull request 11133).
HOST_S = 160e-6
HOST_SOURCE = "150..170 us between decodes under asynchronous scheduling with CUDA graphs (vllm-project/vllm #11133)"

# Of this attention kernel on this GPU, the profile's own authors measured how far a batch of unequal contexts is on
# the way from equal ones of its mean to equal ones of its longest (casys-kaist/LLMServingSim, RTXPRO6000, Llama-3.1-8B
# bf16, meta.yaml: skew_fit.alpha_default, 13,476 batches).
SPREAD_SHARE = 0.0535
SPREAD_SOURCE = "LLMServingSim's skew_fit.alpha_default of Llama-3.1-8B on an RTX PRO 6000 (13,476 timed batches)"

MAX_CAPTURE = 512
MOST_BLOCKS = 2**31 - 1  # that an engine may have; the place of a number that is not known yet
ASYNC_SINCE = (0, 14)  # vLLM's first release with asynchronous scheduling on by default


@dataclass(frozen=True)
class Fidelity:
    """A replay beside the run it replays.

    table: metric (ttft, tpot, latency), statistic (mean, median, p90, p95, p99), measured_s, simulated_s, error_pct,
    peer_error_pct (another simulator's, NaN where there is none). requests: one row a request, measured and simulated
    times. notes: what the comparison rests on. wall_s: of the replay.
    """

    table: object
    requests: object = field(repr=False)
    cost: object = field(repr=False)
    engine: EngineConfig
    fits: dict
    notes: tuple[str, ...]
    wall_s: float

    def record(self):
        """The comparison as JSON values."""
        return {
            "table": self.table.to_dict("records"),
            "requests": len(self.requests),
            "preemptions": int(self.requests["preemptions"].sum()),
            "engine": asdict(self.engine),
            "fits": {name: one.quality("whole steps") for name, one in self.fits.items()},
            "notes": list(self.notes),
            "wall_s": self.wall_s,
        }


def engine_of(run: MeasuredRun, shape, gpu=None, overrides=""):
    """(EngineConfig, notes) of a measured run: its flags, with what vLLM chose by itself filled in.

    `gpu` is the Device the KV capacity is derived for where the run does not record it. `overrides` ("key=value,...")
    wins, and what is derived is derived with it: a capacity that the run records keeps its tokens under another
    block_size. Raises InputError for a flag that the engine does not model, or when the capacity cannot be derived.
    """
    recorded, given = dict(run.flags), pairs(overrides)
    share = float(recorded.pop("gpu_memory_utilization", 0.9))
    recorded.setdefault("block_size", 16)
    default = {
        "max_model_len": shape.max_model_len,
        "async_scheduling": run.version >= ASYNC_SINCE,
        "enable_prefix_caching": True,
        "num_gpu_blocks": MOST_BLOCKS,
    }
    config = EngineConfig.from_dict(default | recorded | given)
    if "num_gpu_blocks" in given:
        blocks, capacity = config.num_gpu_blocks, "as given"
    elif "num_gpu_blocks" in recorded:
        blocks, capacity = config.num_gpu_blocks, "as the run recorded"
        if config.block_size != recorded["block_size"]:
            capacity += f": {blocks} of {recorded['block_size']}"
            blocks = blocks * recorded["block_size"] // config.block_size
    else:
        if gpu is None:
            raise InputError("the run does not tell its KV capacity: give --device, or --engine num_gpu_blocks=N")
        blocks = shapes.kv_blocks(shape, gpu, utilisation=share, block_size=config.block_size)
        capacity = (
            f"derived: {share:g} of {gpu.memory_bytes / shapes.GIB:.1f} GiB less {shape.weight_bytes / shapes.GIB:.1f} "
            f"GiB of weights and {shapes.RESERVE_BYTES / shapes.GIB:.2f} GiB"
        )
    config = replace(config, num_gpu_blocks=blocks)
    why = f"the default of vLLM {run.vllm_version} on a GPU"
    for flags, source in ((recorded, "as the run's flags say"), (given, "as given")):
        why = source if "async_scheduling" in flags else why
    notes = [
        f"KV capacity: {config.num_gpu_blocks} blocks of {config.block_size}, {capacity}",
        f"async_scheduling={config.async_scheduling}: {why}",
    ]
    if config.enable_prefix_caching:
        as_in = "as given" if "enable_prefix_caching" in given else "as in the run (vLLM's default)"
        notes.append(
            f"prefix caching is on, {as_in}; prompts are taken to share nothing, so that it matters only to preempted "
            "requests"
        )
    return config, notes


def pad_sizes_of(engine):
    """vLLM's default CUDA-graph sizes: 1, 2, 4, then steps of 8 up to twice the batch, of 16 past 256, at most 512."""
    most = min(2 * engine.max_num_seqs, MAX_CAPTURE)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, MAX_CAPTURE + 1, 16)]
    return tuple(size for size in sizes if size <= most)


def compare(timings, run, shape=None, gpu=None, *, host_s=HOST_S, spread_share=SPREAD_SHARE, engine=""):
    """The Fidelity of a measured run to its replay on a step cost made of layer timings alone.

    timings: a LayerTimings; run: a MeasuredRun; shape and gpu: a shapes.Model and Device (default: those of the run's
    model and of the device its folder or meta.json names). `engine` ("key=value,...") wins over the run's flags. The
    requests' lengths and arrivals are used, none of their times. Raises InputError where run and timings do not fit.
    """
    shape = shape or shapes.model(run.model)
    config, notes = engine_of(run, shape, gpu or run.device(), engine)
    lengths = run.requests[["prompt_tokens", "output_tokens"]]
    longest = int(lengths.sum(axis=1).max())
    spread = Spread.of(lengths.prompt_tokens, lengths.output_tokens, spread_share) if spread_share else None
    cost, fits = tabulated(
        timings, shape, config, longest, spread=spread, host_s=host_s, pad_sizes=pad_sizes_of(config)
    )
    notes = [_host_note(host_s), _spread_note(spread_share), *notes]
    trace = run.requests[["rid", "arrived_s", "prompt_tokens", "output_tokens"]]
    run_one(trace.head(2), config, cost, log=False)  # compiled, or read from the cache, before the clock starts
    began = time.perf_counter()
    replayed, _ = run_one(trace, config, cost, log=False)
    wall_s = time.perf_counter() - began
    if not (replayed.status == "ok").all():
        raise InputError(
            f"{(replayed.status != 'ok').sum()} of {len(replayed)} requests cannot run on this engine "
            f"(max_model_len={config.max_model_len}, num_gpu_blocks={config.num_gpu_blocks}); the measured run served "
            "them all"
        )
    notes.append(f"{int(replayed.preemptions.sum())} preemptions in the replay")
    requests = run.requests.assign(
        sim_ttft_s=replayed.ttft_s,
        sim_tpot_s=replayed.tpot_s,
        sim_latency_s=replayed.e2e_s,
        preemptions=replayed.preemptions,
    )
    return Fidelity(error_table(requests, run.peer), requests, cost, config, fits, tuple(notes), wall_s)


def error_table(requests, peer=None):
    """The comparison: a row a metric and statistic. `peer`: {(metric, statistic): error in percent} of another."""
    import pandas as pd

    rows = []
    for metric in ("ttft", "tpot", "latency"):
        measured, simulated = requests[f"{metric}_s"].dropna(), requests[f"sim_{metric}_s"].dropna()
        for name, statistic in STATISTICS.items():
            real, ours = statistic(measured), statistic(simulated)
            rows.append(
                {
                    "metric": metric,
                    "statistic": name,
                    "measured_s": real,
                    "simulated_s": ours,
                    "error_pct": 100 * (ours / real - 1),
                    "peer_error_pct": (peer or {}).get((metric, name), np.nan),
                }
            )
    return pd.DataFrame(rows)


def _host_note(host_s):
    if math.isclose(host_s, HOST_S):
        return f"host_s={host_s * 1e6:g} us a step: {HOST_SOURCE}"
    return f"host_s={host_s * 1e6:g} us a step, as given"


def _spread_note(share):
    if math.isclose(share, SPREAD_SHARE):
        return f"unequal contexts: {share:g} of the way from their mean to the longest: {SPREAD_SOURCE}"
    return f"unequal contexts: {share:g} of the way from their mean to the longest, as given"
