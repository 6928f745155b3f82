"""The log of an engine's steps, its flags as it tells them, and what its host says of itself."""

import json

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab import fit
from astrolabe_lab.cost import COUNTS, Regime, StepCost
from astrolabe_lab.engines import engine_cost, engine_facts, step_log
from astrolabe_lab.engines.emulation import Disturbance, disturb
from astrolabe_lab.engines.engine_process import Engine
from astrolabe_lab.engines.pace import PaceWriter
from astrolabe_lab.engines.step_log import StepLog, counts_of, read_steps
from astrolabe_lab.engines.supervisor import Supervisor, Watched
from astrolabe_lab.errors import InputError
from astrolabe_lab.sim.config import EngineConfig

DECODE = (2, 2, 100, 0.0, False)


def test_a_step_lasts_from_the_end_of_the_one_before_while_the_engine_is_busy(tmp_path):
    log = StepLog(tmp_path / "steps")
    log.step(10.0, 10.5, DECODE, busy=True)
    log.step(10.6, 11.0, DECODE, busy=False)  # scheduled a little after, and the last one
    log.step(20.0, 20.3, DECODE, busy=True)  # after a pause
    log.step(20.1, 20.7, DECODE, busy=True)  # scheduled while the one before still ran
    steps = read_steps(tmp_path / "steps")
    assert steps["seconds"].tolist() == pytest.approx([0.5, 0.5, 0.3, 0.4])
    assert steps["after_idle"].tolist() == [True, False, True, False]
    assert steps[["new_tokens", "sequences", "context_tokens"]].iloc[0].tolist() == [2, 2, 100]


def test_a_long_life_keeps_its_last_steps_and_counts_all(tmp_path):
    log = StepLog(tmp_path / "steps", capacity=8)
    for j in range(21):
        log.step(float(j), j + 0.5, (j + 1, 1, 0, 0.0, False), busy=False)
    steps = read_steps(tmp_path / "steps")
    assert step_log.written(tmp_path / "steps") == 21
    assert steps["new_tokens"].tolist() == list(range(14, 22))
    assert read_steps(tmp_path / "steps", since=19)["new_tokens"].tolist() == [20, 21]


def test_the_counts_of_a_step_are_those_that_price_it():
    chunks = [(100, 0, 64), (100, 64, 36), (10, 25, 1)]  # (prompt, computed before, tokens now)
    new, sequences, context, attention, mixed = counts_of(chunks)
    assert (new, sequences, context, mixed) == (101, 3, 89, True)
    assert attention == 64 * 64 / 2 + (36 * 64 + 36 * 36 / 2)
    assert counts_of([(10, 10, 1), (7, 30, 1)]) == (2, 2, 40, 0.0, False)


def test_logged_steps_give_their_step_cost_back(tmp_path):
    cost = StepCost(
        decode=Regime(base_s=0.02, per_seq_s=1e-4, per_kv_token_s=2e-7),
        mixed=Regime(base_s=0.03, per_token_s=5e-5, per_seq_s=1e-4, per_kv_token_s=3e-7, attention_s=1e-8),
    )
    log, rng, now = StepLog(tmp_path / "steps"), np.random.default_rng(0), 0.0
    for _ in range(400):
        chunks = [(50, int(rng.integers(50, 900)), 1) for _ in range(int(rng.integers(1, 40)))]
        if rng.random() < 0.5:
            chunks.append((900, int(rng.integers(0, 500)), int(rng.integers(2, 400))))
        counts = counts_of(chunks)
        seconds = cost.step_seconds(*counts)
        log.step(now, now + seconds, counts, busy=True)
        now += seconds
    fitted = fit.fit(read_steps(tmp_path / "steps"), quiet=True)
    assert all(one.worst_pct < 0.01 for one in fitted.regimes.values())


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_a_file_that_is_no_step_log_is_refused(tmp_path, content):
    with pytest.raises(InputError, match="is the engine up"):
        read_steps(tmp_path / "absent")
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(InputError, match="holds something else"):
        read_steps(tmp_path / "other")


def facts(**changes):
    engine = {
        "max_num_seqs": 64, "max_num_batched_tokens": 2048, "block_size": 32, "num_gpu_blocks": 900,
        "max_model_len": 2048, "enable_chunked_prefill": True, "watermark": 0.0, "async_scheduling": False,
        "enable_prefix_caching": True, "long_prefill_token_threshold": 0, "policy": "fcfs",
        "speculative_config": False, "pipeline_parallel_size": 0,
    }  # fmt: skip
    others = {key: changes.pop(key) for key in ("kv_cache_groups",) if key in changes}
    return {"model": "m", "kv_cache_groups": 1, **others, "engine": engine | changes}


