"""How many tokens a request's prompt has, before any engine has counted it.

Exact, by the served model's tokenizer after its chat template (in a thread); or a ratio of bytes to tokens, learned
from what the engines' ``usage`` says. Both keep their error.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from astrolabe_lab.errors import InputError

from .openai_api import Asked

BYTES_PER_TOKEN = 4.0  # until the first answers have said


class ByTokenizer:
    """Counts with the tokenizer of a model folder. ``seconds``: spent so far, of ``counted`` requests."""

    def __init__(self, folder: str | Path):
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise InputError("counting with the served tokenizer needs transformers; it comes with vLLM") from None
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise InputError(f"tokenizer {str(folder)!r} cannot be loaded: {error}") from None
        self.seconds = 0.0
        self.counted = 0
        self.error = Error()
        self.by_bytes = ByBytes()  # counts beside it, so that the errors of both are known

    async def __call__(self, asked: Asked) -> tuple[int, str]:
        if asked.prompt_ids is not None:
            return asked.prompt_ids, "ids"
        return await asyncio.to_thread(self._count, asked), "tokenizer"

    def _count(self, asked: Asked) -> int:
        started = time.perf_counter()
        if asked.messages is None:
            n = len(self._tokenizer.encode(asked.text))
        else:
            n = len(self._tokenizer.encode(self._chat(asked.messages), add_special_tokens=False))
        self.seconds += time.perf_counter() - started
        self.counted += 1
        return n

    def _chat(self, messages: list) -> str:
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception:  # a template raises what it likes; the engine will say what is wrong with the messages
            return "\n".join(str(message.get("content", "")) for message in messages)

    def learn(self, asked: Asked, counted: int, prompt_tokens: int) -> None:
        """An engine has counted ``prompt_tokens`` where this said ``counted``."""
        if asked.prompt_ids is None:
            self.error.add(counted, prompt_tokens)
            self.by_bytes.learn(asked, self.by_bytes.count(asked), prompt_tokens)

    def errors(self) -> dict[str, Error]:
        """By way of counting."""
        return {"tokenizer": self.error, **self.by_bytes.errors()}


class ByBytes:
    """Counts ``bytes / ratio``; ``learn`` moves the ratio towards what the engines counted."""

    def __init__(self, bytes_per_token: float = BYTES_PER_TOKEN, weight: float = 0.05):
        self.bytes_per_token = bytes_per_token
        self.error = Error()
        self._weight = weight

    async def __call__(self, asked: Asked) -> tuple[int, str]:
        if asked.prompt_ids is not None:
            return asked.prompt_ids, "ids"
        return self.count(asked), "bytes"

    def count(self, asked: Asked) -> int:
        return max(1, round(_bytes(asked) / self.bytes_per_token))

    def errors(self) -> dict[str, Error]:
        """By way of counting."""
        return {"bytes": self.error}

    def learn(self, asked: Asked, counted: int, prompt_tokens: int) -> None:
        """An engine has counted ``prompt_tokens`` where this said ``counted``."""
        if prompt_tokens > 0 and asked.prompt_ids is None:
            self.error.add(counted, prompt_tokens)
            seen = _bytes(asked) / prompt_tokens
            self.bytes_per_token += self._weight * (seen - self.bytes_per_token)


class Error:
    """Relative error of counts: ``n`` of them, mean absolute and signed, as shares of the true count."""

    def __init__(self):
        self.n = 0
        self._absolute = self._signed = 0.0

    def add(self, counted: int, truth: int) -> None:
        if truth > 0:
            self.n += 1
            self._absolute += abs(counted - truth) / truth
            self._signed += (counted - truth) / truth

    @property
    def absolute(self) -> float:
        return self._absolute / self.n if self.n else 0.0

    @property
    def signed(self) -> float:
        return self._signed / self.n if self.n else 0.0


def _bytes(asked: Asked) -> int:
    return len(asked.text.encode("utf-8", "surrogatepass"))
