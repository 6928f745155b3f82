"""Reading an answer as it passes through: when its first token came, how many there were, how it ended.

Bytes are passed on unchanged; this only looks. A stream's first event can be empty (a chat's role) and is no token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")  # that a line of a stream can begin with
MOST = 2**31  # tokens that a usage can say


@dataclass
class Watcher:
    """Fed with the answer's bytes. ``tokens``: events that brought text (one token each, but under load vLLM may put
    several into one); ``counted``, ``prompt_tokens``: as the answer's usage says, where it has one; ``finish_reason``:
    the first one seen; ``error``: (message, code or None) of an error event in a stream, which vLLM ends as properly
    as any other; ``begun``: it is a stream indeed; ``complete``: it ended properly;
    ``delivered``: all of it has been written to the client."""

    stream: bool
    tokens: int = 0
    counted: int | None = None
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    error: tuple[str, int | None] | None = None
    begun: bool = False
    complete: bool = False
    delivered: bool = False
    _left: bytearray = field(default_factory=bytearray, repr=False)

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer, as its usage says, or as they were seen to pass."""
        return self.tokens if self.counted is None else self.counted

    @property
    def unread(self) -> int:
        """Bytes of a line that has not ended yet."""
        return len(self._left)

    def feed(self, chunk: bytes) -> int:
        """Take in bytes; returns how many new events brought text."""
        self._left += chunk
        if not self.stream or b"\n" not in chunk:
            return 0
        *lines, self._left = self._left.split(b"\n")
        new = 0
        for line in lines:
            self.begun = self.begun or line.startswith(FIELDS)
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self.complete = True
                continue
            new += self._event(_json(payload))
        self.tokens += new
        return new

    def end(self) -> None:
        """The answer's bytes are at their end."""
        if self.stream:
            return
        answer = _json(self._left)
        self._left.clear()
        self._event(answer)
        self.complete = _is_completion(answer)

    def verdict(self, status: int) -> tuple[str, str]:
        """(outcome, reason) of an answer with this HTTP ``status`` that is at its end: ok, rejected or failed."""
        if status >= 400:
            return "rejected" if status < 500 else "failed", f"HTTP {status}"
        if self.error is not None:
            message, code = self.error
            refused = code is not None and 400 <= code < 500
            return "rejected" if refused else "failed", f"error in the stream: {message}"
        if not self.complete:
            return "failed", "the answer broke off" if self.stream else "the answer is no completion"
        return "ok", ""

    def _event(self, event) -> int:
        if not isinstance(event, dict):
            return 0
        if event.get("error") is not None:
            self._fail(event["error"])
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.prompt_tokens = _count(usage, "prompt_tokens", self.prompt_tokens)
            self.counted = _count(usage, "completion_tokens", self.counted)
            if not self.stream and self.counted is not None:
                self.tokens = self.counted
        found = 0
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                continue
            self.finish_reason = self.finish_reason or choice.get("finish_reason")
            delta = choice.get("delta")
            delta = delta if isinstance(delta, dict) else {}
            if choice.get("text") or delta.get("content") or delta.get("reasoning") or delta.get("tool_calls"):
                found = 1
        return found

    def _fail(self, error) -> None:
        if self.error is None:
            raw = error if isinstance(error, dict) else {"message": error}
            code = raw.get("code")
            is_number = isinstance(code, int) and not isinstance(code, bool)
            self.error = (str(raw.get("message"))[:300], code if is_number else None)


def completion(body: bytes | bytearray) -> dict | None:
    """The completion that a whole answer is; None for anything else, such as an error."""
    answer = _json(body)
    return answer if _is_completion(answer) else None


def _is_completion(answer) -> bool:
    return isinstance(answer, dict) and isinstance(answer.get("choices"), list) and answer.get("error") is None


def _json(payload: bytes | bytearray):
    try:
        return json.loads(payload.decode())  # bytes would have their encoding guessed
    except (ValueError, RecursionError):
        return None


def _count(usage: dict, name: str, before: int | None) -> int | None:
    value = usage.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST else before
