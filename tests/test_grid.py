"""What a grid says, in YAML and in Python, and what it refuses."""

import json
import math
import random

import pytest

from astrolabe_lab import sweep
from astrolabe_lab.cost import StepCost, preset
from astrolabe_lab.errors import InputError
from astrolabe_lab.sim.cluster import ControlPlane, LatencyNoise, Outage, Slowdown, simulate
from astrolabe_lab.sweep import Grid, keys
from astrolabe_lab.sweep.cell import Cell, resolve
from astrolabe_lab.sweep.grid import SECTIONS
from astrolabe_lab.sweep.sources import Sources

BASE = {"trace": "sharegpt_like", "requests": 40, "policy": "random", "qps": 5, "instances": 2}


def points(written):
    return list(Grid.of(written).points())


def options(**settings):
    return resolve(Cell({**BASE, **keys.flat(settings, "test")}), Sources()).options


def load(tmp_path, text):
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    return Grid.load(path)


def test_a_grid_is_every_combination_in_order_times_what_is_walked_in_step():
    written = {
        "grid": {"policy": ["a", "b"], "qps": [1, 2]},
        "zip": {"engine.max_num_seqs": [24, 48], "engine.max_num_batched_tokens": [256, 512]},
        "cells": [{"label": "x"}, {"label": "y", "policy.k": 4}],
    }
    expected = [
        {"policy": p, "qps": q, "engine.max_num_seqs": s, "engine.max_num_batched_tokens": t, **cell}
        for p in ("a", "b")
        for q in (1, 2)
        for s, t in ((24, 256), (48, 512))
        for cell in written["cells"]
    ]
    assert points(written) == expected


def test_cells_alone_are_a_list_of_runs():
    cells = [{"policy": "random", "qps": 3}, {"policy": "least_loaded", "qps": 4}]
    assert points({"cells": cells}) == cells


def test_what_is_excluded_is_left_out_and_nothing_else():
    written = {"grid": {"policy": ["a", "b"], "qps": [1, 2, 3]}, "exclude": [{"policy": "a", "qps": [2, 3]}]}
    assert points(written) == [{"policy": "a", "qps": 1}, *({"policy": "b", "qps": q} for q in (1, 2, 3))]
    assert len(Grid.of(written)) == 4
    for qps in ({"from": 2, "to": 3, "step": 1}, (2, 3), range(2, 4)):
        assert points(written | {"exclude": [{"policy": "a", "qps": qps}]}) == points(written)
    assert len(points(written | {"exclude": [{"policy": "a", "qps": []}]})) == 6


@pytest.mark.parametrize("seed", range(30))
def test_a_range_holds_both_ends_and_steps_evenly(seed):
    draw = random.Random(seed)
    low, step, count = draw.randint(-50, 50) / 4, draw.choice([0.1, 0.25, 1, 2, 1 / 3]), draw.randint(1, 40)
    high = low + (count - 1) * step
    values = [point["qps"] for point in points({"grid": {"qps": {"from": low, "to": high, "step": step}}})]
    assert len(values) == count and values[0] == low and math.isclose(values[-1], high, abs_tol=1e-9)
    assert all(math.isclose(b - a, step, abs_tol=1e-9) for a, b in zip(values, values[1:], strict=False))


def test_whole_ranges_stay_whole():
    values = [point["qps"] for point in points({"grid": {"qps": {"from": 20, "to": 36, "step": 1}}})]
    assert values == list(range(20, 37)) and all(type(value) is int for value in values)


def test_yaml_reads_as_it_is_written(tmp_path):
    grid = load(
        tmp_path,
        """
defaults: {trace: sharegpt_like, requests: 40, cost: {per_kv_token_s: 1e-7}, lengths: noisy:0.25}
grid:
  policy: [random, astrolabe:k=2]
  seed: {from: 0, to: 1, step: 1}
  engine.enable_chunked_prefill: [true]
""",
    )
    assert grid.defaults == {
        "trace": "sharegpt_like", "requests": 40, "cost.per_kv_token_s": 1e-7, "lengths": "noisy:0.25",
    }  # fmt: skip
    assert list(grid.points())[2] == {"policy": "astrolabe:k=2", "seed": 0, "engine.enable_chunked_prefill": True}
    assert grid.folder == tmp_path


