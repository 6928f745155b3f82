"""How this package compiles, and the arithmetic that its compiled parts share.

numba caches machine code on disk a function at a time and looks only at the file that holds the function: a change in
a function that it calls from another file would go unnoticed. So the cache's folder is named after the contents of all
files with compiled code. It lies beside them, or in the user's cache where they cannot be written, or else in a
temporary one.
"""

from __future__ import annotations

import atexit
import hashlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numba
from numba.core import event

V1, V0_CHUNKED, V0_PREFILL_FIRST = 0, 1, 2


def _cache_folder() -> str:
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    asked = (package / name for name in ("forward.py", "foresight.py", "objective.py"))
    for path in sorted([*package.glob("sim/*.py"), *package.glob("policies/*.py"), *asked]):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    name = f"kernels-{digest.hexdigest()[:16]}"
    if numba.config.CACHE_DIR:
        return str(Path(numba.config.CACHE_DIR) / name)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for parent in (Path(__file__).parent / "__pycache__", Path(home) / "astrolabe_lab"):
        try:
            (parent / name).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(parent / name, os.W_OK):
            return str(parent / name)
    folder = tempfile.mkdtemp(prefix="astrolabe_lab-")  # nobody else's: machine code is read from it
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


_FOLDER = _cache_folder()


class _Notice(event.Listener):
    """Says once, when something of this package is compiled because the cache lacks it, that this takes a while."""

    said = multiprocessing.parent_process() is not None  # workers leave that to who started them

    def on_start(self, started):
        if not self.said and started.data["dispatcher"].py_func.__module__.startswith("astrolabe_lab."):
            self.said = True
            print("astrolabe: compiling (first use, about a minute; it is kept on disk)", file=sys.stderr, flush=True)

    def on_end(self, ended):
        pass


event.register("numba:compile", _Notice())


def compiled(function):
    """``function`` compiled by numba without Python objects, cached on disk."""
    others = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = _FOLDER  # read by njit when it sets up the function's cache, and only then
    try:
        return numba.njit(cache=True, error_model="numpy", nogil=True)(function)
    finally:
        numba.config.CACHE_DIR = others


@compiled
def blocks_of(tokens, block_size):
    return (tokens + block_size - 1) // block_size


@compiled
def step_seconds(e, grids, regime, new_tokens, sequences, context_tokens, attention):
    """Step time of engine e in s; the order of the additions is part of the contract (oracles reproduce it bit for
    bit). ``StepCost.step_seconds`` is the same in Python."""
    if regime == 0 and e.padded >= 0:
        new_tokens = sequences = int(grids[e.padded + sequences])
    cost = e.cost
    seconds = (
        cost[regime, 0]
        + cost[regime, 1]
        + cost[regime, 2] * new_tokens
        + cost[regime, 3] * sequences
        + cost[regime, 4] * context_tokens
        + cost[regime, 5] * attention
    )
    if e.grid[regime] >= 0:
        seconds += grid_seconds(grids, e.grid[regime], new_tokens, context_tokens)
    return seconds


@compiled
def grid_seconds(grids, at, new_tokens, context_tokens):
    """The grid at ``grids[at:]`` (``cost.Grid.array``) between its points: bilinear, and constant beyond its edges."""
    n, m = int(grids[at]), int(grids[at + 1])
    x = at + 2
    y = x + n
    i, right = bracket(grids, x, n, new_tokens)
    j, up = bracket(grids, y, m, context_tokens)
    low = y + m + i * m + j
    high = low + m if n > 1 else low
    above = 1 if m > 1 else 0
    before = grids[low] + right * (grids[high] - grids[low])
    after = grids[low + above] + right * (grids[high + above] - grids[low + above])
    return before + up * (after - before)


@compiled
def bracket(grids, at, n, value):
    """(i, share): ``value`` lies between the i-th and the next of n rising numbers at ``grids[at:]``, ``share`` of the
    way; at an end where it lies outside."""
    if n == 1 or value <= grids[at]:
        return 0, 0.0
    if value >= grids[at + n - 1]:
        return n - 2, 1.0
    low, high = 0, n - 1
    while high - low > 1:
        middle = (low + high) // 2
        if grids[at + middle] <= value:
            low = middle
        else:
            high = middle
    return low, (value - grids[at + low]) / (grids[at + low + 1] - grids[at + low])
