"""What an emulated engine is told: step cost, time scale, disturbances. No vLLM is imported here."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

from astrolabe_lab.cost import StepCost
from astrolabe_lab.errors import InputError
from astrolabe_lab.text_files import json_object

KEY = "astrolabe"  # in vLLM's additional_config
FOR_THE_SCHEDULER = ("status", "steps", "facts")  # entries beside ours


@dataclass(frozen=True, slots=True)
class Emulation:
    """``cost``: the step cost; ``time_scale``: wall seconds per modelled second; ``control``: path of a file that
    disturbs a running engine (``disturb``); ``pace``: path of the file that tells whether the host keeps up
    (``pace.read_pace``); ``seed``: of the jitter."""

    cost: StepCost
    time_scale: float = 1.0
    async_scheduling: bool = False
    control: str = ""
    pace: str = ""
    seed: int = 0

    def __post_init__(self):
        if not isinstance(self.time_scale, (int, float)) or not 0 < self.time_scale < math.inf:
            raise InputError(f"time_scale={self.time_scale!r} must be a number > 0: wall seconds per modelled second")

    @classmethod
    def of(cls, additional_config) -> Emulation:
        """The emulation in vLLM's ``additional_config``. Raises InputError where it has none, or a wrong one."""
        entries = additional_config.get(KEY) if isinstance(additional_config, dict) else None
        if not isinstance(entries, dict) or "cost" not in entries:
            raise InputError(f'--additional-config must hold {{"{KEY}": {{"cost": {{...}}}}}}')
        known = [f.name for f in fields(cls)]
        entries = {k: v for k, v in entries.items() if k not in FOR_THE_SCHEDULER}
        if unknown := sorted(set(entries) - set(known)):
            raise InputError(f"--additional-config {KEY}: unknown {', '.join(unknown)}; allowed: {', '.join(known)}")
        return cls(**{**entries, "cost": StepCost.from_dict(entries["cost"])})

    def additional_config(self, **others) -> dict:
        """The value of vLLM's ``--additional-config``; ``others`` join under the same key."""
        entries = {f.name: getattr(self, f.name) for f in fields(self)} | {"cost": self.cost.to_dict()}
        return {KEY: entries | others}


@dataclass(frozen=True, slots=True)
class Disturbed:
    """How a running engine departs from its step cost: every step takes ``slowdown`` times as long, times a normal
    variate with standard deviation ``jitter`` around 1; ``stalled``: no step ends."""

    slowdown: float = 1.0
    jitter: float = 0.0
    stalled: bool = False

    def __post_init__(self):
        for name in ("slowdown", "jitter"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e6:
                raise InputError(f"{name}={value!r} must be a number from 0 to a million")
        if not isinstance(self.stalled, bool):
            raise InputError(f"stalled={self.stalled!r} must be true or false")


def disturb(control: str | Path, **changes) -> Disturbed:
    """Set slowdown, jitter, stalled of the engine that reads ``control``; what is not named keeps its value."""
    path = Path(control)
    try:
        disturbed = replace(Disturbance(str(path)).now(), **changes)
    except TypeError:
        allowed = ", ".join(f.name for f in fields(Disturbed))
        raise InputError(f"unknown {', '.join(changes)}; an engine can be disturbed by {allowed}") from None
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps({f.name: getattr(disturbed, f.name) for f in fields(disturbed)}))
    temporary.replace(path)
    return disturbed


class Disturbance:
    """Reads the control file, only when it has changed."""

    def __init__(self, control: str):
        self._path = control
        self._seen = None
        self._now = Disturbed()

    def now(self) -> Disturbed:
        if not self._path:
            return self._now
        try:
            stat = os.stat(self._path)
        except OSError:
            return self._now
        seen = (stat.st_mtime_ns, stat.st_ino)
        if seen != self._seen:
            self._seen = seen
            try:
                self._now = Disturbed(**json_object(self._path, "this disturbance"))
            except (OSError, ValueError, TypeError) as error:  # an InputError is a ValueError
                print(f"{self._path} disturbs nothing ({error}): what was set stays", file=sys.stderr, flush=True)
        return self._now
