"""Intervals, tests and corrections: against scipy, by hand, and by how often they are right."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from astrolabe_lab.errors import InputError
from astrolabe_lab.measure import holm, interval, over_seeds, p_value, seeds_needed, simultaneous, t_interval


def covered(draw, truth, n, method="auto", times=400, level=0.95):
    """The share of intervals of n values that hold the truth."""
    hits = [low <= truth <= high for _, low, high in (interval(draw(n), level, method) for _ in range(times))]
    return float(np.mean(hits))


def test_a_t_interval_is_scipys():
    values = np.random.default_rng(0).lognormal(size=7)
    expected = stats.t.interval(0.9, 6, values.mean(), stats.sem(values))
    assert t_interval(values, 0.9) == pytest.approx((values.mean(), *expected))
    assert p_value(values, "t") == pytest.approx(stats.ttest_1samp(values, 0).pvalue)


def test_t_interval_of_a_worked_example():
    mean, low, high = t_interval([2.0, 4.0, 6.0])
    assert (mean, high - mean, mean - low) == pytest.approx((4.0, 4.968275, 4.968275), rel=1e-5)


def test_few_seeds_get_a_t_interval_and_ten_the_bootstrap():
    values = np.random.default_rng(1).lognormal(size=10)
    assert interval(values[:9]) == t_interval(values[:9])
    assert interval(values) == interval(values, method="bootstrap") != t_interval(values)
    assert interval(values) == interval(values), "resampling has a fixed seed"


def test_a_sign_flip_test_of_a_worked_example():
    # of the 8 sign patterns of 1, 2, 4 only all + and all - are as far from zero as 7
    assert p_value([1.0, 2.0, 4.0], "sign_flip") == 2 / 8
    # -1 + 2 + 4 = 5: also 1 + 2 + 4 = 7 and their negatives
    assert p_value([-1.0, 2.0, 4.0], "sign_flip") == 4 / 8
    assert p_value([1.0] * 6, "sign_flip") == 2 / 64


def test_a_sign_flip_p_is_that_of_scipys_permutation_test():
    values = np.random.default_rng(3).normal(0.6, 1, size=9)
    theirs = stats.permutation_test(
        (values, np.zeros(9)), lambda x, y, axis: np.mean(x - y, axis=axis), permutation_type="samples",
        n_resamples=np.inf, vectorized=True,
    )  # fmt: skip
    assert p_value(values, "sign_flip") == pytest.approx(theirs.pvalue)


def test_a_sign_flip_interval_holds_what_its_test_does_not_reject():
    values = np.random.default_rng(4).normal(1, 1, size=10)
    _, low, high = interval(values, method="sign_flip")
    for border, outwards in ((low, -1), (high, 1)):
        assert p_value(values - (border - 1e-6 * outwards), "sign_flip") > 0.05
        assert p_value(values - (border + 1e-6 * outwards), "sign_flip") <= 0.05
    assert math.isinf(interval(values[:5], method="sign_flip")[2]), "five seeds cannot reject anything at 95 %"


@pytest.mark.parametrize("n", [3, 5, 9])
def test_t_intervals_cover_the_truth_as_often_as_they_say(n):
    rng = np.random.default_rng(7)
    assert covered(lambda n: rng.normal(10, 3, n), 10, n, "t", times=2000) == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize("n", [10, 20])
def test_the_bootstrap_covers_normal_values_and_skewed_ones_better_than_t(n):
    rng = np.random.default_rng(8)
    assert covered(lambda n: rng.normal(10, 3, n), 10, n) == pytest.approx(0.95, abs=0.03)
    assert covered(lambda n: rng.lognormal(0, 0.5, n), math.exp(0.125), n) > 0.90
    skewed = [rng.lognormal(0, 1, n) for _ in range(400)]
    rates = {
        method: np.mean([low <= math.exp(0.5) <= high for _, low, high in (interval(v, method=method) for v in skewed)])
        for method in ("bootstrap", "t")
    }
    assert rates["bootstrap"] > rates["t"]


def run_mean(rng, requests, memory):
    """The mean latency of a run whose requests follow one another with that correlation, lognormal."""
    from scipy.signal import lfilter

    shocks = rng.normal(size=requests) * math.sqrt(1 - memory**2)
    noise, _ = lfilter([1], [1, -memory], shocks, zi=[memory * rng.normal()])
    return float(np.exp(0.7 * noise).mean())


def test_intervals_over_seeds_cover_however_much_requests_of_a_run_depend_on_one_another():
    rng = np.random.default_rng(9)
    hits = []
    for _ in range(400):
        runs = [run_mean(rng, 300, 0.95) for _ in range(10)]
        _, low, high = interval(runs)
        hits.append(low <= math.exp(0.7**2 / 2) <= high)
    assert np.mean(hits) == pytest.approx(0.95, abs=0.035)


@pytest.mark.parametrize("seeds", [5, 10])
def test_a_policy_compared_with_itself_wins_in_one_case_of_twenty_at_most(seeds):
    rng = np.random.default_rng(10)
    wins = [p_value(rng.lognormal(0, 1, seeds) - rng.lognormal(0, 1, seeds)) < 0.05 for _ in range(1000)]
    assert np.mean(wins) <= 0.05 + 0.01


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [4, 10])
def test_of_a_table_of_many_comparisons_with_itself_seldom_any_is_won(seeds):
    rng = np.random.default_rng(11)
    tables = []
    for _ in range(150):
        shared = rng.lognormal(0, 1, (seeds, 1))  # one baseline in all comparisons
        tables.append(rng.lognormal(0, 1, (seeds, 12)) - shared)
    won = [(holm([p_value(column) for column in table.T]) < 0.05).any() for table in tables]
    missed = [~simultaneous(pd.DataFrame(table)).eval("low <= 0 <= high").all() for table in tables]
    assert np.mean(won) <= 0.05 + 0.035
    assert np.mean(missed) <= 0.05 + 0.035
    lone = [(np.array([p_value(column) for column in table.T]) < 0.05).any() for table in tables]
    assert np.mean(lone) > 2 * max(np.mean(won), 0.025), "uncorrected, such tables do show winners"


def test_holms_p_values_are_those_of_the_textbook():
    assert holm([0.01, 0.04, 0.03, 0.005]).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])
    with_gap = holm([0.01, math.nan, 0.2])
    assert with_gap[[0, 2]].tolist() == pytest.approx([0.02, 0.2]) and math.isnan(with_gap[1])
    assert holm([0.9, 0.8]).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("seeds", [4, 12])
def test_simultaneous_intervals_are_wider_than_each_alone_and_equal_for_one(seeds):
    rng = np.random.default_rng(12)
    table = pd.DataFrame(rng.normal(size=(seeds, 5)), columns=list("abcde"))
    together = simultaneous(table)
    for name in table:
        mean, low, high = interval(table[name])
        assert together.loc[name, "low"] < low and high < together.loc[name, "high"]
    assert simultaneous(table[["a"]]).loc["a"].tolist() == pytest.approx(interval(table["a"])[1:])


def test_intervals_that_move_together_need_less_room_than_bonferroni():
    values = np.random.default_rng(13).normal(size=12)
    copies = pd.DataFrame(dict.fromkeys(range(20), values))
    assert simultaneous(copies).loc[0].tolist() == pytest.approx(interval(values)[1:], rel=0.06)


def test_one_seed_gives_a_mean_and_no_interval():
    mean, low, high = interval([5.0])
    assert mean == 5.0 and math.isnan(low) and math.isnan(high) and math.isnan(p_value([5.0]))
    with pytest.raises(InputError, match="at least one value"):
        interval([])


@pytest.mark.parametrize("values", [[1.0, math.inf, 2.0], [1.0, math.nan, 2.0]])
def test_a_run_without_a_number_leaves_no_interval(values):
    assert math.isnan(interval(values)[1]) and math.isnan(p_value(values))


@pytest.mark.parametrize("n", [4, 12])
def test_equal_runs_leave_no_doubt(n):
    assert interval([3.0] * n) == (3.0, 3.0, 3.0)
    assert p_value([3.0] * n) < 0.05 and p_value([0.0] * n) == 1.0


def test_values_that_hardly_ever_differ_get_a_t_interval():
    values = [0.0] * 9 + [5.0]
    assert interval(values) == t_interval(values)


@pytest.mark.parametrize(("level", "method"), [(0, "t"), (1.5, "t"), (0.95, "guess")])
def test_levels_and_methods_that_do_not_exist_are_refused(level, method):
    with pytest.raises(InputError):
        interval([1.0, 2.0], level, method)


def test_the_seeds_needed_are_those_of_the_power_tables():
    # a paired t-test of d = 0.5, two-sided 5 %, 80 % power needs 34 pairs, of d = 0.2 199, of d = 1 10 (Cohen; G*Power)
    assert [seeds_needed(1.0, effect) for effect in (0.5, 0.2, 1.0)] == [34, 199, 10]
    assert seeds_needed(0.0, 0.1) == 2 and math.isnan(seeds_needed(math.nan, 0.1))
    assert math.isinf(seeds_needed(1e6, 1.0))
    with pytest.raises(InputError, match="effect=0"):
        seeds_needed(1.0, 0)


def test_a_larger_effect_never_needs_more_seeds():
    needed = [seeds_needed(1.0, effect) for effect in np.geomspace(0.05, 2000, 60)]
    assert needed == sorted(needed, reverse=True) and needed[-1] == 2
    assert (seeds_needed(1.0, 7.0), seeds_needed(1.0, 20.0)) == (3, 2)


def test_that_many_seeds_do_see_the_effect_that_often():
    rng = np.random.default_rng(14)
    n = int(seeds_needed(1.0, 1.0))
    seen = [p_value(rng.normal(1.0, 1.0, n), "t") < 0.05 for _ in range(2000)]
    assert np.mean(seen) == pytest.approx(0.8, abs=0.04)


def test_over_seeds_has_a_row_per_point():
    summary = pd.DataFrame({"policy": "a", "qps": [1, 1, 2, 2], "seed": [0, 1, 0, 1], "x": [1.0, 3.0, 5.0, 5.0]})
    found = over_seeds(summary, "x", method="t")
    assert found[["qps", "mean", "seeds"]].to_numpy().tolist() == [[1, 2.0, 2], [2, 5.0, 2]]
    assert found.loc[0, "low"] == pytest.approx(t_interval([1.0, 3.0])[1])
