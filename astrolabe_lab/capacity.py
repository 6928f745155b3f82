"""How many requests a second a cluster takes under a policy while P99 TTFT keeps its limit."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from astrolabe_lab.measure import Capacity

OF_CONDUCT = ("on", "keep", "mix", "retries")  # options of a sweep that are none of its runs
SAMPLES = ("auto", "head", "permute", "resample")
UNBEARABLE = 0.01  # the share of requests that can be rejected without P99 being infinite
FEW = 20_000  # requests, over all runs, that are not worth starting processes for


def find(
    trace: pd.DataFrame | str | Path,
    policies: object | Sequence[object] | Mapping[str, object],
    *,
    kinds: Sequence[str] = ("finite", "sustained"),
    metric: str = "ttft_p99",
    limit_s: float = 10.0,
    requests: int | None = None,
    sustained_requests: int = 30_000,
    seeds: Sequence[int] = tuple(range(10)),
    qps_range: tuple[float, float] | None = None,
    coarse_qps: float = 2.0,
    fine_qps: float = 0.25,
    sample: str = "auto",
    instances: int = 12,
    workers: int | None = None,
    out: str | Path | None = None,
    progress: bool = True,
    **sweep_options: object,
) -> list[Capacity]:
    """The capacities of each policy, finite and sustained: `measure.Capacity` objects, in that order.

    `trace`, `policies`, `instances` and `sweep_options` (lengths, arrivals, engine, cost, control, mix, on ...)
    are those of `sweep.sweep`, which runs them; one policy may be given alone. `metric` (ttft_p99, tpot_p99 or
    e2e_p99) is to stay within `limit_s`. Both kinds are found unless
    `kinds` asks for one: runs of `requests` requests (default: as many as the trace has, or 10,000), and of
    `sustained_requests`, at least 30,000. `sample` says how each seed draws its requests from the trace: permute
    (the same set in another order, as the Astrolabe paper; no more than the trace has), resample (with
    replacement: intervals then tell about the population that the trace stands for), head (its first), or auto:
    permute where the trace has enough, else resample. With arrivals="trace" the trace's own times are stretched to
    each rate, and there are no more requests than it has. `qps_range` is searched (default: half a request to ten
    per instance and second), `measure.capacity` tells how.

    `out`: a folder that keeps every run, so that the same call goes on where it was ended. `progress`: lines on
    stderr. Raises InputError for arguments that are none of these, before the first search.
    """
    from astrolabe_lab import measure
    from astrolabe_lab.generators import arrivals_of
    from astrolabe_lab.policies import spec

    sweep_options.setdefault("arrivals", arrivals_of(trace))
    if isinstance(policies, str) or hasattr(policies, "choose"):
        policies = [policies]
    if not isinstance(policies, Mapping):
        policies = {one if isinstance(one, str) else spec(one): one for one in policies}
    if not policies:
        raise InputError("policies is empty: name at least one")
    if sample not in SAMPLES:
        raise InputError(f"sample={sample!r} is not one of {', '.join(SAMPLES)}")
    if unknown := [kind for kind in kinds if kind not in measure.KINDS]:
        raise InputError(f"kinds holds {unknown[0]!r}; allowed are {', '.join(measure.KINDS)}")
    trace, size = _requests_of(trace, own_times=sweep_options["arrivals"] == "trace")
    wanted = {"finite": requests or size or 10_000, "sustained": sustained_requests}
    if qps_range is None:
        qps_range = (0.5 * instances, 10.0 * instances)
    searches = {}
    for kind in kinds:
        drawn = {
            "requests": wanted[kind],
            "sample": _drawn(kind, sample, wanted[kind], size, sweep_options["arrivals"]),
        }
        searches[kind] = sweep_options | {"instances": instances} | drawn
        _rehearse(trace, policies, qps_range, seeds, searches[kind])
    found = []
    for label, policy in policies.items():
        for kind, options in searches.items():
            n = wanted[kind]
            if progress and size is not None and n > size and options["sample"] == "head":
                print(
                    f"capacity: the trace has {size:,} requests, fewer than {n:,}: runs are of {size:,}",
                    file=sys.stderr,
                )
            options = options | {"workers": workers, "out": None if out is None else Path(out) / kind}
            runs = _Runs(trace, label, policy, f"{kind}({n:,})", metric, options, progress)
            found.append(
                measure.capacity(
                    runs, kind=kind, metric=metric, limit_s=limit_s, qps_range=qps_range, seeds=seeds,
                    coarse_qps=coarse_qps, fine_qps=fine_qps,
                )
            )  # fmt: skip
            runs.tell(str(found[-1]))
    return found


def table(capacities: Sequence[Capacity]) -> pd.DataFrame:
    """A row per capacity: `policy, kind, n, metric, limit_s, capacity_qps, low_qps, high_qps, seeds, censored`."""
    import pandas as pd

    names = ["policy", "kind", "n", "metric", "limit_s", "mean_qps", "low_qps", "high_qps", "seeds", "censored"]
    rows = [[getattr(one, name) for name in names] for one in capacities]
    return pd.DataFrame(rows, columns=names).rename(columns={"mean_qps": "capacity_qps"})


def differences(capacities: Sequence[Capacity], baseline: str, level: float = 0.95) -> pd.DataFrame:
    """How far each policy's capacity lies from the baseline's, seed by seed: `measure.paired_difference`'s columns,
    with `kind` in the place of `qps`.

    Raises InputError where kinds have other seeds, or a seed is censored: of a bound there is no difference.
    """
    import pandas as pd

    from astrolabe_lab import measure

    parts = []
    for kind in dict.fromkeys(one.kind for one in capacities):
        same = [one for one in capacities if one.kind == kind]
        if cut := [one.policy for one in same if one.censored]:
            raise InputError(f"{kind} capacity of {', '.join(cut)} is censored: search a wider qps_range first")
        rows = pd.concat([one.per_seed.assign(policy=one.policy, qps=0.0) for one in same])
        parts.append(measure.paired_difference(rows, "capacity_qps", baseline, level).assign(kind=kind))
    found = pd.concat(parts, ignore_index=True)
    found["p_holm"] = measure.holm(found["p"])
    found["clear"] = found["p_holm"] < 1 - level
    return found[["policy", "kind", *(name for name in found if name not in ("policy", "kind", "qps"))]]


@dataclass
class _Runs:
    """Rates and seeds -> summary rows, through `sweep.sweep`."""

    trace: object
    label: str
    policy: object
    what: str  # kind and size, for people
    metric: str
    options: dict[str, object]
    progress: bool
    made: int = 0
    began: float = field(default_factory=time.monotonic)

    def __call__(self, rates: Sequence[float], seeds: Sequence[int]) -> pd.DataFrame:
        from astrolabe_lab import measure, sweep

        few = len(rates) * len(seeds) * self.options["requests"] <= FEW
        options = self.options | ({"workers": 1} if few and self.options.get("on", "local") == "local" else {})
        found = sweep.sweep(self.trace, {self.label: self.policy}, rates, seeds, progress=False, **options)
        self.made += len(found)
        never = (found["rejected"] / found["n"]).max()
        if never >= UNBEARABLE:
            row = found.loc[(found["rejected"] / found["n"]).idxmax()]
            raise InputError(
                f"{self.label}, {self.what}: the engine can never run {row['rejected']:,} of {row['n']:,} requests "
                "(longer than max_model_len, or than its whole KV cache), and a rejected one counts as late: no rate "
                "keeps the P99. Raise the engine's max_model_len, or leave them out of the trace (`astrolabe trace "
                "make FILE --filter max_total_tokens=N --out SHORTER.parquet`)"
            )
        span = f"{rates[0]:g} QPS" if len(rates) == 1 else f"{rates[0]:g}..{rates[-1]:g} QPS"
        seen = found[f"{self.metric}_all_s"]
        self.tell(
            f"{self.label}, {self.what}: {span}, {len(seeds)} seeds: {measure.named(self.metric)} "
            f"{seen.min():.3g}..{seen.max():.3g} s "
            f"({self.made} runs, {time.monotonic() - self.began:.0f} s)"
        )
        return found

    def tell(self, line: str) -> None:
        if self.progress:
            print(f"capacity: {line}", file=sys.stderr, flush=True)


def _requests_of(trace, own_times: bool):
    """The trace, loaded once, and how many requests it has (None: as many as asked for)."""
    import pandas as pd

    from astrolabe_lab.generators import is_generator
    from astrolabe_lab.trace import load

    if is_generator(trace):
        return trace, None
    frame = trace if isinstance(trace, pd.DataFrame) else load(trace)
    if own_times and "arrived_s" not in frame:
        raise InputError("arrivals='trace' needs the trace's own times, and it has no column arrived_s: use poisson")
    return frame if own_times else frame.drop(columns="arrived_s", errors="ignore"), len(frame)


def _drawn(kind: str, sample: str, n: int, size: int | None, arrivals: str) -> str:
    """How runs of this kind draw their n requests from the trace's `size`; raises InputError where they cannot."""
    from astrolabe_lab.measure.knee import check_sustained

    if size is not None and sample == "auto":
        sample = "permute" if n <= size else "resample"
    if size is not None and n > size:
        lacking = f"{kind} runs of {n:,} requests, and the trace has {size:,}"
        fewer = "take fewer" if kind == "finite" else "search for the finite kind alone"
        if arrivals == "trace":
            raise InputError(f"{lacking}, so that the others have no times of their own: {fewer}, or use poisson")
        if sample == "permute":
            raise InputError(f"{lacking}, none of which is to come twice: {fewer}, or use sample='resample'")
    if kind == "sustained":
        check_sustained(n if size is None or sample == "resample" else min(n, size))
    return "head" if size is None else sample


def _rehearse(trace, policies: Mapping[str, object], qps_range, seeds: Sequence[int], options: Mapping) -> None:
    """Raise the InputError that the search's first sweeps would."""
    from astrolabe_lab import sweep

    settings = {name: value for name, value in options.items() if name not in OF_CONDUCT}
    sweep.rehearse(trace, policies, qps_range[:1], seeds[:1], **settings)
