"""A router as a process over a cluster: it starts, ends with its context, and says why it did not."""

from types import SimpleNamespace

import psutil
import pytest

from astrolabe_lab.cost import preset
from astrolabe_lab.engines.cluster_file import read_cluster, write_cluster
from astrolabe_lab.serve.limits import Limits
from astrolabe_lab.serve.routing import RouterError, routing
from astrolabe_lab.sim.config import EngineConfig


@pytest.fixture
def cluster(tmp_path):
    """A cluster's file, of an engine that is not there."""

    def write(cost):
        engines = [{"url": "http://127.0.0.1:9", "role": "engine", "status": str(tmp_path / "s")}]
        write_cluster(tmp_path, engines, EngineConfig(), cost, 1.0, "m", tmp_path, "hardware")
        return SimpleNamespace(folder=tmp_path, time_scale=4.0)

    return write


def own_routers():
    return [p.pid for p in psutil.Process().children(recursive=True) if "route" in p.cmdline()]


def test_a_router_that_cannot_start_says_why(cluster):
    with pytest.raises(RouterError, match="did not start: .*tokenizer"), routing(cluster(None), "least_loaded"):
        pass
    assert own_routers() == []


def test_a_cluster_file_without_a_step_cost_is_one_whose_engines_nobody_priced(cluster, tmp_path):
    cluster(None)
    assert read_cluster(tmp_path).cost is None
    cluster(preset("llama2-7b-a30").cost)
    assert read_cluster(tmp_path).cost == preset("llama2-7b-a30").cost


@pytest.mark.vllm  # for the tokenizer's files
def test_a_router_serves_while_its_context_lasts(cluster, tmp_path):
    import urllib.request

    from astrolabe_lab.engines import model_files

    model_files.write(tmp_path / "model")
    running = cluster(None)
    write_cluster(
        tmp_path, read_cluster(tmp_path).engines, EngineConfig(), None, 1.0, "m", tmp_path / "model", "hardware"
    )
    with routing(running, "least_loaded", journal=tmp_path / "j") as url:
        assert b'"m"' in urllib.request.urlopen(url + "/v1/models").read()
        wanted = {"astrolabe_lab.engines.guard", "route"}  # other tests' engines have guards too
        guard = next(p for p in psutil.Process().children() if wanted <= set(p.cmdline()))
        assert float(guard.cmdline()[4]) > Limits().drain_s * running.time_scale  # it lets requests under way end
        assert len(own_routers()) >= 1
    assert own_routers() == []
