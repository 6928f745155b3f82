"""Run the tagging service until it is told to end."""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import threading
from collections.abc import Callable

import uvicorn

from astrolabe_lab import event_loop
from astrolabe_lab.errors import InputError


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at ``host`` and ``port`` (0: a free one); raises InputError where it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(2048)
    except (OSError, OverflowError) as error:
        sock.close()
        why = getattr(error, "strerror", None) or error
        raise InputError(f"cannot listen at {host}:{port}: {why}; choose another --port (0: a free one)") from None
    return sock


def address(sock: socket.socket) -> str:
    """The URL of the service behind a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app, sock: socket.socket, on_ready: Callable[[], None] = lambda: None, grace_s: float = 5.0) -> None:
    """Serve the ASGI application at ``sock``; returns once SIGTERM or Ctrl-C has come and requests have ended.

    ``on_ready`` is called when requests are taken. Requests that still run ``grace_s`` after the signal are cut
    off; a second signal cuts them off at once.
    """
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=math.ceil(grace_s)
    )
    server = Server(config, on_ready)
    event_loop.run(server.serve(sockets=[sock]))
    if not server.started:
        raise RuntimeError("the service did not start: see the messages above")


class Server(uvicorn.Server):
    """uvicorn's server, which says when it is ready and takes a signal as the wish to end well."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.on_ready = on_ready

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets=sockets)
        if self.started and not self.should_exit:
            self.on_ready()

    @contextlib.contextmanager
    def capture_signals(self):
        if threading.current_thread() is not threading.main_thread():  # which alone gets signals
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig, frame) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
