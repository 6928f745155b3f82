"""Runs on live pools that can be compared: isolated, interleaved at random, beside A/A, and kept as they end.

The first cell that is not there yet waits for the gates of the pools (``gates.check_pools``); every cell (a policy on a
trace) starts with its own: engines idle, prefix caches emptied and a probe that proves it.
A block of cells is one trace under every policy, and under the first of them once more (the A/A cell); blocks and the
cells in them come in random order, so that what drifts meanwhile favours nobody. A cell that has ended is not run
again; one that was broken off is, from its first request: engines that stood idle in between saw another load.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from astrolabe_lab.calibrate.conduct import LAG_BOUND_S
from astrolabe_lab.disagg.compare import AGAIN
from astrolabe_lab.errors import InputError
from astrolabe_lab.rng import stream
from astrolabe_lab.serve.loop_lag import between_s, told_by
from astrolabe_lab.serve.routing import RouterError, router
from astrolabe_lab.sweep.identity import fingerprint, of_requests
from astrolabe_lab.text_files import json_object

if TYPE_CHECKING:
    import pandas as pd

    from astrolabe_lab.bench import Load
    from astrolabe_lab.engines.cluster_file import ClusterFile


@dataclass(frozen=True)
class Cell:
    """``policy`` on the trace called ``trace``; ``label``: its name in frames, the policy's own or that of the A/A."""

    policy: str
    trace: str
    seed: int
    label: str

    @property
    def name(self) -> str:
        """A file name."""
        clean = "".join(c if c.isalnum() or c in "._-" else "-" for c in self.label)
        return f"{self.trace}--{clean}"


def plan(policies: list[str], traces: list[str], seed: int = 0, again: bool = True) -> list[Cell]:
    """All cells in the order they are run: every trace under every policy, and ``again`` under the first of them."""
    if not policies or not traces or len(set(policies)) < len(policies) or len(set(traces)) < len(traces):
        raise InputError("policies and traces must be lists of distinct names, with one each at least")
    rng = stream(seed, "order of cells")
    blocks = []
    for trace in traces:
        block = [Cell(policy, trace, seed, policy) for policy in policies]
        if again:
            block.append(Cell(policies[0], trace, seed + 1, policies[0] + AGAIN))
        blocks.append([block[j] for j in rng.permutation(len(block))])
    return [cell for j in rng.permutation(len(blocks)) for cell in blocks[j]]


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def gates_of(cluster: str | Path, say: Callable[[str], None]) -> Callable[[], list[dict]]:
    """Gives the verdicts on the running pools of the folder ``cluster``, which it asks for when it is called first.

    Calling it raises GateError where a gate does not hold.
    """
    from astrolabe_lab import bench
    from astrolabe_lab.engines.cluster_file import read_cluster
    from astrolabe_lab.serve.pools.gates import check_pools
    from astrolabe_lab.serve.pools.launch import ROLES, of_role

    @cache
    def verdicts() -> list[dict]:
        pools = read_cluster(cluster)
        urls = ([engine["url"] for engine in of_role(pools, role)] for role in ROLES)
        told = {"say": lambda verdict: say(f"gate {verdict}"), "emulated": pools.world == "emulated"}
        found = asyncio.run(check_pools(*urls, pools.model, pools.time_scale, **told))
        bench.require(found)
        return [asdict(one) for one in found]

    return verdicts


