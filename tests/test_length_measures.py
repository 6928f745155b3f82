"""The measures that length models are judged by, against independent oracles."""

import math

import numpy as np
import pandas as pd
import pytest
from test_length_evaluate import answers

from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.length import data, metrics

RNG = np.random.default_rng(11)
UNCUT = np.zeros(400, dtype=bool)


def test_concordance_is_somers_d_of_scipy():
    from scipy.stats import somersd

    true = RNG.integers(1, 40, 400).astype(float)
    told = np.rint(true + RNG.normal(0, 12, 400))
    assert metrics.concordance(true, told, UNCUT) == pytest.approx(somersd(true, told).statistic)


def test_concordance_knows_perfect_upside_down_and_constant():
    true = RNG.permutation(400) + 1.0
    assert metrics.concordance(true, true**3, UNCUT) == 1.0
    assert metrics.concordance(true, -true, UNCUT) == -1.0
    assert metrics.concordance(true, np.full(400, 5.0), UNCUT) == 0.0
    assert math.isnan(metrics.concordance(np.ones(400), true, UNCUT))


def test_a_cut_off_answer_decides_only_the_pairs_that_it_can():
    """Of true lengths 5, 9, over 7 and over 7: 5 is shorter than all, and that is all that is known."""
    true, cut = np.array([5.0, 9.0, 7.0, 7.0]), np.array([False, False, True, True])
    assert metrics.concordance(true, np.array([1.0, 2.0, 3.0, 0.5]), cut) == pytest.approx((2 - 1) / 3)


def test_concordance_of_many_is_that_of_all_pairs(monkeypatch):
    true, told, cut = RNG.random(300), RNG.random(300), RNG.random(300) < 0.2
    whole = metrics.concordance(true, told, cut)
    monkeypatch.setattr(metrics, "_PAIRS_AT_ONCE", 1000)
    assert metrics.concordance(true, told, cut) == whole


def test_errors_are_those_of_scikit_learn():
    sk = pytest.importorskip("sklearn.metrics")
    true, told = RNG.integers(1, 500, 400).astype(float), RNG.integers(1, 500, 400).astype(float)
    found = metrics.errors(true, told, UNCUT)
    assert found["mae"] == found["mae_at_least"] == pytest.approx(sk.mean_absolute_error(true, told))
    assert found["mape"] == pytest.approx(sk.mean_absolute_percentage_error(true, told))
    assert found["rmse"] == pytest.approx(sk.root_mean_squared_error(true, told))
    assert found["bias"] == pytest.approx((told - true).mean())
    assert found["within_50"] == np.mean(np.abs(told - true) <= 50)
    for level in (0.5, 0.9):
        assert metrics.pinball(true, told, UNCUT, level) == pytest.approx(sk.mean_pinball_loss(true, told, alpha=level))


def test_cut_off_answers_bound_the_error_from_below():
    true = RNG.lognormal(5, 0.6, 400)
    cut = true > 250
    told = np.full(400, 180.0)
    seen = metrics.errors(np.where(cut, 250.0, true), told, cut)
    assert seen["mae_at_least"] <= metrics.errors(true, told, UNCUT)["mae"]
    assert seen["censored"] == cut.sum() and seen["n"] == 400


def test_coverage_sees_through_cuts():
    true = RNG.lognormal(5, 0.6, 20_000)
    limit = RNG.lognormal(5.6, 0.6, 20_000)
    quantile = np.full(20_000, np.quantile(true, 0.8))
    covered = metrics.coverage(np.minimum(true, limit), quantile, true > limit)
    assert covered == pytest.approx(0.8, abs=0.015)
    assert metrics.coverage(true, quantile, np.zeros(20_000, bool)) == pytest.approx(np.mean(true <= quantile))


def test_buckets_are_equal_shares_of_what_was_learned_from():
    lengths = np.arange(1.0, 401.0)
    edges = metrics.bucket_edges(lengths, UNCUT)
    shares = np.bincount(np.searchsorted(edges, lengths, side="right"))
    assert len(edges) == 4 and np.ptp(shares) <= 1
    assert metrics.bucket_accuracy(lengths, lengths, UNCUT, edges) == 1.0
    assert metrics.bucket_accuracy(lengths, np.full(400, 200.0), UNCUT, edges) == pytest.approx(0.2, abs=0.01)


def test_the_noise_floor_from_two_answers_is_the_known_one():
    """Two traces of one seed differ in noise alone: their floor is known from the generator's parameters."""
    n = 3000
    medians = sharegpt_like.features(n, seed=0)["median_tokens"].to_numpy()
    rng = np.random.default_rng(0)
    rows = [
        (f"p{i}", f"p{i}", max(1.0, round(median * math.exp(sharegpt_like.SIGMA * z))), "m", False, "s", sample)
        for sample in range(2)
        for i, (median, z) in enumerate(zip(medians, rng.standard_normal(n), strict=True))
    ]
    found = metrics.noise_floor(pd.DataFrame(rows, columns=list(data.COLUMNS)))
    known = sharegpt_like.noise_floor()
    assert found["prompts"] == n
    assert found["mae"] == pytest.approx(known.mae_tokens, rel=0.05)
    assert found["mape"] == pytest.approx(known.mape, rel=0.05)
    assert found["mae_low"] < known.mae_tokens < found["mae_high"]
    assert metrics.noise_floor(answers(50)) is None
