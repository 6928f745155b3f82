"""The load generator: a trace's requests against a router or an engine, sent on schedule, one row each.

Open loop: every request leaves at its time, whatever has come back. Closed loop: ``concurrency`` requests at a time.
Latencies count from the scheduled time (``ttft_s``, ``e2e_s``) and from the sending (``..._from_send_s``); how late the
generator itself was is in every row, and a run in which that mattered says that it is invalid.

    verdicts = await bench.check(engines, model)          # gates: idle, warm, exact, equal, nothing cached
    frame = await bench.drive(url, trace, bench.Load(model))
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.bench.frame import LATENESS_SHARE, both_goodputs, validity
from astrolabe_lab.bench.gates import GATES, ISOLATION, GateError, Verdict, check, require
from astrolabe_lab.bench.load import Load, Served, ask_served
from astrolabe_lab.bench.sending import drive

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "GATES", "ISOLATION", "LATENESS_SHARE", "GateError", "Load", "Served", "Verdict", "ask_served", "both_goodputs",
    "check", "drive", "require", "run", "validity",
]  # fmt: skip


def run(
    url: str,
    trace: pd.DataFrame,
    load: Load,
    progress: Callable[[int, int], None] | None = None,
    keep: str | Path | None = None,
) -> pd.DataFrame:
    """``drive`` from synchronous code."""
    return asyncio.run(drive(url, trace, load, progress, keep))
