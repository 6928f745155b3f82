"""Traces in JSON: conversations with their texts (ShareGPT, LMSYS), and lengths with prefix blocks (Mooncake)."""

from __future__ import annotations

from pathlib import Path

from astrolabe_lab.errors import InputError
from astrolabe_lab.tokens import counter
from astrolabe_lab.trace.columns import Table
from astrolabe_lab.trace.files import json_entries, reason

# By format: the key that tells it, and the tokens that one of its hash ids stands for.
ENTRIES = {"bailian": "chat_id", "mooncake": "input_length", "sharegpt": "conversations", "lmsys": "conversation"}
CONVERSATIONS = ("sharegpt", "lmsys")
BLOCK_TOKENS = {"mooncake": 512, "bailian": 16}
_LENGTHS = {"timestamp": "arrived_s", "input_length": "prompt_tokens", "output_length": "output_tokens"}
_TURNS = {"sharegpt": ("conversations", "value"), "lmsys": ("conversation", "content")}
_CHOICES = ("model", "language")


def read_json(text: str, path: Path, format: str | None, tokenizer=None) -> Table:
    """Return the columns of a JSON trace of this format, or of the one that its first object tells.

    Raises InputError for a file that is broken off, or a tokenizer where there is no text to count.
    """
    entries, where = json_entries(text, path)
    if format is None:
        keys = next((set(entry) for entry in entries if isinstance(entry, dict) and entry), ())
        format = next((name for name, key in ENTRIES.items() if key in keys), "sharegpt")
    if format in CONVERSATIONS:
        return _conversations(entries, where, format, tokenizer)
    if tokenizer is not None:
        raise InputError(
            f"{path}: tokenizer= is only for ShareGPT and LMSYS texts; this file holds token counts already"
        )
    return _lengths(entries, where, format)


def conversations(table: Table, path: Path, tokenizer=None) -> Table:
    """Return the columns of an LMSYS table (Parquet). Raises InputError where it has no 'conversation'."""
    if "conversation" not in table.columns:
        raise InputError(
            f"{path}: the header ({', '.join(list(table.columns)[:12])}) lacks conversation; format=lmsys needs it"
        )
    names = [name for name in ("conversation", *_CHOICES) if name in table.columns]
    rows = zip(*(table.columns[name] for name in names), strict=True)
    found = _conversations([dict(zip(names, row, strict=True)) for row in rows], table.where, "lmsys", tokenizer)
    found.ignored = tuple(name for name in table.columns if name not in names)
    return found


def _conversations(entries, where, format: str, tokenizer) -> Table:
    """First turn and its answer of every conversation; like vLLM's benchmark, roles are not looked at."""
    count, counter_name = counter(tokenizer)
    list_key, text_key = _TURNS[format]
    prompts, prompt_tokens, output_tokens, kept, bad, short = [], [], [], [], {}, 0
    for i, entry in enumerate(entries):
        turns = entry.get(list_key) if isinstance(entry, dict) else None
        prompt = answer = ""
        if isinstance(entry, Exception):
            bad[len(kept)] = f"not JSON ({reason(entry)}), perhaps cut short"
        elif isinstance(turns, (str, dict)) or not hasattr(turns, "__len__"):
            bad[len(kept)] = f"no list '{list_key}' (allowed: an object with one)"
        elif len(turns) < 2:
            short += 1
            continue
        else:
            texts = [turn.get(text_key) if isinstance(turn, dict) else None for turn in turns[:2]]
            if all(isinstance(value, str) for value in texts):
                # JSON may hold half a surrogate pair, which no file can store.
                prompt, answer = (value.encode("utf-8", "replace").decode() for value in texts)
            else:
                bad[len(kept)] = f"a turn without a text '{text_key}'"
        kept.append(i)
        prompts.append(prompt)
        prompt_tokens.append(count(prompt))
        output_tokens.append(count(answer))
    columns = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "prompt": prompts}
    attrs = {"token_counter": counter_name, "filtered": {"fewer_than_two_turns": short}}
    table = Table(format, columns, lambda i: where(kept[i]), bad, attrs=attrs)
    if format == "lmsys":
        given = [entries[i] if isinstance(entries[i], dict) else {} for i in kept]
        there = [name for name in _CHOICES if any(name in entry for entry in given)]
        table.choices = {name: [str(entry.get(name, "")) for entry in given] for name in there}
        if "model" in there:
            table.columns["family"] = table.choices["model"]
    return table


def _lengths(entries, where, format: str) -> Table:
    """Mooncake and Qwen-Bailian: times, lengths, and ids of the prompt's blocks, each telling all before it too."""
    import numpy as np

    needed = (*_LENGTHS, "hash_ids") if any("hash_ids" in e for e in entries if isinstance(e, dict)) else (*_LENGTHS,)
    raw: dict[str, list] = {name: [] for name in needed}
    bad, ignored, types = {}, {}, []
    for i, entry in enumerate(entries):
        fault = None
        if isinstance(entry, Exception):
            fault = f"not JSON ({reason(entry)}), perhaps cut short"
        elif not isinstance(entry, dict):
            fault = f"no object (allowed: one with {', '.join(needed)})"
        elif missing := [name for name in needed if name not in entry]:
            fault = f"no {', '.join(missing)} (allowed: an object with {', '.join(needed)})"
        if fault:
            bad[i], entry = fault, {}
        for name in needed:
            raw[name].append(entry.get(name, ()) if name == "hash_ids" else entry.get(name, 1))
        types.append(str(entry.get("type", "")))
        ignored |= dict.fromkeys(name for name in entry if name not in needed)
    columns = {_LENGTHS.get(name, "prefix_blocks"): _objects(raw[name]) for name in needed}
    if format == "mooncake":
        columns["arrived_s"] = _in_seconds(columns["arrived_s"])
    if "prefix_blocks" in columns:
        columns["prefix_block_tokens"] = np.full(len(entries), BLOCK_TOKENS[format])
    table = Table(format, columns, where, bad)
    if format == "bailian":
        ignored.pop("type", None)
        table.choices, columns["family"] = {"type": types}, types
    table.ignored = tuple(ignored)
    return table


def _objects(values: list):
    """An array of these objects, lists among them as they are."""
    import numpy as np

    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array


def _in_seconds(milliseconds):
    """The same, a thousandth; what is no number stays, to be complained of as it stands in the file."""
    numeric = [isinstance(value, (int, float)) and not isinstance(value, bool) for value in milliseconds]
    milliseconds[numeric] = milliseconds[numeric] / 1e3
    return milliseconds