def test_a_relative_trace_lies_beside_its_grid(tmp_path):
    (tmp_path / "t.csv").write_text("arrived_s,prompt_tokens,output_tokens\n0,5,6\n1,7,8\n")
    (tmp_path / "grid.yaml").write_text("{defaults: {trace: t.csv, instances: 1}, grid: {policy: [random]}}")
    rows = sweep.run(tmp_path / "grid.yaml", workers=1, progress=False)
    assert rows.n.tolist() == [2] and rows.qps.tolist() == [1.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grid: {polcy: [random]}", "grid: unknown key 'polcy'. Did you mean policy"),
        ("grid: {max_num_seqs: [2]}", r"Did you mean engine\.max_num_seqs"),
        ("grid: {k: [2]}", r"Did you mean policy\.k"),
        ("grid: {engine.max_num_seq: [2]}", r"Did you mean engine\.max_num_seqs"),
        ("defaults: {cost: {hots_s: 1}}", r"Did you mean cost\.host_s"),
        ("grids: {policy: [random]}", "unknown section 'grids'; .*Did you mean grid"),
        ("policy: [random]", "'policy' belongs under defaults"),
        ("grid: {policy: random}", r"grid.policy: 'random' should be a list, e.g. \['random'\]"),
        ("grid: {policy: [random, random]}", "policy holds random more than once"),
        ("grid: {policy: []}", "empty"),
        ("{grid: {qps: [1]}, zip: {qps: [1, 2]}}", "qps is in two axes"),
        ("zip: {qps: [1, 2], seed: [0]}", "must be of one length, but qps has 2, seed has 1"),
        ("{grid: {qps: [1]}, exclude: [{seed: 0}]}", "exclude: seed is on no axis"),
        ("{grid: {qps: [1]}, exclude: [{qps: 1}]}", "exclude leaves no run"),
        ("{grid: {qps: [1, 2]}, exclude: [{qps: [2, 3]}]}", "exclude: qps 3 is not on its axis, which has 1, 2$"),
        ("{grid: {qps: [1, 2]}, exclude: [{qps: {from: 2, to: 4, step: 1}}]}", "exclude: qps 3 is not on its axis"),
        ("{grid: {qps: [1, 2]}, exclude: [{qps: '1'}]}", "exclude: qps '1' is not on its axis"),
        ("{zip: {qps: [1, 2], seed: [0, 1]}, exclude: [{qps: 1, seed: 1}]}", "no point of the axis has .*'seed': 1"),
        ("grid: {qps: {from: 1, to: 2}}", "should be a list, or {from: 20, to: 36, step: 1}"),
        ("grid: {qps: {from: 1, to: 2, step: 0}}", "from <= to, step > 0"),
        ("grid: {qps: {from: 1, to: 2, step: .nan}}", "are numbers"),
        ("grid: {seed: {from: 0, to: 9000000, step: 1}}", "no end, or none"),
        ("grid: {seed: {from: 0, to: 2000, step: 1}, qps: {from: 1, to: 2000, step: 1}}", "4,002,000|more than the"),
        ("grid: {policy: [a], policy: [b]}", "line 1: policy is given twice"),
        ("grid: {1: [a]}", "line 1: the key 1 is no name"),
        ("grid: [policy", "line 1: this is not YAML"),
        ("", "it is empty"),
        ("- a", "a grid is a mapping"),
        ("defaults: 3", "defaults: 3 should be a mapping"),
        ("!!python/object/apply:os.getcwd []", "not YAML"),
    ],
)
def test_a_grid_that_is_wrong_is_refused_with_its_file_and_what_to_write(tmp_path, text, message):
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "grid.yaml"))


