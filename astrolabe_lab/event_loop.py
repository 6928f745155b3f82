"""The event loop of a process that others wait for: as little of its own as can be had."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager

try:
    import uvloop
except ImportError:  # not on Windows
    uvloop = None

NAME = "asyncio" if uvloop is None else "uvloop"


_watched = 0  # few_pauses under way


@contextmanager
def few_pauses() -> Iterator[None]:
    """What has been imported and compiled so far is kept out of garbage collections: to go through it again and again
    holds up whatever is under way, in a notebook's process for up to a second."""
    global _watched
    if not _watched:
        gc.collect()
        gc.freeze()
    _watched += 1
    try:
        yield
    finally:
        _watched -= 1
        if not _watched:
            gc.unfreeze()


def run(main: Coroutine) -> None:
    """``asyncio.run(main)`` with few pauses, on uvloop where it is installed."""
    with few_pauses():
        (asyncio if uvloop is None else uvloop).run(main)
