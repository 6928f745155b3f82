import json

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab import plots
from astrolabe_lab.errors import InputError
from astrolabe_lab.measure import paired_difference, queue_lengths, step_kinds, t_interval


def summary(seeds=3, policies=("random", "least_loaded")):
    rng = np.random.default_rng(1)
    rows = [
        {"policy": p, "qps": q, "seed": s, "n": 500, "ttft_p99_s": q / 10 + rng.random(), "tpot_mean_s": 0.02}
        for p in policies for q in (20, 10, 30) for s in range(seeds)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def results(policy="random", n=80, instances=3):
    rng = np.random.default_rng(2)
    arrived_s = np.sort(rng.uniform(0, 20, n))
    first_token_s = arrived_s + rng.exponential(0.5, n)
    return pd.DataFrame(
        {
            "arrived_s": arrived_s, "first_token_s": first_token_s,
            "finished_s": first_token_s + rng.exponential(3, n), "generated_tokens": 30, "status": "ok",
            "instance": rng.integers(0, instances, n), "policy": policy, "preemptions": 0, "seed": 0,
        }
    )  # fmt: skip


def lines(figure):
    return {trace.name: trace for trace in figure.data if trace.name}


def test_the_line_is_the_mean_over_seeds_and_the_bars_its_t_interval():
    frame = summary()
    runs = frame[(frame.policy == "random") & (frame.qps == 20)]["ttft_p99_s"]
    mean, low, high = t_interval(runs)
    line = lines(plots.latency_vs_qps(frame))["random"]
    assert list(line.customdata) == [10, 20, 30]
    assert line.y[1] == pytest.approx(mean)
    assert line.error_y.array[1] == pytest.approx(high - mean)
    assert line.error_y.arrayminus[1] == pytest.approx(mean - max(low, 0))


def test_the_bars_of_policies_stand_side_by_side_at_their_rate():
    drawn = lines(plots.latency_vs_qps(summary(policies=[f"p{i}" for i in range(6)]))).values()
    places = sorted(line.x[1] for line in drawn)
    assert np.diff(places).min() > 0 and max(abs(place - 20) for place in places) < 10 / 4


def test_one_seed_draws_lines_without_bars_and_says_so():
    figure = plots.latency_vs_qps(summary(seeds=1))
    assert not [trace for trace in figure.data if trace.error_y.array is not None]
    assert "one seed" in figure.layout.title.subtitle.text


def test_one_seed_has_differences_without_intervals_and_says_so():
    gaps = paired_difference(summary(seeds=1), "ttft_p99_s", "random")
    figure = plots.difference_vs_qps(gaps, "ttft_p99_s", "random")
    assert "one seed, so no interval" in figure.layout.title.subtitle.text
    assert all(symbol.endswith("-open") for symbol in lines(figure)["least_loaded"].marker.symbol)


def test_only_a_latency_is_said_to_grow_with_the_trace():
    frame = summary().assign(preemptions=3)
    assert "latency" not in plots.latency_vs_qps(frame, "preemptions").layout.title.subtitle.text
    assert "latency grows" in plots.latency_vs_qps(frame).layout.title.subtitle.text


@pytest.mark.parametrize("span", [(0.5, 0.55), (0.5, 0.9), (0.03, 40), (0.4, 4), (1e-6, 1e6), (0.021, 0.0213), (9, 11)])
def test_a_logarithmic_axis_has_some_ticks_and_not_many_whatever_it_spans(span):
    axis = plots._log_ticks(*span)
    shown = [tick for tick in axis["tickvals"] if span[0] <= tick <= span[1]]
    assert 3 <= len(shown) <= 13
    assert len(set(axis["ticktext"])) == len(axis["ticktext"])


def test_a_finite_trace_is_named_as_one():
    assert "500 requests a run" in plots.latency_vs_qps(summary()).layout.title.subtitle.text


def test_axes_carry_units_and_tpot_is_in_milliseconds():
    assert plots.latency_vs_qps(summary()).layout.yaxis.title.text == "P99 TTFT (s)"
    figure = plots.latency_vs_qps(summary(), "tpot_mean_s")
    assert figure.layout.yaxis.title.text == "mean TPOT (ms)"
    assert lines(figure)["random"].y[0] == pytest.approx(20)
    assert plots.latency_vs_qps(summary()).layout.xaxis.title.text == "arrival rate (requests/s)"


def test_a_bar_that_reaches_zero_stays_on_a_logarithmic_axis():
    frame = summary()
    frame.loc[frame.seed == 0, "ttft_p99_s"] = 1e-6
    figure = plots.latency_vs_qps(frame, log=True)
    ends = np.concatenate([np.array(line.y) - line.error_y.arrayminus for line in figure.data])
    assert 10 ** figure.layout.yaxis.range[0] < ends.min()


def test_policies_differ_in_colour_and_in_marker():
    drawn = lines(plots.latency_vs_qps(summary(policies=[f"p{i}" for i in range(6)]))).values()
    assert len({trace.line.color for trace in drawn}) == len({trace.marker.symbol[0] for trace in drawn}) == 6


def test_a_difference_that_holds_zero_is_hollow():
    differences = paired_difference(summary(), "ttft_p99_s", "random")
    assert not differences.clear.any()
    figure = plots.difference_vs_qps(differences, "ttft_p99_s", "random")
    assert all(symbol.endswith("-open") for symbol in lines(figure)["least_loaded"].marker.symbol)
    figure = plots.difference_vs_qps(differences.assign(clear=True), "ttft_p99_s", "random")
    assert not any(symbol.endswith("-open") for symbol in lines(figure)["least_loaded"].marker.symbol)


def test_a_policy_keeps_its_colour_and_marker_when_the_baseline_is_left_out():
    frame = summary(policies=("a", "b", "c"))
    load = lines(plots.latency_vs_qps(frame))
    gaps = lines(plots.difference_vs_qps(paired_difference(frame, "ttft_p99_s", "a"), "ttft_p99_s", "a", "abc"))
    for name in "bc":
        assert gaps[name].marker.color == load[name].line.color
        assert gaps[name].marker.symbol[0].removesuffix("-open") == load[name].marker.symbol[0]
    with pytest.raises(InputError, match="order lacks c; it has a, b"):
        plots.difference_vs_qps(paired_difference(frame, "ttft_p99_s", "a"), "ttft_p99_s", "a", "ab")


def test_points_whose_queues_kept_growing_are_hollow_and_said_to_be():
    frame = summary().assign(regime="steady")
    frame.loc[(frame.policy == "random") & (frame.qps == 30) & (frame.seed == 1), "regime"] = "finite-trace"
    figure = plots.latency_vs_qps(frame)
    assert list(lines(figure)["random"].marker.symbol) == ["circle", "circle", "circle-open"]
    assert list(lines(figure)["least_loaded"].marker.symbol) == ["square"] * 3
    assert "hollow: queues kept growing" in figure.layout.title.subtitle.text
    assert "hollow" not in plots.latency_vs_qps(summary()).layout.title.subtitle.text


@pytest.mark.parametrize(
    ("metric", "label"),
    [
        ("ttft_p99_all_s", "P99 TTFT, misses counted (s)"),
        ("e2e_per_token_mean_s", "mean E2E per token (ms)"),
        ("itl_mean_s", "mean ITL (ms)"),
        ("ttft_p99_third_s", "P99 TTFT, worst third (s)"),
        ("goodput_share", "goodput share"),
    ],
)
def test_axes_say_what_the_measure_is_and_in_which_unit(metric, label):
    frame = summary().assign(**{metric: 0.5})
    assert plots.latency_vs_qps(frame, metric).layout.yaxis.title.text == label


def test_capacities_have_intervals_and_bounds_are_hollow():
    table = pd.DataFrame(
        {
            "policy": ["a", "a", "b", "b"], "kind": ["finite", "sustained"] * 2, "n": [10_000, 30_000] * 2,
            "metric": "ttft_p99",
            "limit_s": 10.0, "capacity_qps": [31.0, 30.0, 33.0, 40.0], "low_qps": [30.5, 29.0, 32.0, np.nan],
            "high_qps": [31.5, 31.0, 34.0, np.nan], "seeds": 10, "censored": ["", "", "", "above"],
        }
    )  # fmt: skip
    figure = plots.capacities(table)
    finite, sustained = figure.data
    assert (finite.name, sustained.name) == ("finite, 10,000 requests", "sustained, 30,000 requests")
    assert list(finite.error_x.array) == [0.5, 1.0] and list(sustained.marker.symbol) == ["square", "square-open"]
    assert "a bound" in figure.layout.title.subtitle.text and "10 s" in figure.layout.title.text


def test_cdf_rises_to_one_at_the_slowest_request_and_counts_the_lost():
    frame = results()
    frame.loc[0, "status"] = "rejected"
    (line,) = plots.cdf(frame).data
    slowest = (frame.first_token_s - frame.arrived_s)[1:].max()
    assert line.y[-1] == 1 and line.x[-1] == pytest.approx(slowest)
    assert np.all(np.diff(line.x) >= 0)
    assert line.name == "random: 79 of 80"


def test_the_film_has_a_slider_step_per_frame_and_shows_the_queue_of_its_moment():
    queues = queue_lengths(pd.concat([results("random"), results("astrolabe")]), moments=50)
    figure = plots.queue_animation(queues)
    assert len(figure.frames) == len(figure.layout.sliders[0].steps) == 50
    moment = queues[(queues.policy == "astrolabe") & (queues.t_s == sorted(queues.t_s.unique())[25])]
    bars = figure.frames[25].data[2:]  # two bars per policy: decoding, waiting
    assert list(bars[0].y) == list(moment.sort_values("instance")["decoding"])
    assert list(bars[1].y) == list(moment.sort_values("instance")["waiting"])


def test_a_film_of_200_frames_and_four_instances_stays_small():
    figure = plots.queue_animation(queue_lengths(results(instances=4), moments=200))
    assert len(json.dumps(json.loads(figure.to_json())["frames"])) < 40_000


def test_an_instance_that_one_policy_never_used_is_empty_there():
    film = queue_lengths(pd.concat([results("a", instances=3), results("b", instances=2)]), moments=5)
    assert all(len(bar.y) == 3 for frame in plots.queue_animation(film).frames for bar in frame.data)


def steps():
    rows = [(0, 0.0, 0.1, 0, 8), (1, 0.1, 0.3, 0, 1), (1, 0.1, 0.3, 1, 5), (2, 0.3, 0.4, 0, 1)]
    log = pd.DataFrame(rows, columns=["step", "start_s", "end_s", "rid", "tokens"])
    log.attrs["preemptions"] = pd.DataFrame({"step": [2], "rid": [1]})
    return step_kinds(log, pd.DataFrame({"rid": [0, 1], "prompt_tokens": [8, 9]}))


def test_the_schedule_shows_each_share_of_each_step_in_milliseconds():
    figure = plots.schedule_chart(steps(), budget_tokens=16)
    prefill = figure.data[0]
    assert prefill.name == "prefill"
    assert list(prefill.y) == ["0", "1"]
    assert [*prefill.base, *prefill.x] == pytest.approx([0, 100, 100, 200])
    assert {trace.name for trace in figure.data} == {"prefill", "decode", "preempted"}
    assert figure.layout.yaxis2.range[1] > 16


def test_an_unreadable_schedule_is_refused():
    with pytest.raises(InputError, match="cut the log"):
        plots.schedule_chart(pd.concat([steps()] * 1001))


@pytest.mark.parametrize("draw", [plots.latency_vs_qps, plots.cdf, plots.queue_animation, plots.schedule_chart])
def test_a_frame_of_the_wrong_kind_is_refused_by_name(draw):
    with pytest.raises(InputError, match=r"frame lacks .*; it has colour"):
        draw(pd.DataFrame({"colour": [1]}))
