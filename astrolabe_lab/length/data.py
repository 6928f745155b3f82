"""Answers to learn from: (prompt, length, model) from files, from a Hugging Face data set, or from ``collect``.

A frame of answers has the columns ``prompt_uid`` (which prompt), ``prompt``, ``response_tokens`` (float64), ``model``
(who answered; "" where nothing says), ``censored`` (the answer was cut off there), ``source`` and ``sample`` (0, 1,
... where one model answered one prompt several times). ``attrs`` says where it came from, who counted the tokens, and
what cleaning left out.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.length import sources
from astrolabe_lab.tokens import counter
from astrolabe_lab.trace.columns import MAX_TOKENS, as_floats

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("prompt_uid", "prompt", "response_tokens", "model", "censored", "source", "sample")
# What each part is called in data sets; of several that are there, the first is taken.
KNOWN = {
    "uid": ("prompt_uid",),
    "prompt": ("prompt", "instruction", "question", "query", "input", "text"),
    "length": ("response_tokens", "output_tokens", "completion_tokens", "num_decode_tokens", "output_len"),
    "response": ("response", "output", "answer", "completion"),
    "model": ("model", "generator", "model_id"),
    "finish": ("finish_reason",),
    "censored": ("censored",),
    "source": ("source", "dataset"),
    "sample": ("sample",),
    "error": ("error",),
}


_NO_FLOOR = (
    "; equal answers to one prompt look like repeated rows here, so no noise floor is told: a column sample or "
    "response would tell them apart"
)


def load(
    source,
    *,
    prompts=None,
    columns: Mapping[str, str] | None = None,
    model: str | None = None,
    split: str = "train",
    max_tokens: int | None = None,
    tokenizer=None,
) -> pd.DataFrame:
    """Return the answers in ``source``, cleaned, as a frame with ``COLUMNS``.

    source: a CSV, JSON, JSONL or Parquet file (``.gz`` allowed), among them ShareGPT JSON and what ``collect``
        wrote; a folder or a name that ``datasets.load_dataset`` takes, with its ``split``; or a ``datasets.Dataset``.
    prompts: another such source with the texts, where ``source`` has lengths only; both have ``prompt_uid``.
    columns: what a part is called here, where ``KNOWN`` has another name: {"prompt": "frage", "length": "laenge"}.
    model: keep the answers of this serving model alone, by its exact name.
    max_tokens: the limit that answers were given, if any: one that reached it was cut off, as was one whose
        ``finish_reason`` is ``length``. They stay, marked ``censored``.
    tokenizer: for answers that are there as text without a count; see ``tokens.counter``.

    Left out, and counted in ``attrs["cleaning"]``: empty prompts, failed requests, answers without a length of at
    least one token, and rows that say again what another said. ``attrs["repeats_told"]`` is False where these may be
    second answers of equal length, because neither a sample's number nor a text tells. Raises InputError naming source
    and remedy.
    """
    table = sources.read(source, split)
    if prompts is not None:
        table = _join(table, sources.read(prompts, split), _label(source), _label(prompts))
    parts, counted_by = _parts(table, _label(source), dict(columns or {}), tokenizer)
    frame, notes = _clean(parts, _label(source), max_tokens)
    told = notes["repeated rows"] == 0 or "sample" in parts or "response" in parts
    if model is not None:
        frame = of_model(frame, model)
    frame.attrs = {"source": _label(source), "token_counter": counted_by, "cleaning": notes, "repeats_told": told}
    return frame


def of_model(frame: pd.DataFrame, model: str) -> pd.DataFrame:
    """The answers of one serving model, rows numbered from 0. Raises InputError listing the models there are."""
    chosen = frame[frame["model"] == model].reset_index(drop=True)
    if chosen.empty:
        names = sorted(frame["model"].unique())
        close = difflib.get_close_matches(model, names, n=1)
        meant = f". Did you mean {close[0]!r}?" if close else ""
        raise InputError(f"served model {model!r} has no answers here; there are {', '.join(map(repr, names))}{meant}")
    return chosen


def from_trace(trace: pd.DataFrame, model: str = "", source: str = "trace") -> pd.DataFrame:
    """The requests of a trace frame with a column ``prompt`` as answers: its ``output_tokens`` are the lengths."""
    import numpy as np
    import pandas as pd

    if "prompt" not in trace or "output_tokens" not in trace:
        raise InputError("a trace teaches lengths if it has the columns prompt and output_tokens")
    prompts = trace["prompt"].tolist()
    frame = pd.DataFrame(
        {
            "prompt_uid": [prompt_uid(prompt) for prompt in prompts],
            "prompt": prompts,
            "response_tokens": trace["output_tokens"].to_numpy(np.float64),
            "model": model,
            "censored": False,
            "source": source,
        }
    )
    frame["sample"] = frame.groupby("prompt_uid").cumcount()
    frame.attrs = {"source": source, "token_counter": trace.attrs.get("token_counter", "the trace's"), "cleaning": {}}
    return frame


def generated(n: int, seed: int = 0) -> pd.DataFrame:
    """Answers made here: those of ``sharegpt_like.generate(n, seed)``; ``attrs["noise_floor"]`` has the known floor."""
    from astrolabe_lab.generators import sharegpt_like

    frame = from_trace(sharegpt_like.generate(n, seed=seed), source="sharegpt_like")
    known = sharegpt_like.noise_floor()
    frame.attrs["noise_floor"] = {"mae": known.mae_tokens, "mape": known.mape}
    return frame


def describe(frame: pd.DataFrame) -> str:
    """One line on what is in a frame of answers and what cleaning did to it."""
    notes = frame.attrs.get("cleaning", {})
    left_out = ", ".join(f"{count:,} {what}" for what, count in notes.items() if count)
    models, cut = frame["model"].nunique(), int(frame["censored"].sum())
    return (
        f"{len(frame):,} answers to {frame['prompt_uid'].nunique():,} prompts by {models:,} "
        f"model{'s' if models != 1 else ''}; {cut:,} were cut off and are kept as censored (at least so long); "
        f"left out: {left_out or 'none'}" + ("" if frame.attrs.get("repeats_told", True) else _NO_FLOOR)
    )


def prompt_uid(prompt: str) -> str:
    """The first 16 hex digits of the SHA-1 of the stripped prompt: one id for one text, wherever it comes from."""
    return hashlib.sha1(prompt.strip().encode("utf-8", "replace")).hexdigest()[:16]


def _label(source) -> str:
    return os.fspath(source) if isinstance(source, (str, os.PathLike)) else "the data set"


def _join(lengths, prompts, lengths_name, prompts_name):
    """The rows of ``lengths``, each with its text: by prompt_uid. Columns of ``lengths`` win."""
    for table, name in ((lengths, lengths_name), (prompts, prompts_name)):
        if "prompt_uid" not in table.column_names:
            raise InputError(
                f"{name} has no column prompt_uid, by which lengths find their prompts; it has "
                f"{', '.join(table.column_names)}"
            )
    text = next((name for name in KNOWN["prompt"] if name in prompts.column_names), None)
    if text is None:
        raise InputError(f"{prompts_name} has no prompts: name the column of texts one of {', '.join(KNOWN['prompt'])}")
    texts = dict(zip(sources.column(prompts, "prompt_uid"), sources.column(prompts, text), strict=True))
    uids = sources.column(lengths, "prompt_uid")
    missing = next((uid for uid in uids if uid not in texts), None)
    if missing is not None:
        raise InputError(
            f"{lengths_name}: prompt_uid {missing!r} is not in {prompts_name}: do the two files belong together?"
        )
    other = [name for name in KNOWN["prompt"] if name in lengths.column_names]
    return lengths.remove_columns(other).add_column("prompt", [texts[uid] for uid in uids])


def _parts(table, source, columns, tokenizer):
    """The frame of parts named as in ``KNOWN``, and who counted the tokens."""
    import pandas as pd

    unknown = [part for part in columns if part not in KNOWN]
    if unknown:
        raise InputError(f"columns: part {unknown[0]!r} is unknown; parts are {', '.join(KNOWN)}")
    there = table.column_names
    absent = [name for name in columns.values() if name not in there]
    if absent:
        raise InputError(f"{source} has no column {absent[0]!r}; it has {', '.join(there)}")
    named = {part: next((name for name in names if name in there), None) for part, names in KNOWN.items()} | columns
    if named["prompt"] is None or (named["length"] is None and named["response"] is None):
        what = "prompt" if named["prompt"] is None else "length"
        raise InputError(
            f"{source} has no column for the {what}; it has {', '.join(there)}. Expected: one of "
            f"{', '.join(KNOWN[what])}; or say which, as {what}=COLUMN"
        )
    frame = pd.DataFrame({part: sources.column(table, name) for part, name in named.items() if name is not None})
    if named["length"] is not None:
        return frame, "the data set's"
    count, counted_by = counter(tokenizer)
    frame["length"] = [count(text) if isinstance(text, str) else None for text in frame["response"]]
    return frame, counted_by


def _clean(parts, source, max_tokens):
    """Rows that can teach, in ``COLUMNS``, and how many were left out for what."""
    import numpy as np
    import pandas as pd

    n = len(parts)
    texts = [text if isinstance(text, str) else "" for text in parts["prompt"]]
    lengths = as_floats(parts["length"].to_numpy(dtype=object))
    column = {part: parts[part].tolist() if part in parts else [""] * n for part in KNOWN}
    failed = np.array([bool(error) and error == error for error in column["error"]], dtype=bool)
    empty = ~failed & np.array([not text.strip() for text in texts], dtype=bool)
    unusable = ~failed & ~empty & ~((lengths >= 1) & (lengths <= MAX_TOKENS))
    censored = np.array([str(finish) == "length" for finish in column["finish"]], dtype=bool)
    censored |= np.array([str(cut).lower() in ("true", "1") for cut in column["censored"]], dtype=bool)
    if max_tokens is not None:
        censored |= lengths >= max_tokens
    frame = pd.DataFrame(
        {
            "prompt_uid": [prompt_uid(text) for text in texts],
            "prompt": texts,
            "response_tokens": lengths,
            "model": [name if isinstance(name, str) else "" for name in column["model"]],
            "censored": censored,
            "source": [name if isinstance(name, str) else "" for name in column["source"]],
        }
    )
    good = ~(failed | empty | unusable)
    nameless = np.flatnonzero(good & (frame["model"] == "").to_numpy())
    if len(nameless) and len(nameless) < good.sum():
        raise InputError(
            f"{source}, row {nameless[0] + 1} of its answers: the model is empty, and other rows name one "
            f"({len(nameless):,} of {good.sum():,} do not): fill it in, remove these rows, or remove the column to "
            "treat all as one model"
        )
    # Two answers of one model to one prompt tell how much answers vary, unless they are one answer twice.
    sample = pd.Series(column["sample"], dtype=object).astype(str)
    said = pd.Series(column["response"] if "response" in parts else [""] * n, dtype=object).astype(str)
    keys = frame[["prompt_uid", "model", "response_tokens", "censored"]].assign(said=said, sample=sample)
    repeated = np.zeros(n, dtype=bool)
    repeated[good] = keys[good].duplicated().to_numpy()
    notes = {
        "failed requests": int(failed.sum()),
        "empty prompts": int(empty.sum()),
        "answers without a length of at least one token": int(unusable.sum()),
        "repeated rows": int(repeated.sum()),
    }
    frame = frame[good & ~repeated].reset_index(drop=True)
    if frame.empty:
        counts = ", ".join(f"{count:,} {what}" for what, count in notes.items() if count) or "it has no rows"
        raise InputError(f"{source}: nothing to learn from is left of {n:,} rows ({counts})")
    frame["sample"] = frame.groupby(["prompt_uid", "model"]).cumcount()
    return frame, notes
