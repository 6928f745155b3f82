"""Runs a command in its own process group and ends the group when the parent is gone, however the parent ended.

    python -m astrolabe_lab.serve.guard COMMAND...

The parent holds the other end of standard input: when that closes (``close()``, an exception, SIGKILL), the group gets
SIGTERM, and SIGKILL after ``GRACE_S``. Ends with the command's exit code when the command ends by itself.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 10.0


def main(command: list[str]) -> int:
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # the parent decides, by closing the pipe
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_default_signals)
    while child.poll() is None:
        ready, _, _ = select.select([0], [], [], 0.2)
        if ready and not os.read(0, 4096):
            _end_group(child)
            break
    _kill_group(child.pid)  # what the command left behind
    code = child.wait()
    return code if code >= 0 else 128 - code


def _default_signals() -> None:
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)


def _end_group(child: subprocess.Popen) -> None:
    try:
        os.killpg(child.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    deadline = time.monotonic() + GRACE_S
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
