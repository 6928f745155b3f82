import numpy as np
import pandas as pd
import pytest

from astrolabe_lab import arrivals, length, policies
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.measure import rank_one, replay_decisions
from astrolabe_lab.sim.cluster import ControlPlane, Outage, simulate


def requests(n=160, qps=9.0, seed=4, lengths="noisy:0.5"):
    drawn = length.attach(sharegpt_like.generate(n, seed=seed, text=False), lengths, seed)
    return arrivals.with_arrivals(drawn, qps, seed=seed)


class Told:
    """Chooses as another policy does, but for the first choice about one request."""

    needs_lengths = True

    def __init__(self, policy, rid, instance):
        self.policy, self.rid, self.instance = policy, rid, instance
        self.foresight = getattr(policy, "foresight", "none")

    def choose(self, request, cluster, rng):
        chosen = self.policy.choose(request, cluster, rng)
        if request.rid != self.rid:
            return chosen
        self.rid = None
        return cluster.instances.index(self.instance)


SETTINGS = {
    "twin": ("astrolabe:k=2", {}),
    "twin without predictions": ("least_loaded", {}),
    "object": ("min_tokens", {}),
    "foresight": ("astrolabe:k=2,foresight=both", {}),
    "a policy that counts": ("round_robin", {}),
    "delays and a stale status": (
        "astrolabe:k=2",
        {"control": ControlPlane(0.3, tag_s=0.01, predict_s=(0.02, 0.05), dispatch_s=0.01, routers=2)},
    ),
    "an outage": ("astrolabe:k=2", {"faults": (Outage(1, 3.0, 8.0, on_stop="redispatch"),)}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_candidate_gets_what_a_whole_run_with_that_choice_gives_it(name):
    policy, options = SETTINGS[name]
    trace = requests()
    options = {"instances": 4, "seed": 7, **options}
    replays = replay_decisions(trace, policy, decisions=[0, 40, 77, 159], candidates="all", **options)
    assert len(replays) >= 4 * 3
    for row in replays.itertuples():
        told = Told(policies.parse(policy), int(trace["rid"][row.decision]), row.instance)
        whole = simulate(trace, told, **options)
        assert row.actual_s == pytest.approx(whole["e2e_s"][row.decision], abs=1e-9), (row.decision, row.instance)


def test_the_chosen_candidate_gets_what_the_run_itself_gave():
    trace = requests()
    replays = replay_decisions(trace, "astrolabe:k=2", decisions=20, instances=4, seed=7)
    run = simulate(trace, "astrolabe:k=2", instances=4, seed=7)
    chosen = replays[replays["chosen"]].set_index("decision")
    assert len(chosen) == 20
    assert chosen["instance"].tolist() == run["instance"][chosen.index].tolist()
    np.testing.assert_allclose(chosen["actual_s"], run["e2e_s"][chosen.index], atol=1e-9)
    np.testing.assert_allclose(chosen["predicted"], run["predicted_e2e_s"][chosen.index], rtol=1e-12)
    assert (replays.groupby("decision").size() == 2).all()


@pytest.mark.parametrize("metric", ["e2e_s", "ttft_s", "tpot_s"])
def test_with_true_lengths_and_nobody_after_it_the_last_request_is_foretold_exactly(metric):
    trace = requests(lengths="oracle", qps=30)
    policy = f"astrolabe:k=all,metric={metric}"
    replays = replay_decisions(trace, policy, decisions=[len(trace) - 1], metric=metric, instances=4)
    assert replays["actual_s"].nunique() > 1
    np.testing.assert_allclose(replays["predicted"], replays["actual_s"], rtol=1e-9)
    found = rank_one(replays)
    assert (found["decisions"], found["rank_one"], found["regret_s"]) == (1, 1.0, 0.0)


def test_looking_at_other_choices_leaves_the_run_alone():
    trace = requests()
    few = replay_decisions(trace, "astrolabe:k=2", decisions=[150], instances=4, seed=7)
    many = replay_decisions(trace, "astrolabe:k=2", decisions=[*range(100, 151, 5)], instances=4, seed=7)
    pd.testing.assert_frame_equal(few, many[many["decision"] == 150].reset_index(drop=True))


def test_a_policy_that_asks_nobody_is_ranked_among_all_or_not_at_all():
    trace = requests(n=60)
    assert replay_decisions(trace, "random", decisions=5, instances=3).empty
    replays = replay_decisions(trace, "random", decisions=5, candidates="all", instances=3)
    assert len(replays) == 15 and replays["predicted"].isna().all()
    with pytest.raises(InputError, match="no decision had two candidates"):
        rank_one(replay_decisions(trace, "random", decisions=5, instances=3))


def replays(*decisions):
    """A frame of decisions, each a list of (chosen, actual)."""
    rows = [
        {"decision": i, "chosen": chosen, "actual_s": value, "best": value == min(v for _, v in decision)}
        for i, decision in enumerate(decisions) for chosen, value in decision
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_rank_one_counts_hits_ties_and_what_misses_cost():
    frame = replays(
        [(True, 1.0), (False, 2.0)],  # hit
        [(True, 3.0), (False, 2.0)],  # miss: 1 s, half the best
        [(True, 2.0), (False, 2.0)],  # tie
        [(True, 9.0)],  # no choice
    )
    found = rank_one(frame)
    assert found["decisions"] == 3 and found["rank_one"] == pytest.approx(2 / 3)
    assert found["chance"] == pytest.approx((0.5 + 0.5 + 1.0) / 3)
    assert found["regret_s"] == pytest.approx(1 / 3) and found["regret_pct"] == pytest.approx(50 / 3)
    assert found["low"] < 2 / 3 < found["high"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"candidates": "some"}, "candidates='some' is not one of asked, all"),
        ({"metric": "cost"}, "metric='cost' is not one of"),
        ({"decisions": 0}, "decisions=0 is too few"),
        ({"decisions": [500]}, "outside 0..59"),
    ],
)
def test_wrong_questions_are_refused_by_name(words, message):
    with pytest.raises(InputError, match=message):
        replay_decisions(requests(n=60), "random", instances=2, **words)
