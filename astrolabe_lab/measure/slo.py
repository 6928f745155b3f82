"""Service-level objectives: what a request was promised, who kept it, and the goodput that makes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import pandas as pd

from astrolabe_lab.errors import InputError

from .frames import NEEDED, listed, require_columns

CLASSES = ("tight", "loose")
KEPT = ("kept_ttft", "kept_tpot", "kept_e2e", "kept_all")


@dataclass(frozen=True, slots=True)
class SLO:
    """Targets in seconds, each a most that a request may take; inf where nothing is promised.

    In a frame with a column `slo` they are those of its `tight` requests, and `loose` ones may take
    `loose_factor` times as long; in a frame without one they are everybody's.
    """

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    e2e_s: float = math.inf
    loose_factor: float = 3.0

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise InputError(f"SLO: {option.name}={value!r} is not a number > 0 (inf: nothing is promised)")
        if not 1 <= self.loose_factor < math.inf:
            raise InputError(f"SLO: loose_factor={self.loose_factor!r} is below 1, or infinite; the papers' is 3")
        if math.isinf(min(self.ttft_s, self.tpot_s, self.e2e_s)):
            raise InputError("SLO: no target is given; say at least one of ttft_s, tpot_s, e2e_s")

    @classmethod
    def parse(cls, text: str) -> "SLO":
        """The SLO that `key=value,...` describes, e.g. `ttft_s=0.175,tpot_s=0.0397`. Raises InputError."""
        allowed = [option.name for option in fields(cls)]
        values: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in str(text).split(","))):
            key, equals, value = (word.strip() for word in part.partition("="))
            if not equals or key not in allowed or key in values:
                raise InputError(f"SLO: {part!r} is not key=value with a new key of {listed(allowed)}")
            try:
                values[key] = float(value)
            except ValueError:
                raise InputError(f"SLO: {key}={value} is not a number, of seconds") from None
        return cls(**values)


def met(results: pd.DataFrame, slo: SLO) -> pd.DataFrame:
    """Which targets each request kept: bool columns `ttft, tpot, e2e, all`, a row a request.

    A request that did not end well kept none. TPOT is undefined for a request of one token and counts as
    kept, as in vLLM's `--goodput`. Raises InputError for a missing column or an unknown class.
    """
    require_columns(results, NEEDED)
    factor = np.ones(len(results))
    if "slo" in results:
        if unknown := sorted({str(name) for name in results["slo"].unique()} - set(CLASSES)):
            raise InputError(f"slo is {listed(unknown)}; allowed are {listed(CLASSES)}")
        factor = np.where(results["slo"] == "loose", slo.loose_factor, 1.0)
    ok = (results["status"] == "ok").to_numpy()
    ttft_s = (results["first_token_s"] - results["arrived_s"]).to_numpy()
    e2e_s = (results["finished_s"] - results["arrived_s"]).to_numpy()
    after_first = results["generated_tokens"].to_numpy() - 1
    tpot_s = np.where(after_first > 0, (e2e_s - ttft_s) / np.maximum(after_first, 1), 0.0)
    kept = {
        "ttft": ok & (ttft_s <= slo.ttft_s * factor),
        "tpot": ok & (tpot_s <= slo.tpot_s * factor),
        "e2e": ok & (e2e_s <= slo.e2e_s * factor),
    }
    return pd.DataFrame(kept | {"all": kept["ttft"] & kept["tpot"] & kept["e2e"]}, index=results.index)


def attainment(results: pd.DataFrame, slo: SLO, by: Sequence[str] = ()) -> pd.DataFrame:
    """The share of requests sent that kept their targets, by class: `*by, slo, sent, ttft, tpot, e2e, all`.

    A row for each class that the frame has, in the order tight, loose, and one for all requests. Raises
    InputError as `met` does.
    """
    require_columns(results, by)
    kept = met(results, slo).set_axis(KEPT, axis=1)
    table = pd.concat([results[[*by, *({"slo"} & {*results})]], kept], axis=1)
    rows = []
    for key, runs in table.groupby(list(by), sort=False, dropna=False) if by else [((), table)]:
        classes = [name for name in CLASSES if (runs["slo"] == name).any()] if "slo" in runs else []
        for name in (*classes, "all"):
            members = runs if name == "all" else runs[runs["slo"] == name]
            rows.append((*key, name, len(members), *members[list(KEPT)].mean()))
    return pd.DataFrame(rows, columns=[*by, "slo", "sent", "ttft", "tpot", "e2e", "all"])


def goodput(results: pd.DataFrame, slo: SLO) -> dict[str, float]:
    """Requests that kept all their targets: `goodput_rps`, a second, and `goodput_share`, of those sent.

    The seconds are those from the first arrival to the last finish. Where the frame has classes, also
    `goodput_share_tight` and `goodput_share_loose` (NaN for one that sent nothing). Raises InputError as
    `met` does.
    """
    kept = met(results, slo)["all"].to_numpy()
    duration_s = results["finished_s"].max() - results["arrived_s"].min()
    found = {
        "goodput_rps": kept.sum() / duration_s if duration_s > 0 else math.nan,
        "goodput_share": kept.mean() if len(kept) else math.nan,
    }
    if "slo" in results:
        for name in CLASSES:
            members = (results["slo"] == name).to_numpy()
            found[f"goodput_share_{name}"] = kept[members].mean() if members.any() else math.nan
    return found
