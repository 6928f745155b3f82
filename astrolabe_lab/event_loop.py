"""The event loop of a process that others wait for: as little of its own as can be had."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine

try:
    import uvloop
except ImportError:  # not on Windows
    uvloop = None

NAME = "asyncio" if uvloop is None else "uvloop"


def run(main: Coroutine) -> None:
    """``asyncio.run(main)`` on uvloop where it is installed.

    What has been imported and compiled so far is kept out of garbage collections: to go through it again and again
    holds up whatever is under way, each time for up to a tenth of a second.
    """
    gc.collect()
    gc.freeze()
    (asyncio if uvloop is None else uvloop).run(main)
