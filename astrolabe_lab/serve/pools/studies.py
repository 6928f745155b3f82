"""A grid of runs on pools (``disagg.studies``), made on live engines instead of in the simulator.

rows = run(grid, Emulated(time_scale=4.0), "outputs/live")     # on vLLM engines that are started as the runs need them
rows = run(grid, "/tmp/pools", "outputs/live")                 # on pools that run

Both give what ``sweep.run(grid)`` gives, with A/A rows among them. The requests are those of the simulated run at the
same seed.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from astrolabe_lab import record
from astrolabe_lab.alone import alone
from astrolabe_lab.engines.cluster_file import read_cluster
from astrolabe_lab.engines.needs import EMULATED_BYTES, check_memory
from astrolabe_lab.errors import InputError
from astrolabe_lab.rng import stream
from astrolabe_lab.serve.pools.runs import AGAIN, Cell, gates_of, kept, plan, run_cells, tell, validity_of
from astrolabe_lab.serve.pools.world import World
from astrolabe_lab.sweep.cell import Run, arrive, measure, own_rate, row_of
from astrolabe_lab.sweep.conduct import described
from astrolabe_lab.sweep.grid import Grid
from astrolabe_lab.sweep.identity import of_value
from astrolabe_lab.sweep.plan import planned
from astrolabe_lab.sweep.store import SUMMARY, write_frame

if TYPE_CHECKING:
    import pandas as pd

    from astrolabe_lab.engines.running import Cluster
    from astrolabe_lab.sweep.sources import Sources

TOLD = ("constants", "poll_s", "policy_seed")  # of a run's options, those that only its router is told
ANSWERS_S = 5.0  # wall s that a running engine takes to accept a connection, at most
START_S, ROUTER_S = 60.0, 6.0  # engines and gates; a run's router and its own gates


@dataclass(frozen=True)
class Emulated:
    """Pools that are started for the runs and ended after them, one set at a time: vLLM engines that sleep the modelled
    step. ``time_scale``: wall s per modelled s."""

    time_scale: float

    def __post_init__(self):
        if not (isinstance(self.time_scale, (int, float)) and 0 < self.time_scale < math.inf):
            raise InputError(f"time_scale={self.time_scale!r} must be a finite number > 0")


@dataclass(frozen=True)
class Block:
    """The runs on one trace by routers that were told the same: ``indices`` in the grid by policy, ``cells`` as they
    follow."""

    trace: str
    folder: Path
    indices: dict[str, int]
    cells: list[Cell]

    def files(self) -> list[Path]:
        return [self.folder / f"{cell.name}.parquet" for cell in self.cells]

    def complete(self) -> bool:
        return all(file.exists() for file in self.files())


def run(
    grid: Grid,
    pools: Cluster | str | Path | Emulated,
    out: str | Path,
    say: Callable[[str], None] = tell,
    gates: Callable[[], list[dict]] | None = None,
    again: bool = True,
    redo_invalid: bool = False,
) -> pd.DataFrame:
    """One row per run of the grid, with the columns of ``sweep.run``, and, unless ``again`` is False, one more of the
    first policy (``(again)``) wherever the others ran; ``valid``: whether load generator, router and host kept up,
    ``why`` not (``runs.run_cells``).

    ``pools``: a running cluster, or its folder, which all runs must be of; or ``Emulated``. ``out`` keeps every cell,
    ``summary.parquet`` and ``run.json``: what was ended goes on from there. Sets of pools come in random order, on each
    the traces and on each of those the policies, so that what drifts meanwhile favours nobody. ``redo_invalid``: make
    runs again that were kept and do not count. ``gates``: where several calls share one asking (``runs.gates_of``).
    Raises InputError for runs that no live pools can make, and as ``runs.run_cells``; GateError where a gate does not
    hold; EngineError for engines that do not start.
    """
    runs, sources = planned(grid)
    out = Path(out)
    worlds = _worlds(runs)
    live = _place(pools, [world for world, _ in worlds])
    _require_own(out, live)
    plans = [(world, _blocks(runs, indices, world, out, again)) for world, indices in worlds]
    blocks = [block for _, of_world in plans for block in of_world]
    files = [file for block in blocks for file in block.files()]
    out.mkdir(parents=True, exist_ok=True)
    told = {"parameters": described(grid), "seed": list(dict.fromkeys(one.seed for one in runs)), "live": live}
    with alone(out / "run.json"):
        _check_kept(files, live, redo_invalid)
        before, began, status = _there(files), time.monotonic(), "failed"
        record.note(out, new=True, status="running", **told)
        if before:
            say(f"{before} of {len(files)} runs are kept in {out}")
        try:
            for world, of_world in plans:
                if not (left := [block for block in of_world if not block.complete()]):
                    continue
                with _pools_of(world, pools, out, say) as folder:
                    asked = gates or gates_of(folder, say)
                    for block in left:
                        at = f"block {blocks.index(block) + 1} of {len(blocks)}, "
                        _run_block(block, runs, sources, folder, asked, lambda line, at=at: say(at + line))
                        _tell_left(files, before, time.monotonic() - began, say)
            status = "ok"
        except KeyboardInterrupt:
            status = "interrupted"
            say(f"ended with {_there(files)} of {len(files)} runs kept in {out}; the same again goes on from there")
            raise
        finally:
            frame = _summary(runs, blocks)
            if len(frame):
                write_frame(frame, out / SUMMARY)
            counts = {"all": len(files), "made": _there(files) - before, "made_before": before}
            wrote = {SUMMARY: len(frame)} if len(frame) else {}
            record.note(out, status=status, runs=counts, rows=wrote, wall_s=round(time.monotonic() - began, 3))
    return frame


def estimate(grid: Grid, pools: Cluster | str | Path | Emulated, again: bool = True) -> dict[str, object]:
    """What ``run`` takes: ``runs, requests, pools`` (sets of them) and ``wall_s``, about: until the simulator has
    answered the last request, and what starting takes on two cores. Raises InputError as ``run``."""
    runs, sources = planned(grid)
    worlds = _worlds(runs)
    time_scale = _place(pools, [world for world, _ in worlds])["time_scale"]
    found = {"runs": 0, "requests": 0, "pools": len(worlds), "wall_s": START_S * len(worlds)}
    for world, indices in worlds:
        for block in _blocks(runs, indices, world, Path(), again):
            first = runs[next(iter(block.indices.values()))]
            results = measure(first, arrive(first, sources.frames))[1]
            run_s = ROUTER_S + time_scale * float(results["finished_s"].max() - results["arrived_s"].min())
            found["runs"] += len(block.cells)
            found["requests"] += len(block.cells) * len(results)
            found["wall_s"] += len(block.cells) * run_s
    return found


def _worlds(runs: list[Run]) -> list[tuple[World, list[int]]]:
    """The pools that the runs are on, in the order they are used, with the runs' indices."""
    found: dict[str, tuple[World, list[int]]] = {}
    for index, one in enumerate(runs):
        world = World.of(one)
        found.setdefault(world.key, (world, []))[1].append(index)
    return [found[key] for key in stream(0, "order of pools").permutation(sorted(found))]


