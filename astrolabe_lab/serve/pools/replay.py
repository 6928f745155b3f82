"""A journal of pools through any policy: what it would have chosen, having seen what the router saw."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from astrolabe_lab.disagg.constants import Constants
from astrolabe_lab.disagg.view import IN_FLIGHT, POLLED, PoolsView, check_pair
from astrolabe_lab.errors import InputError
from astrolabe_lab.request import Request
from astrolabe_lab.serve.journal import read
from astrolabe_lab.serve.router import decision_stream

if TYPE_CHECKING:
    import pandas as pd


def is_of_pools(path: str | Path) -> bool:
    """Whether a router of pools wrote the journal. Raises InputError for a file that is no journal."""
    return next((entry["event"] == "pools" for entry in read(path) if entry["event"] in ("pools", "decision")), False)


def replay(
    path: str | Path, policy, constants: Constants | None = None, name: str = "replayed", seed: int | None = None
) -> pd.DataFrame:
    """One row a decision: rid, attempt, time_s, prefill_instance, decode_instance (as chosen then), the same with
    ``_now`` (as ``policy`` chooses), same, decision_s (wall).

    Where no prefill engine was there (prefill_instance -1), the decode engine alone is compared. ``constants``: others
    than the router priced with; ``seed``: of the policy's draws (default: the router's own). A decision is replayed by
    itself: what would have become of the cluster by other choices is the simulator's to say. Raises InputError for a
    journal that is none of pools.
    """
    import pandas as pd

    told, rows = None, []
    for entry in read(path):
        if entry["event"] == "pools":
            told = entry
        if entry["event"] != "pair":
            continue
        if told is None:
            raise InputError(f"journal {str(path)!r} does not say which pools it is of: it was cut at its begin")
        pools = [_rows(entry[pool], POLLED) for pool in ("prefill", "decode")]
        priced = constants or Constants.from_dict(told["constants"])
        view = PoolsView(entry["time_s"], *pools, _rows(entry["in_flight"], IN_FLIGHT), priced)
        request = Request(
            entry["rid"], entry["arrived_s"], entry["prompt_tokens"], entry["predicted_tokens"], entry["slo"]
        )
        started = time.perf_counter()
        chosen = policy.choose(
            request, view, decision_stream(told["seed"] if seed is None else seed, entry["rid"], entry["attempt"])
        )
        seconds = time.perf_counter() - started
        p, d = check_pair(chosen, len(pools[0]), len(pools[1]), name)
        now = int(pools[0]["instance"][p]), int(pools[1]["instance"][d])
        then = entry["prefill_instance"], entry["decode_instance"]
        same = now[1] == then[1] and then[0] in (now[0], -1)
        rows.append((entry["rid"], entry["attempt"], entry["time_s"], *then, *now, same, seconds))
    if not rows:
        raise InputError(f"journal {str(path)!r} holds no decisions over pools")
    columns = ["rid", "attempt", "time_s", "prefill_instance", "decode_instance", "prefill_now", "decode_now", "same",
               "decision_s"]  # fmt: skip
    return pd.DataFrame(rows, columns=columns)


def _rows(entries: list[dict], kind: np.dtype) -> np.ndarray:
    """Records from JSON; null stands for NaN, and for minus infinity where something was never read."""
    rows = np.zeros(len(entries), kind)
    for row, entry in zip(rows, entries, strict=True):
        for name in kind.names:
            value = entry[name]
            row[name] = value if value is not None else (-np.inf if name == "taken_s" else np.nan)
    return rows
