"""Engines that the live tests share: starting them is what a live test costs."""

import pytest

from astrolabe_lab.engines.launch import launch

TIME_SCALE = 3.0


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Four emulated engines of Llama-2-7B on an A30, three times slower than life; one that ends is started again."""
    folder = tmp_path_factory.mktemp("cluster") / "c"
    with launch(4, folder=folder, time_scale=TIME_SCALE, timeout_s=600, restart=True) as running:
        yield running
