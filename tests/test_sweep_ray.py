"""The same sweep on a Ray cluster of two nodes, one of which dies."""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest

from astrolabe_lab import sweep
from astrolabe_lab.errors import InputError
from astrolabe_lab.sweep.crew import CrewError

pytestmark = [pytest.mark.ray, pytest.mark.slow]

GRID = {
    "defaults": {"trace": "sharegpt_like", "requests": 60, "instances": 3},
    "grid": {"policy": ["random", "least_loaded"], "qps": [6, 9], "seed": [0, 1]},
}


class Waits:
    """Sends everything to the first instance; tells where each run is, and holds it until `go` exists."""

    def __init__(self, folder):
        self.folder = str(folder)
        self.asked = False

    def choose(self, request, cluster, rng):
        if not self.asked:
            self.asked = True
            folder = Path(self.folder)
            (folder / f"{os.getpid()}.{time.time_ns()}.run").touch()
            while not (folder / "go").exists():
                time.sleep(0.05)
        return 0


class Ends:
    """Kills its own process."""

    def choose(self, request, cluster, rng):
        os.kill(os.getpid(), signal.SIGKILL)


def node():
    """The settings of a node of one processor. With its ports given it waits for no file that tells them: on a busy
    machine Ray gives that up too soon."""
    sockets = [socket.socket() for _ in range(3)]
    for one in sockets:
        one.bind(("", 0))
    names = ("metrics_agent_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
    ports = {name: one.getsockname()[1] for name, one in zip(names, sockets, strict=True)}
    for one in sockets:
        one.close()
    return {"num_cpus": 1, "object_store_memory": 100 * 2**20, **ports}


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of one processor each, on this machine."""
    patch = pytest.MonkeyPatch()
    for name, value in (("RAY_agent_register_timeout_ms", "180000"), ("RAY_USAGE_STATS_ENABLED", "0")):
        patch.setenv(name, value)
    import ray
    from ray.cluster_utils import Cluster

    try:
        both = Cluster(initialize_head=True, head_node_args=node() | {"include_dashboard": False})
        both.add_node(**node())
        both.wait_for_nodes()
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        pytest.fail(f"Ray gave up starting, as it does after 15 s on a machine that is too busy: {error}")
    yield both
    ray.shutdown()
    both.shutdown()
    patch.undo()


def measured(frame):
    return frame.drop(columns=["wall_s", "code", "run"], errors="ignore")


def test_a_ray_cluster_gives_the_rows_that_this_machine_gives(cluster, tmp_path):
    there = sweep.run(GRID, tmp_path / "there", on=cluster.address, progress=False)
    here = sweep.run(GRID, workers=1, progress=False)
    pd.testing.assert_frame_equal(measured(there), measured(here))
    assert sweep.read(tmp_path / "there").attrs["sweep"]["sweep"]["on"] == cluster.address


def test_a_run_whose_process_is_killed_there_is_tried_again_and_then_named_and_the_others_go_on(cluster, tmp_path):
    grid = GRID | {"grid": {"policy": ["random", Ends()], "qps": [6], "seed": [0, 1]}}
    with pytest.raises(CrewError, match="Ends at 6 QPS, seed .: its process or node was lost: .*2 of 4 runs are in"):
        sweep.run(grid, tmp_path / "out", on=cluster.address, progress=False, retries=1)
    assert set(sweep.read(tmp_path / "out").policy) == {"random"}


def test_the_runs_of_a_node_that_dies_are_made_on_another(cluster, tmp_path):
    second = cluster.add_node(**node())
    cluster.wait_for_nodes()
    grid = GRID | {"grid": {"policy": [Waits(tmp_path)], "qps": [6, 7, 8], "seed": [0]}}
    lost = []

    def watch():
        end = time.monotonic() + 120
        while len(runs := list(tmp_path.glob("*.run"))) < 3:  # one on each node
            assert time.monotonic() < end
            time.sleep(0.05)
        raylet = psutil.Process(second.all_processes["raylet"][0].process.pid)
        there = {child.pid for child in raylet.children(recursive=True)}
        lost.extend(path for path in runs if int(path.name.partition(".")[0]) in there)
        cluster.remove_node(second, allow_graceful=False)
        (tmp_path / "go").touch()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    rows = sweep.run(grid, tmp_path / "out", on=cluster.address, progress=False)
    watcher.join(60)
    assert len(lost) == 1 and len(list(tmp_path.glob("*.run"))) == 4, "one run was lost and made again"
    pd.testing.assert_frame_equal(measured(rows), measured(sweep.run(grid, workers=1, progress=False)))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_cluster_that_is_not_there_is_said_to_be_so(address):
    with pytest.raises(InputError, match=f"cannot reach a Ray cluster at '{address}': .*refused"):
        sweep.run(GRID, on=address, progress=False)


def test_the_end_of_this_process_is_still_ours_after_a_sweep_on_ray(cluster):
    def ours(*_):
        pass

    before = signal.signal(signal.SIGTERM, ours)
    try:
        small = GRID | {"grid": {"policy": ["random"], "qps": [6], "seed": [0]}}
        assert len(sweep.run(small, on=cluster.address, progress=False)) == 1
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, before)
