"""Saturation search, sweep definitions, winners, and the second paper's numbers."""

import numpy as np
import pandas as pd
import pytest

import astrolabe_lab as lab
from astrolabe_lab.cli import main
from astrolabe_lab.disagg import compare, definitions, figures, published, saturation, studies
from astrolabe_lab.errors import InputError
from astrolabe_lab.sweep import Grid
from astrolabe_lab.sweep.plan import planned

ANCHORS = {5.5e-5: 20.0, 4e-4: 14.0}
SERVICES = {("serial", "chat", 2e-4): 0.5, ("exact", "chat", 4e-4): 30.0}
GRIDS = {
    "bursty": (lambda: studies.bursty(ANCHORS, [0, 1], 50), 2 * 7 * 2),
    "calibration": (lambda: studies.calibration(ANCHORS, [0, 1], 50), 2 * 2 * 2 * 2),
    "families": (lambda: studies.families({"mixed": ANCHORS, "chat": ANCHORS}, [0], 50), 2 * 2 * 7),
    "width": (lambda: studies.width(ANCHORS, [0], 50), 2 * 3 * 6),
    "gpus": (lambda: studies.gpus(ANCHORS, [0], 50), 2 * 6 * 7),
    "starved": (lambda: studies.starved([6, 9], studies.SLOPES_S, [0], 50, (0.05, 1.0)), 2 * 3 * 2 * 8),
    "load": (lambda: studies.load(ANCHORS, [0], 50), 2 * 5 * 7),
    "ablation": (lambda: studies.ablation(ANCHORS, [0], 50), 2 * 2 * 8),
    "length_error": (lambda: studies.length_error(ANCHORS, [0], 50), 2 * 4 * 3),
    "kv_budget": (lambda: studies.kv_budget(ANCHORS, [0], 50), 2 * 4 * 6),
    "services": (lambda: studies.services(SERVICES, [0], 50), 2 * 4),
    "train": (lambda: studies.train(ANCHORS, [0, 1], 50), 2 * 6 * 2),
    "leak": (lambda: studies.leak(ANCHORS, [0], 50), 2 * 2 * 2 * 2),
}


@pytest.mark.parametrize("name", GRIDS)
def test_each_study_is_a_grid_whose_runs_can_be_made(name):
    make, runs = GRIDS[name]
    found, _ = planned(make())
    assert len(found) == runs
    assert len({run.content()["key"] for run in found}) == runs


def test_the_seed_of_the_routers_draws_can_vary_by_itself():
    grid = {"defaults": studies.settings(60) | {"qps": 14.0}, "grid": {"policy": ["random"], "policy_seed": [1, 2]}}
    rows = lab.sweep.run(grid | {"zip": [{"seed": [0]}]}, workers=1, progress=False)
    assert rows["workload"].nunique() == 1 and rows["e2e_mean_s"].nunique() == 2


def test_studies_pair_policies_on_the_same_requests():
    rows = lab.sweep.run(studies.bursty({4e-4: 14.0}, [0, 1], 60), workers=1, progress=False)
    assert rows.groupby(["qps", "seed"])["workload"].nunique().eq(1).all()
    table = compare.means(rows, by=["policy"])
    assert (table["spread"] >= 0).all() and table["seeds"].eq(2).all()


def test_the_search_ends_between_rates_on_both_sides_of_its_target():
    given = studies.settings(150, decode_slope_s=4e-4)
    anchor = saturation.find(given, seeds=(0, 1), tolerance=0.1)
    by_rate = anchor.probes.groupby("qps")["goodput_share"].mean()
    below, above = by_rate[by_rate >= 0.8].index.max(), by_rate[by_rate < 0.8].index.min()
    assert below < above <= 1.1 * below * 1.0001
    assert anchor.qps in (below, above) and anchor.low <= anchor.goodput <= anchor.high
    assert anchor.goodput == pytest.approx(by_rate[anchor.qps])
    assert anchor.bracket_qps == (below, above)


def test_every_rate_that_was_searched_is_told_with_its_bracket_and_how_long_arrivals_last():
    few = {"target": 0.8, "tolerance": 0.5}
    of_families, families = saturation.anchors(["chat"], [4e-4], 30, (0,), **few)
    of_services, services = saturation.service_anchors(["exact"], ["chat"], [4e-4], 30, (0,), targets={}, tolerance=0.5)
    assert of_families["chat"][4e-4] == families["qps"][0] and of_services["exact", "chat", 4e-4] == services["qps"][0]
    for row in (families.iloc[0], services.iloc[0]):
        assert row["qps"] in (row["reached_qps"], row["missed_qps"])
        assert row["reached_qps"] < row["missed_qps"] <= 1.5 * row["reached_qps"] * 1.0001
        assert row["arrivals_s"] == pytest.approx(30 / row["qps"])


