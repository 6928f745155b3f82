"""Files of others: from bytes on disk to named columns, before anything is checked."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import os
import stat
import zlib
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from astrolabe_lab.errors import InputError
from astrolabe_lab.tokens import counter
from astrolabe_lab.trace_columns import COLUMNS, Table, reject_near_misses

FORMATS = {
    "csv": "rid, arrived_s, prompt_tokens, output_tokens and the optional columns of a trace frame",
    "parquet": "the same columns as Parquet",
    "azure": "Azure LLM inference CSV: TIMESTAMP, ContextTokens, GeneratedTokens",
    "vidur": "Vidur lengths: num_prefill_tokens, num_decode_tokens, optionally arrived_at",
    "sharegpt": "ShareGPT JSON: a list (or a line each) of objects with 'conversations'",
}
MAX_UNPACKED = 2**30  # bytes of a gzip file; a small file can hold any number of them
_AZURE = {"TIMESTAMP": "timestamp", "ContextTokens": "prompt_tokens", "GeneratedTokens": "output_tokens"}
_VIDUR = {
    "num_prefill_tokens": "prompt_tokens",
    "num_decode_tokens": "output_tokens",
    "arrived_at": "arrived_s",
}


def read(path: Path, format: str | None, tokenizer=None) -> Table:
    """Return the columns of a trace file, whatever its format; gzip is recognised by content, not by name.

    Raises InputError for a file that cannot be read, is empty, cut short, not UTF-8, or of no known format.
    """
    if format is not None and format not in FORMATS:
        raise InputError(
            f"format={format!r} is unknown: allowed are {', '.join(FORMATS)}; leave it out to detect it"
        )
    content = _bytes(path)
    is_parquet = content.startswith(b"PAR1")
    text = "" if is_parquet else _text(content, path)
    is_json = text.lstrip()[:1] in ("[", "{")
    if format is None and is_json:
        format = "sharegpt"
    if format == "sharegpt":
        if not is_json:
            raise InputError(
                f"{path}: format=sharegpt needs JSON that starts with [ or {{; leave format out to detect it"
            )
        return _sharegpt(text, path, *counter(tokenizer))
    if tokenizer is not None:
        raise InputError(
            f"{path}: tokenizer= is only for ShareGPT JSON; this file holds token counts already"
        )
    if is_json or (format == "parquet" and not is_parquet) or (format == "csv" and is_parquet):
        found = "JSON" if is_json else "Parquet" if is_parquet else "not Parquet"
        raise InputError(
            f"{path}: format={format} was asked for but the file is {found}; leave format out to detect it"
        )
    return _named(_parquet(content, path) if is_parquet else _csv(text, path), format, path)


def _bytes(path: Path) -> bytes:
    try:
        if stat.S_IFMT(os.stat(path).st_mode) in (stat.S_IFCHR, stat.S_IFBLK):
            raise InputError(f"{path} is a device, which may never end: give a file")
        content = path.read_bytes()
    except IsADirectoryError:
        raise InputError(
            f"{path} is a directory: give one trace file ({', '.join(FORMATS)}; .gz allowed)"
        ) from None
    except FileNotFoundError:
        raise InputError(
            f"{path} does not exist: check the path (relative paths start at {Path.cwd()})"
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; check its permissions") from None
    if content.startswith(b"\x1f\x8b"):
        try:
            with gzip.open(io.BytesIO(content)) as packed:
                content = packed.read(MAX_UNPACKED + 1)
            if len(content) > MAX_UNPACKED:
                raise InputError(
                    f"{path} unpacks to more than {MAX_UNPACKED:,} bytes: if that is meant, gunzip it and give the "
                    "plain file"
                )
        except (EOFError, OSError, zlib.error) as error:
            raise InputError(
                f"{path}: the gzip data is cut short or damaged ({error}); fetch the file again"
            ) from None
    if not content.removeprefix(codecs.BOM_UTF8).strip():
        raise InputError(f"{path} is empty: a trace needs a header and at least one request")
    return content


def _text(content: bytes, path: Path) -> str:
    hint = "save it as UTF-8 (for example: iconv -f latin1 -t utf-8)"
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(
            f"{path} is encoded as UTF-16; traces are read as UTF-8: {hint.replace('latin1', 'utf-16')}"
        )
    if b"\0" in content[:4096]:
        raise InputError(
            f"{path} is binary and not Parquet: allowed are {', '.join(FORMATS)}, plain or gzipped"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}, line {line}: byte 0x{content[error.start]:02x} is not UTF-8; {hint}"
        ) from None


def _csv(text: str, path: Path) -> Table:
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns: list[list[str]] = []
    bad: dict[int, str] = {}
    rows = 0
    try:
        header = [name.strip() for name in next(reader)]
        if not header or len(set(header)) != len(header):
            raise InputError(
                f"{path}, line 1: the header {header} is empty or names a column twice; name each column once"
            )
        columns = [[] for _ in header]
        # In blocks: keeping a list for every row costs more in garbage collection than reading does.
        while block := list(islice(reader, 8192)):
            for i, row in enumerate(block):
                if len(row) != len(header):
                    fault = f"{len(row)} fields where the header has {len(header)}"
                    bad[rows + i] = fault if any(row) else "a blank line"
                    block[i] = [""] * len(header)
            for column, values in zip(columns, zip(*block, strict=True), strict=True):
                column.extend(values)
            rows += len(block)
    except csv.Error as error:
        line = _line(text, None)
        raise InputError(
            f"{path}, line {line}: {error}; is the file cut short, or a quote left open?"
        ) from None
    while columns[0] and bad.get(len(columns[0]) - 1) == "a blank line":
        del bad[len(columns[0]) - 1]
        for column in columns:
            column.pop()
    named = dict(zip(header, columns, strict=True))
    return Table("csv", named, lambda i: f"line {_line(text, i + 1)}", bad)


def _line(text: str, row: int | None) -> int:
    """The line where a row starts, the header being row 0; None: the row that cannot be read."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    start = 1
    with suppress(csv.Error):
        for _ in islice(reader, row):
            start = reader.line_num + 1
    return start


