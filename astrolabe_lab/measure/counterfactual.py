"""What would have come of the choices that were not made: a decision, replayed on each of its candidates."""

import copy
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from astrolabe_lab.errors import InputError

from .frames import require_columns
from .intervals import wilson

METRICS = ("e2e_s", "ttft_s", "tpot_s")
CANDIDATES = ("asked", "all")
STRETCH = 64  # requests dispatched between two looks whether the replayed one has ended
TIE_S = 1e-9


def replay_decisions(
    trace: pd.DataFrame,
    policy: object,
    *,
    decisions: int | Sequence[int] = 200,
    candidates: str = "asked",
    metric: str = "e2e_s",
    seed: int = 0,
    progress=None,
    **simulate_options: object,
) -> pd.DataFrame:
    """What each candidate of a sample of decisions would have given, a row per decision and candidate.

    The run is that of `simulate(trace, policy, seed=seed, **simulate_options)`. At each sampled decision the
    world is copied once per candidate, the request sent there, and the world goes on: later requests arrive
    and are dispatched by the same policy, with the same draws, until the request has ended. So the instances,
    later choices and their consequences are those that would have been, and no prediction is involved.

    `decisions`: how many, spread evenly over the trace without its first and last tenth, or the positions of
    their requests. `candidates`: `asked`, those whose predictions the policy asked for, or `all` instances
    (for policies that ask for none). `metric`: what the candidates are ranked by: e2e_s, ttft_s or tpot_s.

    Columns: `decision` (the request's position), `arrived_s, instance, predicted` (the value the policy was
    told; NaN where it was told none), `chosen`, `actual_s` (the metric; inf where the request was rejected or
    failed), `best` (actual_s lowest, or within 1e-9 s of it). Decisions that nobody was asked for (all
    candidates too small, say) have no rows under `asked`. Raises InputError as `simulate` does, and for
    arguments that are none of these.

    Source: "Rank-1" of the Astrolabe paper, which reports the share without saying how the candidates that
    were not chosen were measured.
    """
    from astrolabe_lab.sim import view

    if candidates not in CANDIDATES:
        raise InputError(f"candidates={candidates!r} is not one of {', '.join(CANDIDATES)}")
    if metric not in METRICS:
        raise InputError(f"metric={metric!r} is not one of {', '.join(METRICS)}")
    run = _prepared(trace, policy, seed, simulate_options)
    run.ask_policy(0, 0)  # builds what all copies share
    positions = _positions(decisions, len(run.arrived))
    rows, done = [], 0
    try:
        for count, position in enumerate(positions, 1):
            _dispatch(run, done, position)
            rows += _replayed(run, position, candidates, metric)
            done = position
            if progress:
                progress(count, len(positions))
    finally:
        view.forget(run.number)
    columns = ["decision", "arrived_s", "instance", "predicted", "chosen", "actual_s", "best"]
    return pd.DataFrame(rows, columns=columns)


def rank_one(replays: pd.DataFrame, level: float = 0.95) -> dict[str, float]:
    """How often the chosen candidate was the best: `decisions, rank_one, low, high, chance, regret_s, regret_pct`.

    `replays` is what `replay_decisions` found. `rank_one`: the share of decisions whose chosen candidate was
    actually best, with Wilson's interval (decisions that lie far apart are nearly independent). `chance`: what a
    uniform draw among the candidates would reach. `regret_s`, `regret_pct`: what the choice cost over the best
    candidate, on average, of decisions whose candidates all ended well. Decisions with one candidate count for
    nothing. Raises InputError where no decision had two.
    """
    require_columns(replays, ("decision", "chosen", "actual_s", "best"))
    groups = replays.groupby("decision")
    contested = groups["chosen"].transform("size") > 1
    contested &= groups["chosen"].transform("any")
    if not contested.any():
        raise InputError("no decision had two candidates: Rank-1 needs a policy that asks several, or candidates='all'")
    held = replays[contested]
    groups = held.groupby("decision")
    hits = int(held.loc[held["chosen"], "best"].sum())
    n = groups.ngroups
    low, high = wilson(hits, n, level)
    chosen = held[held["chosen"]].set_index("decision")["actual_s"]
    best = groups["actual_s"].min()
    finite = np.isfinite(groups["actual_s"].max())
    regret_s = (chosen - best)[finite]
    return {
        "decisions": n,
        "rank_one": hits / n,
        "low": low,
        "high": high,
        "chance": float((groups["best"].sum() / groups.size()).mean()),
        "regret_s": float(regret_s.mean()) if len(regret_s) else math.nan,
        "regret_pct": float(100 * (regret_s / best[finite]).mean()) if len(regret_s) else math.nan,
    }


class _Watching:
    """A policy that chooses as another does, noting what it asked for, or that is told what to choose."""

    def __init__(self, policy: object, told: int | None = None) -> None:
        self.policy, self.told, self.chosen = policy, told, None
        self.asked: dict[int, float] = {}

    def choose(self, request, cluster, rng):
        self.chosen = int(self.policy.choose(request, _Watched(cluster, self.asked), rng))
        return self.chosen if self.told is None else self.told


