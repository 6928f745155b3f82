"""When emulated steps end: work that goes on keeps to the modelled times, work that begins starts when it is sent."""

import pytest

from astrolabe_lab.engines.pace import step_end


@pytest.mark.parametrize("host_s", [0.0, 0.001, 0.019])
def test_steps_that_follow_each_other_end_a_step_apart_whatever_the_host_does_in_between(host_s):
    end = 5.0
    for step in range(1, 50):
        end = step_end(end, end + host_s, 0.02, continues=True)
        assert end == pytest.approx(5.0 + 0.02 * step)


@pytest.mark.parametrize("continues", [False, True])
def test_a_step_that_is_submitted_before_the_last_one_ends_begins_at_its_end(continues):
    assert step_end(5.0, 4.99, 0.02, continues) == pytest.approx(5.02)


def test_a_step_after_a_pause_of_the_engine_begins_when_it_is_submitted():
    assert step_end(5.0, 6.0, 0.02, continues=False) == pytest.approx(6.02)


def test_a_host_that_stands_still_is_not_caught_up_with():
    """A step takes no less than no time, and the next one is whole again."""
    end = step_end(5.0, 6.0, 0.02, continues=True)
    assert end == pytest.approx(6.0)
    assert step_end(end, end + 0.001, 0.02, continues=True) == pytest.approx(6.02)
