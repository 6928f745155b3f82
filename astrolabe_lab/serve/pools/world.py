"""The pools that a grid's runs are on: whether running ones are such, what starts some, and the settings of others."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from astrolabe_lab import generators
from astrolabe_lab.cost import KEYS, REGIMES, StepCost, preset, presets
from astrolabe_lab.disagg.simulate import paper_world
from astrolabe_lab.disagg.state import HandOff
from astrolabe_lab.engines.cluster_file import ClusterFile, read_cluster
from astrolabe_lab.errors import InputError
from astrolabe_lab.serve.pools.launch import PRESET, ROLES, Handover
from astrolabe_lab.sim.config import EngineConfig

MAY_VARY = ("constants",)  # of what a simulated run is given
POLL_S = 0.05  # how often a live router polls
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
    def of(cls, runs: list) -> World:
        """Of a grid's runs (``sweep.cell.Run``). Raises InputError where they are on different pools or in different
        traffic, or on such as no live ones can be."""
        told = [_told(one) for one in runs]
        first = told[0]
        if "pools" not in first:
            raise InputError("the grid is of whole engines: give pools, as in pools: 2+4")
        if other := sorted({name for one in told for name in one if one[name] != first.get(name)}):
            raise InputError(f"the grid's runs differ in {', '.join(other)}: one set of live pools has one each")
        if not all(isinstance(one.policy, str) for one in runs):
            raise InputError("a live router is a process of its own: give policies by name")
        (config, decode_config), (cost, decode_cost) = (_both(first[name]) for name in ("engine", "cost"))
        if config != decode_config or cost != decode_cost or first.get("service", "exact") != "exact":
            raise InputError(
                "emulated pools have engines of one kind that keep vLLM's schedule: leave out what differs"
            )
        if first.get("signals", "own") != "own":
            raise InputError("signals=leaked is of the simulator alone: no live router can be told true lengths")
        if first.get("poll_s", POLL_S) != POLL_S:
            raise InputError(f"poll_s={first['poll_s']:g} is of the simulator alone: a live router has {POLL_S:g}")
        hand_off = first["hand_off"]
        live = asdict(HandOff(hand_off.base_s, hand_off.per_block_s))
        if other := [name for name, value in asdict(hand_off).items() if value != live[name]]:
            raise InputError(f"of hand_off live pools have base_s and per_block_s alone: leave out {', '.join(other)}")
        return cls(first["pools"], config, cost, hand_off)

    def require(self, folder: str | Path) -> None:
        """Raise InputError unless the running pools of ``folder`` are these. Of real engines, whose steps and transfers
        take what they take, only shape and flags are compared."""
        found = read_cluster(folder)
        shape = _shape(found)
        if not all(shape):
            raise InputError(f"cluster {str(folder)!r} has no pools: {self.command()} starts those of the grid")
        here = {"pools": _text(self.shape), **_flat(self.config, self.cost)}
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
        if self.hand_off != HandOff():
            return "serve.pools.studies.launch_for"
        name, other = _nearest(self.config, self.cost)
        words = ["astrolabe launch --pools", _text(self.shape)] + ["--preset", name] * (name != PRESET)
        for group in ("engine", "cost"):
            given = {key.partition(".")[2]: value for key, value in other.items() if key.startswith(f"{group}.")}
            words += [f"--{group}", ",".join(f"{key}={_word(value)}" for key, value in given.items())] * bool(given)
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


def _told(run) -> dict[str, object]:
    """What of a run its pools and its traffic hang on."""
    given, asked = run.cell.settings, run.requests
    # What a generator draws may have a source of its own at each seed.
    traffic = {"trace": given["trace"] if generators.is_generator(given["trace"]) else asked.source}
    traffic |= {"requests": asked.count, "sample": asked.sample, "lengths": given.get("lengths", "oracle")}
    traffic |= {"arrivals": run.arrivals, "alpha": run.alpha}
    return traffic | {name: value for name, value in run.options.items() if name not in MAY_VARY}


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
