"""Runs of a grid on prefill and decode pools: what their settings stand for, and what they measure beside the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from astrolabe_lab.disagg.routers import parse
from astrolabe_lab.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from astrolabe_lab.measure import SLO

__all__ = ["options_of", "parse", "refuse", "slo_of", "spread"]
ONLY = ("decode_slope_s", "service", "signals", "poll_s", "constants", "hand_off")
NEVER = (
    *("instances", "delays", "status_interval_s", "tag_s", "predict_s", "dispatch_s", "routers", "faults", "control"),
    *("extension_tokens", "predictor_cost", "latency_noise"),
)


def refuse(given: Mapping[str, object]) -> None:
    """Raise InputError for settings that go with pools only."""
    for key in given:
        if key.partition(".")[0] in ONLY:
            raise InputError(f"{key} goes with pools: give pools, as in pools: 2+4")


def options_of(given: Mapping[str, object], engine_and_cost: Callable) -> dict[str, object]:
    """The keyword arguments of `simulate_pools`. ``engine_and_cost``: of settings on top of a mapping."""
    from astrolabe_lab.disagg import settings
    from astrolabe_lab.disagg.simulate import calibrated, paper_world

    for key in given:
        if key.partition(".")[0] in NEVER:
            raise InputError(f"{key} is not modelled for pools; leave it out")
    slope_s = given.get("decode_slope_s")
    named = given.get("preset") not in (None, "none")
    if named and slope_s is not None:
        raise InputError(
            "decode_slope_s is of the second paper's pools: leave out preset, or set cost.decode.per_seq_s"
        )
    base: dict[str, object] = {"preset": given.get("preset")}
    if not named:
        base["engine"], base["cost"] = paper_world(slope_s)
    engine, cost = engine_and_cost(base)
    members = {key.partition(".")[2]: value for key, value in given.items() if key.startswith("hand_off.")}
    hand_off = settings.hand_off(members, given.get("hand_off"))
    true = calibrated(engine, cost, hand_off, given.get("service", "exact"))
    constants = settings.constants(given.get("constants", "calibrated"), true)
    changed = {key.partition(".")[2]: value for key, value in given.items() if key.startswith("constants.")}
    options = {"pools": settings.parse_pools(given["pools"]), "engine": engine, "cost": cost, "hand_off": hand_off}
    options["constants"] = constants.with_(**changed) if changed else constants
    return options | {key: given[key] for key in ("service", "signals", "poll_s", "policy_seed") if key in given}


def slo_of(options: Mapping[str, object]) -> SLO:
    """The targets of pools with these `options`: whatever a router believes, requests were promised the same."""
    from astrolabe_lab.disagg import settings
    from astrolabe_lab.disagg.simulate import calibrated

    named = [options[name] for name in ("engine", "cost", "hand_off")]
    return settings.slo_of(calibrated(*named, options.get("service", "exact")))


def spread(results: pd.DataFrame, n_decode: int) -> dict[str, float]:
    """How unevenly requests and their tokens lay over the decode engines: `spread_requests`, `spread_tokens`, the
    standard deviation over engines by their mean."""
    import numpy as np

    sent = results[results["decode_instance"] >= 0]
    at = sent["decode_instance"].to_numpy()
    found = {}
    for name, weights in (("requests", None), ("tokens", sent["output_tokens"].to_numpy())):
        load = np.bincount(at, weights, minlength=n_decode)
        found[f"spread_{name}"] = float(load.std() / load.mean()) if load.any() else float("nan")
    return found