def test_a_grid_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InputError, match="nowhere.yaml: cannot read this grid: No such file"):
        Grid.load(tmp_path / "nowhere.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="bytes.yaml: cannot read this grid: it is not UTF-8"):
        Grid.load(tmp_path / "bytes.yaml")


def test_a_device_is_no_grid():
    with pytest.raises(InputError, match="/dev/zero is a device"):
        Grid.load("/dev/zero")


def test_anchors_and_merges_are_filled_in_and_a_key_of_its_own_wins(tmp_path):
    grid = load(tmp_path, "cells:\n- &a {policy: x, qps: 5}\n- {<<: *a, qps: 6}\n- {<<: *a, seed: 1}")
    assert list(grid.points()) == [
        {"policy": "x", "qps": 5},
        {"policy": "x", "qps": 6},
        {"policy": "x", "qps": 5, "seed": 1},
    ]
    with pytest.raises(InputError, match="qps is given twice"):
        load(tmp_path, "cells:\n- &a {policy: x}\n- {<<: *a, qps: 6, qps: 7}")


def test_an_axis_of_a_hundred_thousand_points_is_looked_through_once():
    class Counted(int):
        compared = 0
        __hash__ = int.__hash__

        def __eq__(self, other):
            Counted.compared += 1
            return int(self) == int(other)

    assert len(Grid.of({"grid": {"seed": [Counted(i) for i in range(100_000)]}})) == 100_000
    assert Counted.compared < 100_000
    with pytest.raises(InputError, match="5.0 more than once"):
        Grid.of({"grid": {"qps": [5, 6, 5.0]}})
    with pytest.raises(InputError, match="more than once"):
        Grid.of({"grid": {"faults": [[], [{"kind": "outage"}], []]}})


@pytest.mark.parametrize(
    "settings",
    [
        {"qps": [5]},
        {"requests": [5]},
        {"arrivals": ["poisson"]},
        {"on_bad": ["drop"]},
        {"seed": {"a": 1}},
    ],
)
def test_a_list_where_one_value_belongs_is_told_to_go_under_grid(settings):
    (name,) = settings
    with pytest.raises(InputError, match=rf"{name}=.* should be one value; what varies goes under grid"):
        resolve(Cell({**BASE, **settings}), Sources())


def test_a_fault_of_no_kind_at_all_is_refused():
    with pytest.raises(InputError, match=r"kind=\['outage'\] is unknown"):
        options(faults=[{"kind": ["outage"]}])


def test_one_label_for_two_policies_is_refused_as_their_rows_would_look_alike():
    written = {"defaults": BASE | {"label": "mine"}, "grid": {"policy.k": [1, 2]}}
    written["defaults"]["policy"] = "astrolabe"
    sweep.check(written)  # the column policy.k tells them apart
    written = {"defaults": BASE | {"label": "mine"}, "grid": {"policy": ["random", "least_loaded"]}}
    del written["defaults"]["policy"]
    with pytest.raises(InputError, match="the label 'mine' stands for two runs.*random and least_loaded"):
        sweep.check(written)


def test_a_trace_with_fewer_requests_than_asked_for_is_told_once(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("prompt_tokens,output_tokens\n" + "5,6\n" * 8)
    written = {"defaults": BASE | {"trace": str(tmp_path / "t.csv")}, "grid": {"seed": [0, 1]}}
    assert sweep.run(written, workers=1)["n"].tolist() == [8, 8]
    assert capsys.readouterr().err.count("t.csv has 8 requests, fewer than the 40 asked for") == 1


# --- what the settings stand for --------------------------------------------------------------------------


def test_every_argument_of_simulate_can_be_set():
    import inspect

    given = {"trace", "policy", "engine", "cost", "predictor_cost", "control", "latency_noise"}  # dotted, or flat
    for name in set(inspect.signature(simulate).parameters) - given - set(keys.NOT_KEYS):
        assert name in keys.PLAIN or name in keys.others(), name
    for group in keys.GROUPS:
        assert keys.members(group)


def test_settings_change_the_preset_and_nothing_else():
    known = preset("llama2-7b-a30")
    found = options(**{"engine.max_num_seqs": 24, "cost.host_s": 0.001, "cost.decode.base_s": 0.02})
    assert found["engine"].max_num_seqs == 24
    assert found["engine"].num_gpu_blocks == known.engine["num_gpu_blocks"]
    assert found["cost"] == StepCost.parse("host_s=0.001,decode.base_s=0.02", base=known.cost)
    assert options(preset="none", cost="base_s=0.01")["cost"] == StepCost.parse("base_s=0.01")
    both = options(cost={"pad_sizes": [1, 8], "frontend_s": 0.001})["cost"]
    assert both.pad_sizes == (1, 8) and both.frontend_s == 0.001 and both.decode == known.cost.decode


def test_what_the_predictors_believe_starts_from_the_truth():
    found = options(**{"cost.host_s": 0.001, "predictor_cost.base_s": 0.5})
    assert found["predictor_cost"] == StepCost.parse("base_s=0.5", base=found["cost"])
    assert "predictor_cost" not in options()


def test_each_instance_can_have_a_preset_of_its_own(tmp_path):
    known = preset("llama2-7b-a30")
    slow = known.to_dict() | {"name": "slow", "cost": {"base_s": 0.1}}
    (tmp_path / "slow.json").write_text(json.dumps(slow))
    cell = Cell({**BASE, "preset": ["llama2-7b-a30", "slow.json"], "engine.max_num_seqs": 8})
    found = resolve(cell, Sources(tmp_path)).options  # beside the grid, as its traces
    assert found["cost"] == [known.cost, StepCost.parse("base_s=0.1")]
    assert [engine.max_num_seqs for engine in found["engine"]] == [8, 8]


def test_delays_noise_and_faults_are_those_of_the_simulator():
    assert options(delays="paper", status_interval_s=0.1)["control"] == ControlPlane(
        status_interval_s=0.1, tag_s=0.0048, predict_s=(0.062, 0.080)
    )
    assert options(predict_s=[0.1, 0.2])["control"].predict_s == (0.1, 0.2)
    assert options(latency_noise="common=0.3")["latency_noise"] == LatencyNoise(common=0.3)
    faults = [
        {"kind": "outage", "instance": 0, "start_s": 1, "on_stop": "redispatch"},
        {"kind": "slowdown", "instance": 1, "start_s": 1, "end_s": 2, "factor": 3},
    ]
    assert options(faults=faults)["faults"] == (Outage(0, 1, on_stop="redispatch"), Slowdown(1, 1, 2, 3))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "rondom"}, "'rondom' is unknown"),
        ({"policy": "random", "policy.k": 3}, "policy random: unknown option 'k'"),
        ({"trace": None}, "trace=None is no file"),
        ({"requests": 0}, "requests=0 should be a whole number"),
        ({"sample": "some"}, "sample='some' is unknown"),
        ({"sample": "permute"}, "sharegpt_like draws its own"),
        ({"filter.min_prompt_tokens": 3}, "sharegpt_like draws its own"),
        ({"delays": "long"}, "delays='long' is unknown"),
        ({"faults": {"kind": "outage"}}, "should be a list"),
        ({"faults": [{"kind": "storm"}]}, "kind='storm' is unknown"),
        ({"faults": [{"kind": "outage", "instnce": 1}]}, "outage has no 'instnce'.*Did you mean instance"),
        ({"faults": [{"kind": "outage"}]}, "missing 2 required"),
        ({"preset": "a100"}, "unknown preset 'a100'"),
        ({"cost.host_s": "much"}, "host_s='much' is not a number"),
        ({"engine.max_num_seqs": 0}, "max_num_seqs=0"),
        ({"engine.enable_prefix_caching": "maybe"}, "prefix"),
    ],
)
def test_a_setting_that_is_wrong_is_named_with_its_run(settings, message):
    with pytest.raises(InputError, match=message) as caught:
        resolve(Cell({**BASE, **settings}), Sources())
    assert " at 5 QPS, seed 0: " in str(caught.value) or "policy" in settings


