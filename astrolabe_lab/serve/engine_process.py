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
from dataclasses import dataclass, field
from pathlib import Path

from astrolabe_lab.serve.emulation import KEY, Emulation
from astrolabe_lab.sim.config import EngineConfig

MARK = "ASTROLABE_CLUSTER"  # environment variable of every engine: the folder of its cluster
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class EngineError(RuntimeError):
    """An engine that did not start, or ended; carries the tail of its log."""


@dataclass
class Engine:
    """A vLLM engine of ours. ``url``: its OpenAI-compatible server; ``status``: the file of its published status;
    ``control``, ``pace``: the files that disturb it and that tell whether the host keeps up (emulated engines)."""

    index: int
    role: str
    folder: Path
    command: list[str]
    environment: dict[str, str] = field(repr=False)
    port: int = 0
    guard: subprocess.Popen | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def status(self) -> Path:
        return self.folder / "status"

    @property
    def control(self) -> Path:
        return self.folder / "control.json"

    @property
    def pace(self) -> Path:
        return self.folder / "pace"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    def start(self) -> None:
        """Start it on a free port; ``ready`` tells when it serves."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        with self.log.open("ab") as log:
            self.guard = subprocess.Popen(
                [sys.executable, "-m", "astrolabe_lab.serve.guard", *self.command, "--port", str(self.port)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self.guard is not None and self.guard.poll() is None

    def ready(self) -> bool:
        """Whether it serves. Raises EngineError with the tail of its log when it has ended."""
        if not self.alive:
            code = None if self.guard is None else self.guard.returncode
            raise EngineError(f"engine {self.index} ended with code {code}; the end of {self.log}:\n{self.tail()}")
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
    scheduler = "AsyncStatusScheduler" if emulation.async_scheduling else "StatusScheduler"
    additional = emulation.additional_config(status=str(engine.status))
    additional[KEY] |= {"control": str(engine.control), "pace": str(engine.pace)}
    engine.command = [
        *_server(model, name),
        *engine_flags(config),
        "--distributed-executor-backend", "astrolabe_lab.serve.emulate.EmulatedExecutor",
        "--scheduler-cls", f"astrolabe_lab.serve.scheduler.{scheduler}",
        "--additional-config", json.dumps(additional),
        "--enforce-eager",
    ]  # fmt: skip
    engine.environment = _environment(folder.parent) | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    return engine


def engine_flags(config: EngineConfig) -> list[str]:
    """The flags that make vLLM's engine the one of ``config``."""
    flags = [
        "--max-num-seqs", config.max_num_seqs,
        "--max-num-batched-tokens", config.max_num_batched_tokens,
        "--block-size", config.block_size,
        "--num-gpu-blocks-override", config.num_gpu_blocks,
        "--max-model-len", config.max_model_len,
        "--watermark", config.watermark,
        "--enable-chunked-prefill" if config.enable_chunked_prefill else "--no-enable-chunked-prefill",
        "--enable-prefix-caching" if getattr(config, "enable_prefix_caching", False) else "--no-enable-prefix-caching",
    ]  # fmt: skip
    return [str(flag) for flag in flags]


def _server(model: Path, name: str) -> list[str]:
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--host", "127.0.0.1", "--model", str(model), "--served-model-name", name, "--disable-uvicorn-access-log",
    ]  # fmt: skip


def _environment(cluster: Path) -> dict[str, str]:
    environment = QUIET | dict(os.environ)  # the user's own settings go first
    package = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package, environment.get("PYTHONPATH"))))
    environment[MARK] = str(cluster)
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
