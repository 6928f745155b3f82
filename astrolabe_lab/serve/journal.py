"""The router's journal: one JSON line a decision, one when it ends, appended; what is torn at its end is dropped.

``{"event": "router", "policy", "seed", "engines": [{instance, engine, cost}], ...}`` where a router starts;
``{"event": "decision", "rid", "client_rid" (its X-Request-Id), "time_s", "prompt_tokens", "predicted_tokens", "slo",
"signals": [{instance, ...}], "statuses": [...], "unseen": [[sent_s, prompt, predicted]...], "predicted_e2e_s":
{instance: s}, "instance", ...}``, all that the decision was made from; ``{"event": "outcome", "rid", "time_s",
"status", "instance", "output_tokens", "ttft_s", "e2e_s", ...}``, one a request, besides one with status ``retried``
for each dispatch that another followed;
``{"event": "probe", "rid", "instance", "ttft_s", "e2e_s"}``, of each candidate, where a decision (``"probe": true``)
sent its request to all of them.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from astrolabe_lab.errors import InputError
from astrolabe_lab.sim.status import Status
from astrolabe_lab.status.scrape import Gauges
from astrolabe_lab.status.status_line import pack

log = logging.getLogger(__name__)
VERSION = 1
BATCH_S = 0.2  # between two fsyncs


@dataclass(frozen=True, slots=True)
class Packed:
    """A status in an entry, to be packed (``status_line.pack``) when its line is written."""

    status: Status
    gauges: Gauges | None


class Journal:
    """Appends to ``path`` from a thread of its own; ``write`` never waits for the disk.

    A full disk costs lines, not requests: ``lost`` counts them, ``trouble`` says what happened last, the log tells of
    the first and at the end how many. A line is written whole or dropped: after a failed write the file is cut back to
    its last whole line. ``waits``: until ``start`` the file stays as it is, and for good if closed before. Raises
    InputError for a path that is no regular file or cannot be written, and for a journal that another router writes.
    """

    def __init__(self, path: str | Path, bound: int = 100_000, waits: bool = False):
        self.path = Path(path)
        self.lost = 0
        self.written = 0
        self.trouble = ""
        self._bound = bound
        self._entries: list[dict] = []
        self._wake = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        with self._told():
            if self.path.exists() and not self.path.is_file():  # opening a pipe would wait for its reader
                raise InputError(f"journal {os.fspath(path)!r} cannot be written: it is no regular file")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
        if not waits:
            self.start()

    def start(self) -> None:
        """Take the file for this process alone and write what is queued, and what comes."""
        if self._thread is not None:
            return
        with self._told():
            if not _locked(self._file):
                raise InputError(f"journal {str(self.path)!r} is being written by another router: give each its own")
            _end_torn_line(self.path)
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def write(self, entry: dict) -> None:
        """Queue an entry, which nobody may change any more. Past the bound it is counted as lost."""
        with self._wake:
            if len(self._entries) >= self._bound:
                self._lose(1, f"{self._bound} lines wait for the disk")
                return
            self._entries.append(entry)
            self._wake.notify()

    def close(self) -> None:
        """Write what is queued, where it was started, and close the file."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        self._file.close()
        if self.lost:
            log.warning("journal %s: %d lines lost, %d written", self.path, self.lost, self.written)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(f"journal {str(self.path)!r} cannot be written: {error.strerror or error}") from None

    def _lose(self, lines: int, why: object) -> None:
        with self._wake:
            if not self.lost:
                log.warning("journal %s loses lines: %s", self.path, why)
            self.trouble = f"{self.path}: {why}"
            self.lost += lines

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._entries and not self._closing:
                    self._wake.wait()
                entries, self._entries = self._entries, []
                closing = self._closing
            if entries:
                self._append(self._lines(entries))
            if closing and not self._entries:
                return
            if not closing:
                time.sleep(BATCH_S)

    def _lines(self, entries: list[dict]) -> list[bytes]:
        lines = []
        for entry in entries:
            try:
                lines.append(line_of(entry))
            except (TypeError, ValueError) as error:
                self._lose(1, error)
        return lines

    def _append(self, lines: list[bytes]) -> None:
        whole = os.fstat(self._file.fileno()).st_size
        try:
            data = memoryview(b"".join(lines))
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
            self.written += len(lines)
        except OSError as error:
            self._lose(len(lines), error.strerror or error)
            try:
                os.ftruncate(self._file.fileno(), whole)
            except OSError:
                pass


def line_of(entry: dict) -> bytes:
    """An entry as its line."""
    return json.dumps({"version": VERSION, **entry}, separators=(",", ":"), default=_packed).encode() + b"\n"


def _packed(value):
    if isinstance(value, Packed):
        return pack(value.status, value.gauges)
    raise TypeError(f"{value!r:.80} has no place in a journal")


def read(path: str | Path, torn: Callable[[int], None] | None = None) -> Iterator[dict]:
    """The entries of a journal, in order. A torn last line is left out (``torn`` is told its number); InputError for a
    damaged line before it, a file that cannot be read, or another version."""
    return (entry for _, entry in numbered(path, torn))


def numbered(path: str | Path, torn: Callable[[int], None] | None = None) -> Iterator[tuple[int, dict]]:
    """The entries as ``read`` gives them, each with the number of its line."""
    path = Path(path)
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(f"journal {str(path)!r} cannot be read: {error.strerror}") from None
    with file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):  # it was being written when its writer died
                if torn is not None:
                    torn(number)
                return
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                raise InputError(f"journal {str(path)!r}, line {number}: not JSON; remove it to read on") from None
            if not isinstance(entry, dict) or entry.get("version") != VERSION:
                raise InputError(f"journal {str(path)!r}, line {number}: not an entry of version {VERSION}")
            if not isinstance(entry.get("event"), str):
                raise InputError(f"journal {str(path)!r}, line {number}: does not say of which event it is")
            yield number, entry


def _locked(file) -> bool:
    """Whether no other process holds the file, which is this one's now; a file system without locks lets all."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _end_torn_line(path: Path) -> None:
    """Cut a last line without its end, left by a writer that was killed."""
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        at = size
        while at > 0:
            step = min(4096, at)
            file.seek(at - step)
            newline = file.read(step).rfind(b"\n")
            if newline >= 0:
                at = at - step + newline + 1
                break
            at -= step
        if at < size:
            file.truncate(at)
