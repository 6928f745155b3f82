"""A grid: which runs a sweep makes, written in Python or in a GRID.yaml.

    defaults:                              # the same for every run
      trace: sharegpt_like
      requests: 10000
      lengths: noisy:0.25
      engine: {scheduler: v0_chunked}
    grid:                                  # every combination of these
      policy: [random, least_loaded, "astrolabe:k=2"]
      qps: {from: 20, to: 36, step: 1}
      seed: [0, 1, 2]
    zip:                                   # lists of one length, walked in step, times the grid
      engine.max_num_seqs: [24, 48]
      engine.max_num_batched_tokens: [256, 512]
    cells:                                 # the same, written run by run
      - {label: two drawn, policy.k: 2}
      - {label: four drawn, policy.k: 4}
    exclude:                               # leave out the runs that have all of these values
      - {policy: random, qps: [35, 36]}

All sections are optional, `cells` alone lists runs one by one. The keys are those of `keys`.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from astrolabe_lab.errors import InputError

from . import keys
from .cell import Cell

SECTIONS = ("defaults", "grid", "zip", "cells", "exclude")
RANGE = ("from", "to", "step")
TOLD_ANYWAY = ("policy", "label", "qps", "seed")  # have columns of their own
MOST = 1_000_000  # runs
LISTED = 20  # values of an axis in an error


@dataclass(frozen=True)
class Grid:
    """The runs of a sweep: `len(grid)` of them, `grid.cells()` in order; the first axis turns slowest.

    `axes`: each a list of points, a point the settings that it makes. `folder`: where relative paths of traces start
    (default: the working folder). Raises InputError for what is not allowed, before anything runs.
    """

    axes: Sequence[Sequence[Mapping[str, object]]]
    defaults: Mapping[str, object] = field(default_factory=dict)
    exclude: Sequence[Mapping[str, object]] = ()
    folder: Path | None = None
    written: Mapping[str, object] | None = None  # as its author wrote it

    @classmethod
    def given(cls, grid: Grid | Mapping[str, object] | str | Path) -> Grid:
        """The grid, whichever way it is given: as one, as `of` takes it, or as a file."""
        return grid if isinstance(grid, cls) else cls.of(grid) if isinstance(grid, Mapping) else cls.load(grid)

    @classmethod
    def load(cls, path: str | Path) -> Grid:
        """The grid in a YAML (or JSON) file. Raises InputError naming the file."""
        from .yaml_file import read

        path = Path(path)
        try:
            return cls.of(read(path), path.parent)
        except InputError as error:
            message = str(error)
            raise InputError(message if message.startswith(str(path)) else f"{path}: {message}") from None

    @classmethod
    def of(cls, written: Mapping[str, object], folder: str | Path | None = None) -> Grid:
        """The grid of a mapping with the sections of a GRID.yaml; values may also be Python objects."""
        if not isinstance(written, Mapping):
            raise InputError(f"a grid is a mapping of {', '.join(SECTIONS)}, not {type(written).__name__}")
        for name in written:
            if name not in SECTIONS:
                raise InputError(_stray_section(name))
        defaults = keys.flat(_mapping("defaults", written.get("defaults")), "defaults")
        axes = [
            [{key: value} for value in _values(f"grid.{key}", values)]
            for key, values in _mapping("grid", written.get("grid")).items()
        ]
        zips = written.get("zip") or []
        axes += [_steps(one) for one in ([zips] if isinstance(zips, Mapping) else _list("zip", zips))]
        if (cells := written.get("cells")) is not None:
            axes.append([_mapping("cells", cell) for cell in _list("cells", cells)])
        rules = [_mapping("exclude", rule) for rule in _list("exclude", written.get("exclude") or [])]
        exclude = [{key: _wanted(key, values) for key, values in rule.items()} for rule in rules]
        grid = cls(axes, defaults, exclude, Path(folder) if folder is not None else None, written)
        grid.check()
        return grid

    def check(self) -> None:
        """Raise InputError for an axis without points or with the same point twice, keys of two axes, or an exclude
        rule that leaves nothing out."""
        seen: dict[str, int] = {}
        for number, axis in enumerate(self.axes):
            name = ", ".join(dict.fromkeys(key for point in axis for key in point)) or "an axis"
            if not axis:
                raise InputError("an axis of the grid is empty: a sweep needs at least one value of each")
            for point in axis:
                for key in keys.flat(point, "grid"):
                    if seen.setdefault(key, number) != number:
                        raise InputError(f"{key} is in two axes of the grid (grid, zip or cells): keep it in one")
            if repeated := {_shown(point) for point in _repeated(axis)}:
                raise InputError(f"{name} holds {', '.join(sorted(repeated))} more than once: label each or drop it")
        for rule in self.exclude:
            keys.flat(rule, "exclude")
            if stray := sorted(set(rule) - {key for axis in self.axes for point in axis for key in point}):
                raise InputError(f"exclude: {', '.join(stray)} is on no axis, so there is nothing to leave out")
            for axis in self.axes:
                _check_excludes(rule, axis)
        if (total := math.prod(map(len, self.axes))) > MOST:
            raise InputError(f"the grid has {total:,} runs, more than the {MOST:,} allowed: split it")
        if not len(self):
            raise InputError("exclude leaves no run of the grid")

    def points(self) -> Iterator[dict[str, object]]:
        """The settings of each run that its axes make, without the defaults."""
        for combination in itertools.product(*self.axes):
            point = {key: value for part in combination for key, value in part.items()}
            if not any(all(_matches(point.get(key), want) for key, want in rule.items()) for rule in self.exclude):
                yield point

    def cells(self) -> list[Cell]:
        """The runs, in order."""
        return [Cell({**self.defaults, **keys.flat(point, "grid")}, _columns(point)) for point in self.points()]

    def __len__(self) -> int:
        return sum(1 for _ in self.points()) if self.exclude else math.prod(map(len, self.axes))


def _repeated(axis: Sequence[Mapping[str, object]]) -> Iterator[Mapping[str, object]]:
    """The points that stand there before; an axis may have a million."""
    hashed: set[tuple] = set()
    others: list[Mapping[str, object]] = []  # lists, policy objects that define equality, ...: compared one by one
    for point in axis:
        try:
            known = (key := tuple(sorted(point.items(), key=lambda item: item[0]))) in hashed
            hashed.add(key)
        except TypeError:
            known = point in others
            others.append(point)
        if known:
            yield point


def _columns(point: Mapping[str, object]) -> dict[str, object]:
    """The settings that vary, as values of a frame's columns."""
    told = {key: value for key, value in point.items() if key not in TOLD_ANYWAY}
    return {key: value if isinstance(value, (bool, int, float, str)) else _text(value) for key, value in told.items()}


