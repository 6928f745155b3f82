"""What a result depends on, as fingerprints: the code that made it, the requests, the settings.

Two runs whose fingerprints are equal give the same numbers; where one differs, a stored result is not this run's.
"""

from __future__ import annotations

import builtins
import dataclasses
import hashlib
import importlib
import inspect
import json
import math
import platform
import site
import sys
import types
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

PACKAGES = ("numpy", "numba", "pandas")  # those whose version can change a number
# Modules of this package that no run uses: a change in one of them leaves stored results valid.
APART = (
    *("bench", "capacity", "cli", "doctor", "fidelity", "measured_run", "oracle", "parameters", "plots", "published"),
    *("record", "recorded", "report", "run", "serve", "engines", "status", "vllm_scheduler"),
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
    return fingerprint(json.dumps(plain(value), sort_keys=True, allow_nan=False))


def plain(value: object) -> object:
    """`value` in JSON's types, so that equal ones, and only those, look equal."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, (int, float)):
        if isinstance(value, int) or math.isfinite(value):
            return int(value) if value == int(value) else value  # 5 and 5.0 are one rate
        return repr(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=json.dumps)
    if isinstance(value, types.CodeType):
        return [value.co_code.hex(), list(value.co_names), list(value.co_varnames), [*map(plain, value.co_consts)]]
    if isinstance(value, bytes):
        return value.hex()
    if value is Ellipsis or isinstance(value, complex):
        return repr(value)
    return _object(value)


def _object(value: object) -> object:
    kind = type(value)
    if kind.__module__.startswith("astrolabe_lab."):  # its code is in `code()`
        if dataclasses.is_dataclass(value):
            held = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return {"class": kind.__qualname__} | held
    if isinstance(value, types.FunctionType):
        return {"function": _function(value, set())}
    if hasattr(value, "__dict__") or hasattr(kind, "__slots__"):
        slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ()) if hasattr(value, name)]
        held = {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})
        try:
            return {"class": _class(kind, set()), "holds": plain(held)}
        except RecursionError:
            pass
    raise InputError(
        f"{value!r} cannot be told from others of its kind, so results with it cannot be stored: leave `out` out, or "
        "let it hold numbers, strings, lists and objects of your own classes only"
    )


def _class(kind: type, seen: set[int]) -> list:
    """The code of a class of the user's own and of those it stands on."""
    seen.add(id(kind))
    parts: list = []
    for base in kind.__mro__:
        if _is_own(base):
            for name, member in sorted(vars(base).items()):
                member = getattr(member, "__func__", getattr(member, "fget", member))
                if isinstance(member, types.FunctionType):
                    parts.append([name, _function(member, seen)])
                elif not name.startswith("__") and isinstance(member, (bool, int, float, str, tuple, list, dict)):
                    parts.append([name, plain(member)])
        elif base is not object:
            parts.append(f"{base.__module__}.{base.__qualname__}")
    return [kind.__qualname__, parts]


def _function(function: types.FunctionType, seen: set[int]) -> list:
    """A function's code, and what of the user's own it refers to by name."""
    seen.add(id(function))
    around: list = [plain(function.__defaults__), plain(function.__kwdefaults__)]
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    reached = {name: cell.cell_contents for name, cell in cells if _filled(cell)}
    reached |= {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
    for name, value in sorted(reached.items()):
        if id(value) in seen:
            continue
        if isinstance(value, types.FunctionType) and _is_own(value):
            around.append([name, _function(value, seen)])
        elif isinstance(value, type) and _is_own(value):
            around.append([name, _class(value, seen)])
        elif isinstance(value, (bool, int, float, str, tuple, list, dict)):
            around.append([name, plain(value)])
    return [plain(function.__code__), around]


def _names(code_object: types.CodeType) -> set[str]:
    inner = (const for const in code_object.co_consts if isinstance(const, types.CodeType))
    return set(code_object.co_names).union(*map(_names, inner))


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def own_modules(objects: Iterable[object]) -> list[types.ModuleType]:
    """The modules of the user's own that hold the classes of these objects: no other machine need have them."""
    kinds = {base for value in objects for base in type(value).__mro__ if _is_own(base)}
    names = {kind.__module__ for kind in kinds} - {"__main__", "builtins"}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


def _is_own(thing: type | types.FunctionType) -> bool:
    """Whether the user wrote it: it is neither of this package, nor of Python, nor installed."""
    top = (thing.__module__ or "builtins").partition(".")[0]
    if top == "builtins":  # also what was made by exec
        return getattr(builtins, thing.__qualname__, None) is not thing
    if top == "astrolabe_lab" or top in sys.stdlib_module_names - {"__main__"}:
        return False
    return top == "__main__" or not installed(thing.__module__)


def installed(module: str) -> bool:
    """Whether a module lies where packages are installed."""
    try:
        file = inspect.getsourcefile(importlib.import_module(module))
    except (ImportError, TypeError):
        return False
    places: Iterable[str] = [*site.getsitepackages(), site.getusersitepackages()]
    return file is not None and any(Path(file).is_relative_to(place) for place in places)
