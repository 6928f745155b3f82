"""Engines as processes: they start, are watched, and end with whoever started them. No vLLM is needed here."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from astrolabe_lab.engines import launch as launching
from astrolabe_lab.engines import leftovers
from astrolabe_lab.engines.emulation import Disturbance
from astrolabe_lab.engines.engine_process import Engine, EngineError, _environment
from astrolabe_lab.engines.guard import guarded
from astrolabe_lab.engines.running import Cluster
from astrolabe_lab.engines.supervisor import MOST_RESTARTS, Supervisor
from astrolabe_lab.errors import InputError
from astrolabe_lab.sim.config import EngineConfig

FAKE = str(Path(__file__).with_name("fake_engine.py"))
WAIT_S = 60


def fake(folder, index=0, **options):
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    root = Path(folder)
    engine = Engine(index, "engine", root / f"engine-{index}", [sys.executable, FAKE, *words], _environment(root))
    return engine


def until(happens, what="it"):
    deadline = time.monotonic() + WAIT_S
    while not (found := happens()):
        assert time.monotonic() < deadline, f"{what} did not happen within {WAIT_S} s"
        time.sleep(0.05)
    return found


def gone(pids):
    def ended(pid):
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return lambda: all(map(ended, pids))


@pytest.fixture
def running(tmp_path):
    """Starts fake engines and ends them after the test."""
    started = []

    def start(**options):
        engine = fake(tmp_path, len(started), **options)
        engine.start()
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.close()
        engine.wait()


def test_an_engine_ends_with_its_children_when_it_is_closed(running):
    engine = running()
    until(engine.ready)
    pids = until(lambda: engine.pids() if len(engine.pids()) > 1 else None)
    engine.close()
    engine.wait()
    until(gone(pids))
    assert not engine.alive


STARTER = """
import sys, time
sys.path.insert(0, {tests!r})
from test_launch import fake
engine = fake({folder!r})
engine.start()
while not (engine.ready() and len(engine.pids()) > 1):
    time.sleep(0.05)