def test_the_bisection_finds_where_a_known_goodput_crosses_and_asks_each_rate_once():
    asked = []

    def goodput(qps):
        asked.append(qps)
        return 1 / (1 + (qps / 20) ** 4)

    true = 20 * 0.25**0.25
    for start_qps in (0.3, 14.0, 500.0):
        asked.clear()
        found = saturation.crossing(goodput, start_qps=start_qps, tolerance=0.01)
        assert found == pytest.approx(true, rel=0.01) and len(asked) == len(set(asked))
    asked.clear()
    assert saturation.crossing(goodput, start_qps=8.0, tolerance=0.01, rates=3) == pytest.approx(true, rel=0.2)
    assert len(asked) == 3
    with pytest.raises(InputError, match="none of the 3 rates tried, 100 to 400 requests a second"):
        saturation.crossing(goodput, start_qps=400.0, rates=3)
    with pytest.raises(InputError, match="rates=1 must be a whole number >= 2"):
        saturation.crossing(goodput, rates=1)


@pytest.mark.parametrize(
    ("given", "options", "told"),
    [
        ({}, {"target": 1.5}, "between 0 and 1"),
        ({}, {"tolerance": 0}, "tolerance=0 must be"),
        ({}, {"tolerance": float("nan")}, "tolerance=nan must be"),
        ({}, {"start_qps": -1.0}, "start_qps=-1.0 must be"),
        ({}, {"seeds": ()}, "seeds are none"),
        ({"slo": {"ttft_s": 1e-6}}, {}, "out of reach"),
        ({"slo": {"ttft_s": 1e9}}, {"start_qps": 2000.0}, "never collapses"),
    ],
)
def test_a_search_that_cannot_end_says_so(given, options, told):
    with pytest.raises(InputError, match=told):
        saturation.find(studies.settings(5) | given, **{"seeds": (0,)} | options)


def rows_of(values):
    """A summary of made-up goodputs, ``{policy: one a seed}``."""
    return pd.DataFrame(
        [
            {"policy": policy, "qps": 1.0, "seed": seed, "goodput_share": value}
            for policy, shares in values.items()
            for seed, value in enumerate(shares)
        ]
    )


def test_goodput_counts_lost_requests_so_a_winner_by_it_may_lose_more():
    rng = np.random.default_rng(0)
    base = rng.normal(0.8, 0.05, 6)
    runs = rows_of({"a": base, "b": base + 0.05 + rng.normal(0, 0.003, 6)}).assign(n=1000)
    runs["ok"] = np.where(runs["policy"] == "b", 950, 1000)
    assert compare.winners(runs)["winner"][0] == "b"
    assert compare.gains(runs, "a")["clear"][0]


def test_there_is_no_winner_inside_the_noise():
    rng = np.random.default_rng(0)
    base = rng.normal(0.8, 0.05, 6)
    clear = rows_of({"a": base, "b": base + 0.05 + rng.normal(0, 0.003, 6)})
    noisy = rows_of({"a": base, "b": base + 0.005 + rng.normal(0, 0.03, 6)})
    assert compare.winners(clear).iloc[0].to_dict() | {"mean": None} == {
        "best": "b", "mean": None, "undecided": "", "winner": "b"
    }  # fmt: skip
    found = compare.winners(noisy).iloc[0]
    assert found["winner"] == "" and found["undecided"] in ("a", "b")
    assert compare.winners(clear)["mean"][0] == pytest.approx(clear.loc[clear.policy == "b", "goodput_share"].mean())


def test_gains_are_points_over_the_baseline_with_intervals_that_hold_them():
    summary = rows_of({"a": [0.7, 0.8, 0.75], "b": [0.72, 0.83, 0.77]})
    row = compare.gains(summary, "a").iloc[0]
    assert row["mean"] == pytest.approx(100 * (0.02 + 0.03 + 0.02) / 3)
    assert row["low"] < row["mean"] < row["high"]
    assert compare.shown(compare.gains(summary, "a", by=["qps"]), "qps").loc["b", 1.0] == compare.told(row) + " *"
    assert compare.gains(summary, "a", scale=1e3).iloc[0]["mean"] == pytest.approx(10 * row["mean"])


