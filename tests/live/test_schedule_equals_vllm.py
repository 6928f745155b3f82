"""Our compiled engine against vLLM's own scheduler, step by step, on random workloads short of memory.

For a longer hunt than CI's: ``python -m tests.live.test_schedule_equals_vllm --seeds 1000:3000``.
"""

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab import oracle
from astrolabe_lab.cost import Regime, StepCost
from astrolabe_lab.sim.engine import EngineConfig, run_one

from . import NEEDS_VLLM

pytestmark = NEEDS_VLLM

WORKLOADS_PER_SETTING = 60
SETTINGS = [
    (chunked, asynchronous, caching)
    for caching in (False, True)
    for chunked in (True, False)
    for asynchronous in (False, True)
]
SECONDS_TOLERANCE = 1e-9


def random_workload(seed, chunked=None, asynchronous=None, caching=None):
    """Return (frame, EngineConfig, cost) drawn from ``seed``: 20-80 requests, mostly more than memory holds.

    The three flags are drawn too unless given; with ``caching`` most prompts share prefixes. Every request can
    run. A third of the workloads put arrivals and step ends on one time grid, so that a request often arrives at
    the very instant at which a step ends.
    """
    rng = np.random.default_rng(seed)
    pick = rng.choice
    n = int(rng.integers(20, 81))
    block_size = int(pick([1, 4, 8, 16, 32]))
    longest = int(pick([48, 96, 192, 320]))
    tightness = pick([1.0, 1.3, 2.0, 4.0], p=[0.2, 0.35, 0.3, 0.15])
    blocks_of_longest = -(-(longest - 1) // block_size)
    max_num_seqs = int(pick([1, 2, 4, 8, 16, 40], p=[0.05, 0.1, 0.2, 0.25, 0.25, 0.15]))
    chunked = bool(rng.integers(2)) if chunked is None else chunked
    smallest_budget = max_num_seqs if chunked else longest
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=smallest_budget + int(pick([0, 1, 7, 32, 200])),
        block_size=block_size,
        num_gpu_blocks=1 + max(2, int(blocks_of_longest * tightness)),
        max_model_len=longest,
        enable_chunked_prefill=chunked,
        watermark=float(pick([0.0, 0.01, 0.05, 0.2])),
        async_scheduling=bool(rng.integers(2)) if asynchronous is None else asynchronous,
        enable_prefix_caching=bool(np.random.default_rng([seed, 1]).integers(2)) if caching is None else caching,
    )
    prompt = 1 + np.floor(rng.beta(1, rng.uniform(0.7, 4), n) * (longest - 1)).astype(int)
    output = 1 + np.floor(rng.beta(1, rng.uniform(0.7, 4), n) * (longest - prompt)).astype(int)
    output = np.minimum(output, longest - prompt)
    prompt, output = np.where(output < 1, prompt - 1, prompt), np.maximum(output, 1)

    tick = None
    if rng.random() < 1 / 3:
        cost = np.zeros((2, 6))
        cost[:, 1] = tick = rng.choice([0.01, 2.0**-7])  # sums of the latter are exact: true ties
    else:
        scale = [1e-3, 1e-2, 1e-4, 1e-4, 1e-6, 1e-8]
        cost = rng.uniform(0, 1, (2, 6)) * scale
        cost[:, 1] += 1e-3
    frame = _arrivals(rng, prompt, output, tick)
    if config.enable_prefix_caching:
        _share_prefixes(np.random.default_rng([seed, 2]), frame, block_size)
    return frame, config, StepCost(*(Regime(*row) for row in cost.tolist()))


def _share_prefixes(rng, frame, block_size):
    """Give the prompts of ``frame`` prefixes from a tree of few branches; some prompts are listed to their end, some
    not at all, and the listed blocks are smaller, larger or as large as the engine's."""
    tokens = int(rng.choice([block_size, 1, 3, 2 * block_size, 5, 50]))
    branches = int(rng.choice([1, 2, 3]))
    longest = int(frame["prompt_tokens"].max()) // tokens + 2
    common = rng.integers(branches, size=longest)
    listed = []
    for n in rng.integers(0, longest + 1, len(frame)) * (rng.random(len(frame)) < 0.8):
        strays = rng.random(longest) < rng.choice([0.0, 0.05, 0.5])
        listed.append(tuple(np.where(strays, rng.integers(branches, size=longest), common)[:n].tolist()))
    frame["prefix_blocks"] = listed
    frame.attrs["prefix_block_tokens"] = tokens


def _arrivals(rng, prompt, output, tick):
    n = len(prompt)
    kind = rng.choice(["at_once", "bursts", "poisson", "idle_gaps"])
    if kind == "at_once":
        arrived = np.zeros(n)
    elif kind == "bursts":
        arrived = np.repeat(rng.exponential(1.0, n).cumsum(), rng.integers(1, 12, n))[:n]
    elif kind == "poisson":
        arrived = rng.exponential(10.0 ** rng.uniform(-2.5, 0), n).cumsum()
    else:
        arrived = rng.exponential(np.where(rng.random(n) < 0.15, 8.0, 0.01)).cumsum()
    if tick:
        tick = rng.choice([tick, tick / 2])
        arrived = np.round(arrived / tick) * tick
    return pd.DataFrame({"rid": np.arange(n), "arrived_s": arrived, "prompt_tokens": prompt, "output_tokens": output})


