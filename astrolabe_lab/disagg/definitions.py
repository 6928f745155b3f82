"""The studies as files that ``astrolabe sweep`` takes, at the rates that were found for runs of their length."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError

if TYPE_CHECKING:
    from astrolabe_lab.sweep import Grid

STARVED_QPS = (9.0, 12.0, 15.0, 20.0)  # of 1 + 2 engines: from comfort to far beyond
NAMES = ("bursty", "calibration", "families", "width", "gpus", "starved", "load", "train", "ablation", "length_error",
         "kv_budget", "services", "leak")  # fmt: skip
OWN_POLICIES = ("calibration", "ablation", "length_error", "leak")  # studies of what a router is told, or made of


def make(
    names: Sequence[str] = NAMES,
    requests: int = 10_000,
    seeds: Sequence[int] = range(10),
    search_seeds: Sequence[int] = (0, 1),
    tolerance: float = 0.02,
    workers: int | None = None,
    slopes_s: Sequence[float] | None = None,
    policies: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Grid]:
    """{study: its Grid} at each of ``slopes_s`` (default: ``studies.SLOPES_S``); the rates of mid-collapse are searched
    for first, which takes minutes.

    ``policies``: instead of its own, for a study that compares routers (all but those of OWN_POLICIES).
    ``say`` gets a line before each search. Raises InputError, before any search, for a name that is no study, a policy
    that is none of pools, a slope that is not > 0 and either given twice; and as ``saturation.find``.
    """
    from astrolabe_lab.disagg import published, saturation, services, studies

    if not names:
        raise InputError(f"no study is named; there are {', '.join(NAMES)}")
    if unknown := [name for name in names if name not in NAMES]:
        raise InputError(f"no study is called {', '.join(unknown)}; there are {', '.join(NAMES)}")

    slopes_s = tuple(slopes_s or studies.SLOPES_S)
    _check_slopes(slopes_s)
    _check_policies(policies or ())

    @cache
    def rates(family: str) -> dict[float, float]:
        say(f"searching the rates of {family} traffic")
        search = {"tolerance": tolerance, "workers": workers}
        return saturation.anchors([family], slopes_s, requests, search_seeds, **search)[0][family]

    def of_services() -> dict[tuple[str, str, float], float]:
        say("searching the rates of each service model")
        found, _ = saturation.service_anchors(
            services.SERVICES[::-1], studies.FAMILIES, slopes_s, requests, search_seeds,
            targets=published.ROUND_ROBIN, tolerance=tolerance, workers=workers,
        )  # fmt: skip
        return found

    def grid(name: str) -> Grid:
        own = {"policies": policies} if policies and name not in OWN_POLICIES else {}
        if name == "starved":
            return studies.starved(STARVED_QPS, slopes_s, seeds, requests, **own)
        if name == "families":
            return studies.families({family: rates(family) for family in studies.FAMILIES}, seeds, requests, **own)
        anchors = of_services() if name == "services" else rates("mixed")
        return getattr(studies, name)(anchors, seeds, requests, **own)

    return {name: grid(name) for name in names}


def _check_slopes(slopes_s: Sequence[float]) -> None:
    for slope_s in slopes_s:
        if isinstance(slope_s, bool) or not isinstance(slope_s, (int, float)) or not 0 < slope_s < math.inf:
            raise InputError(f"slopes_s: {slope_s!r} must be a finite number > 0, in s a stream")
    if twice := [slope_s for n, slope_s in enumerate(slopes_s) if slope_s in slopes_s[:n]]:
        raise InputError(f"slopes_s: {twice[0]!r} is given twice: give each once")


def _check_policies(policies: Sequence[str]) -> None:
    from astrolabe_lab.disagg import routers

    if isinstance(policies, str):
        raise InputError(f"policies={policies!r} should be a list of policies: write [{policies!r}]")
    known = [routers.spec(routers.parse(policy)) for policy in policies]
    if twice := [policy for n, policy in enumerate(policies) if known[n] in known[:n]]:
        raise InputError(f"policy {twice[0]} is given twice: give each once")


def write(grids: Mapping[str, Grid], folder: str | Path) -> list[Path]:
    """Write each grid to ``folder/NAME.yaml``, which holds the same runs; returns the paths."""
    import yaml

    from astrolabe_lab.record import write_whole

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, grid in grids.items():
        walked = [{key: [point[key] for point in axis] for key in axis[0]} for axis in grid.axes]
        told = {"defaults": dict(grid.defaults), "zip": walked}
        paths.append(folder / f"{name}.yaml")
        write_whole(paths[-1], yaml.safe_dump(told, sort_keys=False, default_flow_style=None, width=120))
    return paths
