"""The compiled twins are the policy objects, draw for draw: the same frame to the last bit."""

import pytest
from clusters import AMPLE, COST, TIGHT, same, sharegpt_trace, short_trace

from astrolabe_lab import policies
from astrolabe_lab.cost import StepCost
from astrolabe_lab.policies import Astrolabe
from astrolabe_lab.sim import twin
from astrolabe_lab.sim.cluster import ControlPlane, LatencyNoise, Outage, simulate
from astrolabe_lab.sim.config import EngineConfig

INSTANCES = 5
BLIND = (
    *("random", "round_robin", "least_loaded", "least_latency"),
    *("llumnix_minus_a", "llumnix_minus_b", "llumnix_minus_b:defrag=false"),
)
ASTROLABE = (
    *(f"astrolabe:k={k}" for k in (1, 2, 4, INSTANCES, "all")),
    *(f"astrolabe:k={k},metric={m}" for k in (2, 4) for m in ("ttft_s", "tpot_s", "added_delay_s", "blend:0.3:2")),
    *(f"astrolabe:k={k},foresight={foresight}" for k in (2, "all") for foresight in ("arrivals", "learned", "both")),
    *(f"astrolabe:metric={m},foresight=both" for m in ("ttft_s", "tpot_s", "added_delay_s", "blend:0.3")),
)
SLOW = StepCost.parse("base_s=0.03,per_token_s=2e-4,per_seq_s=1e-4")
UNLIKE = {
    "engine": [
        TIGHT,
        AMPLE,
        EngineConfig.parse("scheduler=v0_chunked", TIGHT),
        EngineConfig.parse("async_scheduling=true,num_gpu_blocks=80", TIGHT),
        EngineConfig.parse("scheduler=v0_prefill_first,max_num_batched_tokens=160", TIGHT),
    ],
    "cost": [COST, SLOW, COST, SLOW, COST],
    "predictor_cost": [COST, COST, SLOW, SLOW, COST],
}
SETTINGS = {
    "calm": ((100, 12), {"engine": AMPLE}),
    "overload": ((400, 90), {"engine": TIGHT}),
    "noise": ((250, 60), {"engine": TIGHT, "latency_noise": LatencyNoise(0.3, 1.0)}),
    "common noise": ((120, 60), {"engine": TIGHT, "latency_noise": LatencyNoise(common=0.2)}),
    "unlike engines": ((300, 40), UNLIKE),
    "single steps": ((120, 60), {"engine": TIGHT, "leaps": False}),
    "extension": ((150, 60), {"engine": TIGHT, "extension_tokens": 40}),
}


def both(policy, trace, **settings):
    """The frames of the twin and of the object, asserted equal; returns one."""
    settings = {"instances": INSTANCES, "cost": COST, **settings}
    compiled = simulate(trace, policy, compiled=True, **settings)
    called = simulate(trace, policy, compiled=False, **settings)
    same(compiled, called)
    return compiled


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("policy", BLIND + ASTROLABE)
def test_a_twin_equals_its_object(policy, setting):
    shape, settings = SETTINGS[setting]
    for seed, lengths in enumerate(("noisy:0.5", "oracle")):
        result = both(policy, short_trace(*shape, seed=seed, lengths=lengths), seed=seed, **settings)
        if setting == "overload":
            assert (result.status == "rejected").sum() >= 3 and result.preemptions.sum() > 20
        elif setting == "calm":
            assert (result.status == "ok").all()


@pytest.mark.parametrize("policy", ["least_loaded", "astrolabe"])
def test_a_twin_equals_its_object_on_the_paper_s_engine(policy):
    both(policy, sharegpt_trace(400, 30), instances=8, engine=None, cost=None)


@pytest.mark.parametrize("policy", ["round_robin", "astrolabe"])
def test_a_twin_run_in_pieces_for_progress_is_the_same_run(policy):
    trace = short_trace(1300, 60)  # three pieces
    seen = []
    settings = {"instances": INSTANCES, "engine": TIGHT, "cost": COST}
    pieces = simulate(trace, policy, compiled=True, progress=lambda *call: seen.append(call), **settings)
    whole = simulate(trace, policy, compiled=True, **settings)
    assert len(seen) > 2
    assert pieces.equals(whole)


def test_requests_of_no_engine_are_drawn_alike():
    """Predicted to exceed every engine: no prediction fits, and both draw from all instances."""
    trace = short_trace(120, 40, lengths="constant:200")
    result = both("astrolabe", trace, engine=TIGHT)
    assert result.predicted_e2e_s.isna().all() and result.instance.nunique() == INSTANCES


def test_k_of_all_equals_full_fan_out():
    trace = short_trace(200, 60)
    fan_out, all_k = (both(f"astrolabe:k={k}", trace, engine=TIGHT) for k in ("all", INSTANCES))
    assert fan_out.drop(columns="policy").equals(all_k.drop(columns="policy"))
    # a permutation of all instances finds the same minimum: only ties could tell a draw from a fan-out
    one = both("astrolabe:k=1", trace, engine=TIGHT)
    assert not one.drop(columns="policy").equals(all_k.drop(columns="policy"))


def test_a_blend_begins_at_own_latency_and_ends_at_added_delay():
    trace = short_trace(300, 60)
    for weight, metric in ((0, "e2e_s"), (1, "added_delay_s")):
        blend, alone = (both(f"astrolabe:k=3,metric={m}", trace, engine=TIGHT) for m in (f"blend:{weight}", metric))
        same(blend, alone, ("policy",))
    between = both("astrolabe:k=3,metric=blend:0.5", trace, engine=TIGHT)
    assert (between.instance != blend.instance).any()


def test_only_these_have_twins_and_only_under_an_ideal_control_plane():
    assert all(twin.twin_of(policies.parse(policy)) is not None for policy in BLIND + ASTROLABE)
    assert twin.twin_of(Astrolabe(2, lambda p: p.ttft_s)) is None

    class Mine(Astrolabe):
        """A subclass may choose otherwise: it is called, not replaced."""

        def choose(self, request, cluster, rng):
            return 0

    def run(policy, **settings):
        return simulate(short_trace(30, 40), policy, instances=3, engine=TIGHT, cost=COST, **settings)

    assert twin.twin_of(Mine()) is None
    assert set(run(Mine()).instance) == {0}
    assert (run("least_loaded", control=ControlPlane(tag_s=0.5)).decision_s == 0.5).all()
    assert 1 not in set(run("least_loaded", faults=[Outage(1, 0.0)]).instance)
