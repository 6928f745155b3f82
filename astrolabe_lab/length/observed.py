"""Lengths that were predicted and lengths that came: what a router's journal tells of its length model.

A journal is JSON lines (``serve.journal``); of a request these entries are read here:

``{"event": "decision", "rid", "arrived_s", "prompt_tokens", "predicted_tokens", "predicted_tokens_from"}``, of a router
of pools ``"event": "pair"``, with ``prompt`` and ``model`` where the router keeps them, and its end, ``{"event":
"outcome", "rid", "time_s", "status", "output_tokens", "finish_reason"}``. A dispatch that failed may end with status
``retried``, and the decision is repeated; an outcome may be missing (in flight, or lost in a crash), and numbers and
times may start again with a router; a torn last line is left out. Probes, which have no outcome, are passed over.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.length.prompts import valid
from astrolabe_lab.length.tagging import as_tokens
from astrolabe_lab.serve import journal

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    *("rid", "arrived_s", "finished_s", "prompt_tokens", "predicted_tokens", "predicted_from"),
    *("output_tokens", "censored", "model", "prompt"),
)


def read_observed(paths: str | Path | Iterable[str | Path], patience_s: float = 600.0) -> pd.DataFrame:
    """The answered requests of one or several journals, a row each, in the order in which they arrived.

    Columns: ``rid, arrived_s, finished_s, prompt_tokens, predicted_tokens, predicted_from, output_tokens``,
    ``censored`` (the answer was cut off: by ``max_tokens``, a client that left or an engine that failed; it
    would have been at least this long), and ``model``, ``prompt`` (None where the journal has none).

    Short answers end first, so of the latest requests only the short ones have ended. Rows that arrived after one
    that is still in flight are therefore left out. A request without an end is in flight until the journal goes on
    for ``patience_s`` after it, or its clock has started anew; then it is lost.

    ``attrs`` count what is not in the rows: ``in_flight`` (with those that wait for one), ``lost``, ``unanswered``
    (no token came), ``unpredicted``. Raises InputError for a file that is no journal.
    """
    import pandas as pd

    paths = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    counts = dict.fromkeys(("in_flight", "lost", "unanswered", "unpredicted"), 0)
    rows = [row for path in paths for row in _settled(*_joined(path), patience_s, counts)]
    frame = pd.DataFrame(rows, columns=COLUMNS)
    frame = frame.astype({"arrived_s": float, "finished_s": float, "censored": bool})
    frame = frame.astype({"predicted_tokens": "int64", "output_tokens": "int64"})
    frame.attrs = counts
    return frame


def write_journal(frame: pd.DataFrame, path: str | Path) -> Path:
    """Write what became of simulated requests as the journal that a router would have kept; returns the path.

    ``frame``: a result frame of ``simulate`` with ``predicted_tokens``, and ``prompt`` to retrain from. Entries come
    in the order of their times. The file appears whole or not at all.
    """
    import json

    from astrolabe_lab.record import write_whole

    entries = []
    for row in frame.to_dict("records"):
        told = {name: row[name] for name in ("prompt_tokens", "predicted_tokens", "prompt", "model") if name in row}
        came = {"rid": row["rid"], "arrived_s": row["arrived_s"]}
        entries.append((row["arrived_s"], {"event": "decision"} | came | {"predicted_tokens_from": "simulated"} | told))
        rejected = row["status"] == "rejected"
        if rejected or row["finished_s"] == row["finished_s"]:  # not NaN: it has ended
            time_s = row["arrived_s"] if rejected else row["finished_s"]
            ended = {"status": row["status"], "output_tokens": row["generated_tokens"], "finish_reason": "stop"}
            entries.append((time_s, {"event": "outcome", "time_s": time_s} | came | ended))
    entries.sort(key=lambda entry: entry[0])
    lines = (json.dumps({"version": journal.VERSION} | entry) for _, entry in entries)
    write_whole(Path(path), "".join(line + "\n" for line in lines))
    return Path(path)


def _joined(path: str | Path) -> tuple[list[list], float]:
    """([decision, outcome or None] in the order of arrival, the journal's last time in s)."""
    joined: list[list] = []
    unfinished: dict[object, list] = {}
    last_s = 0.0
    for entry in journal.read(path):
        rid, event = entry.get("rid"), entry.get("event")
        last_s = _seconds(entry.get("time_s", entry.get("arrived_s")))
        if event in ("decision", "pair") and not entry.get("probe"):
            one = unfinished.get(rid)
            if one is not None and one[0].get("arrived_s") == entry.get("arrived_s"):
                one[0] = entry  # a retry: same request, another instance
            else:
                unfinished[rid] = [entry, None]
                joined.append(unfinished[rid])
        elif event == "outcome" and entry.get("status") != "retried" and rid in unfinished:
            unfinished.pop(rid)[1] = entry
    return joined, last_s


def _settled(joined: list[list], last_s: float, patience_s: float, counts: dict[str, int]) -> Iterable[dict]:
    """The rows before the first that is in flight; ``counts`` takes in what is left out."""

    def in_flight(decision) -> bool:
        return 0 <= last_s - _arrived_s(decision) <= patience_s

    waits = (at for at, (decision, outcome) in enumerate(joined) if outcome is None and in_flight(decision))
    stop = next(waits, len(joined))
    counts["in_flight"] += len(joined) - stop
    for decision, outcome in joined[:stop]:
        if outcome is None:
            counts["lost"] += 1
            continue
        row = _row(decision, outcome)
        if row["output_tokens"] is None or outcome.get("status") == "rejected":
            counts["unanswered"] += 1
        elif row["predicted_tokens"] is None:
            counts["unpredicted"] += 1
        else:
            yield row


def _row(decision: Mapping, outcome: Mapping) -> dict:
    prompt, model = decision.get("prompt"), decision.get("model")
    return {
        "rid": decision.get("rid"),
        "arrived_s": _arrived_s(decision),
        "finished_s": _seconds(outcome.get("time_s")),
        "prompt_tokens": decision.get("prompt_tokens"),
        "predicted_tokens": as_tokens(decision.get("predicted_tokens")),
        "predicted_from": decision.get("predicted_tokens_from"),
        "output_tokens": as_tokens(outcome.get("output_tokens")),
        "censored": outcome.get("finish_reason") == "length" or outcome.get("status") != "ok",
        "model": valid(model) if isinstance(model, str) else None,
        "prompt": valid(prompt) if isinstance(prompt, str) else None,
    }


def _arrived_s(decision: Mapping) -> float:
    return _seconds(decision.get("arrived_s", decision.get("time_s")))


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else float("nan")


def require_rows(observed: pd.DataFrame, least: int, what: str) -> None:
    """Raise InputError where fewer than ``least`` rows were observed."""
    if len(observed) < least:
        left_out = ", ".join(f"{count} {name}" for name, count in observed.attrs.items() if count)
        raise InputError(
            f"{what} needs at least {least:,} usable answers and the journal has {len(observed):,}"
            + (f" ({left_out} left out)" if left_out else "")
        )
