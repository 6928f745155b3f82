"""A process that others wait for: what it has loaded is no garbage collector's business while it serves."""

import asyncio
import gc

import pytest

from astrolabe_lab import event_loop


@pytest.fixture(autouse=True)
def nothing_frozen():
    gc.unfreeze()


def test_what_is_loaded_stays_out_of_collections_until_the_last_one_is_done():
    assert gc.get_freeze_count() == 0
    with event_loop.few_pauses():
        with event_loop.few_pauses():
            assert gc.get_freeze_count() > 1000
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


def test_a_main_that_fails_leaves_the_collector_as_it_was():
    async def main():
        assert gc.get_freeze_count() > 1000
        assert event_loop.NAME in type(asyncio.get_running_loop()).__module__
        raise RuntimeError("it failed")

    with pytest.raises(RuntimeError, match="it failed"):
        event_loop.run(main())
    assert gc.get_freeze_count() == 0
