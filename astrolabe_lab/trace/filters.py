"""Which rows of a trace file become requests: limits on their lengths, and the model or kind that the file names."""

from __future__ import annotations

from astrolabe_lab.errors import InputError
from astrolabe_lab.trace.columns import Table, as_floats
from astrolabe_lab.trace.json_formats import CONVERSATIONS

FILTERS = ("min_prompt_tokens", "min_output_tokens", "max_prompt_tokens", "max_total_tokens")
CHOICES = {"model": "burstgpt, lmsys", "log_type": "burstgpt", "language": "lmsys", "type": "bailian"}
VLLM_LIMITS = dict(zip(FILTERS, (4, 4, 1024, 2048), strict=True))


def choose(table: Table, filters: dict):
    """Return which rows of the table are kept (bool, a row each), and how many each filter left out, by its name.

    A row that is bad is no filter's to leave out. Raises InputError for a filter, or a value of one, that is none.
    """
    import numpy as np

    unknown = [name for name in filters if name not in (*FILTERS, *CHOICES)]
    if unknown:
        raise InputError(f"filter {', '.join(unknown)} is unknown: allowed are {', '.join((*FILTERS, *CHOICES))}")
    chosen = {name: filters[name] for name in CHOICES if filters.get(name) is not None}
    limits = {name: limit for name, limit in filters.items() if name in FILTERS}
    limits = (VLLM_LIMITS if table.format in CONVERSATIONS else {}) | limits
    prompt, output = (as_floats(table.columns[name]) for name in ("prompt_tokens", "output_tokens"))
    sizes = {"prompt": prompt, "output": output, "total": prompt + output}
    keep = np.ones(len(prompt), dtype=bool)
    filtered = dict(table.attrs.get("filtered", {}))

    def leave_out(name, rows):
        rows = keep & rows
        rows[list(table.bad)] = False
        filtered[name] = int(rows.sum())
        keep[rows] = False

    for name, wanted in chosen.items():
        if name not in table.choices:
            raise InputError(f"filter {name}={wanted!r}: a {table.format} file has no {name}; {CHOICES[name]} have")
        values = np.array(table.choices[name], dtype=object)
        if not (values == wanted).any():
            there = ", ".join(map(repr, sorted(set(values))[:8]))
            raise InputError(f"filter {name}={wanted!r} matches no row: the file has {there}")
        leave_out(name, values != wanted)
    for name, rows in table.left_out.items():
        leave_out(name, rows)
    for name, limit in limits.items():
        if limit is None:
            continue
        if isinstance(limit, bool) or not isinstance(limit, (int, np.integer)) or limit < 0:
            raise InputError(f"{name}={limit!r} is not usable: allowed are integers >= 0 and None (no limit)")
        bound, which, _ = name.split("_")
        size = sizes[which]
        leave_out(name, (size < limit) & (size >= 0) if bound == "min" else size > limit)
    return keep, filtered
