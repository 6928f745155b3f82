"""What a result depends on, as fingerprints: the code that made it, the requests, the settings.

Two runs whose fingerprints are equal give the same numbers; where one differs, a stored result is not this run's.
"""

from __future__ import annotations

import hashlib
import json
import platform
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError

from .told import plain

if TYPE_CHECKING:
    import pandas as pd

PACKAGES = ("numpy", "numba", "pandas")  # those whose version can change a number
# Modules of this package that no run uses: a change in one of them leaves stored results valid.
APART = (
    *("alone", "bench", "capacity", "cli", "doctor", "engines", "event_loop", "fidelity", "measured_run", "oracle"),
    *("parameters", "plots", "published", "record", "recorded", "report", "run", "serve", "status", "vllm_scheduler"),
)
LENGTH = 16


def fingerprint(*parts: bytes | str) -> str:
    """Sixteen hexadecimal digits that tell these parts from others."""
    digest = hashlib.sha256()
    for part in parts:
        part = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:LENGTH]


@cache
def code() -> str:
    """The fingerprint of all that computes a run: this package's sources, the packages it stands on, the processor.

    It is the same before and after a commit, in a checkout and in an installed copy.
    """
    package = Path(__file__).parents[1]
    parts: list[bytes | str] = []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        top = name.partition("/")[0].removesuffix(".py")
        if top not in APART:
            parts += [name, path.read_bytes()]
    return fingerprint(*parts, json.dumps(versions()))


def versions() -> dict[str, str]:
    """The versions in `code()`."""
    found = {name: metadata.version(name) for name in PACKAGES}
    return found | {"python": ".".join(platform.python_version_tuple()[:2]), "machine": platform.machine()}


def of_requests(frame: pd.DataFrame) -> str:
    """The fingerprint of a trace frame's requests: all columns of the contract but the prompts' text."""
    from astrolabe_lab.trace.columns import COLUMNS

    parts: list[bytes | str] = []
    for name in COLUMNS:
        if name in frame and name != "prompt":
            values = frame[name]
            numbers = values.dtype.kind in "iuf"
            parts += [name, str(values.dtype), values.to_numpy().tobytes() if numbers else repr(values.tolist())]
    return fingerprint(*parts)


def of_value(value: object) -> str:
    """The fingerprint of a setting or a policy object. Raises InputError for one that cannot be told from others."""
    try:
        return fingerprint(json.dumps(plain(value), sort_keys=True, allow_nan=False))
    except RecursionError:
        raise InputError(f"{value!r} holds itself, or too much within itself, to be told from others") from None
