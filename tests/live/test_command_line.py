"""The commands of the README's live part, as a user gives them: engines, a router over them, a question, the end."""

import json
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

import psutil
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@contextmanager
def command(*words):
    """A command that stays until it is told to end, well: (what it announced, its process)."""
    process = subprocess.Popen(
        [sys.executable, "-m", "astrolabe_lab.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        assert line, process.communicate()[1][-2000:]
        yield json.loads(line), psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_engines_and_a_router_come_and_go_by_their_commands(tmp_path):
    folder = str(tmp_path / "cluster")
    with command("launch", "--instances", "1", "--out", folder) as (cluster, launched):
        engines = launched.children(recursive=True)
        assert cluster["world"] == "emulated" and len(cluster["engines"]) == 1 and len(engines) >= 2
        with command("route", "--cluster", folder) as (router, _):
            body = {"model": cluster["model"], "prompt": "Where does it go?", "max_tokens": 7}
            asked = urllib.request.Request(
                router["url"] + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=60) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 7
                assert answer.headers["X-Astrolabe-Instance"] == "0"
                assert float(answer.headers["X-Astrolabe-Predicted-E2E-S"]) > 0
    assert not psutil.wait_procs(engines, timeout=10)[1]
