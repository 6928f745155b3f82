"""`Up to x % better`: how large the largest of many differences is by chance, and how often that is called a win."""

import math

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab.errors import InputError
from astrolabe_lab.measure import up_to

RATES = list(range(20, 37))


def runs(rng, seeds, gain=0.0, policy="base", luck=0.3, arrivals=0.0, **columns):
    """Summary rows of a metric that varies from run to run by `luck` and from seed to seed by `arrivals`, lognormal."""
    rows = []
    for seed in seeds:
        shared = np.random.default_rng([seed, 7]).normal(0, arrivals, len(RATES)) if arrivals else np.zeros(len(RATES))
        values = np.exp(shared + rng.normal(0, luck, len(RATES)))
        rows += [
            {"policy": policy, "qps": qps, "seed": seed, "x": value * (1 - gain)}
            for qps, value in zip(RATES, values, strict=True)
        ]
    return pd.DataFrame(rows).assign(**columns)


def again(rng, seeds, **words):
    return pd.concat([runs(rng, seeds, policy_seed=number, **words) for number in (101, 102, 103)])


def test_a_policy_beside_itself_is_up_to_some_percent_better_and_no_winner():
    rng = np.random.default_rng(0)
    seeds = range(10)
    both = pd.concat([runs(rng, seeds), runs(rng, seeds, policy="same")])
    found = up_to(both, "x", "base", again(rng, seeds), runs(rng, range(50, 60))).iloc[0]
    assert found.up_to_pct > 5, "the largest of seventeen differences of nothing"
    assert found.winner == "no winner" and min(found.p_swapped, found.p_policy, found.p_arrivals) > 0.05
    assert found.up_to_pct < min(found.swapped_pct, found.policy_pct, found.arrivals_pct)


def test_a_policy_that_is_better_everywhere_wins_with_its_largest_gain():
    rng = np.random.default_rng(1)
    seeds = range(10)
    both = pd.concat([runs(rng, seeds), runs(rng, seeds, gain=0.6, policy="better")])
    found = up_to(both, "x", "base", again(rng, seeds), runs(rng, range(50, 60))).iloc[0]
    means = both.groupby(["policy", "qps"]).x.mean().unstack("policy")
    gains = 100 * (1 - means.better / means.base)
    assert (found.up_to_pct, found.at_qps, found.seeds) == (pytest.approx(gains.max()), gains.idxmax(), 10)
    assert found.winner == "better" and found.p_holm < 0.05


def test_arrivals_that_differ_make_larger_maxima_than_luck_alone():
    rng = np.random.default_rng(2)
    seeds = range(10)
    words = {"luck": 0.05, "arrivals": 0.5}
    both = pd.concat([runs(rng, seeds, **words), runs(rng, seeds, policy="same", **words)])
    found = up_to(both, "x", "base", again(rng, seeds, **words), runs(rng, range(50, 60), **words)).iloc[0]
    assert found.arrivals_pct > 3 * found.policy_pct


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [6, 10])
def test_of_policies_that_are_the_same_one_in_twenty_at_most_is_called_better(seeds):
    rng = np.random.default_rng(3)
    wins = 0
    for _ in range(200):
        shared = {"luck": 0.3, "arrivals": 0.4}
        both = pd.concat([runs(rng, range(seeds), **shared), runs(rng, range(seeds), policy="same", **shared)])
        wins += up_to(both, "x", "base").winner[0] != "no winner"
    assert wins / 200 <= 0.05 + 0.03


def test_more_policies_need_more_evidence():
    rng = np.random.default_rng(4)
    frames = [runs(rng, range(8)), runs(rng, range(8), gain=0.12, policy="a")]
    alone = up_to(pd.concat(frames), "x", "base").set_index("policy")
    frames += [runs(rng, range(8), policy=name) for name in "bcdefg"]
    among = up_to(pd.concat(frames), "x", "base").set_index("policy")
    assert among.loc["a", "p_swapped"] == alone.loc["a", "p_swapped"] == alone.loc["a", "p_holm"]
    assert among.loc["a", "p_holm"] >= alone.loc["a", "p_holm"]


def test_with_few_seeds_nothing_can_be_told_and_that_is_said():
    rng = np.random.default_rng(7)
    for seeds, said in ((3, "too few seeds"), (6, "better")):
        both = pd.concat([runs(rng, range(seeds)), runs(rng, range(seeds), gain=0.9, policy="better")])
        found = up_to(both, "x", "base").iloc[0]
        assert found.winner == said and found.least_p == pytest.approx(2 / (1 + 2**seeds)) == found.p_holm


def test_more_is_better_where_it_is():
    rng = np.random.default_rng(8)
    both = pd.concat([runs(rng, range(8)), runs(rng, range(8), gain=0.6, policy="less")])
    both = both.rename(columns={"x": "throughput_rps"})
    assert up_to(both, "throughput_rps", "base").winner[0] == "no winner"
    found = up_to(both, "throughput_rps", "less").iloc[0]
    assert found.winner == "base" and found.up_to_pct > 100


def test_a_policy_that_sheds_load_wins_no_maximum_of_what_is_left():
    rng = np.random.default_rng(9)
    both = pd.concat([runs(rng, range(8)), runs(rng, range(8), gain=0.6, policy="sheds")]).assign(n=1000, ok=1000)
    both.loc[both["policy"] == "sheds", "ok"] = 900
    assert up_to(both.rename(columns={"x": "e2e_p99_s"}), "e2e_p99_s", "base").winner[0] == "no winner"
    assert up_to(both.rename(columns={"x": "e2e_p99_all_s"}), "e2e_p99_all_s", "base").winner[0] == "sheds"


def test_what_was_not_given_is_not_tested():
    rng = np.random.default_rng(5)
    found = up_to(pd.concat([runs(rng, range(6)), runs(rng, range(6), policy="same")]), "x", "base").iloc[0]
    assert math.isnan(found.p_policy) and math.isnan(found.arrivals_pct) and found.p_holm == found.p_swapped


def test_what_cannot_be_a_maximum_over_rates_is_refused():
    rng = np.random.default_rng(6)
    both = pd.concat([runs(rng, range(6)), runs(rng, range(6), policy="same")], ignore_index=True)
    with pytest.raises(InputError, match="baseline='c' is not among the policies: base, same"):
        up_to(both, "x", "c")
    with pytest.raises(InputError, match="same: x is missing or infinite"):
        up_to(both.drop(index=len(both) - 1), "x", "base")
    with pytest.raises(InputError, match="holds seeds of the baseline itself, 0, 1"):
        up_to(both, "x", "base", others=runs(rng, range(6)))
    with pytest.raises(InputError, match="others holds 3 seeds; 6 or more are needed"):
        up_to(both, "x", "base", others=runs(rng, range(50, 53)))
    with pytest.raises(InputError, match="missing, or infinite, at policy_seed 101"):
        up_to(both, "x", "base", again=again(rng, range(5)))
    with pytest.raises(InputError, match="x of base is not above 0 at qps 20"):
        up_to(both.assign(x=both["x"].where(both["qps"] > 20, 0.0)), "x", "base")
    with pytest.raises(InputError, match="lacks policy_seed"):
        up_to(both, "x", "base", again=runs(rng, range(6)))
