"""The pools that a grid's runs are on: whether running ones are such, what starts some, and the settings of others."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.calibrate.artifact import Transfer
from astrolabe_lab.cost import KEYS, REGIMES, StepCost, preset, presets
from astrolabe_lab.disagg.simulate import paper_world
from astrolabe_lab.disagg.state import HandOff
from astrolabe_lab.engines.cluster_file import ClusterFile, read_cluster
from astrolabe_lab.errors import InputError
from astrolabe_lab.serve.pools.launch import PRESET, ROLES, Handover, launch_pools
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.sweep.identity import of_value

if TYPE_CHECKING:
    from astrolabe_lab.engines.running import Cluster

TABLES = ("decode_grid", "mixed_grid")
HANDED = ("latency_s", "per_block_s", "fail_share")  # of a Handover


@dataclass(frozen=True)
class World:
    """``shape``: engines of the prefill and of the decode pool, each with ``config`` and ``cost``."""

    shape: tuple[int, int]
    config: EngineConfig
    cost: StepCost
    hand_off: HandOff

    @classmethod
    def of(cls, run) -> World:
        """Of a grid's run (``sweep.cell.Run``). Raises InputError where no live pools can be like that."""
        told = run.options
        if "pools" not in told:
            raise InputError(f"{run}: the grid is of whole engines: give pools, as in pools: 2+4")
        if not isinstance(run.policy, str):
            raise InputError(f"{run}: a live router is a process of its own: give policies by name")
        (config, decode_config), (cost, decode_cost) = (_both(told[name]) for name in ("engine", "cost"))
        if config != decode_config or cost != decode_cost or told.get("service", "exact") != "exact":
            raise InputError(
                f"{run}: emulated pools have engines of one kind that keep vLLM's schedule: leave out what differs"
            )
        if told.get("signals", "own") != "own":
            raise InputError(
                f"{run}: signals=leaked is of the simulator alone: no live router can be told true lengths"
            )
        if not told.get("poll_s", 1.0) > 0:
            raise InputError(
                f"{run}: poll_s={told['poll_s']:g} is of the simulator alone: a live router polls now and then"
            )
        hand_off = told["hand_off"]
        live = asdict(HandOff(hand_off.base_s, hand_off.per_block_s))
        if other := [name for name, value in asdict(hand_off).items() if value != live[name]]:
            raise InputError(
                f"{run}: of hand_off live pools have base_s and per_block_s alone: leave out {', '.join(other)}"
            )
        # vLLM does not start with less memory than one request of max_model_len takes.
        fits = min(config.max_model_len, config.usable_blocks * config.block_size)
        return cls(told["pools"], replace(config, max_model_len=fits), cost, hand_off)

    @property
    def key(self) -> str:
        """A word that worlds with other engines do not share."""
        return of_value([self.shape, self.config, self.cost, self.hand_off])[:8]

    def launch(self, time_scale: float, **options: object) -> Cluster:
        """Running emulated pools like this; ``options`` are those of ``launch_pools``, and so is what it raises."""
        handover = Handover(Transfer(self.hand_off.base_s, self.hand_off.per_block_s))
        given = {"engine": self.config, "cost": self.cost, "time_scale": time_scale, "handover": handover}
        return launch_pools(*self.shape, **given | options)

    def apart(self, other: World) -> list[str]:
        """The settings in which the two differ, as grids name them."""
        here, there = self._flat(), other._flat()
        return [name for name in here if here[name] != there[name]] + ["hand_off"] * (self.hand_off != other.hand_off)

    def _flat(self) -> dict[str, object]:
        return {"pools": _text(self.shape), **_flat(self.config, self.cost)}

    def require(self, folder: str | Path) -> None:
        """Raise InputError unless the running pools of ``folder`` are these. Of real engines, whose steps and transfers
        take what they take, only shape and flags are compared."""
        found = read_cluster(folder)
        shape = _shape(found)
        if not all(shape):
            raise InputError(f"cluster {str(folder)!r} has no pools: {self.command()} starts those of the grid")
        here = self._flat()
        there = {"pools": _text(shape), **_flat(found.config, found.cost)}
        if found.world == "emulated":
            here |= {"hand_off": (self.hand_off.base_s, self.hand_off.per_block_s, 0.0)}
            there |= {"hand_off": tuple((found.handover or {}).get(name) for name in HANDED)}
        else:
            here = {name: value for name, value in here.items() if not name.startswith("cost.")}
        if other := [name for name in here if here[name] != there.get(name)]:
            apart = ", ".join(f"{name} {_short(there.get(name))} (grid: {_short(here[name])})" for name in other)
            raise InputError(f"the pools of {str(folder)!r} are not the grid's: {apart}; {self.command()} starts those")

    def command(self) -> str:
        """What starts such pools."""
        name, other = _nearest(self.config, self.cost)
        words = ["astrolabe launch --pools", _text(self.shape)] + ["--preset", name] * (name != PRESET)
        for group in ("engine", "cost"):
            given = {key.partition(".")[2]: value for key, value in other.items() if key.startswith(f"{group}.")}
            words += [f"--{group}", ",".join(f"{key}={_word(value)}" for key, value in given.items())] * bool(given)
        own, usual = asdict(self.hand_off), asdict(HandOff())
        if moved := [f"{name}={own[name]}" for name in own if own[name] != usual[name]]:
            words += ["--hand-off", ",".join(moved)]
        return " ".join(words)