def _parquet(content: bytes, path: Path) -> Table:
    import pandas as pd

    try:
        frame = pd.read_parquet(io.BytesIO(content))
        columns = {str(name): frame[name].to_numpy() for name in frame}
    except Exception as error:  # pyarrow raises many kinds for damaged files, some only on conversion
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{path} is not a readable Parquet file ({reason}); is it cut short? fetch it again"
        ) from None
    return Table("parquet", columns, lambda i: f"row {i + 1}")


def _named(table: Table, format: str | None, path: Path) -> Table:
    """Give the columns the trace frame's names, by the asked format or by the header."""
    given = table.columns
    if format in (None, "azure") and (format or all(name in given for name in _AZURE)):
        wanted, needed, table.format = _AZURE, tuple(_AZURE), "azure"
    elif format in (None, "vidur") and (format or all(name in given for name in list(_VIDUR)[:2])):
        wanted, needed, table.format = _VIDUR, tuple(_VIDUR)[:2], "vidur"
    else:
        wanted, needed = {name: name for name in COLUMNS}, ("prompt_tokens", "output_tokens")
        reject_near_misses(given, str(path))
    missing = [name for name in needed if name not in given]
    if missing:
        known = "; ".join(f"{name}: {text}" for name, text in FORMATS.items())
        raise InputError(
            f"{path}: the header ({', '.join(list(given)[:12])}) lacks {', '.join(missing)}; "
            + (f"format={format} needs {', '.join(needed)}" if format else f"known formats are {known}")
        )
    table.columns = {wanted[name]: values for name, values in given.items() if name in wanted}
    table.ignored = tuple(name for name in given if name not in wanted)
    if "timestamp" in table.columns:
        table.columns = {"arrived_s": _seconds(table), **table.columns}
        del table.columns["timestamp"]
    return table


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


def _sharegpt(text: str, path: Path, count: Callable[[str], int], name: str) -> Table:
    """First turn and its answer of every conversation; like vLLM's benchmark, roles are not looked at."""
    entries, where = _json_entries(text, path)
    prompts, prompt_tokens, output_tokens, kept, bad, short = [], [], [], [], {}, 0
    for i, entry in enumerate(entries):
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        prompt = answer = ""
        if isinstance(entry, Exception):
            bad[len(kept)] = f"not JSON ({_reason(entry)}), perhaps cut short"
        elif not isinstance(turns, list):
            bad[len(kept)] = "no list 'conversations' (allowed: an object with one)"
        elif len(turns) < 2:
            short += 1
            continue
        else:
            values = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
            if all(isinstance(value, str) for value in values):
                # JSON may hold half a surrogate pair, which no file can store.
                prompt, answer = (value.encode("utf-8", "replace").decode() for value in values)
            else:
                bad[len(kept)] = "a turn without a text 'value'"
        kept.append(i)
        prompts.append(prompt)
        prompt_tokens.append(count(prompt))
        output_tokens.append(count(answer))
    columns = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "prompt": prompts}
    attrs = {"token_counter": name, "filtered": {"fewer_than_two_turns": short}}
    return Table("sharegpt", columns, lambda i: where(kept[i]), bad, attrs=attrs)


_UNREADABLE = (ValueError, RecursionError)  # the latter for too many brackets


def _json_entries(text: str, path: Path) -> tuple[list, Callable[[int], str]]:
    try:
        whole = json.loads(text)
        return (whole if isinstance(whole, list) else [whole]), lambda i: f"entry {i + 1}"
    except _UNREADABLE as error:
        if text.lstrip().startswith("["):
            at = f", line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise InputError(
                f"{path}{at}: not JSON ({_reason(error)}); is the file cut short? fetch it again"
            ) from None
    entries, lines = [], []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines() also splits within JSON strings
        if line.strip():
            lines.append(number)
            try:
                entries.append(json.loads(line))
            except _UNREADABLE as error:
                entries.append(error)
    return entries, lambda i: f"line {lines[i]}"


def _reason(error: Exception) -> str:
    return getattr(error, "msg", "") or str(error).partition(";")[0]
