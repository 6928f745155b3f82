"""One vLLM engine as a process: its command line, its log, its end."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from astrolabe_lab.sim.config import EngineConfig

from .emulation import KEY, Emulation
from .guard import CLUSTER, guarded
from .placement import Place

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
}
GRACE_S = 10.0  # from SIGTERM to SIGKILL
SPELT = {"num_gpu_blocks": "num_gpu_blocks_override"}


class EngineError(RuntimeError):
    """An engine that did not start, or ended; carries the tail of its log."""


@dataclass
class Engine:
    """A vLLM engine of ours. ``url``: its OpenAI-compatible server; in its ``folder`` ``status``: the file of its
    published status, ``steps``: of its last steps, ``facts``: of its flags; ``control``, ``pace``: the files that
    disturb it and that tell whether the host keeps up (emulated engines). ``place``: where it computes."""

    index: int
    role: str
    folder: Path
    command: list[str]
    environment: dict[str, str] = field(repr=False)
    place: Place = field(default_factory=Place)
    port: int = 0
    starts: int = 0
    guard: subprocess.Popen | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def status(self) -> Path:
        return self.folder / "status"

    @property
    def steps(self) -> Path:
        return self.folder / "steps"

    @property
    def facts(self) -> Path:
        return self.folder / "facts.json"

    @property
    def control(self) -> Path:
        return self.folder / "control.json"

    @property
    def pace(self) -> Path:
        return self.folder / "pace"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    def forget(self) -> None:
        """Remove what an earlier engine in this folder told and was told, but for its log."""
        for path in (self.status, self.steps, self.facts, self.control, self.pace):
            path.unlink(missing_ok=True)

    def start(self) -> None:
        """Start it, on a free port the first time and on the same one again; ``ready`` tells when it serves."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = self.port or free_port()
        self.starts += 1
        with self.log.open("ab") as log:
            self.guard = subprocess.Popen(
                guarded([*self.command, "--port", str(self.port)], GRACE_S),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self.guard is not None and self.guard.poll() is None

    @property
    def code(self) -> int | None:
        """Its exit code (128 and the signal's number where a signal ended it); None while it runs."""
        return None if self.guard is None else self.guard.poll()

    def ready(self) -> bool:
        """Whether it serves. Raises EngineError with the tail of its log when it has ended."""
        if not self.alive:
            raise EngineError(f"engine {self.index} ended with code {self.code}; the end of {self.log}:\n{self.tail()}")
        return self.serves()

    def serves(self) -> bool:
        """Whether its server answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def pids(self) -> list[int]:
        """The processes of the engine, its server first; without the guard."""
        import psutil

        try:
            return [p.pid for p in psutil.Process(self.guard.pid).children(recursive=True)]
        except (psutil.NoSuchProcess, AttributeError):
            return []

    def close(self) -> None:
        """Ask it to end (``wait`` waits)."""
        if self.guard is not None and self.guard.stdin and not self.guard.stdin.closed:
            self.guard.stdin.close()

    def wait(self, timeout_s: float = 20.0) -> None:
        if self.guard is None:
            return
        try:
            self.guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            for pid in self.pids():
                _kill(pid)
            self.guard.kill()
            self.guard.wait()

    def tail(self, lines: int = 25) -> str:
        """The end of its log; before it the lines that name an error, which vLLM's own ending hides."""
        try:
            said = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return "(no log)"
        causes = [line for line in said[:-lines] if re.search(r"\b\w*(Error|Exception): ", line)]
        return "\n".join([*dict.fromkeys(causes[-5:]), *said[-lines:]])


def emulated(index: int, folder: Path, model: Path, config: EngineConfig, emulation: Emulation, name: str) -> Engine:
    """The engine that sleeps the modelled step; ``emulation.control`` is set to the engine's own."""
    engine = Engine(index, "engine", folder, [], {})
    emulation = replace(emulation, seed=emulation.seed + index)  # engines do not jitter in step
    additional = emulation.additional_config(**_published(engine))
    additional[KEY] |= {"control": str(engine.control), "pace": str(engine.pace)}
    engine.command = [
        *_server(str(model), name),
        *engine_flags({k: v for k, v in asdict(config).items() if k != "async_scheduling"}),  # the executor's to say
        "--distributed-executor-backend", "astrolabe_lab.engines.emulate.EmulatedExecutor",
        *_hooks(additional, emulation.async_scheduling),
        "--enforce-eager",
    ]  # fmt: skip
    engine.environment = _environment(folder.parent) | {
        "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    return engine


def real(
    index: int, folder: Path, model: str, name: str, flags: list[str], place: Place, device: str, asynchronous: bool
) -> Engine:
    """The engine that runs ``model``, a folder or a hub name, at ``place``; ``flags`` are vLLM's own."""
    engine = Engine(index, "engine", folder, [], {}, place)
    additional = {KEY: _published(engine)}
    engine.command = [*_server(model, name), *flags, *place.flags, *_hooks(additional, asynchronous)]
    if device == "cpu" and "--enforce-eager" not in flags:
        engine.command.append("--enforce-eager")  # compiling takes minutes there
    if device == "cpu" and "--distributed-executor-backend" not in flags:
        engine.command += ["--distributed-executor-backend", "astrolabe_lab.engines.patient.PatientExecutor"]
    engine.environment = _environment(folder.parent) | place.environment
    if device == "cpu":
        engine.environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if not Path(model).is_dir() and "HF_HUB_OFFLINE" not in os.environ:
        del engine.environment["HF_HUB_OFFLINE"]  # the hub may have to be asked
    return engine


def _published(engine: Engine) -> dict[str, str]:
    return {"status": str(engine.status), "steps": str(engine.steps), "facts": str(engine.facts)}


def _hooks(additional: dict, asynchronous: bool) -> list[str]:
    scheduler = "AsyncStatusScheduler" if asynchronous else "StatusScheduler"
    return [
        "--scheduler-cls", f"astrolabe_lab.status.scheduler.{scheduler}",
        "--additional-config", json.dumps(additional),
    ]  # fmt: skip


def engine_flags(values: dict) -> list[str]:
    """vLLM's flags for ``values``, entries of an EngineConfig."""
    flags = []
    for key, value in values.items():
        if isinstance(value, bool):
            flags.append(f"--{'' if value else 'no-'}{key.replace('_', '-')}")
        elif key != "scheduler":
            flags += [f"--{SPELT.get(key, key).replace('_', '-')}", str(value)]
    return flags


def _server(model: str, name: str) -> list[str]:
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--host", "127.0.0.1", "--model", model, "--served-model-name", name, "--disable-uvicorn-access-log",
    ]  # fmt: skip


def _environment(cluster: Path) -> dict[str, str]:
    environment = QUIET | dict(os.environ)  # the user's own settings go first
    package = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package, environment.get("PYTHONPATH"))))
    environment[CLUSTER] = str(cluster)
    return environment


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        pass