def test_decode_slopes_are_told_apart_in_every_table_and_figure():
    runs = pd.concat(
        rows_of({"a": [0.7, 0.8, 0.75], "b": [0.72, 0.83, 0.77]}).assign(decode_slope_s=slope_s)
        for slope_s in studies.SLOPES_S
    )
    in_ms, by = [0.055, 0.2, 0.4], ["decode_slope_s", "policy"]
    table = compare.means(runs, by).assign(mean=0.12345)
    assert compare.rounded(table)[compare.SLOPE].tolist() == [ms for ms in in_ms for _ in "ab"]
    assert compare.rounded(table)["mean"].tolist() == [0.123] * 6
    for indexed in (compare.rounded(table.set_index(by)), compare.several(runs, by, ["goodput_share"])):
        assert indexed.index.unique(compare.SLOPE).tolist() == in_ms
    above = compare.gains(runs, "a", ["decode_slope_s"])
    assert compare.shown(above, "decode_slope_s").columns.tolist() == in_ms
    assert (
        compare.rounded(above.pivot(index="policy", columns="decode_slope_s", values="mean")).columns.tolist() == in_ms
    )
    for figure in (
        figures.goodput(table, "policy", "policy", facet="decode_slope_s"),
        figures.differences(above, "a", facet="decode_slope_s"),
        figures.tails(table.assign(at_s=2.5, ttft_s=0.1), facet="decode_slope_s"),
    ):
        assert [panel.text for panel in figure.layout.annotations] == [f"{ms:g} ms a stream" for ms in in_ms]
        assert figure.layout.title.text


def test_a_table_with_columns_of_two_kinds_has_the_first_kind_in_one_piece():
    runs = pd.concat(
        rows_of({"a": [0.7, 0.8, 0.75], "b": [0.72, 0.83, 0.77]}).assign(qps=qps, poll_s=poll_s)
        for qps in (6.0, 9.0)
        for poll_s in (0.05, 1.0)
    )
    table = compare.shown(compare.gains(runs, "a", ["poll_s", "qps"]), ["poll_s", "qps"])
    assert table.columns.tolist() == [(0.05, 6.0), (0.05, 9.0), (1.0, 6.0), (1.0, 9.0)]


def test_a_table_of_several_metrics_has_the_interval_of_each():
    rows = rows_of({"a": [0.7, 0.8], "b": [0.9, 0.9]}).assign(ttft_p99_s=[0.2, 0.4, 0.3, 0.3])
    table = compare.several(rows, ["policy"], ["goodput_share", "ttft_p99_s"])
    assert table.loc["b"].tolist() == ["0.9 [0.9, 0.9]", "0.3 [0.3, 0.3]"]
    row = compare.means(rows, ["policy"], "ttft_p99_s").iloc[0]
    assert table.loc["a", "ttft_p99_s"] == f"0.3 [{row.low:.4g}, {row.high:.4g}]"


def test_what_is_picked_from_many_groups_is_corrected_for_all_of_them():
    rng = np.random.default_rng(3)
    groups = [
        rows_of({"a": base, "b": base + rng.normal(0, 0.02, 5)}).assign(group=group)
        for group, base in enumerate(rng.normal(0.8, 0.05, (40, 5)))
    ]
    alone = pd.concat([compare.gains(group, "a") for group in groups])
    together = compare.gains(pd.concat(groups), "a", by=["group"])
    assert alone["clear"].any() and not together["clear"].any()  # nothing differs here
    assert together["low"].max() < 0 < together["high"].min()
    assert [compare.winners(group)["winner"][0] for group in groups].count("") < 40
    assert (compare.winners(pd.concat(groups), by=["group"])["winner"] == "").all()
    assert compare.told(alone.iloc[0].to_dict() | {"mean": -3.06, "low": -9.5, "high": 3.3}) == "-3.1 [-9.5, +3.3]"


def test_what_is_called_clear_has_an_interval_without_zero():
    # Holm's test alone calls the second one clear, once the first is; its interval, corrected for both, holds zero.
    rows = rows_of({"a": [0.5] * 4, "b": [0.6, 0.601, 0.599, 0.6], "c": [0.51, 0.52, 0.505, 0.515]})
    found = compare.gains(rows, "a").set_index("policy")
    assert found["clear"].tolist() == [True, False] and found["low"]["c"] < 0 < found["mean"]["c"]


def test_rolling_tails_take_the_requests_that_arrived_in_each_window():
    results = pd.DataFrame(
        {"policy": "a", "arrived_s": [0.0, 1.0, 9.9, 10.0, 19.0], "ttft_s": [0.1, 0.3, 0.2, 0.5, np.nan]}
    )
    table = compare.rolling_tail(results, window_s=10.0)
    assert table["ttft_s"].tolist() == [0.3, np.inf]
    assert table["sent"].tolist() == [3, 2] and table["at_s"].tolist() == [5.0, 15.0]
    two = pd.concat([results.assign(seed=0), results.assign(seed=1, ttft_s=0.2)])
    told = compare.rolling_tail(two, window_s=10.0, by=("policy", "seed"))
    assert told["seed"].tolist() == [0, 0, 1, 1] and told["ttft_s"].tolist() == [0.3, np.inf, 0.2, 0.2]
    with pytest.raises(InputError, match="window_s"):
        compare.rolling_tail(results, window_s=0)