class _Watched:
    """A cluster view that notes the answers of `predict`, by index."""

    def __init__(self, cluster, asked: dict[int, float]) -> None:
        self._cluster, self._asked = cluster, asked

    def predict(self, request, metric, instances):
        answers = self._cluster.predict(request, metric, instances)
        self._asked.update(zip((int(index) for index in instances), answers.tolist(), strict=True))
        return answers

    def __getattr__(self, name):
        return getattr(self._cluster, name)

    def __len__(self):
        return len(self._cluster)

    def __getitem__(self, index):
        return self._cluster[index]

    def __iter__(self):
        return iter(self._cluster)


def _prepared(trace, policy, seed, options):
    """The run, before its first request."""
    import inspect

    from astrolabe_lab.sim.cluster import prepare, simulate

    bound = inspect.signature(simulate).bind(trace, policy, seed=seed, **options)
    bound.apply_defaults()
    known = dict(bound.arguments)
    other = known.pop("policy_seed")
    for name in ("compiled", "progress"):
        known.pop(name)
    return prepare(**known | {"seed": seed if other is None else other})


def _positions(decisions: int | Sequence[int], n: int) -> list[int]:
    if isinstance(decisions, int) and not isinstance(decisions, bool):
        if decisions < 1:
            raise InputError(f"decisions={decisions} is too few: replay at least one")
        tenth = n // 10
        return sorted({int(position) for position in np.linspace(tenth, max(n - 1 - tenth, tenth), decisions)})
    positions = sorted({int(position) for position in decisions})
    if not positions or not (positions[0] >= 0 and positions[-1] < n):
        raise InputError(f"decisions holds positions outside 0..{n - 1}, or none")
    return positions


def _dispatch(run, first: int, last: int) -> None:
    if run.has_twin and not _remembers(run):
        run.leave_to_twin(first, last)
    else:
        run.ask_policy(first, last)


def _remembers(run) -> bool:
    """True where decisions leave more behind than engines and draws: the object of a replayed decision and the twin
    of the others would each remember their own."""
    from astrolabe_lab.policies import RoundRobin

    return isinstance(run.policy, RoundRobin) or bool(run.asking.foresights[0]["kind"][0])


def _replayed(run, position: int, candidates: str, metric: str) -> list[tuple]:
    """The rows of one decision; `run` stands before it and stays there."""
    watching = _fork(run)
    with _running(watching):
        router = watching.routers[position % watching.control.routers]
        router.policy = own = _Watching(router.policy)
        watching.ask_policy(position, position + 1)
        healthy = watching.knowledge.healthy
    if own.chosen is None:  # nobody was healthy
        return []
    tried = list(own.asked) if candidates == "asked" else list(range(len(healthy)))
    actual = [_outcome(run, position, index, metric) for index in tried]
    best = min(actual, default=math.inf)
    return [
        (position, run.arrived[position], healthy[index], own.asked.get(index, math.nan), index == own.chosen,
         value, value <= best + TIE_S)
        for index, value in zip(tried, actual, strict=True)
    ]  # fmt: skip


def _outcome(run, position: int, index: int, metric: str) -> float:
    """The metric of the request at `position` if it goes to the instance at `index` of the healthy ones."""
    from astrolabe_lab.sim.state import FAILED, FINISHED, REJECTED

    fork = _fork(run)
    with _running(fork):
        router = fork.routers[position % fork.control.routers]
        policy = router.policy
        router.policy = _Watching(policy, index)
        fork.ask_policy(position, position + 1)
        router.policy = policy
        requests, total = fork.state.requests, len(fork.arrived)
        done = position + 1
        while requests["state"][position] not in (FINISHED, REJECTED, FAILED):
            if done == total:
                fork.finish_events()
                fork.drain()
                break
            last = min(done + STRETCH, total)
            _dispatch(fork, done, last)
            done = last
    if requests["state"][position] != FINISHED:
        return math.inf
    ttft_s = requests["first_token_s"][position] - fork.arrived[position]
    e2e_s = requests["finished_s"][position] - fork.arrived[position]
    after_first = max(int(requests["generated"][position]) - 1, 1)
    return float({"e2e_s": e2e_s, "ttft_s": ttft_s, "tpot_s": (e2e_s - ttft_s) / after_first}[metric])


def _fork(run):
    """A copy of the world: what happens in it leaves `run` alone. Arrivals, lengths and work space are shared."""
    from astrolabe_lab.sim import view

    shared = (run.trace, run.arrived, run.policy, run.known, run.asking.scratch, run.twin_rows)
    fork = copy.deepcopy(run, {id(thing): thing for thing in shared})
    fork.knowledge.set_healthy(fork.knowledge.healthy)  # its signals are a view of an array that was copied
    fork.number = view.register(fork.asking.answer, fork.prefix_overlap)
    for router in fork.routers:
        router.view = view.ClusterView(fork.number)
    return fork


class _running:
    def __init__(self, run) -> None:
        self.run = run

    def __enter__(self):
        return self.run

    def __exit__(self, *_):
        from astrolabe_lab.sim import view

        view.forget(self.run.number)
