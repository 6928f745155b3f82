"""A grid of runs on pools (``disagg.studies``), made on emulated engines instead of in the simulator.

with launch_for(grid, time_scale=4.0) as pools:
    rows = run(grid, pools, "outputs/live")         # as ``sweep.run(grid)`` gives them, A/A rows among them

The requests are those of the simulated run at the same seed. What varies may be the policy, the seed, the rate and the
constants that the router is told; the engines stay the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.rng import stream
from astrolabe_lab.sweep.grid import Grid

if TYPE_CHECKING:
    import pandas as pd

    from astrolabe_lab.engines.running import Cluster

MAY_VARY = ("constants",)  # of what a simulated run is given


def launch_for(grid: Grid, time_scale: float, **options: object) -> Cluster:
    """Running emulated pools of the grid's shape, engines and hand-off; ``options`` are those of ``launch_pools``.

    Raises InputError for a grid whose runs are on different pools, or on pools that cannot be emulated.
    """
    from astrolabe_lab.calibrate.artifact import Transfer
    from astrolabe_lab.serve.pools.launch import Handover, launch_pools
    from astrolabe_lab.sweep.plan import planned

    runs, _ = planned(grid)
    world = _world(runs)
    (config, decode_config), (cost, decode_cost) = (_both(world[name]) for name in ("engine", "cost"))
    hand_off = world["hand_off"]
    if config != decode_config or cost != decode_cost or world.get("service", "exact") != "exact":
        raise InputError("emulated pools have engines of one kind that keep vLLM's schedule: leave out what differs")
    if world.get("signals", "own") != "own":
        raise InputError("signals=leaked is of the simulator alone: no live router can be told true lengths")
    transfer = Transfer(hand_off.base_s, hand_off.per_block_s)
    given = {"engine": config, "cost": cost, "time_scale": time_scale, "handover": Handover(transfer)}
    return launch_pools(*world["pools"], **given | options)


def run(grid: Grid, pools: Cluster, out: str | Path, say: Callable[[str], None] | None = None) -> pd.DataFrame:
    """One row per run of the grid, with the columns of ``sweep.run``, and one more of its first policy (``(again)``)
    at each seed, rate and constants; ``valid``: whether load generator and router kept up (``runs.run_cells``).

    ``out`` keeps every cell: what was ended goes on from there. Traces come in random order, on each trace the
    constants and in each of those the policies, so that what drifts meanwhile favours nobody. Raises InputError as
    ``launch_for`` and ``runs.run_cells``.
    """
    import pandas as pd

    from astrolabe_lab.record import write_whole
    from astrolabe_lab.serve.pools.runs import AGAIN, plan, run_cells
    from astrolabe_lab.sweep.cell import arrive
    from astrolabe_lab.sweep.plan import planned

    runs, sources = planned(grid)
    _world(runs)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    blocks: dict[str, dict[str, list]] = {}
    for one in runs:
        constants = json.dumps(one.options["constants"].to_dict(), indent=1)
        blocks.setdefault(f"qps{one.qps:g}-seed{one.seed}", {}).setdefault(constants, []).append(one)
    rng = stream(0, "order of blocks")
    rows = []
    for name in rng.permutation(sorted(blocks)):
        told = sorted(blocks[name])
        for number in rng.permutation(len(told)):
            members = {one.policy: one for one in blocks[name][told[number]]}
            first = next(iter(members.values()))
            folder = out / f"{name}-constants{number}"
            file = folder.with_suffix(".json")
            write_whole(file, told[number])
            traces = {name: arrive(first, sources.frames)}
            cells = plan([*members], [name], first.seed)
            run_cells(pools.folder, cells, traces, folder, ["--constants-from", str(file)], say=say)
            for cell in cells:
                one = members[cell.policy]
                label = one.cell.label if cell.label == cell.policy else f"{one.cell.label} ({AGAIN})"
                rows.append(_row(one, label, pd.read_parquet(folder / f"{cell.name}.parquet")))
    return pd.DataFrame(rows)


def _row(one, label: str, results: pd.DataFrame) -> dict[str, object]:
    from astrolabe_lab.measure import summarise
    from astrolabe_lab.sweep import pools
    from astrolabe_lab.sweep.cell import row_of

    n_prefill, n_decode = one.options["pools"]
    found = summarise(results, by=[], slo=one.slo or pools.slo_of(one.options)).to_dict("records")[0]
    # A live router names the engine that decoded, counted over both pools; -1 where none did.
    own = results.assign(decode_instance=results["instance"] - n_prefill)
    row = row_of(one.cell, {"qps": one.qps} | found | pools.spread(own, n_decode))
    valid = results.attrs["astrolabe"]["validity"]["valid"]
    return row | {"source": results["source"].iloc[0], "policy": label, "valid": valid}


def _world(runs: list) -> Mapping[str, object]:
    """The options of all runs but what may vary. Raises InputError where they, or their traffic, are not the same."""
    worlds = []
    for one in runs:
        traffic = {"trace": one.requests.source, "requests": one.requests.count, "lengths": one.requests.lengths}
        traffic |= {"arrivals": one.arrivals, "alpha": one.alpha}
        worlds.append(traffic | {name: value for name, value in one.options.items() if name not in MAY_VARY})
    if "pools" not in worlds[0]:
        raise InputError("the grid is of whole engines: give pools, as in pools: 2+4")
    if other := sorted({name for world in worlds for name in world if world[name] != worlds[0].get(name)}):
        raise InputError(f"the grid's runs differ in {', '.join(other)}: one set of live pools has one each")
    return worlds[0]


def _both(value: object) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value, value)
