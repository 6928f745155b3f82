"""Rows of a replay, kept as they come, so that one that was ended goes on where it was."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

from astrolabe_lab import __version__
from astrolabe_lab.alone import alone
from astrolabe_lab.errors import InputError

FLUSH_ROWS = 200


class Kept:
    """A context manager over the file ``path`` (None: nothing is kept). Rows of another replay, by its ``identity``,
    are not taken. Left without an exception it removes the file."""

    def __init__(self, path: str | Path | None, identity: dict):
        self._path = Path(path) if path else None
        self._identity = identity
        self._rows: dict[tuple[int, int], dict] = {}
        self._new = 0
        self._file = None

    @property
    def resumed(self) -> int:
        """Rows that were there already."""
        return len(self._rows)

    def row(self, rid: int, attempt: int) -> dict | None:
        return self._rows.get((rid, attempt))

    def keep(self, row: dict) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._new += 1
            if self._new % FLUSH_ROWS == 0:
                self._file.flush()

    def __enter__(self) -> Kept:
        if self._path is None:
            return self
        with contextlib.ExitStack() as opened:
            opened.enter_context(alone(self._path))
            lines = self._begin()
            self._opened = opened.pop_all()
        self._rows = {(line["rid"], line["attempt"]): line for line in lines}
        return self

    def _begin(self) -> list[dict]:
        lines = self._load()
        try:
            self._file = self._path.open("w")
            self._file.write("".join(json.dumps(line) + "\n" for line in [self._identity, *lines]))
        except OSError as error:
            raise InputError(f"{self._path} cannot be written: {error.strerror}") from None
        return lines

    def __exit__(self, kind, *_) -> None:
        if self._file is not None:
            self._file.close()
            if kind is None:
                self._path.unlink(missing_ok=True)
            self._opened.close()

    def _load(self) -> list[dict]:
        found = []
        try:
            with self._path.open() as file:
                for line in file:
                    if line.endswith("\n"):  # else it was being written
                        found.append(json.loads(line))
        except FileNotFoundError:
            return []
        except (OSError, ValueError, RecursionError):
            raise InputError(f"{self._path} is no file of kept rows; remove it to begin anew") from None
        return found[1:] if found and found[0] == self._identity else []


def identity_of(path: str | Path, policy: str, seed: int | None, cost) -> dict:
    """What makes two replays the same: the journal (by how it begins), policy, seed, cost and this version."""
    try:
        with Path(path).open("rb") as file:
            begins = hashlib.sha256(file.readline()).hexdigest()
    except OSError as error:
        raise InputError(f"journal {str(path)!r} cannot be read: {error.strerror}") from None
    priced = None if cost is None else json.loads(json.dumps(cost.to_dict()))
    return {"version": __version__, "journal": begins, "policy": policy, "seed": seed, "cost": priced}
