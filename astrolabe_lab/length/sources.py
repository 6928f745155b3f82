"""Data sets of others, as ``datasets.Dataset``: files, conversations, folders and names on a hub."""

from __future__ import annotations

import contextlib
import csv
import gzip
import math
import tempfile
from pathlib import Path

from astrolabe_lab.errors import InputError
from astrolabe_lab.trace.files import decoded, json_entries, read_bytes

_READERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_ASKS, _ANSWERS = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard", "model")


def read(source, split: str = "train"):
    """The ``datasets.Dataset`` that ``source`` names, or is. Raises InputError saying what is wrong with it.

    A column ``conversations`` (ShareGPT) or ``messages`` (OpenAI) becomes ``prompt`` and ``response``: the first
    turn that asks, and the answer that follows it.
    """
    try:
        import datasets
    except ImportError:
        raise InputError(
            "reading answers needs the package 'datasets': make length, or install the extra 'length'"
        ) from None

    if isinstance(source, datasets.DatasetDict):
        table = _one_split(source, split, "the data set")
    elif isinstance(source, datasets.Dataset):
        table = source
    else:
        path = Path(source)
        suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
        suffix = suffixes[0] if suffixes[-1:] == [".gz"] else (suffixes or [""])[-1]
        if suffix in _READERS or path.is_file():
            table = _file(path, suffix)
        else:
            table = _named(str(source), path, split)
    return _with_first_turns(table, datasets)


def _file(path: Path, suffix: str):
    import datasets

    if not path.is_file():
        raise InputError(f"{path} does not exist: check the path (relative paths start at {Path.cwd()})")
    if suffix not in _READERS:
        raise InputError(f"{path}: answers are read from .csv, .json, .jsonl and .parquet, plain or .gz; rename it")
    reader = _READERS[suffix]
    if reader == "json":
        return _json(path, datasets)
    options = {"features": _all_text(path, datasets), "keep_default_na": False} if reader == "csv" else {}
    # The reader keeps an Arrow copy of a file: not beside the user's, and not for longer than this.
    with tempfile.TemporaryDirectory(prefix="astrolabe-") as cache, _quiet(datasets):
        try:
            return datasets.load_dataset(
                reader, data_files=str(path), cache_dir=cache, keep_in_memory=True, split="train", **options
            )
        except Exception as error:  # each reader raises its own kinds
            reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
            if "corresponds to no data" in reason[0]:
                raise InputError(f"{path} has no rows: nothing to learn from") from None
            raise InputError(f"{path} cannot be read as {reader}: {reason[0][:200]}") from None


def _all_text(path: Path, datasets):
    """Features that keep every cell of a CSV as it stands: a prompt may be "007" or "NA"."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            header = next(csv.reader(file), [])
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as CSV: {error}; it must be UTF-8, and whole") from None
    if not header or len(set(header)) != len(header):
        raise InputError(f"{path}: the header {header} is empty or names a column twice; name each column once")
    return datasets.Features({name: datasets.Value("string") for name in header})


def _json(path: Path, datasets):
    """Rows of JSON or JSON lines; the keys are those that any row has. A line that is cut short is an error."""
    entries, where = json_entries(decoded(read_bytes(path), path), path)
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            what = f"not JSON ({entry})" if isinstance(entry, Exception) else f"{type(entry).__name__}, not an object"
            raise InputError(f"{path}, {where(i)}: {what}; correct the file, or leave that row out")
    for entry in entries:
        for turns in ("conversations", "messages"):
            if turns in entry:
                prompt, response = first_turns(entry.pop(turns))
                entry |= {"prompt": prompt, "response": response}
    keys = sorted({key for entry in entries for key in entry})
    if not keys:
        raise InputError(f"{path} has no rows: nothing to learn from")
    return datasets.Dataset.from_dict({key: _alike([_plain(entry.get(key)) for entry in entries]) for key in keys})


def _plain(value):
    """The value, if it is one that every row of a column can share; nested values are of no use here."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()  # half a surrogate pair cannot be stored
    if isinstance(value, int) and abs(value) >= 2**63:
        return math.inf if value > 0 else -math.inf  # nor can such a number
    return value if isinstance(value, (bool, int, float)) else None


def _alike(values: list) -> list:
    """The values of a column as one type: as text where some are text, or truth, and others are not."""
    kinds = {float if type(value) is int else type(value) for value in values if value is not None}
    return values if len(kinds) < 2 else [None if value is None else str(value) for value in values]


def first_turns(turns) -> tuple[str | None, str | None]:
    """The first text that asks and the one that answers it; None for what is not there."""
    texts = []
    for turn in turns if isinstance(turns, (list, tuple)) else ():
        if isinstance(turn, dict):
            text = turn.get("value", turn.get("content"))
            texts.append((str(turn.get("from", turn.get("role", ""))).lower(), text))
    for i, (role, text) in enumerate(texts):
        if role in _ASKS or not role:
            follows = texts[i + 1] if i + 1 < len(texts) else ("", None)
            answer = follows[1] if follows[0] in _ANSWERS or not follows[0] else None
            return _plain(text), _plain(answer)
    return None, None


def _named(name: str, path: Path, split: str):
    """A folder, or a name on a hub."""
    import datasets

    try:
        with _quiet(datasets):
            if path.is_dir() and ((path / "state.json").is_file() or (path / "dataset_dict.json").is_file()):
                found = datasets.load_from_disk(name)
            else:
                found = datasets.load_dataset(name)
    except Exception as error:  # whatever hub, network and readers raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise InputError(
            f"{name} is neither a file or folder here nor a data set that can be had: {reason} "
            "(a name on a hub needs a network, or an earlier download)"
        ) from None
    return _one_split(found, split, name)


def _one_split(found, split, name):
    if hasattr(found, "column_names") and not isinstance(found, dict):
        return found
    if split not in found:
        raise InputError(f"{name} has no split {split!r}; its splits: {', '.join(map(str, found))}")
    return found[split]


def _with_first_turns(table, datasets):
    turns = next((name for name in ("conversations", "messages") if name in table.column_names), None)
    if turns is None:
        return table
    pairs = [first_turns(row) for row in column(table, turns)]
    kept = table.remove_columns([name for name in (turns, "prompt", "response") if name in table.column_names])
    return datasets.Dataset.from_dict(
        kept[:] | {"prompt": [prompt for prompt, _ in pairs], "response": [answer for _, answer in pairs]}
    )


def column(table, name: str) -> list:
    """The values of one column, read at once: row by row takes a hundred times as long."""
    return table.select_columns([name])[:][name]


@contextlib.contextmanager
def _quiet(datasets):
    """No progress bars of a library while it reads: one line of ours says what came of it."""
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def prompts_in(source, name: str | None = None, split: str = "train") -> list[str]:
    """The texts in the column ``name`` of a source, or in the first that is commonly one of prompts. Raises
    InputError where there is none."""
    from astrolabe_lab.length.data import KNOWN

    table = read(source, split)
    found = name if name is not None else next((one for one in KNOWN["prompt"] if one in table.column_names), None)
    if found not in table.column_names:
        raise InputError(
            f"{source} has no column {found or ' or '.join(KNOWN['prompt'])!r} of prompts; it has "
            f"{', '.join(table.column_names)}"
        )
    return [text for text in column(table, found) if isinstance(text, str)]
