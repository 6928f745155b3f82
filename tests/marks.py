"""Marks that several test modules share."""

import pytest

# What a test measures by the clock is spoilt when the host stalls, and a 95 % interval misses the truth now and then:
# one of three measurements suffices. The runner's summary tells how many were made again.
measures_time = pytest.mark.flaky(reruns=2, only_rerun="AssertionError")
