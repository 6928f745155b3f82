"""What one step of the engine costs: a linear model in two regimes, with what does not fit it in tables.

A step that only decodes and a step that also computes prompt tokens (mixed) have their own six coefficients:

    t = host_s + base_s + per_token_s * new_tokens + per_seq_s * sequences + per_kv_token_s * context_tokens
        + attention_s * attention [+ grid(new_tokens, context_tokens)]

new_tokens are scheduled in the step, sequences are the requests scheduled, context_tokens were computed
before the step (summed over the scheduled requests), and attention is the sum of c * kv + c**2 / 2 over the
prefill chunks of c tokens on kv computed ones.
"""

import math
import warnings
from dataclasses import dataclass, field, fields, replace

import numpy as np

from astrolabe_lab.cost.grid import Grid
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
GRIDS = ("decode_grid", "mixed_grid")
COUNTS = ("new_tokens", "sequences", "context_tokens", "attention")  # what the last four coefficients are prices of


class RangeWarning(UserWarning):
    """A step cost is used where nothing was measured."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """The time of one engine step, in seconds; `decode` serves decode-only steps, `mixed` all others.

    `pad_sizes` (CUDA-graph batch sizes): a decode-only step of n sequences is priced as one of the next size up,
    in tokens and sequences, not in context; past the last size as it is. `decode_grid` and `mixed_grid` add what
    they tabulate to the linear model. `frontend_s` is what a token needs from the end of its step to the client;
    it delays no step. `fitted` is where the cost was measured, {regime: {count: (lowest, highest)}}; it changes no
    price. Raises InputError when steps take no time.
    """

    decode: Regime
    mixed: Regime
    pad_sizes: tuple[int, ...] = ()
    decode_grid: Grid | None = None
    mixed_grid: Grid | None = None
    frontend_s: float = 0.0
    fitted: dict = field(default_factory=dict, compare=False, repr=False)

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
        for name in GRIDS:
            if not isinstance(grid := getattr(self, name), (Grid, type(None))):
                raise InputError(f"{name}={grid!r:.60} is not a Grid")
        try:
            object.__setattr__(self, "frontend_s", Regime(base_s=self.frontend_s).base_s)
        except InputError as error:
            raise InputError(str(error).replace("base_s", "frontend_s", 1)) from None
        object.__setattr__(self, "fitted", _check_fitted(self.fitted))
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
        seconds = (
            r.host_s
            + r.base_s
            + r.per_token_s * new_tokens
            + r.per_seq_s * sequences
            + r.per_kv_token_s * context_tokens
            + r.attention_s * attention
        )
        grid = self.mixed_grid if mixed else self.decode_grid
        return seconds + grid.at(new_tokens, context_tokens) if grid else seconds

    def padded(self, sequences):
        """The size (float, or an array of them) that a decode-only step of so many sequences is priced as."""
        sizes = np.array([*self.pad_sizes, np.inf])
        size = sizes[np.searchsorted(sizes, sequences)]
        return np.where(np.isfinite(size), size, sequences)

    def outside(self, engine):
        """Sentences on what steps of an EngineConfig may reach by 10 % beyond the range measured; often none."""
        most = {
            "decode": {"sequences": engine.max_num_seqs},
            "mixed": {"new_tokens": engine.max_num_batched_tokens, "sequences": engine.max_num_seqs},
        }
        context = min(engine.num_gpu_blocks * engine.block_size, engine.max_num_seqs * engine.max_model_len)
        return [
            f"{regime} steps may have {reached:,} {count.replace('_', ' ')}; the step cost was measured up to {high:g}"
            for regime in REGIMES
            for count, reached in (most[regime] | {"context_tokens": context}).items()
            if reached > 1.1 * (high := self.fitted.get(regime, {}).get(count, (0, math.inf))[1])
        ]

    @classmethod
    def parse(cls, text, base=None):
        """The step cost written as "base_s=0.01,mixed.per_kv_token_s=1e-7".

        A bare key sets both regimes; `decode.KEY` and `mixed.KEY` set one and win over a bare key. Keys left
        out keep the value they have in `base` (a StepCost), or 0. Further keys: pad_sizes=1/2/4/8, frontend_s, and
        decode_grid and mixed_grid as `Grid.parse` reads them ("none" takes one away). Raises InputError for an
        unknown or repeated key or a value that is not a finite number of seconds.
        """
        pairs = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            key, equals, value = (s.strip() for s in part.partition("="))
            if not equals:
                raise InputError(f"cost {part!r} is not KEY=SECONDS; write for example base_s=0.012")
            if key in pairs:
                raise InputError(f"cost key {key!r} is given twice in {text!r}; give it once")
            pairs[key] = _value(key, value, part)
        return cls._assemble(pairs, base)

    @classmethod
    def from_dict(cls, coefficients, base=None):
        """The step cost of {"decode": {KEY: seconds}, "mixed": {...}}; keys on the top level set both.

        Beside them may stand pad_sizes (a list), frontend_s, decode_grid and mixed_grid (`Grid.to_dict`), and fitted.
        """
        if not isinstance(coefficients, dict):
            raise InputError(f"a step cost is an object of {', '.join(KEYS)}, not {coefficients!r}")
        pairs = {}
        for key, value in coefficients.items():
            if key in REGIMES and isinstance(value, dict):
                pairs.update({f"{key}.{k}": v for k, v in value.items()})
            elif key in GRIDS and value is not None:
                pairs[key] = Grid.from_dict(value)
            elif key == "pad_sizes" and not isinstance(value, (list, tuple)):
                raise InputError(f"pad_sizes={value!r} must be a list of rising whole numbers, like [1, 2, 4, 8]")
            else:
                pairs[key] = value
        return cls._assemble(pairs, base)

    @classmethod
    def _assemble(cls, pairs, base):
        values = {r: base.to_dict()[r] for r in REGIMES} if base is not None else {regime: {} for regime in REGIMES}
        beside = {key: pairs[key] for key in pairs if key in BESIDE}
        for key, value in sorted(pairs.items(), key=lambda pair: "." in pair[0]):
            if key in BESIDE:
                continue
            regime, dot, name = key.rpartition(".")
            if name not in KEYS or (dot and regime not in REGIMES):
                raise InputError(
                    f"unknown cost key {key!r}; allowed: {', '.join(KEYS)}, also as decode.KEY or mixed.KEY, and "
                    "pad_sizes, frontend_s, decode_grid, mixed_grid"
                )
            for target in (regime,) if dot else REGIMES:
                values[target][name] = value
        regimes = {regime: Regime(**values[regime]) for regime in REGIMES}
        return cls(**regimes, **beside) if base is None else replace(base, **regimes, **beside)

    def to_dict(self):
        """{"decode": {KEY: seconds}, "mixed": {...}} with all six keys, and what stands beside them where set."""
        regimes = {regime: {key: getattr(getattr(self, regime), key) for key in KEYS} for regime in REGIMES}
        beside = {
            "pad_sizes": list(self.pad_sizes),
            "frontend_s": self.frontend_s,
            "decode_grid": self.decode_grid and self.decode_grid.to_dict(),
            "mixed_grid": self.mixed_grid and self.mixed_grid.to_dict(),
            "fitted": {regime: {k: list(v) for k, v in ranges.items()} for regime, ranges in self.fitted.items()},
        }
        return regimes | {key: value for key, value in beside.items() if value}

    def __str__(self):
        """The shortest text that `parse` reads back as this step cost."""
        parts = []
        for key in KEYS:
            decode, mixed = getattr(self.decode, key), getattr(self.mixed, key)
            if decode == mixed:
                parts += [f"{key}={decode!r}"] * (decode > 0)
            else:
                parts += [f"{r}.{key}={v!r}" for r, v in zip(REGIMES, (decode, mixed), strict=True) if v > 0]
        if self.pad_sizes:
            parts.append(f"pad_sizes={'/'.join(map(str, self.pad_sizes))}")
        if self.frontend_s:
            parts.append(f"frontend_s={self.frontend_s!r}")
        parts += [f"{name}={grid}" for name in GRIDS if (grid := getattr(self, name))]
        return ",".join(parts)


def warn_outside(engines):
    """Give a RangeWarning for what (EngineConfig, StepCost) pairs may reach beyond the range that was measured."""
    for config, cost in {(id(config), id(cost)): (config, cost) for config, cost in engines}.values():
        for line in cost.outside(config):
            warnings.warn(f"{line}; past it the cost is a guess", RangeWarning, stacklevel=3)


BESIDE = tuple(f.name for f in fields(StepCost) if f.name not in REGIMES)


def _value(key, text, part):
    """What a cost key's text means."""
    if key in GRIDS:
        return None if text.lower() == "none" else Grid.parse(text)
    if key == "fitted":
        raise InputError("cost: fitted is written in presets, not as text")
    try:
        return tuple(int(size) for size in filter(None, text.split("/"))) if key == "pad_sizes" else float(text)
    except ValueError:
        example = "whole numbers, like pad_sizes=1/2/4/8" if key == "pad_sizes" else "seconds, like base_s=0.012"
        raise InputError(f"cost {part!r} is not a number; give {example}") from None


def _check_fitted(fitted):
    """{regime: {count: (lowest, highest)}} with floats. Raises InputError for another shape."""
    try:
        checked = {
            regime: {count: (float(low), float(high)) for count, (low, high) in ranges.items()}
            for regime, ranges in fitted.items()
        }
    except (AttributeError, TypeError, ValueError):
        checked = {"": {}}
    names = {count for ranges in checked.values() for count in ranges}
    if not set(checked) <= set(REGIMES) or not names <= set(COUNTS):
        raise InputError(
            f'fitted={str(fitted):.80} must be ranges by regime and count, like {{"mixed": {{"new_tokens": [1, 512]}}}}'
        )
    return checked
