"""Calibration over HTTP, of an engine that is no vLLM but batches like one, and knows what its steps really took."""

import asyncio

import numpy as np
import pytest
from marks import by_the_clock, measures_time
from timed_engine import TimedEngine

from astrolabe_lab import InputError
from astrolabe_lab.calibrate import calibrate
from astrolabe_lab.calibrate.cells import Decode, Mixed
from astrolabe_lab.calibrate.live import engines_at
from astrolabe_lab.calibrate.plan import roughly
from astrolabe_lab.cost import StepCost

COST = StepCost.parse("base_s=0.02,per_seq_s=5e-4,per_kv_token_s=2e-6,mixed.per_token_s=2e-4")
FLAGS = "max_num_seqs=6,max_num_batched_tokens=96,num_gpu_blocks=256,max_model_len=1024"


def with_engine(story):
    """The result of ``story(target, engine)``, run beside the engine's event loop."""

    async def both():
        engine = TimedEngine(COST, 6, 96)
        async with engine.serving():
            target = await asyncio.to_thread(engines_at, engine.url, None, None, FLAGS)
            try:
                return await asyncio.to_thread(story, target, engine)
            finally:
                await asyncio.to_thread(target.close)

    return asyncio.run(asyncio.wait_for(both(), 180))


@measures_time
def test_what_is_found_over_http_is_what_the_engine_s_own_steps_took():
    found, log = with_engine(
        lambda target, engine: (calibrate(target, 60, rounds=1, progress=lambda line: None), engine.log)
    )
    assert found.model == "m" and found.source == "hardware" and found.kv_blocks == 512
    assert "loop_lag_p99_s" in found.gates
    assert found.streamed.streams == (1, 2, 4, 6) and found.streamed.bursts == len(found.rows["streamed"]) == 4
    assert found.gates["proxy_loop_lag_p99_s"]["value"] == found.streamed.loop_lag_p99_s
    with by_the_clock():
        assert found.seconds <= 60 and found.rows["unread"] <= 3
        assert found.streamed.base_s == pytest.approx(found.decode_s, rel=0.2)
        for mixed in (False, True):
            steps = [each for each in log if each[0] == mixed and each[1] >= 6 or each[0] is mixed is False]
            ratio = [found.cost.step_seconds(*counts, mixed=mixed) / seconds for _, *counts, seconds in steps]
            assert np.median(ratio) == pytest.approx(1, abs=0.10)
        assert found.overhead_s < 0.1


@measures_time
def test_windows_hold_exactly_the_steps_that_the_engine_ran():
    def story(target, engine):
        rough = roughly(target)
        seen = []
        for cell in (Decode(4, 50), Mixed(3, 10, (40, 200))):
            before = len(engine.log)
            answers = target.burst(cell.probes(rough))
            seen.append((cell.read(answers, 0, rough.room), engine.log[before:]))
        return seen

    (decode, _), (mixed, log) = with_engine(story)
    with by_the_clock():
        assert [len(window.steps) for window in decode] == [1]
        (steps,) = decode[0].steps
        assert (steps.sequences, steps.mixed) == (4, False) and steps.times > 12
    chunks = [(each[1], each[2]) for each in log if each[0]]
    read = [(s.new_tokens, s.sequences) for window in mixed for s in window.steps if s.mixed]
    assert read and set(read) <= set(chunks)


def test_an_engine_that_does_not_tell_its_flags_or_serves_another_model_is_refused():
    async def story():
        engine = TimedEngine(COST, 6, 96)
        async with engine.serving():
            with pytest.raises(InputError, match="give --engine"):
                await asyncio.to_thread(engines_at, engine.url)
            with pytest.raises(InputError, match="served are m"):
                await asyncio.to_thread(engines_at, engine.url, None, "other", FLAGS)

    asyncio.run(story())
