"""ServeGen's client folders as they lie on disk: the windows of each client, and its length distributions.

A folder (or a tar of one) holds ``chunk-N-trace.csv``, a line a window: start (s), rate (requests/s), measured
coefficient of variation of the gaps, ``Gamma`` or ``Weibull`` (empty: no requests), and the shape and scale fitted to
the gaps; and ``chunk-N-dataset.json``, for longer windows: ``input_tokens``, ``output_tokens`` and perhaps
``reason_ratio``, each the text of a Python mapping from value to probability.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import re
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.text_files import refuse_device
from astrolabe_lab.trace.columns import as_floats
from astrolabe_lab.trace.files import MAX_UNPACKED

if TYPE_CHECKING:
    import numpy as np

LAWS = ("Gamma", "Weibull")
WINDOW_S = 600.0
FIELDS = ("input_tokens", "output_tokens", "reason_ratio")
_MEMBER = re.compile(r"(?:(.*)/)?(chunk-\d+)-(trace\.csv|dataset\.json)")


@dataclass(frozen=True, slots=True)
class Client:
    """One client: float64 arrays with an entry a window, and the texts of its length distributions.

    ``start_s`` (increasing), ``rate_rps``, ``cv`` (measured), ``law`` (0: no requests, 1: Gamma, 2: Weibull) and
    ``shape`` (fitted). ``lengths`` is by start of its longer windows, None where there is no such file.
    """

    name: str
    start_s: np.ndarray
    rate_rps: np.ndarray
    cv: np.ndarray
    law: np.ndarray
    shape: np.ndarray
    lengths: dict[float, dict[str, str]] | None
    source: str

    def distributions(self, start_s: float) -> tuple[float, dict[str, str]]:
        """The last of its longer windows that begins by ``start_s``: when it begins, and its texts by field."""
        begun = [at for at in self.lengths or () if at <= start_s]
        if not begun:
            raise InputError(f"{self.source}: client {self.name} has requests at {start_s:g} s and no lengths by then")
        return max(begun), self.lengths[max(begun)]


def read_clients(path: str | Path | Sequence[str | Path]) -> list[Client]:
    """Return the clients of a folder or a tar, gzipped or not, or of several that make up one; in numeric order.

    Raises InputError, naming file and line, for what cannot be read, and where there are clients of two models.
    """
    paths = [path] if isinstance(path, (str, Path)) else list(path)
    found: dict[str, dict[str, dict[str, tuple[str, bytes]]]] = {}
    for one in map(Path, paths):
        for folder, name, part, content in _members(one):
            parts = found.setdefault(folder, {}).setdefault(name, {})
            parts.setdefault(part, (f"{one}: {name}-{part}", content))
    where = ", ".join(map(str, paths))
    if not found:
        raise InputError(f"{where}: no ServeGen clients (chunk-N-trace.csv and chunk-N-dataset.json) are there")
    if len(found) > 1:
        raise InputError(f"{where}: clients of several models ({', '.join(sorted(found))}); give the folder of one")
    (clients,) = found.values()
    lost = [name for name in clients if "trace.csv" not in clients[name]]
    if lost:
        raise InputError(f"{where}: {lost[0]}-trace.csv is missing beside its dataset; give rates and lengths together")
    return [_client(name, clients[name], where) for name in sorted(clients, key=lambda name: int(name[6:]))]


def distribution(client: Client, start_s: float, field: str, text: object) -> tuple[np.ndarray, np.ndarray]:
    """Return a length distribution as values in order and their cumulated probabilities, the last of them 1.

    Raises InputError for a text that is no mapping from numbers to probabilities that add up to 1.
    """
    import numpy as np

    where = f"{client.source}: {client.name}-dataset.json, window {start_s:g}, {field}"
    try:
        mapping = ast.literal_eval(text) if isinstance(text, str) else text
        pairs = sorted((float(value), float(share)) for value, share in mapping.items())
        values, shares = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    except (ValueError, TypeError, SyntaxError, AttributeError, RecursionError, MemoryError):
        raise InputError(f"{where}: not the text of a mapping from number to probability; fetch it again") from None
    if not len(values):
        raise InputError(f"{where}: empty, where the client has requests")
    whole = field == "reason_ratio" or (values == np.rint(values)).all()
    if not (np.isfinite(values).all() and (values >= 0).all() and whole and (shares >= 0).all()):
        raise InputError(f"{where}: a value that is no length, or a probability below 0")
    if not abs(shares.sum() - 1) < 1e-6:
        raise InputError(f"{where}: the probabilities add up to {shares.sum():.6g} instead of 1; is it cut short?")
    return values, np.cumsum(shares) / shares.sum()


def _members(path: Path):
    """Folder, client, part and content of every file of a client."""
    if path.is_dir():
        for file in sorted(path.rglob("chunk-*")):
            if file.is_file() and (match := _MEMBER.fullmatch(file.name)):
                try:
                    content = file.read_bytes()
                except OSError as error:
                    raise InputError(f"{file} cannot be read: {error.strerror}; check its permissions") from None
                yield str(file.parent.relative_to(path)), match[2], match[3], content
        return
    if not path.exists():
        raise InputError(f"{path} does not exist: give a folder of ServeGen clients, or a tar of one")
    refuse_device(path)
    total = 0
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                match = _MEMBER.fullmatch(member.name)
                if not member.isfile() or not match:
                    continue
                total += member.size
                if total > MAX_UNPACKED:
                    raise InputError(f"{path} unpacks to more than {MAX_UNPACKED:,} bytes: unpack it, give the folder")
                yield match[1] or ".", match[2], match[3], archive.extractfile(member).read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        why = str(error).partition("\n")[0].rstrip(":")
        raise InputError(f"{path}: not a tar, or cut short or damaged ({why}); fetch it again") from None


def _client(name: str, parts: dict[str, tuple[str, bytes]], source: str) -> Client:
    import numpy as np

    where, content = parts["trace.csv"]
    try:
        rows = list(csv.reader(io.StringIO(_utf8(content, where), newline="")))
    except csv.Error as error:
        raise InputError(f"{where}: not CSV ({error}); fetch it again") from None
    if not rows:
        raise InputError(f"{where} is empty: a window a line is needed")
    for line, row in enumerate(rows, 1):
        if len(row) != 6:
            raise InputError(f"{where}, line {line}: {len(row)} fields instead of 6; is it cut short?")
        if row[3] not in ("", *LAWS):
            raise InputError(f"{where}, line {line}: family {row[3]!r} is unknown: {', '.join(LAWS)}, or empty")
    start_s, rate, cv, shape = (as_floats([row[i] for row in rows]) for i in (0, 1, 2, 4))
    law = np.array([LAWS.index(row[3]) + 1 if row[3] else 0 for row in rows])
    idle = law == 0
    with np.errstate(invalid="ignore"):
        good = np.isfinite(start_s) & (start_s >= 0) & np.isfinite(rate) & np.where(idle, rate == 0, rate > 0)
        good &= idle | (np.isfinite(shape) & (shape > 0) & np.isfinite(cv) & (cv > 0))
        good[1:] &= np.diff(start_s) > 0
    if not good.all():
        line = int(np.argmin(good)) + 1
        raise InputError(
            f"{where}, line {line}: {','.join(rows[line - 1])} is no window (allowed: start later than the line "
            "before, rate, cv, Gamma or Weibull, shape and scale, all > 0; or rate 0 and no family)"
        )
    lengths = _lengths(*parts["dataset.json"]) if "dataset.json" in parts else None
    return Client(name, start_s, rate, cv, law, shape, lengths, source)


def _lengths(where: str, content: bytes) -> dict[float, dict[str, str]]:
    try:
        windows = {float(start): fields for start, fields in json.loads(_utf8(content, where)).items()}
        if not all(isinstance(fields, dict) for fields in windows.values()):
            raise ValueError
    except (ValueError, AttributeError, RecursionError):
        raise InputError(f"{where}: not JSON of windows, each with {', '.join(FIELDS[:2])}; is it cut short?") from None
    return windows


def _utf8(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: byte {error.start} is not UTF-8; fetch it again") from None
