"""A journal of pools through any policy: what it would have chosen, having seen what the router saw."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from astrolabe_lab.disagg.constants import CLASSES, Constants
from astrolabe_lab.disagg.view import IN_FLIGHT, POLLED, PoolsView, check_pair
from astrolabe_lab.errors import InputError
from astrolabe_lab.request import Request
from astrolabe_lab.serve.journal import numbered, read
from astrolabe_lab.serve.replay import BOTH_KINDS
from astrolabe_lab.serve.router import decision_stream

if TYPE_CHECKING:
    import pandas as pd

POOLS = ("prefill", "decode")


def is_of_pools(path: str | Path) -> bool:
    """Whether a router of pools wrote the journal. Raises InputError for a file that is no journal."""
    events = (entry["event"] for entry in read(path))
    return next((event != "decision" for event in events if event in ("pools", "pair", "decision")), False)


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

    told, rows, torn = None, [], []
    for line, entry in numbered(path, torn.append):
        where = f"journal {str(path)!r}, line {line}"
        if entry["event"] == "decision":
            raise InputError(f"{where}: {BOTH_KINDS}")
        try:
            if entry["event"] == "pools":
                told = _whole(entry, "seed", 0), Constants.from_dict(entry["constants"])
            if entry["event"] != "pair":
                continue
            if told is None:
                raise InputError("no pools line comes before it: was the journal cut at its begin?")
            attempt, then = _whole(entry, "attempt", 0), tuple(_whole(entry, f"{pool}_instance") for pool in POOLS)
            request, view = _request(entry), _view(entry, constants or told[1])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            why = error if isinstance(error, InputError) else f"{error!r}"
            raise InputError(f"{where}: its {entry['event']} is damaged ({why})") from None
        started = time.perf_counter()
        chosen = policy.choose(request, view, decision_stream(told[0] if seed is None else seed, request.rid, attempt))
        seconds = time.perf_counter() - started
        p, d = check_pair(chosen, len(view.prefill), len(view.decode), name)
        now = int(view.prefill["instance"][p]), int(view.decode["instance"][d])
        same = now[1] == then[1] and then[0] in (now[0], -1)
        rows.append((request.rid, attempt, view.now_s, *then, *now, same, seconds))
    if not rows:
        raise InputError(f"journal {str(path)!r} holds no decisions over pools")
    columns = ["rid", "attempt", "time_s", "prefill_instance", "decode_instance", "prefill_now", "decode_now", "same",
               "decision_s"]  # fmt: skip
    frame = pd.DataFrame(rows, columns=columns)
    frame.attrs["torn_line"] = torn[0] if torn else None
    return frame


def _request(entry: dict) -> Request:
    if entry["slo"] not in CLASSES:
        raise InputError(f"slo {entry['slo']!r} is not one of {', '.join(CLASSES)}")
    tokens = _whole(entry, "prompt_tokens", 1), _whole(entry, "predicted_tokens", 0)
    return Request(_whole(entry, "rid"), _seconds(entry, "arrived_s"), *tokens, entry["slo"])


def _view(entry: dict, constants: Constants) -> PoolsView:
    pools = [_rows(entry[pool], POLLED) for pool in POOLS]
    if not all(map(len, pools)):
        raise InputError("it shows no engine of one pool")
    return PoolsView(_seconds(entry, "time_s"), *pools, _rows(entry["in_flight"], IN_FLIGHT), constants)


def _rows(entries: list[dict], kind: np.dtype) -> np.ndarray:
    """Records from JSON; null stands for NaN, and for minus infinity where something was never read."""
    rows = np.zeros(len(entries), kind)
    for row, entry in zip(rows, entries, strict=True):
        for name in kind.names:
            if kind[name].kind == "i":
                row[name] = _whole(entry, name)
            elif entry[name] is None:
                row[name] = -np.inf if name == "taken_s" else np.nan
            else:
                row[name] = _seconds(entry, name)
    return rows


def _whole(entry: dict, name: str, least: int = -1) -> int:
    value = entry[name]
    if type(value) is not int or not least <= value < 2**63:
        raise InputError(f"{name} is {value!r:.80}, no whole number from {least} up")
    return value


def _seconds(entry: dict, name: str) -> float:
    value = entry[name]
    if type(value) not in (int, float) or not math.isfinite(value):
        raise InputError(f"{name} is {value!r:.80}, no number")
    return float(value)
