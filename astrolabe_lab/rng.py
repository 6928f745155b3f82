"""Named random streams: every source of chance draws from its own, so that none disturbs another."""

from __future__ import annotations

import operator
import zlib
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError

if TYPE_CHECKING:
    import numpy as np


def stream(seed: int, name: str) -> np.random.Generator:
    """Return the generator of the stream ``name`` under ``seed``.

    The same pair gives the same draws in every process and on every platform; other names and other seeds are
    independent of it. In use: ``arrivals``, ``lengths``, ``noise``, ``policy``, ``trace`` (resampling), and
    those of each generator.

    Raises InputError when ``seed`` is not an integer from 0 to 2**63 - 1 (what a column holds) or ``name`` is empty.
    """
    import numpy as np

    try:
        checked = operator.index(seed)
    except TypeError:
        checked = -1
    if not 0 <= checked < 2**63 or isinstance(seed, bool):
        raise InputError(f"seed={seed!r} is not usable: a seed is an integer >= 0, below 2**63, for example seed=0")
    if not isinstance(name, str) or not name:
        raise InputError(f"stream name {name!r} is not usable: give a non-empty string, for example 'arrivals'")
    # crc32, not hash(): Python salts string hashes per process.
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([checked, zlib.crc32(name.encode())])))
