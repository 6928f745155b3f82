"""`astrolabe sweep`: what it prints, and its exit codes."""

import json

import pandas as pd
import pytest

from astrolabe_lab.cli import main

GRID = """
defaults: {trace: sharegpt_like, requests: 40, instances: 2}
grid: {policy: [random, least_loaded], qps: [4], seed: [0, 1]}
"""


@pytest.fixture
def grid(tmp_path):
    path = tmp_path / "grid.yaml"
    path.write_text(GRID)
    return path


def test_it_makes_the_runs_says_where_they_are_and_goes_on_the_next_time(grid, tmp_path, capsys):
    words = ["sweep", str(grid), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said.startswith("4 runs (0 made before) in ") and "summary.parquet" in said
    assert len(pd.read_parquet(tmp_path / "out" / "summary.parquet")) == 4
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["runs"] == {"all": 4, "made": 0, "made_before": 4, "failed": 0} and told["source"] == "simulated"


def test_it_shows_means_over_seeds_for_all_that_varies(grid, tmp_path, capsys):
    grid.write_text(GRID.replace("qps: [4]", 'qps: [4, 6], lengths: [oracle, "noisy:0.5"]'))
    assert main(["sweep", str(grid), "--out", str(tmp_path / "out"), "--workers", "1"]) == 0
    said = capsys.readouterr().out
    table = said[said.index("means over seeds") : said.index("wrote")].splitlines()
    assert len(table) == 2 + 2 * 2 * 2
    for word in ("policy", "qps", "lengths", "ttft_p99_s", "seeds", "regime"):
        assert word in table[1]
    assert "same requests" not in said


def test_it_says_when_seeds_share_their_requests(grid, tmp_path, capsys):
    rows = "".join(f"{i},100,20,{i / 4}\n" for i in range(40))
    (tmp_path / "t.csv").write_text("rid,prompt_tokens,output_tokens,arrived_s\n" + rows)
    grid.write_text(GRID.replace("sharegpt_like", "t.csv, arrivals: trace"))
    assert main(["sweep", str(grid), "--out", str(tmp_path / "out"), "--workers", "1"]) == 0
    assert "all seeds have the same requests at the same times" in capsys.readouterr().out


def test_a_dry_run_counts_and_estimates_and_writes_nothing(grid, tmp_path, capsys):
    assert main(["sweep", str(grid), "--dry-run", "--workers", "2"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("4 runs, 160 requests\nabout ") and "on 2 cores" in said
    assert [path.name for path in tmp_path.iterdir()] == ["grid.yaml"]


def test_the_keys_are_listed_with_what_they_mean(capsys):
    assert main(["sweep", "--keys", "--json"]) == 0
    keys = json.loads(capsys.readouterr().out)["keys"]
    assert {"qps", "policy.k", "engine.max_num_seqs", "cost.decode.base_s", "faults"} <= set(keys)
    assert main(["sweep", "--keys"]) == 0
    assert "requests a second" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the grid is missing"),
        (["GRID"], "--out is missing"),
        (["GRID", "--out", "OUT", "--workers", "0"], "workers=0 should be a whole number"),
        (["GRID", "--out", "OUT", "--retries", "-1"], "retries=-1 should be a whole number"),
        (["nowhere.yaml", "--out", "OUT"], "nowhere.yaml: cannot read this grid"),
        (["GRID", "--out", "OUT", "--keep", "all"], "invalid choice: 'all'"),
    ],
)
def test_wrong_use_exits_2_and_says_what_to_do(grid, tmp_path, capsys, words, message):
    places = {"GRID": str(grid), "OUT": str(tmp_path / "out")}
    assert main(["sweep", *(places.get(word, word) for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_the_grid_in_its_help_is_one_that_runs(tmp_path, capsys):
    from astrolabe_lab.cli.sweep import EXAMPLE_GRID
    from astrolabe_lab.sweep import Grid

    (tmp_path / "grid.yaml").write_text(EXAMPLE_GRID)
    assert len(Grid.load(tmp_path / "grid.yaml")) == 2 * 7 * 3
    with pytest.raises(SystemExit):
        main(["sweep", "--help"])
    assert "qps: {from: 20, to: 32, step: 2}" in capsys.readouterr().out
