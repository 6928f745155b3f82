"""Runs on live pools that can be compared: isolated, interleaved at random, beside A/A, and resumable.

The first cell that is not there yet waits for the gates of the pools (``gates.check_pools``); every cell (a policy on a
trace) starts with its own: engines idle, prefix caches emptied and a probe that proves it.
A block of cells is one trace under every policy, and under the first of them once more (the A/A cell); blocks and the
cells in them come in random order, so that what drifts meanwhile favours nobody. A cell that has ended is not run
again; one that was broken off goes on with the requests it still lacks.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.calibrate.conduct import LAG_BOUND_S
from astrolabe_lab.disagg.compare import AGAIN
from astrolabe_lab.errors import InputError
from astrolabe_lab.rng import stream
from astrolabe_lab.serve.loop_lag import between_s, told_by
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
            block.append(Cell(policies[0], trace, seed + 1, f"{policies[0]} ({AGAIN})"))
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
    constants: list[str],
    load: Callable | None = None,
    say: Callable[[str], None] = tell,
    gates: Callable[[], list[dict]] | None = None,
):
    """One frame of all cells' requests, with ``cell`` and ``policy``; files in ``out``: a frame and a journal a cell.

    ``cluster``: the folder of running pools; ``traces``: frames by name; ``constants``: the options that tell
    ``astrolabe route`` what to price with, like ``["--calibration", "C.json"]``; ``load``: how a cell's trace is sent
    (cell -> ``bench.Load``); ``gates``: of these pools, where several calls share one asking (``gates_of``). What the
    gates found is in each frame's record: ``pool_gates``, of all pools before the first cell, and ``gates``, the cell's
    own; so are ``validity`` and the engines' ``preemptions`` (None where not known). Raises InputError for a trace that
    is missing, or ``out`` holding runs of other cells, traces, constants, engines or load; GateError where a gate does
    not hold.
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
    port = _claim(out, _identity(pools, cells, traces, constants, loads))
    engines = [engine["url"] for engine in pools.engines]
    gates = gates or gates_of(cluster, say)
    frames = []
    for number, cell in enumerate(cells, 1):
        path = out / f"{cell.name}.parquet"
        if path.exists():
            frames.append(pd.read_parquet(path))
            say(f"cell {number} of {len(cells)}, {cell.name}: kept{_why(frames[-1].attrs['astrolabe']['validity'])}")
            continue
        pool_gates = gates()
        verdicts = asyncio.run(bench.check(engines, pools.model, bench.ISOLATION, pools.time_scale))
        bench.require(verdicts)
        with _routed(cluster, cell, port, out / f"{cell.name}.jsonl", constants) as url:
            keep = out / f"{cell.name}.rows.jsonl"
            frame, told = _measure(url, traces[cell.trace], loads[cell.name], keep, pools)
        frame = frame.assign(cell=cell.name, policy=cell.label)
        save(frame, path, pool_gates=pool_gates, gates=[asdict(one) for one in verdicts], **told)
        keep.unlink(missing_ok=True)
        counts = frame["status"].value_counts().to_dict()
        say(f"cell {number} of {len(cells)}, {cell.name}: {counts}{_why(told['validity'])}")
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def _why(validity: dict) -> str:
    return "".join(f"; INVALID: {one}" for one in validity["why"])


def _measure(url: str, trace: pd.DataFrame, load: Load, keep: Path, pools: ClusterFile) -> tuple[pd.DataFrame, dict]:
    """(the requests' frame, ``validity`` and ``preemptions`` of the run)."""
    from astrolabe_lab.bench import run
    from astrolabe_lab.bench.engines import preemptions
    from astrolabe_lab.bench.host import HostPace

    engines = [engine["url"] for engine in pools.engines]
    late, pace = told_by(url), HostPace([engine["pace"] for engine in pools.engines if "pace" in engine])
    before = asyncio.run(preemptions(engines))
    frame = run(url, trace, load, keep=keep)
    more = asyncio.run(preemptions(engines)) - before
    validity = pace.judge(_in_time(frame.attrs["validity"], late, told_by(url)))
    # Of a run in parts the engines' counts of the first are lost, and those of an engine that began anew.
    known = frame["segment"].max() == 0 and more >= 0
    return frame, {"validity": validity, "preemptions": int(more) if known else None}


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


def _identity(pools: ClusterFile, cells: list[Cell], traces: dict, constants: list[str], loads: dict) -> dict:
    """What makes the frames of a folder comparable, each part by itself; of all but the cells, fingerprints.

    Engines may come back at other URLs; what is in a file that ``constants`` names counts, not only its name.
    """
    engine = [asdict(pools.config), pools.cost and pools.cost.to_dict(), pools.time_scale, pools.model, pools.world]
    engine += [pools.handover] if pools.handover else []
    files = [Path(word).read_bytes() for word in constants if Path(word).is_file()]
    hows = {name: {k: v for k, v in asdict(load).items() if k != "api_key"} for name, load in loads.items()}
    used = sorted({cell.trace for cell in cells})
    return {
        "cells": [asdict(cell) for cell in cells],
        "traces": {name: fingerprint(of_requests(traces[name]), *traces[name].get("prompt", ())) for name in used},
        "constants": fingerprint(*constants, *files),
        "engines": fingerprint(json.dumps([engine, [each.get("role") for each in pools.engines]])),
        "load": fingerprint(json.dumps(hows, sort_keys=True)),
    }


def _claim(out: Path, told: dict) -> int:
    """The port that the cells' routers listen on, the same after a break; ``out`` belongs to the runs of ``told``."""
    from astrolabe_lab.engines.engine_process import free_port
    from astrolabe_lab.record import write_whole

    path = out / "cells.json"
    if path.exists():
        known = json_object(path, "what these runs are")
        if other := [name for name, value in told.items() if known.get(name) != value]:
            raise InputError(
                f"folder {str(out)!r} holds runs of other {', '.join(other)}: give those again, name another folder, "
                "or remove it"
            )
        return known["port"]
    port = free_port()
    write_whole(path, json.dumps({"port": port, **told}, indent=1))
    return port


class _routed:
    """The URL of a router process over the cluster, for as long as the context lasts."""

    def __init__(self, cluster, cell: Cell, port: int, journal: Path, constants: list[str]):
        self._command = [
            sys.executable, "-m", "astrolabe_lab.cli", "route", "--cluster", str(cluster), "--policy", cell.policy,
            "--seed", str(cell.seed), "--port", str(port), "--journal", str(journal), *constants,
        ]  # fmt: skip

    def __enter__(self) -> str:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True, env=environment)
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise InputError(f"the router ended with code {self._process.returncode}: see above")
        return json.loads(line)["url"]

    def __exit__(self, *_) -> None:
        self._process.terminate()
        try:
            self._process.wait(40)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