def run_cells(
    cluster: str | Path,
    cells: list[Cell],
    traces: dict,
    out: str | Path,
    route: list[str],
    load: Callable | None = None,
    say: Callable[[str], None] = tell,
    gates: Callable[[], list[dict]] | None = None,
) -> pd.DataFrame:
    """One frame of all cells' requests, with ``cell`` and ``policy``; files in ``out``: a frame and a journal a cell.

    ``cluster``: the folder of running pools; ``traces``: frames by name; ``route``: the options that tell ``astrolabe
    route`` what to price with and more, like ``["--calibration", "C.json"]``; ``load``: how a cell's trace is sent
    (cell -> ``bench.Load``); ``gates``: of these pools, where several calls share one asking (``gates_of``). What the
    gates found is in each frame's record: ``pool_gates``, of all pools before the first cell, and ``gates``, the cell's
    own; so are ``validity``, ``time_scale`` and the engines' ``preemptions`` (None where not known). Raises InputError
    for a trace that is missing, ``out`` holding runs of other cells, traces, options, engines or load, or a router that
    ended; GateError where a gate does not hold.
    """
    import pandas as pd

    from astrolabe_lab import bench
    from astrolabe_lab.engines.cluster_file import read_cluster
    from astrolabe_lab.result import save

    if missing := sorted({cell.trace for cell in cells} - set(traces)):
        raise InputError(f"no trace is called {', '.join(missing)}; there are {', '.join(traces)}")
    pools, out = read_cluster(cluster), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    loads = {
        cell.name: load(cell) if load else bench.Load(pools.model, time_scale=pools.time_scale, seed=cell.seed)
        for cell in cells
    }
    _claim(out, _identity(pools, cells, traces, route, loads))
    gates = gates or gates_of(cluster, say)
    frames = []
    for number, cell in enumerate(cells, 1):
        path, at = out / f"{cell.name}.parquet", f"cell {number} of {len(cells)}, {cell.name}"
        if path.exists():
            frames.append(kept(path))
            say(f"{at}: kept{_why(validity_of(frames[-1]))}")
            continue
        pool_gates = gates()
        urls = [engine["url"] for engine in pools.engines]
        verdicts = asyncio.run(bench.check(urls, pools.model, bench.ISOLATION, pools.time_scale))
        bench.require(verdicts)
        journal = out / f"{cell.name}.jsonl"
        journal.unlink(missing_ok=True)  # of a run that was broken off
        words = ["--cluster", str(cluster), "--policy", cell.policy, "--seed", str(cell.seed)]
        try:
            with (
                TemporaryDirectory(prefix="astrolabe-run-") as said,
                router([*words, "--journal", str(journal), *route], said, pools.time_scale, key=False) as url,
            ):
                frame, told = _measure(url, traces[cell.trace], loads[cell.name], pools)
        except RouterError as error:
            raise InputError(f"run {cell.name}: {error}; the same again makes this run anew") from None
        frame = frame.assign(cell=cell.name, policy=cell.label)
        told |= {"pool_gates": pool_gates, "gates": [asdict(one) for one in verdicts]}
        save(frame, path, time_scale=pools.time_scale, **told)
        frames.append(frame)
        say(f"{at}: {frame['status'].value_counts().to_dict()}{_why(told['validity'])}")
    return pd.concat(frames, ignore_index=True)


