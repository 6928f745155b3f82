"""A policy learns nothing that a router could not know: not by looking, not by keeping, not by writing.

Two kinds of proof. The walk follows every reference from what a policy is given and looks for the truth. The twin
worlds differ in true lengths only: until the first request that tells them apart has ended, all that a policy sees is
the same to the last bit.
"""

import gc
import types
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from clusters import AMPLE, COST, SECOND, TIGHT, Constant, requests, same, short_trace

from astrolabe_lab.errors import InputError
from astrolabe_lab.objective import METRICS
from astrolabe_lab.request import Request
from astrolabe_lab.rng import stream
from astrolabe_lab.sim.asking import Asking
from astrolabe_lab.sim.cluster import ControlPlane, LatencyNoise, Outage, simulate
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.sim.faults import Faults
from astrolabe_lab.sim.knowledge import Knowledge
from astrolabe_lab.sim.run import Router, Run
from astrolabe_lab.sim.state import ENGINE, REQUEST, State, new_state

SEED = 918273645
# No signal of the run below reaches these numbers: whoever holds one holds a true length.
TRUTH = tuple(range(2011, 2011 + 40 * 7, 7))
ROOMY = EngineConfig(
    max_num_seqs=64, max_num_batched_tokens=256, block_size=16, num_gpu_blocks=90_000, max_model_len=4096
)
SECRETS = requests(np.arange(40) * 0.02, 5, TRUTH, predicted_tokens=1)

# --- the walk ------------------------------------------------------------------------------------------------------

NOT_FOLLOWED = (types.ModuleType, type, str, bytes, int, float, complex, bool, type(None), types.CodeType)


def neighbours(thing):
    """All that ``thing`` refers to: attributes, slots, items, closures, bound selves, bases of arrays."""
    if isinstance(thing, (types.FunctionType, types.LambdaType)):  # not its globals: those are the module's
        yield from (cell.cell_contents for cell in thing.__closure__ or ())
        yield from (thing.__defaults__, thing.__kwdefaults__, thing.__dict__)
        return
    if isinstance(thing, memoryview):
        yield thing.obj
    if isinstance(thing, np.ndarray):
        yield thing.base
        if thing.dtype == object:
            yield from thing.flat
        return
    if isinstance(thing, dict):
        yield from thing.keys()
        yield from thing.values()
    elif isinstance(thing, (list, tuple, set, frozenset)):
        yield from thing
    for name in dir(thing):
        if name in ("__class__", "__doc__", "__abstractmethods__"):
            continue
        try:
            value = getattr(thing, name)
        except Exception:
            continue
        if name in ("__self__", "__func__", "__wrapped__") or not callable(value):
            yield value
        else:
            yield getattr(value, "__self__", None)
    for referent in gc.get_referents(thing):
        if not (isinstance(referent, dict) and "__name__" in referent and "__builtins__" in referent):
            yield referent


def reached(*starts, limit=200_000):
    """Every object that can be reached from ``starts``."""
    seen, queue = {}, list(starts)
    while queue:
        thing = queue.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        assert len(seen) < limit, "the walk leaves the policy's world"
        if not isinstance(thing, NOT_FOLLOWED):
            queue.extend(neighbours(thing))
    return list(seen.values())


def betrayals(things):
    """What among ``things`` holds a true length, the simulator's state, or the seed."""
    truth = set(TRUTH)
    for thing in things:
        if isinstance(thing, (State, Run, Router, Knowledge, Asking, Faults)):
            yield f"a {type(thing).__name__}"
        elif isinstance(thing, np.ndarray):
            if thing.dtype in (REQUEST, ENGINE):
                yield f"an array of {thing.dtype.names}"
            numbers = [thing[name] for name in thing.dtype.names] if thing.dtype.names else [thing]
            for column in numbers:
                if column.dtype.kind in "iuf" and np.isin(column, TRUTH).any():
                    yield f"an array with true lengths: {column}"
        elif isinstance(thing, (int, float, np.number)) and not isinstance(thing, bool):
            if thing in truth:
                yield f"the true length {thing}"
            if thing == SEED:
                yield "the seed"


