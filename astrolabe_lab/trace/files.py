"""Files as they lie on disk: from bytes to text, to the columns of a table, or to the entries of JSON."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from astrolabe_lab.errors import InputError
from astrolabe_lab.text_files import refuse_device
from astrolabe_lab.trace.columns import Table

MAX_COLUMNS = 10_000
MAX_UNPACKED = 2**30  # bytes of a gzip file; a small file can hold any number of them


def read_bytes(path: Path) -> bytes:
    """What the file holds, unpacked if it is gzipped, whatever its name. Raises InputError if it cannot be had."""
    try:
        refuse_device(path)
        content = path.read_bytes()
    except IsADirectoryError:
        raise InputError(
            f"{path} is a directory: give one trace file (a folder of ServeGen clients is drawn from as servegen:DIR)"
        ) from None
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: check the path (relative paths start at {Path.cwd()})") from None
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
            raise InputError(f"{path}: the gzip data is cut short or damaged ({error}); fetch the file again") from None
    if not content.removeprefix(codecs.BOM_UTF8).strip():
        raise InputError(f"{path} is empty: a trace needs a header and at least one request")
    return content


def decoded(content: bytes, path: Path) -> str:
    """The bytes as UTF-8 text, without a byte order mark. Raises InputError naming the line of what is none."""
    hint = "save it as UTF-8 (for example: iconv -f latin1 -t utf-8)"
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{path} is encoded as UTF-16; traces are read as UTF-8: {hint.replace('latin1', 'utf-16')}")
    if b"\0" in content[:4096]:
        raise InputError(
            f"{path} is binary and not Parquet: a trace is CSV, JSON or Parquet, plain or gzipped "
            "(an archive of ServeGen clients is drawn from as servegen:FILE)"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}, line {line}: byte 0x{content[error.start]:02x} is not UTF-8; {hint}") from None


def csv_table(text: str, path: Path) -> Table:
    """The columns by the header's names; rows of another length are bad. Raises InputError for a broken file."""
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns: list[list[str]] = []
    bad: dict[int, str] = {}
    rows = 0
    try:
        header = [name.strip() for name in next(reader)]
        _check_width(len(header), path)
        if not header or len(set(header)) != len(header):
            repeated = [name for name, count in Counter(header).items() if count > 1]
            what = f"names {', '.join(map(repr, repeated[:3]))} more than once" if repeated else "is empty"
            raise InputError(f"{path}, line 1: the header {what}; name each column once")
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
        raise InputError(f"{path}, line {line}: {error}; is the file cut short, or a quote left open?") from None
    while columns[0] and bad.get(len(columns[0]) - 1) == "a blank line":
        del bad[len(columns[0]) - 1]
        for column in columns:
            column.pop()
    named = dict(zip(header, columns, strict=True))
    return Table("csv", named, lambda i: f"line {_line(text, i + 1)}", bad)


def _check_width(columns: int, path: Path) -> None:
    if columns > MAX_COLUMNS:
        raise InputError(
            f"{path} has {columns:,} columns, more than the {MAX_COLUMNS:,} that a trace may have: a trace has a row "
            "for each request; is this one transposed, or something else?"
        )


def _line(text: str, row: int | None) -> int:
    """The line where a row starts, the header being row 0; None: the row that cannot be read."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    start = 1
    with suppress(csv.Error):
        for _ in islice(reader, row):
            start = reader.line_num + 1
    return start


def parquet_table(content: bytes, path: Path) -> Table:
    """The columns of a Parquet file as arrays. Raises InputError for a damaged one."""
    import pandas as pd

    try:
        import pyarrow.parquet as pq

        _check_width(pq.ParquetFile(io.BytesIO(content)).metadata.num_columns, path)
        frame = pd.read_parquet(io.BytesIO(content))
        columns = {str(name): frame[name].to_numpy() for name in frame}
    except InputError:
        raise
    except Exception as error:  # pyarrow raises many kinds for damaged files, some only on conversion
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path} is not a readable Parquet file ({reason}); is it cut short? fetch it again") from None
    return Table("parquet", columns, lambda i: f"row {i + 1}")


_UNREADABLE = (ValueError, RecursionError)  # the latter for too many brackets


def json_entries(text: str, path: Path) -> tuple[list, Callable[[int], str]]:
    """The entries of one JSON list, or of a line each, and where each stands; a line that is no JSON is an Exception.

    Raises InputError for a list that is broken off.
    """
    try:
        whole = json.loads(text)
        return (whole if isinstance(whole, list) else [whole]), lambda i: f"entry {i + 1}"
    except _UNREADABLE as error:
        if text.lstrip().startswith("["):
            at = f", line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise InputError(f"{path}{at}: not JSON ({reason(error)}); is the file cut short? fetch it again") from None
    entries, lines = [], []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines() also splits within JSON strings
        if line.strip():
            lines.append(number)
            try:
                entries.append(json.loads(line))
            except _UNREADABLE as error:
                entries.append(error)
    return entries, lambda i: f"line {lines[i]}"


def reason(error: Exception) -> str:
    """Why it is no JSON, in a few words."""
    return getattr(error, "msg", "") or str(error).partition(";")[0]
