"""Which pools a grid runs on: running ones that are its own, or such as a command starts; others are refused."""

import json
from dataclasses import replace

import pytest

from astrolabe_lab import InputError, sweep
from astrolabe_lab.cli import build_parser, main
from astrolabe_lab.cost import StepCost, preset
from astrolabe_lab.disagg import paper_world, studies
from astrolabe_lab.engines.cluster_file import write_cluster
from astrolabe_lab.serve.pools import studies as live
from astrolabe_lab.serve.pools.launch import PRESET, Handover
from astrolabe_lab.serve.pools.world import World, settings_of
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.sweep.plan import planned

WORLD = {"trace": "family:chat", "requests": 5, "pools": "1+2", "lengths": "noisy:0.3"}
SLOPE_S = 2e-4
CONFIG, COST = paper_world(SLOPE_S)
GRID = sweep.Grid.of(
    {
        "defaults": WORLD | {"qps": 40.0, "decode_slope_s": SLOPE_S},
        "grid": {
            "policy": ["round_robin", "marginal_cost"],
            "constants": ["calibrated", "paper-simulator"],
            "seed": [0],
        },
    }
)
TINY = f"""
defaults: {{trace: "family:chat", requests: 4, pools: 1+2, qps: 40, decode_slope_s: {SLOPE_S}}}
grid: {{policy: [round_robin], seed: [0]}}
"""
ONE = [[{"policy": "least_loaded", "qps": 1.0}]]
SMALLEST = {"trace": "family:chat", "requests": 4, "pools": "1+2", "qps": 40, "decode_slope_s": SLOPE_S}


