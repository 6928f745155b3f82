"""The simulated prefill and decode pools: conservation, an independent model, and what the hand-off costs."""

import json
from dataclasses import replace

import numpy as np
import pytest
from pools_peer import Peer

import astrolabe_lab as lab
from astrolabe_lab.arrivals import with_arrivals
from astrolabe_lab.cost import StepCost
from astrolabe_lab.disagg.constants import PAPER
from astrolabe_lab.disagg.settings import parse_pools
from astrolabe_lab.disagg.simulate import paper_world, simulate_pools
from astrolabe_lab.disagg.state import HandOff
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import families
from astrolabe_lab.sim.config import EngineConfig

TIGHT_MEMORY = EngineConfig(max_num_seqs=8, max_num_batched_tokens=256, num_gpu_blocks=121, max_model_len=1500)
COST = StepCost.parse(
    "decode.base_s=0.012,decode.per_seq_s=2e-4,decode.per_kv_token_s=1e-7,mixed.base_s=0.015,mixed.per_token_s=7e-5,"
    "mixed.attention_s=1e-9"
)


def requests(n, qps, seed=0, family="mixed", most=600):
    frame = families.generate(family, n, seed=seed, text=False)
    for name in ("prompt_tokens", "output_tokens"):
        frame[name] = frame[name].clip(upper=most)
    frame = lab.length.attach(frame, "noisy:0.5", seed)
    return with_arrivals(frame, qps, "poisson", seed)


class Spread:
    """Pairs drawn at random: every prefill hands over to every decode."""

    def choose(self, request, cluster, rng):
        return int(rng.random() * len(cluster.prefill)), int(rng.random() * len(cluster.decode))


@pytest.mark.parametrize("polls", ["launch", "end"])
@pytest.mark.parametrize(
    ("pools", "engine", "qps", "per_block_s"),
    [
        ("2+4", None, 30, 6e-5),
        ("1+2", TIGHT_MEMORY, 6, 2e-3),
        ("2+1", TIGHT_MEMORY, 4, 5e-3),
        ("1+3", EngineConfig(max_num_seqs=3, max_num_batched_tokens=64, num_gpu_blocks=81, max_model_len=1200), 5, 0.0),
    ],
)
def test_pools_equal_a_plain_python_model(pools, engine, qps, per_block_s, polls):
    trace = requests(400, qps)
    hand_off = HandOff(base_s=0.013, per_block_s=per_block_s, proxy_s=0.002, polls=polls)
    engine = engine or paper_world()[0]
    found = simulate_pools(trace, Spread(), pools=pools, engine=engine, cost=COST, hand_off=hand_off)
    assert (found["status"] == "ok").all()
    columns = ("rid", "arrived_s", "prompt_tokens", "output_tokens", "prefill_instance", "decode_instance")
    peer = Peer(parse_pools(pools), (engine, engine), (COST, COST), hand_off)
    peer.run(found[list(columns)].itertuples(index=False))
    jobs = [peer.way[rid] for rid in found["rid"]]
    assert found["preemptions"].tolist() == [p.preemptions + d.preemptions for _, _, p, d in jobs]
    for column, values in {
        "prefill_finished_s": [p.end_s for _, _, p, _ in jobs],
        "transfer_started_s": [peer.log[d.rid]["pull_s"] for *_, d in jobs],
        "transfer_finished_s": [peer.log[d.rid]["landed_s"] for *_, d in jobs],
        "first_token_s": [d.first_s for *_, d in jobs],
        "finished_s": [d.end_s for *_, d in jobs],
    }.items():
        np.testing.assert_allclose(found[column], values, rtol=0, atol=1e-9, err_msg=column)
    assert all(engine.free == engine.config.num_gpu_blocks - 1 for engine in (*peer.prefill, *peer.decode))


def test_the_comparison_above_meets_preemptions_and_full_pools():
    trace = requests(400, 4)
    found = simulate_pools(trace, Spread(), pools="2+1", engine=TIGHT_MEMORY, cost=COST)
    assert found["preemptions"].sum() > 20
    waited_s = found["transfer_started_s"] - found["prefill_finished_s"]
    assert (waited_s > 1.0).sum() > 50


@pytest.mark.parametrize("service", ["exact", "batching", "serial"])
@pytest.mark.parametrize("signals", ["own", "leaked"])
def test_every_request_has_one_row_and_its_exact_tokens(service, signals):
    trace = requests(300, 12)
    found = simulate_pools(trace, "marginal_cost", service=service, signals=signals)
    assert found["rid"].tolist() == trace["rid"].tolist()
    assert (found["status"] == "ok").all()
    assert (found["generated_tokens"] == found["output_tokens"]).all()
    order = [
        "arrived_s",
        "prefill_finished_s",
        "transfer_started_s",
        "transfer_finished_s",
        "first_token_s",
        "finished_s",
    ]
    times = found[order].to_numpy()
    assert (np.diff(times, axis=1) >= 0).all()