print(*engine.pids(), flush=True)
{then}
"""


@pytest.mark.parametrize("end", ["exception", "exit", "SIGTERM", "SIGKILL", "SIGINT", "fork"])
def test_engines_end_with_the_process_that_started_them_however_it_ends(tmp_path, end):
    then = {
        "exception": "raise RuntimeError",
        "exit": "",
        "fork": "import os; os.fork() or time.sleep(30)\nos._exit(0)",
    }
    script = STARTER.format(
        tests=str(Path(__file__).parent), folder=str(tmp_path), then=then.get(end, "time.sleep(600)")
    )
    starter = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    pids = [int(pid) for pid in starter.stdout.readline().split()]
    assert len(pids) >= 2
    if end.startswith("SIG"):
        starter.send_signal(getattr(signal, end))
    starter.wait(WAIT_S)
    until(gone(pids), f"the engine's end after {end}")


def test_an_engine_ends_when_its_guard_is_killed(running):
    engine = running()
    until(engine.ready)
    server = engine.pids()[0]
    os.kill(engine.guard.pid, signal.SIGKILL)
    until(gone([server]))


@pytest.mark.parametrize(("grace_s", "ends_well"), [(WAIT_S, True), (0.2, False)])
def test_a_guard_gives_its_command_the_grace_that_it_was_told_of(tmp_path, grace_s, ends_well):
    busy = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.0), open(sys.argv[1], 'w').close(), sys.exit(0)))\n"
        "print('up', flush=True)\ntime.sleep(600)"
    )
    guard = subprocess.Popen(
        guarded([sys.executable, "-c", busy, str(tmp_path / "done")], grace_s),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert guard.stdout.readline() == b"up\n"
    guard.stdin.close()
    assert guard.wait(WAIT_S) == (0 if ends_well else 128 + signal.SIGKILL)
    assert (tmp_path / "done").exists() == ends_well
    guard.stdout.close()


def test_an_engine_that_ends_at_its_start_says_why(running):
    engine = running(die=0, say="ValueError: no such thing")
    with pytest.raises(EngineError, match=r"engine 0 ended with code 3; the end of .*log.txt:[\s\S]*no such thing"):
        until(engine.ready)


def test_an_engine_that_does_not_serve_in_time_is_told_with_the_end_of_its_log(running):
    engine = running(delay=600, say="still loading")
    until(lambda: "still loading" in engine.tail())
    lines = []
    with pytest.raises(EngineError, match=r"does not serve after 1 s[\s\S]*still loading"):
        launching._await([engine], 1.0, lines.append)


def test_an_engine_that_ended_is_started_again_on_its_port_where_that_is_wished(running):
    engine, lines = running(), []
    until(engine.ready)
    supervisor = Supervisor([engine], True, lines.append, every_s=0.05)
    supervisor.start()
    first, port = engine.pids()[0], engine.port
    os.kill(first, signal.SIGKILL)
    until(lambda: any("serves again" in line for line in lines))
    supervisor.stop()
    assert (engine.port, supervisor.restarted, supervisor.lost) == (port, 1, [])
    assert engine.serves() and engine.pids()[0] != first
    assert "ended with code 137" in lines[0]


def test_without_that_wish_an_ended_engine_is_lost_and_said_once(running):
    engine, other, lines = running(), running(), []
    until(engine.ready)
    until(other.ready)
    supervisor = Supervisor([engine, other], False, lines.append, every_s=0.05)
    supervisor.start()
    os.kill(engine.pids()[0], signal.SIGKILL)
    until(lambda: supervisor.lost)
    time.sleep(0.3)
    supervisor.stop()
    assert supervisor.lost == [engine] and other.serves() and len(lines) == 1


def test_an_engine_that_keeps_ending_is_given_up(running):
    engine, lines = running(die=0), []
    supervisor = Supervisor([engine], True, lines.append, every_s=0.05)
    supervisor.start()
    until(lambda: supervisor.lost)
    supervisor.stop()
    assert supervisor.restarted == MOST_RESTARTS and "not started again" in lines[-1]


def test_engines_whose_guard_is_gone_are_named_with_the_command_that_ends_them(tmp_path, running):
    kept = running()
    until(kept.ready)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    environment = _environment(tmp_path / "lost") | {"ASTROLABE_GUARD": str(dead.pid)}
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environment)
    try:
        found = until(lambda: [one for one in leftovers.leftovers() if one["cluster"] == str(tmp_path / "lost")])
        assert [one["pid"] for one in found] == [orphan.pid]
        assert not [one for one in leftovers.leftovers() if one["cluster"] == str(tmp_path)]
        assert f"end them: kill -9 {orphan.pid}" in leftovers.describe(found)[0]
    finally:
        orphan.kill()
        orphan.wait()


@pytest.fixture
def fakes(monkeypatch):
    """``launch`` starts fake engines, which tell nothing of themselves."""

    def of(preset, engine, cost, time_scale, asynchronous, name, instances):
        return lambda root: Cluster(
            [fake(root, i) for i in range(instances)], root, EngineConfig(), None, "emulated", 1.0, "m", "t"
        )

    monkeypatch.setattr(launching.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(launching, "_emulated", of)
    monkeypatch.setattr(launching, "_settle", lambda cluster: None)
    return lambda folder, **options: launching.launch(1, folder=folder, progress=lambda line: None, **options)


def test_a_folder_that_is_used_again_keeps_nothing_of_its_earlier_cluster_but_the_logs(tmp_path, fakes):
    with fakes(tmp_path) as first:
        (engine,) = first.engines
        first.disturb(0, stalled=True)
        for path in (engine.status, engine.steps, engine.facts, engine.pace):
            path.write_text("of the first")
    left = []

    def prepare(cluster):
        left.extend(path.name for path in tmp_path.rglob("*") if path.is_file())

    with fakes(tmp_path, prepare=prepare) as second:
        assert not Disturbance(str(second.engines[0].control)).now().stalled
    assert left == ["log.txt"]


def test_a_folder_whose_engines_still_run_is_refused_and_they_run_on(tmp_path, fakes, running):
    engine = running()
    until(engine.ready)
    engine.facts.write_text("{}")
    with pytest.raises(InputError, match=rf"whose processes .*{engine.pids()[0]}.* still run: end them, or name"):
        fakes(tmp_path)
    assert engine.serves() and engine.facts.exists()
    fakes(tmp_path / "other").close()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"instances": 0}, "instances=0"),
        ({"instances": 1, "world": "cloud"}, "allowed are emulated and hardware"),
        ({"instances": 1, "model": "a/b"}, "are for world='hardware'"),
        ({"instances": 1, "world": "hardware", "time_scale": 2.0}, "real ones run in real time"),
        ({"instances": 1, "engine": "scheduler=v0_chunked"}, "simulated only"),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_starts(monkeypatch, tmp_path, wrong, said):
    monkeypatch.setattr(launching.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(InputError, match=said):
        launching.launch(**wrong, folder=tmp_path / "c", progress=lambda line: None)
    assert not (tmp_path / "c").exists()


def test_without_vllm_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(launching.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="make vllm"):
        launching.launch(1)


def test_memory_is_looked_at_before_engines_start(monkeypatch, tmp_path):
    monkeypatch.setattr(launching.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(launching.needs.machine, "memory_bytes", lambda: (8 * 2**30, 3 * 2**30))
    with pytest.raises(InputError, match=r"4 emulated engines need 5.2 GiB, of which 3.0 .*: start 2 at most"):
        launching.launch(4, folder=tmp_path / "c", progress=lambda line: None)
