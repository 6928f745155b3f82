"""What one step of the engine costs: a linear model in two regimes, and the presets fitted to real GPUs.

A step that only decodes and a step that also computes prompt tokens (mixed) have their own six coefficients:

    t = host_s + base_s + per_token_s * new_tokens + per_seq_s * sequences + per_kv_token_s * context_tokens
        + attention_s * attention

new_tokens are scheduled in the step, sequences are the requests scheduled, context_tokens were computed
before the step (summed over the scheduled requests), and attention is the sum of c * kv + c**2 / 2 over the
prefill chunks of c tokens on kv computed ones.
"""

import bisect
import json
import math
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path

import numpy as np

from astrolabe_lab.errors import InputError


@dataclass(frozen=True, slots=True)
class Regime:
    """The six coefficients of one regime, in seconds (per step, new token, request, token of context, pair).

    Raises InputError for a coefficient that is negative or not a finite number.
    """

    host_s: float = 0.0
    base_s: float = 0.0
    per_token_s: float = 0.0
    per_seq_s: float = 0.0
    per_kv_token_s: float = 0.0
    attention_s: float = 0.0

    def __post_init__(self):
        for key in KEYS:
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
                raise InputError(f"{key}={value!r} is not a number; give seconds, like 0.012 or 7e-7")
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{key}={value} is not allowed; give seconds, finite and not negative")
            object.__setattr__(self, key, float(value))


KEYS = tuple(f.name for f in fields(Regime))
REGIMES = ("decode", "mixed")


@dataclass(frozen=True, slots=True)
class Grid:
    """Seconds tabulated over new tokens (rows) and context tokens (columns) of a step; bilinear in between.

    Beyond its edges it keeps its value there. Raises InputError unless both axes rise, from 0 or above, and
    `seconds` has one finite value >= 0 for each of their pairs.
    """

    new_tokens: tuple[float, ...]
    context_tokens: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self):
        for name in ("new_tokens", "context_tokens"):
            axis = np.asarray(getattr(self, name), dtype=np.float64)
            rising = axis.ndim == 1 and len(axis) and np.isfinite(axis).all() and (np.diff(axis) > 0).all()
            if not rising or axis[0] < 0:
                raise InputError(f"grid: {name} must be rising finite numbers from 0 on, not {getattr(self, name)!r}")
            object.__setattr__(self, name, tuple(axis.tolist()))
        seconds = np.asarray(self.seconds, dtype=np.float64)
        shape = (len(self.new_tokens), len(self.context_tokens))
        if seconds.shape != shape or not (np.isfinite(seconds) & (seconds >= 0)).all():
            raise InputError(
                f"grid: seconds must be {shape[0]} rows of {shape[1]} finite numbers >= 0 (new_tokens x context_tokens)"
            )
        object.__setattr__(self, "seconds", tuple(map(tuple, seconds.tolist())))

    @property
    def array(self):
        """A new float64 array for the kernel: both axes' lengths, both axes, and the seconds row by row."""
        axes = self.new_tokens, self.context_tokens
        return np.concatenate([[len(axis) for axis in axes], *axes, np.ravel(self.seconds)])

    def at(self, new_tokens, context_tokens):
        """Seconds of a step, interpolated by the compiled engine's operations (equal to the last bit)."""
        i, right = _bracket(self.new_tokens, new_tokens)
        j, up = _bracket(self.context_tokens, context_tokens)
        low = self.seconds[i]
        high = self.seconds[min(i + 1, len(self.new_tokens) - 1)]
        above = min(j + 1, len(self.context_tokens) - 1)
        before = low[j] + right * (high[j] - low[j])
        after = low[above] + right * (high[above] - low[above])
        return before + up * (after - before)


def _bracket(axis, value):
    """(i, share): `value` lies between axis[i] and axis[i + 1], `share` of the way; at an end where outside."""
    if len(axis) == 1 or value <= axis[0]:
        return 0, 0.0
    if value >= axis[-1]:
        return len(axis) - 2, 1.0
    i = bisect.bisect_right(axis, value) - 1
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])


