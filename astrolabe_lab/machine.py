"""What this machine has: memory, cores, GPUs. Facts only; what they suffice for is said elsewhere."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

CONTROL_GROUP = Path("/sys/fs/cgroup")
FIELDS = ("index", "name", "memory.total", "memory.free", "driver_version")


def memory() -> dict:
    """``memory_gib`` and ``memory_available_gib``, within the control group's limit if there is one; or None."""
    try:
        total, available = memory_bytes()
    except ImportError:
        return {"memory_gib": None, "memory_available_gib": None}
    return {"memory_gib": gib(total), "memory_available_gib": gib(available)}


def memory_bytes() -> tuple[int, int]:
    """(total, available). Raises ImportError without psutil."""
    import psutil

    found = psutil.virtual_memory()
    total, available = found.total, found.available
    try:
        limit, used = (int((CONTROL_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):
        return total, available
    return min(total, limit), min(available, max(limit - used, 0))


def cores() -> list[int]:
    """The ids of the logical cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def gpus() -> list[dict]:
    """Every GPU that nvidia-smi lists: ``index, name, memory_mib, memory_free_mib, driver``; empty without it."""
    query = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [
        {
            "index": int(index) if index.isdigit() else place,
            "name": name,
            "memory_mib": int(total) if total.isdigit() else None,
            "memory_free_mib": int(free) if free.isdigit() else None,
            "driver": driver,
        }
        for place, (index, name, total, free, driver) in enumerate(row for row in rows if len(row) == len(FIELDS))
        if done.returncode == 0
    ]


def gib(size: float) -> float:
    return round(size / 2**30, 1)