def test_all_blocks_come_back_on_both_sides():
    from astrolabe_lab.disagg import kernel
    from astrolabe_lab.disagg.state import new_pools

    trace = requests(300, 20)
    pools = new_pools(trace, ([TIGHT_MEMORY] * 2, [COST] * 2), ([TIGHT_MEMORY] * 2, [COST] * 2), HandOff())
    for r, at_s in enumerate(trace["arrived_s"]):
        kernel.run(pools, at_s)
        kernel.send(pools, r, r % 2, r // 2 % 2, at_s)
        for state in (pools.prefill, pools.decode):
            assert (state.engines["free_blocks"] >= 0).all()
    kernel.run(pools, np.inf)
    for state in (pools.prefill, pools.decode):
        assert (state.engines["free_blocks"] == TIGHT_MEMORY.usable_blocks).all()
        assert (state.requests["blocks"] == 0).all()
    assert not pools.pulled.any() and not pools.way["held"].any()
    assert (pools.holding[:, 2] == 0).all() and pools.header["n_pulls"][0] == 0


def test_one_request_alone_takes_prefill_hand_off_and_its_steps():
    trace = requests(1, 1.0)
    n, o = int(trace["prompt_tokens"][0]), int(trace["output_tokens"][0])
    found = simulate_pools(trace, "round_robin").iloc[0]
    assert found["ttft_s"] == pytest.approx(PAPER.tau_pre_s(n) + PAPER.transfer_s(n) + PAPER.tau_dec_s(), abs=1e-9)
    assert found["tpot_s"] == pytest.approx(PAPER.tau_dec_s(), abs=1e-12)
    assert found["generated_tokens"] == o


def test_pulls_that_leave_one_prefill_at_once_share_its_bandwidth():
    trace = requests(2, 1.0)
    trace["prompt_tokens"], trace["arrived_s"] = 160, 0.0
    hand_off = HandOff(base_s=0.0, per_block_s=0.01)

    class Apart:
        def choose(self, request, cluster, rng):
            return 0, request.rid

    class Alone:
        def choose(self, request, cluster, rng):
            return request.rid, request.rid

    took = {}
    for name, policy in (("apart", Apart()), ("alone", Alone())):
        found = simulate_pools(trace, policy, pools="2+2", hand_off=hand_off)
        took[name] = (found["transfer_finished_s"] - found["transfer_started_s"]).to_numpy()
    np.testing.assert_allclose(took["alone"], 0.1, atol=1e-9)
    np.testing.assert_allclose(took["apart"], 0.2, atol=1e-9)


def starved(**hand_off):
    """Requests of which many wait long at decode, with their blocks held at prefill."""
    trace = requests(120, 6)
    return trace, simulate_pools(
        trace, "round_robin", pools="1+1", engine=TIGHT_MEMORY, cost=COST, hand_off=HandOff(**hand_off)
    )


def test_blocks_expire_only_without_heartbeats():
    assert not starved(lease_s=0.5, heartbeat=True)[1]["transfer_failed"].any()
    trace, found = starved(lease_s=0.5, heartbeat=False)
    assert found["transfer_failed"].sum() > 10
    assert (found["status"] == "ok").all()
    assert (found["generated_tokens"] == trace["output_tokens"]).all()


def test_what_cannot_be_pulled_fails_where_decode_is_told_so():
    _, found = starved(lease_s=0.5, heartbeat=False, on_failure="fail")
    failed = found["transfer_failed"]
    assert failed.sum() > 10
    assert (found.loc[failed, "status"] == "failed").all() and (found.loc[~failed, "status"] == "ok").all()


def test_requests_that_can_never_run_are_rejected_at_arrival():
    trace = requests(50, 10)
    trace.loc[7, "output_tokens"] = 5000
    found = simulate_pools(trace, "least_loaded", engine=TIGHT_MEMORY, cost=COST)
    assert found["status"].tolist() == ["ok"] * 7 + ["rejected"] + ["ok"] * 42
    assert found.loc[7, "finished_s"] == found.loc[7, "arrived_s"] and found.loc[7, "prefill_instance"] == -1


def test_a_run_is_the_same_again_and_a_policy_keeps_nothing():
    trace = requests(200, 20)
    policy = lab.disagg.routers.parse("length_threshold")
    first, second = (simulate_pools(trace, policy) for _ in range(2))
    assert first.equals(second)


def test_a_policy_sees_ledger_and_polls_and_no_true_length():
    trace = requests(300, 30)
    seen = []

    class Watching:
        def choose(self, request, cluster, rng):
            seen.append((cluster.now_s, cluster.in_flight.copy(), cluster.prefill.copy(), cluster.decode.copy()))
            with pytest.raises(ValueError, match="read-only"):
                cluster.in_flight["predicted_tokens"] = 0
            return len(seen) % 2, len(seen) % 4

    found = simulate_pools(trace, Watching())
    predicted = trace["predicted_tokens"].to_numpy()
    assert (predicted != trace["output_tokens"]).mean() > 0.9
    for now_s, flying, _, decode in seen:
        rows = found.loc[flying["rid"]]
        assert (flying["predicted_tokens"] == predicted[flying["rid"]]).all()
        assert (rows["finished_s"] >= now_s).all()
        np.testing.assert_array_equal(np.isnan(flying["first_token_s"]), (rows["first_token_s"] > now_s).to_numpy())
        np.testing.assert_array_equal(np.isnan(flying["prefilled_s"]), (rows["prefill_finished_s"] > now_s).to_numpy())
        assert (decode["taken_s"] <= now_s).all() and (decode["taken_s"] > now_s - 0.05 - 1e-9).all()
    alive = [set(flying["rid"]) for _, flying, _, _ in seen]
    for (now_s, *_), rids in zip(seen, alive, strict=True):
        sent = found["arrived_s"] < now_s
        assert rids == set(found.index[sent & (found["finished_s"] > now_s)])


def test_leaked_signals_differ_from_own_ones_only_in_lengths():
    trace = requests(200, 20)
    shown = {}

    class Watching:
        def choose(self, request, cluster, rng):
            shown.setdefault(request.rid, []).append(cluster.in_flight.copy())
            return request.rid % 2, request.rid % 4

    for signals in ("own", "leaked"):
        simulate_pools(trace, Watching(), signals=signals)
    for own, leaked in shown.values():
        for name in own.dtype.names:
            if name != "predicted_tokens":
                np.testing.assert_array_equal(own[name], leaked[name])
        true = trace["output_tokens"].to_numpy()
        assert (leaked["predicted_tokens"] == true[leaked["rid"]]).all()


def test_with_the_leak_wrong_constants_do_not_change_how_much_work_is_left():
    trace, wrong = requests(300, 26), PAPER.with_(decode_step_s=0.0018)
    for signals, same in (("leaked", True), ("own", False)):
        estimated, streamed = (
            simulate_pools(trace, f"marginal_cost:progress={progress}", constants=wrong, signals=signals)
            for progress in ("estimated", "streamed")
        )
        columns = ["prefill_instance", "decode_instance", "e2e_s"]
        assert estimated[columns].equals(streamed[columns]) is same


@pytest.mark.parametrize("pools", ["2", "2+", "+4", "0+4", "2+x", "2+4+1", (1, 2, 3), (True, 2), 4])
def test_wrong_pools_are_named(pools):
    with pytest.raises(InputError, match="pools="):
        parse_pools(pools)


def test_settings_that_pools_do_not_model_are_refused():
    trace = requests(5, 1)
    for flag in ({"enable_prefix_caching": True}, {"scheduler": "v0_chunked"}, {"async_scheduling": True}):
        engine = EngineConfig(**flag)
        with pytest.raises(InputError, match="pools run scheduler=v1 without"):
            simulate_pools(trace, "round_robin", engine=engine)
    with pytest.raises(InputError, match="predicted"):
        simulate_pools(trace.drop(columns="predicted_tokens"), "marginal_cost")
    with pytest.raises(InputError, match="service"):
        simulate_pools(trace, "round_robin", service="ideal")


def test_a_grid_runs_pools_with_constants_that_follow_its_slope():
    grid = {
        "defaults": {"trace": "family:mixed", "requests": 60, "pools": "1+2", "qps": 12},
        "grid": {"decode_slope_s": [5.5e-5, 4e-4], "policy": ["round_robin", "marginal_cost"], "seed": [0]},
    }
    rows = lab.sweep.run(grid, workers=1, progress=False)
    assert rows["decode_slope_s"].tolist() == [5.5e-5, 5.5e-5, 4e-4, 4e-4]
    assert {"goodput_share", "goodput_share_tight", "spread_requests", "spread_tokens"} <= {*rows}
    trace = with_arrivals(lab.length.attach(families.generate("mixed", 60, text=False), "oracle"), 12, "bursts", 0)
    engine, cost = paper_world(4e-4)
    alone = simulate_pools(trace, "marginal_cost", pools="1+2", engine=engine, cost=cost)
    assert rows["ttft_mean_s"].iloc[-1] == pytest.approx(alone["ttft_s"].mean(), abs=1e-12)
    assert lab.disagg.calibrated(engine, cost).decode_slope_s == pytest.approx(4e-4)
    assert lab.disagg.calibrated(*paper_world()).tpot_s == PAPER.tpot_s


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"instances": 3, "pools": "1+2"}, "instances is not modelled for pools"),
        ({"service": "serial"}, "service goes with pools"),
        ({"hand_off.base_s": 0.1}, "hand_off.base_s goes with pools"),
        ({"pools": "1+2", "policy": "marginal_costs"}, "Did you mean marginal_cost"),
        ({"pools": "1+2", "constants.tau": 1}, "unknown key 'constants.tau'"),
        ({"pools": "1+2", "preset": "llama2-7b-a30", "decode_slope_s": 1e-4}, "leave out preset"),
    ],
)
def test_grids_name_what_pools_do_not_take(setting, told):
    base = {"trace": "family:mixed", "requests": 5, "qps": 5, "policy": "round_robin", "seed": 0}
    with pytest.raises(InputError, match=told):
        lab.sweep.check({"defaults": base | setting})


