"""A router as a process of its own over a running cluster, for notebooks, tests and scripts.

with launch(2, time_scale=4.0) as cluster, routing(cluster, "astrolabe:k=2") as url:
    frame = await bench.drive(url, trace, bench.Load(cluster.model, time_scale=cluster.time_scale))
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from astrolabe_lab.engines.guard import guarded
from astrolabe_lab.engines.running import Cluster

from .limits import Limits

CLOSE_S = 30.0  # wall s that a router has to close, beyond those of its requests under way


class RouterError(RuntimeError):
    """A router that did not start, or ended by itself; carries what it said."""


@contextmanager
def routing(
    cluster: Cluster,
    policy: str,
    lengths: str = "constant:256",
    journal: str | Path | None = None,
    seed: int = 0,
    options: Sequence[str] = (),
) -> Iterator[str]:
    """The URL of ``astrolabe route`` over ``cluster`` while the context lasts; it ends with this process too.

    ``policy, lengths, journal, seed`` and more ``options`` are that command's. What it says goes to a file in the
    cluster's folder. Raises RouterError where it does not start, or ended before the context did.
    """
    words = ["--cluster", str(cluster.folder), "--policy", policy, "--lengths", lengths, "--seed", str(seed)]
    words += [*(["--journal", str(journal)] if journal else []), *options]
    with router(words, cluster.folder, cluster.time_scale) as url:
        yield url


@contextmanager
def router(words: Sequence[str], folder: str | Path, time_scale: float, key: bool = True) -> Iterator[str]:
    """The URL of ``astrolabe route`` with these ``words``, as ``routing`` has it; what it says goes to a file in
    ``folder``. ``key``: whether it asks for the API key of this process' environment, where there is one."""
    end_s = Limits().drain_s * time_scale + CLOSE_S
    handle, log = tempfile.mkstemp(prefix="router-", suffix=".txt", dir=folder)
    environment = os.environ | {"PYTHONPATH": _with_this_package()}
    if not key:
        environment.pop("ASTROLABE_API_KEY", None)
    process = subprocess.Popen(
        guarded([sys.executable, "-m", "astrolabe_lab.cli", "route", *words], end_s),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=handle,
        start_new_session=True,
        text=True,
        env=environment,
    )
    os.close(handle)
    try:
        line = process.stdout.readline()
        if not line:
            raise RouterError(f"the router did not start: {_said(log)}")
        yield json.loads(line)["url"]
        if process.poll() is not None:
            raise RouterError(f"the router ended by itself with code {process.returncode}: {_said(log)}")
    finally:
        process.stdin.close()
        try:
            process.wait(end_s + CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _with_this_package() -> str:
    package = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))


def _said(log: str) -> str:
    return "\n".join(Path(log).read_text(errors="replace").splitlines()[-15:]) or "(it said nothing)"
