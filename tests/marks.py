"""What tests share that measure by the clock."""

from contextlib import contextmanager

import pytest


class Spoilt(AssertionError):
    """A measurement is not what it should be; whether the host stalled or it is wrong, the next two will tell."""


# A 95 % interval misses the truth now and then, too. The runner's summary tells how many were made again.
measures_time = pytest.mark.flaky(reruns=2, only_rerun=r"\bSpoilt\b")


@contextmanager
def by_the_clock():
    """Of what is asserted here one of three measurements suffices; what is asserted elsewhere always holds."""
    try:
        yield
    except AssertionError as error:
        raise Spoilt(*error.args) from None