def test_goodput_is_measured_by_what_is_true_of_the_pools_whatever_the_router_believes():
    told = [{}, {"constants.ttft_s": 0.01, "constants.tpot_s": 0.001}, {"constants": {**PAPER.to_dict(), "ttft_s": 99}}]
    grid = {"trace": "family:mixed", "requests": 150, "qps": 20, "policy": "round_robin", "pools": "2+4"}
    found = lab.sweep.run(lab.sweep.Grid([told], grid), workers=1, progress=False)["goodput_share"]
    assert 0 < found[0] < 1 and found.nunique() == 1  # round robin believes nothing
    promised = lab.sweep.run({"defaults": grid | {"slo": "ttft_s=99,tpot_s=99"}}, workers=1, progress=False)
    assert promised["goodput_share"][0] == 1


def test_goodput_on_the_command_line_is_measured_by_what_is_true_too(tmp_path, capsys):
    from astrolabe_lab.cli import main

    path = tmp_path / "c.json"
    path.write_text(json.dumps(PAPER.with_(ttft_s=99.0, tpot_s=99.0).to_dict()))
    command = ["simulate", "--trace", "family:mixed", "--requests", "150", "--qps", "20", "--pools", "2+4", "--policy",
               "round_robin", "--out", str(tmp_path / "r.parquet"), "--json"]  # fmt: skip
    shares = []
    for told in ("calibrated", str(path)):
        assert main([*command, "--constants", told]) == 0
        shares.append(json.loads(capsys.readouterr().out)["goodput_share"])
    assert shares[0] == shares[1] < 1


