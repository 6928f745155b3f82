"""The parameters of a notebook: what its tagged cell holds, and values for them checked against that."""

import ast
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from astrolabe_lab.errors import InputError


def notebook_parameters(path: str | Path) -> dict[str, object]:
    """The names and default values of a notebook's parameters, in their order; empty if it has no such cell.

    Read by Python's own parser: papermill's `inspect_notebook` passes over a line such as `k: str =
    "a:b=2"`. Raises InputError for a file that is no notebook, or a cell that holds more than names set to
    plain values (numbers, strings, booleans, lists and None).
    """
    import nbformat

    path = Path(path)
    if not path.is_file():
        raise InputError(f"notebook {path} does not exist{_nearby(path)}")
    try:
        cells = nbformat.read(path, as_version=4).cells
    except Exception as error:  # nbformat raises whatever its JSON or schema reader does
        raise InputError(f"{path} is not a Jupyter notebook: {error}") from None
    tagged = [cell.source for cell in cells if "parameters" in _tags(cell)]
    values = {}
    for source in tagged[:1]:
        for line in _statements(source, path):
            try:
                match line:
                    case ast.Assign(targets=[ast.Name(id=name)], value=value):
                        values[name] = _plain(ast.literal_eval(value))
                    case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                        values[name] = _plain(ast.literal_eval(value))
                    case _:
                        _fail()
            except (ValueError, TypeError):
                raise InputError(
                    f"{path}: the parameters cell holds `{ast.unparse(line)}`; it takes names set to numbers, "
                    "strings, booleans, lists or None, with nothing derived"
                ) from None
    return values


def _tags(cell) -> list:
    tags = cell.metadata.get("tags")
    return tags if isinstance(tags, list) else []


def _statements(source: str, path: Path) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except SyntaxError as error:
        raise InputError(f"{path}: the parameters cell is not Python: {error}") from None


def parse_parameters(path: str | Path, given: Mapping[str, object] | Iterable[str]) -> dict[str, object]:
    """The parameters to give to the notebook at `path`, from `key=value` strings or a mapping, checked.

    A string takes the type of the notebook's default: `x=007` stays "007" where the default is a string and
    is 7 where it is an integer. Lists are JSON or comma-separated. Raises InputError as `run_notebook` does.
    """
    return matched(notebook_parameters(path), given, Path(path).name)


def matched(
    allowed: Mapping[str, object], given: Mapping[str, object] | Iterable[str], notebook: str
) -> dict[str, object]:
    """`given` as `parse_parameters` takes it, checked against the defaults `allowed` of `notebook`."""
    pairs = list(given.items()) if isinstance(given, Mapping) else [_split(text) for text in given]
    values = {}
    for name, value in pairs:
        if name not in allowed:
            known = ", ".join(allowed) or "none"
            raise InputError(f"{notebook} has no parameter {name!r}; its parameters are: {known}")
        if name in values:
            raise InputError(f"parameter {name!r} is given twice: give it once")
        read = _read if not isinstance(given, Mapping) else _matching
        try:
            values[name] = read(value, allowed[name])
        except (ValueError, TypeError, RecursionError):
            wanted = _wanted(allowed[name])
            shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
            raise InputError(f"parameter {name}={shown} should be {wanted}, as {allowed[name]!r} is") from None
    return values


def _split(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise InputError(f"parameter {text!r} is not of the form key=value, e.g. seed=1")
    return name, value


def _read(text: str, default: object) -> object:
    """`text` as a value of the default's type; raises ValueError."""
    if isinstance(default, bool):
        return {"true": True, "false": False}.get(text.lower()) if text.lower() in ("true", "false") else _fail()
    if isinstance(default, (int, float)):
        return _matching(type(default)(text), default)
    if isinstance(default, str):
        return _plain(text)
    if isinstance(default, list):
        if text.lstrip().startswith("["):
            return _matching(json.loads(text), default)
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return [_read(part, default[0]) if default else _json_or_text(part) for part in parts]
    return _json_or_text(text)  # the default is None and says nothing of the type


def _matching(value: object, default: object) -> object:
    """`value` if it could stand where `default` does; raises ValueError."""
    value = _plain(value)
    if default is None or value is None:
        return value if default is None else _fail()
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        _fail()
    if isinstance(value, list) and default:
        return [_matching(item, default[0]) for item in value]
    return value


def _plain(value: object) -> object:
    """`value` if it is one that papermill can write into a notebook unchanged; raises ValueError."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        value.encode()  # half a character, as a shell can pass, cannot be written: a ValueError
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return _fail()


def _json_or_text(text: str) -> object:
    try:
        return _plain(json.loads(text))
    except (ValueError, RecursionError):
        return _plain(text)


def _wanted(default: object) -> str:
    words = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a string"}
    if isinstance(default, list):
        return f"a list, each entry {_wanted(default[0])}," if default else "a list"
    return words.get(type(default), "a number, string, boolean or list")


def _fail() -> object:
    raise ValueError


def _nearby(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path("notebooks")
    names = sorted(str(found) for found in folder.glob("*.ipynb"))
    return f"; there are: {', '.join(names)}" if names else ""
