"""Length models that misbehave on purpose, and a tagging service to put them in."""

import asyncio
import contextlib
import threading
import time

import numpy as np

from astrolabe_lab.length.service import Limits, create_app
from astrolabe_lab.length.serving import Server, address, listen


class CountsLetters:
    """A length model whose answer is known: p50 is 10 + the letters of the prompt, p90 twice that.

    ``pause_s`` is what a batch takes; ``gate``, an Event, holds batches back until it is set. ``batches`` keeps what
    it was given; a prompt that says "crash" makes it raise and one that says "lie" is answered with NaN.
    """

    def __init__(self, pause_s=0.0, gate=None):
        self.pause_s, self.gate, self.batches, self.models = pause_s, gate, [], []

    def predict_quantiles(self, prompts, quantiles=(0.5, 0.9), models=None):
        assert tuple(quantiles) == (0.5, 0.9)
        self.batches.append(list(prompts))
        self.models.append(models)
        if self.gate is not None:
            self.gate.wait(30)
        time.sleep(self.pause_s)
        if any("crash" in prompt for prompt in prompts):
            raise RuntimeError("boom")
        p50 = np.array([np.nan if "lie" in prompt else 10.0 + len(prompt) for prompt in prompts])
        return np.column_stack([p50, 2 * p50])


@contextlib.contextmanager
def served(estimator, fallback=99, **limits):
    """The URL of a tagging service that runs in a thread of this process."""
    import uvicorn

    sock = listen("127.0.0.1", 0)
    app = create_app(estimator, fallback=fallback, model_hash="abc", limits=Limits(**limits))
    ready = threading.Event()
    config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="on", timeout_graceful_shutdown=1)
    server = Server(config, ready.set)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield address(sock)
    finally:
        server.should_exit = True
        thread.join(10)
        sock.close()