@pytest.mark.parametrize("service", ["batching", "serial"])
def test_a_router_of_simplified_engines_knows_their_memory_without_end(service):
    known = []

    class Watching:
        def choose(self, request, cluster, rng):
            known.append(cluster.constants)
            return 0, 0

    simulate_pools(requests(2, 1.0), Watching(), service=service)
    assert known[0].kv_capacity_tokens > 10_000_000
    assert known[0] == lab.disagg.calibrated(*paper_world(), service=service)
    assert (known[0].ttft_s, known[0].tpot_s) == (PAPER.ttft_s, PAPER.tpot_s)


@pytest.mark.parametrize("qps", [0.005, 20])
def test_nothing_moves_to_decode_before_prefill_has_answered(qps):
    engine, cost = paper_world()
    late = replace(cost, frontend_s=0.03)
    trace = requests(60, qps)
    plain, found = (simulate_pools(trace, "round_robin", cost=each) for each in (cost, late))
    assert (found["transfer_started_s"] >= found["prefill_finished_s"]).all()
    if qps < 1:  # then requests have the pools for themselves
        np.testing.assert_allclose(found["ttft_s"], plain["ttft_s"] + 2 * 0.03, atol=1e-9)
        known = lab.disagg.calibrated(engine, late)
        n = trace["prompt_tokens"].to_numpy()
        expected = known.tau_pre_s(n) + known.transfer_s(n) + known.tau_dec_s()
        np.testing.assert_allclose(found["ttft_s"], expected, atol=1e-9)


def test_calibrated_constants_say_what_one_request_sees():
    cost = StepCost.parse("decode.base_s=0.01,decode.per_seq_s=3e-4,mixed.base_s=0.02,mixed.per_token_s=5e-5")
    hand_off = HandOff(base_s=0.02, per_block_s=1e-4, proxy_s=0.003)
    constants = lab.disagg.calibrated(EngineConfig(max_num_batched_tokens=2048), cost, hand_off)
    trace = requests(1, 1.0)
    found = simulate_pools(
        trace, "round_robin", engine=EngineConfig(max_num_batched_tokens=2048), cost=cost, hand_off=hand_off
    )
    n = int(trace["prompt_tokens"][0])
    expected = constants.tau_pre_s(n) + constants.transfer_s(n) + constants.tau_dec_s()
    assert found["ttft_s"][0] == pytest.approx(expected, abs=1e-9)
    assert constants.decode_slope_s == pytest.approx(3e-4)
