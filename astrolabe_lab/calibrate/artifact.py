"""What a calibration leaves: one JSON file of constants with intervals, what they belong to and how far they hold."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.calibrate.probe import Described
from astrolabe_lab.cost import CALIBRATION, Preset, StepCost
from astrolabe_lab.errors import InputError
from astrolabe_lab.record import write_whole
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.text_files import json_object

if TYPE_CHECKING:
    from astrolabe_lab.disagg.constants import Constants

KIND = CALIBRATION
VERSION = 1


@dataclass(frozen=True)
class Transfer:
    """A hand-off of KV blocks between pools: ``latency_s`` once, ``per_block_s`` for each; with intervals."""

    latency_s: float
    per_block_s: float
    latency_interval_s: tuple[float, float] = (0.0, 0.0)
    per_block_interval_s: tuple[float, float] = (0.0, 0.0)

    def seconds(self, blocks: int) -> float:
        """Seconds of a hand-off of ``blocks`` alone on the wire."""
        return self.latency_s + self.per_block_s * blocks


@dataclass(frozen=True)
class Streamed:
    """Decode steps as clients of a router process see them: ``base_s`` with one stream, ``slope_s`` more for each
    further one, with intervals.

    ``streams``: the batches looked at, in ``bursts`` bursts; ``loop_lag_p99_s``: 99th percentile of how late the
    router's event loop was meanwhile, wall seconds.
    """

    base_s: float
    slope_s: float
    base_interval_s: tuple[float, float]
    slope_interval_s: tuple[float, float]
    streams: tuple[int, ...]
    bursts: int
    loop_lag_p99_s: float


@dataclass(frozen=True)
class Slo:
    """Targets in seconds: ``ttft_s`` and ``tpot_s`` of the tight class; the loose class has ``loose`` times as much."""

    ttft_s: float
    tpot_s: float
    loose: float = 3.0

    def of(self, slo: str) -> tuple[float, float]:
        """(TTFT, TPOT) of class "tight" or "loose"."""
        if slo not in ("tight", "loose"):
            raise InputError(f"SLO class {slo!r} is unknown; allowed: tight, loose")
        times = self.loose if slo == "loose" else 1.0
        return times * self.ttft_s, times * self.tpot_s


@dataclass(frozen=True)
class Calibration:
    """Measured constants of one kind of engine, in modelled seconds.

    ``cost`` prices every step; ``prefill_base_s`` and ``prefill_token_s`` are tau_pre(n) = base + n * token, first
    tokens on an idle engine; ``decode_s`` is tau_dec, a step of one stream, and ``decode_slope_s`` what each further
    stream adds to it, both with ``reference_tokens`` of context a stream, asked at the engine itself; ``streamed``: the
    same through a router (None: simulated, or of an older file); ``overhead_s``: what a first token takes beyond its
    steps. ``intervals``: by name, 95 %. ``gates``: what was checked, by name {value, bound, ok};
    ``residuals``: by regime, in %: of the windows that were fitted, and of those that other bursts tell, priced by
    those alone (``unseen_``); ``rows``: every window and first token measured.
    """

    model: str
    device: str
    source: str
    engine: dict
    cost: StepCost
    intervals: dict
    prefill_base_s: float
    prefill_token_s: float
    decode_s: float
    decode_slope_s: float
    overhead_s: float
    reference_tokens: int
    kv_blocks: int
    slo: Slo
    transfer: Transfer | None = None
    streamed: Streamed | None = None
    flags: dict = field(default_factory=dict)
    time_scale: float = 1.0
    bends: tuple[str, ...] = ()
    gates: dict = field(default_factory=dict)
    residuals: dict = field(default_factory=dict)
    rows: dict = field(default_factory=dict, repr=False)
    seconds: float = 0.0
    rounds: int = 0
    seed: int = 0
    date: str = ""
    versions: dict = field(default_factory=dict)

    @property
    def valid(self) -> bool:
        """Whether every gate was passed."""
        return all(gate["ok"] for gate in self.gates.values())

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(**self.engine)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache of one engine holds."""
        return self.kv_blocks * self.config.block_size

    def preset(self) -> Preset:
        """The step cost as a preset, for simulations and Predictors."""
        return Preset(
            f"calibrated {self.device}", self.cost, self.engine | {"num_gpu_blocks": self.kv_blocks}, self.model,
            self.device, self.date, f"calibration of {self.rounds} rounds, {self.source}",
            {"per_seq_s": "with the host's own work for each sequence, which no timing tells apart"}, self.residuals,
        )  # fmt: skip

    def constants(self) -> Constants:
        """What a P/D router prices with: the same numbers in its own terms.

        A hand-off's base is the transfer's and the decode request's own way; without a measured transfer that alone.
        Decode steps are those that clients of a router see, where they were measured.
        """
        from astrolabe_lab.disagg.constants import Constants

        transfer, seen = self.transfer or Transfer(0.0, 0.0), self.streamed
        config = self.config
        return Constants(
            prefill_base_s=self.prefill_base_s,
            prefill_per_token_s=self.prefill_token_s,
            decode_step_s=seen.base_s if seen else self.decode_s,
            decode_slope_s=seen.slope_s if seen else self.decode_slope_s,
            transfer_base_s=transfer.latency_s + self.overhead_s,
            transfer_per_block_s=transfer.per_block_s,
            kv_capacity_tokens=self.kv_tokens,
            ttft_s=self.slo.ttft_s,
            tpot_s=self.slo.tpot_s,
            loose_factor=self.slo.loose,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            source=f"calibration of {self.model} on {self.device}, {self.date}",
        )

    def require(self, found: Described | None = None, **only) -> None:
        """Raise InputError unless this belongs to ``found``: the same model, device and engine flags.

        ``only``: some of model, device, engine (an EngineConfig), flags, in place of a Described; others go unchecked.
        """
        if found is not None:
            only = {"model": found.model, "device": found.device, "engine": found.engine, "flags": found.flags} | only
        differences = []
        for name in ("model", "device"):
            if name in only and only[name] != getattr(self, name):
                differences.append(f"{name} {getattr(self, name)!r}, here {only[name]!r}")
        if "engine" in only:
            here = asdict(only["engine"])
            differences += [
                f"{key} {self.engine.get(key)!r}, here {here[key]!r}"
                for key in here
                if here[key] != self.engine.get(key)
            ]
        if "flags" in only:
            here = only["flags"]
            differences += [
                f"{key} {self.flags.get(key)!r}, here {here.get(key)!r}"
                for key in sorted({*here, *self.flags})
                if here.get(key) != self.flags.get(key)
            ]
        if differences:
            raise InputError(
                f"the calibration is of another cluster: {'; '.join(differences)}. Calibrate this one (astrolabe "
                "calibrate), or use the file's constants regardless with --constants-from"
            )

    def with_constants(self, **constants) -> Calibration:
        """A copy with other values of some constants (decode_s=0.0018, ...): miscalibrated on purpose. Of decode they
        hold through a router too."""
        allowed = ("prefill_base_s", "prefill_token_s", "decode_s", "decode_slope_s", "overhead_s", "cost", "transfer",
                   "streamed", "slo")  # fmt: skip
        if unknown := sorted(set(constants) - set(allowed)):
            raise InputError(f"unknown constants {', '.join(unknown)}; allowed: {', '.join(allowed)}")
        if self.streamed is not None and "streamed" not in constants:
            base_s = constants.get("decode_s", self.streamed.base_s)
            slope_s = constants.get("decode_slope_s", self.streamed.slope_s)
            constants["streamed"] = replace(self.streamed, base_s=base_s, slope_s=slope_s)
        return replace(self, **constants, gates={}, intervals={})

    def to_dict(self) -> dict:
        """A JSON object with the digest of all else in it."""
        entries = {f.name: getattr(self, f.name) for f in fields(self)}
        entries |= {"cost": self.cost.to_dict(), "slo": asdict(self.slo), "bends": list(self.bends)}
        for name in ("transfer", "streamed"):
            entries[name] = entries[name] and asdict(entries[name])
        entries = json.loads(json.dumps({"kind": KIND, "version": VERSION, **entries}))
        return entries | {"sha256": _digest(entries)}

    def save(self, path: str | Path) -> Path:
        """Write it whole, or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")
        return path

    @classmethod
    def from_dict(cls, entries: dict, name: str = "calibration", edited: bool = False) -> Calibration:
        """The calibration of ``to_dict``. ``edited``: accept a digest that does not fit. Raises InputError."""
        if not isinstance(entries, dict) or entries.get("kind") != KIND:
            raise InputError(f"{name!r} is no calibration; astrolabe calibrate makes one")
        if entries.get("version") != VERSION:
            raise InputError(
                f"{name!r} is a calibration of version {entries.get('version')!r}; {VERSION} is understood"
            )
        entries = dict(entries)
        digest = entries.pop("sha256", None)
        if digest != _digest(entries) and not edited:
            raise InputError(
                f"{name!r} was changed after it was measured (its digest does not fit); calibrate anew, or use "
                "it as it is with --constants-from"
            )
        known = {f.name for f in fields(cls)}
        given = {key: value for key, value in entries.items() if key in known}
        try:
            given["cost"] = StepCost.from_dict(given["cost"])
            given["slo"] = Slo(**given["slo"])
            given["transfer"] = Transfer(**given["transfer"]) if given.get("transfer") else None
            given["streamed"] = Streamed(**given["streamed"]) if given.get("streamed") else None
            given["bends"] = tuple(given.get("bends", ()))
            found = cls(**given)
            EngineConfig(**found.engine)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{name!r} is a damaged calibration ({error})") from None
        for where, part in (
            ("", found),
            *((f"{each}.", getattr(found, each)) for each in ("slo", "transfer", "streamed")),
        ):
            if wrong := [] if part is None else _mistyped(part):
                raise InputError(
                    f"{name!r} is a damaged calibration ({where}{wrong[0]}={getattr(part, wrong[0])!r:.80})"
                )
        if not all(isinstance(gate, dict) and "ok" in gate for gate in found.gates.values()):
            raise InputError(f"{name!r} is a damaged calibration (gates={found.gates!r:.80})")
        return found


def load(path: str | Path, edited: bool = False) -> Calibration:
    """The calibration in a file. ``edited``: accept one that was changed by hand. Raises InputError."""
    entries = json_object(path, "this calibration", "; astrolabe calibrate makes one")
    return Calibration.from_dict(entries, str(path), edited)


def _mistyped(part) -> list[str]:
    """The fields that are not of their kind; a number is finite."""
    kinds = {"float": (int, float), "int": (int,), "str": (str,), "dict": (dict,)}
    told = [(each.name, each.type, getattr(part, each.name)) for each in fields(part) if each.type in kinds]
    return [
        name
        for name, kind, value in told
        if type(value) not in kinds[kind] or kind == "float" and not abs(value) < 1e300
    ]


def _digest(entries: dict) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