def test_residuals_are_simulated_minus_measured_and_bounds_count_only_from_below():
    rows = [
        {
            "service": "exact",
            "trace": f"family:{family}",
            "policy": policy,
            "seed": 0,
            "qps": 1.0,
            "goodput_share": value,
        }
        for family, policy, value in [
            ("mixed", "marginal_cost", 0.9),
            ("documents", "least_loaded", 0.8),
            ("documents", "marginal_cost", 0.6),
            ("chat", "round_robin", 0.5),  # not known
        ]
    ]
    found = published.residuals(pd.DataFrame(rows)).set_index(["family", "policy"])["residual"]
    assert found.to_dict() == pytest.approx(
        {
            ("mixed", "marginal_cost"): 0.9 - 0.864,
            ("documents", "least_loaded"): 0.0,
            ("documents", "marginal_cost"): 0.6 - 0.695,
        }
    )


def test_the_papers_numbers_agree_with_each_other():
    table = published.cells("families").set_index(["setting", "policy"])["value"]
    for family, winner in published.WINNERS.items():
        assert table[family].idxmax() == winner
    assert np.mean([0.860, 0.877, 0.855]) == pytest.approx(table["mixed", "marginal_cost"], abs=5e-4)
    assert published.cells()["value"].between(0, 1).all()


def test_every_study_can_be_written_as_a_grid_that_holds_the_same_runs(tmp_path):
    assert set(definitions.NAMES) == set(GRIDS)
    grids = {name: make() for name, (make, _) in GRIDS.items()}
    for (name, grid), path in zip(grids.items(), definitions.write(grids, tmp_path), strict=True):
        assert path == tmp_path / f"{name}.yaml"
        written, made = ([(cell.settings, cell.columns) for cell in g.cells()] for g in (Grid.load(path), grid))
        assert written == made


def test_the_command_writes_studies_at_rates_of_their_own_length(tmp_path, capsys):
    told = ["--requests", "40", "--seeds", "2", "--search-seeds", "1", "--workers", "1"]
    few = ["--policy", "round_robin", "--policy", studies.GUARDED]
    assert main(["studies", "--out", str(tmp_path), "--studies", "starved,width", *told]) == 0
    assert f"{tmp_path}/starved.yaml: {3 * 4 * 2 * 8 * 2} runs" in capsys.readouterr().out
    width = Grid.load(tmp_path / "width.yaml")
    assert width.defaults["requests"] == 40 and len(width) == 3 * 3 * 6 * 2
    assert len({cell.settings["decode_slope_s"] for cell in width.cells()}) == 3
    assert main(["studies", "--out", str(tmp_path), "--studies", "gpus", *told, "--slopes", "0.0004", *few]) == 0
    assert len(Grid.load(tmp_path / "gpus.yaml")) == 6 * 2 * 2
    assert {cell.settings["decode_slope_s"] for cell in Grid.load(tmp_path / "gpus.yaml").cells()} == {4e-4}
    with pytest.raises(InputError, match="no study is named; there are bursty"):
        definitions.make([])
    assert main(["studies", "--out", str(tmp_path), "--studies", "widths"]) == 2
    assert "no study is called widths; there are bursty," in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policies": ["round_robin", "best"]}, "policy 'best' is unknown for pools; allowed: "),
        ({"policies": ["astrolabe:k=2"]}, "policy 'astrolabe' is unknown for pools"),
        ({"policies": ["round_robin", "random", "round_robin"]}, "policy round_robin is given twice"),
        ({"policies": ["marginal_cost:slo=0,k=2", "marginal_cost:k=2, slo=0"]}, "k=2, slo=0 is given twice"),
        ({"policies": "round_robin"}, r"should be a list of policies: write \['round_robin'\]"),
        ({"slopes_s": [0]}, "slopes_s: 0 must be a finite number > 0"),
        ({"slopes_s": [4e-4, -4e-4]}, "slopes_s: -0.0004 must be"),
        ({"slopes_s": [float("nan")]}, "slopes_s: nan must be"),
        ({"slopes_s": ["4e-4"]}, "slopes_s: '4e-4' must be"),
        ({"slopes_s": [2e-4, 4e-4, 2e-4]}, "slopes_s: 0.0002 is given twice"),
    ],
)
def test_what_no_study_can_be_made_of_is_refused_before_rates_are_searched(given, message, monkeypatch):
    monkeypatch.setattr(saturation, "find", lambda *_, **__: pytest.fail("searched"))
    for name in ("width", "starved"):  # at rates that are searched, and at others
        with pytest.raises(InputError, match=message):
            definitions.make([name], 40, [0], [0], workers=1, **given)


