"""Grids of pools on live engines: the same requests, the same columns, A/A beside, and goes on where it was ended."""

import asyncio
import contextlib
import json
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest
from test_pool_gates import ASKED, impatient  # noqa: F401
from test_pool_runs import cluster_of_scripted_pools
from test_pool_worlds import CONFIG, GRID, SLOPE_S, SMALLEST, TINY, WORLD, world_of, written

from astrolabe_lab import InputError, sweep
from astrolabe_lab.alone import alone
from astrolabe_lab.cli import main
from astrolabe_lab.disagg import saturation
from astrolabe_lab.generators import families
from astrolabe_lab.serve.pools import search
from astrolabe_lab.serve.pools import studies as live


class Pools:
    def __init__(self, folder):
        self.folder = folder


@pytest.mark.slow
def test_a_grid_runs_on_live_pools_with_the_requests_and_columns_of_the_simulator(tmp_path):
    folder, out, said = tmp_path / "pools", tmp_path / "out", []
    folder.mkdir()
    with cluster_of_scripted_pools(folder, config=CONFIG):
        found = live.run(GRID, Pools(folder), out, say=said.append)
        assert len(said) == 6 + len(ASKED) + 1 and sum(line.startswith("gate ") for line in said) == len(ASKED)
        assert "3 of 6 runs made, about " in said[3 + len(ASKED)]
        assert live.run(GRID, folder, out, say=said.append).equals(found)
    assert len(said) == 7 + len(ASKED) + 1 and said[-1] == f"6 of 6 runs are kept in {out}"
    names = ["round_robin", "round_robin (again)"]
    assert found["policy"].tolist() == [*names, *names, "marginal_cost", "marginal_cost"]
    assert found["constants"].tolist() == [
        *["calibrated"] * 2,
        *["paper-simulator"] * 2,
        "calibrated",
        "paper-simulator",
    ]
    simulated = sweep.run(GRID, workers=1, progress=False)
    assert set(simulated.columns) - set(found.columns) == {"wall_s"} and found["valid"].dtype == bool
    requests = families.generate("chat", 5, seed=0, text=False)
    for path in out.glob("*/*.parquet"):
        kept = pd.read_parquet(path)
        assert kept["prompt_tokens"].equals(requests["prompt_tokens"]) and "predicted_tokens" in kept
    assert len(set(found["workload"])) == 1  # so that runs can be paired
    assert (found["n"] == 5).all() and (found["ok"] == 5).all() and set(found["source"]) == {"hardware"}
    even = found[found["policy"] == "round_robin"]["spread_requests"]
    assert even.tolist() == pytest.approx([0.2, 0.2])  # three and two of five
    told = [path.read_text() for path in sorted(out.glob("qps40-seed0-*/constants.json"))]
    assert len(told) == 2 and told[0] != told[1]


def spoil(path, why):
    """Have the kept run of ``path`` not count."""
    frame = pd.read_parquet(path)
    validity = frame.attrs["astrolabe"]["validity"] | {"valid": False, "why": [why]}
    frame.attrs = {"astrolabe": frame.attrs["astrolabe"] | {"validity": validity}}
    frame.to_parquet(path)