def kept(path: Path) -> pd.DataFrame:
    """The frame of a run that has ended. Raises InputError for a file that is none."""
    import pandas as pd

    try:
        frame = pd.read_parquet(path)
        told = frame.attrs["astrolabe"]
        sound = len(frame) > 0 and {"time_scale", "preemptions"} <= told.keys() and "valid" in told["validity"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise InputError(f"{path} is no run that was kept here: remove it, and the run is made anew")
    return frame


def validity_of(frame: pd.DataFrame) -> dict:
    """Whether a run counts (``valid``), and ``why`` not."""
    return frame.attrs["astrolabe"]["validity"]


def _why(validity: dict) -> str:
    return "".join(f"; INVALID: {one}" for one in validity["why"])


def _measure(url: str, trace: pd.DataFrame, load: Load, pools: ClusterFile) -> tuple[pd.DataFrame, dict]:
    """(the requests' frame, ``validity`` and ``preemptions`` of the run)."""
    from astrolabe_lab.bench import run
    from astrolabe_lab.bench.engines import preemptions
    from astrolabe_lab.bench.host import HostPace

    engines = [engine["url"] for engine in pools.engines]
    late, pace = _lateness(url), HostPace([engine["pace"] for engine in pools.engines if "pace" in engine])
    before = asyncio.run(preemptions(engines))
    frame = run(url, trace, load)
    more = asyncio.run(preemptions(engines)) - before
    validity = _unbroken(_in_time(frame.attrs["validity"], late, _lateness(url)), frame, more)
    return frame, {"validity": pace.judge(validity), "preemptions": int(more) if more >= 0 else None}


def _lateness(url: str) -> list[float]:
    try:
        return told_by(url)
    except OSError:
        raise RouterError("the router does not answer any more") from None


def _unbroken(validity: dict, frame: pd.DataFrame, preempted: float) -> dict:
    """The validity of a run in which nothing was to break; ``preempted``: by how much the engines' count has grown."""
    why = list(validity["why"])
    if not preempted >= 0:
        why.append("an engine ended or began anew meanwhile, or does not tell its preemptions")
    if len(failed := frame[frame["status"] == "failed"]):
        why.append(f"{len(failed)} requests failed, the first of them: {failed['reason'].iloc[0]:.120}")
    return validity | {"valid": not why, "why": why}


def _in_time(validity: dict, before: list[float], after: list[float]) -> dict:
    """The validity of a run, with the lateness of its router's event loop meanwhile in it; ``before``, ``after``: of
    ``told_by``."""
    late_s = between_s(before, after)
    if late_s is None:
        why = "the router does not tell how late its event loop was"
    elif late_s <= LAG_BOUND_S:
        return validity | {"loop_lag_p99_s": late_s}
    else:
        why = f"the router's event loop was late: p99 {late_s:.4f} s, allowed {LAG_BOUND_S:g} s"
    return validity | {"loop_lag_p99_s": late_s, "valid": False, "why": [*validity["why"], why]}


def _identity(pools: ClusterFile, cells: list[Cell], traces: dict, route: list[str], loads: dict) -> dict[str, dict]:
    """What makes the frames of a folder comparable, part by part, by name; of all but the cells, fingerprints.

    Engines may come back at other URLs; of a file that ``route`` names counts what is in it, not where it lies.
    """
    engine = [asdict(pools.config), pools.cost and pools.cost.to_dict(), pools.time_scale, pools.model, pools.world]
    engine += [pools.handover] if pools.handover else []
    words = [Path(word).read_bytes() if Path(word).is_file() else word for word in route]
    hows = {name: {k: v for k, v in asdict(load).items() if k != "api_key"} for name, load in loads.items()}
    used = sorted({cell.trace for cell in cells})
    return {
        "cells": {cell.name: asdict(cell) for cell in cells},
        "traces": {name: fingerprint(of_requests(traces[name]), *traces[name].get("prompt", ())) for name in used},
        "options": {"": fingerprint(*words)},
        "engines": {"": fingerprint(json.dumps([engine, [each.get("role") for each in pools.engines]]))},
        "load": {name: fingerprint(json.dumps(how, sort_keys=True)) for name, how in hows.items()},
    }


def _claim(out: Path, told: dict[str, dict]) -> None:
    """Have ``out`` belong to the runs of ``told`` beside those that it holds. Raises InputError for runs that cannot
    stand beside them."""
    from astrolabe_lab.record import write_whole

    path = out / "cells.json"
    known = json_object(path, "what these runs are") if path.exists() else {}
    both = {}
    for part, mine in told.items():
        theirs = known.get(part, {})
        if not isinstance(theirs, dict) or any(theirs.get(name, value) != value for name, value in mine.items()):
            raise InputError(
                f"folder {str(out)!r} holds runs of other {part}: give those again, name another folder, or remove it"
            )
        both[part] = theirs | mine
    write_whole(path, json.dumps(both, indent=1))
