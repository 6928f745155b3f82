"""Step costs and the presets that come with the package.

A preset is a step cost with the engine it belongs to, where it comes from and how far it can be trusted.
"""

from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path

from astrolabe_lab.cost.grid import Grid, tabulate
from astrolabe_lab.cost.step_cost import COUNTS, KEYS, REGIMES, RangeWarning, Regime, StepCost, warn_outside
from astrolabe_lab.errors import InputError
from astrolabe_lab.text_files import json_object

__all__ = [
    "COUNTS", "KEYS", "REGIMES", "Grid", "Preset", "RangeWarning", "Regime", "StepCost", "preset", "presets",
    "tabulate", "warn_outside",
]  # fmt: skip


CALIBRATION = "astrolabe calibration"  # the kind that a calibration's file says it is


@dataclass(frozen=True)
class Preset:
    """A step cost with the engine it belongs to and everything one must know to trust it.

    engine holds vLLM's own engine keys; source, derivation (by coefficient) and error say what it was fitted
    on, what was derived rather than measured, and how far the fit is from the timings; date is when it was
    fitted.
    """

    name: str
    cost: StepCost
    engine: dict = field(default_factory=dict)
    model: str = ""
    device: str = ""
    date: str = ""
    source: str = ""
    derivation: dict = field(default_factory=dict)
    error: dict = field(default_factory=dict)

    @classmethod
    def from_dict(cls, entries, name):
        """The preset of a parsed JSON object; `name` where it has none. Raises InputError for other keys."""
        allowed = [f.name for f in fields(cls)]
        if not isinstance(entries, dict) or "cost" not in entries:
            raise InputError(f'preset {name!r} has no "cost"; a preset is an object of {", ".join(allowed)}')
        if unknown := sorted(set(entries) - set(allowed)):
            raise InputError(f"preset {name!r}: unknown {', '.join(unknown)}; allowed: {', '.join(allowed)}")
        for key in ("engine", "derivation", "error"):
            if not isinstance(value := entries.get(key, {}), dict):
                raise InputError(f"preset {name!r}: {key} is {value!r}; it must be a JSON object")
        return cls(**{"name": name, **entries, "cost": StepCost.from_dict(entries["cost"])})

    def to_dict(self):
        """The JSON object that `from_dict` reads back."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"cost": self.cost.to_dict()}


def presets():
    """The names of the presets that come with the package, sorted."""
    return sorted(p.name.removesuffix(".json") for p in _shipped().iterdir() if p.name.endswith(".json"))


def preset(name):
    """The preset of that name, or the one in a JSON file when `name` is a path ending in .json: a preset, or a
    calibration.

    Raises InputError for an unknown name (listing the known), a missing file, or a file that is not a preset.
    """
    known = ", ".join(presets())
    own = str(name).endswith(".json")
    if not own and name not in presets():
        raise InputError(f"unknown preset {name!r}; known: {known}, or give the path of a JSON file")
    path = Path(name) if own else _shipped() / f"{name}.json"
    entries = json_object(path, "this preset", f"; known presets: {known}")
    if own and entries.get("kind") == CALIBRATION:
        from astrolabe_lab.calibrate.artifact import Calibration

        return Calibration.from_dict(entries, str(name)).preset()
    return Preset.from_dict(entries, name=Path(name).stem if own else name)


def _shipped():
    return resources.files("astrolabe_lab") / "presets"
