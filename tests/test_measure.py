import math

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab.errors import InputError
from astrolabe_lab.measure import (
    beside,
    best_and_undecided,
    first_above,
    over_seeds,
    paired_difference,
    queue_lengths,
    schedule_differences,
    step_kinds,
    summarise,
    t_interval,
    verdicts,
)


def results(*rows):
    """A result frame from (arrived, first token, finished, tokens, status) per request."""
    frame = pd.DataFrame(rows, columns=["arrived_s", "first_token_s", "finished_s", "generated_tokens", "status"])
    return frame.assign(instance=0, preemptions=0, policy="p", seed=0)


def test_latencies_are_those_of_vllms_load_client():
    row = summarise(results((1.0, 1.5, 3.5, 5, "ok"), (2.0, 3.0, 3.6, 4, "ok"))).iloc[0]
    assert row.ttft_mean_s == pytest.approx((0.5 + 1.0) / 2)
    assert row.e2e_mean_s == pytest.approx((2.5 + 1.6) / 2)
    assert row.tpot_mean_s == pytest.approx((2.0 / 4 + 0.6 / 3) / 2)
    assert row.ttft_p90_s == pytest.approx(np.percentile([0.5, 1.0], 90))
    assert row.throughput_rps == pytest.approx(2 / 2.6)
    assert row.output_tokens_per_s == pytest.approx(9 / 2.6)


def test_a_request_of_one_token_has_no_tpot():
    row = summarise(results((0.0, 1.0, 1.0, 1, "ok"), (0.0, 1.0, 2.0, 3, "ok"))).iloc[0]
    assert row.tpot_mean_s == pytest.approx(0.5)
    assert math.isnan(summarise(results((0.0, 1.0, 1.0, 1, "ok"))).iloc[0].tpot_p99_s)


def test_only_ok_requests_count_in_latency_but_every_status_is_counted():
    nan = math.nan
    frame = results(
        (0.0, 1.0, 2.0, 2, "ok"),
        (0.0, 500.0, 900.0, 9, "failed"),
        (0.0, nan, nan, 0, "rejected"),
        (0.0, nan, 3.0, 0, "aborted"),
    )
    row = summarise(frame).iloc[0]
    assert (row.n, row.ok, row.failed, row.rejected, row.aborted) == (4, 1, 1, 1, 1)
    assert row.ttft_p99_s == 1.0
    assert row.output_tokens_per_s == pytest.approx(2 / 900)


def test_runs_stay_apart_and_keep_their_order():
    frame = pd.concat([results((0.0, 1.0, 2.0, 2, "ok")).assign(policy=p, qps=q) for p in ("z", "a") for q in (2, 1)])
    summary = summarise(frame)
    assert list(zip(summary.policy, summary.qps, strict=True)) == [("z", 2), ("z", 1), ("a", 2), ("a", 1)]
    assert list(summarise(frame, by=["policy"]).n) == [2, 2]
    assert list(summarise(frame, by=[]).n) == [4]


def test_missing_columns_and_unknown_statuses_are_named():
    with pytest.raises(InputError, match="lacks finished_s"):
        summarise(results((0.0, 1.0, 2.0, 2, "ok")).drop(columns="finished_s"))
    with pytest.raises(InputError, match="lacks router"):
        summarise(results((0.0, 1.0, 2.0, 2, "ok")), by=["router"])
    with pytest.raises(InputError, match="status is lost"):
        summarise(results((0.0, 1.0, 2.0, 2, "lost")))


def test_a_run_where_nothing_ended_well_has_counts_and_no_latency():
    row = summarise(results((0.0, math.nan, math.nan, 0, "rejected"))).iloc[0]
    assert row.rejected == 1 and math.isnan(row.ttft_mean_s) and math.isnan(row.throughput_rps)


def test_t_interval_of_a_worked_example():
    mean, low, high = t_interval([2.0, 4.0, 6.0])
    assert (mean, high - mean, mean - low) == pytest.approx((4.0, 4.968275, 4.968275), rel=1e-5)


def test_t_intervals_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(7)
    spans = [t_interval(rng.normal(10, 3, size=3), level=0.9)[1:] for _ in range(4000)]
    assert np.mean([low < 10 < high for low, high in spans]) == pytest.approx(0.9, abs=0.015)


def test_one_seed_gives_a_mean_and_no_interval():
    mean, low, high = t_interval([5.0])
    assert mean == 5.0 and math.isnan(low) and math.isnan(high)
    with pytest.raises(InputError):
        t_interval([])


