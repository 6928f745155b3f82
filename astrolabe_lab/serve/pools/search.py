"""The rate at which round robin is in mid-collapse on running pools, and the studies at that rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.disagg import saturation, studies
from astrolabe_lab.disagg.saturation import TARGET, Anchor
from astrolabe_lab.errors import InputError
from astrolabe_lab.serve.pools.runs import gates_of, tell
from astrolabe_lab.serve.pools.studies import run
from astrolabe_lab.serve.pools.world import settings_of
from astrolabe_lab.sweep.grid import Grid

if TYPE_CHECKING:
    import pandas as pd

    from astrolabe_lab.engines.running import Cluster

NAMES = ("bursty", "calibration", "load", "train", "ablation", "length_error")  # studies on one set of pools
TOLERANCE, RATES = 0.1, 8


def find_rate(
    settings: Mapping[str, object],
    pools: Cluster | str | Path,
    out: str | Path,
    *,
    target: float = TARGET,
    policy: str = "round_robin",
    seeds: Sequence[int] = (0, 1),
    start_qps: float = 8.0,
    tolerance: float = TOLERANCE,
    rates: int = RATES,
    say: Callable[[str], None] = tell,
) -> Anchor:
    """The Anchor of ``settings`` (a grid's defaults) on running pools: as ``saturation.find``, with live runs.

    ``pools``: a running cluster, or its folder. ``out`` keeps every run, a folder a rate: the same search goes on where
    it was ended. At most ``rates`` rates are tried, each at every seed; two seeds place the rate to within a quarter,
    no better. Runs in which router or load generator fell behind count too, and are said: ``probes`` tells them by
    ``valid``. Raises InputError as ``saturation.crossing`` and ``studies.run``; GateError where a gate does not hold.
    """
    gates = gates_of(getattr(pools, "folder", pools), say)

    def runs(qps: float) -> pd.DataFrame:
        grid = Grid.of(saturation.at_rate(settings, policy, qps, seeds))
        found = run(grid, pools, Path(out) / f"qps{qps:g}", say, gates, again=False)
        invalid = f", {n} of {len(found)} runs INVALID" if (n := int((~found["valid"]).sum())) else ""
        say(
            f"{policy} at {qps:.4g} requests a second keeps {found['goodput_share'].mean():.1%} of its targets{invalid}"
        )
        return found

    given = {"target": target, "start_qps": start_qps, "tolerance": tolerance, "rates": rates, "policy": policy}
    return saturation.search(runs, **given)


def make(
    names: Sequence[str],
    pools: Cluster | str | Path,
    out: str | Path,
    requests: int,
    seeds: Sequence[int],
    search_seeds: Sequence[int] = (0, 1),
    **search: object,
) -> tuple[dict[str, Grid], Anchor]:
    """({study: its Grid on the running pools}, the Anchor that all are driven by); ``search`` goes to ``find_rate``.

    Raises InputError for a name that is none of NAMES, and as ``find_rate`` and ``world.settings_of``.
    """
    if unknown := [name for name in names if name not in NAMES]:
        raise InputError(f"no study of one set of pools is called {', '.join(unknown)}; there are {', '.join(NAMES)}")
    world = settings_of(getattr(pools, "folder", pools))
    anchor = find_rate(studies.settings(requests, **world), pools, out, seeds=search_seeds, **search)
    return {name: _on(world, getattr(studies, name)({0.0: anchor.qps}, seeds, requests)) for name in names}, anchor


def _on(world: Mapping[str, object], grid: Grid) -> Grid:
    """The study's grid with the pools in its defaults, in place of a decode slope at each rate."""
    points, *axes = grid.axes
    rates = [{name: value for name, value in point.items() if name != "decode_slope_s"} for point in points]
    return replace(grid, axes=[rates, *axes], defaults={**grid.defaults, **world})
