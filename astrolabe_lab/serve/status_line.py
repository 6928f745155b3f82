"""A status as a journal keeps it: by columns, those that are all 0 left out. A quarter of the size of its JSON."""

from __future__ import annotations

import numpy as np

from astrolabe_lab.errors import InputError
from astrolabe_lab.sim.status import HEADER, ROW, Status


def pack(status: Status) -> dict:
    """The status in JSON's types; ``unpack`` gives it back exactly."""
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
    """The status that ``pack`` made this of. Raises InputError where it is none; whether it can be one of a certain
    engine is checked where it is used."""
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