def grid(spread, gap=1.0):
    """Two policies, two rates, three seeds: b is `gap` above a at every seed, seeds differ by `spread`."""
    rows = [
        {"policy": p, "qps": q, "seed": s, "x": q + s * spread + gap * (p == "b") * (1 + s / 100)}
        for p in "ab" for q in (1, 2) for s in range(3)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_pairing_sees_a_gap_that_separate_intervals_hide():
    summary = grid(spread=10.0)
    apart = over_seeds(summary, "x").set_index(["policy", "qps"])
    assert apart.loc[("a", 1), "high"] > apart.loc[("b", 1), "low"]
    paired = paired_difference(summary, "x", baseline="a")
    assert list(paired.policy) == ["b", "b"] and paired.clear.all()
    assert paired["mean"].tolist() == pytest.approx([1.01, 1.01])


def test_no_difference_is_never_clear():
    paired = paired_difference(grid(spread=1.0, gap=0.0), "x", baseline="a")
    assert not paired.clear.any()


def test_the_best_is_named_with_those_that_the_seeds_cannot_tell_from_it():
    assert best_and_undecided(grid(spread=10.0), "x")[["best", "undecided"]].to_numpy().tolist() == [["a", ""]] * 2
    noisy = grid(spread=0.0, gap=0.1)
    noisy.loc[(noisy.policy == "b") & (noisy.seed == 0), "x"] -= 0.2
    assert best_and_undecided(noisy, "x").undecided.tolist() == ["b", "b"]
    one_seed = grid(spread=0.0, gap=5.0).query("seed == 0")
    assert best_and_undecided(one_seed, "x").undecided.tolist() == ["b", "b"]


def test_a_verdict_counts_the_rates_and_calls_nothing_equal_that_is_only_undecided():
    assert verdicts(grid(spread=10.0), "x", "a").to_dict("index") == {"b": {"lower": 0, "higher": 2, "undecided": 0}}
    assert verdicts(grid(spread=10.0), "x", "b").to_dict("index") == {"a": {"lower": 2, "higher": 0, "undecided": 0}}
    one_seed = grid(spread=0.0, gap=5.0).query("seed == 0")
    assert verdicts(one_seed, "x", "a").to_dict("index") == {"b": {"lower": 0, "higher": 0, "undecided": 2}}


def test_the_rate_at_which_a_limit_is_passed_is_named_and_never_when_it_is_not():
    assert first_above(grid(spread=0.0), "x", 1.5) == {"a": 2, "b": 1}
    assert first_above(grid(spread=0.0), "x", 2.5) == {"a": "never", "b": 2}


def test_guesses_stand_beside_what_was_measured():
    table = beside({"how many": 3, "another": 1}, {"how many": 5, "not asked": "x"})
    assert table.to_dict("index") == {
        "how many": {"you guessed": "3", "measured": "5"},
        "not asked": {"you guessed": "-", "measured": "x"},
    }


def test_unpaired_runs_and_unknown_baselines_are_refused():
    with pytest.raises(InputError, match="baseline='c' is not among the policies: a, b"):
        paired_difference(grid(1.0), "x", baseline="c")
    with pytest.raises(InputError, match="cannot be paired"):
        paired_difference(grid(1.0).iloc[:-1], "x", baseline="a")


def test_queues_are_the_requests_between_arrival_first_token_and_finish():
    frame = results((0.0, 4.0, 8.0, 5, "ok"), (2.0, 6.0, 8.0, 3, "ok"), (1.0, math.nan, math.nan, 0, "rejected"))
    film = queue_lengths(frame, moments=9)  # 0, 1, .. 8 s
    assert film["t_s"].tolist() == list(range(9))
    assert film["waiting"].tolist() == [1, 1, 2, 2, 1, 1, 0, 0, 0]
    assert film["decoding"].tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 0]


def test_a_film_of_nothing_is_an_error():
    with pytest.raises(InputError, match="no request"):
        queue_lengths(results((1.0, math.nan, math.nan, 0, "rejected")))


def test_steps_are_told_apart_as_prefill_decode_and_recompute():
    log = pd.DataFrame(
        [(0, 0, 3), (0, 1, 2), (1, 0, 1), (1, 1, 2), (2, 0, 1), (3, 0, 1), (4, 1, 4), (5, 1, 1), (6, 1, 1)],
        columns=["step", "rid", "tokens"],
    )
    log.attrs["preemptions"] = pd.DataFrame({"step": [2], "rid": [1]})
    kinds = step_kinds(log, pd.DataFrame({"rid": [0, 1], "prompt_tokens": [3, 4]}))["kind"].tolist()
    # request 1 is preempted at step 2 and redoes its prompt and its one token in steps 4 and 5
    assert kinds == [
        "prefill",
        "prefill",
        "decode",
        "prefill",
        "decode",
        "decode",
        "recompute",
        "recompute",
        "decode",
    ]


def schedule(*rows, preempted=()):
    log = pd.DataFrame(rows, columns=["step", "rid", "tokens"])
    log.attrs["preemptions"] = pd.DataFrame(preempted, columns=["step", "rid"])
    return log


def test_schedules_differ_by_order_by_tokens_by_missing_steps_and_by_victims():
    ours = schedule((0, 0, 8), (0, 1, 2), (1, 0, 1), preempted=[(1, 1)])
    same = {"steps": 2, "different_steps": 0, "preemptions": 1, "different_preemptions": 0}
    assert schedule_differences(ours, ours) == same
    for theirs in (
        schedule((0, 1, 2), (0, 0, 8), (1, 0, 1), preempted=[(1, 1)]),
        schedule((0, 0, 7), (0, 1, 3), (1, 0, 1), preempted=[(1, 1)]),
        schedule((0, 0, 8), (0, 1, 2), preempted=[(1, 1)]),
    ):
        assert schedule_differences(ours, theirs)["different_steps"] == 1
    theirs = schedule((0, 0, 8), (0, 1, 2), (1, 0, 1), preempted=[(1, 0)])
    assert schedule_differences(ours, theirs)["different_preemptions"] == 2
