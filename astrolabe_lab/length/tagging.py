"""The predicted length of a request's answer: from the model in time, or the constant with the reason why."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

from astrolabe_lab.errors import InputError
from astrolabe_lab.length.batching import Batcher, ModelError, Overloaded
from astrolabe_lab.length.breaker import Breaker

MAX_ANSWER_TOKENS = 1_000_000
REASONS = ("late", "unreachable", "garbage", "absurd", "refused", "failed", "overloaded", "breaker")


@dataclass(frozen=True, slots=True)
class Tag:
    """What a router goes on with.

    ``predicted_tokens``: the expected length of the answer, >= 1. ``source``: ``model``, or ``constant`` where
    the model gave none, with ``reason`` one of REASONS. ``p90_tokens``: nine in ten answers are no longer, by
    the model's account; None for a constant.
    """

    predicted_tokens: int
    source: str
    reason: str = ""
    p90_tokens: int | None = None


def as_tokens(value: object, most: int = MAX_ANSWER_TOKENS) -> int | None:
    """``value`` as a length, a whole number of tokens from 1 to ``most``; None for what is none.

    Numbers round to the nearest; truth values, texts, NaN, infinities, and what is below 0.5 or above
    ``most`` are no lengths.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.5 <= value <= most:
        return None
    return max(1, round(value))


def model_tag(p50: object, p90: object = None, most: int = MAX_ANSWER_TOKENS) -> Tag | None:
    """The tag of a model's quantiles, the second optional; None where one that is given is no length."""
    predicted, p90_tokens = as_tokens(p50, most), as_tokens(p90, most)
    if predicted is None or (p90_tokens is None and p90 is not None):
        return None
    return Tag(predicted, "model", p90_tokens=p90_tokens and max(predicted, p90_tokens))


class Tagger:
    """Tags prompts with a length model in this process, each within a deadline.

        with Tagger(length.load("outputs/length"), deadline_s=0.05, fallback=256) as tagger:
            tagger.tag("List 8 facts about tea.")   # Tag(predicted_tokens=251, source='model', ...)

    ``estimator`` is a length model (``predict_quantiles``); ``fallback`` the constant for what it does not
    answer in ``deadline_s``, or answers wrongly. ``counts`` says how many tags came from the model and, by
    reason, from the constant. May be used from many threads: what they ask at once goes to the model
    together. An answer that comes late is dropped. While the model is behind by ``max_waiting`` prompts, or
    ``breaker`` is open because it was late or failed time after time, nothing waits for it.
    """

    def __init__(
        self,
        estimator,
        deadline_s: float,
        fallback: int,
        *,
        max_batch: int = 32,
        max_waiting: int = 1024,
        breaker: Breaker | None = None,
    ) -> None:
        self.deadline_s, self.fallback = check_deadline(deadline_s), check_fallback(fallback)
        self.breaker = breaker or Breaker()
        self._batcher = Batcher(estimator, max_batch=max_batch, max_waiting=max_waiting)
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def counts(self) -> dict[str, int]:
        """Tags so far: ``model``, and each reason for the constant that occurred."""
        with self._lock:
            return dict(self._counts)

    def tag(self, prompt: str, model: str | None = None) -> Tag:
        """The tag of one prompt (any text, also the empty one), whose answer ``model`` gives.

        Never raises for a slow or broken length model, only InputError for a prompt that is no text, or a serving
        model that the length model does not know.
        """
        answer = self._submit(prompt, model)
        if isinstance(answer, Tag):
            return answer
        try:
            return self._told(model_tag(*answer.result(self.deadline_s)), "absurd")
        except ModelError:
            return self._told(None, "failed")
        except (TimeoutError, CancelledError):
            answer.cancel()
            return self._told(None, "late")

    async def tag_async(self, prompt: str, model: str | None = None) -> Tag:
        """As ``tag``, for an event loop: it waits without blocking it. Raises CancelledError when cancelled."""
        answer = self._submit(prompt, model)
        if isinstance(answer, Tag):
            return answer
        try:
            quantiles = await asyncio.wait_for(asyncio.wrap_future(answer), self.deadline_s)
            return self._told(model_tag(*quantiles), "absurd")
        except ModelError:
            return self._told(None, "failed")
        except TimeoutError:
            return self._told(None, "late")
        except asyncio.CancelledError:
            self.breaker.gave_up()
            raise

    def _submit(self, prompt: str, model: str | None) -> Future | Tag:
        """The future of the model's quantiles, or the tag that stands already."""
        if not isinstance(prompt, str):
            raise InputError(f"prompt is {type(prompt).__name__}, should be text")
        if not self.breaker.ask():
            return self._counted(Tag(self.fallback, "constant", "breaker"))
        try:
            return self._batcher.submit(prompt, model)
        except Overloaded:
            return self._told(None, "overloaded")
        except BaseException:
            self.breaker.gave_up()
            raise

    def _told(self, tag: Tag | None, reason: str) -> Tag:
        """The model's tag, or the constant for this reason; the breaker takes note."""
        if tag is None:
            self.breaker.failed()
            return self._counted(Tag(self.fallback, "constant", reason))
        self.breaker.succeeded()
        return self._counted(tag)

    def _counted(self, tag: Tag) -> Tag:
        with self._lock:
            self._counts[tag.reason or "model"] += 1
        return tag

    def close(self) -> None:
        """End the model's thread; tags that wait become the constant."""
        self._batcher.close()

    def __enter__(self) -> Tagger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_deadline(deadline_s: float) -> float:
    """``deadline_s`` if it is a number of seconds above 0, at most 60; raises InputError."""
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, (int, float)) or not 0 < deadline_s <= 60:
        raise InputError(f"deadline_s={deadline_s!r} should be a number of seconds above 0, at most 60")
    return float(deadline_s)


def check_fallback(fallback: int) -> int:
    """``fallback`` as a length; raises InputError."""
    tokens = as_tokens(fallback.item() if hasattr(fallback, "item") else fallback)
    if tokens is None:
        raise InputError(f"fallback={fallback!r} should be a number of tokens from 1 to {MAX_ANSWER_TOKENS:,}")
    return tokens
