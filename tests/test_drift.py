"""The alarm keeps its promise on false alarms, finds what changed, and rolling errors say by how much."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astrolabe_lab.errors import InputError
from astrolabe_lab.length.drift import DriftAlarm, log_errors, rolling_error


def answers(rng, n, scale=1.0, spread=0.35):
    """(predicted, observed): predictions of very different lengths, errors of ``spread`` on the log scale."""
    predicted = np.exp(rng.normal(5.5, 0.9, n))
    observed = predicted * scale * np.exp(spread * rng.standard_normal(n))
    return np.maximum(np.rint(predicted), 1), np.maximum(np.rint(observed), 1)


def delays(change, runs=20, false_alarm_every=100_000):
    """Answers from a change to its alarm, and the kinds of the alarms, over runs of 1,000 sound answers before."""
    found = []
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        alarm = DriftAlarm(*answers(rng, 1000), false_alarm_every=false_alarm_every)
        assert alarm.update(*answers(rng, 1000)) is None
        found.append(alarm.update(*answers(rng, 3000, **change)))
    assert all(found)
    return np.array([drift.at - 1000 for drift in found]), {drift.kind for drift in found}, found


# --- false alarms -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.05, 0.35, 1.2])
def test_false_alarms_are_no_more_than_promised_whatever_the_errors(spread):
    # within n requests at most n / every: here at most 0.1, so of 60 streams 6; 13 has a chance below 1 %
    rng = np.random.default_rng(1)
    alarms = 0
    for _ in range(60):
        alarm = DriftAlarm(*answers(rng, 500, spread=spread), false_alarm_every=5000, tolerance=0.0)
        alarms += alarm.update(*answers(rng, 500, spread=spread)) is not None
    assert alarms <= 12


def test_the_statistic_grows_by_at_most_one_a_request_in_expectation():
    # the property the promise rests on, measured: ranks that are uniform make E[R] <= n
    rng = np.random.default_rng(2)
    levels = []
    for _ in range(300):
        alarm = DriftAlarm(*answers(rng, 2000), false_alarm_every=10**9, tolerance=0.0)
        alarm.update(*answers(rng, 60))
        levels.append(alarm.level * 10**9)
    mean, error = np.mean(levels), np.std(levels) / np.sqrt(len(levels))
    assert mean - 4 * error <= 60


def test_a_change_within_the_tolerance_passes():
    rng = np.random.default_rng(3)
    alarm = DriftAlarm(*answers(rng, 2000), false_alarm_every=10_000, tolerance=0.05)
    assert alarm.update(*answers(rng, 5000, scale=1.03)) is None


# --- real changes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, kind, within",
    [
        ({"scale": 2.0}, "longer", 40),
        ({"scale": 1.5}, "longer", 60),
        ({"scale": 1.2}, "longer", 600),
        ({"scale": 0.7}, "shorter", 110),
        ({"spread": 0.7}, "worse", 200),
    ],
)
def test_a_change_is_found_and_named_soon_after(change, kind, within):
    waited, kinds, found = delays(change)
    assert kind in kinds and kinds <= {kind, "worse"}
    assert (waited > 0).all() and np.median(waited) <= within
    assert np.median([abs(drift.since - 1000) for drift in found]) <= max(30, within / 2)


def test_a_rarer_false_alarm_costs_some_delay():
    often, _, _ = delays({"scale": 1.3}, false_alarm_every=10_000)
    rarely, _, _ = delays({"scale": 1.3}, false_alarm_every=10_000_000)
    assert np.median(often) < np.median(rarely) < 4 * np.median(often)


def test_the_alarm_stays_on_until_it_is_reset():
    rng = np.random.default_rng(4)
    alarm = DriftAlarm(*answers(rng, 500), false_alarm_every=1000)
    found = alarm.update(*answers(rng, 500, scale=3))
    assert found and alarm.update(*answers(rng, 100)) == found and alarm.requests == found.at
    alarm.reset()
    assert alarm.found is None and alarm.requests == 0 and alarm.level == 0


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=6))
def test_how_the_stream_is_cut_up_changes_nothing(sizes):
    rng = np.random.default_rng(5)
    reference, stream = answers(rng, 300), answers(rng, 600, scale=1.4)
    whole = DriftAlarm(*reference, false_alarm_every=2000)
    whole.update(*stream)
    parts = DriftAlarm(*reference, false_alarm_every=2000)
    at = 0
    while at < 600:
        size = sizes[at % len(sizes)]
        parts.update(*(values[at : at + size] for values in stream))
        at += size
    assert parts.found == whole.found and parts.requests == whole.requests


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"predicted": [10.0] * 199, "observed": [10.0] * 199}, "at least 200"),
        ({"false_alarm_every": 1}, "false_alarm_every"),
        ({"tolerance": 0.5}, "tolerance"),
        ({"predicted": [0.0] * 300}, "predicted holds"),
        ({"observed": [np.nan] * 300}, "observed holds"),
        ({"observed": [1.0]}, "shape"),
    ],
)
def test_what_an_alarm_cannot_start_from_is_refused(wrong, said):
    given = {"predicted": [10.0] * 300, "observed": [12.0] * 300} | wrong
    with pytest.raises(InputError, match=said):
        DriftAlarm(given.pop("predicted"), given.pop("observed"), **given)


def test_log_errors_are_positive_where_answers_are_longer():
    assert log_errors([100, 100], [200, 50]) == pytest.approx([np.log(2), -np.log(2)])


# --- rolling errors -----------------------------------------------------------------------------------------


def observed(predicted, true, censored=None):
    n = len(predicted)
    columns = {"predicted_tokens": predicted, "output_tokens": true, "arrived_s": np.arange(float(n))}
    return pd.DataFrame(columns | {"censored": np.zeros(n, bool) if censored is None else censored})


def test_rolling_errors_are_those_of_each_window():
    rng = np.random.default_rng(6)
    predicted, true = answers(rng, 300)
    frame = rolling_error(observed(predicted, true), constant=200, window=100)
    assert frame["request"].tolist() == list(range(100, 301))
    for row in frame.iloc[[0, 77, -1]].itertuples():
        last = slice(row.request - 100, row.request)
        assert row.mae_tokens == pytest.approx(np.abs(true - predicted)[last].mean())
        assert row.constant_mae_tokens == pytest.approx(np.abs(true - 200)[last].mean())
        assert row.ratio == pytest.approx(row.mae_tokens / row.constant_mae_tokens)
        assert row.log_bias == pytest.approx(np.median(np.log(true / predicted)[last]))


def test_answers_that_were_cut_off_are_left_out_of_errors():
    frame = observed([100.0, 100.0, 100.0], [150.0, 1.0, 150.0], np.array([False, True, False]))
    assert rolling_error(frame, constant=100, window=2)["mae_tokens"].tolist() == [50.0]


@pytest.mark.parametrize("window", [0, 4, 1.5])
def test_a_window_that_never_fills_is_refused(window):
    with pytest.raises(InputError, match="window"):
        rolling_error(observed([1.0] * 3, [1.0] * 3), constant=1, window=window)
