"""Inter-token latencies against what is known of their sums, and against the engine that made them."""

import dataclasses

import numpy as np
import pytest

from astrolabe_lab import arrivals
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.measure import inter_token_latencies, summarise, token_gaps
from astrolabe_lab.sim.cluster import ControlPlane, simulate
from astrolabe_lab.sim.engine import EngineConfig, run_one

TIGHT = EngineConfig(num_gpu_blocks=160, max_num_seqs=16)  # preempts


def requests(n=60, qps=8.0):
    return arrivals.with_arrivals(sharegpt_like.generate(n, seed=2, text=False), qps, seed=2)


@pytest.mark.parametrize("config", [EngineConfig(), TIGHT, dataclasses.replace(TIGHT, async_scheduling=True)])
def test_the_gaps_of_a_request_are_one_fewer_than_its_tokens_and_fill_its_decoding(config):
    trace = requests()
    results, steps = run_one(trace, config)
    results = results[results["status"] == "ok"]
    gaps = token_gaps(steps, trace).groupby("rid")["itl_s"]
    several = results[results["generated_tokens"] > 1].set_index("rid")
    np.testing.assert_array_equal(gaps.size().reindex(several.index), several["generated_tokens"] - 1)
    np.testing.assert_allclose(gaps.sum().reindex(several.index), several["finished_s"] - several["first_token_s"])
    if config is TIGHT:
        assert results["preemptions"].sum() > 0
        stalled = results.loc[results["preemptions"] > 0, "rid"]
        assert gaps.max().reindex(stalled).min() > 2 * gaps.median().median(), "a preemption is a long gap"


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin"])
def test_a_runs_gaps_come_from_its_engines_run_again(policy):
    results = simulate(requests(), policy, instances=3, engine=TIGHT)
    gaps = inter_token_latencies(results, engine=TIGHT)
    assert gaps["itl_s"].mean() == pytest.approx(summarise(results).itl_mean_s[0])
    sent = results.set_index("rid")["instance"]
    assert (gaps["instance"] == sent.reindex(gaps["rid"]).to_numpy()).all()


def test_delays_of_the_control_plane_are_part_of_when_engines_were_sent_to():
    control = ControlPlane(tag_s=0.005, dispatch_s=0.01)
    results = simulate(requests(), "random", instances=2, control=control)
    gaps = inter_token_latencies(results, dispatch_s=0.01)
    assert gaps["itl_s"].mean() == pytest.approx(summarise(results).itl_mean_s[0])
    with pytest.raises(InputError, match="does not come out again"):
        inter_token_latencies(results)


def test_another_engine_is_found_out():
    results = simulate(requests(), "random", instances=2, engine=TIGHT)
    with pytest.raises(InputError, match="give the engine, cost and dispatch_s"):
        inter_token_latencies(results)
