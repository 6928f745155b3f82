"""The package, its pins and its make targets, as a newcomer meets them."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import astrolabe_lab as lab

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = "pandas numba plotly torch vllm ray ipywidgets pyarrow papermill numpy".split()


def loaded_after(code: str) -> list[str]:
    """The heavy packages in sys.modules after the code ran in a process of its own."""
    check = f"{code}\nimport sys\nprint(*(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stderr.split()


# --- the package ------------------------------------------------------------------------------------------


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_after("import astrolabe_lab") == []


def test_the_help_of_the_command_line_loads_nothing_heavy():
    show = "from astrolabe_lab import cli\ntry: cli.main(['simulate', '--help'])\nexcept SystemExit: pass"
    assert loaded_after(show) == []


@pytest.mark.parametrize("name", lab.__all__)
def test_every_lazy_name_resolves(name):
    assert getattr(lab, name).__name__.rpartition(".")[2] == name


def test_an_unknown_attribute_lists_the_known_ones():
    with pytest.raises(AttributeError, match="no attribute 'simulat'; it has: .*simulate"):
        _ = lab.simulat


def test_lazy_names_show_in_dir():
    assert set(lab.__all__) <= set(dir(lab))


def test_the_version_is_stated_once_and_the_same():
    assert PROJECT["project"]["version"] == lab.__version__


def test_every_data_file_of_the_package_is_declared():
    declared = PROJECT["tool"]["setuptools"]["package-data"]["astrolabe_lab"]
    package = ROOT / "astrolabe_lab"
    files = [
        p.relative_to(package).as_posix() for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts
    ]
    data = [name for name in files if not name.endswith(".py")]
    assert data, "the presets are data files of the package"
    assert [name for name in data if not any(fnmatch(name, pattern) for pattern in declared)] == []


# --- the pins ---------------------------------------------------------------------------------------------


def requirements() -> list[Requirement]:
    extras = PROJECT["project"]["optional-dependencies"].values()
    found = [Requirement(text) for text in PROJECT["project"]["dependencies"] + sum(extras, [])]
    return [one for one in found if one.name != PROJECT["project"]["name"]]  # an extra may hold another one


def pins() -> dict[str, Version]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return {name: Version(version) for name, version in (line.split("==") for line in lines if line)}


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_every_requirement_is_pinned_within_its_own_range(requirement):
    pinned = pins()
    assert requirement.name in pinned
    assert requirement.specifier.contains(pinned[requirement.name], prereleases=True)


def test_conda_installs_the_pinned_set():
    text = (ROOT / "environment.yml").read_text()
    assert "--constraint constraints.txt" in text
    assert "--editable ." in text


def test_no_tracked_file_names_a_registry():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    words = "|".join(
        (
            "--(extra-)?index" + "-url",
            "py" + r"pi\.org",
            r"pythonhosted" + r"\.org",
            r"download\.py" + "torch",
        )
    )
    found = [
        name
        for name in listed.stdout.split("\0")
        if (ROOT / name).is_file() and re.search(words, (ROOT / name).read_text(errors="ignore"))
    ]
    assert found == []


# --- make and CI ------------------------------------------------------------------------------------------


def make(folder: Path, *words: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", "-C", folder, *words], capture_output=True, text=True, env=environment, timeout=60)


@pytest.fixture
def checkout(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_make_alone_explains_every_target(checkout):
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1).split()
    shown = make(checkout).stdout
    assert [name for name in targets if name != "help" and f"make {name} " not in shown] == []


def test_make_refuses_a_python_that_is_too_old_and_says_what_to_do(checkout):
    old = checkout / "python3.10"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = make(checkout, "test", f"PYTHON={old}")
    assert done.returncode != 0
    assert f"'{old}' is no Python 3.11 or newer: make PYTHON=" in done.stderr
    assert not (checkout / ".venv").exists()


def test_make_says_when_the_venv_module_is_missing(checkout):
    bare = checkout / "python3.11"
    bare.write_text('#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\n')
    bare.chmod(0o755)
    done = make(checkout, "run", f"PYTHON={bare}")
    assert done.returncode != 0
    assert "install its venv module" in done.stderr


@pytest.mark.parametrize("target", ["run", "test", "lab", "bench", "lint"])
def test_a_target_installs_only_when_the_pins_are_newer_than_the_environment(checkout, target):
    (checkout / ".venv").mkdir()
    stamp = checkout / ".venv" / ".installed"
    stamp.touch()
    assert "pip" not in make(checkout, "-n", target).stdout
    later = stamp.stat().st_mtime + 10
    os.utime(checkout / "constraints.txt", (later, later))
    assert "pip" in make(checkout, "-n", target).stdout


def test_ci_is_executable_and_ends_with_the_tests():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert script.read_text().rstrip().endswith("make test")


# --- tests that need something ----------------------------------------------------------------------------


def pytest_on(folder: Path, body: str, **environment: str) -> subprocess.CompletedProcess:
    tests = folder / "tests"
    tests.mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tests)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (tests / "test_it.py").write_text(f"import pytest\n{body}\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | environment)


SKIPS_ITSELF = "@pytest.mark.shared\ndef test_it(): pytest.skip('no reason at all')"


@pytest.fixture
def with_shared(tmp_path):
    (tmp_path / "elsewhere" / "data").mkdir(parents=True)
    return {"ASTROLABE_SHARED": str(tmp_path / "elsewhere")}


def test_what_is_missing_skips_a_test_with_the_reason(tmp_path):
    done = pytest_on(
        tmp_path,
        "@pytest.mark.shared\ndef test_it(): pass",
        ASTROLABE_SHARED="/nowhere",
        ASTROLABE_REQUIRE="",
    )
    assert done.returncode == 0
    assert "1 skipped" in done.stdout
    assert "no ../shared/data" in done.stdout


def test_the_shared_folder_is_found_by_its_variable(tmp_path, with_shared):
    body = "@pytest.mark.shared\ndef test_it(shared): assert shared.name == 'elsewhere'"
    assert "1 passed" in pytest_on(tmp_path, body, **with_shared).stdout


def test_a_skip_of_what_is_required_is_a_failure(tmp_path, with_shared):
    done = pytest_on(tmp_path, SKIPS_ITSELF, ASTROLABE_REQUIRE="shared", **with_shared)
    assert done.returncode == 1
    assert "skipped, but ASTROLABE_REQUIRE asks for shared" in done.stdout


def test_the_same_skip_is_fine_when_nothing_is_required(tmp_path, with_shared):
    assert pytest_on(tmp_path, SKIPS_ITSELF, ASTROLABE_REQUIRE="", **with_shared).returncode == 0


@pytest.mark.parametrize(
    "required, message",
    [
        ("shared", "ASTROLABE_REQUIRE asks for shared, but: no ../shared/data"),
        ("vlm", "allowed are vllm, browser"),
    ],
)
def test_the_run_refuses_to_start_without_what_is_required(tmp_path, required, message):
    done = pytest_on(tmp_path, SKIPS_ITSELF, ASTROLABE_REQUIRE=required, ASTROLABE_SHARED="/nowhere")
    assert done.returncode == 4
    assert message in done.stderr + done.stdout