class Snoop:
    """Walks from all that it is given at every seventh decision, its own memory included."""

    def __init__(self):
        self.found, self.walks, self.kept = [], [], []

    def __deepcopy__(self, memo):
        return self

    def choose(self, request, cluster, rng):
        if request.rid % 7 == 3:
            predicted = cluster.predict(request, lambda p: (self.kept.append(p), p.e2e_s)[1], range(len(cluster)))
            everything = reached(request, cluster, cluster.signals, cluster[0], rng, predicted, self.kept)
            self.walks.append(len(everything))
            self.found += betrayals(everything)
            self.kept += [request, cluster, cluster.signals, cluster[0]]
        return request.rid % len(cluster)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"control": ControlPlane(0.1, 0.005, (0.01, 0.05), 0.01, 2), "latency_noise": LatencyNoise(0.1, 0.1)},
        {"faults": (Outage(1, 0.1, 0.5, "redispatch"), Outage(2, 0.2, 0.4, "pause"))},
    ],
    ids=["ideal", "delayed", "faults"],
)
def test_no_reference_leads_to_the_truth(settings):
    snoop = Snoop()
    result = simulate(SECRETS, snoop, instances=3, engine=ROOMY, cost=COST, seed=SEED, **settings)
    assert len(snoop.walks) >= 5 and min(snoop.walks) > 20
    assert not snoop.found, snoop.found
    assert set(TRUTH) <= set(result.generated_tokens) | {0} | set(result.output_tokens)


def test_the_walk_does_find_the_truth_where_it_is():
    """The walk is no use if it misses what is planted: in slots, closures, bound methods, bases of views."""
    lengths = np.array(TRUTH)

    class Slotted:
        __slots__ = ("held",)

        def method(self):
            return None

    class Simulator:
        def __init__(self):
            self.state = new_state([ROOMY], [COST], 3)

        def answer(self):
            return self.state

    hidden = Slotted()
    hidden.held = lengths[2:9]
    view = lengths[1:1].view()
    plants = [
        hidden,
        hidden.method,
        lambda: lengths,
        lambda x=TRUTH: x,
        {"a": [({TRUTH[3]},)]},
        SimpleNamespace(deep=SimpleNamespace(deeper=float(TRUTH[5]))),
        view,
        memoryview(lengths),
        iter([TRUTH[0]]),
        stream(SEED, "policy"),
        Simulator().answer,
    ]
    for plant in plants:
        assert list(betrayals(reached(plant))), plant


def test_the_generator_does_not_tell_the_seed_yet_draws_what_the_seed_says():
    """With the seed a policy could draw the noise of the predicted lengths itself and take it off again."""
    drawn = []

    def choose(request, cluster, rng):
        drawn.append((rng.bit_generator.seed_seq.entropy, rng.random()))
        return 0

    simulate(SECRETS.head(5), SimpleNamespace(choose=choose), instances=2, engine=ROOMY, cost=COST, seed=SEED)
    expected = stream(SEED, "policy")
    assert [number for _, number in drawn] == [expected.random() for _ in range(5)]
    assert SEED not in np.ravel([entropy for entropy, _ in drawn])


def test_a_request_has_no_place_for_its_true_length():
    assert set(Request.__slots__) == {"rid", "arrived_s", "prompt_tokens", "predicted_tokens", "slo", "prefix_blocks"}
    assert not any("output" in name for name in dir(Request))


# --- worlds that differ in true lengths only -----------------------------------------------------------------------


class Witness:
    """Records all that it can see, predictions included, as (arrival, bytes); its Predictors look ahead as told."""

    def __init__(self, foresight="none"):
        self.seen, self.foresight = [], foresight

    def __deepcopy__(self, memo):
        return self

    def choose(self, request, cluster, rng):
        everything = [repr(request), cluster.signals.tobytes(), cluster.instances, rng.random()]
        for metric in (*METRICS, "blend:0.5"):
            everything.append(cluster.predict(request, metric, range(len(cluster))).tobytes())
        self.seen.append((request.arrived_s, everything))
        return int(rng.random() * len(cluster))