@dataclass(frozen=True, slots=True)
class StepCost:
    """The time of one engine step, in seconds; `decode` serves decode-only steps, `mixed` all others.

    `pad_sizes` (CUDA-graph batch sizes): a decode-only step of n sequences is priced as one of the next size up,
    in tokens and sequences, not in context; past the last size as it is. `decode_grid` and `mixed_grid` add what
    they tabulate to the linear model. `frontend_s` is what a token needs from the end of its step to the client;
    it delays no step. Raises InputError when steps take no time.
    """

    decode: Regime
    mixed: Regime
    pad_sizes: tuple[int, ...] = ()
    decode_grid: Grid | None = None
    mixed_grid: Grid | None = None
    frontend_s: float = 0.0

    def __post_init__(self):
        for regime in REGIMES:
            if not isinstance(value := getattr(self, regime), Regime):
                raise InputError(f"{regime}={value!r} is not a Regime; write {regime}=Regime(base_s=0.012)")
        sizes = tuple(self.pad_sizes)
        if any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1 for n in sizes) or any(
            b <= a for a, b in zip(sizes, sizes[1:], strict=False)
        ):
            raise InputError(f"pad_sizes={self.pad_sizes!r} must be rising whole numbers >= 1, like (1, 2, 4, 8)")
        object.__setattr__(self, "pad_sizes", tuple(map(int, sizes)))
        for name in ("decode_grid", "mixed_grid"):
            if not isinstance(grid := getattr(self, name), (Grid, type(None))):
                raise InputError(f"{name}={grid!r:.60} is not a Grid")
        Regime(base_s=self.frontend_s)  # a number of seconds
        if not any(self.array.flat) and not (self.decode_grid and self.mixed_grid):
            raise InputError(f"all step costs are 0, but a step must take time; set one of {', '.join(KEYS)}")

    @property
    def array(self):
        """A new float64 array (2, 6) for the kernel: row 0 decode-only, row 1 mixed, columns as `KEYS`."""
        return np.array([[getattr(getattr(self, regime), key) for key in KEYS] for regime in REGIMES])

    def step_seconds(self, new_tokens, sequences, context_tokens, attention=0.0, mixed=False):
        """Seconds of one step, added up in the compiled engine's order (equal to the last bit)."""
        r = self.mixed if mixed else self.decode
        if self.pad_sizes and not mixed:
            new_tokens = sequences = float(self.padded(sequences))
        seconds = (r.host_s + r.base_s + r.per_token_s * new_tokens + r.per_seq_s * sequences
                   + r.per_kv_token_s * context_tokens + r.attention_s * attention)
        grid = self.mixed_grid if mixed else self.decode_grid
        return seconds + grid.at(new_tokens, context_tokens) if grid else seconds

    def padded(self, sequences):
        """The size (float, or an array of them) that a decode-only step of so many sequences is priced as."""
        sizes = np.array([*self.pad_sizes, np.inf])
        size = sizes[np.searchsorted(sizes, sequences)]
        return np.where(np.isfinite(size), size, sequences)

    @classmethod
    def parse(cls, text, base=None):
        """The step cost written as "base_s=0.01,mixed.per_kv_token_s=1e-7".

        A bare key sets both regimes; `decode.KEY` and `mixed.KEY` set one and win over a bare key. Keys left
        out keep the value they have in `base` (a StepCost), or 0. Raises InputError for an unknown or
        repeated key or a value that is not a finite number of seconds.
        """
        pairs = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            key, equals, value = (s.strip() for s in part.partition("="))
            if not equals:
                raise InputError(f"cost {part!r} is not KEY=SECONDS; write for example base_s=0.012")
            if key in pairs:
                raise InputError(f"cost key {key!r} is given twice in {text!r}; give it once")
            try:
                pairs[key] = float(value)
            except ValueError:
                raise InputError(f"cost {part!r} is not a number; give seconds, like base_s=0.012") from None
        return cls._assemble(pairs, base)

    @classmethod
    def from_dict(cls, coefficients, base=None):
        """The step cost of {"decode": {KEY: seconds}, "mixed": {...}}; keys on the top level set both."""
        if not isinstance(coefficients, dict):
            raise InputError(f"a step cost is an object of {', '.join(KEYS)}, not {coefficients!r}")
        pairs = {}
        for key, value in coefficients.items():
            if key in REGIMES and isinstance(value, dict):
                pairs.update({f"{key}.{k}": v for k, v in value.items()})
            else:
                pairs[key] = value
        return cls._assemble(pairs, base)

    @classmethod
    def _assemble(cls, pairs, base):
        values = base.to_dict() if base is not None else {regime: {} for regime in REGIMES}
        for key, value in sorted(pairs.items(), key=lambda pair: "." in pair[0]):
            regime, dot, name = key.rpartition(".")
            if name not in KEYS or (dot and regime not in REGIMES):
                raise InputError(
                    f"unknown cost key {key!r}; allowed: {', '.join(KEYS)}, also as decode.KEY or mixed.KEY"
                )
            for target in (regime,) if dot else REGIMES:
                values[target][name] = value
        regimes = {regime: Regime(**values[regime]) for regime in REGIMES}
        return cls(**regimes) if base is None else replace(base, **regimes)

    def to_dict(self):
        """{"decode": {KEY: seconds}, "mixed": {...}} with all six keys, as `from_dict` reads it."""
        return {regime: {key: getattr(getattr(self, regime), key) for key in KEYS} for regime in REGIMES}

    def __str__(self):
        """The shortest text that `parse` reads back as this step cost."""
        parts = []
        for key in KEYS:
            decode, mixed = getattr(self.decode, key), getattr(self.mixed, key)
            if decode == mixed:
                parts += [f"{key}={decode!r}"] * (decode > 0)
            else:
                parts += [f"{r}.{key}={v!r}" for r, v in zip(REGIMES, (decode, mixed), strict=True) if v > 0]
        return ",".join(parts)


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
    """The preset of that name, or the one in a JSON file when `name` is a path ending in .json.

    Raises InputError for an unknown name (listing the known), a missing file, or a file that is not a preset.
    """
    known = ", ".join(presets())
    own = str(name).endswith(".json")
    if not own and name not in presets():
        raise InputError(f"unknown preset {name!r}; known: {known}, or give the path of a JSON file")
    path = Path(name) if own else _shipped() / f"{name}.json"
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"preset file {str(name)!r}: {error.strerror}; known presets: {known}") from None
    except ValueError as error:
        raise InputError(f"preset file {str(name)!r} is not JSON ({error}); see Preset.to_dict()") from None
    return Preset.from_dict(entries, name=Path(name).stem if own else name)


def _shipped():
    return resources.files("astrolabe_lab") / "presets"
