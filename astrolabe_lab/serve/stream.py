"""Reading an answer as it passes through: when its first token came, how many there were, how it ended.

Bytes are passed on unchanged; this only looks. A stream's first event can be empty (a chat's role) and is no token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass
class Watcher:
    """Fed with the answer's bytes. ``tokens``: events that brought text (one token each, but under load vLLM may put
    several into one); ``counted``, ``prompt_tokens``: as the answer's usage says, where it has one; ``finish_reason``:
    the last one seen; ``complete``: it ended properly."""

    stream: bool
    tokens: int = 0
    counted: int | None = None
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    complete: bool = False
    _left: bytes = b""

    def feed(self, chunk: bytes) -> int:
        """Take in bytes; returns how many new events brought text."""
        if not self.stream:
            self._left += chunk
            return 0
        lines = (self._left + chunk).split(b"\n")
        self._left = lines.pop()
        new = 0
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self.complete = True
                continue
            try:
                event = json.loads(payload)
            except ValueError:
                continue
            new += self._event(event)
        self.tokens += new
        return new

    def end(self) -> None:
        """The answer's bytes are at their end."""
        if self.stream:
            return
        try:
            answer = json.loads(self._left)
        except ValueError:
            return
        self._left = b""
        self._event(answer)
        self.complete = True

    def _event(self, event) -> int:
        if not isinstance(event, dict):
            return 0
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
            self.counted = usage.get("completion_tokens", self.counted)
            if not self.stream and isinstance(self.counted, int):
                self.tokens = self.counted
        found = 0
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            delta = choice.get("delta") or {}
            if choice.get("text") or delta.get("content") or delta.get("reasoning") or delta.get("tool_calls"):
                found = 1
        return found
