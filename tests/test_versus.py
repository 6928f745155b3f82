"""A against B: what is paired, what is refused, and how often a policy beats itself."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab import arrivals, cli, length, trace
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.measure import COMPARED, SLO, compare, interval, seeds_needed, summarise
from astrolabe_lab.rerun import can_rerun, rerun
from astrolabe_lab.sim.cluster import simulate


def run(policy, seed, n=120, qps=8.0, policy_seed=None, instances=3):
    requests = length.attach(sharegpt_like.generate(n, seed=seed, text=False), "oracle", seed)
    timed = arrivals.with_arrivals(requests, qps, seed=seed)
    return simulate(timed, policy, instances=instances, seed=seed, policy_seed=policy_seed)


@pytest.fixture(scope="module")
def many():
    """Ten seeds of two policies."""
    return tuple(pd.concat([run(policy, seed) for seed in range(10)]) for policy in ("random", "least_loaded"))


def row(found, metric):
    return found.set_index("metric").loc[metric]


def test_the_difference_is_b_minus_a_seed_by_seed(many):
    a, b = many
    found = row(compare(a, b), "e2e_mean_s")
    by_seed = summarise(b).set_index("seed").e2e_mean_s - summarise(a).set_index("seed").e2e_mean_s
    mean, low, high = interval(by_seed)
    base = summarise(a).e2e_mean_s.mean()
    assert (found.difference, found.a, found.seeds) == pytest.approx((mean, base, 10))
    assert (found.pct, found.low_pct, found.high_pct) == pytest.approx([100 * x / base for x in (mean, low, high)])
    assert found.interval == "over seeds"


def test_more_is_better_for_throughput_and_less_for_latency(many):
    a, b = many
    slower = a.assign(finished_s=a.finished_s + 50.0)
    found = compare(a, slower)
    assert row(found, "throughput_rps").winner == row(found, "e2e_mean_s").winner == "A"
    assert row(compare(slower, a), "throughput_rps").winner == "B"


def test_summaries_compare_as_their_requests_do(many):
    a, b = many
    slo = SLO(ttft_s=1.0)
    from_requests = compare(a, b, slo=slo)
    from_runs = compare(summarise(a, slo=slo), summarise(b, slo=slo))
    pd.testing.assert_frame_equal(from_requests, from_runs)


def test_a_side_that_sheds_load_wins_nothing_of_the_requests_that_are_left(many):
    a, _ = many
    slowest = a.groupby("seed")["e2e_s"].rank(pct=True) > 0.8
    shedding = a.assign(status=np.where(slowest, "rejected", a.status))
    found = compare(a, shedding)
    assert row(found, "e2e_mean_s").p_holm < 0.05 and row(found, "e2e_mean_s").pct < -5  # it does look faster
    assert set(found.winner) == {"A", "no winner"}
    assert row(found, "ok").winner == row(found, "throughput_rps").winner == "A"
    assert (row(found, "ok").a_lost, row(found, "ok").b_lost) == (0, slowest.sum())
    assert row(compare(shedding, a), "e2e_mean_s").winner == "no winner"


def test_both_sides_losing_alike_may_be_compared(many):
    a, _ = many
    lossy = a.assign(status=np.where(a.rid % 10 == 0, "failed", a.status))
    assert row(compare(lossy, lossy.assign(finished_s=a.finished_s + 50.0)), "e2e_mean_s").winner == "A"


def test_what_one_side_does_not_tell_is_not_compared(many):
    silent = many[1].drop(columns="preemptions")
    assert "preemptions" in set(compare(*many)["metric"])
    assert "preemptions" not in set(compare(many[0], silent)["metric"])


def test_frames_without_rows_and_metrics_without_numbers_are_refused(many):
    a, b = many
    with pytest.raises(InputError, match="B holds no run"):
        compare(a, b.head(0))
    with pytest.raises(InputError, match="regime of A holds no numbers"):
        compare(a, b, metrics=["regime"])


@pytest.mark.parametrize(
    "change", [{"control": {"x": 1}}, {"latency_noise": 3}, {"engine": {"nope": 1}}, {"policy": "gone"}]
)
def test_a_result_made_in_a_way_unknown_here_cannot_be_made_again(tmp_path, change):
    frame = run("random", 0, n=20)
    said = {"policy": "random", "instances": 3, "engine": {}, "cost": {"base_s": 0.01}, "control": {"predict_s": 0.0}}
    frame.attrs["astrolabe"] = said | {"latency_noise": {}, "seed": 0, "qps": 8.0} | change
    with pytest.raises(InputError, match="cannot be made again: it was made in a way unknown here"):
        rerun(frame)
    for nothing in (None, [1], "x"):
        frame.attrs["astrolabe"] = nothing
        assert not can_rerun(frame)


def test_a_policy_beside_itself_is_no_winner(many):
    a, _ = many
    luck = pd.concat([run("random", seed, policy_seed=100 + seed) for seed in range(10)])
    found = compare(a, luck)
    assert set(found.winner) == {"no winner"}
    with_aa = compare(a, a, again={"policy": luck})
    assert with_aa.aa_policy_pct.tolist() == pytest.approx(found.pct.tolist())
    assert with_aa.aa_policy_low_pct.tolist() == pytest.approx(found.low_pct.tolist())


def test_luck_is_only_the_routers(many):
    a, _ = many
    luck = run("random", 0, policy_seed=100)
    assert luck["arrived_s"].equals(a[a.seed == 0]["arrived_s"]) and (luck["seed"] == 0).all()
    assert not luck["instance"].equals(a[a.seed == 0]["instance"])
    pd.testing.assert_frame_equal(run("random", 0, policy_seed=0), run("random", 0))


def test_other_arrivals_are_given_or_taken_from_the_seeds_of_a(many):
    a, b = many
    halves = row(compare(a, b), "e2e_mean_s")
    values = summarise(a).e2e_mean_s.to_numpy()
    assert halves.aa_arrivals_pct == pytest.approx(100 * (values[5:] - values[:5]).mean() / values.mean())
    others = pd.concat([run("random", 50 + seed) for seed in range(10)])
    given = row(compare(a, b, again={"arrivals": others}), "e2e_mean_s")
    theirs = summarise(others).e2e_mean_s.to_numpy()
    assert given.aa_arrivals_pct == pytest.approx(100 * (theirs - values).mean() / values.mean())
    assert given.aa_arrivals_high_pct - given.aa_arrivals_low_pct > halves.high_pct - halves.low_pct


def test_the_seeds_needed_fall_with_the_square_of_the_effect(many):
    few, more = (row(compare(*many, effect_pct=pct), "e2e_mean_s").seeds_needed for pct in (0.4, 0.1))
    assert few > 30 and more == pytest.approx(16 * few, rel=0.1)


def test_the_seeds_needed_are_those_that_win_among_all_rows(many):
    alone, among = (compare(*many, metrics=names, effect_pct=0.4) for names in (["e2e_mean_s"], COMPARED))
    spread = (summarise(many[1])["e2e_mean_s"] - summarise(many[0])["e2e_mean_s"]).std()
    effect = 0.004 * alone.a[0]
    assert alone.seeds_needed[0] == seeds_needed(spread, effect)
    assert row(among, "e2e_mean_s").seeds_needed == seeds_needed(spread, effect, 1 - 0.05 / len(COMPARED))


def test_runs_on_other_requests_are_refused(many):
    a, b = many
    moved = b.assign(arrived_s=b.arrived_s + 0.1 * (b.seed == 3))
    with pytest.raises(InputError, match=r"seed 3 A and B served other arrivals or lengths \(120 and 120 requests\)"):
        compare(a, moved)
    longer = b.assign(output_tokens=b.output_tokens + (b.seed == 4))
    with pytest.raises(InputError, match="at seed 4 A and B served other arrivals or lengths"):
        compare(a, longer)
    with pytest.raises(InputError, match="served other numbers of requests"):
        compare(a, pd.concat([b[b.seed != 2], b[b.seed == 2].head(100)]))
    with pytest.raises(InputError, match="B has no run of seed 9, which A has"):
        compare(a, b[b.seed < 9])
    with pytest.raises(InputError, match="holds 2 policies, random, least_loaded: choose one"):
        compare(pd.concat([a, b]), b)
    with pytest.raises(InputError, match="no column workload"):
        compare(summarise(a).drop(columns="workload"), b)
    with pytest.raises(InputError, match="several runs of seed 0"):
        compare(pd.concat([summarise(a)] * 2), b)


def correlated(rng, n, memory, shared=None):
    """One run's E2E in arrival order, lognormal, each remembering the last."""
    from scipy.signal import lfilter

    noise = lfilter([1], [1, -memory], rng.normal(size=n) * math.sqrt(1 - memory**2))
    noise = noise if shared is None else 0.8 * shared + 0.6 * noise
    frame = pd.DataFrame({"arrived_s": np.arange(n) * 0.2})
    e2e_s = np.exp(0.5 * noise)
    frame = frame.assign(first_token_s=frame.arrived_s + 0.1, finished_s=frame.arrived_s + 0.1 + e2e_s)
    return frame.assign(generated_tokens=5, status="ok", preemptions=0, policy="p", seed=0), noise


