"""The paper's figures beside ours: worked out from what a sweep measured, never from the paper."""

import math

import pandas as pd
import pytest

from astrolabe_lab import published
from astrolabe_lab.errors import InputError

RATES = (30.0, 31.0, 32.0, 33.0)


def sweep(knees, shift=(0.0, 0.1, -0.1), rates=RATES):
    """Runs whose P99 TTFT crosses 10 s exactly at each policy's knee, log-linearly; seeds are shifted against it."""
    rows = []
    for policy, knee in knees.items():
        for seed, off in enumerate(shift):
            for qps in rates:
                tail_s = 10 * math.exp(2 * (qps - knee - off))
                rows.append(
                    {"policy": policy, "qps": qps, "seed": seed, "n": 500, "ttft_p99_s": tail_s, "preemptions": 0}
                )
    frame = pd.DataFrame(rows)
    for name in ("ttft_mean_s", "e2e_mean_s", "e2e_p99_s", "throughput_rps"):
        frame[name] = frame.get(name, frame["ttft_p99_s"])
    return frame


def rows(summary):
    return published.measured(summary).set_index("what")


def test_a_capacity_is_where_each_seed_crosses_ten_seconds():
    found = rows(sweep({published.PO2: 31.4, published.LLUMNIX: 31.25}))
    assert found.here["capacity, Po2"] == pytest.approx(31.4) and found.seeds["capacity, Po2"] == 3
    assert found.here["capacity, Llumnix-"] == pytest.approx(31.25)
    half = 0.1 * 4.302652729911275 / math.sqrt(3)  # t of two degrees of freedom, standard deviation 0.1
    assert found.high["capacity, Po2"] == pytest.approx(31.4 + half)


def test_a_difference_of_capacities_is_taken_seed_by_seed():
    found = rows(sweep({published.PO2: 31.4, published.LLUMNIX: 31.25, published.PO2 + published.TRUE_LENGTHS: 32.0}))
    assert found.here["Po2 over Llumnix-"] == pytest.approx(0.15)
    assert found.low["Po2 over Llumnix-"] == pytest.approx(0.15)  # the shift of a seed cancels
    assert found.here["true lengths, Po2"] == pytest.approx(0.6)


@pytest.mark.parametrize(("knee", "verdict"), [(31.6, "agrees"), (30.6, "differs"), (32.5, "differs")])
def test_the_verdict_is_whether_the_interval_meets_the_papers_margin(knee, verdict):
    table = published.compare(sweep({published.PO2: knee}, shift=(0.0, 0.01, -0.01)))
    assert table.verdict["capacity, Po2"] == verdict
    assert table.loc["capacity, Po2", "here"] == f"{knee:.2f} QPS"
    assert table.loc["capacity, Po2", "difference"] == f"{knee - 31.6:+.2f} QPS"


def test_a_capacity_of_which_a_seed_crosses_beyond_the_rates_is_a_bound_without_verdict():
    """The seeds that do cross are the weak ones: their mean alone lies too low."""
    summary = sweep({published.PO2: 32.95, published.LLUMNIX: 29.95, published.PO4: 31.4})
    table, found = published.compare(summary), rows(summary)
    nothing_more = ["interval", "difference", "verdict"]
    assert table.here["capacity, Po2"] == f">= {(32.95 + 33.0 + 32.85) / 3:.2f} QPS"
    assert table.here["capacity, Llumnix-"] == f"<= {(30.0 + 30.05 + 30.0) / 3:.2f} QPS"
    assert (table.loc[["capacity, Po2", "capacity, Llumnix-"], nothing_more] == "").all(axis=None)
    assert found.censored[["capacity, Po2", "capacity, Llumnix-", "capacity, Po4"]].tolist() == ["above", "below", ""]
    assert (table.seeds["capacity, Po2"], table.n["capacity, Po2"]) == (3, "500")


def test_a_gain_over_a_policy_is_bounded_on_the_side_where_the_truth_may_lie():
    table = published.compare(sweep({published.PO2: 40.0, published.LLUMNIX: 31.0, published.PO4: 31.5}))
    assert table.here["Po2 over Llumnix-"] == ">= 2.00 QPS" and table.here["Po4 over Po2"] == "<= -1.50 QPS"
    assert (table.verdict[["Po2 over Llumnix-", "Po4 over Po2"]] == "").all()
    table = published.compare(sweep({published.PO2: 40.0, published.LLUMNIX: 41.0}))
    assert table.here["Po2 over Llumnix-"] == "beyond the rates"


def test_what_did_not_run_is_said_so():
    table = published.compare(sweep({published.LLUMNIX: 31.0}))
    assert table.here["capacity, Po4"] == "not run" and table.here["Po2 over Llumnix-"] == "not run"
    assert table.here["capacity, Llumnix-"] == "31.00 QPS" and table.seeds["capacity, Po4"] == 0


def test_the_most_that_is_gained_is_that_of_the_best_rate_and_its_spread_that_of_the_seeds_there():
    summary = sweep({published.PO2: 31.0, published.LLUMNIX: 31.0})
    for qps, share in zip(RATES, (0.9, 0.5, 0.7, 1.2), strict=True):
        mine = (summary.policy == published.PO2) & (summary.qps == qps)
        for seed, extra in enumerate((0.0, 0.02, -0.02)):
            summary.loc[mine & (summary.seed == seed), "ttft_mean_s"] *= share + extra
    found = rows(summary).loc["most that Po2 takes off mean TTFT"]
    assert 49 < found.here < 51 and found.low < found.here < found.high


def test_preemptions_are_counted_at_the_papers_rate():
    summary = sweep({published.PO2: 31.0, published.LLUMNIX: 31.0})
    at = (summary.qps == 32) & (summary.policy == published.LLUMNIX)
    summary.loc[at, "preemptions"] = [1700, 1800, 1900]
    found = rows(summary)
    assert found.here["preemptions at 32 QPS, Llumnix-"] == 1800 and found.here["preemptions at 32 QPS, Po2"] == 0
    table = published.compare(summary)
    assert table.verdict["preemptions at 32 QPS, Llumnix-"] == "agrees"
    assert table.verdict["preemptions at 32 QPS, Po2"] == "differs"
    assert table.loc["preemptions at 32 QPS, Llumnix-", "paper"] == "1,800"


def test_one_seed_has_no_interval_and_is_judged_by_the_papers_margin_alone():
    table = published.compare(sweep({published.PO2: 31.8}, shift=(0.0,)))
    assert table.loc["capacity, Po2", ["interval", "verdict"]].tolist() == ["one seed", "agrees"]


def test_a_frame_of_something_else_is_refused():
    with pytest.raises(InputError, match="qps"):
        published.compare(pd.DataFrame({"policy": ["random"]}))
