"""Statuses as a journal keeps them.

A published status is kept whole, by columns, those that are all 0 left out: a quarter of the size of its JSON. One that
was reckoned follows from the decisions and outcomes before it, which the journal has; kept is what does not.
"""

from __future__ import annotations

from dataclasses import astuple

import numpy as np

from astrolabe_lab.errors import InputError
from astrolabe_lab.serve.ledger import Ledger
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.sim.status import HEADER, ROW, Status

from .reckoned import reckon, streamed
from .scrape import Gauges


def pack(status: Status, gauges: Gauges | None = None) -> dict:
    """The status in JSON's types. ``gauges``: those it was reckoned with; None for a published one."""
    if gauges is not None:
        known = np.isfinite(gauges.taken_s)
        return {"streamed": streamed(status), "gauges": list(astuple(gauges)) if known else None}
    header = status.header[0]
    started = float(header["step_started_s"])
    columns = {name: status.rows[name] for name in ROW.names}
    return {
        "taken_s": float(header["taken_s"]),
        "step_started_s": None if np.isnan(started) else started,
        "free_blocks": int(header["free_blocks"]),
        "stalled": int(header["stalled"]),
        "n_running": int(header["n_running"]),
        "n_rows": len(status.rows),
        "rows": {name: column.tolist() for name, column in columns.items() if column.any()},
    }


def unpack(packed) -> Status:
    """The published status that ``pack`` made this of. Raises InputError where it is none; whether it can be one of a
    certain engine is checked where it is used."""
    try:
        header = np.zeros(1, HEADER)
        started = packed["step_started_s"]
        header["taken_s"], header["step_started_s"] = packed["taken_s"], np.nan if started is None else started
        for name in ("free_blocks", "stalled", "n_running", "n_rows"):
            header[name] = packed[name]
        rows = np.zeros(packed["n_rows"], ROW)
        for name, column in packed["rows"].items():
            rows[name] = column
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise InputError(f"status: not one that a journal holds ({error!r})") from None
    return Status(header, rows)


def reckon_again(packed, ledger: Ledger, engine: EngineConfig, now_s: float) -> Status:
    """The status that was reckoned, given the ledger as the journal's decisions and outcomes up to there leave it."""
    try:
        gauges = Gauges(*packed["gauges"]) if packed["gauges"] is not None else Gauges()
        for entry in ledger.entries.values():
            if entry.streamed:
                ledger.progress(entry, 0, now_s)
        for rid, tokens in packed["streamed"]:
            if (entry := ledger.entries.get(rid)) is not None:
                ledger.progress(entry, int(tokens), now_s)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"status: not one that a journal holds ({error!r})") from None
    return reckon(ledger, gauges, engine, now_s)
