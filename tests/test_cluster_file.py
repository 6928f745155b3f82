"""A cluster's file that was damaged or changed by hand: every reader refuses it in one line."""

import json

import pytest
from clusters import COST

from astrolabe_lab import InputError
from astrolabe_lab.cli import main
from astrolabe_lab.engines.cluster_file import read_cluster, write_cluster
from astrolabe_lab.serve.pools.launch import Handover
from astrolabe_lab.sim.config import EngineConfig

ENGINES = [
    {"url": f"http://127.0.0.1:{port}", "role": role, "status": ""} for port, role in ((8, "prefill"), (9, "decode"))
]


@pytest.fixture
def raw(tmp_path):
    write_cluster(tmp_path, ENGINES, EngineConfig(), COST, 1.0, "m", "", "emulated", Handover().to_dict())
    return json.loads((tmp_path / "cluster.json").read_text())


def engines(**changes):
    return [ENGINES[0], ENGINES[1] | changes]


WRONG = [
    *(("engines", bad) for bad in ([], {}, 5, None, [5], [{}], [None], engines(url=5), engines(status=None))),
    *(("engines", engines(url=bad)) for bad in ("", "ftp://a", "http://127.0.0.1:8/")),
    *(("engines", engines(role=bad)) for bad in ("zzz", None, "prefill", [1])),
    *(("time_scale", bad) for bad in (0, -1, float("nan"), float("inf"), "x", None, True, 10**400)),
    *((name, bad) for name in ("model", "tokenizer", "world") for bad in (None, 5)),
    *(("handover", bad) for bad in (5, [], {"latency_s": 1}, Handover().to_dict() | {"expiry_s": "x"})),
    *(("cost", bad) for bad in (5, {"zzz": 1})),
    *(("engine", bad) for bad in (5, {"zzz": 1}, {"max_num_seqs": 0})),
    ("version", 2),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_what_no_cluster_tells_is_refused_by_its_name(raw, tmp_path, name, value):
    read_cluster(tmp_path)
    (tmp_path / "cluster.json").write_text(json.dumps(raw | {name: value}))
    with pytest.raises(InputError, match=f"^cluster '{tmp_path}': .*"):
        read_cluster(tmp_path)


def test_every_command_refuses_it_in_one_line(raw, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.json").write_text(json.dumps(raw | {"engines": [5]}))
    (tmp_path / "g.yaml").write_text(
        "defaults: {trace: sharegpt_like, requests: 20, pools: 1+1, constants: paper}\n"
        "grid: {policy: [least_loaded], qps: [2], seed: [0]}\n"
    )
    drive = ["--trace", "sharegpt_like", "--requests", "3", "--qps", "3", "--lengths", "oracle", "--out", "b.csv"]
    for words in (
        ["route"], ["sidecar", "--instance", "0"], ["calibrate", "--out", "c.json"], ["sweep", "g.yaml", "--out", "s"],
        ["studies", "--studies", "bursty", "--out", "s"], ["bench", "--url", "http://127.0.0.1:1", *drive],
    ):  # fmt: skip
        assert main([*words, "--cluster", str(tmp_path)]) == 2
        assert "cluster.json is damaged: engine 0 is 5, no object" in capsys.readouterr().err