@pytest.mark.parametrize("memory", [0.0, 0.9])
def test_one_run_tells_of_a_difference_as_surely_as_it_says_though_requests_depend_on_one_another(memory):
    rng = np.random.default_rng(1)
    hits, wins = [], 0
    for _ in range(60):
        a, shared = correlated(rng, 2000, memory)
        b, _ = correlated(rng, 2000, memory, shared)
        found = compare(a, b, metrics=["e2e_mean_s"]).iloc[0]
        assert found.interval == "over tenths of one run" and found.seeds == 1
        hits.append(found.low_pct <= 0 <= found.high_pct)
        wins += found.winner != "no winner"
    assert np.mean(hits) >= 0.89
    assert wins / len(hits) <= 0.11


@pytest.mark.parametrize("metric", ["output_tokens_per_s", "duration_s", "ttft_p99_third_s"])
def test_one_run_has_no_interval_of_what_is_not_of_its_requests(metric):
    a, b = (correlated(np.random.default_rng(seed), 2000, 0.0)[0] for seed in range(2))
    found = compare(a, b, metrics=["ttft_p99_s", metric])
    assert found.interval.tolist() == ["over tenths of one run", "none: one seed"]


def test_past_capacity_one_run_gives_no_interval():
    words = {"n": 2400, "qps": 16.0, "instances": 2}
    a, b = run("random", 0, **words), run("least_loaded", 0, **words)
    assert summarise(a).regime[0] == "finite-trace"
    found = compare(a, b, metrics=["e2e_mean_s"]).iloc[0]
    assert found.interval == "none: one seed, past capacity" and math.isnan(found.low_pct)
    assert found.winner == "no winner"
    assert compare(run("random", 0), run("random", 0)).interval[0] == "none: one seed, a short run"


