"""A grid of runs on pools (``disagg.studies``), made on live engines instead of in the simulator.

with launch_for(grid, time_scale=4.0) as pools:
    rows = run(grid, pools, "outputs/live")         # as ``sweep.run(grid)`` gives them, A/A rows among them

The requests are those of the simulated run at the same seed. What varies may be the policy, the seed, the rate and the
constants that the router is told; the engines stay the same (``world``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab import record
from astrolabe_lab.errors import InputError
from astrolabe_lab.rng import stream
from astrolabe_lab.serve.pools.runs import AGAIN, Cell, gates_of, plan, run_cells, tell
from astrolabe_lab.serve.pools.world import World
from astrolabe_lab.sweep.cell import Run, arrive, own_rate, row_of
from astrolabe_lab.sweep.conduct import described
from astrolabe_lab.sweep.grid import Grid
from astrolabe_lab.sweep.plan import planned
from astrolabe_lab.sweep.store import SUMMARY, write_frame

if TYPE_CHECKING:
    import pandas as pd

    from astrolabe_lab.engines.running import Cluster


def launch_for(grid: Grid, time_scale: float, **options: object) -> Cluster:
    """Running emulated pools of the grid's shape, engines and hand-off; ``options`` are those of ``launch_pools``.

    Raises InputError for a grid whose runs are on different pools, or on pools that cannot be emulated.
    """
    from astrolabe_lab.calibrate.artifact import Transfer
    from astrolabe_lab.serve.pools.launch import Handover, launch_pools

    world = World.of(planned(grid)[0])
    handover = Handover(Transfer(world.hand_off.base_s, world.hand_off.per_block_s))
    given = {"engine": world.config, "cost": world.cost, "time_scale": time_scale, "handover": handover}
    return launch_pools(*world.shape, **given | options)


@dataclass(frozen=True)
class Block:
    """The runs of one trace under one set of constants: ``indices`` in the grid by policy, ``cells`` as they follow."""

    trace: str
    constants: str
    folder: Path
    indices: dict[str, int]
    cells: list[Cell]

    def file(self, cell: Cell) -> Path:
        return self.folder / f"{cell.name}.parquet"


def run(
    grid: Grid,
    pools: Cluster | str | Path,
    out: str | Path,
    say: Callable[[str], None] = tell,
    gates: Callable[[], list[dict]] | None = None,
    again: bool = True,
) -> pd.DataFrame:
    """One row per run of the grid, with the columns of ``sweep.run``, and, unless ``again`` is False, one more of its
    first policy (``(again)``) at each seed, rate and constants; ``valid``: whether load generator and router kept up
    (``runs.run_cells``).

    ``pools``: a running cluster, or its folder. ``out`` keeps every cell, ``summary.parquet`` and ``run.json``: what
    was ended goes on from there. Traces come in random order, on each trace the constants and in each of those the
    policies, so that what drifts meanwhile favours nobody. ``gates``: where several calls share one asking
    (``runs.gates_of``). Raises InputError as ``launch_for`` and ``runs.run_cells`` and where the pools are not the
    grid's; GateError where a gate does not hold.
    """
    import pandas as pd

    runs, sources = planned(grid)
    folder, out = Path(getattr(pools, "folder", pools)), Path(out)
    World.of(runs).require(folder)
    if (found := record.read(out)) and "live" not in found:
        raise InputError(f"{out} holds the results of {found.get('notebook') or 'another run'}: name another folder")
    blocks = _blocks(runs, out, again)
    files = [block.file(cell) for block in blocks for cell in block.cells]
    before = _there(files)
    gates = gates or gates_of(folder, say)
    began, rows, status = time.monotonic(), {}, "failed"
    out.mkdir(parents=True, exist_ok=True)
    seeds = list(dict.fromkeys(one.seed for one in runs))
    told = {"parameters": described(grid), "seed": seeds, "live": {"cluster": str(folder)}}
    record.note(out, new=True, status="running", **told)
    try:
        for number, block in enumerate(blocks, 1):
            first = runs[next(iter(block.indices.values()))]
            file = block.folder.with_suffix(".json")
            record.write_whole(file, block.constants)
            traces, constants = {block.trace: arrive(first, sources.frames)}, ["--constants-from", str(file)]
            at = f"block {number} of {len(blocks)}, "
            run_cells(
                folder, block.cells, traces, block.folder, constants, say=lambda line, at=at: say(at + line),
                gates=gates,
            )  # fmt: skip
            for cell in block.cells:
                index, extra = block.indices[cell.policy], cell.label != cell.policy
                rows[index, extra] = _row(runs[index], extra, pd.read_parquet(block.file(cell)))
        status = "ok"
    except KeyboardInterrupt:
        status = "interrupted"
        say(f"ended with {_there(files)} of {len(files)} runs kept in {out}; the same again goes on from there")
        raise
    finally:
        frame = pd.DataFrame([rows[key] for key in sorted(rows)])
        if len(frame):
            write_frame(frame, out / SUMMARY)
        counts = {"all": len(files), "made": _there(files) - before, "made_before": before}
        kept = {SUMMARY: len(frame)} if len(frame) else {}
        record.note(out, status=status, runs=counts, rows=kept, wall_s=round(time.monotonic() - began, 3))
    return frame


def _there(files: list[Path]) -> int:
    return sum(file.exists() for file in files)


def _blocks(runs: list[Run], out: Path, again: bool) -> list[Block]:
    """In the order they are run."""
    found: dict[str, dict[str, list[int]]] = {}
    for index, one in enumerate(runs):
        rate = "own" if one.qps is None else f"{one.qps:g}"
        constants = json.dumps(one.options["constants"].to_dict(), indent=1)
        found.setdefault(f"qps{rate}-seed{one.seed}", {}).setdefault(constants, []).append(index)
    rng = stream(0, "order of blocks")
    blocks = []
    for trace in rng.permutation(sorted(found)):
        told = sorted(found[trace])
        for number in rng.permutation(len(told)):
            indices = found[trace][told[number]]
            policies = [runs[index].policy for index in indices]
            cells = plan(policies, [trace], runs[indices[0]].seed, again)
            folder = out / f"{trace}-constants{number}"
            blocks.append(Block(trace, told[number], folder, dict(zip(policies, indices, strict=True)), cells))
    return blocks


def _row(one: Run, again: bool, results: pd.DataFrame) -> dict[str, object]:
    from astrolabe_lab.measure import summarise
    from astrolabe_lab.sweep import pools

    n_prefill, n_decode = one.options["pools"]
    found = summarise(results, by=[], slo=one.slo or pools.slo_of(one.options)).to_dict("records")[0]
    # A live router names the engine that decoded, counted over both pools; -1 where none did.
    own = results.assign(decode_instance=results["instance"] - n_prefill)
    qps = own_rate(results["arrived_s"]) if one.qps is None else one.qps
    row = row_of(one.cell, {"qps": qps} | found | pools.spread(own, n_decode))
    label = f"{one.cell.label} ({AGAIN})" if again else one.cell.label
    valid = results.attrs["astrolabe"]["validity"]["valid"]
    return row | {"source": results["source"].iloc[0], "policy": label, "valid": valid}