@pytest.mark.slow
def test_the_command_runs_a_grid_on_running_pools_and_goes_on_where_it_was_ended(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("astrolabe_lab.serve.pools.runs.LAG_BOUND_S", 10.0)  # whatever else this machine does
    folder, out, grid = tmp_path / "pools", tmp_path / "out", tmp_path / "grid.yaml"
    folder.mkdir()
    grid.write_text(TINY)
    words = ["sweep", str(grid), "--cluster", str(folder), "--out", str(out)]
    with cluster_of_scripted_pools(folder, config=CONFIG):
        assert main(words) == 0
        said = capsys.readouterr()
        assert said.out.startswith("2 runs (0 made before) in ") and f"wrote {out}/summary.parquet" in said.out
        assert "gate greedy: ok" in said.err and "block 1 of 1, cell 2 of 2, qps40-seed0--" in said.err
        next(out.glob("qps40-seed0-*/qps40-seed0--round_robin.parquet")).unlink()
        assert main([*words, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["runs"] == {"all": 2, "made": 1, "made_before": 1} and told["source"] == "hardware"
        spoil(next(out.glob("qps40-seed0-*/qps40-seed0--round_robin.parquet")), "the host slept")
        assert main(words) == 0
        said = capsys.readouterr()
        assert "1 of them do not count (columns valid, why); --redo-invalid makes them again" in said.out
        assert "the host slept" in said.out and "2 of 2 runs are kept" in said.err
        assert main([*words, "--redo-invalid", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["runs"] == {"all": 2, "made": 1, "made_before": 1}
    assert not sweep.read(out)["why"].str.contains("slept").any()
    assert sweep.read(out)["policy"].tolist() == ["round_robin", "round_robin (again)"]
    assert main(["sweep", str(grid), "--out", str(out)]) == 2
    assert "holds the results of another run" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--workers", "2"], ["--on", "ray"], ["--keep", "requests"], ["--mix"]])
def test_what_is_of_simulated_runs_is_refused_on_running_pools(tmp_path, capsys, option):
    assert main(["sweep", "grid.yaml", "--cluster", str(tmp_path), "--out", "out", *option]) == 2
    assert f"{option[0]} is of simulated runs" in capsys.readouterr().err


def rushed(prefill, decode):
    """Prefill takes far too long for what it is asked within 90 ms of the request before."""
    for engine in prefill:
        answer, last = engine._answer, [0.0]

        async def late(http, body, answer=answer, last=last):
            now = asyncio.get_running_loop().time()
            gap_s, last[0] = now - last[0], now
            if gap_s < 0.09:
                await asyncio.sleep(0.6)
            return await answer(http, body)

        engine._answer = late


@pytest.mark.slow
def test_the_rate_of_mid_collapse_is_found_on_running_pools_and_the_search_goes_on(tmp_path):
    folder, said = tmp_path / "pools", []
    folder.mkdir()
    settings = WORLD | {"requests": 6, "arrivals": "constant", "decode_slope_s": SLOPE_S}
    given = {"seeds": [0], "start_qps": 8.0, "tolerance": 1.0, "rates": 5, "say": said.append}
    with cluster_of_scripted_pools(folder, rushed, CONFIG):
        anchor = search.find_rate(settings, folder, tmp_path / "out", **given)
        assert sum(line.startswith("gate ") for line in said) == len(ASKED)
        by_rate = anchor.probes.set_index("qps")["goodput_share"]
        above, below = by_rate[by_rate >= 0.8].index.max(), by_rate[by_rate < 0.8].index.min()
        assert below == 2 * above and anchor.qps in (above, below) and anchor.goodput == by_rate[anchor.qps]
        assert set(anchor.probes["policy"]) == {"round_robin"} and "valid" in anchor.probes
        said.clear()
        again = search.find_rate(settings, folder, tmp_path / "out", **given)
    assert again.qps == anchor.qps and again.probes.equals(anchor.probes)
    assert not any(line.startswith("gate ") for line in said)


def test_studies_of_running_pools_are_grids_that_run_there(tmp_path, capsys, monkeypatch):
    folder, out, asked = tmp_path / "pools", tmp_path / "out", {}
    folder.mkdir()
    written(folder)
    probes = pd.DataFrame({"valid": [True, False]})

    def find(settings, pools, kept, **options):
        asked.update(options, kept=kept, pools=settings["pools"], requests=settings["requests"])
        return saturation.Anchor(11.0, 0.79, 0.7, 0.88, 0.8, probes)

    monkeypatch.setattr(search, "find_rate", find)
    words = ["studies", "--cluster", str(folder), "--out", str(out), "--requests", "5", "--rates", "4"]
    assert main(words) == 0
    assert asked | {"seeds": [*asked["seeds"]]} == {
        "kept": out / "search", "pools": "1+2", "requests": 5, "rates": 4, "seeds": [0, 1],
    }  # fmt: skip
    said = capsys.readouterr().out
    assert "keeps 79.0% [70.0%, 88.0%] of its targets at 11 requests" in said and "in 1 router or load" in said
    for name in search.NAMES:
        grid = sweep.Grid.load(out / f"{name}.yaml")
        world_of(grid).require(folder)
        assert grid.defaults["pools"] == "1+2" and {cell.settings["seed"] for cell in grid.cells()} == {0, 1, 2}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rates", "4"], "--rates is of a search on running pools: give --cluster DIR too"),
        (["--start-qps", "4"], "--start-qps is of a search on running pools"),
        (["--cluster", "HERE", "--workers", "2"], "--workers is of simulated runs"),
        (["--cluster", "HERE", "--slopes", "0.0004"], "--slopes is of simulated pools"),
        (["--cluster", "HERE", "--policy", "random"], "--policy is of studies at simulated rates"),
        (["--slopes", "0.0004,none"], "argument --slopes: 'none' is not a number > 0"),
        (["--cluster", "HERE", "--studies", "width"], "no study of one set of pools is called width; there are bursty"),
    ],
)
def test_options_of_the_other_search_are_refused(tmp_path, capsys, words, told):
    given = [str(written(tmp_path)) if word == "HERE" else word for word in words]
    assert main(["studies", "--out", str(tmp_path / "out"), *given]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_a_grid_that_has_grown_makes_only_what_is_new(tmp_path):
    folder, out, said = tmp_path / "pools", tmp_path / "out", []
    folder.mkdir()

    def ran(**grid):
        axes = {"policy": ["round_robin"], "seed": [0]} | grid
        return live.run(sweep.Grid.of({"defaults": SMALLEST, "grid": axes}), folder, out, say=said.append)

    with cluster_of_scripted_pools(folder, config=CONFIG):
        first = ran()
        said.clear()
        policies = ["least_loaded", "round_robin"]  # another first one, whose luck is looked at too
        both = ran(policy=policies)
        assert sum("round_robin: kept" in line for line in said) == 1
        assert sorted(both["policy"]) == ["least_loaded", "least_loaded (again)", "round_robin"]
        old = both.set_index("policy").loc["round_robin", "e2e_mean_s"]
        assert old == first.set_index("policy").loc["round_robin", "e2e_mean_s"]
        assert ran().equals(first)
        lucks = ran(policy_seed=[1, 2])
    assert len(lucks) == 4 and set(lucks["policy_seed"]) == {1, 2} and (lucks["ok"] == 4).all()
    assert not set(lucks["e2e_mean_s"]) & set(first["e2e_mean_s"])
    seeds = [json.loads(line)["seed"] for path in out.glob("*/*.jsonl") for line in path.open() if '"pools"' in line]
    assert sorted(seeds) == [0, 0, 1, 1, 1, 2, 2, 3]  # the grid's own and, of A/A, the next


SEVERAL = sweep.Grid.of(
    {
        "defaults": {"trace": "family:chat", "requests": 4, "qps": 40.5, "decode_slope_s": SLOPE_S},
        "grid": {"pools": ["1+1", "1+2"], "lengths": ["oracle", "noisy:0.5"], "poll_s": [0.05, 1.0],
                 "policy": ["round_robin"], "seed": [0]},
    }
)  # fmt: skip


@pytest.mark.slow
def test_pools_are_started_one_after_the_other_as_the_runs_need_them(tmp_path, monkeypatch):
    out, said, started = tmp_path / "out", [], []

    @contextlib.contextmanager
    def launch(prefill, decode, *, folder, time_scale, engine, cost, handover, progress):
        started.append((prefill, decode, time_scale))
        folder.mkdir(parents=True, exist_ok=True)
        with cluster_of_scripted_pools(folder, config=engine, shape=(prefill, decode), world="emulated"):
            yield

    monkeypatch.setattr("astrolabe_lab.serve.pools.world.launch_pools", launch)
    found = live.run(SEVERAL, live.Emulated(1.0), out, say=said.append)
    assert sorted(started) == [(1, 1, 1.0), (1, 2, 1.0)]
    assert len(found) == 2 * len(SEVERAL) and (found["ok"] == 4).all()
    names = ["pools", "lengths", "poll_s", "policy"]
    assert set(names) <= set(found.columns) and (found.groupby(names).size() == 1).all()
    polls = [json.loads(line)["poll_s"] for path in out.glob("*/*.jsonl") for line in path.open() if '"pools"' in line]
    assert sorted(set(polls)) == [0.05, 1.0] and polls.count(1.0) == len(found) // 2
    counted = live.estimate(SEVERAL, live.Emulated(2.0))
    assert counted | {"wall_s": 0} == {"runs": 16, "requests": 64, "pools": 2, "wall_s": 0} and counted["wall_s"] > 0
    # All is kept: no engine starts, in no other time either; a run that is missing starts its own pools alone.
    assert live.run(SEVERAL, live.Emulated(1.0), out, say=said.append).equals(found) and len(started) == 2
    with pytest.raises(InputError, match=r"holds runs on emulated pools at time scale 1\.0: go on with those"):
        live.run(SEVERAL, live.Emulated(2.0), out)
    noted = (out / "run.json").read_text()
    (out / "run.json").unlink()
    with pytest.raises(InputError, match=r"was made on emulated pools at time scale 1\.0: name another folder"):
        live.run(SEVERAL, live.Emulated(2.0), out)
    for damage in ('{"live": 3}', '{"live": {"world": "emulated", "time_scale": "1"}}'):
        (out / "run.json").write_text(damage)
        with pytest.raises(InputError, match="holds"):
            live.run(SEVERAL, live.Emulated(1.0), out)
    (out / "run.json").write_text(noted)
    for path in out.glob("pools-*/cluster.json"):
        path.unlink()  # as a start that was broken off leaves it
    assert live.run(SEVERAL, live.Emulated(1.0), out, say=said.append).equals(found) and len(started) == 2
    next(out.glob("*/*.parquet")).unlink()
    monkeypatch.setattr("astrolabe_lab.serve.pools.world.launch_pools", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        live.run(SEVERAL, live.Emulated(1.0), out, say=said.append)
    assert len(sweep.read(out)) == len(found) - 1  # what is kept is in the summary, however a call ends
    monkeypatch.setattr("astrolabe_lab.serve.pools.world.launch_pools", launch)
    live.run(SEVERAL, live.Emulated(1.0), out, say=said.append)
    del started[2:]
    with pytest.raises(InputError, match="differ in pools"):
        live.run(SEVERAL, out / "pools", out)
    with alone(out / "run.json"), ThreadPoolExecutor(1) as other:
        second = other.submit(live.run, SEVERAL, live.Emulated(1.0), out)
        with pytest.raises(InputError, match=r"run\.json is in use by another run"):
            second.result()
    gone = found[(found["pools"] == "1+1")].index[0]
    next(path for path in out.glob("*/*.parquet") if len(pd.read_parquet(path)) and shape_of(path) == 2).unlink()
    assert live.run(SEVERAL, live.Emulated(1.0), out, say=said.append).loc[gone, "pools"] == "1+1"
    assert started[2:] == [(1, 1, 1.0)]


def shape_of(path):
    """How many engines the run of this frame had."""
    journal = path.with_suffix(".jsonl").read_text().splitlines()
    told = next(json.loads(line) for line in journal if '"pools"' in line)
    return len(told["prefill"]) + len(told["decode"])
