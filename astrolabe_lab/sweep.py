"""A grid of simulated runs, policies x rates x seeds, spread over processes: one summary row per run."""

import copy
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from . import crew
from .errors import InputError
from .record import headless

if TYPE_CHECKING:
    import pandas as pd

EVERY_S = 10.0  # between two lines of progress


@dataclass(frozen=True)
class Point:
    """One run of the grid."""

    label: str
    policy: object
    qps: float | None
    seed: int

    def __str__(self) -> str:
        rate = "the trace's own times" if self.qps is None else f"{self.qps:g} QPS"
        return f"{self.label} at {rate}, seed {self.seed}"


@dataclass(frozen=True)
class Setting:
    """What all runs of a grid share."""

    requests: Mapping[int, "pd.DataFrame"]  # by seed, without arrivals
    arrivals: str
    alpha: float | None
    simulate: Mapping[str, object] = field(default_factory=dict)  # keyword arguments of `simulate`


def sweep(
    trace: "pd.DataFrame | str | Path",
    policies: Sequence[object] | Mapping[str, object],
    qps: Sequence[float | None],
    seeds: Sequence[int],
    *,
    requests: int | None = None,
    lengths: str = "oracle",
    arrivals: str = "poisson",
    alpha: float | None = None,
    workers: int | None = None,
    progress: bool | Callable[[int, int, dict], None] | None = None,
    **simulate_options: object,
) -> "pd.DataFrame":
    """One row per run of policies x qps x seeds, in that order, as `measure.summarise` makes them.

    `trace`: a trace frame, a file for `trace.load`, or "sharegpt_like", which draws `requests` new ones at
    each seed; otherwise `requests` keeps the first so many. `policies`: names as `policies.parse` takes
    them, policy objects (also of classes defined in a notebook), or a mapping from label to either.
    `lengths` says what is predicted (`length.attach`), `arrivals` and `alpha` how requests arrive; qps None,
    with arrivals="trace", keeps the trace's own times, and the column `qps` tells their rate. Runs at one
    seed share requests, predictions and arrival pattern, whatever the policy, so that they can be compared in
    pairs. `simulate_options` (instances, engine, cost, control, ...) go to `sim.cluster.simulate`.

    `workers` processes (default: one a core) run the points; 1 stays in this process. `progress`: a line
    every few seconds, or a bar where somebody watches; False for silence, or a function of (done, total,
    row). Interrupting ends the workers.

    Columns: `source, policy, qps, seed`, those of `summarise`, and `wall_s`. Raises InputError for bad
    arguments before the first run (`rehearse`), and crew.CrewError naming the point whose run crashed or
    whose process died.
    """
    import pandas as pd

    points, setting = _planned(
        trace, policies, qps, seeds, requests=requests, lengths=lengths, arrivals=arrivals, alpha=alpha,
        **simulate_options,
    )  # fmt: skip
    workers = min(crew.cores() if workers is None else _positive("workers", workers), len(points))
    rows: dict[int, dict] = {}
    with _Progress(progress, len(points)) as report:
        for index, row in crew.each(partial(run_point, setting), points, workers):
            rows[index] = row
            report(row)
    return pd.DataFrame([rows[index] for index in range(len(points))])


def rehearse(*args: object, baseline: str | None = None, **options: object) -> None:
    """Raise the InputError that `sweep` with these arguments would, within a second or two.

    Everything is prepared, and each named policy dispatches the first requests. `baseline`, where given, has
    to be the label of a policy.
    """
    points, _ = _planned(*args, **options)
    labels = list(dict.fromkeys(point.label for point in points))
    if baseline is not None and baseline not in labels:
        raise InputError(f"baseline={baseline!r} is not among the policies: {', '.join(labels)}")


def _planned(
    trace, policies, qps, seeds, *, requests=None, lengths="oracle", arrivals="poisson", alpha=None,
    **simulate_options,
) -> tuple[list[Point], Setting]:  # fmt: skip
    """The runs of a grid and what they share, after a few requests have gone through each named policy."""
    from .arrivals import with_arrivals

    points = _points(policies, qps, seeds)
    setting = Setting(_requests(trace, requests, lengths, seeds), arrivals, alpha, simulate_options)
    first = setting.requests[points[0].seed]
    for rate in dict.fromkeys(point.qps for point in points):
        with_arrivals(first, rate, arrivals, points[0].seed, alpha)
    few = replace(setting, requests={seed: frame.head(3) for seed, frame in setting.requests.items()})
    named = {point.label: point for point in reversed(points) if isinstance(point.policy, str)}
    for point in reversed(named.values()):
        try:
            run_point(few, point)
        except InputError as error:
            raise InputError(f"{point}: {error}") from error
    return points, setting