PLANES = {
    "ideal": ControlPlane(),
    "stale": ControlPlane(status_interval_s=0.4),
    "delayed": ControlPlane(0.3, 0.01, (0.01, 0.1), 0.05, 2),
}


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize(
    ("scheduler", "foresight"),
    [("v1", "none"), ("v1", "both"), ("v0_chunked", "both"), ("v0_prefill_first", "none"), ("async", "both")],
)
def test_until_a_request_ends_nothing_shows_how_long_it_will_be(scheduler, foresight, plane):
    """A request's answer grows by a third. With asynchronous scheduling vLLM leaves a request out of the batch that is
    queued behind its last one, so that one step earlier its blocks show; hence the allowance there."""
    keys = "async_scheduling=true" if scheduler == "async" else f"scheduler={scheduler}"
    engine = EngineConfig.parse(
        keys + (",max_num_batched_tokens=160" if scheduler == "v0_prefill_first" else ""), TIGHT
    )
    settings = {
        "instances": 3,
        "engine": engine,
        "cost": COST,
        "control": PLANES[plane],
        "latency_noise": LatencyNoise(0.1, 0.1),
    }
    allowance_s = 0.1 if scheduler == "async" else 0.0
    trace = short_trace(160, 60)
    world = Witness(foresight)
    result = simulate(trace, world, **settings)
    early = (result.status == "ok") & (result.finished_s < trace.arrived_s.max() - 0.3)
    candidates = result[early & result.output_tokens.between(6, 60)].rid
    told_apart = 0
    for rid in candidates.iloc[:: len(candidates) // 5]:
        longer = trace.copy()
        longer.loc[longer.rid == rid, "output_tokens"] += int(trace.output_tokens[rid]) // 3 + 1
        other = Witness(foresight)
        simulate(longer, other, **settings)
        apart_s = result.finished_s[rid] - allowance_s
        before = [k for k, (at, _) in enumerate(world.seen) if at + PLANES[plane].tag_s < apart_s]
        for k in before:
            assert world.seen[k] == other.seen[k], (rid, k)
        told_apart += world.seen != other.seen
        assert rid < len(before) < len(trace)
    assert told_apart >= 5  # afterwards the worlds do differ: the witness is not blind


def test_in_the_middle_of_a_step_signals_are_those_of_its_start():
    """One request, steps of a second: its third token, and its end, come at 3 s."""

    class Timed(Witness):
        def choose(self, request, cluster, rng):
            x = cluster[0]
            self.seen.append((x.running, x.waiting, x.free_blocks, x.pending_tokens))
            return 1 if request.rid else 0

    witness = Timed()
    arrivals_s = [0.0, 0.1, 0.9, 1.1, 1.9, 2.1, 2.9, 2.999, 3.0, 3.5]
    trace = requests(arrivals_s, 6, [3] + [1] * 9)
    simulate(trace, witness, instances=2, engine=AMPLE, cost=SECOND)
    total = AMPLE.usable_blocks
    first, second, third, over = (1, 0, total - 2, 9), (1, 0, total - 2, 3), (1, 0, total - 2, 2), (0, 0, total, 0)
    assert witness.seen == [over, first, first, second, second, third, third, third, over, over]


# --- keeping and writing -------------------------------------------------------------------------------------------


def test_what_a_policy_keeps_shows_no_more_than_what_it_is_given_next():
    class Keeper(Constant):
        kept = []
        ages = Counter()

        def choose(self, request, cluster, rng):
            for old_cluster, old_signals, old_row, as_it_was in self.kept:
                assert old_cluster is cluster
                assert old_row == as_it_was  # a record is a snapshot
                assert old_signals.base is cluster.signals.base
            self.kept.append((cluster, cluster.signals, cluster[0], type(cluster[0])(*cluster.signals[0].item())))
            return request.rid % len(cluster)

    simulate(SECRETS, Keeper(), instances=3, engine=ROOMY, cost=COST)
    kept_cluster = Keeper.kept[-1][0]
    with pytest.raises(InputError, match="the simulation of this cluster has ended"):
        kept_cluster.predict(Request(0, 0.0, 5, 5), "e2e_s", [0])


def test_signals_cannot_be_written():
    def attempts(cluster):
        yield lambda: cluster.signals.__setitem__("running", 0)
        yield lambda: cluster.signals["waiting"].__setitem__(0, 9)
        yield lambda: cluster.signals[0].__setitem__("free_blocks", 9)
        yield lambda: cluster.signals.fill(0)
        yield lambda: setattr(cluster[0], "running", 0)

    refused = Counter()

    def choose(request, cluster, rng):
        for k, attempt in enumerate(attempts(cluster)):
            with pytest.raises((ValueError, AttributeError, TypeError)):
                attempt()
            refused[k] += 1
        return 0

    simulate(SECRETS, SimpleNamespace(choose=choose), instances=3, engine=ROOMY, cost=COST)
    assert refused == Counter(dict.fromkeys(range(5), len(SECRETS)))
    with pytest.raises(AttributeError):
        Request(0, 0.0, 5).prompt_tokens = 6


@pytest.mark.parametrize("plane", PLANES)
def test_breaking_in_and_overwriting_signals_changes_nothing(plane):
    """Whoever reaches the array behind the view spoils a copy: the engines, and the next decision, are as before."""

    class Vandal:
        def __init__(self, spoil):
            self.spoil, self.seen = spoil, []

        def __deepcopy__(self, memo):
            return self

        def choose(self, request, cluster, rng):
            self.seen.append(cluster.signals.tobytes())
            if self.spoil:
                array = cluster.signals if cluster.signals.base is None else cluster.signals.base
                try:
                    array.flags.writeable = True
                    array[...] = 77
                except (ValueError, TypeError, AttributeError):
                    pass
            return request.rid % len(cluster)

    trace = short_trace(120, 60)
    vandal, gentle = Vandal(True), Vandal(False)
    results = [
        simulate(trace, policy, instances=3, engine=TIGHT, cost=COST, control=PLANES[plane])
        for policy in (vandal, gentle)
    ]
    same(*results)
    assert vandal.seen == gentle.seen
