"""Claims about arrivals whose rate moves: bursts, ramps and days, at a mean that is kept exactly."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astrolabe_lab import arrivals
from astrolabe_lab.arrivals import parse, unit_arrivals, with_arrivals
from astrolabe_lab.arrivals.profiles import Bursts, Diurnal, Ramp
from astrolabe_lab.errors import InputError

SPECS = ("bursts", "bursts:durations=random", "ramp", "ramp:start=1.5", "diurnal:period_s=600,amplitude=0.9")


def frame(n):
    return pd.DataFrame({"rid": range(n), "prompt_tokens": 10, "output_tokens": 20})


def times(spec, n, qps, seed=0):
    return with_arrivals(frame(n), qps, spec, seed)["arrived_s"].to_numpy()


def within(count, expected, sds=4.5):
    return abs(count - expected) < sds * math.sqrt(expected)


# --- the mean rate


@pytest.mark.parametrize(
    ("profile", "cycle_s"),
    [
        (Bursts(), 4.0),
        (Bursts(high=3.9, high_s=1.0, low_s=3.0), 4.0),
        (Bursts(high=3, high_s=0.25, low_s=10), 10.25),
        (Diurnal(amplitude=1.0, period_s=100, start_s=13), 100.0),
        (Diurnal(), 86_400.0),
    ],
)
def test_after_every_whole_cycle_exactly_as_much_has_arrived_as_at_the_mean_rate(profile, cycle_s):
    whole = np.arange(1.0, 50.0) * cycle_s
    np.testing.assert_allclose(profile.when(whole, 1.0, 0), whole, rtol=1e-6)


def test_the_papers_burst_train_is_one_second_at_1_7_and_three_at_0_77():
    """The factors are read off the times of evenly spaced load, not off the profile's own numbers."""
    load = np.arange(0, 40, 1e-4)
    at = Bursts().when(load, 1.0, 0)
    rate = 1e-4 / np.diff(at)
    phase = at[:-1] % 4
    calm, burst = rate[(phase > 0.01) & (phase < 2.99)], rate[(phase > 3.01) & (phase < 3.99)]
    np.testing.assert_allclose(burst, 1.7, rtol=1e-6)
    np.testing.assert_allclose(calm, 2.3 / 3, rtol=1e-6)
    assert round(calm[0], 2) == 0.77 and (1.7 + 3 * calm[0]) / 4 == pytest.approx(1, abs=1e-9)


