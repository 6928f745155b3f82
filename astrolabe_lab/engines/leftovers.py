"""Engines of earlier clusters that still run, held by another process or by none any more."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from .guard import CLUSTER, GUARD


def leftovers() -> list[dict]:
    """Processes of this user's earlier clusters whose guard is gone: ``pid``, ``cluster`` (folder), ``memory_mib``."""
    import psutil

    found = []
    for process, environment in _of_clusters():
        guard = environment.get(GUARD, "")
        if not guard.isdigit() or _guards(int(guard)):
            continue
        with contextlib.suppress(psutil.Error):
            memory = process.memory_info().rss >> 20
            found.append({"pid": process.pid, "cluster": environment[CLUSTER], "memory_mib": memory})
    return found


def processes_of(folder: str | Path) -> list[int]:
    """The processes of this user that belong to the cluster in ``folder`` (an absolute path), guards included."""
    return [process.pid for process, environment in _of_clusters() if environment[CLUSTER] == str(folder)]


def _of_clusters() -> Iterator[tuple]:
    """(process, its environment) of this user's clusters."""
    import psutil

    for process in psutil.process_iter(["uids"]):
        try:
            own = process.info["uids"].real == os.getuid()
            environment = process.environ() if own else {}
        except (psutil.Error, AttributeError):
            continue
        if CLUSTER in environment:
            yield process, environment


def describe(found: list[dict]) -> list[str]:
    """One line a cluster: what is left of it, and the command that ends that."""
    clusters: dict[str, list[dict]] = {}
    for one in found:
        clusters.setdefault(one["cluster"], []).append(one)
    lines = []
    for folder, processes in clusters.items():
        pids = " ".join(str(one["pid"]) for one in processes)
        memory = sum(one["memory_mib"] for one in processes) / 1024
        lines.append(f"left over from {folder}: {len(processes)} processes, {memory:.1f} GiB; end them: kill -9 {pids}")
    return lines


def _guards(pid: int) -> bool:
    import psutil

    try:
        return "astrolabe_lab.engines.guard" in " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False
