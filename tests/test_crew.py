import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import psutil
import pytest

from astrolabe_lab.errors import InputError
from astrolabe_lab.sweep import crew


def work(item):
    if item == "wrong":
        raise InputError("no such thing")
    if item == "broken":
        raise ZeroDivisionError("by zero")
    if item == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "gone":
        os._exit(3)
    return os.getpid()


def test_every_item_is_done_once_on_as_many_processes_as_asked():
    results = dict(crew.each(work, ["a", "b", "c", "d", "e"], 2))
    assert sorted(results) == [0, 1, 2, 3, 4]
    assert 1 <= len(set(results.values())) <= 2 and os.getpid() not in results.values()


def test_one_worker_is_this_process():
    assert set(dict(crew.each(work, ["a", "b"], 1)).values()) == {os.getpid()}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_that_fails_is_named(workers):
    with pytest.raises(InputError, match="^wrong: no such thing$"):
        list(crew.each(work, ["a", "wrong"], workers))
    with pytest.raises(crew.CrewError, match="^broken: ZeroDivisionError: by zero"):
        list(crew.each(work, ["a", "broken"], workers))


def test_a_job_that_kills_its_process_is_named_and_how_it_died():
    with pytest.raises(crew.CrewError, match="^killed: its process was killed by SIGKILL; often it is memory"):
        list(crew.each(work, ["a", "killed", "b"], 2))
    with pytest.raises(crew.CrewError, match=r"^gone: its process ended early \(exit code 3\)"):
        list(crew.each(work, ["gone", "a", "b"], 2))


def test_no_process_outlives_a_failure():
    before = set(psutil.Process().children())
    with pytest.raises(crew.CrewError):
        list(crew.each(work, ["broken"] + ["a"] * 10, 3))
    left = set(psutil.Process().children()) - before
    assert not [child for child in left if "spawn_main" in " ".join(child.cmdline())]


def test_a_function_of_a_notebook_reaches_another_process():
    times = 3
    assert dict(crew.each(lambda x: x * times, [1, 2], 2)) == {0: 3, 1: 6}


def test_what_cannot_be_sent_is_refused_with_a_way_out():
    with pytest.raises(InputError, match=r"cannot be sent to another process .*; use workers=1"):
        list(crew.each(partial(work, threading.Lock()), ["a", "b"], 2))


def test_a_script_needs_no_main_guard_and_runs_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from astrolabe_lab.sweep import crew\nprint('ran')\nbig = bytes(10_000_000)  # more than a pipe holds\n"
        "class Own:\n    def size(self, item):\n        return len(item)\n"
        "print(sorted(crew.each(Own().size, [b'a', big], 2)))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.stdout) == ("", "ran\n[(0, 1), (1, 10000000)]\n")


def test_the_main_module_is_back_once_the_processes_run():
    main = sys.modules["__main__"]
    list(crew.each(work, ["a", "b"], 2))
    assert sys.modules["__main__"] is main


@pytest.mark.skipif(sys.platform == "win32", reason="signals of a process group are POSIX")
def test_ctrl_c_ends_the_workers_too(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import time\nfrom astrolabe_lab.sweep import crew\n"
        "if __name__ == '__main__':\n"
        "    print('up', flush=True)\n"
        "    list(crew.each(time.sleep, [60, 60], 2))\n"
    )
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    process.stdout.readline()
    deadline = time.monotonic() + 20
    while len(workers := psutil.Process(process.pid).children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert b"KeyboardInterrupt" in process.communicate(timeout=20)[1]
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert workers and not alive