def test_an_option_of_a_policy_varies_by_its_own_key_and_shows_in_the_label():
    written = {"defaults": BASE | {"policy": "astrolabe"}, "grid": {"policy.k": [1, 2]}}
    rows = sweep.run(written, workers=1, progress=False)
    assert rows.policy.tolist() == ["astrolabe:k=1", "astrolabe:k=2"]
    assert rows["policy.k"].tolist() == [1, 2]


def test_what_varies_has_a_column_before_what_was_measured():
    written = {"defaults": BASE, "grid": {"lengths": ["oracle", "noisy:0.5"], "faults": [[]], "alpha": [None]}}
    rows = sweep.run(written, workers=1, progress=False)
    assert list(rows.columns[:8]) == ["source", "policy", "qps", "seed", "lengths", "faults", "alpha", "n"]
    assert rows.lengths.tolist() == ["oracle", "noisy:0.5"] and set(rows.faults) == {"[]"}


def test_seeds_draw_their_own_order_of_a_trace_when_asked(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("prompt_tokens,output_tokens\n" + "".join(f"{10 + i},{20 + 7 * i % 90}\n" for i in range(50)))
    base = {"trace": path, "policy": "random", "instances": 1, "qps": 3}
    for sample, workloads in (("head", 1), ("permute", 2), ("resample", 2)):
        runs = [resolve(Cell({**base, "sample": sample, "seed": s}), sources := Sources()) for s in (0, 1)]
        from astrolabe_lab.sweep.sources import prepared

        drawn = [tuple(prepared(run.requests, sources.frames).prompt_tokens) for run in runs]
        assert len(set(drawn)) == workloads, sample
        if sample == "permute":
            assert sorted(drawn[0]) == sorted(drawn[1])


def test_the_estimate_counts_what_would_run():
    written = {"defaults": BASE, "grid": {"policy": ["random"], "qps": [3, 5, 7], "seed": [0, 1]}}
    found = sweep.estimate(written, workers=2)
    assert (found["runs"], found["requests"], found["seeds"], found["trials"]) == (6, 240, 2, 2)
    assert 0 < found["wall_s"] == found["computing_s"] / 2


def test_the_sections_are_those_that_the_example_of_the_module_uses():
    import yaml

    from astrolabe_lab.sweep import grid

    example = yaml.safe_load(grid.__doc__.partition("\n\n")[2].partition("\n\nAll")[0])
    assert tuple(example) == SECTIONS
    assert len(Grid.of(example | {"exclude": []})) == 3 * 17 * 3 * 2 * 2
