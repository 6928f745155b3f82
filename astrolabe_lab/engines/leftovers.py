"""Engines of earlier clusters that still run although nothing holds them."""

from __future__ import annotations

import os

from .guard import CLUSTER, GUARD


def leftovers() -> list[dict]:
    """Processes of this user's earlier clusters whose guard is gone: ``pid``, ``cluster`` (folder), ``memory_mib``."""
    import psutil

    found = []
    for process in psutil.process_iter(["pid", "uids"]):
        try:
            if process.info["uids"].real != os.getuid():
                continue
            environment = process.environ()
            guard = environment.get(GUARD, "")
            if CLUSTER not in environment or not guard.isdigit() or _guards(int(guard)):
                continue
            memory = process.memory_info().rss >> 20
            found.append({"pid": process.info["pid"], "cluster": environment[CLUSTER], "memory_mib": memory})
        except (psutil.Error, AttributeError):
            continue
    return found


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
