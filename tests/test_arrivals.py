"""Claims about arrival processes and random streams."""

import math
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab.arrivals import unit_arrivals, with_arrivals
from astrolabe_lab.errors import InputError
from astrolabe_lab.rng import stream


def frame(n, **columns):
    return pd.DataFrame({"rid": range(n), "prompt_tokens": 10, "output_tokens": 20} | columns)


def gaps(kind, n, seed=1, alpha=None):
    return np.diff(unit_arrivals(kind, n, seed, alpha), prepend=0.0)


def gamma_cdf(shape, x):
    """Regularised lower incomplete gamma function, by its power series."""
    x = np.maximum(x, 1e-300)
    term = total = np.full_like(x, 1.0 / shape)
    for k in range(1, 400):
        term = term * x / (shape + k)
        total = total + term
    return np.exp(-x + shape * np.log(x) - math.lgamma(shape)) * total


def kolmogorov_smirnov(sample, cdf):
    level = cdf(np.sort(sample))
    rank = np.arange(len(sample) + 1) / len(sample)
    return max((rank[1:] - level).max(), (level - rank[:-1]).max())


@pytest.mark.parametrize(
    ("kind", "alpha", "cv"),
    [
        ("poisson", None, 1),
        ("gamma", 0.25, 2),
        ("gamma", 0.5, 2**0.5),
        ("gamma", 4, 0.5),
        ("constant", None, 0),
    ],
)
def test_the_rate_is_one_and_gaps_vary_as_the_kind_says(kind, alpha, cv):
    n = 100_000
    sample = gaps(kind, n, alpha=alpha)
    assert abs(sample.mean() - 1) <= 4 * cv / math.sqrt(n) + 1e-12
    # Of gamma gaps (skewness 2 CV, kurtosis 3 + 6 CV^2) the CV has variance CV^2 (1 + CV^2) / (2 n).
    assert abs(sample.std() - cv) <= 4 * cv * math.sqrt((1 + cv**2) / (2 * n)) + 1e-9


@pytest.mark.parametrize(("kind", "alpha"), [("poisson", None), ("gamma", 0.25), ("gamma", 1), ("gamma", 4)])
def test_gaps_follow_their_law(kind, alpha):
    n, shape = 20_000, alpha or 1
    sample = gaps(kind, n, alpha=alpha)
    critical = 1.63 / math.sqrt(n)  # Kolmogorov-Smirnov, 1 %
    assert kolmogorov_smirnov(sample, lambda x: gamma_cdf(shape, shape * x)) < critical


def test_the_law_test_tells_another_shape_apart():
    sample = gaps("gamma", 20_000, alpha=1.1)
    assert kolmogorov_smirnov(sample, lambda x: 1 - np.exp(-x)) > 1.63 / math.sqrt(20_000)


def test_the_first_request_comes_after_a_gap_not_at_zero():
    assert unit_arrivals("constant", 3, 0).tolist() == [1, 2, 3]
    first = np.array([unit_arrivals("poisson", 1, seed)[0] for seed in range(2000)])
    assert first.min() > 0 and abs(first.mean() - 1) < 4 / math.sqrt(2000)


def test_points_of_a_sweep_are_paired_exactly():
    unit = unit_arrivals("poisson", 1000, 7)
    for qps in (0.1, 3, 28.0, 1e6):
        np.testing.assert_array_equal(with_arrivals(frame(1000), qps, seed=7)["arrived_s"], unit / qps)


def test_a_shorter_trace_sees_the_first_arrivals_of_a_longer_one():
    for kind, alpha in (("poisson", None), ("gamma", 0.25), ("constant", None)):
        short, long = unit_arrivals(kind, 50, 3, alpha), unit_arrivals(kind, 5000, 3, alpha)
        np.testing.assert_array_equal(short, long[:50])