def _text(value: object) -> str | None:
    if value is None:
        return None
    try:
        return json.dumps(value, default=str)
    except (TypeError, ValueError):
        return str(value)


def _shown(point: Mapping[str, object]) -> str:
    return ", ".join(str(value) for value in point.values())


def _matches(value: object, wanted: object) -> bool:
    return value in wanted if isinstance(wanted, list) else value == wanted


def _wanted(key: str, values: object) -> object:
    """The value, or list of values, that a rule leaves out."""
    if isinstance(values, Mapping):
        return _values(f"exclude.{key}", values) if set(values) == set(RANGE) else values
    return list(values) if isinstance(values, (tuple, range)) else values


def _check_excludes(rule: Mapping[str, object], axis: Sequence[Mapping[str, object]]) -> None:
    """Raise InputError where no point of the axis has a value that the rule names, or all that it asks of one."""
    if [] in rule.values():  # asks for nothing, as a list that a program made may
        return
    here = {key: want for key, want in rule.items() if any(key in point for point in axis)}
    for key, want in here.items():
        there = [point[key] for point in axis if key in point]
        for value in want if isinstance(want, list) else [want]:
            if value not in there:
                some = ", ".join(map(str, there[:LISTED])) + ", ..." * (len(there) > LISTED)
                raise InputError(f"exclude: {key} {value!r} is not on its axis, which has {some}")
    if here and not any(all(_matches(point.get(key), want) for key, want in here.items()) for point in axis):
        raise InputError(f"exclude: no point of the axis has {here!r}, so there is nothing to leave out")


def _mapping(name: str, value: object) -> dict:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f"{name}: {value!r} should be a mapping, key: value")
    return dict(value)


def _list(name: str, value: object) -> list:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InputError(f"{name}: {value!r} should be a list")
    return list(value)


def _steps(columns: object) -> list[dict[str, object]]:
    """The points of a section `zip`."""
    lists = {key: _values(f"zip.{key}", values) for key, values in _mapping("zip", columns).items()}
    if len({len(values) for values in lists.values()}) > 1:
        sizes = ", ".join(f"{key} has {len(values)}" for key, values in lists.items())
        raise InputError(f"zip: the lists are walked in step and must be of one length, but {sizes}")
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def _values(name: str, values: object) -> list:
    """A list of values, also written {from: 20, to: 36, step: 1}, both ends included."""
    if not isinstance(values, Mapping):
        if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
            raise InputError(f"{name}: {values!r} should be a list, e.g. [{values!r}]")
        return list(values)
    if set(values) != set(RANGE):
        raise InputError(f"{name}: {dict(values)!r} should be a list, or {{from: 20, to: 36, step: 1}}")
    low, high, step = (values[part] for part in RANGE)
    if not all(isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) for x in (low, high, step)):
        raise InputError(f"{name}: from, to and step are numbers, not {dict(values)!r}")
    if step <= 0 or high < low or (high - low) / step > MOST:
        raise InputError(f"{name}: {dict(values)!r} has no end, or none that is worth its runs: from <= to, step > 0")
    count = int((high - low) / step + 1e-9) + 1
    exact = all(isinstance(x, int) for x in (low, step))
    return [low + i * step if exact else round(low + i * step, 12) for i in range(count)]


def _stray_section(name: object) -> str:
    close = difflib.get_close_matches(str(name), SECTIONS, n=1)
    if not close and name in keys.PLAIN:
        return f"{name!r} belongs under defaults (one value) or grid (a list); the sections are {', '.join(SECTIONS)}"
    meant = f". Did you mean {close[0]}?" if close else ""
    return f"unknown section {name!r}; allowed are {', '.join(SECTIONS)}{meant}"
