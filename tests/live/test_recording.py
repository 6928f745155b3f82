"""The recording in data/ is what the installed vLLM plans."""

import pytest

from astrolabe_lab import measure, recorded
from astrolabe_lab.cost import preset

from . import NEEDS_VLLM

pytestmark = NEEDS_VLLM
COST = preset("llama2-7b-a30").cost
TRACE, CONFIGS = recorded.comparison()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_recording_is_what_vllm_plans(name):
    run = TRACE, CONFIGS[name], COST
    theirs, source = recorded.vllm_schedule(*run)
    assert "driven here" in source
    found = measure.schedule_differences(recorded.recording(recorded.fingerprint(*run))[0], theirs)
    assert found["different_steps"] == found["different_preemptions"] == 0
