"""A trace is a frame of requests: load it from a file, save it, and check that it keeps the contract.

Columns: ``rid`` (int64, unique), ``arrived_s`` (float64, seconds, non-decreasing), ``prompt_tokens``,
``output_tokens`` (int64, >= 1) and optionally ``predicted_tokens`` (int64, >= 1), ``slo`` (``tight`` or
``loose``), ``family``, ``prompt``, ``client`` (text), ``reason_ratio`` (float64, the share of the answer that
is reasoning) and ``prefix_blocks`` (a tuple of integers a row: prompts that begin with the same ids begin with
the same tokens). An id stands for ``prefix_block_tokens`` tokens, the last one of a prompt perhaps for fewer;
that is a column too, the same number in every row, because pandas loses ``attrs`` on the way (``concat``,
``merge``, CSV).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.trace.columns import (
    COLUMNS,
    Table,
    check_columns,
    listed,
    ordered_frame,
    reject_near_misses,
)
from astrolabe_lab.trace.filters import CHOICES, FILTERS, choose
from astrolabe_lab.trace.formats import FORMATS, read
from astrolabe_lab.trace.sampling import sample
from astrolabe_lab.trace.summary import describe, rate_windows

if TYPE_CHECKING:
    import pandas as pd


def load(
    path,
    format: str | None = None,
    on_bad: str = "error",
    *,
    unsorted: str = "error",
    tokenizer=None,
    **filters,
) -> pd.DataFrame:
    """Return the requests of a trace file as a trace frame, without ``arrived_s`` if the file has no times.

    path: a file of one of the ``FORMATS``, gzipped or not.
    format: one of ``csv, parquet, azure, burstgpt, vidur, mooncake, bailian, sharegpt, lmsys``; by default the
        content tells.
    on_bad: ``error`` refuses a file with bad rows and shows the first; ``drop`` leaves them out, counted.
    unsorted: ``error`` refuses arrival times that go back; ``sort`` orders rows by time (stable; a rid stays
        with its row). An order is not the fault of one row, so this is apart from ``on_bad``.
    tokenizer: for ShareGPT and LMSYS texts, see ``tokens.counter``; the default is our own approximation.
    filters: ``min_prompt_tokens, min_output_tokens, max_prompt_tokens, max_total_tokens``, each inclusive,
        None for no limit. ShareGPT and LMSYS have the limits of vLLM's benchmark (4, 4, 1024, 2048) unless
        set; other formats have none. ``model, log_type`` (BurstGPT), ``model, language`` (LMSYS) and ``type``
        (Bailian) keep the rows of exactly this text.

    A file without ``rid`` gets 0..n-1, counted after filters and dropped rows. Azure times start at 0; others
    stand as in the file, also where many requests share one (Mooncake's come in batches of three seconds).
    A request that BurstGPT logged as failed (0 response tokens) cannot be replayed: it is left out, counted as
    ``failed`` among ``filtered``. ``family`` is BurstGPT's model and log type, LMSYS's model, Bailian's type.
    ``attrs`` of the frame say what was done: ``source, format, rows_read, bad_rows, out_of_order_rows,
    filtered, ignored_columns`` and ``token_counter``. Raises InputError, naming file and line.
    """
    import numpy as np

    for name, value, allowed in (
        ("on_bad", on_bad, ("error", "drop")),
        ("unsorted", unsorted, ("error", "sort")),
    ):
        if value not in allowed:
            raise InputError(f"{name}={value!r} is unknown: allowed are {' and '.join(allowed)}")
    path = Path(path)
    table = read(path, format, tokenizer)
    rows_read = len(table.columns["prompt_tokens"]) + sum(table.attrs.get("filtered", {}).values())
    keep, filtered = choose(table, filters)
    columns, complaints = check_columns(table, keep)
    bad = sorted(complaints)
    if bad and on_bad == "error":
        raise InputError(
            f"{path}: {listed(complaints, table.where, len(keep))} Correct them, or leave them out with "
            "on_bad='drop' (--on-bad drop)."
        )
    keep[bad] = False
    if not keep.any():
        removed = {name: count for name, count in filtered.items() if count} | {"bad": len(bad)}
        counts = ", ".join(f"{count:,} by {name}" for name, count in removed.items() if count) or "none"
        raise InputError(
            f"{path}: no request is left of {rows_read:,} rows (left out: {counts}); relax the filters or "
            f"use another file"
        )
    rows = np.flatnonzero(keep)
    columns = {name: values[rows] for name, values in columns.items()}
    columns.setdefault("rid", np.arange(len(rows), dtype=np.int64))
    moved = 0
    if "arrived_s" in columns:
        back = np.flatnonzero(np.diff(columns["arrived_s"]) < 0)
        if len(back) and unsorted == "error":
            raise InputError(
                f"{path}: {_goes_back(columns['arrived_s'], back, lambda i: table.where(rows[i]))}, or load "
                "with unsorted='sort' (--unsorted sort)."
            )
        moved = len(back)
        order = np.argsort(columns["arrived_s"], kind="stable")
        columns = {name: values[order] for name, values in columns.items()}
    frame = ordered_frame(columns)
    frame.attrs = {
        "source": path.name,
        "format": table.format,
        "rows_read": rows_read,
        "bad_rows": len(bad),
        "out_of_order_rows": moved,
        "filtered": filtered,
        "ignored_columns": list(table.ignored),
    } | {name: value for name, value in table.attrs.items() if name == "token_counter"}
    if "prefix_block_tokens" in frame:
        frame.attrs["prefix_block_tokens"] = prefix_block_tokens(frame)
    return frame


def save(frame: pd.DataFrame, path) -> Path:
    """Write a trace frame to ``.csv``, ``.parquet`` or either with ``.gz``, by the suffix; return the path.

    The file appears whole or not at all, the same frame gives the same bytes, and ``load`` gives the frame
    back exactly. A frame without ``arrived_s`` is allowed. Raises InputError for another suffix or a frame
    that breaks the contract.
    """
    path = Path(path)
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind not in ("csv", "parquet"):
        raise InputError(f"{path}: a trace is saved as .csv, .csv.gz, .parquet or .parquet.gz; change the suffix")
    if not path.parent.is_dir():
        raise InputError(f"{path}: the folder {path.parent} does not exist; create it first")
    frame = check(frame, times="arrived_s" in frame)
    if "prefix_blocks" in frame and "prefix_block_tokens" not in frame and frame.attrs.get("prefix_block_tokens"):
        frame = frame.assign(prefix_block_tokens=frame.attrs["prefix_block_tokens"])  # attrs fit no CSV
        frame = check(frame, times="arrived_s" in frame)
    frame = frame[[name for name in COLUMNS if name in frame]]
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        content = _csv_bytes(frame) if kind == "csv" else _parquet_bytes(frame)
        if path.name.endswith(".gz"):
            content = gzip.compress(content, mtime=0)
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno) if error.errno else str(error), str(path)) from error
    finally:
        partial.unlink(missing_ok=True)
    return path


def check(frame: pd.DataFrame, times: bool = True) -> pd.DataFrame:
    """Return a copy with the contract's types and column order, rows numbered from 0.

    Columns outside the contract are kept, after it. ``times=False`` also admits a frame without
    ``arrived_s``. Raises InputError for a missing column, a value that is not allowed, a rid used twice, or
    times that go back.
    """
    import numpy as np
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        raise InputError(f"a trace is a pandas DataFrame, not {type(frame).__name__}; load a file with trace.load")
    if not frame.columns.is_unique:
        raise InputError("trace: a column name occurs twice; name each column once")
    reject_near_misses(list(frame.columns), "trace")
    needed = ["rid", "prompt_tokens", "output_tokens"] + ["arrived_s"] * times
    missing = [name for name in needed if name not in frame]
    if missing:
        hint = "arrivals.with_arrivals(trace, qps) adds times" if missing == ["arrived_s"] else "add it"
        raise InputError(
            f"trace: column {', '.join(missing)} is missing (it has {', '.join(map(str, frame.columns))}); {hint}"
        )
    if not len(frame):
        raise InputError("trace: it has no rows; give at least one request")
    table = Table("frame", {name: frame[name].to_numpy() for name in COLUMNS if name in frame}, lambda i: f"row {i}")
    columns, complaints = check_columns(table, np.ones(len(frame), dtype=bool))
    if complaints:
        raise InputError(f"trace: {listed(complaints, table.where, len(frame))} Correct them.")
    if "arrived_s" in columns:
        back = np.flatnonzero(np.diff(columns["arrived_s"]) < 0)
        if len(back):
            raise InputError(f"trace: {_goes_back(columns['arrived_s'], back, table.where)}.")
    checked = ordered_frame(columns | {name: frame[name].to_numpy() for name in frame if name not in COLUMNS})
    checked.attrs = dict(frame.attrs)
    return checked


def prefix_block_tokens(frame: pd.DataFrame) -> int | None:
    """Return how many tokens an id of ``prefix_blocks`` stands for; None where the trace does not say.

    The column ``prefix_block_tokens`` tells, else ``attrs["prefix_block_tokens"]``. Raises InputError where the
    column holds more than one number.
    """
    if "prefix_block_tokens" not in frame or not len(frame):
        return frame.attrs.get("prefix_block_tokens")
    sizes = frame["prefix_block_tokens"].unique()
    if len(sizes) != 1:
        shown = ", ".join(map(str, sizes[:4]))
        raise InputError(f"trace: prefix_block_tokens holds {shown}; its ids must all stand for as many tokens")
    return int(sizes[0])


def _goes_back(times, back, where) -> str:
    i = back[0]
    return (
        f"arrival times go back {len(back):,} times, first at {where(i + 1)} "
        f"({times[i + 1]:g} s after {times[i]:g} s); sort the rows by arrived_s"
    )


def _csv_bytes(frame) -> bytes:
    columns = {name: frame[name].tolist() for name in frame}
    if "prefix_blocks" in columns:
        columns["prefix_blocks"] = [" ".join(map(str, blocks)) for blocks in columns["prefix_blocks"]]
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return out.getvalue().encode()


def _parquet_bytes(frame) -> bytes:
    out = io.BytesIO()
    frame = frame.copy(deep=False)
    frame.attrs = {name: value for name, value in frame.attrs.items() if _is_json(value)}
    frame.to_parquet(out, index=False)
    return out.getvalue()


def _is_json(value) -> bool:
    try:
        return bool(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        return False


__all__ = [
    "CHOICES",
    "COLUMNS",
    "FILTERS",
    "FORMATS",
    "check",
    "describe",
    "load",
    "prefix_block_tokens",
    "rate_windows",
    "sample",
    "save",
]
