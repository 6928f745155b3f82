"""Files of others: from the columns as they name them to those of a trace frame, before anything is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from astrolabe_lab.errors import InputError
from astrolabe_lab.trace.columns import COLUMNS, Table, as_floats, reject_near_misses
from astrolabe_lab.trace.files import csv_table, decoded, parquet_table, read_bytes
from astrolabe_lab.trace.json_formats import ENTRIES, conversations, read_json

FORMATS = {
    "csv": "rid, arrived_s, prompt_tokens, output_tokens and the optional columns of a trace frame",
    "parquet": "the same columns as Parquet",
    "azure": "Azure LLM inference CSV of 2023 and 2024: TIMESTAMP, ContextTokens, GeneratedTokens",
    "burstgpt": "BurstGPT CSV: Timestamp, Model, Request tokens, Response tokens, Log Type",
    "vidur": "Vidur lengths: num_prefill_tokens, num_decode_tokens, optionally arrived_at",
    "mooncake": "Mooncake JSON lines: timestamp (ms), input_length, output_length, optionally hash_ids",
    "bailian": "Qwen-Bailian JSON lines: chat_id, timestamp (s), input_length, output_length, type, hash_ids",
    "sharegpt": "ShareGPT JSON: a list (or a line each) of objects with 'conversations'",
    "lmsys": "LMSYS-Chat-1M (and WildChat) JSON or Parquet: 'conversation', a list of role and content, and 'model'",
}


@dataclass(frozen=True)
class Naming:
    """How somebody names the columns: theirs to ours; those that must be there; those kept to choose rows by."""

    columns: Mapping[str, str]
    needed: tuple[str, ...]
    choices: Mapping[str, str] = field(default_factory=dict)


NAMINGS = {
    "azure": Naming(
        {"TIMESTAMP": "timestamp", "ContextTokens": "prompt_tokens", "GeneratedTokens": "output_tokens"},
        ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ),
    "burstgpt": Naming(
        {"Timestamp": "arrived_s", "Request tokens": "prompt_tokens", "Response tokens": "output_tokens"},
        ("Timestamp", "Model", "Request tokens", "Response tokens", "Log Type"),
        {"Model": "model", "Log Type": "log_type"},
    ),
    "vidur": Naming(
        {
            "num_prefill_tokens": "prompt_tokens",
            "num_decode_tokens": "output_tokens",
            "arrived_at": "arrived_s",
        },
        ("num_prefill_tokens", "num_decode_tokens"),
    ),
}
OWN = Naming({name: name for name in COLUMNS}, ("prompt_tokens", "output_tokens"))


def read(path: Path, format: str | None, tokenizer=None) -> Table:
    """Return the columns of a trace file, whatever its format; gzip is recognised by content, not by name.

    Raises InputError for a file that cannot be read, is empty, cut short, not UTF-8, or of no known format.
    """
    if format is not None and format not in FORMATS:
        raise InputError(f"format={format!r} is unknown: allowed are {', '.join(FORMATS)}; leave it out to detect it")
    content = read_bytes(path)
    is_parquet = content.startswith(b"PAR1")
    text = "" if is_parquet else decoded(content, path)
    is_json = text.lstrip()[:1] in ("[", "{")
    if is_json and (format is None or format in ENTRIES):
        return read_json(text, path, format, tokenizer)
    if is_parquet and format in (None, "lmsys"):
        table = parquet_table(content, path)
        if format == "lmsys" or "conversation" in table.columns:
            return conversations(table, path, tokenizer)
    elif format in ENTRIES:
        raise InputError(f"{path}: format={format} needs JSON that starts with [ or {{; leave format out to detect it")
    elif is_json or (format == "parquet" and not is_parquet) or (format == "csv" and is_parquet):
        found = "JSON" if is_json else "Parquet" if is_parquet else "not Parquet"
        raise InputError(
            f"{path}: format={format} was asked for but the file is {found}; leave format out to detect it"
        )
    else:
        table = parquet_table(content, path) if is_parquet else csv_table(text, path)
    if tokenizer is not None:
        raise InputError(
            f"{path}: tokenizer= is only for ShareGPT and LMSYS texts; this file holds token counts already"
        )
    return _named(table, format, path)


def _named(table: Table, format: str | None, path: Path) -> Table:
    """Give the columns the trace frame's names, by the asked format or by the header."""
    given = table.columns
    if format is None:
        format = next((name for name, kind in NAMINGS.items() if set(kind.needed) <= set(given)), None)
    naming = NAMINGS.get(format, OWN)
    if naming is OWN:
        reject_near_misses(given, str(path))
    else:
        table.format = format
    missing = [name for name in naming.needed if name not in given]
    if missing:
        known = "; ".join(f"{name}: {text}" for name, text in FORMATS.items())
        raise InputError(
            f"{path}: the header ({', '.join(list(given)[:12])}) lacks {', '.join(missing)}; "
            + (f"format={format} needs {', '.join(naming.needed)}" if format else f"known formats are {known}")
        )
    table.columns = {naming.columns[name]: values for name, values in given.items() if name in naming.columns}
    table.choices = {ours: [str(value) for value in given[theirs]] for theirs, ours in naming.choices.items()}
    table.ignored = tuple(name for name in given if name not in (*naming.columns, *naming.choices))
    if format == "azure":
        table.columns = {"arrived_s": _seconds(table), **table.columns}
        del table.columns["timestamp"]
    elif format == "burstgpt":
        _tell_failures(table)
    return table


def _tell_failures(table: Table) -> None:
    """BurstGPT's failed requests answer with 0 tokens: nothing to replay, and no fault of the file."""
    import numpy as np

    failed = as_floats(table.columns["output_tokens"]) == 0
    failed[list(table.bad)] = False
    table.left_out["failed"] = failed
    family = np.empty(len(failed), dtype=object)
    family[:] = [f"{model}, {log_type}" for model, log_type in zip(*table.choices.values(), strict=True)]
    table.columns["family"] = family


def _seconds(table: Table):
    """Seconds since the earliest timestamp; integer nanoseconds keep Azure's seven decimals exact."""
    import numpy as np
    import pandas as pd

    stamps = table.columns["timestamp"]
    times = pd.to_datetime(pd.Series(stamps), format="ISO8601", errors="coerce", utc=True)
    times = times.where(times.between(pd.Timestamp("1970", tz="UTC"), pd.Timestamp("2200", tz="UTC")))  # fit in ns
    times = times.to_numpy(dtype="datetime64[ns]")
    unread = np.isnat(times)
    for i in np.flatnonzero(unread):
        table.bad.setdefault(int(i), f"TIMESTAMP is {stamps[i]!r} (allowed: 2023-11-16 18:15:46.6805900)")
    if unread.all():
        return np.zeros(len(times))
    seconds = (times - times[~unread].min()).astype("int64") / 1e9
    seconds[unread] = 0.0
    return seconds
