"""What a sweep will do: its runs, looked up and rehearsed, and what they will cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from astrolabe_lab.errors import InputError
from astrolabe_lab.sweep import crew

from . import keys
from .cell import Run, arrive, measure, resolve, whole
from .grid import Grid
from .settings import PRESET, policy_of
from .sources import Sources

FEW = 3  # requests of a rehearsal
TRIAL = 10_000  # requests at most of a run that is timed beforehand
MANY = 40  # settings that are not timed one by one


def grid_of(
    trace, policies, qps, seeds, *, requests=None, sample="head", lengths="oracle", arrivals=None, alpha=None,
    **simulate_options,
) -> Grid:  # fmt: skip
    """The grid that `sweep` is called with."""
    from astrolabe_lab.policies import spec

    if isinstance(policies, str) or not isinstance(policies, (Mapping, Sequence)):
        raise InputError(f"policies={policies!r} should be a list, or a mapping from label to policy")
    for name, values in (("qps", qps), ("seeds", seeds)):
        if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
            raise InputError(f"{name}={values!r} should be a list, e.g. [{values!r}]")
    by_label = isinstance(policies, Mapping)
    named = list(policies.items()) if by_label else [(p if isinstance(p, str) else spec(p), p) for p in policies]
    qps, seeds = [*qps], [*seeds]
    for name, values in (("policies", [label for label, _ in named]), ("qps", qps), ("seeds", seeds)):
        if not values:
            raise InputError(f"{name} is empty: a sweep needs at least one")
        if repeated := {str(value) for value in values if values.count(value) > 1}:
            raise InputError(f"{name} holds {', '.join(sorted(repeated))} more than once: label each or drop it")
    axes = [
        [{"policy": policy, "label": label} for label, policy in named],
        [{"qps": rate} for rate in qps],
        [{"seed": seed} for seed in seeds],
    ]
    given = {"trace": trace, "sample": sample, "lengths": lengths}
    if "pools" not in simulate_options:
        given["preset"] = PRESET
    apart = {name: simulate_options.pop(name) for name in ("compiled", "leaps") if name in simulate_options}
    optional = {"requests": requests, "arrivals": arrivals, "alpha": alpha}
    optional |= keys.flat(simulate_options, "sweep") | apart
    grid = Grid(axes, given | {name: value for name, value in optional.items() if value is not None})
    grid.check()
    return grid


def planned(grid: Grid) -> tuple[list[Run], Sources]:
    """The runs of a grid, after a few requests have gone through each of its settings but rates and seeds."""
    sources = Sources(grid.folder)
    runs = [resolve(cell, sources) for cell in grid.cells()]
    _check_told_apart(runs)
    rehearsed, arrived = set(), set()
    for one in runs:
        rate = one.requests.source, one.requests.count, one.qps, one.arrivals, one.alpha
        setting = (
            one.requests.source,
            one.requests.lengths,
            one.policy if isinstance(one.policy, str) else None,
            *(f"{name}={value!r}" for name, value in one.options.items()),
        )
        if rate in arrived and setting in rehearsed:
            continue
        try:
            trace = arrive(one, sources.frames)
            if setting not in rehearsed and isinstance(one.policy, str):
                measure(one, trace.head(FEW))
        except InputError as error:
            raise InputError(f"{one}: {error}") from error
        rehearsed.add(setting)
        arrived.add(rate)
    return runs, sources


def _check_told_apart(runs: Iterable[Run]) -> None:
    """Raise InputError for two runs whose rows would look alike."""
    seen: dict[tuple, Run] = {}
    for run in runs:
        key = run.cell.label, run.qps, run.seed, *run.cell.columns.items()
        if (other := seen.setdefault(key, run)) is not run:
            raise InputError(
                f"the label {run.cell.label!r} stands for two runs that nothing else tells apart, of "
                f"{policy_of(other.cell.settings)} and {policy_of(run.cell.settings)}, at {run.qps} QPS and seed "
                f"{run.seed}: give each policy a label of its own (cells: [{{policy: ..., label: ...}}, ...])"
            )


def estimate(grid: Grid | Mapping[str, object] | str | Path, workers: int | None = None) -> dict[str, object]:
    """What the grid costs, from trial runs: `runs, requests, seeds, trials, computing_s, workers, wall_s`.

    Each setting (or each policy, where there are many) is timed at its lowest and its highest rate, on at most 10,000
    requests, and the rates between are taken to lie between. Starting the workers, some seconds, comes on top.
    """
    runs, sources = planned(Grid.given(grid))
    workers = crew.cores() if workers is None else whole("workers", workers)
    settings = {(run.cell.label, *run.cell.columns.values()) for run in runs}
    groups: dict[object, list[Run]] = {}
    for run in runs:
        key = (run.cell.label, *run.cell.columns.values()) if len(settings) <= MANY else run.cell.label
        groups.setdefault(key, []).append(run)
    trials, computing_s = {}, 0.0
    for group in groups.values():
        ordered = sorted(group, key=lambda run: run.qps or 0)
        ends_s = []
        for run in dict.fromkeys((ordered[0], ordered[-1])):
            trace = arrive(run, sources.frames).head(TRIAL)
            ends_s.append(measure(run, trace)[0]["wall_s"] / len(trace))
            trials[run] = None
        computing_s += sum(ends_s) / len(ends_s) * sum(_count(run, sources) for run in group)
    return {
        "runs": len(runs),
        "requests": sum(_count(run, sources) for run in runs),
        "seeds": len({run.seed for run in runs}),
        "trials": len(trials),
        "computing_s": computing_s,
        "workers": workers,
        "wall_s": computing_s / workers,
    }


def _count(run: Run, sources: Sources) -> int:
    frame = sources.frames.get(run.requests.source)
    if frame is None:
        return run.requests.count
    return len(frame) if run.requests.count is None else run.requests.count
