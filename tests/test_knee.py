"""Capacity: on curves whose knee is known, on a queue whose limit is theory, and on real clusters."""

import math

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab import capacity as search
from astrolabe_lab import sweep
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.measure import Capacity, capacity, crossing, t_interval


class Curves:
    """P99 TTFT grows by e a QPS and reaches the limit of 10 s at a knee of its own for each seed."""

    def __init__(self, knees, n=10_000, slope=1.0, grows_from=math.inf):
        self.knees, self.n, self.slope, self.grows_from, self.asked = knees, n, slope, grows_from, []

    def __call__(self, rates, seeds):
        rows = []
        for rate in rates:
            for seed in seeds:
                self.asked.append((seed, rate))
                value = 10.0 * math.exp(self.slope * (rate - self.knees[seed]))
                growing = rate >= self.grows_from
                rows.append(
                    {
                        "policy": "p", "qps": rate, "seed": seed, "n": self.n, "ttft_p99_all_s": value,
                        "ttft_p99_third_s": value, "waiting_growth_rps": rate if growing else 0.0,
                        "waiting_growth_p": 0.0 if growing else 0.5,
                    }
                )  # fmt: skip
        return pd.DataFrame(rows)


KNEES = dict(enumerate([30.1, 31.37, 30.9, 29.2, 32.05, 30.0, 31.0, 30.6, 30.33, 31.9]))


def test_the_knee_of_every_seed_is_found_exactly_on_a_log_linear_curve():
    found = capacity(Curves(KNEES), qps_range=(20, 44))
    assert found.per_seed["capacity_qps"].tolist() == pytest.approx(list(KNEES.values()))
    assert found.mean_qps == pytest.approx(np.mean(list(KNEES.values())))
    assert found.low_qps < found.mean_qps < found.high_qps and found.censored == ""
    assert found.high_qps - found.low_qps == pytest.approx(np.diff(t_interval(KNEES.values())[1:])[0], rel=0.3)
    assert str(found).startswith("p: 30.74 [") and "finite(10,000), 10 seeds" in str(found)


def test_only_rates_near_the_knee_are_run_in_fine_steps_and_none_twice():
    curves = Curves(KNEES)
    capacity(curves, qps_range=(20, 44))
    assert len(set(curves.asked)) == len(curves.asked)
    by_seed = {seed: sorted(rate for one, rate in curves.asked if one == seed) for seed in KNEES}
    assert by_seed[9][0] >= 28 and by_seed[9][-1] <= 34
    assert np.diff(by_seed[9]).tolist() == pytest.approx([0.25] * (len(by_seed[9]) - 1))
    assert max(rate for _, rate in curves.asked) <= 34, "the scan ends where it has seen enough"


def test_a_seed_far_from_the_others_is_searched_for():
    knees = dict(enumerate([30.0, 30.0, 30.0, 38.6, 22.4]))
    found = capacity(Curves(knees), qps_range=(10, 60), seeds=range(5))
    assert found.per_seed["capacity_qps"].tolist() == pytest.approx(list(knees.values()))


def test_a_seed_that_never_crosses_is_a_bound_and_leaves_no_interval():
    found = capacity(Curves({**KNEES, 4: 99.0}), qps_range=(20, 34))
    assert found.per_seed["censored"].tolist() == ["", "", "", "", "above", "", "", "", "", ""]
    assert found.per_seed["capacity_qps"][4] == 34 and found.censored == "above"
    assert math.isnan(found.low_qps) and str(found).startswith("p: >= ")
    below = capacity(Curves({**KNEES, 4: 3.0}), qps_range=(20, 34))
    assert below.censored == "below" and below.per_seed["capacity_qps"][4] == 20
    assert capacity(Curves({**KNEES, 4: 3.0, 5: 99.0}), qps_range=(20, 34)).censored == "both"


def test_the_first_crossing_counts_where_a_curve_comes_back():
    assert crossing([1, 2, 3, 4], [5, 20, 5, 40], [False, True, False, True], 10)[0] == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("values", "fails", "expected"),
    [
        ([5.0, 20.0], [False, True], (1.5, "")),
        ([5.0, math.inf], [False, True], (1.0, "")),  # everybody missed: no more can be said
        ([5.0, 6.0], [False, True], (1.5, "")),  # queues grew
        ([5.0, 6.0], [False, False], (2.0, "above")),
        ([15.0, 60.0], [True, True], (1.0, "below")),
    ],
)
def test_a_crossing_is_log_linear_or_says_what_it_is(values, fails, expected):
    assert crossing([1, 2], values, fails, 10) == (pytest.approx(expected[0]), expected[1])


