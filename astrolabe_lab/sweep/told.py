"""What a value is told as, so that two that are told alike compute alike: numbers, objects, and code of the user's own.

Code is followed through every name that it uses, up to what is Python's, an installed package's or this package's:
that is told by its name alone.
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import dis
import functools
import hashlib
import importlib
import json
import math
import operator
import site
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath

from astrolabe_lab.errors import InputError

PLAIN = (bool, str, int, float, bytes, list, tuple, dict, set, frozenset)
# Of a class, what its slots and its abstract methods leave in it: no code, and no state of its own.
TRACES = (types.MemberDescriptorType, types.GetSetDescriptorType)
ABSTRACT = "_abc_impl"
WRITTEN = 1 << 9  # the flag of a class that was made by a class statement; most of those written in C lack it

Seen = dict[object, tuple[int, object]]  # by id: its number, and itself, so that no other object gets that id


def plain(value: object, seen: Seen | None = None) -> object:
    """`value` in JSON's types, so that equal ones, and only those, look equal.

    `seen` are the objects told so far: one that comes again, also within itself, is told as its number. Raises
    InputError for an object that cannot be told from others of its kind, such as a lock or an open file.
    """
    seen = {} if seen is None else seen
    if value is None or isinstance(value, (bool, types.EllipsisType, complex)):
        return value if isinstance(value, bool) or value is None else repr(value)
    if type(value) not in PLAIN and is_own(type(value)):
        return _object(value, seen)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return plain(value.item(), seen)
    if isinstance(value, (int, float)):
        if isinstance(value, int) or math.isfinite(value):
            return int(value) if value == int(value) else value  # 5 and 5.0 are one rate
        return repr(value)
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {str(key): plain(item, seen) for key, item in value.items()}
        return sorted(([plain(key, seen), plain(item, seen)] for key, item in value.items()), key=json.dumps)
    if isinstance(value, (list, tuple)):
        return [plain(item, seen) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item, seen) for item in value), key=json.dumps)
    return _object(value, seen)


def _object(value: object, seen: Seen) -> object:
    kind = type(value)
    if isinstance(value, types.ModuleType):
        return _module(value, set(), seen)
    if name := _imported_as(value):
        return {"name": name}
    if isinstance(value, type) and not is_own(value):
        return {"name": f"{value.__module__}.{value.__qualname__}"}
    if kind.__module__.startswith("astrolabe_lab.") and dataclasses.is_dataclass(value):
        held = {field.name: plain(getattr(value, field.name), seen) for field in dataclasses.fields(value)}
        return {"class": kind.__qualname__} | held
    if isinstance(value, PurePath):  # its slots also hold what it has been asked for
        return {"path": str(value)}
    if isinstance(value, types.CodeType):
        names = [list(value.co_names), list(value.co_varnames)]
        return [value.co_code.hex(), *names, [plain(const, seen) for const in value.co_consts]]
    if id(value) in seen:
        return {"seen": seen[id(value)][0]}
    seen[id(value)] = len(seen), value
    if isinstance(value, types.FunctionType):
        return {"function": _function(value, seen)}
    if isinstance(value, type):
        return {"class": _class(value, seen)}
    if kind.__module__.startswith("numba."):
        jitted = getattr(value, "py_func", None) or getattr(value, "__wrapped__", None)
        if isinstance(jitted, types.FunctionType):
            return {"jitted": [plain(jitted, seen), plain(value.targetoptions, seen)]}
    if isinstance(value, functools._lru_cache_wrapper):
        return {"cached": plain(value.__wrapped__, seen)}
    return {"made": _made(value, seen)}


def _made(value: object, seen: Seen) -> list:
    """What `value` would be made of again: the class or function that makes it, and what that is given."""
    kind = type(value)
    try:
        made = copyreg.dispatch_table[kind](value) if kind in copyreg.dispatch_table else value.__reduce_ex__(2)
    except Exception:
        made = None
    if not isinstance(made, tuple):
        raise InputError(
            f"{value!r} cannot be told from others of its kind, so results with it cannot be stored: leave `out` out, "
            "or let policies hold and use numbers, strings, lists, functions and objects of your own classes only"
        )
    return [plain(part, seen) for part in made]


def _class(kind: type, seen: Seen) -> list:
    """The code of a class of the user's own and of those it stands on."""
    parts: list = []
    for base in kind.__mro__:
        if base is not kind and not is_own(base):
            parts.append(f"{base.__module__}.{base.__qualname__}")
            continue
        for name, member in sorted(vars(base).items()):
            if isinstance(member, property):
                parts.append([name, [plain(one, seen) for one in (member.fget, member.fset, member.fdel)]])
            elif isinstance(member, functools.cached_property):
                parts.append([name, plain(member.func, seen)])
            elif isinstance(member, (staticmethod, classmethod)):
                parts.append([name, type(member).__name__, plain(member.__func__, seen)])
            elif isinstance(member, types.FunctionType) or not (name.startswith("__") or name == ABSTRACT):
                if not isinstance(member, TRACES):
                    parts.append([name, plain(member, seen)])
    return [kind.__qualname__, parts]