def _place(pools: Cluster | str | Path | Emulated, worlds: list[World]) -> dict[str, object]:
    """Where the runs are made, as ``run.json`` tells it. Raises InputError where they cannot be made there."""
    first, *others = worlds
    if isinstance(pools, Emulated):
        check_memory(max(sum(world.shape) for world in worlds), EMULATED_BYTES, "emulated")
        return {"world": "emulated", "time_scale": pools.time_scale}
    if others:
        differ = sorted({name for other in others for name in first.apart(other)})
        raise InputError(
            f"the grid's runs differ in {', '.join(differ)}, and pools that run have one of each: --emulate SCALE "
            "starts each in turn"
        )
    folder = Path(getattr(pools, "folder", pools))
    first.require(folder)
    found = read_cluster(folder)
    return {"world": found.world, "time_scale": found.time_scale, "cluster": str(folder)}


def _require_own(out: Path, live: dict[str, object]) -> None:
    """Raise InputError where ``out`` holds other results than such runs'."""
    if not (found := record.read(out)):
        return
    held = found.get("live")
    if not isinstance(held, dict):
        raise InputError(f"{out} holds the results of {found.get('notebook') or 'another run'}: name another folder")
    if any(held.get(name) != live[name] for name in ("world", "time_scale")):
        raise InputError(
            f"{out} holds runs on {held.get('world')} pools at time scale {held.get('time_scale')}: go on with those, "
            "or name another folder"
        )