# --- the command --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    trace.save(sharegpt_like.generate(800, seed=1, text=False), folder / "t.csv")
    for policy in ("random", "least_loaded"):
        for seed in (0, 1, 2):
            (folder / policy).mkdir(exist_ok=True)
            words = f"simulate --trace {folder}/t.csv --qps 6 --policy {policy} --instances 3 --seed {seed}"
            assert cli.main([*words.split(), "--out", str(folder / policy / f"{seed}.parquet")]) == 0
    return folder


def asked(capsys, *words):
    code = cli.main(["compare", *map(str, words)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_two_files_give_one_json_object_with_a_row_per_metric(files, capsys):
    code, out, err = asked(capsys, files / "random/0.parquet", files / "least_loaded/0.parquet", "--json")
    record = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert (record["a"]["policy"], record["b"]["policy"]) == ("random", "least_loaded")
    assert record["seeds"] == 1 and record["source"] == "simulated"
    first = record["metrics"][0]
    assert first["metric"] == "ttft_mean_s" and first["interval"] == "over tenths of one run"
    assert first["aa_policy_pct"] not in (None, 0.0), "A was made again with other luck"
    assert first["aa_arrivals_pct"] not in (None, 0.0), "and with other arrivals"
    assert "A again, other luck: 800 requests" in err


def test_folders_hold_a_file_for_each_seed(files, capsys):
    code, out, _ = asked(capsys, files / "random", files / "least_loaded", "--json")
    record = json.loads(out)
    assert code == 0 and record["seeds"] == 3
    assert {one["interval"] for one in record["metrics"]} == {"over seeds"}
    assert all(one["aa_policy_low_pct"] is not None for one in record["metrics"])


def test_people_get_a_table_that_says_what_its_columns_are(files, capsys):
    code, out, _ = asked(capsys, files / "random", files / "least_loaded", "--slo", "ttft_s=1")
    assert code == 0
    for word in ("A: random", "B: least_loaded", "goodput_share", "A/A luck", "3 seeds", "Holm", "80 % power"):
        assert word in out, word


def test_nothing_is_simulated_where_that_is_not_wanted_or_cannot_be(files, capsys, tmp_path):
    code, out, err = asked(capsys, files / "random", files / "least_loaded", "--no-rerun")
    assert code == 0 and "again" not in err and "give --again FILE" in out
    frame = pd.read_parquet(files / "random/0.parquet")
    frame.to_csv(tmp_path / "a.csv", index=False)
    assert not can_rerun(pd.read_csv(tmp_path / "a.csv"))
    code, out, err = asked(capsys, tmp_path / "a.csv", files / "least_loaded/0.parquet", "--json")
    assert code == 0 and json.loads(out)["metrics"][0]["aa_policy_pct"] is None
    again = f"simulate --trace {files}/t.csv --qps 6 --policy random --instances 3 --policy-seed 5"
    assert cli.main([*again.split(), "--out", str(tmp_path / "again.parquet")]) == 0
    capsys.readouterr()
    given = ("--again", tmp_path / "again.parquet", "--json")
    code, out, _ = asked(capsys, tmp_path / "a.csv", files / "least_loaded/0.parquet", *given)
    assert json.loads(out)["metrics"][0]["aa_policy_pct"] is not None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["random/0.parquet", "random/1.parquet"], "B has no run of qps 6, seed 0, which A has"),
        (["random/0.parquet", "nothing.parquet"], "nothing.parquet does not exist"),
        (["random/0.parquet", "t.csv"], "t.csv is no result"),
        (["random", "least_loaded", "--metrics", "speed"], "frame lacks speed"),
        (["random", "least_loaded", "--slo", "speed=1"], "not key=value with a new key of ttft_s"),
        (["random", "least_loaded", "--level", "2"], "level=2.0 is outside"),
        (["random", "least_loaded", "--policy-b", "jsq"], "has no policy 'jsq'; it has least_loaded"),
        (["random", "least_loaded", "--effect-pct", "0"], "--effect-pct 0.0 is not a number > 0"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_two(files, capsys, words, message):
    paths = [files / words[0], files / words[1]]
    code, out, err = asked(capsys, *paths, *words[2:], "--no-rerun")
    assert code == 2 and message in err.replace(str(files) + "/", ""), err
    assert err.startswith("astrolabe: error:") and err.count("\n") == 1 and out == ""


def test_a_sweep_compares_with_itself_policy_by_policy(tmp_path, capsys):
    from astrolabe_lab import sweep

    words = {"requests": 60, "instances": 2, "workers": 1, "progress": False}
    sweep.sweep("sharegpt_like", ["random", "least_loaded"], [4, 6], [0, 1, 2], out=tmp_path / "s", **words)
    both = ("--policy-a", "random", "--policy-b", "least_loaded", "--json")
    code, out, _ = asked(capsys, tmp_path / "s", tmp_path / "s", *both)
    record = json.loads(out)
    assert code == 0 and {one["qps"] for one in record["metrics"]} == {4, 6}
    code, _, err = asked(capsys, tmp_path / "s", tmp_path / "s")
    assert code == 2 and "A holds 2 policies, random, least_loaded: choose one" in err


def test_runs_are_chosen_by_any_column_and_a_value_that_is_not_there_is_told_with_those_that_are(tmp_path, capsys):
    from astrolabe_lab import sweep

    grid = {
        "defaults": {"trace": "sharegpt_like", "requests": 60, "instances": 2, "qps": 4, "policy": "min_tokens"},
        "grid": {"lengths": ["oracle", "noisy:0.5"], "engine.max_num_seqs": [24, 48], "seed": [0, 1, 2]},
    }
    sweep.run(grid, tmp_path / "s", progress=False, workers=1)
    words = ("--where", "engine.max_num_seqs=48", "--where-a", "lengths=oracle", "--where-b", "lengths=noisy:0.5")
    code, out, _ = asked(capsys, tmp_path / "s", tmp_path / "s", *words, "--json")
    assert code == 0 and json.loads(out)["seeds"] == 3
    code, _, err = asked(capsys, tmp_path / "s", tmp_path / "s", "--where", "lengths=constant")
    assert code == 2 and "its lengths are oracle, noisy:0.5" in err
    code, _, err = asked(capsys, tmp_path / "s", tmp_path / "s", "--where", "length=oracle")
    assert code == 2 and "not COLUMN=VALUE" in err


def test_seeds_that_share_their_requests_tell_of_the_routers_luck_alone(tmp_path, capsys):
    from astrolabe_lab import sweep

    timed = arrivals.with_arrivals(sharegpt_like.generate(80, seed=1, text=False), 6, seed=1)
    options = {"arrivals": "trace", "workers": 1, "instances": 3, "progress": False, "out": tmp_path / "s"}
    frame = sweep.sweep(timed, ["random", "astrolabe:k=2"], [6], [0, 1, 2, 3], **options)
    a, b = (frame[frame.policy == policy] for policy in ("random", "astrolabe:k=2"))
    found = compare(a, b)
    assert found.interval.str.startswith("over the router's luck alone").all()
    assert found.aa_arrivals_pct.isna().all()


def test_runs_on_other_requests_are_refused_before_a_is_made_again(files, capsys, tmp_path):
    words = f"simulate --trace {files}/t.csv --qps 7 --policy random --instances 3 --seed 0 --requests 90"
    assert cli.main([*words.split(), "--out", str(tmp_path / "b.parquet")]) == 0
    code, _, err = asked(capsys, files / "random" / "0.parquet", tmp_path / "b.parquet")
    assert code == 2 and "A again" not in err


@pytest.fixture(scope="module")
def pooled(tmp_path_factory):
    """Results of simulated pools, under what a router believes, and one of pools whose targets are others."""
    folder = tmp_path_factory.mktemp("pools")
    words = "simulate --trace family:mixed --requests 400 --qps 14 --lengths oracle --pools 1+2"
    for name, more in (
        ("random", "--policy random"),
        ("wrong", "--policy marginal_cost --constants paper-simulator"),
        ("slower", "--policy random --cost base_s=0.02,per_token_s=0.0001"),
    ):
        assert cli.main([*words.split(), *more.split(), "--out", str(folder / f"{name}.parquet")]) == 0
    return folder


def test_results_of_pools_are_compared_by_the_goodput_that_was_promised_and_beside_a_made_again(pooled, capsys):
    code, out, err = asked(capsys, pooled / "random.parquet", pooled / "wrong.parquet", "--json")
    assert code == 0, err
    told = {one["metric"]: one for one in json.loads(out)["metrics"]}
    share = told["goodput_share"]
    for side, name in (("a", "random"), ("b", "wrong")):
        kept = pd.read_parquet(pooled / f"{name}.parquet").attrs["astrolabe"]["goodput_share"]
        assert share[side] == pytest.approx(kept), "by what is true of the pools, whatever the router believes"
    assert share["aa_policy_pct"] not in (None, 0.0) and share["aa_arrivals_pct"] not in (None, 0.0)
    code, out, _ = asked(capsys, pooled / "random.parquet", pooled / "wrong.parquet", "--metrics", "goodput_share")
    assert code == 0 and "goodput_share" in out


def test_goodput_by_different_promises_or_by_none_asks_for_an_slo(files, pooled, capsys):
    both = (pooled / "random.parquet", pooled / "slower.parquet")
    code, _, err = asked(capsys, *both)
    assert code == 2 and "A TTFT 0.175 s, TPOT 0.0397 s, loose 3x; B TTFT" in err and "give those" in err
    for words in (("--slo", "ttft_s=0.2"), ("--metrics", "ttft_p99_s")):
        assert asked(capsys, *both, "--no-rerun", *words)[0] == 0
    code, _, err = asked(capsys, files / "random", files / "least_loaded", "--metrics", "goodput_share")
    assert code == 2 and "--metrics goodput_share: runs tell no targets" in err and err.count("\n") == 1


def test_a_result_of_pools_made_again_is_the_same_and_has_other_luck_and_arrivals(pooled):
    frame = pd.read_parquet(pooled / "wrong.parquet")
    same = rerun(frame)
    for name in ("arrived_s", "finished_s", "prefill_instance", "decode_instance"):
        np.testing.assert_array_equal(same[name], frame[name])
    frame = pd.read_parquet(pooled / "random.parquet")
    luck, others = rerun(frame, policy_seed=77), rerun(frame, seed=77)
    np.testing.assert_array_equal(luck["arrived_s"], frame["arrived_s"])
    assert (luck["decode_instance"] != frame["decode_instance"]).any()
    assert (others["arrived_s"].to_numpy() != frame["arrived_s"].to_numpy()).all()


def test_the_second_run_of_a_policy_in_a_live_grid_is_its_luck(tmp_path, capsys):
    def runs(policy, shift):
        frame = summarise(pd.concat([run(policy, seed) for seed in range(3)]), by=["seed"])
        frame["e2e_mean_s"] *= shift
        return frame.assign(policy=policy, qps=8.0, source="emulated", goodput_share=0.5 * shift)

    once, rival = runs("random", 1.0), runs("least_loaded", 1.2)
    twice = runs("random", 1.1).assign(policy="random (again)")
    words = (tmp_path, tmp_path, "--policy-a", "random", "--policy-b", "least_loaded")
    pd.concat([once, rival, twice]).to_parquet(tmp_path / "summary.parquet")
    code, out, _ = asked(capsys, *words, "--json")
    told = {one["metric"]: one for one in json.loads(out)["metrics"]}
    assert code == 0 and told["e2e_mean_s"]["aa_policy_pct"] == pytest.approx(10)
    assert told["goodput_share"]["b"] == pytest.approx(0.6)
    pd.concat([once, rival, twice.head(2)]).to_parquet(tmp_path / "summary.parquet")
    code, out, _ = asked(capsys, *words)
    assert code == 0 and "No A/A row of luck" in out


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (["over seeds"], "intervals are over seeds"),
        (["none: one seed, a short run", "none: one seed"],
         "no intervals: a single run that is short gives none, several seeds do"),
        (["over tenths of one run", "none: one seed"],
         "intervals are over tenths of one run, and for other rows a single run gives none, several seeds do"),
    ],
)  # fmt: skip
def test_where_intervals_come_from_is_one_plain_sentence(kinds, said):
    from astrolabe_lab.cli.compare import _intervals

    assert _intervals(pd.DataFrame({"interval": kinds})) == said


