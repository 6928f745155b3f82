"""Runs a command in its own process group and ends the group when the parent is gone, however the parent ended.

    python -m astrolabe_lab.engines.guard PARENT_PID GRACE_S COMMAND...

The parent holds the other end of standard input: when that closes (``close()``, an exception, SIGKILL), or another
process has become the guard's parent (a fork of the parent may keep the pipe open), the group gets SIGTERM, and SIGKILL
after GRACE_S. When the guard itself is killed, the kernel tells the command by SIGTERM (Linux). Ends with the
command's exit code when the command ends by itself.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GUARD = "ASTROLABE_GUARD"  # environment variable of the command: the process id of its guard
CLUSTER = "ASTROLABE_CLUSTER"  # and what the parent sets: the folder of the cluster that it belongs to
PR_SET_PDEATHSIG = 1


def guarded(command: list[str], grace_s: float) -> list[str]:
    """The command line that runs ``command`` under a guard of this process."""
    return [sys.executable, "-m", "astrolabe_lab.engines.guard", str(os.getpid()), str(grace_s), *command]


def main(parent: int, grace_s: float, command: list[str]) -> int:
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # the parent decides, by closing the pipe
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    environment = os.environ | {GUARD: str(os.getpid())}
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_teller(), env=environment
    )
    while child.poll() is None:
        ready, _, _ = select.select([0], [], [], 0.2)
        if (ready and not os.read(0, 4096)) or os.getppid() != parent:
            _end_group(child, grace_s)
            break
    _kill_group(child.pid)  # what the command left behind
    code = child.wait()
    return code if code >= 0 else 128 - code


def _teller():
    """What the command's process does before it becomes the command."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def tell() -> None:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    return tell


def _end_group(child: subprocess.Popen, grace_s: float) -> None:
    try:
        os.killpg(child.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    deadline = time.monotonic() + grace_s
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