def test_the_command_refuses_a_policy_of_single_engines(tmp_path, capsys):
    assert main(["studies", "--out", str(tmp_path), "--studies", "starved", "--policy", "astrolabe:k=2"]) == 2
    assert "policy 'astrolabe' is unknown for pools; allowed: random, " in capsys.readouterr().err


def ran(source, goodput, **columns):
    """Rows as a sweep has them, of one run each; ``goodput`` by policy."""
    told = [{"policy": policy, "qps": 4.0, "seed": 0} | columns | {"n": 9} for policy in goodput]
    return pd.DataFrame(told).assign(source=source, goodput_share=list(goodput.values()))


LIVE_ROWS = {"round_robin": 0.7, "round_robin (again)": 0.72, "marginal_cost": 0.8}


def test_two_worlds_stand_side_by_side_and_their_disagreements_are_counted():
    live = pd.concat(ran("emulated", LIVE_ROWS, pools=pools) for pools in ("1+1", "1+2"))
    there = {"round_robin": 0.75, "marginal_cost": 0.7}
    simulated = pd.concat(
        [ran("simulated", there, pools="1+1"), ran("simulated", {**there, "marginal_cost": 0.9}, pools="1+2"),
         ran("simulated", there, pools="2+2")]
    )  # fmt: skip
    table = compare.beside(live, simulated)
    assert table.index.names == ["pools", "policy"] and len(table) == 6  # and none of pools that did not run live
    assert table.loc[("1+1", "marginal_cost")].to_dict() == {"emulated": 0.8, "simulated": 0.7}
    assert np.isnan(table.loc[("1+2", "round_robin (again)"), "simulated"])
    assert compare.disagreements(table, "marginal_cost", "round_robin") == (1, 2)
    assert compare.apart(live).tolist() == pytest.approx([0.02, 0.02])
    alone = compare.beside(ran("emulated", LIVE_ROWS), ran("simulated", there))
    assert alone.index.names == ["policy"] and compare.disagreements(alone, "marginal_cost", "round_robin") == (1, 1)


def test_where_no_live_run_counts_two_worlds_are_empty_and_a_figure_says_so():
    there = {"round_robin": 0.75, "marginal_cost": 0.7}
    at = [{"pools": pools, "poll_s": poll_s} for pools in ("1+1", "1+2") for poll_s in (0.05, 1.0)]
    live = pd.concat(ran("emulated", LIVE_ROWS, **point) for point in at)
    simulated = pd.concat(ran("simulated", there, **point) for point in at)
    table = compare.beside(live[live["n"] < 0], simulated)
    assert table.empty and [*table.columns] == ["emulated", "simulated"]
    assert table.index.names == ["pools", "poll_s", "policy"]
    assert compare.disagreements(table, "marginal_cost", "round_robin") == (0, 0)
    assert compare.apart(live[live["n"] < 0]).empty and compare.rounded(table).empty
    figure = figures.two_worlds({"starved": table})
    assert not figure.data and not figure.layout.shapes and figure.layout.title.text == "Goodput in two worlds"
    assert "no setting has runs that count" in figure.layout.title.subtitle.text
    measured = compare.beside(live.assign(source="hardware"), simulated)
    figure = figures.two_worlds({"starved": table, "bursty": measured})
    assert sum(len(points.x) for points in figure.data) == 8 and len(figure.layout.shapes) == 1
    assert figure.layout.yaxis.title.text == "hardware goodput (%)"


def test_where_decode_engines_are_too_slow_sparing_some_keeps_more_tight_promises_and_as_many_loose_ones():
    grid = studies.load({4e-4: 14.7}, [0, 1], 4000, factors=(1.25,), policies=(studies.EVEN, studies.GUARDED))
    kept = lab.sweep.run(grid, workers=1, progress=False).groupby("policy").mean(numeric_only=True)
    even, sparing = kept.loc[studies.EVEN], kept.loc[studies.GUARDED]
    assert sparing["goodput_share_tight"] > even["goodput_share_tight"] + 0.05
    assert sparing["goodput_share_loose"] > even["goodput_share_loose"] - 0.01