def first_difference(ours, theirs):
    """Return None if two (results, step log) agree, else text showing the first step at which they part."""
    (our_results, our_log), (their_results, their_log) = ours, theirs
    first = min(
        (
            step
            for name in ("requests", "preemptions", "steps")
            if (step := _first_step(_table(our_log, name), _table(their_log, name))) is not None
        ),
        default=None,
    )
    if first is not None:
        sides = [f"{who}:\n{_step_text(log, first)}" for who, log in (("ours", our_log), ("vLLM", their_log))]
        return f"the schedules part at step {first}\n" + "\n".join(sides)
    for column in ("first_token_s", "finished_s", "generated_tokens", "preemptions"):
        differs = _differs(our_results[column].to_numpy(), their_results[column].to_numpy())
        if differs.any():
            at = int(np.argmax(differs))
            return (
                f"equal schedules, yet {column} of rid {our_results['rid'].iloc[at]} is "
                f"{our_results[column].iloc[at]!r} in ours and {their_results[column].iloc[at]!r} in vLLM's"
            )
    return None


def _table(log, name):
    return log if name == "requests" else log.attrs[name]


def _differs(ours, theirs):
    return ~np.isclose(ours.astype(float), theirs.astype(float), rtol=0, atol=SECONDS_TOLERANCE, equal_nan=True)


def _first_step(ours, theirs):
    """Return the first step whose rows differ between two tables with equal columns and a ``step`` column."""
    shared = min(len(ours), len(theirs))
    differs = np.zeros(shared, bool)
    for column in theirs.columns:
        differs |= _differs(ours[column].to_numpy()[:shared], theirs[column].to_numpy()[:shared])
    if differs.any():
        at = int(np.argmax(differs))
        return int(min(ours["step"].iloc[at], theirs["step"].iloc[at]))
    if len(ours) != len(theirs):
        return int((ours if len(ours) > shared else theirs)["step"].iloc[shared])
    return None


def _step_text(log, step):
    rows, gone = log[log["step"] == step], log.attrs["preemptions"]
    state = log.attrs["steps"].query("step == @step").to_dict("records")
    requests = ", ".join(f"{rid}:{tokens}" for rid, tokens in zip(rows["rid"], rows["tokens"], strict=True))
    return (
        f"  rid:tokens   {requests or 'no such step'}\n"
        f"  preempted    {gone.loc[gone['step'] == step, 'rid'].tolist()}\n"
        f"  state        {state[0] if state else None}"
    )


def difference_on(seed, *flags):
    """Return None, or how our engine and vLLM differ on ``random_workload(seed, ...)``."""
    frame, config, cost = random_workload(seed, *flags)
    theirs = oracle.run_vllm(frame, config, cost)
    ours = run_one(frame, config, cost, log=True, leaps=False)
    leapt, _ = run_one(frame, config, cost, log=False, leaps=True)
    difference = first_difference(ours, theirs)
    if difference is None:
        difference = first_difference((leapt, theirs[1]), theirs)
        difference = difference and f"with leaps: {difference}"
    return difference and f"seed {seed}, {config}\n{difference}"


@pytest.mark.slow
@pytest.mark.parametrize(("chunked", "asynchronous", "caching"), SETTINGS)
def test_schedule_equals_vllm_step_by_step(chunked, asynchronous, caching):
    first = WORKLOADS_PER_SETTING * SETTINGS.index((chunked, asynchronous, caching))
    for seed in range(first, first + WORKLOADS_PER_SETTING):
        difference = difference_on(seed, chunked, asynchronous, caching)
        assert difference is None, difference


def test_a_single_changed_token_preemption_or_time_is_found():
    seed = next(s for s in range(50) if len(_preemptions_of(s)) > 3)
    results, log = theirs = oracle.run_vllm(*random_workload(seed))
    assert first_difference(theirs, theirs) is None

    row = len(log) // 2
    for column, change in (("tokens", 1), ("rid", 1), ("end_s", 1e-6)):
        altered = log.copy()
        altered.loc[row, column] += change
        found = first_difference((results, altered), theirs)
        assert f"part at step {log['step'][row]}\n" in found, column

    one_less = log.copy()
    one_less.attrs = log.attrs | {"preemptions": log.attrs["preemptions"].iloc[:-1]}
    assert f"part at step {log.attrs['preemptions']['step'].iloc[-1]}\n" in first_difference(
        (results, one_less), theirs
    )

    swapped = log.copy()
    same_step = log.index[log["step"] == log["step"].value_counts().idxmax()][:2]
    swapped.loc[same_step, ["rid", "tokens"]] = log.loc[same_step[::-1], ["rid", "tokens"]].to_numpy()
    assert "part at step" in first_difference((results, swapped), theirs)

    late = results.assign(finished_s=results["finished_s"] + 1e-6)
    assert "finished_s of rid 0" in first_difference((late, log), theirs)


def _preemptions_of(seed):
    return oracle.run_vllm(*random_workload(seed))[1].attrs["preemptions"]


def main():
    import argparse
    import time

    parser = argparse.ArgumentParser(description="Hunt for workloads on which our engine and vLLM's scheduler differ.")
    parser.add_argument("--seeds", default="0:240", help="FROM:TO (default %(default)s)")
    parser.add_argument("--keep-going", action="store_true", help="report every difference, not only the first")
    arguments = parser.parse_args()
    start, stop = (int(bound) for bound in arguments.seeds.split(":"))
    began, found = time.monotonic(), 0
    for seed in range(start, stop):
        if difference := difference_on(seed):
            found += 1
            print(difference, flush=True)
            if not arguments.keep_going:
                break
        if (seed - start + 1) % 100 == 0:
            print(
                f"{seed - start + 1} workloads, {found} differences, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    print(f"seeds {start}..{seed}: {found} workloads differ")
    raise SystemExit(found > 0)


if __name__ == "__main__":
    main()
