"""Probes go to every candidate, are predicted on each, and leave a journal that knows what all would have given."""

import asyncio

import numpy as np
import pandas as pd
import pytest
from scripted_engine import scripted_engines
from test_router import routed

from astrolabe_lab.cli import main
from astrolabe_lab.cost import StepCost
from astrolabe_lab.errors import InputError
from astrolabe_lab.predictor import Predictor
from astrolabe_lab.serve import check, probes
from astrolabe_lab.serve.replay import replay, summary
from astrolabe_lab.sim.config import EngineConfig

CONFIG, COST = EngineConfig(), StepCost.parse("base_s=0.02")


def trace_of(n):
    times = [0.02 * j for j in range(n)]
    tokens = {"prompt_tokens": 20, "output_tokens": 6, "predicted_tokens": 6}
    return pd.DataFrame({"rid": range(n), "arrived_s": times}).assign(**tokens)


def probed(path, n=6, slow=1, spoil=lambda engines: None):
    """Probes of three engines, of which ``slow`` takes ten times as long."""

    async def story():
        async with (
            scripted_engines(3, token_s=0.005) as engines,
            routed(
                engines, path, "round_robin", config=CONFIG, predictors=lambda: Predictor(CONFIG, COST)
            ) as (router, _, _),
        ):  # fmt: skip
            engines[slow].first_s = 0.6
            spoil(engines)
            router.warm_up()
            found = await probes.drive(router, trace_of(n))
            assert [len(i.ledger) for i in router.instances] == [0, 0, 0]
            return found, [[body["vllm_xargs"]["rid"] for body in engine.seen] for engine in engines]

    return asyncio.run(asyncio.wait_for(story(), 240))


def test_every_probe_reaches_every_engine_and_is_predicted_and_measured_there(tmp_path):
    found, seen = probed(tmp_path / "j")
    assert len(found) == 18 and (found["status"] == "ok").all()
    assert [sorted(rids) for rids in seen] == [sorted(set(found["rid"]))] * 3
    assert (found["predicted_e2e_s"] >= 6 * 0.02 - 1e-9).all()
    slow = found.groupby("instance")["e2e_s"].mean()
    assert slow.idxmax() == 1 and slow[1] > 0.6
    assert (found["ttft_s"] <= found["e2e_s"]).all()


def test_the_order_of_candidates_is_judged_by_what_was_measured(tmp_path):
    found, _ = probed(tmp_path / "j")
    ranks = probes.rank_one(found)
    assert len(ranks) == 6 and (ranks["measured_best"] != 1).all()
    assert (ranks["hit"] == (ranks["predicted_best"] == ranks["measured_best"])).all()
    assert ((ranks["regret_s"] > 0) == ~ranks["hit"]).all() and (ranks["spread_s"] >= ranks["regret_s"]).all()
    perfect = found.assign(predicted_e2e_s=found["e2e_s"] * 3.0)  # all wrong by the same factor
    told = probes.recognised({"perfect": perfect, "as it was": found, "alone": found[found["instance"] == 0]})
    assert told.loc["perfect", "recognised_pct"] == 100.0 and "alone" not in told.index
    assert told.loc["as it was", "by_chance_pct"] == pytest.approx(100 / 3)


def test_a_replay_of_probes_knows_the_measured_regret_of_any_policy(tmp_path):
    found, _ = probed(tmp_path / "j")
    for policy in ("random", "least_loaded", "astrolabe:k=2"):
        frame = replay(tmp_path / "j", policy, seed=1).set_index("rid")
        assert len(frame) == 6 and frame["measured_regret_s"].notna().all()
        best = found.groupby("rid")["e2e_s"].min()
        chosen = found.set_index(["rid", "instance"])["e2e_s"]
        for rid, row in frame.iterrows():
            assert row["measured_regret_s"] == pytest.approx(chosen[rid, row["instance"]] - best[rid])


def test_few_probes_say_how_little_they_say():
    hits = [True] * 6 + [False] * 4
    rows = [
        {"rid": rid, "arrived_s": rid, "instance": i, "in_system": 0, "status": "ok", "e2e_s": 1.0 + i,
         "predicted_e2e_s": 1.0 + (i if hit else -i)}
        for rid, hit in enumerate(hits) for i in range(2)
    ]  # fmt: skip
    told = probes.recognised({"few": pd.DataFrame(rows)}).loc["few"]
    assert told["recognised_pct"] == 60.0
    # Wilson's score interval of 6 in 10: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), z = 1.96
    assert (told["recognised_low_pct"], told["recognised_high_pct"]) == pytest.approx((31.3, 83.2), abs=0.1)


def test_the_router_chose_nothing_where_it_probed(tmp_path, capsys):
    probed(tmp_path / "j")
    frame = replay(tmp_path / "j", "least_loaded")
    assert frame["recorded_instance"].isna().all() and frame["recorded_regret_s"].isna().all()
    told = summary(frame)
    assert told["probes"] == told["decisions"] == 6 and told["best_share"] >= 0
    assert np.isnan(told["agreement"]) and np.isnan(told["recorded_best_share"])
    assert main(["replay", str(tmp_path / "j"), "--policy", "least_loaded"]) == 0
    text = capsys.readouterr().out
    assert "6 of them are probes" in text and "router's own" not in text and "nan" not in text


def test_an_engine_that_fails_its_probe_spoils_that_probe_only(tmp_path):
    def spoil(engines):
        engines[2].script = "break"

    found, _ = probed(tmp_path / "j", spoil=spoil)
    assert set(found.loc[found["status"] == "failed", "instance"]) == {2}
    assert probes.rank_one(found).empty and probes.recognised({"x": found}).empty
    assert (check.errors(found, by=["instance"])["instance"]).tolist() == [0, 1]


def test_probes_without_lengths_are_refused(tmp_path):
    with pytest.raises(InputError, match="predicted_tokens"):
        asyncio.run(probes.drive(None, trace_of(2).drop(columns="predicted_tokens")))


def test_errors_are_in_percent_of_what_was_measured():
    found = pd.DataFrame({
        "status": ["ok", "ok", "failed"], "predicted_e2e_s": [1.1, 1.6, 9.0], "e2e_s": [1.0, 2.0, 1.0],
        "predicted_ttft_s": [0.1, 0.3, 9.0], "ttft_s": [0.2, 0.2, 1.0],
    })  # fmt: skip
    (row,) = check.errors(found).to_dict("records")
    assert row["probes"] == 2
    assert row["e2e_mae_pct"] == pytest.approx(15.0) and row["e2e_signed_pct"] == pytest.approx(-5.0)
    assert row["ttft_mae_s"] == pytest.approx(0.1) and row["ttft_signed_s"] == pytest.approx(0.0)