def test_a_rate_whose_queues_grow_is_not_sustained_however_low_its_latency():
    low = dict.fromkeys(KNEES, 90.0)
    growing = Curves(low, n=30_000, grows_from=30.0)
    sustained = capacity(growing, kind="sustained", qps_range=(20, 44))
    assert sustained.per_seed["capacity_qps"].tolist() == pytest.approx([29.875] * 10)
    assert capacity(growing, kind="finite", qps_range=(20, 44)).censored == "above"


def test_sustained_takes_no_short_runs_and_few_seeds_are_told():
    with pytest.raises(InputError, match="needs runs of 30,000 requests or more, got 10,000"):
        capacity(Curves(KNEES), kind="sustained", qps_range=(20, 44))
    assert "3 seeds, fewer than the 10" in str(capacity(Curves(KNEES), qps_range=(20, 44), seeds=range(3)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"metric": "speed"}, "metric='speed' is not one of ttft_p99, tpot_p99, e2e_p99"),
        ({"kind": "best"}, "kind='best' is not one of finite, sustained"),
        ({"seeds": []}, "should be some, each once"),
        ({"seeds": [1, 1]}, "should be some, each once"),
        ({"qps_range": (30, 20)}, "want 0 < low < high"),
        ({"qps_range": (1, math.inf)}, "want 0 < low < high"),
        ({"qps_range": (1, 1e300)}, "more than 100,000 steps"),
        ({"fine_qps": 1e-9}, "more than 100,000 steps"),
        ({"fine_qps": 3.0}, "0 < fine_qps <= coarse_qps"),
        ({"limit_s": 0}, "limit_s=0 is not"),
    ],
)
def test_searches_that_make_no_sense_are_refused(words, message):
    with pytest.raises(InputError, match=message):
        capacity(Curves(KNEES), **{"qps_range": (20, 44)} | words)


def test_another_latency_has_a_capacity_of_its_own():
    curves = Curves(KNEES)

    def runs(rates, seeds):
        found = curves(rates, seeds)
        return found.assign(tpot_p99_all_s=found["ttft_p99_all_s"] / 100, ttft_p99_all_s=0.0)

    found = capacity(runs, metric="tpot_p99", limit_s=0.1, qps_range=(20, 44))
    assert found.per_seed["capacity_qps"].tolist() == pytest.approx(list(KNEES.values()))
    assert "at P99 TPOT <= 0.1 s" in str(found) and found.to_dict()["metric"] == "tpot_p99"


def test_runs_that_were_not_made_are_missed():
    with pytest.raises(InputError, match="no row for seed 1 at qps 20"):
        capacity(lambda rates, seeds: Curves(KNEES)(rates, seeds).query("seed != 1"), qps_range=(20, 44))


# --- through sweeps -----------------------------------------------------------------------------------------


def fast(**changes):
    """A search that takes seconds: two engines, short runs, big steps."""
    words = {
        "kinds": ["finite"], "requests": 150, "instances": 2, "seeds": range(3), "qps_range": (1, 14),
        "coarse_qps": 4.0, "fine_qps": 1.0, "limit_s": 0.5, "workers": 1, "progress": False,
    }  # fmt: skip
    return search.find("sharegpt_like", **{"policies": ["random", "least_loaded"]} | words | changes)


@pytest.fixture(scope="module")
def found():
    return fast()


def test_a_cluster_has_a_capacity_and_choosing_well_raises_it(found):
    table = search.table(found)
    assert table["policy"].tolist() == ["random", "least_loaded"] and (table["n"] == 150).all()
    assert table["capacity_qps"].between(1, 14).all()
    assert (table["censored"] == "").all()
    apart = search.differences(found, "random")
    assert apart["mean"][0] == pytest.approx(table["capacity_qps"][1] - table["capacity_qps"][0])
    assert apart["mean"][0] > 0


def test_the_capacity_is_where_the_runs_themselves_cross(found):
    one = found[0]
    for row in one.per_seed[one.per_seed["censored"] == ""].itertuples():
        runs = one.runs[one.runs["seed"] == row.seed]
        late = runs[runs["ttft_p99_all_s"] > 0.5]["qps"].min()
        assert late - 1.0 <= row.capacity_qps <= late