def written(folder, config=CONFIG, cost=COST, roles="pdd", world="emulated", handover=None):
    """The folder of a cluster whose engines are nowhere."""
    names = {"p": "prefill", "d": "decode", "-": None}
    engines = [{"url": f"http://127.0.0.1:{i + 1}", "role": names[role], "status": ""} for i, role in enumerate(roles)]
    told = Handover().to_dict() if handover is None else handover
    write_cluster(folder, engines, config, cost, 1.0, "m", "", world, told)
    return folder


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"roles": "ppd"}, "pools 2+1 (grid: 1+2); astrolabe launch --pools 1+2 --engine"),
        ({"roles": "--"}, "has no pools"),
        ({"config": replace(CONFIG, max_num_seqs=7)}, "engine.max_num_seqs 7 (grid: 256)"),
        ({"cost": paper_world(4e-4)[1]}, "cost.decode.per_seq_s 0.0004 (grid: 0.0002)"),
        ({"handover": {}}, "hand_off (None, None, None) (grid: (0.04,"),
    ],
)
def test_pools_that_are_not_the_grids_are_refused_in_one_line(tmp_path, capsys, other, told):
    (tmp_path / "grid.yaml").write_text(TINY)
    written(tmp_path, **other)
    words = ["sweep", str(tmp_path / "grid.yaml"), "--cluster", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert told in said and len(said.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_what_live_runs_will_take_is_told_before_any_engine_starts(tmp_path, capsys):
    (tmp_path / "grid.yaml").write_text(TINY)
    told = {}
    for words in (["--emulate", "2"], ["--cluster", str(written(tmp_path))]):
        assert main(["sweep", str(tmp_path / "grid.yaml"), "--dry-run", "--json", *words]) == 0
        told[words[0]] = json.loads(capsys.readouterr().out)
        assert told[words[0]] | {"wall_s": 0} == {"runs": 2, "requests": 8, "pools": 1, "wall_s": 0}
    assert told["--emulate"]["wall_s"] > told["--cluster"]["wall_s"] > 60
    assert main(["sweep", str(tmp_path / "grid.yaml"), "--cluster", "there", "--emulate", "2"]) == 2
    assert "--cluster and --emulate" in capsys.readouterr().err
    assert main(["sweep", str(tmp_path / "grid.yaml"), "--redo-invalid", "--out", str(tmp_path / "out")]) == 2
    assert "--redo-invalid is of runs on live pools" in capsys.readouterr().err


def world_of(grid):
    first, *others = (World.of(run) for run in planned(grid)[0])
    assert not any(first.apart(other) for other in others)
    return first


def test_real_engines_have_steps_of_their_own_and_need_only_shape_and_flags(tmp_path):
    world_of(GRID).require(written(tmp_path, cost=None, world="hardware"))
    with pytest.raises(InputError, match="engine.max_num_seqs 7"):
        world_of(GRID).require(written(tmp_path, replace(CONFIG, max_num_seqs=7), None, world="hardware"))


KNOWN = preset(PRESET)


STEEP = StepCost.parse("decode.per_seq_s=3e-4", KNOWN.cost)


@pytest.mark.parametrize(
    ("config", "cost", "told"),
    [
        (CONFIG, COST, {"decode_slope_s": SLOPE_S}),
        (replace(CONFIG, max_num_seqs=64), COST, {"decode_slope_s": SLOPE_S, "engine.max_num_seqs": 64}),
        (
            CONFIG,
            StepCost.parse("base_s=0.01,decode.per_seq_s=2e-4"),
            {
                "decode_slope_s": SLOPE_S,
                "cost.decode.base_s": 0.01,
                "cost.mixed.base_s": 0.01,
                "cost.mixed.per_token_s": 0.0,
                "cost.mixed.per_seq_s": 0.0,
            },
        ),
        (EngineConfig.from_dict(KNOWN.engine), KNOWN.cost, {"preset": PRESET}),
        (EngineConfig.from_dict(KNOWN.engine), STEEP, {"preset": PRESET, "cost.decode.per_seq_s": 3e-4}),
    ],
)
def test_a_grid_with_the_settings_of_running_pools_is_theirs_and_its_command_starts_such(tmp_path, config, cost, told):
    settings = settings_of(written(tmp_path, config, cost))
    assert settings == {"pools": "1+2"} | told
    world = world_of(sweep.Grid(ONE, WORLD | settings))
    world.require(tmp_path)
    args = build_parser().parse_args(world.command().split()[1:])
    base = preset(args.preset or PRESET)
    assert args.pools == "1+2" and StepCost.parse(args.cost, base.cost) == cost
    assert EngineConfig.parse(args.engine, EngineConfig.from_dict(base.engine)) == config


def test_a_hand_off_of_its_own_is_told_and_started(tmp_path):
    slow = Handover().to_dict() | {"latency_s": 0.2}
    settings = settings_of(written(tmp_path, handover=slow))
    assert settings["hand_off.base_s"] == 0.2
    world = world_of(sweep.Grid(ONE, WORLD | settings))
    world.require(tmp_path)
    args = build_parser().parse_args(world.command().split()[1:])
    assert Handover.parse(args.hand_off).to_dict() == slow
    written(tmp_path, CONFIG, StepCost.parse("base_s=0.01,mixed_grid=1/64*0*0.1/0.2"))
    with pytest.raises(InputError, match=r"has cost\.\w+ of no preset"):
        settings_of(tmp_path)


@pytest.mark.parametrize(
    ("grid", "told"),
    [
        (studies.leak({4e-4: 14.0}, [0], 5), "no live router"),
        (sweep.Grid(ONE, WORLD | {"service": "serial"}), "keep vLLM's schedule"),
        (sweep.Grid(ONE, WORLD | {"hand_off.lease_s": 5.0}), "leave out lease_s"),
        (sweep.Grid(ONE, WORLD | {"poll_s": 0}), "poll_s=0 is of the simulator alone"),
        (sweep.Grid(ONE, {"trace": "family:chat", "requests": 5, "instances": 2}), "give pools"),
        (sweep.Grid([[point | {"label": label} for point in ONE[0] for label in "ab"]], WORLD), "is in the grid twice"),
        (sweep.Grid(ONE, WORLD | {"pools": "2000+2000"}), "4000 emulated engines need"),
    ],
)
def test_what_no_live_pools_can_do_is_refused_before_any_engine_starts(grid, told, monkeypatch, tmp_path):
    monkeypatch.setattr("astrolabe_lab.serve.pools.world.launch_pools", lambda *_, **__: pytest.fail("launched"))
    with pytest.raises(InputError, match=told):
        live.run(grid, live.Emulated(1.0), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_pools_that_do_not_run_are_named_with_what_starts_some(tmp_path):
    grid = sweep.Grid.of({"defaults": SMALLEST, "grid": {"policy": ["round_robin"], "seed": [0]}})
    (tmp_path / "pools").mkdir()
    folder = written(tmp_path / "pools")
    with pytest.raises(
        InputError, match=r"do not run \(nothing answers at http://127.*\): astrolabe launch --pools 1\+2"
    ):
        live.run(grid, folder, tmp_path / "out")
    assert live.estimate(grid, folder)["runs"] == 2
    with pytest.raises(InputError, match="4000 emulated engines need"):
        live.estimate(sweep.Grid(ONE, WORLD | {"pools": "2000+2000"}), live.Emulated(1.0))


@pytest.mark.parametrize(
    ("grid", "told"),
    [
        (studies.width({4e-4: 14.0}, [0], 5), "differ in pools, and pools that run"),
        (studies.bursty({4e-4: 14.0, 2e-4: 16.0}, [0], 5), "differ in cost.decode.base_s, cost.decode.per_seq_s"),
        (studies.kv_budget({4e-4: 14.0}, [0], 5), "differ in engine.max_model_len, engine.num_gpu_blocks"),
    ],
)
def test_a_grid_of_several_pools_is_refused_on_one_cluster(grid, told, tmp_path):
    with pytest.raises(InputError, match=told):
        live.run(grid, written(tmp_path), tmp_path / "out")