def test_an_engine_s_flags_become_its_config():
    config = engine_facts.config_of(facts())
    assert (config.max_num_seqs, config.block_size, config.num_gpu_blocks) == (64, 32, 900)
    assert config.enable_prefix_caching and not config.async_scheduling


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_cache_groups": 2}, "2 kinds of KV cache"),
        ({"speculative_config": True}, "speculative decoding"),
        ({"policy": "priority"}, "priority scheduling"),
        ({"pipeline_parallel_size": 1}, "pipeline parallelism"),
        ({"long_prefill_token_threshold": 64}, "cap on long prefills"),
    ],
)
def test_an_engine_that_ours_does_not_model_is_refused_by_name(changes, said):
    with pytest.raises(InputError, match=said):
        engine_facts.config_of(facts(**changes))


def test_an_engine_that_runs_otherwise_than_told_is_noticed(tmp_path):
    told = EngineConfig(64, 2048, 32, 1000, 2048, enable_prefix_caching=True)
    assert engine_facts.differences(facts(), told) == ["num_gpu_blocks is 900, not 1000"]
    (tmp_path / "facts.json").write_text(json.dumps(facts()))
    assert engine_facts.read_facts(tmp_path / "facts.json") == facts()
    with pytest.raises(InputError, match="is the engine up"):
        engine_facts.read_facts(tmp_path / "absent")


def test_a_host_that_does_not_keep_up_is_said_for_the_time_in_which_it_did_not(tmp_path):
    engine, lines = Engine(1, "engine", tmp_path, [], {}), []
    pace, one = PaceWriter(engine.pace), Watched(engine)
    watch = Supervisor([engine], False, lines.append)._pace
    for _ in range(20):
        pace.step(0.1, 0.001)
    watch(one)
    assert lines == []
    for _ in range(20):
        pace.step(0.1, 0.03)
    watch(one)
    assert "engine 1: the host does not keep up: steps ended 30% later than modelled" in lines[0]
    watch(one)
    assert len(lines) == 1


def test_a_disturbance_that_is_none_leaves_what_was_set(tmp_path, capsys):
    control = tmp_path / "control.json"
    disturb(control, slowdown=2.0)
    reader = Disturbance(str(control))
    assert reader.now().slowdown == 2.0
    for wrong in ("{", '{"slowdown": -1}', '{"speed": 2}', "[1]"):
        control.write_text(wrong + " " * len(wrong))
        assert reader.now().slowdown == 2.0, wrong
    assert capsys.readouterr().err.count("what was set stays") >= 1
    control.write_text('{"slowdown": 3.0}')
    assert reader.now().slowdown == 3.0


def test_prices_are_levelled_to_the_time_that_steps_took_in_sum():
    rng = np.random.default_rng(1)
    steps = pd.DataFrame({"new_tokens": rng.integers(1, 30, 2000), "context_tokens": rng.integers(100, 9000, 2000)})
    steps = steps.assign(sequences=steps["new_tokens"], attention=0.0, mixed=False)
    steps.loc[::2, ["attention", "mixed"]] = [[500.0, True]]
    true_s = 0.01 + 1e-4 * steps["new_tokens"] + 1e-7 * steps["context_tokens"]
    late = np.where(rng.random(2000) < 0.2, 2.0, 1.0)  # one in five steps takes twice as long
    late[7] = 500.0
    steps = steps.assign(seconds=true_s * late)
    fitted = fit.fit(steps, quiet=True)
    cost, levels = engine_cost.levelled(fitted)
    assert min(levels.values()) > 1.05  # the fit itself prices the usual step
    for regime, mixed in (("decode", False), ("mixed", True)):
        rows = steps[(steps["mixed"] == mixed) & (steps["seconds"] < 1.0)]
        priced = sum(cost.step_seconds(*row, mixed) for row in rows[list(COUNTS)].itertuples(index=False))
        assert priced == pytest.approx(rows["seconds"].sum(), rel=0.02), regime


def test_exact_steps_need_no_levelling():
    steps = pd.DataFrame({"new_tokens": [1, 2, 5, 9] * 10, "context_tokens": range(40), "mixed": [False, True] * 20})
    steps = steps.assign(sequences=steps["new_tokens"], attention=0.0, seconds=0.01 + 0.001 * steps["new_tokens"])
    _, levels = engine_cost.levelled(fit.fit(steps, quiet=True))
    assert levels == {"decode": pytest.approx(1.0), "mixed": pytest.approx(1.0)}


def test_what_a_request_takes_beside_its_steps_is_told_request_by_request():
    """One slow answer is an outlier among them, and does not move all."""
    sent = pd.DataFrame({"instance": [0, 0, 1], "order": [2, 0, 1], "e2e_from_send_s": [0.5, 0.107, 0.058]})
    steps = pd.DataFrame({
        "instance": [0, 0, 0, 1], "after_idle": [True, False, True, True], "seconds": [0.06, 0.04, 0.1, 0.05],
    })  # fmt: skip
    assert engine_cost._outside_s(sent, steps) == pytest.approx([0.007, 0.4, 0.008])
    with pytest.raises(InputError, match="engine 1 served others meanwhile"):
        engine_cost._outside_s(sent, steps.iloc[:3])
