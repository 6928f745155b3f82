"""What a client writes into ``vllm_xargs`` never ends an engine: what is no whole number of its size is unknown."""

from types import SimpleNamespace

import numpy as np
import pytest

from astrolabe_lab.engines.told import told
from astrolabe_lab.sim.state import WAITING
from astrolabe_lab.sim.status import ROW

WRONG = ("many", "7", [7], 7.5, 1e300, True, None, -1, 2**63, 2**200)


def params(**extra):
    return SimpleNamespace(extra_args=extra)


@pytest.mark.parametrize("value", WRONG)
def test_what_is_no_whole_number_of_its_size_is_unknown(value):
    assert told(params(rid=value), "rid") is None
    assert told(params(rid=2**63 - 1), "rid") == 2**63 - 1
    assert told(params(n=2**31), "n", "i4") is None
    assert told(params(), "rid") is told(SimpleNamespace(extra_args=None), "rid") is told(None, "rid") is None


@pytest.mark.vllm
@pytest.mark.parametrize("value", [*WRONG, 2**31])
def test_neither_scheduler_nor_emulated_device_ends_by_it(value):
    from astrolabe_lab.cost import StepCost
    from astrolabe_lab.engines.emulate import EmulatedExecutor
    from astrolabe_lab.status.scheduler import StatusScheduler

    sampling = params(rid=None if value == 2**31 else value, predicted_tokens=value, output_tokens=value)
    scheduler = SimpleNamespace(_unnamed=0, _in_flight=[])
    request = SimpleNamespace(
        request_id="a", sampling_params=sampling, num_prompt_tokens=5, num_computed_tokens=0, num_output_tokens=0,
        num_preemptions=0,
    )  # fmt: skip
    rows = np.zeros(1, ROW)
    rows[0] = StatusScheduler._row(scheduler, request, WAITING, 0, 0, 0)
    assert (rows[0]["rid"], rows[0]["predicted"]) == (-1, 0)

    executor = SimpleNamespace(
        _sequences={}, _last=set(), _words=[1], _eos=2, emulation=SimpleNamespace(cost=StepCost.parse("base_s=0.02"))
    )
    executor._next = lambda sequence: EmulatedExecutor._next(executor, sequence)
    scheduled = SimpleNamespace(
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        scheduled_new_reqs=[
            SimpleNamespace(req_id="a", num_computed_tokens=0, sampling_params=sampling, prompt_token_ids=[1] * 5)
        ],
        num_scheduled_tokens={"a": 5},
        total_num_scheduled_tokens=5,
    )
    output, seconds, continues = EmulatedExecutor._plan(executor, scheduled)
    assert output.sampled_token_ids == [[1]] and seconds == pytest.approx(0.02) and not continues
