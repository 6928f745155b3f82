"""Where emulated engines meet over KV blocks: prefill keeps them until they are pulled or expire, decode asks for them.

A line of JSON each way over a loopback connection: ``{"ask": NAME}`` is answered ``{"kept": true}`` or false, and
``{"done": NAME}`` lets the blocks go. One desk in each engine's process, shared by connector and executor.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from concurrent.futures import ThreadPoolExecutor

PATIENCE_S = 5.0  # wall s, for an answer


class Desk:
    """A prefill engine's: what it keeps, until when (monotonic wall s)."""

    def __init__(self):
        self._kept: dict[str, float] = {}
        self._gone: list[tuple[str, bool]] = []  # (name, whether it was pulled)
        self._lock = threading.Lock()
        self._server: socketserver.ThreadingTCPServer | None = None

    def open(self, port: int) -> None:
        """Answer at 127.0.0.1:``port`` from now on."""
        desk = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self):
                for line in self.rfile:
                    self.wfile.write(json.dumps(desk.answer(json.loads(line))).encode() + b"\n")

        socketserver.ThreadingTCPServer.allow_reuse_address = True
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="desk", daemon=True).start()

    def answer(self, asked: dict) -> dict:
        with self._lock:
            if "done" in asked:
                if self._kept.pop(asked["done"], None) is not None:
                    self._gone.append((asked["done"], True))
                return {}
            return {"kept": asked.get("ask") in self._kept}

    def keep(self, name: str, until_s: float) -> None:
        with self._lock:
            self._kept[name] = until_s

    def gone(self) -> list[tuple[str, bool]]:
        """(name, whether it was pulled) of what was let go since the last call; what has expired is let go now."""
        now = time.monotonic()
        with self._lock:
            for name in [name for name, until_s in self._kept.items() if until_s < now]:
                del self._kept[name]
                self._gone.append((name, False))
            gone, self._gone = self._gone, []
        return gone

    def __len__(self) -> int:
        """Names kept, and those let go of which ``gone`` has not told."""
        with self._lock:
            return len(self._kept) + len(self._gone)


class Caller:
    """A decode engine's: asks desks, in threads of its own; ``answers`` gives what they said."""

    def __init__(self):
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="caller")
        self._answers: list[tuple[object, bool]] = []
        self._lock = threading.Lock()

    def ask(self, port: int, name: str, token: object) -> None:
        """``answers`` will say (token, whether it is kept); a desk that is not there keeps nothing."""
        self._threads.submit(self._ask, port, name, token)

    def done(self, port: int, name: str) -> None:
        self._threads.submit(_tell, port, {"done": name})

    def answers(self) -> list[tuple[object, bool]]:
        with self._lock:
            answers, self._answers = self._answers, []
        return answers

    def _ask(self, port: int, name: str, token: object) -> None:
        kept = _tell(port, {"ask": name}).get("kept", False)
        with self._lock:
            self._answers.append((token, kept))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _tell(port: int, message: dict) -> dict:
    try:
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
            connection.sendall(json.dumps(message).encode() + b"\n")
            return json.loads(connection.makefile("rb").readline() or b"{}")
    except (OSError, ValueError):
        return {}
