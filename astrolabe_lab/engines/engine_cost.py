"""The step cost of running engines, from what their schedulers logged while they were loaded on purpose.

measured = await engine_cost.measure(cluster)
cluster.set_cost(measured.cost)          # routers that start now predict with it
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

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
PAUSE_S = 0.2  # wall s
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


async def measure(
    cluster: Cluster,
    alone: int = 12,
    together: int = 60,
    seed: int = 0,
    side_by_side: bool = False,
    url: str | None = None,
) -> Measured:
    """Load every engine of an idle cluster, one after the other or all ``side_by_side``, and fit their steps.

    Engines that share a machine's memory, caches or cores slow each other down: at a low load, where they are seldom
    busy at once, what they take by themselves predicts better, and near capacity what they take side by side.

    First ``alone`` requests to an engine are served one at a time, which tells what a request costs outside of its
    steps (server, tokenizer, network: the median of its time less that of its steps); through a round robin router at
    ``url``, if given, whose own way is part of that then. Then each engine serves ``together`` requests of all sizes
    that keep arriving faster than it serves, so that batches of all sizes occur. Prompts share no prefix. The fit
    weighs relative errors, and so prices the usual step; a latency is a sum of steps, slow ones too, so each regime's
    prices are then multiplied by what makes their sum right (``levelled``). Raises InputError as ``fit.fit`` does, and
    where a request fails.
    """
    since, everyone = cluster.marks(), range(len(cluster.urls))
    singles = await _alone(cluster, _requests(cluster, alone, seed, 1_000_000), seed, url)
    frontend_s = max(0.0, float(np.median(_outside_s(singles, cluster.steps(since)))))
    load = {"concurrency": cluster.config.max_num_seqs, "ramp_s": 2.0, "seed": seed}
    for members in [everyone] if side_by_side else [[i] for i in everyone]:
        many = _requests(cluster, together, seed, 2_000_000)
        await asyncio.gather(*(_send(cluster, cluster.urls[i], many, **load) for i in members))
    fitted = fit(cluster.steps(since), seed=seed, quiet=True)
    cost, levels = levelled(fitted)
    return Measured(replace(cost, frontend_s=frontend_s), fitted, levels, singles)


async def _alone(cluster: Cluster, requests: pd.DataFrame, seed: int, url: str | None) -> pd.DataFrame:
    """Each request at each engine, or as often through the router at ``url``; each after a pause, as at a low load."""
    import pandas as pd

    frames = []
    for row in range(len(requests)):
        for i, engine in enumerate(cluster.urls):
            one = requests.iloc[[row]].assign(rid=requests["rid"].iloc[row] + i * len(requests))
            await asyncio.sleep(PAUSE_S)
            sent = await _send(cluster, url or engine, one, seed=seed)
            frames.append(sent.assign(order=len(frames), **({} if url else {"instance": i})))
    return pd.concat(frames, ignore_index=True)


def _outside_s(sent: pd.DataFrame, steps: pd.DataFrame) -> list[float]:
    """What each of the requests that engines served one at a time took beside its steps."""
    found = []
    for instance, own in sent.groupby("instance"):
        mine = steps[steps["instance"] == instance]
        of_a_request = mine.groupby(mine["after_idle"].cumsum())["seconds"].sum()
        served = own.sort_values("order")["e2e_from_send_s"]
        if len(served) != len(of_a_request):
            raise InputError(f"engine {instance} served others meanwhile: its step cost is measured where it is idle")
        found += (served.to_numpy() - of_a_request.to_numpy()).tolist()
    return found


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


async def _send(cluster: Cluster, url: str, trace: pd.DataFrame, **how) -> pd.DataFrame:
    load = bench.Load(cluster.model, time_scale=cluster.time_scale, source=cluster.world, **how)
    sent = await bench.drive(url, trace, load)
    if (failed := sent[sent["status"] != "ok"]).shape[0]:
        raise InputError(f"{len(failed)} of {len(sent)} requests failed, the first: {failed['reason'].iloc[0]}")
    return sent


def _requests(cluster: Cluster, n: int, seed: int, first_rid: int) -> pd.DataFrame:
    """Prompts and answers of all lengths that the engines take, spread evenly on a logarithmic scale.

    Prompts are made from ``rid``: other ids share no prefix."""
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