def settings_of(folder: str | Path) -> dict[str, object]:
    """The settings that put a grid's runs on the emulated pools of ``folder``. Raises InputError where none do."""
    found = read_cluster(folder)
    if not all(shape := _shape(found)):
        raise InputError(f"cluster {str(folder)!r} has no pools: astrolabe launch --pools 2+4 starts some")
    if found.cost is None or not found.handover:
        raise InputError(f"cluster {str(folder)!r} does not tell what its steps and transfers take: emulated pools do")
    given: dict[str, object] = {"pools": _text(shape)}
    if not any(getattr(found.cost, name) for name in TABLES):
        slope_s = found.cost.decode.per_seq_s
        given |= {"decode_slope_s": slope_s, **_apart(_flat(found.config, found.cost), _flat(*paper_world(slope_s)))}
    else:
        name, other = _nearest(found.config, found.cost)
        if tables := [key for key in other if key.removeprefix("cost.") in TABLES]:
            raise InputError(f"cluster {str(folder)!r} has {tables[0]} of no preset, which no grid can tell")
        given |= {"preset": name, **other}
    base = Handover().to_dict()
    for key, name in (("base_s", "latency_s"), ("per_block_s", "per_block_s")):
        given |= {f"hand_off.{key}": found.handover[name]} if found.handover[name] != base[name] else {}
    return given


def _both(value: object) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value, value)


def _shape(cluster: ClusterFile) -> tuple[int, int]:
    roles = [engine.get("role") for engine in cluster.engines]
    return tuple(map(roles.count, ROLES))


def _text(shape: tuple[int, int]) -> str:
    return f"{shape[0]}+{shape[1]}"


def _flat(config: EngineConfig, cost: StepCost | None) -> dict[str, object]:
    """Engine flags and step cost under the names that grids have for them."""
    flat = {f"engine.{name}": value for name, value in asdict(config).items()}
    if cost is not None:
        flat |= {f"cost.{regime}.{key}": getattr(getattr(cost, regime), key) for regime in REGIMES for key in KEYS}
        flat |= {f"cost.{name}": getattr(cost, name) for name in ("pad_sizes", "frontend_s", *TABLES)}
    return flat


def _nearest(config: EngineConfig, cost: StepCost) -> tuple[str, dict[str, object]]:
    """(preset, what differs from it): that with the fewest differences."""
    flat = _flat(config, cost)
    known = {name: preset(name) for name in presets()}
    there = {name: _flat(EngineConfig.from_dict(one.engine), one.cost) for name, one in known.items()}
    apart = {name: _apart(flat, other) for name, other in there.items()}
    return min(apart.items(), key=lambda found: (len(found[1]), found[0] != PRESET))


def _apart(flat: dict[str, object], other: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in flat.items() if value != other[key]}


def _short(value: object) -> str:
    return "a table" if hasattr(value, "seconds") else str(value)


def _word(value: object) -> str:
    return "none" if value is None else "/".join(map(str, value)) if isinstance(value, tuple) else str(value)
