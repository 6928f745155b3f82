"""Grids of pools on live engines: the same requests, the same columns, A/A beside, and goes on where it was ended."""

import pandas as pd
import pytest
from test_pool_runs import cluster_of_scripted_pools, impatient  # noqa: F401

from astrolabe_lab import InputError, sweep
from astrolabe_lab.disagg import studies
from astrolabe_lab.generators import families
from astrolabe_lab.serve.pools import studies as live

WORLD = {"trace": "family:chat", "requests": 5, "pools": "1+2", "lengths": "noisy:0.3"}
GRID = sweep.Grid.of(
    {
        "defaults": WORLD | {"qps": 40.0, "decode_slope_s": 2e-4},
        "grid": {
            "policy": ["round_robin", "marginal_cost"],
            "constants": ["calibrated", "paper-simulator"],
            "seed": [0],
        },
    }
)
ONE = [[{"policy": "least_loaded", "qps": 1.0}]]


class Pools:
    def __init__(self, folder):
        self.folder = folder


@pytest.mark.slow
def test_a_grid_runs_on_live_pools_with_the_requests_and_columns_of_the_simulator(tmp_path):
    folder, out, said = tmp_path / "pools", tmp_path / "out", []
    folder.mkdir()
    with cluster_of_scripted_pools(folder):
        found = live.run(GRID, Pools(folder), out, say=said.append)
        assert live.run(GRID, Pools(folder), out, say=said.append).equals(found)
    assert len(said) == 2 * 6 and all(line.endswith(": kept") for line in said[6:])
    assert found["policy"].value_counts().to_dict() == {
        "round_robin": 2, "marginal_cost": 2, "round_robin (again)": 2,
    }  # fmt: skip
    simulated = sweep.run(GRID, workers=1, progress=False)
    assert set(simulated.columns) - set(found.columns) == {"wall_s"} and found["valid"].dtype == bool
    requests = families.generate("chat", 5, seed=0, text=False)
    for path in out.rglob("*.parquet"):
        kept = pd.read_parquet(path)
        assert kept["prompt_tokens"].equals(requests["prompt_tokens"]) and "predicted_tokens" in kept
    assert len(set(found["workload"])) == 1  # so that runs can be paired
    assert (found["n"] == 5).all() and (found["ok"] == 5).all() and set(found["source"]) == {"hardware"}
    even = found[found["policy"] == "round_robin"]["spread_requests"]
    assert even.tolist() == pytest.approx([0.2, 0.2])  # three and two of five
    told = [path.read_text() for path in sorted(out.glob("*.json"))]
    assert len(told) == 2 and told[0] != told[1]


@pytest.mark.parametrize(
    ("grid", "told"),
    [
        (studies.width({4e-4: 14.0}, [0], 5), "differ in pools"),
        (studies.bursty({4e-4: 14.0, 2e-4: 16.0}, [0], 5), "differ in cost"),
        (studies.length_error({4e-4: 14.0}, [0], 5), "differ in lengths"),
        (studies.leak({4e-4: 14.0}, [0], 5), "differ in signals"),
        (sweep.Grid(ONE, WORLD | {"signals": "leaked"}), "no live router"),
        (sweep.Grid(ONE, WORLD | {"service": "serial"}), "keep vLLM's schedule"),
        (sweep.Grid(ONE, {"trace": "family:chat", "requests": 5, "instances": 2}), "give pools"),
    ],
)
def test_what_cannot_be_run_on_one_set_of_live_pools_is_refused_before_any_engine_starts(grid, told, monkeypatch):
    monkeypatch.setattr("astrolabe_lab.serve.pools.launch.launch_pools", lambda *_, **__: pytest.fail("launched"))
    with pytest.raises(InputError, match=told):
        live.launch_for(grid, 1.0)


def test_pools_are_launched_as_the_grid_has_them(monkeypatch):
    given = {}

    def launch(prefill, decode, **options):
        given.update(options, shape=(prefill, decode))

    monkeypatch.setattr("astrolabe_lab.serve.pools.launch.launch_pools", launch)
    live.launch_for(GRID, 6.0, folder="here")
    assert given["shape"] == (1, 2) and given["time_scale"] == 6.0 and given["folder"] == "here"
    assert given["cost"].decode.per_seq_s == pytest.approx(2e-4)
    assert given["engine"].usable_blocks * given["engine"].block_size == 60_000
    assert given["handover"].transfer.latency_s == 0.040
