"""Many simulated runs: a grid over anything that `simulate` takes, spread over processes or a Ray cluster.

    summary = lab.sweep.sweep("sharegpt_like", ["random", "astrolabe:k=2"], qps=[20, 24], seeds=[0, 1], requests=2000)
    summary = lab.sweep.run("GRID.yaml", out="outputs/grid")       # anything varied; goes on where it was ended

`grid` says which runs, `keys` what can vary, `cell` is one run, `store` the folder that keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError

from .cell import whole
from .conduct import Conductor
from .grid import Grid
from .plan import estimate, grid_of, planned
from .results import read, read_requests
from .store import Store, StoreError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Grid", "StoreError", "check", "estimate", "read", "read_requests", "rehearse", "run", "sweep"]
RETRIES = 2  # of a run whose process died


def sweep(
    trace: pd.DataFrame | str | Path,
    policies: Sequence[object] | Mapping[str, object],
    qps: Sequence[float | None],
    seeds: Sequence[int],
    *,
    requests: int | None = None,
    sample: str = "head",
    lengths: str = "oracle",
    arrivals: str | None = None,
    alpha: float | None = None,
    workers: int | None = None,
    progress: bool | Callable[[int, int, dict], None] | None = None,
    out: str | Path | None = None,
    on: str = "local",
    keep: str = "summary",
    mix: bool = False,
    retries: int = RETRIES,
    **simulate_options: object,
) -> pd.DataFrame:
    """One row per run of policies x qps x seeds, in that order, as `measure.summarise` makes them.

    `trace`: a trace frame, a file for `trace.load`, or a generator ("sharegpt_like", "family:NAME"), which draws
    `requests` new ones at each seed; otherwise `requests` keeps the first so many, or `sample` says how each seed draws
    its own (permute, resample). `policies`: names as `policies.parse` takes them, policy objects (also of classes
    defined in a notebook), or a mapping from label to either. `lengths` says what is predicted (`length.attach`),
    `arrivals` and `alpha` how requests arrive (default: Poisson, for "family:mixed" its bursts); qps None, with
    arrivals="trace", keeps the trace's own times, and the column `qps` tells their rate. Runs at one seed share
    requests, predictions and arrival pattern, whatever the policy, so that they can be compared in pairs.
    `simulate_options` (instances, engine, cost, control, ...) go to `sim.cluster.simulate`.

    What varies here are policies, rates and seeds; `run` varies anything. The other arguments are those of `run`.
    """
    grid = grid_of(
        trace, policies, qps, seeds, requests=requests, sample=sample, lengths=lengths, arrivals=arrivals, alpha=alpha,
        **simulate_options,
    )  # fmt: skip
    return run(grid, out, on=on, workers=workers, progress=progress, keep=keep, mix=mix, retries=retries)


def run(
    grid: Grid | Mapping[str, object] | str | Path,
    out: str | Path | None = None,
    *,
    on: str = "local",
    workers: int | None = None,
    progress: bool | Callable[[int, int, dict], None] | None = None,
    keep: str = "summary",
    mix: bool = False,
    retries: int = RETRIES,
) -> pd.DataFrame:
    """One row per run of the grid, in its order; see `grid` for what a GRID.yaml or a mapping holds.

    `out`: a folder that keeps each run as it ends (see `store`). Whatever ends the sweep, the same call goes on from
    there, and a grid that has grown makes only what is new. Runs of other code, traces or presets are refused, unless
    `mix` allows other code. `keep="requests"` keeps the result frame of every run too. `on`: "local", "ray", or the
    address of a Ray cluster, ray://HOST:PORT; `workers` is how many runs at once (default: one a core); 1 stays in
    this process. A run whose process dies is made again, `retries` times.

    `progress`: a line every few seconds, or a bar where somebody watches; False for silence, or a function of (done,
    total, row).

    Columns: `source, policy, qps, seed`, what else varies, those of `measure.summarise`, `wall_s`, and with `out`
    `code` and `run`. Raises InputError for bad arguments before the first run, and crew.CrewError naming the run that
    crashed or killed its process: with `out` when all others are done, without at once.
    """
    grid = Grid.given(grid)
    if keep not in ("summary", "requests"):
        raise InputError(f"keep={keep!r} is unknown: allowed are summary and requests")
    if keep == "requests" and out is None:
        raise InputError("keep='requests' needs a folder: give out=DIR")
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise InputError(f"retries={retries!r} should be a whole number >= 0")
    if workers is not None:
        whole("workers", workers)
    conductor = Conductor(*planned(grid), on, workers, retries, progress)
    if out is None:
        return conductor.in_memory()
    with Store(out, mix, keep) as store:
        return conductor.into(store, grid)


def rehearse(*args: object, baseline: str | None = None, **options: object) -> None:
    """Raise the InputError that `sweep` with these arguments would, within a second or two.

    Everything is prepared, and each named policy dispatches the first requests. `baseline`, where given, has to be the
    label of a policy.
    """
    check(grid_of(*args, **options), baseline)


def check(grid: Grid | Mapping[str, object] | str | Path, baseline: str | None = None) -> None:
    """Raise the InputError that `run` with this grid would, within a second or two; see `rehearse`."""
    runs, _ = planned(Grid.given(grid))
    labels = list(dict.fromkeys(run.cell.label for run in runs))
    if baseline is not None and baseline not in labels:
        raise InputError(f"baseline={baseline!r} is not among the policies: {', '.join(labels)}")