def test_arrivals_do_not_depend_on_what_was_drawn_before():
    alone = with_arrivals(frame(100), 5.0, seed=2)
    stream(2, "lengths").random(1000)
    np.random.seed(99)  # noqa: NPY002
    for qps in (1.0, 9.0):
        with_arrivals(frame(100), qps, kind="gamma", alpha=0.3, seed=1)
    pd.testing.assert_frame_equal(alone, with_arrivals(frame(100), 5.0, seed=2))


def test_arrivals_leave_the_given_frame_alone_and_replace_old_times():
    old = frame(3, arrived_s=[5.0, 6.0, 7.0])
    new = with_arrivals(old, 2.0, kind="constant")
    assert old["arrived_s"].tolist() == [5, 6, 7] and new["arrived_s"].tolist() == [0.5, 1.0, 1.5]
    assert list(new) == ["rid", "arrived_s", "prompt_tokens", "output_tokens"]


def test_a_trace_keeps_its_shape_when_scaled_to_a_rate():
    own = frame(4, arrived_s=[0.0, 1.0, 1.0, 6.0])
    scaled = with_arrivals(own, 3.0, kind="trace")["arrived_s"]
    assert scaled.tolist() == pytest.approx([0, 1 / 6, 1 / 6, 1]) and 3 / (scaled.iloc[-1] - scaled.iloc[0]) == 3.0
    assert with_arrivals(own, None, kind="trace")["arrived_s"].tolist() == [0, 1, 1, 6]


@pytest.mark.parametrize("qps", [0, -1, math.nan, math.inf, "2", None, True])
def test_a_rate_that_is_no_positive_number_is_refused(qps):
    with pytest.raises(InputError, match="qps="):
        with_arrivals(frame(3), qps)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: unit_arrivals("uniform", 3, 0), "allowed are poisson, gamma, constant"),
        (lambda: unit_arrivals("trace", 3, 0), "with_arrivals"),
        (lambda: unit_arrivals("poisson", 0, 0), "integer >= 1"),
        (lambda: unit_arrivals("poisson", 2.5, 0), "integer >= 1"),
        (lambda: unit_arrivals("gamma", 3, 0), "shape > 0"),
        (lambda: unit_arrivals("gamma", 3, 0, alpha=0), "shape > 0"),
        (lambda: unit_arrivals("gamma", 3, 0, alpha=math.nan), "shape > 0"),
        (lambda: unit_arrivals("poisson", 3, 0, alpha=0.5), "leave it out"),
        (lambda: unit_arrivals("poisson", 3, -1), "integer >= 0"),
        (lambda: unit_arrivals("poisson", 3, 1.5), "integer >= 0"),
        (lambda: with_arrivals(frame(0), 1.0), "integer >= 1"),
        (lambda: with_arrivals(frame(3), 1.0, kind="trace"), "it has none"),
        (
            lambda: with_arrivals(frame(2, arrived_s=[1.0, 1.0]), 1.0, kind="trace"),
            "all requests arrive at once",
        ),
        (lambda: with_arrivals(frame(2, arrived_s=[2.0, 1.0]), 1.0, kind="trace"), "non-decreasing"),
        (lambda: stream(0, ""), "non-empty"),
    ],
)
def test_wrong_input_is_named_with_what_is_allowed(call, says):
    with pytest.raises(InputError, match=says):
        call()


def test_streams_are_the_same_in_every_process_whatever_the_hash_seed():
    code = "from astrolabe_lab.rng import stream; print(*stream(5, 'arrivals').random(3))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": salt},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for salt in ("0", "1", "42")
    }
    assert outputs == {" ".join(map(str, stream(5, "arrivals").random(3))) + "\n"}


def test_streams_of_other_names_and_seeds_are_unrelated():
    draws = [stream(seed, name).standard_normal(5000) for seed in (0, 1) for name in ("arrivals", "lengths", "noise")]
    correlation = np.corrcoef(draws) - np.eye(6)
    assert np.abs(correlation).max() < 4 / math.sqrt(5000)
