"""The step cost of running engines, from what their schedulers logged while they were loaded on purpose.

measured = await engine_cost.measure(cluster)
cluster.set_cost(measured.cost)          # routers that start now predict with it
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from astrolabe_lab import bench
from astrolabe_lab.cost import Regime, StepCost
from astrolabe_lab.errors import InputError
from astrolabe_lab.fit.iterations import StepFit, fit
from astrolabe_lab.rng import stream

from .running import Cluster

if TYPE_CHECKING:
    import pandas as pd

LONGEST_PROMPT = 1024
LONGEST_ANSWER = 96
USUAL = 0.99  # share of steps, by time, that set the level of the prices


@dataclass(frozen=True)
class Measured:
    """``cost``: the fitted step cost, levelled, with ``frontend_s``, what a request spends outside of its steps;
    ``fit``: its residuals and ranges before that; ``levels``: by regime, what its prices were multiplied by;
    ``alone``: the requests that were sent one at a time, as a result frame."""

    cost: StepCost
    fit: StepFit
    levels: dict[str, float]
    alone: pd.DataFrame


async def measure(cluster: Cluster, alone: int = 12, together: int = 60, seed: int = 0) -> Measured:
    """Load every engine of an idle cluster, all at the same time, and fit their steps.

    Each engine first serves ``alone`` requests one after another, which also tells what a request costs outside of its
    steps (server, tokenizer, network: their whole time less that of their steps), then ``together`` requests of all
    sizes that keep arriving faster than it serves, so that batches of all sizes occur. Prompts share no prefix. The fit
    weighs relative errors, and so prices the usual step; a latency is a sum of steps, slow ones too, so each regime's
    prices are then multiplied by what makes their sum right (``levelled``). Raises InputError as ``fit.fit`` does, and
    where a request fails.
    """
    since = cluster.marks()
    singles = await _send(cluster, _requests(cluster, alone, seed, 1_000_000), concurrency=1)
    steps_alone = cluster.steps(since)
    outside_s = (singles["e2e_from_send_s"].sum() - steps_alone["seconds"].sum()) / len(singles)
    seats = cluster.config.max_num_seqs
    await _send(cluster, _requests(cluster, together, seed, 2_000_000), concurrency=seats, ramp_s=2.0)
    fitted = fit(cluster.steps(since), seed=seed, quiet=True)
    cost, levels = levelled(fitted)
    return Measured(replace(cost, frontend_s=max(0.0, float(outside_s))), fitted, levels, singles)


def levelled(fitted: StepFit) -> tuple[StepCost, dict[str, float]]:
    """The fitted cost with each regime's prices multiplied so that they add up to the time that its steps took, and
    these factors. The slowest steps, one in a hundred, do not count: they are the machine's business."""
    steps = fitted.residuals
    usual = steps[steps["seconds"] <= steps.groupby("mixed")["seconds"].transform("quantile", USUAL)]
    regimes, levels = {}, {}
    for name in fitted.regimes:
        rows = usual[usual["mixed"] == (name == "mixed")]
        levels[name] = level = float(rows["seconds"].sum() / rows["predicted_s"].sum())
        priced = asdict(getattr(fitted.cost, name))
        regimes[name] = Regime(**{key: level * value for key, value in priced.items()})
    return replace(fitted.cost, **regimes), levels


async def _send(cluster: Cluster, trace: pd.DataFrame, **how) -> pd.DataFrame:
    """The trace to each engine, side by side."""
    import pandas as pd

    same = {"time_scale": cluster.time_scale, "source": cluster.world, **how}
    loads = [bench.Load(cluster.model, seed=i, **same) for i in range(len(cluster.urls))]
    frames = await asyncio.gather(
        *(bench.drive(url, trace, load) for url, load in zip(cluster.urls, loads, strict=True))
    )
    sent = pd.concat([frame.assign(instance=i) for i, frame in enumerate(frames)], ignore_index=True)
    if (failed := sent[sent["status"] != "ok"]).shape[0]:
        raise InputError(f"{len(failed)} of {len(sent)} requests failed, the first: {failed['reason'].iloc[0]}")
    return sent


def _requests(cluster: Cluster, n: int, seed: int, first_rid: int) -> pd.DataFrame:
    """Prompts and answers of all lengths that the engines take, spread evenly on a logarithmic scale.

    Prompts are made from ``rid``: other ids share no prefix."""
    import numpy as np
    import pandas as pd

    rng = stream(seed, f"step cost {first_rid}")
    longest = min(LONGEST_PROMPT, cluster.config.max_model_len // 2)
    answers = min(LONGEST_ANSWER, cluster.config.max_model_len - longest)
    prompt = np.geomspace(8, longest, n).astype(int)
    output = np.geomspace(4, answers, n).astype(int)
    return pd.DataFrame(
        {"rid": range(first_rid, first_rid + n), "arrived_s": 0.0, "prompt_tokens": rng.permutation(prompt),
         "output_tokens": rng.permutation(output)}
    )  # fmt: skip
