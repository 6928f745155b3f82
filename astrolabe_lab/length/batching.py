"""One thread that runs a length model, on whole batches of what waits for it."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from astrolabe_lab.errors import InputError
from astrolabe_lab.length.prompts import clean
from astrolabe_lab.trace.columns import MAX_TOKENS

QUANTILES = (0.5, 0.9)


class Overloaded(RuntimeError):
    """So much waits for the model already that one more would only wait in vain."""


class ModelError(RuntimeError):
    """The model raised, or answered with what is no length."""


@dataclass(slots=True)
class _Waiting:
    prompt: str
    model: str | None
    answer: Future = field(default_factory=Future)


class Batcher:
    """Answers ``submit(prompt, model)`` with a future of ``(p50, p90)`` in tokens, from one thread.

    Whatever waits when the model is free goes to it together, at most ``max_batch`` prompts, after waiting up
    to ``max_wait_s`` for the batch to fill; 0 takes what is there. A future cancelled before its batch starts
    costs nothing. Where a batch makes the model raise, its prompts are run one by one, so that a bad one
    fails alone. Beyond ``max_waiting`` prompts ``submit`` raises Overloaded.

    ``estimator`` has ``predict_quantiles(prompts, quantiles, models=None)``, float64 (n, 2), and ``models_`` where it
    tells serving models apart. ``on_batch`` is called with (prompts, seconds) after each batch. ``close`` ends the
    thread; what still waits is cancelled.
    """

    def __init__(
        self,
        estimator,
        *,
        max_batch: int = 32,
        max_wait_s: float = 0.0,
        max_waiting: int = 1024,
        on_batch: Callable[[int, float], None] | None = None,
    ) -> None:
        for name, value in (("max_batch", max_batch), ("max_waiting", max_waiting)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name}={value!r} should be a whole number >= 1")
        if not (isinstance(max_wait_s, (int, float)) and 0 <= max_wait_s <= 60):
            raise InputError(f"max_wait_s={max_wait_s!r} should be a number of seconds from 0 to 60")
        self.estimator, self.max_batch, self.max_wait_s = estimator, max_batch, max_wait_s
        self.max_waiting, self.on_batch = max_waiting, on_batch
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._closed, self._began_s = False, None
        self._thread = threading.Thread(target=self._run, name="length model", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Prompts that wait for a batch, those given up among them."""
        return self._queue.qsize()

    @property
    def busy_s(self) -> float:
        """How long the batch in the model has been there; 0 where there is none."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def submit(self, prompt: str, model: str | None = None) -> Future:
        """The future of ``(p50, p90)``; cancel it once nobody waits.

        Raises InputError for a serving model that the length model does not know, or none where it knows several;
        Overloaded; RuntimeError once closed.
        """
        if self._closed:
            raise RuntimeError("this batcher is closed")
        model = self._known(model)
        if self.waiting >= self.max_waiting:
            raise Overloaded(f"{self.max_waiting} prompts wait for the length model already")
        one = _Waiting(prompt, model)
        self._queue.put(one)
        return one.answer

    def _known(self, model: str | None) -> str | None:
        """The name to give to the estimator; None where names do not matter to it."""
        names = getattr(self.estimator, "models_", None)
        if not names:
            return None
        if model is None and len(names) == 1:
            return names[0]
        if model not in names:
            said = "none was given" if model is None else f"{model[:80]!r} is unknown to it"
            raise InputError(f"model: {said}; this length model knows {', '.join(names)}")
        return model

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread after the batch in the model, or leave it behind if that takes over ``timeout_s``."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(timeout_s)
        while True:
            try:
                one = self._queue.get_nowait()
            except queue.Empty:
                return
            if one is not None:
                one.answer.cancel()

    def _run(self) -> None:
        while not self._closed:
            batch = [one for one in self._next_batch() if one.answer.set_running_or_notify_cancel()]
            if not batch:
                continue
            self._began_s = began_s = time.monotonic()
            self._answer(batch)
            self._began_s = None
            if self.on_batch:
                self.on_batch(len(batch), time.monotonic() - began_s)

    def _next_batch(self) -> list[_Waiting]:
        batch, until_s = [], None
        while len(batch) < self.max_batch:
            try:
                if until_s is None:
                    one = self._queue.get()
                    until_s = time.monotonic() + self.max_wait_s
                else:
                    left_s = until_s - time.monotonic()
                    one = self._queue.get(timeout=left_s) if left_s > 0 else self._queue.get_nowait()
            except queue.Empty:
                break
            if one is None:
                break
            batch.append(one)
        return batch

    def _answer(self, batch: list[_Waiting]) -> None:
        try:
            answers = self._predict(batch)
        except Exception as error:
            if len(batch) > 1:
                for one in batch:
                    self._answer([one])
                return
            wrong = ModelError(f"the length model failed: {type(error).__name__}: {error}")
            answers = [wrong]
        for one, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception):
                one.answer.set_exception(answer)
            else:
                one.answer.set_result(answer)

    def _predict(self, batch: list[_Waiting]) -> list[tuple[float, float] | ModelError]:
        models = None if batch[0].model is None else [one.model for one in batch]
        quantiles = self.estimator.predict_quantiles(
            [clean(one.prompt) for one in batch],
            quantiles=QUANTILES,
            models=models,
        )
        rows = [tuple(map(float, row)) for row in quantiles]
        if len(rows) != len(batch) or any(len(row) != 2 for row in rows):
            raise ModelError(f"{len(rows)} rows for {len(batch)} prompts")
        return [row if _plausible(row) else ModelError(f"the length model answered {row}") for row in rows]


def _plausible(row: tuple[float, float]) -> bool:
    return all(math.isfinite(value) and 0 <= value <= MAX_TOKENS for value in row)
