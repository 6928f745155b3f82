"""The columns of a trace frame: which values each admits, and how a row that breaks a rule is named."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from astrolabe_lab.errors import InputError

MAX_TOKENS = 10**9
MAX_SECONDS = 1e10  # Unix times in seconds fit; beyond, float64 can no longer tell microseconds apart
_COUNT = (1, MAX_TOKENS, f"an integer from 1 to {MAX_TOKENS:,}")
_NUMBERS = {
    "rid": (0, 2**53 - 1, f"an integer >= 0, at most {2**53 - 1}"),  # what float64 holds exactly
    "arrived_s": (0.0, MAX_SECONDS, f"finite seconds >= 0, at most {MAX_SECONDS:g}"),
    "prompt_tokens": _COUNT,
    "output_tokens": _COUNT,
    "predicted_tokens": _COUNT,
}
_OTHERS = {"slo": "tight or loose", "family": "text", "prompt": "text", "prefix_blocks": "integers >= 0"}
COLUMNS = (*_NUMBERS, *_OTHERS)


@dataclass
class Table:
    """Columns as they stand in a file: ``columns[name][i]`` is from ``where(i)``; ``bad``: complaints."""

    format: str
    columns: dict[str, Sequence]
    where: Callable[[int], str]
    bad: dict[int, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    attrs: dict = field(default_factory=dict)


def check_columns(table: Table, keep):
    """Typed columns, and what is wrong with which row among those kept: the first fault of each."""
    import numpy as np

    complaints = {i: text for i, text in table.bad.items() if keep[i]}
    columns = {}
    for name, values in table.columns.items():
        if name in _NUMBERS:
            low, high, allowed = _NUMBERS[name]
            floats = as_floats(values)
            with np.errstate(invalid="ignore"):
                good = np.isfinite(floats) & (floats >= low) & (floats <= high)
                if name != "arrived_s":
                    good &= floats == np.rint(floats)
            columns[name] = np.where(good, floats, 0).astype(np.float64 if name == "arrived_s" else np.int64)
        else:
            allowed = _OTHERS[name]
            convert = _blocks if name == "prefix_blocks" else _slos if name == "slo" else _texts
            columns[name], good = convert(values)
        for i in np.flatnonzero(keep & ~good):
            complaints.setdefault(int(i), f"{name} is {_shown(values[i])} (allowed: {allowed})")
    if "rid" in columns:
        first: dict[int, int] = {}
        used = keep.copy()
        used[list(complaints)] = False
        rids = columns["rid"][used]
        if len(np.unique(rids)) != len(rids):
            for i, rid in zip(np.flatnonzero(used), rids.tolist(), strict=True):
                if first.setdefault(rid, i) != i:
                    complaints[int(i)] = (
                        f"rid {rid} is used already on {table.where(first[rid])} (allowed: each once)"
                    )
    return columns, complaints


def as_floats(values):
    """float64 of numbers or of their text; what is neither (nor are truth values, dates and lists) is NaN."""
    import numpy as np

    try:
        if isinstance(values, np.ndarray) and values.dtype != object:
            numbers = values.dtype.kind in "iufUST"
            return values.astype(np.float64) if numbers else np.full(len(values), np.nan)
        if isinstance(values, np.ndarray):
            return np.array([_float(value) for value in values], dtype=np.float64)
        return np.fromiter(map(float, values), dtype=np.float64, count=len(values))
    except (ValueError, TypeError, OverflowError):
        return np.array([_float(value) for value in values], dtype=np.float64)


def _float(value) -> float:
    try:
        return float("nan") if hasattr(value, "dtype") and value.ndim or isinstance(value, bool) else float(value)
    except (ValueError, TypeError, OverflowError):
        return float("nan")


def _texts(values):
    import numpy as np

    texts = np.empty(len(values), dtype=object)
    texts[:] = values
    return texts, np.array([isinstance(text, str) for text in texts], dtype=bool)


def _slos(values):
    texts, good = _texts(values)
    return texts, good & ((texts == "tight") | (texts == "loose"))


def _blocks(values):
    import numpy as np

    blocks = np.empty(len(values), dtype=object)
    good = np.ones(len(values), dtype=bool)
    for i, row in enumerate(values):
        try:
            row = map(int, row.split()) if isinstance(row, str) else row
            blocks[i] = tuple(map(operator.index, row))
            good[i] = min(blocks[i], default=0) >= 0 and max(blocks[i], default=0) < 2**63
        except (ValueError, TypeError):
            blocks[i], good[i] = (), False
    return blocks, good


def _shown(value) -> str:
    text = repr(value.item() if hasattr(value, "item") else value)
    return text if len(text) <= 40 else text[:37] + "..."


def listed(complaints: dict[int, str], where, rows: int) -> str:
    """How many rows are bad, and the first three."""
    first = sorted(complaints)[:3]
    shown = "; ".join(f"{where(i)}: {complaints[i]}" for i in first)
    more = f"; and {len(complaints) - 3:,} more" if len(complaints) > 3 else ""
    return f"{len(complaints):,} of {rows:,} rows bad: {shown}{more}."


def ordered_frame(columns: dict):
    """A frame of these columns, the contract's first and in its order."""
    import pandas as pd

    known = {name: columns[name] for name in COLUMNS if name in columns}
    return pd.DataFrame(known | columns)


def reject_near_misses(names, source: str) -> None:
    """Raise InputError for a column that looks like a misspelt one: ignored, it would change a result."""
    for name in names:
        near = difflib.get_close_matches(str(name).lower(), COLUMNS, n=1, cutoff=0.85)
        if near and name not in COLUMNS and near[0] not in names:
            raise InputError(
                f"{source}: column {name!r} is not a trace column; did you mean {near[0]!r}? Rename it"
            )
