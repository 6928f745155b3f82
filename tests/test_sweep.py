import re
import sys

import pandas as pd
import pytest

from astrolabe_lab import arrivals, length, measure, trace
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import families, sharegpt_like
from astrolabe_lab.sim.cluster import simulate
from astrolabe_lab.sweep import rehearse, run, sweep
from astrolabe_lab.sweep.crew import CrewError

SMALL = {"requests": 60, "instances": 3, "progress": False}


class Sees:
    """A user's policy that sends everything to the first instance."""

    def choose(self, request, cluster, rng):
        return 0


class Breaks:
    def choose(self, request, cluster, rng):
        raise ZeroDivisionError("in choose")


class Dies:
    def choose(self, request, cluster, rng):
        sys.exit("never")  # SystemExit is no Exception: the process ends


@pytest.fixture(scope="module")
def summary():
    return sweep("sharegpt_like", ["random", "least_loaded"], [6, 9], [0, 1], workers=2, **SMALL)


def measured(frame):
    return frame.drop(columns="wall_s")


def test_there_is_one_row_per_run_in_the_order_asked(summary):
    assert summary[["policy", "qps", "seed"]].to_numpy().tolist() == [
        [p, q, s] for p in ("random", "least_loaded") for q in (6, 9) for s in (0, 1)
    ]
    assert summary[["n", "ok", "preemptions"]].dtypes.eq("int64").all()
    assert set(summary.source) == {"simulated"} and (summary.n == 60).all() and (summary.wall_s > 0).all()


def test_a_row_is_the_summary_of_the_run_by_hand(summary):
    requests = length.attach(sharegpt_like.generate(60, seed=1, text=False), "oracle", 1)
    results = simulate(arrivals.with_arrivals(requests, 9, seed=1), "least_loaded", instances=3, seed=1)
    row = summary[(summary.policy == "least_loaded") & (summary.qps == 9) & (summary.seed == 1)].iloc[0]
    for name, value in measure.summarise(results).iloc[0].drop(["policy", "seed"]).items():
        assert row[name] == value, name


@pytest.mark.parametrize("slo", [{"ttft_s": 0.3, "tpot_s": 0.04}, "ttft_s=0.3,tpot_s=0.04"])
def test_with_an_slo_a_row_has_goodput(slo):
    grid = {"defaults": {"trace": "family:mixed", "requests": 60, "instances": 2, "qps": 6, "slo": slo}}
    row = run(grid | {"grid": {"policy": ["random"]}}, progress=False).iloc[0]
    requests = length.attach(families.generate("mixed", 60, seed=0, text=False), "oracle", 0)
    results = simulate(arrivals.with_arrivals(requests, 6, "bursts", seed=0), "random", instances=2)
    expected = measure.goodput(results, measure.SLO(ttft_s=0.3, tpot_s=0.04))
    assert {name: row[name] for name in expected} == expected and 0 < row.goodput_share < 1


def test_a_wrong_slo_is_told_before_anything_runs():
    grid = {"defaults": {"trace": "sharegpt_like", "requests": 9, "qps": 6, "policy": "random", "slo": {"tttf_s": 1}}}
    with pytest.raises(InputError, match="tttf_s=1.*ttft_s"):
        run(grid, progress=False)


def test_the_number_of_workers_changes_nothing(summary):
    alone = sweep("sharegpt_like", ["random", "least_loaded"], [6, 9], [0, 1], workers=1, **SMALL)
    pd.testing.assert_frame_equal(measured(alone), measured(summary))


def test_a_point_does_not_depend_on_the_grid_around_it(summary):
    one = sweep("sharegpt_like", ["least_loaded"], [9], [1], **SMALL)
    pd.testing.assert_frame_equal(measured(one), measured(summary.iloc[[7]].reset_index(drop=True)))


def test_every_policy_sees_the_same_requests_at_a_seed_and_others_at_another():
    twice = sweep("sharegpt_like", {"a": "random", "b": "random"}, [8], [0, 1], workers=1, **SMALL)
    per_policy = [measured(rows).drop(columns="policy").reset_index(drop=True) for _, rows in twice.groupby("policy")]
    pd.testing.assert_frame_equal(*per_policy)
    assert twice.e2e_mean_s.nunique() == 2  # two seeds


def test_a_file_and_a_frame_give_the_same_runs(tmp_path):
    frame = sharegpt_like.generate(80, seed=5, text=False)
    path = trace.save(frame, tmp_path / "t.csv")
    from_file = sweep(path, ["round_robin"], [8], [0], workers=1, **SMALL)
    from_frame = sweep(frame, ["round_robin"], [8], [0], workers=1, **SMALL)
    pd.testing.assert_frame_equal(measured(from_file), measured(from_frame))
    assert from_file.n.tolist() == [60]