def _points(policies, qps, seeds) -> list[Point]:
    from .policies import parse, spec

    if isinstance(policies, str) or not isinstance(policies, (Mapping, Sequence)):
        raise InputError(f"policies={policies!r} should be a list, or a mapping from label to policy")
    for name, values in (("qps", qps), ("seeds", seeds)):
        if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
            raise InputError(f"{name}={values!r} should be a list, e.g. [{values!r}]")
    qps, seeds = [*qps], [*seeds]
    by_label = isinstance(policies, Mapping)
    named = list(policies.items()) if by_label else [(p if isinstance(p, str) else spec(p), p) for p in policies]
    for _, policy in named:
        if isinstance(policy, str):
            parse(policy)  # a misspelt one is told now, not in the middle of the sweep
    for name, values in (("policies", [label for label, _ in named]), ("qps", qps), ("seeds", seeds)):
        if not values:
            raise InputError(f"{name} is empty: a sweep needs at least one")
        if repeated := {str(value) for value in values if values.count(value) > 1}:
            raise InputError(f"{name} holds {', '.join(sorted(repeated))} more than once: label each or drop it")
    return [Point(label, policy, q, s) for (label, policy), q, s in itertools.product(named, qps, seeds)]


def _requests(trace, requests: int | None, lengths: str, seeds) -> dict[int, "pd.DataFrame"]:
    import pandas as pd

    from . import length, sharegpt_like
    from .trace import load

    if requests is not None:
        _positive("requests", requests)
    if isinstance(trace, str) and trace == "sharegpt_like":
        if requests is None:
            raise InputError("requests is missing: say how many requests sharegpt_like should draw")
        drawn = {seed: sharegpt_like.generate(requests, seed=seed, text=False) for seed in seeds}
    else:
        frame = trace if isinstance(trace, pd.DataFrame) else load(trace)
        drawn = dict.fromkeys(seeds, frame if requests is None else frame.head(requests))
    return {seed: length.attach(frame, lengths, seed) for seed, frame in drawn.items()}


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name}={value!r} should be a whole number >= 1")
    return value


# --- one run ----------------------------------------------------------------------------------------------


def run_point(setting: Setting, point: Point) -> dict[str, object]:
    """The summary row of one run, with `wall_s`, the seconds that `simulate` took."""
    from . import policies
    from .arrivals import with_arrivals
    from .measure import summarise
    from .sim.cluster import simulate

    requests = setting.requests[point.seed]
    frame = with_arrivals(requests, point.qps, setting.arrivals, point.seed, setting.alpha)
    policy = policies.parse(point.policy) if isinstance(point.policy, str) else copy.deepcopy(point.policy)
    began = time.perf_counter()
    results = simulate(frame, policy, seed=point.seed, **setting.simulate)
    wall_s = time.perf_counter() - began
    qps = _own_rate(frame["arrived_s"]) if point.qps is None else point.qps
    row = {"source": "simulated", "policy": point.label, "qps": qps, "seed": point.seed}
    return row | summarise(results, by=[]).to_dict("records")[0] | {"wall_s": wall_s}


def _own_rate(arrived_s: "pd.Series") -> float:
    """Requests a second over the span of the arrivals, as `arrivals.with_arrivals` scales it; NaN without one."""
    span_s = arrived_s.iloc[-1] - arrived_s.iloc[0]
    return (len(arrived_s) - 1) / span_s if span_s > 0 else math.nan


class _Progress:
    """Tells how far a sweep is: a bar where somebody watches, a line every few seconds where not."""

    def __init__(self, wanted: bool | Callable[[int, int, dict], None] | None, total: int) -> None:
        watched = not headless() and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        self.tell = wanted if callable(wanted) else None
        self.lines = wanted is not False and self.tell is None and not watched
        self.bar, self.done, self.total = None, 0, total
        self.began = self.said = time.monotonic()
        if wanted is not False and self.tell is None and watched:
            from tqdm.auto import tqdm

            self.bar = tqdm(total=total, unit="run", desc="sweep")

    def __enter__(self) -> Callable[[dict], None]:
        return self._finished

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def _finished(self, row: dict) -> None:
        self.done += 1
        if self.tell:
            self.tell(self.done, self.total, row)
        elif self.bar is not None:
            self.bar.update()
        elif self.lines and (time.monotonic() - self.said >= EVERY_S or self.done == self.total):
            self.said = time.monotonic()
            took_s = self.said - self.began
            left = f", about {took_s / self.done * (self.total - self.done):.0f} s left" * (self.done < self.total)
            print(f"sweep: {self.done} of {self.total} runs in {took_s:.0f} s{left}", file=sys.stderr, flush=True)