def test_requests_in_bursts_and_calm_are_as_many_as_the_factors_say():
    at = times("bursts", 200_000, 25.0)
    cycles = int(at[-1] // 4)
    at = at[at < cycles * 4]
    assert within((at % 4 >= 3).sum(), 25 * 1.7 * cycles) and within((at % 4 < 3).sum(), 25 * 2.3 * cycles)
    for lowest in (0.0, 1.5):  # even within a state
        assert within(((at % 4 >= lowest) & (at % 4 < lowest + 1.5)).sum(), 25 * 2.3 / 2 * cycles)


def test_random_bursts_have_the_mean_rate_and_exponential_states():
    """Over long times; and the number in windows varies as a Markov-modulated process's does."""
    n, qps = 400_000, 20.0
    at = times("bursts:high=3,high_s=2,low_s=6,durations=random", n, qps)
    # Load variance of a two-state process: 2 p (1-p) (high-low)^2 tau t, tau = 1 / (1/high_s + 1/low_s).
    p, tau, high, low = 0.25, 1.5, 3.0, 2 / 6
    spread = math.sqrt(2 * p * (1 - p) * (high - low) ** 2 * tau * at[-1] + at[-1] / qps)
    assert abs(at[-1] - n / qps) < 4.5 * spread
    counts = np.bincount((at // 100).astype(int))[:-1]
    expected = qps * 100 + qps**2 * 2 * p * (1 - p) * (high - low) ** 2 * tau * (100 - tau * (1 - math.exp(-100 / tau)))
    assert counts.var() == pytest.approx(expected, rel=5 * math.sqrt(2 / len(counts)))


def test_a_calm_of_rate_zero_has_no_requests():
    at = times("bursts:high=4,high_s=1,low_s=3", 5000, 10.0)
    assert (at % 4 >= 3).all()
    assert parse("bursts:high=4").profile.low == 0


def test_a_ramp_s_rate_is_a_straight_line_about_its_mean():
    n, qps, start = 100_000, 50.0, 0.25
    at, span = times(f"ramp:start={start}", n, qps), n / qps
    edges = np.linspace(0, span, 11)
    middle = (edges[1:] + edges[:-1]) / 2 / span
    expected = n / 10 * (start + (2 - 2 * start) * middle)
    counts = np.histogram(at, edges)[0]
    assert (abs(counts - expected) < 4.5 * np.sqrt(expected)).all()
    assert abs(at[-1] - span) < 5 * math.sqrt(n) / qps


def test_a_ramp_of_one_is_no_ramp_and_a_falling_one_falls():
    np.testing.assert_allclose(times("ramp:start=1", 1000, 3.0), times("poisson", 1000, 3.0), rtol=1e-12)
    falling = times("ramp:start=1.9", 20_000, 10.0)
    assert (falling < 1000).mean() == pytest.approx(0.725, abs=0.02)  # 1.9/2 - 0.9/4 of the load by half time


def test_a_ramp_from_nothing_starts_and_ends():
    at = times("ramp:start=0", 10_000, 10.0)
    assert np.isfinite(at).all() and within((at < 100).sum(), 100)  # load t^2 / T at t = 0.1 T: n / 100


def test_a_day_peaks_where_it_says():
    at = times("diurnal:amplitude=0.8,period_s=1000,peak_s=300,start_s=100", 300_000, 30.0)
    whole = at[at < (at[-1] // 1000) * 1000]
    counts = np.histogram((whole + 100) % 1000, np.arange(0, 1001, 100))[0]
    edges = np.arange(0, 1001, 100)
    wave = 100 + 0.8 * np.diff(np.sin(2 * np.pi * (edges - 300) / 1000)) * 1000 / (2 * np.pi)
    expected = 30 * wave * (at[-1] // 1000)
    assert (abs(counts - expected) < 4.5 * np.sqrt(expected)).all() and counts.argmax() in (2, 3)


# --- pairing


@pytest.mark.parametrize("spec", SPECS)
def test_the_pattern_is_paired_over_rates_through_the_load(spec):
    """At every rate the i-th request comes when the same share of the load has arrived."""
    n = 2000
    unit = unit_arrivals("poisson", n, 3)
    profile = parse(spec).profile
    for qps in (0.5, 4.0, 40.0):
        np.testing.assert_array_equal(times(spec, n, qps, seed=3), profile.when(unit / qps, n / qps, 3))


@pytest.mark.parametrize("spec", [s for s in SPECS if "ramp" not in s])
def test_a_shorter_trace_sees_the_first_arrivals_of_a_longer_one(spec):
    np.testing.assert_array_equal(times(spec, 50, 5.0), times(spec, 5000, 5.0)[:50])


def test_a_profile_takes_gamma_gaps_too():
    burstier = with_arrivals(frame(1000), 5.0, "bursts", 1, alpha=0.25)["arrived_s"]
    assert burstier.equals(with_arrivals(frame(1000), 5.0, "bursts:alpha=0.25", 1)["arrived_s"])
    load = unit_arrivals("gamma", 1000, 1, 0.25) / 5.0
    np.testing.assert_array_equal(burstier, Bursts().when(load, 200.0, 1))


def test_gamma_takes_its_shape_in_the_spec():
    spec, argument = (with_arrivals(frame(99), 5.0, *a) for a in (("gamma:alpha=0.5", 1), ("gamma", 1, 0.5)))
    assert spec.equals(argument)


@settings(max_examples=60, deadline=None)
@given(
    profile=st.one_of(
        st.builds(Bursts, st.floats(1, 3), st.floats(0.01, 5), st.floats(10, 50), st.sampled_from(["fixed", "random"])),
        st.builds(Ramp, st.floats(0, 1.9)),
        st.builds(Diurnal, st.floats(0, 1), st.floats(1, 1e5), st.floats(0, 1e5), st.floats(0, 1e5)),
    ),
    qps=st.floats(1e-3, 1e3),
    seed=st.integers(0, 99),
)
def test_times_are_finite_in_order_and_never_before_the_start(profile, qps, seed):
    at = arrivals.Arrivals("poisson", None, profile).times(300, qps, seed)
    assert np.isfinite(at).all() and at[0] >= 0 and (np.diff(at) >= 0).all()


# --- wrong input


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("burst", "allowed are poisson, gamma, constant, bursts, ramp, diurnal or trace"),
        ("bursts:hi=2", "'hi=2' is no option of bursts.*its options are high, high_s, low_s, durations, alpha"),
        ("bursts:high=2,high=3", "'high=3' is no option"),
        ("bursts:", "'' is no option of bursts"),
        ("bursts:high=x", "high='x' is not a finite number"),
        ("bursts:high=1_7", "high='1_7' is not a finite number"),
        ("bursts:high=0.5", "high=0.5 is not usable: a factor >= 1"),
        ("bursts:high=5", "more than all there is at the mean rate: at most 4"),
        ("bursts:high_s=0", "seconds > 0"),
        ("bursts:low_s=inf", "low_s='inf' is not a finite"),
        ("bursts:durations=some", "fixed or random"),
        ("ramp:start=2", "a factor from 0 to 1.9"),
        ("diurnal:amplitude=1.1", "a factor from 0 to 1"),
        ("diurnal:period_s=0", "seconds > 0"),
        ("diurnal:peak_s=nan", "peak_s='nan' is not a finite"),
        ("poisson:alpha=1", "no option of poisson, each once: its options are none"),
        ("gamma:alpha=0", "shape > 0"),
    ],
)
def test_a_spec_that_is_none_is_named_with_what_is_allowed(spec, says):
    with pytest.raises(InputError, match=says):
        parse(spec)


@pytest.mark.parametrize("build", [lambda: Bursts(high_s=math.inf), lambda: Diurnal(peak_s=math.nan), lambda: Ramp(3)])
def test_a_profile_that_is_none_is_refused_however_it_is_made(build):
    with pytest.raises(InputError, match="is not usable"):
        build()


def test_a_shape_given_twice_is_refused():
    with pytest.raises(InputError, match="give it once"):
        with_arrivals(frame(3), 1.0, "gamma:alpha=0.5", 0, alpha=0.5)
