"""Warm-up, steady window, drain; and whether queues kept growing, by how often the test is right."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.signal import lfilter

from astrolabe_lab.errors import InputError
from astrolabe_lab.measure import (
    phases,
    steady,
    steady_rates,
    steady_window,
    summarise,
    trend,
    waiting_trend,
    worst_third,
)


def served(arrived_s, wait_s, service_s, **columns):
    """Requests that wait so long for their first token and then take so long."""
    arrived_s = np.asarray(arrived_s, float)
    first = arrived_s + wait_s
    frame = {"arrived_s": arrived_s, "first_token_s": first, "finished_s": first + service_s, "generated_tokens": 5}
    return pd.DataFrame(frame | {"status": "ok", "preemptions": 0} | columns)


def single_server(rate, n=6000, seed=0):
    """First come, first served, at one request a second: the waiting times of Lindley's recursion."""
    rng = np.random.default_rng(seed)
    gaps, work = rng.exponential(1 / rate, n), rng.exponential(1.0, n)
    wait = np.zeros(n)
    for i in range(1, n):
        wait[i] = max(0.0, wait[i - 1] + work[i - 1] - gaps[i])
    return served(np.cumsum(gaps), wait, work)


def test_warm_up_lasts_a_minute_or_three_mean_latencies_whichever_is_longer():
    assert steady_window(served(np.arange(500.0), 1.0, 3.0)).start_s == 60.0
    assert steady_window(served(np.arange(500.0), 10.0, 20.0)).start_s == 90.0
    assert steady_window(served(np.arange(500.0) + 7, 1.0, 3.0), warm_up_s=5).start_s == 12.0


def test_arrivals_go_on_until_the_last_measured_request_has_ended():
    frame = single_server(0.8)
    window = steady_window(frame)
    measured = steady(frame)
    assert measured["finished_s"].max() <= window.last_arrival_s == frame["arrived_s"].max()
    assert measured["arrived_s"].between(window.start_s, window.end_s, inclusive="left").all()
    after = frame[frame["arrived_s"] >= window.end_s].iloc[0]
    assert after["finished_s"] > window.last_arrival_s, "the first left out was still there when arrivals stopped"
    assert measured.attrs["window"] == window._asdict()


def test_every_request_has_a_phase_and_phases_come_in_order():
    frame = single_server(0.8)
    found = phases(frame)
    assert found.tolist() == sorted(found, key=["warm-up", "steady", "drain"].index)
    assert (found == "steady").sum() == len(steady(frame))
    assert set(found) == {"warm-up", "steady", "drain"}


def test_a_steady_rate_is_the_arrival_rate_where_the_whole_run_dilutes_it():
    frame = served(np.arange(400.0) / 2, 1.0, 30.0)
    assert steady_rates(frame)["throughput_rps"] == pytest.approx(2.0, rel=0.01)
    assert summarise(frame).throughput_rps[0] < 1.8


def test_a_run_too_short_has_no_steady_window_and_says_so():
    frame = served(np.arange(30.0), 1.0, 3.0)
    with pytest.raises(InputError, match="arrivals over 29 s leave no steady window: warm-up takes until 60 s"):
        steady(frame)
    assert summarise(frame).regime[0] == "short"
    with pytest.raises(InputError, match="without requests"):
        steady_window(frame.iloc[:0])
    with pytest.raises(InputError, match="warm_up_s=-1"):
        steady_window(frame, warm_up_s=-1)


@pytest.mark.parametrize(
    ("rate", "regime"), [(0.5, "steady"), (0.8, "steady"), (1.1, "finite-trace"), (1.5, "finite-trace")]
)
def test_a_run_past_capacity_is_labelled_as_one_whose_numbers_grow_with_it(rate, regime):
    found = [summarise(single_server(rate, seed=seed)).regime[0] for seed in range(20)]
    assert found.count(regime) >= 19
    if regime == "finite-trace":
        short, long = (summarise(single_server(rate, n)).ttft_p99_s[0] for n in (2000, 8000))
        assert long > 2 * short


def test_the_growth_is_what_arrives_and_is_not_served():
    growth, p = waiting_trend(single_server(1.5, seed=3))
    assert growth == pytest.approx(0.5, rel=0.1) and p < 1e-3
    assert all(math.isnan(value) for value in waiting_trend(single_server(1.5, n=1)))


@pytest.mark.parametrize("memory", [0.0, 0.5, 0.75])
def test_means_that_remember_one_another_show_no_trend_more_often_than_they_should(memory):
    rng = np.random.default_rng(5)
    shocks = rng.normal(size=(2000, 20))
    start = rng.normal(size=(2000, 1)) / math.sqrt(1 - memory**2)
    series, _ = lfilter([1], [1, -memory], shocks, zi=memory * start)
    rate = np.mean([trend(means)[1] < 0.05 for means in series])
    assert 0.01 < rate < 0.1, "a plain regression: 0.16 at a memory of 0.5, 0.26 at 0.75"


def test_a_trend_is_seen_through_noise_and_a_fall_is_none():
    rng = np.random.default_rng(6)
    rising = np.arange(20) + rng.normal(0, 3, 20)
    assert trend(rising)[1] < 0.01 and trend(rising)[0] == pytest.approx(1, abs=0.3)
    assert trend(rising[::-1].copy())[1] > 0.99
    assert trend(np.arange(20.0))[1] == 0.0 and trend(np.full(20, 3.0))[1] == 1.0


def test_the_worst_third_is_the_highest_p99_and_a_miss_is_infinitely_late():
    wait = np.r_[np.full(300, 1.0), np.full(300, 5.0), np.full(300, 2.0)]
    frame = served(np.arange(900.0), wait, 1.0)
    assert worst_third(frame) == pytest.approx(5.0)
    assert worst_third(frame.sample(frac=1, random_state=0)) == pytest.approx(5.0), "thirds go by arrival"
    frame.loc[:5, "status"] = "rejected"
    assert math.isinf(worst_third(frame))
