"""The columns of a trace frame: which values each admits, and how a row that breaks a rule is named."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from astrolabe_lab.errors import InputError

COLUMNS = (
    *("rid", "arrived_s", "prompt_tokens", "output_tokens", "predicted_tokens", "slo", "family", "prompt"),
    *("prefix_blocks", "prefix_block_tokens", "client", "reason_ratio"),
)
MAX_TOKENS = 10**9
MAX_SECONDS = 1e10  # Unix times in seconds fit; beyond, float64 can no longer tell microseconds apart
MAX_REQUESTS = 10**8  # drawn at once; some gigabytes
_COUNT = (1, MAX_TOKENS, f"an integer from 1 to {MAX_TOKENS:,}")
_NUMBERS = {
    "rid": (0, 2**53 - 1, f"an integer >= 0, at most {2**53 - 1}"),  # what float64 holds exactly
    "arrived_s": (0.0, MAX_SECONDS, f"finite seconds >= 0, at most {MAX_SECONDS:g}"),
    "prompt_tokens": _COUNT,
    "output_tokens": _COUNT,
    "predicted_tokens": _COUNT,
    "prefix_block_tokens": _COUNT,
    "reason_ratio": (0.0, 1.0, "a number from 0 to 1"),
}
_REAL = ("arrived_s", "reason_ratio")
_OTHERS = {"slo": "tight or loose", "prefix_blocks": "integers >= 0"}


@dataclass
class Table:
    """Columns as they stand in a file: ``columns[name][i]`` is from ``where(i)``; ``bad``: complaints.

    ``choices`` hold what rows may be chosen by and no column of ours takes; ``left_out`` masks, by reason, the
    rows that are no fault of the file and yet no requests.
    """

    format: str
    columns: dict[str, Sequence]
    where: Callable[[int], str]
    bad: dict[int, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    choices: dict[str, Sequence[str]] = field(default_factory=dict)
    left_out: dict[str, Sequence[bool]] = field(default_factory=dict)
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
                if name not in _REAL:
                    good &= floats == np.rint(floats)
            columns[name] = np.where(good, floats, 0).astype(np.float64 if name in _REAL else np.int64)
        else:
            allowed = _OTHERS.get(name, "text")
            convert = _blocks if name == "prefix_blocks" else _slos if name == "slo" else _texts
            columns[name], good = convert(values)
        for i in np.flatnonzero(keep & ~good):
            complaints.setdefault(int(i), f"{name} is {_shown(values[i])} (allowed: {allowed})")
    if "prefix_blocks" in columns:
        _check_blocks(columns, keep, complaints)
    if "rid" in columns:
        first: dict[int, int] = {}
        used = keep.copy()
        used[list(complaints)] = False
        rids = columns["rid"][used]
        if len(np.unique(rids)) != len(rids):
            for i, rid in zip(np.flatnonzero(used), rids.tolist(), strict=True):
                if first.setdefault(rid, i) != i:
                    complaints[int(i)] = f"rid {rid} is used already on {table.where(first[rid])} (allowed: each once)"
    return columns, complaints


def _check_blocks(columns, keep, complaints) -> None:
    """How many tokens an id stands for is one number for the whole trace, and no prompt has more ids than fit it."""
    import numpy as np

    if "prefix_block_tokens" not in columns:
        return
    size = columns["prefix_block_tokens"]
    one = size[keep][0] if keep.any() else 1
    for i in np.flatnonzero(keep & (size != one)):
        complaints.setdefault(int(i), f"prefix_block_tokens is {size[i]} (allowed: {one}, as in the first row)")
    ids = np.fromiter(map(len, columns["prefix_blocks"]), dtype=np.int64, count=len(size))
    most = -(-columns["prompt_tokens"] // np.maximum(size, 1))
    for i in np.flatnonzero(keep & (ids > most)):
        complaints.setdefault(
            int(i),
            f"prefix_blocks has {ids[i]} ids of {size[i]} tokens (allowed: {most[i]} at most for "
            f"{columns['prompt_tokens'][i]} prompt_tokens)",
        )


def as_floats(values):
    """float64 of numbers or of their text; what is neither (nor are truth values, dates and lists) is NaN.

    A number's text is what a program writes: ASCII digits, point, sign, exponent. Python's own underscores
    (``1_000``) and other scripts' digits are none.
    """
    import numpy as np

    if isinstance(values, np.ndarray) and values.dtype.kind not in "OUST":
        numbers = values.dtype.kind in "iuf"
        return values.astype(np.float64) if numbers else np.full(len(values), np.nan)
    try:
        text = "".join(values)
        if text.isascii() and "_" not in text:
            return np.fromiter(map(float, values), dtype=np.float64, count=len(values))
    except (ValueError, TypeError, OverflowError):
        pass
    return np.array([_float(value) for value in values], dtype=np.float64)


def _float(value) -> float:
    try:
        if isinstance(value, str):
            return float(value) if value.isascii() and "_" not in value else float("nan")
        no_number = isinstance(value, (bool, bytes)) or (hasattr(value, "dtype") and value.ndim)
        return float("nan") if no_number else float(value)
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
            if isinstance(row, str):
                row = map(int, row.split()) if row.isascii() and "_" not in row else None
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


def checked_requests(n) -> int:
    """`n`, if it is a number of requests that can be drawn. Raises InputError."""
    if isinstance(n, bool) or not hasattr(n, "__index__") or not 1 <= operator.index(n) <= MAX_REQUESTS:
        raise InputError(f"n={n!r} is not usable: the number of requests is an integer >= 1, at most {MAX_REQUESTS:,}")
    return operator.index(n)


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
            raise InputError(f"{source}: column {name!r} is not a trace column; did you mean {near[0]!r}? Rename it")
