"""Predictions of a running cluster beside what came true: in isolation, under load, on every candidate.

All functions leave the cluster idle, and their times are modelled seconds.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from astrolabe_lab.errors import InputError

from . import probes
from .in_process import serving

if TYPE_CHECKING:
    import pandas as pd


async def in_isolation(
    cluster, trace: pd.DataFrame, group: int = 4, gap_s: float = 10.0, seed: int = 0
) -> pd.DataFrame:
    """Probes that no later arrival disturbs: of every ``group`` requests that come together, the last one.

    A group goes to every engine at once, the next one ``gap_s`` later, when all are idle again (raises InputError where
    they are not: give a longer gap). Rows as of ``probes.drive``. With true lengths what is left of the error is the
    step cost, the status and the host.
    """
    grouped = trace.reset_index(drop=True)
    numbers = np.arange(len(grouped))
    grouped = grouped.assign(arrived_s=(numbers // group) * gap_s + (numbers % group) * 0.05)
    async with serving(cluster, "round_robin") as (router, _):
        found = await probes.drive(router, grouped, seed)
    rids = list(dict.fromkeys(found["rid"]))
    first = found[found["rid"].isin(rids[::group])]
    if (first["in_system"] > 0).any():
        raise InputError(f"gap_s={gap_s:g} is too short: requests of the group before are still there")
    last = rids[group - 1 :: group]
    return found[found["rid"].isin(last)].reset_index(drop=True)


async def under_load(
    cluster, trace: pd.DataFrame, probed: pd.DataFrame, policy: str = "astrolabe:k=2", seed: int = 0, **options
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(result frame of ``trace`` under ``policy``, probes of all engines with ``probed`` meanwhile); ``options`` as of
    ``in_process.router_of``."""
    from astrolabe_lab import bench

    load = bench.Load(cluster.model, exact=False, time_scale=cluster.time_scale, seed=seed)
    async with serving(cluster, policy, **options) as (router, url):
        frame, found = await asyncio.gather(bench.drive(url, trace, load), probes.drive(router, probed, seed))
    return frame.assign(policy=router.policy_name), found


def errors(found: pd.DataFrame, by=()) -> pd.DataFrame:
    """Of probes that were predicted and answered, by the columns ``by``: ``probes, e2e_mae_pct, e2e_signed_pct``,
    ``ttft_mae_s, ttft_signed_s`` (a TTFT of a few ms makes a percentage meaningless)."""
    import pandas as pd

    known = found[(found["status"] == "ok") & found["predicted_e2e_s"].notna()]
    table = known[list(by)].assign(
        e2e=100 * (known["predicted_e2e_s"] / known["e2e_s"] - 1.0),
        ttft=known["predicted_ttft_s"] - known["ttft_s"],
    )
    groups = table.groupby(list(by), observed=True) if by else [((), table)]
    rows = [
        (*key, len(own), own["e2e"].abs().mean(), own["e2e"].mean(), own["ttft"].abs().mean(), own["ttft"].mean())
        for key, own in groups
    ]
    columns = ["probes", "e2e_mae_pct", "e2e_signed_pct", "ttft_mae_s", "ttft_signed_s"]
    return pd.DataFrame(rows, columns=[*by, *columns])