def _function(function: types.FunctionType, seen: Seen) -> list:
    """A function's code, and what it refers to by name."""
    code_object, names, steps = function.__code__, _names(function.__code__), _steps(function.__code__)
    cells = zip(code_object.co_freevars, function.__closure__ or (), strict=False)
    reached = {name: cell.cell_contents for name, cell in cells if _filled(cell)}
    around = function.__globals__
    if _own_module(around.get("__name__")):
        used = {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        reached |= {name: around[name] for name in used if name in around}
        reached |= _imported(steps, around.get("__package__"))
    told = [plain(code_object, seen), plain(function.__defaults__, seen), plain(function.__kwdefaults__, seen)]
    told.append([[name, _named(value, names, seen)] for name, value in sorted(reached.items())])
    return [*told, plain(vars(function), seen)]


def _named(value: object, names: set[str], seen: Seen) -> object:
    """A value that code with these names in it uses; of a module, what the code may ask it for."""
    return _module(value, names, seen) if isinstance(value, types.ModuleType) else plain(value, seen)


def _module(module: types.ModuleType, names: set[str], seen: Seen) -> object:
    """A module of the user's own: its file, those of the modules it uses, and what it has under these names."""
    if not _own_module(module.__name__):
        return {"module": module.__name__}
    files = [
        hashlib.sha256(Path(one.__file__).read_bytes()).hexdigest()
        for one in _family(module)
        if getattr(one, "__file__", None) and Path(one.__file__).is_file()
    ]
    held = {}
    if (id(module), *sorted(names)) not in seen:
        seen[id(module), *sorted(names)] = len(seen), module
        held = {name: vars(module)[name] for name in sorted(names) if name in vars(module)}
    return {"module": module.__name__, "files": files, "has": {n: _named(v, names, seen) for n, v in held.items()}}


def _family(module: types.ModuleType) -> list[types.ModuleType]:
    """A module of the user's own and all those that it uses, in order of their names."""
    family, todo = {}, [module]
    while todo:
        one = todo.pop()
        if family.setdefault(one.__name__, one) is one:
            for value in vars(one).values():
                home = value if isinstance(value, types.ModuleType) else _home(value)
                if home is not None and home.__name__ not in family and _own_module(home.__name__):
                    todo.append(home)
    return [family[name] for name in sorted(family)]


def _home(value: object) -> types.ModuleType | None:
    """The module that a function or class is of."""
    if isinstance(value, (types.FunctionType, type)) and value.__module__ != "__main__":
        return sys.modules.get(value.__module__)
    return None


def _names(code_object: types.CodeType) -> set[str]:
    """The names in a function's code, those of attributes too."""
    return set(code_object.co_names).union(*map(_names, _inner(code_object)))


def _steps(code_object: types.CodeType) -> list[dis.Instruction]:
    """The instructions of a function's code, then those of the functions in it."""
    steps = [step for step in dis.get_instructions(code_object) if step.opname != "EXTENDED_ARG"]
    return sum(map(_steps, _inner(code_object)), steps)


def _inner(code_object: types.CodeType) -> list[types.CodeType]:
    return [const for const in code_object.co_consts if isinstance(const, types.CodeType)]


def _imported(steps: list[dis.Instruction], package: str | None) -> dict[str, types.ModuleType]:
    """The modules that these instructions import, by name; those that are not there are left out."""
    found = {}
    for level, _, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname == "IMPORT_NAME":
            name = "." * level.argval + step.argval
            with contextlib.suppress(ImportError):
                found[f"import {name}"] = importlib.import_module(name, package)
    return found


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


# --- whose it is ------------------------------------------------------------------------------------------


def is_own(kind: type) -> bool:
    """Whether the user wrote a class: nothing that is Python's, installed or of this package has it by its name."""
    return bool(kind.__flags__ & WRITTEN) and _imported_as(kind) is None


def own_modules(objects: Iterable[object]) -> list[types.ModuleType]:
    """The modules of the user's own that hold the classes of these objects: no other machine need have them."""
    kinds = {base for value in objects for base in type(value).__mro__ if is_own(base)}
    names = {kind.__module__ for kind in kinds} - {"__main__", "builtins"}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


def _imported_as(value: object) -> str | None:
    """The name by which Python, this package or an installed one has `value`, if one does."""
    module = getattr(value, "__module__", None) or type(value).__module__
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str) or _own_module(module):
        return None
    try:
        found = operator.attrgetter(name)(sys.modules[module])
    except (KeyError, AttributeError):
        return None
    return f"{module}.{name}" if found is value else None


def _own_module(name: str | None) -> bool:
    top = (name or "__main__").partition(".")[0]
    if top == "__main__":
        return True
    return top != "astrolabe_lab" and top not in sys.stdlib_module_names and not installed(name)


def installed(module: str) -> bool:
    """Whether a module lies where packages are installed."""
    try:
        found = importlib.import_module(module)
    except ImportError:
        return False
    file = getattr(found, "__file__", None) or next(iter(getattr(found, "__path__", ())), None)
    places: Iterable[str] = [*site.getsitepackages(), site.getusersitepackages()]
    return file is not None and any(Path(file).is_relative_to(place) for place in places)
