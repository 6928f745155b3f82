"""Runs that are ended from outside, or start side by side: nothing half-written, no process left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from astrolabe_lab import record

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes through /proc")

SLOW_SWEEP = """
import time
from astrolabe_lab.sweep import sweep

class Slow:
    def choose(self, request, cluster, rng):
        time.sleep(0.05)
        return 0

print("begins", flush=True)
sweep("sharegpt_like", [Slow()], [5, 6], [0], requests=5000, instances=2, workers=2, progress=False)
"""


@pytest.fixture
def marked(request):
    """An environment that tells this test's processes, and their children, from all others."""
    return os.environ | {"PYTHONPATH": str(ROOT), "ASTROLABE_TEST_MARK": f"{os.getpid()}-{request.node.name}"}


def processes(environment):
    """The ids of the living processes with this environment."""
    mark = f"ASTROLABE_TEST_MARK={environment['ASTROLABE_TEST_MARK']}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # ended meanwhile, or not ours
    return found


def until(condition, what, limit_s=60.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s:g} s: {what}"
        time.sleep(0.05)


def start(environment, *words, **options):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *map(str, words)], text=True, env=environment, **pipes | options)


@pytest.fixture
def lesson(tmp_path):
    def write(source):
        cells = [nbformat.v4.new_code_cell("n = 1"), nbformat.v4.new_code_cell(source)]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "lesson.ipynb")
        return ["-m", "astrolabe_lab.cli", "run", tmp_path / "lesson.ipynb", "--out", tmp_path / "out"]

    return write


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_notebook_run_that_is_ended_says_so_and_leaves_no_kernel(lesson, tmp_path, marked, sign, code):
    begun = tmp_path / "begun"
    words = lesson(f"import time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(600)")
    running = start(marked, *words, stderr=subprocess.DEVNULL)
    until(begun.exists, "the cell runs")
    assert len(processes(marked)) >= 2
    running.send_signal(sign)
    assert running.wait(30) == code
    until(lambda: not processes(marked), "the kernel ends")
    (found,) = (tmp_path / "out").rglob("run.json")
    assert json.loads(found.read_text())["status"] == "interrupted"
    assert not [path for path in (tmp_path / "out").rglob("*") if path.name.startswith(".")]


def test_asking_for_the_commit_takes_no_lock_of_the_checkout(tmp_path, monkeypatch):
    """A run that is killed meanwhile would leave the lock, and no commit could be made until it is removed."""
    (tmp_path / "package").mkdir()
    (source := tmp_path / "package" / "record.py").write_text("")
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "m"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    os.utime(source, (1, 1))  # git status would look at it, and write down what it found
    before = (tmp_path / ".git" / "index").read_bytes()
    monkeypatch.setattr(record, "__file__", str(source))
    assert len(record._commit()) == 40
    assert (tmp_path / ".git" / "index").read_bytes() == before


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_a_sweep_that_is_killed(tmp_path, marked, sign):
    (tmp_path / "script.py").write_text(SLOW_SWEEP)
    running = start(marked, tmp_path / "script.py")
    running.stdout.readline()
    until(lambda: len(processes(marked)) >= 3, "the workers start")
    time.sleep(1.0)
    running.send_signal(sign)
    running.wait(30)
    until(lambda: not processes(marked), "the workers end", limit_s=20)


def test_a_simulation_that_is_terminated_keeps_the_old_result_and_leaves_nothing(tmp_path, marked):
    (tmp_path / "t.csv").write_text("prompt_tokens,output_tokens\n" + "100,200\n" * 200_000)
    (tmp_path / "r.csv").write_text("old")
    words = "simulate --trace t.csv --qps 50 --lengths oracle --policy astrolabe --delays paper --instances 8"
    running = start(marked, "-m", "astrolabe_lab.cli", *words.split(), "--out", "r.csv", cwd=tmp_path)
    running.stderr.readline()  # the preset in use: the work has begun
    time.sleep(1.5)
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 143 and running.stdout.read() == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.csv", "t.csv"]
    assert (tmp_path / "r.csv").read_text() == "old"


COMPILE = """
from astrolabe_lab.sim import compiled
assert compiled.blocks_of(17, 16) == 2
print(compiled._FOLDER)
"""


def test_first_starts_side_by_side_share_one_cache(tmp_path, marked):
    environment = marked | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    starts = [start(environment, "-c", COMPILE) for _ in range(4)]
    ended = [(process.wait(120), process.stderr.read()) for process in starts]
    assert [(code, "Error" in err) for code, err in ended] == [(0, False)] * 4, ended
    assert len({process.stdout.read() for process in starts}) == 1
    assert not [
        path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix not in (".nbi", ".nbc")
    ]


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() != 0, reason="makes a folder that is not writable: as root")
def test_without_a_place_for_the_cache_a_temporary_one_serves_and_goes(tmp_path, marked):
    """A read-only installation under a user without a home: as in a container."""
    hidden = "import os; os.access = lambda *a: False\n"  # root may write anywhere
    environment = {**marked, "HOME": "/proc/nowhere", "TMPDIR": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)
    environment.pop("XDG_CACHE_HOME", None)
    process = start(environment, "-c", hidden + COMPILE)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "Error" not in err and out.startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_a_closed_stream_changes_no_result(tmp_path, marked, closed):
    (tmp_path / "t.csv").write_text("prompt_tokens,output_tokens\n5,6\n")
    words = "-m astrolabe_lab.cli simulate --trace t.csv --qps 4 --policy random --instances 1 --out r.csv"
    shut = " ".join(f"{number}>&-" for number in closed)
    line = f"exec {sys.executable} {words} {shut}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=marked, cwd=tmp_path, timeout=120)
    assert done.returncode == 0
    assert (tmp_path / "r.csv").read_text().count("\n") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.csv", "t.csv"]


def test_a_path_in_no_letters_of_the_terminal_is_no_failure(tmp_path, marked):
    (tmp_path / "t.csv").write_text("prompt_tokens,output_tokens\n5,6\n")
    words = "-m astrolabe_lab.cli simulate --trace t.csv --qps 4 --policy random --instances 1 --out".split()
    process = start(marked | {"PYTHONIOENCODING": "ascii"}, *words, "\u4e2d.csv", cwd=tmp_path)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "wrote \\u4e2d.csv" in out and (tmp_path / "\u4e2d.csv").exists()
