"""Claims about the numbers that describe a trace: each against a trace whose answer is known."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab import arrivals, trace
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import families
from astrolabe_lab.trace.summary import text


def frame(**columns):
    n = max(len(column) for column in columns.values())
    return pd.DataFrame({"rid": range(n), "prompt_tokens": [10] * n, "output_tokens": [20] * n} | columns)


def at(times):
    return frame(arrived_s=np.asarray(times, dtype=float))


def test_rate_and_gaps_of_a_trace_done_by_hand():
    found = trace.describe(at([1, 1, 2, 5]))["arrivals"]
    assert found["span_s"] == 4 and found["rate_rps"] == 0.75 and found["simultaneous"] == pytest.approx(1 / 3)
    assert found["gap_cv"] == pytest.approx(np.std([0, 1, 3]) / (4 / 3))
    assert found["windows"][0] == {"window_s": 1.0, "peak_rps": 2.0, "dispersion": None}


def test_a_poisson_trace_has_variation_and_dispersion_one_in_every_window():
    n = 60_000
    found = trace.describe(at(arrivals.unit_arrivals("poisson", n, 0) / 10))["arrivals"]
    assert found["gap_cv"] == pytest.approx(1, abs=4 / math.sqrt(n))
    for window in found["windows"]:
        windows = 6000 / window["window_s"]
        assert window["dispersion"] == pytest.approx(1, abs=4.5 * math.sqrt(2 / windows))


def test_gaps_cannot_tell_bursts_from_poisson_where_counts_can():
    """One state ten times as long as the gaps: the variation of the gaps is near 1, that of counts is not."""
    bursts = arrivals.with_arrivals(frame(rid=range(60_000)), 10, "bursts:high=1.7,high_s=10,low_s=30", 0)
    found = trace.describe(bursts)["arrivals"]
    assert 1.0 < found["gap_cv"] < 1.2 and found["windows"][1]["dispersion"] > 8


def test_a_trace_of_one_request_or_of_one_moment_has_no_rate():
    for times in ([3.0], [3.0, 3.0, 3.0]):
        found = trace.describe(at(times))["arrivals"]
        assert found["rate_rps"] is None and found["gap_cv"] is None
        assert "arrivals" in text(trace.describe(at(times)))
    assert trace.describe(frame(rid=[0]))["arrivals"] is None


def test_a_trace_of_months_is_described_without_counting_every_second_of_an_age():
    found = trace.describe(at([0, 5e6, 9.9e9]))["arrivals"]
    assert found["windows"][0]["peak_rps"] is None and found["rate_rps"] > 0


def test_lengths_shares_and_correlation():
    numbers = trace.describe(
        frame(
            prompt_tokens=list(range(1, 101)),
            output_tokens=list(range(100, 0, -1)),
            slo=["tight"] * 25 + ["loose"] * 75,
            family=["a", "b"] * 50,
            client=["c", "d", "e", "e"] * 25,
        )
    )
    assert numbers["prompt_tokens"] == pytest.approx({"mean": 50.5, "p50": 50.5, "p90": 90.1, "p99": 99.01, "max": 100})
    assert numbers["total_tokens"]["max"] == 101 and numbers["correlation"] == pytest.approx(-1)
    assert numbers["slo"] == {"loose": 0.75, "tight": 0.25} and numbers["families"] == {"a": 0.5, "b": 0.5}
    assert numbers["clients"] == 3 and numbers["prefix"] is None
    assert trace.describe(frame(rid=[0, 1]))["correlation"] is None


def test_reusable_prefix_tokens_are_those_of_leading_blocks_seen_before():
    blocks = [(1, 2, 3), (1, 2, 4), (9, 2), (1, 2, 3)]
    numbers = trace.describe(
        frame(prefix_blocks=blocks, prompt_tokens=[30, 30, 20, 25], output_tokens=[1] * 4, prefix_block_tokens=[10] * 4)
    )
    # The second shares two blocks; the third begins with a new one; the fourth shares all its 25 tokens.
    assert numbers["prefix"] == {"block_tokens": 10, "distinct_blocks": 5, "reusable": pytest.approx(45 / 105)}
    without = trace.describe(frame(prefix_blocks=blocks))["prefix"]
    assert without == {"block_tokens": None, "distinct_blocks": 5, "reusable": None}
    assert "of unknown size" in text(trace.describe(frame(prefix_blocks=blocks)))


def test_everything_is_json_and_text():
    mixed = arrivals.with_arrivals(families.generate("mixed", 500), 5.0, families.ARRIVALS["mixed"])
    numbers = trace.describe(mixed)
    assert json.loads(json.dumps(numbers, allow_nan=False)) == numbers
    shown = text(numbers)
    assert "500" in shown and "tight" in shown and "chat" in shown and "Poisson: 1" in shown


def test_windows_count_what_arrives_in_them():
    windows = trace.rate_windows(at([5, 5.5, 6, 7.5, 8.4, 12]), window_s=2.0)
    assert windows["t_s"].tolist() == [6, 8, 10] and windows["requests"].tolist() == [3, 2, 0]
    assert windows["rate_rps"].tolist() == [1.5, 1.0, 0.0] and windows["gap_cv"].isna().all()
    even = trace.rate_windows(at(np.arange(0, 100, 0.5)), window_s=10.0)
    assert even["requests"].tolist() == [20] * 9 and even["gap_cv"].tolist() == [0.0] * 9


def test_windows_of_a_trace_without_times_or_span_are_refused():
    with pytest.raises(InputError, match="no arrived_s"):
        trace.rate_windows(frame(rid=[0]), 1.0)
    for window_s in (0, 5, math.nan):
        with pytest.raises(InputError, match="at most the trace's span, 4 s"):
            trace.rate_windows(at([0, 4]), window_s)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("path", "rate", "cv"),
    [
        ("traces/azure_2023_conv.csv.gz", 5.53, 1.09),
        ("traces/azure_2023_code.csv.gz", 2.57, 13.15),
        ("traces/mooncake_fast25_conversation.jsonl.gz", 3.40, 3.03),
    ],
)
def test_published_traces_have_their_published_rates_and_variation(real, path, rate, cv):
    found = trace.describe(trace.load(real(path)))["arrivals"]
    assert (round(found["rate_rps"], 2), round(found["gap_cv"], 2)) == (rate, cv)