# --- making a result again ----------------------------------------------------------------------------------


def test_a_result_made_again_is_the_same_and_with_other_luck_serves_the_same_requests(files):
    frame = pd.read_parquet(files / "random/1.parquet")
    same = rerun(frame)
    for name in ("arrived_s", "finished_s", "instance"):
        np.testing.assert_array_equal(same[name], frame[name])
    luck = rerun(frame, policy_seed=77)
    np.testing.assert_array_equal(luck["arrived_s"], frame["arrived_s"])
    assert (luck["instance"] != frame["instance"]).any()
    others = rerun(frame, seed=77)
    assert sorted(others["output_tokens"]) == sorted(frame["output_tokens"])
    assert (others["arrived_s"].to_numpy() != frame["arrived_s"].to_numpy()).all()


def test_a_result_that_does_not_say_how_it_was_made_cannot_be_made_again(files):
    frame = pd.read_parquet(files / "random/1.parquet")
    bare = frame.copy()
    bare.attrs = {}
    with pytest.raises(InputError, match="cannot be made again: it does not tell policy, instances"):
        rerun(bare)
    frame.attrs["astrolabe"] = frame.attrs["astrolabe"] | {"qps": None}
    with pytest.raises(InputError, match="keeps its trace's own times"):
        rerun(frame, seed=5)