def test_a_search_that_was_kept_is_not_made_again(tmp_path):
    first = fast(policies="least_loaded", out=tmp_path)[0]
    marks = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json") if path.name != "run.json"}
    again = fast(policies="least_loaded", out=tmp_path)[0]
    assert isinstance(again, Capacity) and again.mean_qps == first.mean_qps
    assert {path: path.stat().st_mtime_ns for path in marks} == marks
    pd.testing.assert_series_equal(first.runs["wall_s"], again.runs["wall_s"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"policies": []}, "policies is empty"),
        ({"sample": "all"}, "sample='all' is not one of"),
        ({"kinds": ["best"]}, "kinds holds 'best'"),
        ({"policies": ["jsq"]}, "policy 'jsq' is unknown"),
    ],
)
def test_wrong_searches_are_refused_by_name(words, message):
    with pytest.raises(InputError, match=message):
        fast(**words)


def test_runs_draw_without_replacement_where_the_trace_has_enough_and_else_as_from_a_population():
    trace = sharegpt_like.generate(60, seed=0, text=False)
    words = {"policies": ["random"], "qps_range": (2, 4), "seeds": [0], "limit_s": 5}
    search.find(trace, kinds=["finite"], requests=60, instances=2, workers=1, progress=False, **words)
    drawn = {n: search._drawn("finite", "auto", n, 60, "poisson") for n in (60, 61)}
    assert drawn == {60: "permute", 61: "resample"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"requests": 61, "sample": "permute"}, "finite runs of 61 requests, and the trace has 60, none of which"),
        ({"sample": "permute"}, "sustained runs of 30,000 requests, and the trace has 60, none of which"),
        ({"sample": "head"}, "needs runs of 30,000 requests or more, got 60"),
        ({"sustained_requests": 50}, "needs runs of 30,000 requests or more, got 50"),
        ({"arrivals": "trace"}, "needs the trace's own times, and it has no column arrived_s"),
        ({"policies": ["random", "jsq"]}, "policy 'jsq' is unknown"),
        ({"lengths": "psychic"}, "psychic"),
    ],
)
def test_a_search_that_cannot_be_is_refused_before_any_other_has_run(words, message, monkeypatch):
    monkeypatch.setattr(sweep, "sweep", lambda *_, **__: pytest.fail("a search has begun"))
    trace = sharegpt_like.generate(60, seed=0, text=False)
    with pytest.raises(InputError, match=message):
        search.find(trace, **{"policies": "random", "instances": 2, "progress": False} | words)


def test_a_search_stretches_the_traces_own_times_when_asked():
    trace = sharegpt_like.generate(60, seed=0, text=False).assign(arrived_s=3.0 * np.arange(60))
    words = {"kinds": ["finite"], "qps_range": (2, 4), "seeds": [0, 1], "limit_s": 5, "instances": 2, "workers": 1}
    even, own = (
        search.find(trace, "random", arrivals=one, progress=False, **words)[0] for one in ("constant", "trace")
    )
    np.testing.assert_allclose(own.runs["ttft_p99_all_s"], even.runs["ttft_p99_all_s"])
    with pytest.raises(InputError, match="finite runs of 61 requests.* no times of their own"):
        search.find(trace, "random", arrivals="trace", requests=61, **words)


@pytest.mark.parametrize(
    ("requests", "options", "workers"),
    [(100, {}, 1), (30_000, {}, 2), (100, {"on": "ray"}, 2)],
    ids=["few requests", "few runs of many", "a cluster"],
)
def test_only_few_requests_stay_in_one_process(requests, options, workers, monkeypatch):
    asked = []
    monkeypatch.setattr(sweep, "sweep", lambda *_, **given: asked.append(given["workers"]) or 1 / 0)
    options = {"requests": requests, "workers": 2} | options
    with pytest.raises(ZeroDivisionError):
        search._Runs("sharegpt_like", "random", "random", "finite", "ttft_p99", options, False)([4.0], [0, 1, 2])
    assert asked == [workers]


def test_a_bound_has_no_difference():
    bounded = fast(policies=["random", "least_loaded"], qps_range=(1, 2), limit_s=500)
    assert [one.censored for one in bounded] == ["above", "above"]
    with pytest.raises(InputError, match="is censored: search a wider qps_range"):
        search.differences(bounded, "random")
