"""How this folder compiles: as ``sim.compiled`` does, into a cache folder of its own inside that one's.

numba notices no change in a function that is called from another file, so the folder is named after the contents of
all files here, inside one that is named after those of the engine.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numba

from astrolabe_lab.sim import compiled as engine


def _folder() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        text = path.read_bytes()
        if b"disagg.compiled" in text:
            digest.update(path.name.encode() + text)
    return str(Path(engine._FOLDER) / f"disagg-{digest.hexdigest()[:16]}")


_FOLDER = _folder()


def compiled(function):
    """``function`` compiled by numba without Python objects, cached on disk."""
    others = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = _FOLDER
    try:
        return numba.njit(cache=True, error_model="numpy", nogil=True)(function)
    finally:
        numba.config.CACHE_DIR = others
