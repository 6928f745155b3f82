"""One run of a grid: what its settings stand for, and the row that it gives."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from astrolabe_lab import generators
from astrolabe_lab.errors import InputError

from . import identity, keys, pools
from .settings import members, options_of, policy_of, slo_of
from .sources import GENERATORS, SAMPLES, Requests, Sources, prepared

if TYPE_CHECKING:
    import pandas as pd

    from astrolabe_lab.measure import SLO


@dataclass(frozen=True, eq=False)
class Cell:
    """One run: its settings as given (`keys`), and the columns that tell it from the others of its grid."""

    settings: Mapping[str, object]
    columns: Mapping[str, object] = field(default_factory=dict)

    @property
    def label(self) -> str:
        from astrolabe_lab.policies import spec

        if "label" in self.settings:
            return str(self.settings["label"])
        policy = policy_of(self.settings)
        return policy if isinstance(policy, str) else spec(policy)

    def __str__(self) -> str:
        qps = self.settings.get("qps")
        rate = "the trace's own times" if qps is None else f"{qps:g} QPS" if _is_number(qps) else f"qps={qps!r}"
        more = "".join(f", {name}={value}" for name, value in self.columns.items())
        return f"{self.label} at {rate}, seed {self.settings.get('seed', 0)}{more}"


@dataclass(frozen=True, eq=False)
class Run:
    """A cell with everything looked up that its settings name; it can be sent to another process."""

    cell: Cell
    requests: Requests
    arrivals: str
    alpha: float | None
    policy: object  # text for `policies.parse`, or a policy
    options: Mapping[str, object]  # keyword arguments of `simulate`, without the seed
    slo: SLO | None = None

    @property
    def qps(self) -> float | None:
        return self.cell.settings.get("qps")

    @property
    def seed(self) -> int:
        return self.cell.settings.get("seed", 0)

    def __str__(self) -> str:
        return str(self.cell)

    def content(self) -> dict[str, str]:
        """Fingerprints of what the result depends on beside the code: `settings, trace, preset, key`.

        `settings` are the names given; `trace` and `preset` what stands behind them; `key` is of all together.
        """
        from astrolabe_lab import policies

        named = {name: value for name, value in self.cell.settings.items() if name not in ("trace", "label")}
        trace = self.cell.settings.get("trace")
        trace = str(trace) if isinstance(trace, str) or hasattr(trace, "__fspath__") else "a frame"
        parse = pools.parse if "pools" in self.options else policies.parse
        policy = parse(self.policy) if isinstance(self.policy, str) else self.policy
        parts = {
            "settings": identity.of_value([named, trace]),
            "trace": identity.of_value(asdict(self.requests)),
            "preset": identity.of_value([self.options[name] for name in ("engine", "cost")]),
        }
        rest = [self.qps, self.arrivals, self.alpha, self.seed, policy, self.options]
        rest += [self.slo] if self.slo else []
        return parts | {"key": identity.of_value([parts["trace"], rest])}


def resolve(cell: Cell, sources: Sources) -> Run:
    """The run of a cell. Raises InputError for a setting that is not allowed, named with its run."""
    given = cell.settings
    try:
        keys.check_single(given)
        policy = policy_of(given)
        options = options_of(given, sources.folder)
        usual = "trace" if given.get("qps") is None else generators.arrivals_of(given.get("trace"))
        return Run(
            cell,
            _requests(given, sources),
            given.get("arrivals") or usual,
            given.get("alpha"),
            policy,
            options,
            slo_of(given),
        )
    except InputError as error:
        raise InputError(f"{cell}: {error}") from error


def _requests(given: Mapping[str, object], sources: Sources) -> Requests:
    if "trace" not in given:
        raise InputError(f"trace is missing: a file, or {generators.SPECS}")
    sample = given.get("sample", "head")
    if sample not in SAMPLES:
        raise InputError(f"sample={sample!r} is unknown: allowed are {', '.join(SAMPLES)}")
    count = given.get("requests")
    if count is not None:
        whole("requests", count)
    loading = {name: given[name] for name in ("format", "on_bad", "unsorted") if given.get(name) is not None}
    loading |= members(given, "filter")
    trace, seed = given["trace"], given.get("seed", 0)
    if generators.is_generator(trace):
        if count is None and trace in GENERATORS:
            raise InputError(f"requests is missing: say how many requests {trace} should draw")
        if loading or sample != "head":
            stray = ", ".join([*loading, *["sample"] * (sample != "head")])
            raise InputError(f"{stray}: this goes with a trace that there is, and {trace} draws its own")
    return sources.requests(trace, count, sample, str(given.get("lengths", "oracle")), seed, **loading)


def whole(name: str, value: object) -> int:
    """`value`, if it is a whole number >= 1; raises InputError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name}={value!r} should be a whole number >= 1")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# --- running it -------------------------------------------------------------------------------------------


def arrive(run: Run, frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The run's requests, with their arrival times."""
    from astrolabe_lab.arrivals import with_arrivals

    return with_arrivals(prepared(run.requests, frames), run.qps, run.arrivals, run.seed, run.alpha)


def measure(run: Run, trace: pd.DataFrame) -> tuple[dict[str, object], pd.DataFrame]:
    """(summary, result frame) of the run on these requests; the summary has `wall_s`, what `simulate` took."""
    from astrolabe_lab import policies
    from astrolabe_lab.measure import summarise
    from astrolabe_lab.sim.cluster import simulate

    parse, slo = policies.parse, run.slo
    if in_pools := "pools" in run.options:
        from astrolabe_lab.disagg.simulate import simulate_pools as simulate

        parse, slo = pools.parse, slo or pools.slo_of(run.options)
    policy = parse(run.policy) if isinstance(run.policy, str) else copy.deepcopy(run.policy)
    began = time.perf_counter()
    results = simulate(trace, policy, seed=run.seed, **run.options)
    wall_s = time.perf_counter() - began
    row = {"qps": own_rate(trace["arrived_s"]) if run.qps is None else run.qps}
    row |= summarise(results, by=[], slo=slo).to_dict("records")[0]
    if in_pools:
        row |= pools.spread(results, run.options["pools"][1])
    return row | {"wall_s": wall_s}, results


def run_cell(run: Run, frames: Mapping[str, pd.DataFrame], keep_requests: bool = False) -> tuple[dict, object]:
    """(summary, the result frame if `keep_requests`, else None): what a worker does with one run."""
    summary, results = measure(run, arrive(run, frames))
    return summary, results if keep_requests else None


def row_of(cell: Cell, summary: Mapping[str, object]) -> dict[str, object]:
    """The row of the sweep's frame: what tells the run from others, then what was measured."""
    seed = cell.settings.get("seed", 0)
    named = {"source": "simulated", "policy": cell.label, "qps": summary["qps"], "seed": seed}
    return named | dict(cell.columns) | {name: value for name, value in summary.items() if name != "qps"}


def varied(rows: pd.DataFrame) -> list[str]:
    """The columns, of rows that `row_of` made, in which runs differ, beside the seed; `policy` is always one."""
    names = rows.columns[rows.columns.get_loc("policy") : rows.columns.get_loc("n")]
    return [name for name in names if name != "seed" and (name == "policy" or rows[name].astype(str).nunique() > 1)]


def own_rate(arrived_s: pd.Series) -> float:
    """Requests a second over the span of the arrivals, as `arrivals.with_arrivals` scales it; NaN without one."""
    span_s = arrived_s.iloc[-1] - arrived_s.iloc[0]
    return (len(arrived_s) - 1) / span_s if span_s > 0 else math.nan