def _check_kept(files: list[Path], live: dict[str, object], redo_invalid: bool) -> None:
    """Look at the runs that are kept; with ``redo_invalid`` remove those that do not count. Raises InputError for one
    that was made elsewhere."""
    for file in filter(Path.exists, files):
        frame = kept(file)
        made = frame["source"].iloc[0], frame.attrs["astrolabe"]["time_scale"]
        if made != (live["world"], live["time_scale"]):
            raise InputError(f"{file} was made on {made[0]} pools at time scale {made[1]}: name another folder")
        if redo_invalid and not validity_of(frame)["valid"]:
            file.unlink()


@contextlib.contextmanager
def _pools_of(world: World, pools, out: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """The folder of the pools, which run as long as the context lasts."""
    if isinstance(pools, Emulated):
        say(f"starting pools {world.shape[0]}+{world.shape[1]}")
        folder = out / f"pools-{world.key}"
        with world.launch(pools.time_scale, folder=folder, progress=say):
            yield folder
        return
    folder = Path(getattr(pools, "folder", pools))
    for engine in read_cluster(folder).engines:
        there = urlsplit(engine["url"])
        try:
            socket.create_connection((there.hostname, there.port), ANSWERS_S).close()
        except OSError:
            raise InputError(
                f"the pools of {str(folder)!r} do not run (nothing answers at {engine['url']}): {world.command()} "
                "starts such"
            ) from None
    yield folder


def _summary(runs: list[Run], blocks: list[Block]) -> pd.DataFrame:
    """A row for each run that is kept, in the grid's order."""
    import pandas as pd

    rows = {}
    for block in blocks:
        for cell, file in zip(block.cells, block.files(), strict=True):
            index, extra = block.indices[cell.policy], cell.label != cell.policy
            if file.exists():
                rows[index, extra] = _row(runs[index], extra, kept(file))
    return pd.DataFrame([rows[key] for key in sorted(rows)])


def _run_block(block: Block, runs: list[Run], sources: Sources, pools: Path, gates, say: Callable[[str], None]) -> None:
    first = runs[next(iter(block.indices.values()))]
    block.folder.mkdir(parents=True, exist_ok=True)
    constants = block.folder / "constants.json"
    record.write_whole(constants, json.dumps(first.options["constants"].to_dict(), indent=1))
    route = ["--constants-from", str(constants)]
    if "poll_s" in first.options:
        route += ["--poll-s", f"{first.options['poll_s']:g}"]
    traces = {block.trace: arrive(first, sources.frames)}
    run_cells(pools, block.cells, traces, block.folder, route, say=say, gates=gates)


def _tell_left(files: list[Path], before: int, took_s: float, say: Callable[[str], None]) -> None:
    there = _there(files)
    if before < there < len(files):
        left_s = took_s / (there - before) * (len(files) - there)
        say(f"{there} of {len(files)} runs made, about {left_s / 60:.0f} minutes left")


def _there(files: list[Path]) -> int:
    return sum(file.exists() for file in files)


def _blocks(runs: list[Run], indices: list[int], world: World, out: Path, again: bool) -> list[Block]:
    """In the order they are run."""
    traces: dict[str, dict[str, list[int]]] = {}
    for index in indices:
        one = runs[index]
        rate = "own" if one.qps is None else f"{one.qps:g}"
        trace = f"qps{rate}-seed{one.seed}"
        asked = of_value([asdict(one.requests), one.arrivals, one.alpha, one.qps])
        told = of_value([world.key, asked, {name: one.options.get(name) for name in TOLD}])[:8]
        traces.setdefault(f"{trace} {asked}", {}).setdefault(f"{trace}-{told}", []).append(index)
    rng = stream(0, f"order of blocks {world.key}")
    blocks = []
    for trace in rng.permutation(sorted(traces)):
        for name in rng.permutation(sorted(traces[trace])):
            by_policy = {runs[index].policy: index for index in traces[trace][name]}
            if len(by_policy) < len(traces[trace][name]):
                raise InputError(f"{runs[by_policy.popitem()[1]]}: the same run is in the grid twice")
            title = trace.partition(" ")[0]
            first = runs[next(iter(by_policy.values()))]
            seed = first.options.get("policy_seed", first.seed)
            blocks.append(Block(title, out / name, by_policy, plan([*by_policy], [title], seed, again)))
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
    label = one.cell.label + AGAIN * again
    preempted, validity = results.attrs["astrolabe"]["preemptions"], validity_of(results)
    more = {"preemptions": math.nan if preempted is None else preempted, "valid": validity["valid"]}
    more["why"] = "; ".join(validity["why"])
    return row | {"source": results["source"].iloc[0], "policy": label} | more
