"""The recording of vLLM's schedules: our engine equals it, and it says what it is."""

import pytest

from astrolabe_lab import measure, recorded
from astrolabe_lab.cost import StepCost, preset
from astrolabe_lab.sim.engine import run_one

COST = preset("llama2-7b-a30").cost
TRACE, CONFIGS = recorded.comparison()


def recording(trace, config, cost):
    return recorded.recording(recorded.fingerprint(trace, config, cost))


@pytest.mark.parametrize("name", CONFIGS)
def test_schedule_equals_the_one_recorded_from_vllm_step_by_step(name):
    theirs, source = recording(TRACE, CONFIGS[name], COST)
    found = measure.schedule_differences(run_one(TRACE, CONFIGS[name], COST)[1], theirs)
    assert source.startswith("vLLM 0.") and "recorded on" in source
    assert found["steps"] > 8000 and found["preemptions"] > 200, "memory is short"
    assert found["different_steps"] == found["different_preemptions"] == 0


def test_the_comparison_with_the_recording_can_fail():
    theirs, _ = recording(TRACE, CONFIGS["chunked"], COST)
    _, ours = run_one(TRACE, CONFIGS["chunked"], StepCost.parse("base_s=0.02"))
    assert measure.schedule_differences(ours, theirs)["different_steps"] > 0


def test_a_run_that_was_not_recorded_has_no_recording():
    for trace, config, cost in (
        (TRACE.head(5), CONFIGS["chunked"], COST),
        (TRACE, CONFIGS["chunked"], StepCost.parse("base_s=0.02")),
    ):
        theirs, why_not = recording(trace, config, cost)
        assert theirs is None and "make vllm" in why_not
