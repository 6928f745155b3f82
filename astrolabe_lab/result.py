"""A result is a frame with one row per arrived request: where it went, when, and what became of it."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.trace.columns import COLUMNS as TRACE_COLUMNS

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".parquet", ".csv", ".csv.gz")
# After the trace columns, in this order; prefill/decode pools replace ``instance`` by the columns after it.
COLUMNS = (
    *("instance", "prefill_instance", "decode_instance"),
    *("prefill_finished_s", "transfer_started_s", "transfer_finished_s"),
    *("first_token_s", "finished_s", "ttft_s", "tpot_s", "e2e_s", "generated_tokens", "preemptions", "cached_tokens"),
    *("predicted_e2e_s", "decision_s", "status", "source", "policy", "seed"),
)


def ordered(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with the trace columns first, then the result columns, then any others."""
    contract = [name for name in (*TRACE_COLUMNS, *COLUMNS) if name in frame]
    return frame[contract + [name for name in frame if name not in contract]]


def check_output(path: str | Path, suffixes: tuple[str, ...] = SUFFIXES, make: bool = False) -> Path:
    """The path, if a file of that name can be written; asked before the work starts.

    Raises InputError for another suffix, a folder of that name, or a parent that is not writable or, unless it is to
    be made (``make``), missing.
    """
    path = Path(path)
    if not path.name.endswith(suffixes):
        raise InputError(f"{path}: the name of the output must end in {' or '.join(suffixes)}")
    try:
        if path.is_dir():
            raise InputError(f"{path} is a folder; give the name of a file in it")
        if not make and not path.parent.is_dir():
            raise InputError(f"{path}: the folder {path.parent} does not exist; create it first")
        _try(_partial(path))
    except OSError as error:
        raise InputError(f"{path}: cannot write to {path.parent}: {error.strerror}") from None
    return path


def check_folder(path: str | Path) -> Path:
    """The path, if it is a folder that can be written to, or can be made; asked before the work starts. Raises
    InputError."""
    path = Path(path)
    try:
        if path.exists() and not path.is_dir():
            raise InputError(f"{path} is a file; give the name of a folder")
        _try(path / f".{os.getpid()}.partial")
    except OSError as error:
        raise InputError(f"{path}: cannot write there: {error.strerror}") from None
    return path


def save(frame: pd.DataFrame, path: str | Path, **about: object) -> Path:
    """Write a result frame to ``.parquet``, ``.csv`` or ``.csv.gz``, by the suffix; return the path.

    The file appears whole or not at all. ``about`` (JSON values: how the result came about) goes into the
    Parquet file, where ``pandas.read_parquet`` gives it back as ``attrs["astrolabe"]``; CSV has no place for
    it. Raises InputError as ``check_output`` does, OSError where the disk fails.
    """
    path = check_output(path)
    frame = ordered(frame).copy(deep=False)
    frame.attrs = {"astrolabe": json.loads(json.dumps(about))} if about else {}
    partial = _partial(path)
    try:
        if path.suffix == ".parquet":
            frame.to_parquet(partial, index=False)
        else:
            if "prefix_blocks" in frame:
                frame["prefix_blocks"] = [" ".join(map(str, blocks)) for blocks in frame["prefix_blocks"]]
            gzipped = {"method": "gzip", "mtime": 0} if path.suffix == ".gz" else None
            frame.to_csv(partial, index=False, lineterminator="\n", compression=gzipped)
        os.replace(partial, path)
    except OSError as error:  # pyarrow's says neither which file nor, in words, why
        raise OSError(error.errno, os.strerror(error.errno) if error.errno else str(error), str(path)) from error
    finally:
        partial.unlink(missing_ok=True)
    return path


def _try(file: Path) -> None:
    """Make an empty file and the folders it lacks, and remove them. Raises OSError."""
    lacking = [folder for folder in file.parents if not folder.exists()]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        file.unlink()
    finally:
        for folder in lacking:
            with suppress(OSError):  # not made, or another process has put something there
                folder.rmdir()


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")
