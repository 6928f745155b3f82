"""The oracle itself: what it reports of vLLM adds up, before anything is compared with it."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab import oracle
from astrolabe_lab.cost import Grid, Regime, StepCost
from astrolabe_lab.errors import InputError
from astrolabe_lab.sim.engine import EngineConfig

from . import NEEDS_VLLM
from .test_schedule_equals_vllm import SETTINGS, random_workload

pytestmark = NEEDS_VLLM

WORKLOADS = [(seed, *SETTINGS[seed % len(SETTINGS)]) for seed in range(40)]


def cost_of(**columns):
    """A step cost of equal regimes; keys as in StepCost."""
    return StepCost(Regime(**columns), Regime(**columns))


def frame_of(*requests):
    """A trace frame from (arrived_s, prompt_tokens, output_tokens) triples."""
    columns = ["arrived_s", "prompt_tokens", "output_tokens"]
    return pd.DataFrame(requests, columns=columns).rename_axis("rid").reset_index()


@pytest.fixture(scope="module")
def runs():
    workloads = [random_workload(*workload) for workload in WORKLOADS]
    return [(*workload, *oracle.run_vllm(*workload)) for workload in workloads]


def test_every_request_finishes_with_exactly_its_tokens(runs):
    for frame, _, _, results, _ in runs:
        assert results["rid"].tolist() == frame["rid"].tolist()
        assert results["generated_tokens"].tolist() == frame["output_tokens"].tolist()
        assert (results["first_token_s"] > frame["arrived_s"]).all()
        assert (results["finished_s"] >= results["first_token_s"]).all()


def test_most_workloads_are_short_of_memory(runs):
    preempting = [len(log.attrs["preemptions"]) > 0 for *_, log in runs]
    assert np.mean(preempting) >= 0.5


def test_tokens_computed_are_those_needed_once_plus_what_preemptions_threw_away(runs):
    found = 0
    for frame, config, _, results, log in runs:
        computed = log.groupby("rid")["tokens"].sum().reindex(frame["rid"]).to_numpy()
        needed = (frame["prompt_tokens"] + frame["output_tokens"] - 1).to_numpy()
        untouched = (results["preemptions"] == 0).to_numpy()
        cached = (needed - computed)[untouched]  # never part of a block
        assert ((cached >= 0) & (cached % config.block_size == 0)).all()
        assert config.enable_prefix_caching or not cached.any()
        found += int(cached.sum())
        assert (computed[~untouched] > 0).all()
        counted = log.attrs["preemptions"]["rid"].value_counts()
        assert results.set_index("rid")["preemptions"].equals(
            counted.reindex(frame["rid"], fill_value=0).rename("preemptions")
        )
    assert found > 0


def test_no_step_exceeds_its_budget_seats_or_memory(runs):
    for _, config, _, _, log in runs:
        steps = log.groupby("step")["tokens"].agg(["sum", "size"])
        assert steps["sum"].max() <= config.max_num_batched_tokens
        assert steps["size"].max() <= config.max_num_seqs
        assert log.attrs["steps"]["free_blocks"].between(0, config.num_gpu_blocks - 1).all()
        assert not log.duplicated(["step", "rid"]).any()


def test_steps_follow_each_other_on_one_device_and_start_after_the_arrivals_they_serve(runs):
    for frame, _, _, _, log in runs:
        steps = log.attrs["steps"]
        assert steps["step"].tolist() == list(range(len(steps)))
        assert (steps["start_s"].to_numpy()[1:] >= steps["end_s"].to_numpy()[:-1]).all()
        arrived = frame.set_index("rid")["arrived_s"].loc[log["rid"]].to_numpy()
        assert (log["start_s"].to_numpy() >= arrived).all()


def test_the_same_workload_gives_the_same_schedule(runs):
    for frame, config, cost, results, log in runs[:8]:
        again, log_again = oracle.run_vllm(frame, config, cost)
        pd.testing.assert_frame_equal(again, results)
        assert log_again.to_numpy().tolist() == log.to_numpy().tolist()


def test_synchronous_schedule_of_two_requests_by_hand():
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=8, block_size=4, num_gpu_blocks=9, max_model_len=32)
    frame = frame_of((0.0, 10, 2), (0.5, 3, 1))
    results, log = oracle.run_vllm(frame, config, cost_of(base_s=1.0))
    assert log[["step", "rid", "tokens"]].to_numpy().tolist() == [[0, 0, 8], [1, 0, 2], [1, 1, 3], [2, 0, 1]]
    assert results["first_token_s"].tolist() == [2.0, 2.0]
    assert results["finished_s"].tolist() == [3.0, 2.0]
    assert log.attrs["steps"]["free_blocks"].tolist() == [6, 4, 5]


def test_asynchronous_schedule_sees_an_arrival_one_step_later():
    """At 0 s two steps are scheduled at once: a request of 0.5 s is seen when the first of them ends."""
    settings = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 8,
        "block_size": 4,
        "num_gpu_blocks": 9,
        "max_model_len": 32,
    }
    frame = frame_of((0.0, 3, 4), (0.5, 3, 1))
    first_seen = {}
    for asynchronous in (False, True):
        config = EngineConfig(**settings, async_scheduling=asynchronous)
        _, log = oracle.run_vllm(frame, config, cost_of(base_s=1.0))
        first_seen[asynchronous] = int(log.loc[log["rid"] == 1, "step"].iloc[0])
    assert first_seen == {False: 1, True: 2}


def test_a_step_is_priced_by_the_written_formula():
    """One prompt of 12 in chunks of 8 and 4, then decodes: each term can be read off by hand."""
    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=8, block_size=4, num_gpu_blocks=9, max_model_len=32)
    cost = StepCost(Regime(0.5, 1.0, 0.1, 0.2, 0.01, 7.0), Regime(0.25, 2.0, 0.1, 0.2, 0.01, 0.001))
    _, log = oracle.run_vllm(frame_of((0.0, 12, 3)), config, cost)
    seconds = log.attrs["steps"]["end_s"] - log.attrs["steps"]["start_s"]
    chunks = [2.25 + 0.8 + 0.2 + 0.0 + 0.032, 2.25 + 0.4 + 0.2 + 0.08 + 0.001 * (4 * 8 + 8)]
    decodes = [1.5 + 0.1 + 0.2 + 0.12, 1.5 + 0.1 + 0.2 + 0.13]
    np.testing.assert_allclose(seconds, chunks + decodes, rtol=1e-12)


def test_a_step_is_priced_with_what_stands_beside_the_formula():
    """The same prompt: chunks pay the table at (8, 0) and (4, 8) new and context tokens, decodes a batch of two."""
    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=8, block_size=4, num_gpu_blocks=9, max_model_len=32)
    table = Grid((4, 8), (0, 8), ((1.0, 2.0), (4.0, 8.0)))
    cost = StepCost(Regime(per_token_s=1.0, per_seq_s=0.5), Regime(), pad_sizes=(2,), mixed_grid=table)
    _, log = oracle.run_vllm(frame_of((0.0, 12, 3)), config, cost)
    seconds = log.attrs["steps"]["end_s"] - log.attrs["steps"]["start_s"]
    np.testing.assert_allclose(seconds, [4.0, 2.0, 3.0, 3.0], rtol=1e-12)


def test_md1_mean_wait_matches_theory():
    """One seat, one token, constant steps: an M/D/1 queue, mean wait rho * service / (2 * (1 - rho))."""
    rho, service_s, n = 0.6, 1.0, 6000
    arrived = np.random.default_rng(5).exponential(service_s / rho, n).cumsum()
    frame = pd.DataFrame({"rid": range(n), "arrived_s": arrived, "prompt_tokens": 1, "output_tokens": 1})
    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=1, block_size=16, num_gpu_blocks=3, max_model_len=16)
    results, _ = oracle.run_vllm(frame, config, cost_of(base_s=service_s))
    wait_s = (results["finished_s"] - frame["arrived_s"] - service_s).mean()
    assert wait_s == pytest.approx(rho * service_s / (2 * (1 - rho)), rel=0.1)


def test_stopping_early_leaves_the_future_unknown():
    frame, config, cost = random_workload(1)
    results, log = oracle.run_vllm(frame, config, cost, max_steps=5)
    assert len(log.attrs["steps"]) == 5
    assert results["finished_s"].isna().any()


def test_speed_is_a_rate_of_vllm_alone():
    assert 100 < oracle.steps_per_second(*random_workload(1), max_steps=200) < 100_000


def test_requests_that_can_never_run_are_refused_before_vllm_spins():
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=8, block_size=4, num_gpu_blocks=5, max_model_len=32)
    frame = frame_of((0.0, 10, 7), (0.0, 10, 8), (0.0, 20, 20))
    assert oracle.can_never_run(frame, config).tolist() == [False, True, True]
    assert config.rejects(frame["prompt_tokens"], frame["output_tokens"]).tolist() == [False, True, True]
    with pytest.raises(InputError, match=r"2 requests can never run \(first: rid 1\)"):
        oracle.run_vllm(frame, config, cost_of(base_s=1.0))
    oracle.run_vllm(frame[:1], config, cost_of(base_s=1.0))  # the largest that fits does run


def test_a_scheduler_that_makes_no_progress_is_an_error_not_a_hang(monkeypatch):
    monkeypatch.setattr(oracle, "can_never_run", lambda frame, config: np.zeros(len(frame), bool))
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=8, block_size=4, num_gpu_blocks=3, max_model_len=32)
    for asynchronous in (False, True):
        config = EngineConfig(**{**vars(config), "async_scheduling": asynchronous})
        with pytest.raises(RuntimeError, match="makes no progress after 0 steps: 0 running, 1 waiting"):
            oracle.run_vllm(frame_of((0.0, 20, 1)), config, cost_of(base_s=1.0))


def test_settings_that_vllm_refuses_are_input_errors():
    refused = SimpleNamespace(
        max_num_seqs=4, max_num_batched_tokens=8, block_size=4, num_gpu_blocks=9, max_model_len=32,
        enable_chunked_prefill=False, enable_prefix_caching=False, watermark=0.0, async_scheduling=False,
    )  # fmt: skip
    with pytest.raises(InputError, match="vLLM refuses these engine settings"):
        oracle.run_vllm(frame_of((0.0, 3, 1)), refused, cost_of(base_s=1.0))
    with pytest.raises(InputError, match="use scheduler=v1"):
        oracle.run_vllm(frame_of((0.0, 3, 1)), EngineConfig(scheduler="v0_chunked"), cost_of(base_s=1.0))