def test_a_traces_own_times_are_kept_when_no_rate_is_given_and_their_rate_is_told():
    frame = arrivals.with_arrivals(sharegpt_like.generate(60, seed=5, text=False), 4, seed=0)
    row = sweep(frame, ["round_robin"], [None], [0], arrivals="trace", workers=1, **SMALL).iloc[0]
    span_s = frame.arrived_s.max() - frame.arrived_s.min()
    assert row.duration_s > span_s and row.qps == pytest.approx(59 / span_s)
    again = sweep(frame, ["round_robin"], [row.qps], [0], arrivals="trace", workers=1, **SMALL).iloc[0]
    assert again.ttft_mean_s == pytest.approx(row.ttft_mean_s)


def test_a_users_policy_runs_on_other_processes_and_carries_its_name():
    rows = sweep("sharegpt_like", [Sees(), "round_robin"], [8], [0], workers=2, **SMALL)
    assert rows.policy.tolist() == ["Sees", "round_robin"]
    assert rows.ttft_mean_s[0] > rows.ttft_mean_s[1]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_policy_that_breaks_is_named_with_its_point(workers):
    with pytest.raises(CrewError, match="Breaks at 8 QPS, seed 0: ZeroDivisionError: in choose"):
        sweep("sharegpt_like", {"Breaks": Breaks(), "r": "random"}, [8], [0], workers=workers, **SMALL)


def test_a_worker_that_dies_is_named_with_its_point():
    with pytest.raises(CrewError, match="Dies at 8 QPS, seed 0: its process ended early"):
        sweep("sharegpt_like", ["random", Dies()], [8], [0], workers=2, **SMALL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": ["rondom"]}, "'rondom' is unknown"),
        ({"policies": "random"}, "should be a list"),
        ({"policies": []}, "policies is empty"),
        ({"policies": ["random", "random"]}, "policies holds random more than once"),
        ({"qps": []}, "qps is empty"),
        ({"qps": [0]}, "qps"),
        ({"seeds": [1, 1]}, "seeds holds 1 more than once"),
        ({"requests": None}, "requests is missing"),
        ({"requests": 0}, "requests=0 should be a whole number"),
        ({"workers": 0}, "workers=0 should be a whole number"),
        ({"lengths": "tea"}, "'tea' is unknown"),
        ({"arrivals": "regular"}, "regular"),
        ({"trace": "nowhere.csv"}, "nowhere.csv"),
        ({"instances": 0}, "instances"),
    ],
)
def test_bad_arguments_are_refused_by_name(change, message):
    good = {"trace": "sharegpt_like", "policies": ["random"], "qps": [5], "seeds": [0], "workers": 1, **SMALL}
    with pytest.raises(InputError, match=message):
        sweep(**good | change)


def test_bad_arguments_are_refused_before_anything_is_computed(monkeypatch):
    monkeypatch.setattr("astrolabe_lab.sweep.crew.each", lambda *_: pytest.fail("a run was started"))
    good = {"trace": "sharegpt_like", "policies": ["random"], "qps": [5], "seeds": [0], "workers": 2, **SMALL}
    for change in ({"qps": [5, -1]}, {"instances": 0}, {"lengths": "tea"}, {"arrivals": "trace"}):
        with pytest.raises(InputError):
            sweep(**good | change)
    with pytest.raises(InputError, match=r"astrolabe:k=4 at 5 QPS, seed 0: .*k=4"):
        sweep(**good | {"policies": ["random", "astrolabe:k=4"], "qps": [5, 6], "seeds": [0, 1]})


def test_a_rehearsal_refuses_what_the_sweep_would_and_an_unknown_baseline():
    grid = ("sharegpt_like", {"a": "random", "b": "least_loaded"}, [5], [0])
    options = {"requests": 60, "instances": 3}
    assert rehearse(*grid, baseline="a", **options) is None
    with pytest.raises(InputError, match="baseline='random' is not among the policies: a, b"):
        rehearse(*grid, baseline="random", **options)
    with pytest.raises(InputError, match="lengths 'tea' is unknown"):
        rehearse(*grid, lengths="tea", **options)


def test_unwatched_runs_are_told_in_a_line_every_few_seconds_and_one_at_the_end(capsys, monkeypatch):
    monkeypatch.setenv("ASTROLABE_HEADLESS", "1")
    grid = ("sharegpt_like", ["random"], [6, 9, 12], [0])
    sweep(*grid, workers=1, **SMALL | {"progress": None})
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"sweep: 3 of 3 runs in \d+ s \([\d.]+ a second\)", line)
    monkeypatch.setattr("astrolabe_lab.sweep.progress.EVERY_S", 0)
    sweep(*grid, workers=1, **SMALL | {"progress": None})
    first = capsys.readouterr().err.splitlines()[0]
    assert re.fullmatch(r"sweep: 1 of 3 runs in \d+ s \([\d.]+ a second\), about \d+ s left", first)


def test_progress_can_be_a_function_or_silence(capsys):
    seen = []
    sweep(
        "sharegpt_like",
        ["random"],
        [6],
        [0],
        workers=1,
        **SMALL | {"progress": lambda *told: seen.append(told)},
    )
    assert [(done, total, row["policy"]) for done, total, row in seen] == [(1, 1, "random")]
    sweep("sharegpt_like", ["random"], [6], [0], workers=1, **SMALL)
    assert capsys.readouterr().err == ""
