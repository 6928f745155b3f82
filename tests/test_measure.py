import math

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab.errors import InputError
from astrolabe_lab.measure import (
    beside,
    best_and_undecided,
    first_above,
    load_at_arrival,
    over_seeds,
    paired_difference,
    percentile,
    prediction_error,
    queue_lengths,
    schedule_differences,
    step_kinds,
    summarise,
    verdicts,
    workload,
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


def test_percentiles_over_all_count_a_request_that_did_not_end_well_as_infinitely_late():
    nan = math.nan
    rows = [(0.0, wait, wait + 1, 2, "ok") for wait in np.linspace(1, 2, 99)]
    row = summarise(results(*rows, (0.0, nan, nan, 0, "rejected"))).iloc[0]
    assert row.ttft_p50_all_s == pytest.approx(np.percentile([r[1] for r in rows] + [1e9], 50))
    assert row.ttft_p99_s == pytest.approx(np.percentile([r[1] for r in rows], 99))
    assert math.isinf(row.ttft_p99_all_s), "the 99th of a hundred lies between the slowest and the one that never came"
    two = summarise(results(*rows[:98], (0.0, nan, nan, 0, "failed"), (0.0, 0.1, 0.2, 2, "aborted"))).iloc[0]
    assert math.isinf(two.e2e_p99_all_s) and two.e2e_p90_all_s < two.e2e_p99_s + 1


@pytest.mark.parametrize("missed", [0, 1, 3, 40])
def test_a_percentile_with_misses_is_numpys_over_the_sorted_values(missed):
    values = np.random.default_rng(0).exponential(size=40)
    everything = np.sort(np.r_[values, np.full(missed, 1e12)])
    for mark in (0, 10, 50, 77.7, 90, 99, 100):
        expected = np.percentile(everything, mark)
        found = percentile(values, mark, missed)
        assert math.isinf(found) if expected > 1e6 else found == pytest.approx(expected)


def test_the_normalised_latency_is_e2e_over_tokens():
    row = summarise(results((0.0, 1.0, 4.0, 4, "ok"), (0.0, 1.0, 3.0, 1, "ok"))).iloc[0]
    assert row.e2e_per_token_mean_s == pytest.approx((1.0 + 3.0) / 2)


def test_preemptions_and_the_requests_they_befell_are_counted():
    frame = results(*[(0.0, 1.0, 2.0, 2, "ok")] * 3).assign(preemptions=[0, 1, 4])
    row = summarise(frame).iloc[0]
    assert (row.preemptions, row.preempted) == (5, 2)


def test_a_frame_that_does_not_tell_of_preemptions_does_not_say_that_there_were_none():
    row = summarise(results(*[(0.0, 1.0, 2.0, 2, "ok")] * 3).drop(columns="preemptions")).iloc[0]
    assert math.isnan(row.preemptions) and math.isnan(row.preempted)


def test_the_workload_is_the_same_for_every_policy_and_for_no_other_requests():
    frame = results((0.0, 1.0, 2.0, 2, "ok"), (1.0, 2.0, 3.0, 2, "ok")).assign(prompt_tokens=5, output_tokens=2)
    same = frame.assign(policy="q", finished_s=9.0)
    assert workload(frame) == workload(same)
    assert workload(frame) != workload(frame.assign(arrived_s=[0.0, 1.1]))
    assert workload(frame) != workload(frame.assign(output_tokens=[2, 3]))


def predicted(errors, **columns):
    """Requests of 10 s whose E2E was predicted with these relative errors."""
    frame = results(*[(float(i), i + 1.0, i + 10.0, 5, "ok") for i in range(len(errors))])
    return frame.assign(predicted_e2e_s=[10 * (1 + error) for error in errors], **columns)


def test_the_prediction_error_is_absolute_signed_and_of_what_ended_well():
    frame = predicted([0.1, -0.3, math.nan, 0.5])
    frame.loc[3, "status"] = "failed"
    row = prediction_error(frame).iloc[0]
    assert (row.predicted, row.mae_pct, row.signed_pct) == pytest.approx((2, 20.0, -10.0))
    summary = summarise(frame).iloc[0]
    assert (summary.prediction_mae_pct, summary.prediction_signed_pct) == pytest.approx((20.0, -10.0))
    with pytest.raises(InputError, match="no request has a predicted_e2e_s"):
        prediction_error(predicted([math.nan]))


def test_the_prediction_error_by_rate_and_by_load():
    both = pd.concat([predicted([0.1, 0.1], qps=1), predicted([0.5, 0.7], qps=2)])
    assert prediction_error(both)["mae_pct"].tolist() == pytest.approx([10, 60])
    loaded = load_at_arrival(predicted([0.0, 0.1, 0.2, 0.3]))
    assert loaded["in_system"].tolist() == [0, 1, 2, 3]
    assert prediction_error(loaded, by=["in_system"])["signed_pct"].tolist() == pytest.approx([0, 10, 20, 30])
    binned = load_at_arrival(predicted([0.0, 0.1, 0.2, 0.3]), bins=[-1, 1, 5])
    assert prediction_error(binned, by=["in_system"])["predicted"].tolist() == [2, 2]


def test_the_load_is_of_the_same_instance_and_run_and_ends_with_the_request():
    frame = predicted([0.0] * 3, instance=[0, 1, 0]).assign(finished_s=[1.5, 5.0, 5.0])
    assert load_at_arrival(frame)["in_system"].tolist() == [0, 0, 0]
    assert load_at_arrival(frame.assign(finished_s=9.0))["in_system"].tolist() == [0, 0, 1]
    assert load_at_arrival(pd.concat([frame, frame.assign(seed=1)]))["in_system"].tolist() == [0] * 6


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


def test_what_is_clear_is_corrected_for_how_much_was_compared():
    rng = np.random.default_rng(3)
    gaps = rng.normal(size=(20, 6))
    gaps[0] = [1.0, 1.3, 0.7, 1.9, 0.4, 1.2]
    rows = [{"policy": "a", "qps": q, "seed": s, "x": 0.0} for q in range(20) for s in range(6)]
    rows += [{"policy": "b", "qps": q, "seed": s, "x": gaps[q, s]} for q in range(20) for s in range(6)]
    alone = paired_difference(pd.DataFrame([r for r in rows if r["qps"] == 0]), "x", "a").iloc[0]
    among = paired_difference(pd.DataFrame(rows), "x", "a").iloc[0]
    assert alone.clear and alone.p == among.p == alone.p_holm
    assert not among.clear and among.p_holm == pytest.approx(20 * among.p)
    assert (alone.low_all, alone.high_all) == pytest.approx((alone.low, alone.high))
    assert among.low_all < among.low and among.high_all > among.high


def test_runs_on_other_requests_are_not_paired():
    summary = grid(spread=1.0).assign(workload="same")
    paired_difference(summary, "x", "a")
    summary.loc[3, "workload"] = "other"
    with pytest.raises(InputError, match="saw different arrivals or lengths"):
        paired_difference(summary, "x", "a")
    with pytest.raises(InputError, match="is there more than once"):
        paired_difference(pd.concat([grid(1.0), grid(1.0)]), "x", "a")


@pytest.mark.parametrize(("loser", "faster", "clear"), [("a", "a", False), ("b", "b", False), ("a", "b", True)])
def test_shedding_load_wins_no_latency_of_what_is_left(loser, faster, clear):
    summary = grid(spread=1.0, gap=-1.0 if faster == "b" else 1.0).assign(n=1000)
    summary["ok"] = 1000 - 5 * (summary["policy"] == loser)
    named = summary.rename(columns={"x": "e2e_mean_s"})
    assert (paired_difference(named, "e2e_mean_s", "a")["clear"] == clear).all()
    assert paired_difference(summary.rename(columns={"x": "e2e_p99_all_s"}), "e2e_p99_all_s", "a")["clear"].all()
    assert (best_and_undecided(named, "e2e_mean_s")["undecided"] == "").all() == clear


def test_where_both_missed_there_is_no_winner():
    summary = grid(spread=1.0)
    summary.loc[summary.qps == 1, "x"] = math.inf
    found = paired_difference(summary, "x", "a").set_index("qps")
    assert not found.loc[1, "clear"] and math.isnan(found.loc[1, "low"])
    assert found.loc[2, "clear"] and found.loc[2, "p_holm"] == found.loc[2, "p"]


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
