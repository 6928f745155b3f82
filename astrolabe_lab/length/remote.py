"""The router's side of a tagging service: ask beside the request, and go on without an answer."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

from astrolabe_lab.errors import InputError
from astrolabe_lab.length.breaker import Breaker
from astrolabe_lab.length.tagging import MAX_ANSWER_TOKENS, Tag, check_deadline, check_fallback, model_tag
from astrolabe_lab.urls import url_of

MAX_ANSWER_BYTES = 65_536


class RemoteTagger:
    """Tags prompts by ``POST url/tag``, each within a deadline, counted from the call.

        async with RemoteTagger("http://127.0.0.1:8100", deadline_s=0.05, fallback=256) as tagger:
            tagging = asyncio.create_task(tagger.tag(prompt))   # beside whatever else the request needs
            ...
            tag = await tagging

    ``tag`` never raises for what the service does or does not: where its answer is late, missing, not JSON,
    no length or beyond ``max_tokens``, the tag is ``fallback`` with the reason, and ``counts`` says how often.
    After several failures in a row ``breaker`` keeps it from asking, so that a dead service costs nothing
    but a probe now and then. Use it in one event loop.
    """

    def __init__(
        self,
        url: str,
        deadline_s: float,
        fallback: int,
        *,
        max_tokens: int = MAX_ANSWER_TOKENS,
        breaker: Breaker | None = None,
    ) -> None:
        self.url = url_of(url, "url") + "/tag"
        self.deadline_s, self.fallback = check_deadline(deadline_s), check_fallback(fallback)
        self.max_tokens = check_fallback(max_tokens)
        self.breaker = breaker or Breaker()
        self._counts: Counter[str] = Counter()
        self._session = None

    @property
    def counts(self) -> dict[str, int]:
        """Tags so far: ``model``, and each reason for the constant that occurred."""
        return dict(self._counts)

    async def tag(self, prompt: str, model: str | None = None) -> Tag:
        """The tag of one prompt, answered by the served model ``model``. Raises InputError for a prompt that is no
        text, and CancelledError when its task is cancelled."""
        if not isinstance(prompt, str):
            raise InputError(f"prompt is {type(prompt).__name__}, should be text")
        tag, reason = None, "breaker"
        if self.breaker.ask():
            try:
                tag, reason = await self._ask(prompt, model)
            except BaseException:
                self.breaker.gave_up()
                raise
            if reason == "refused":
                self.breaker.gave_up()  # that is of the request, not of the service
            else:
                self.breaker.succeeded() if tag else self.breaker.failed()
        tag = tag or Tag(self.fallback, "constant", reason)
        self._counts[tag.reason or "model"] += 1
        return tag

    async def _ask(self, prompt: str, model: str | None) -> tuple[Tag | None, str]:
        """(the model's tag, "") or (None, why there is none)."""
        import aiohttp

        body = {"prompt": prompt} | ({} if model is None else {"model": model})
        try:
            async with asyncio.timeout(self.deadline_s):
                if self._session is None:
                    self._session = aiohttp.ClientSession(
                        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
                    )
                # ASCII: what an encoding refuses in a prompt travels as an escape
                data, headers = json.dumps(body).encode("ascii"), {"Content-Type": "application/json"}
                async with self._session.post(self.url, data=data, headers=headers) as response:
                    if response.status != 200:
                        return None, _refusal(response.status)
                    raw = await response.content.read(MAX_ANSWER_BYTES + 1)
                    while len(raw) <= MAX_ANSWER_BYTES and (more := await response.content.read(MAX_ANSWER_BYTES)):
                        raw += more
        except TimeoutError:
            return None, "late"
        except (aiohttp.ClientError, OSError, ValueError):
            return None, "unreachable"
        return self._read(raw)

    def _read(self, raw: bytes) -> tuple[Tag | None, str]:
        try:
            if len(raw) > MAX_ANSWER_BYTES:
                return None, "garbage"
            answer = json.loads(raw)
            if answer.get("late") or answer.get("source") == "constant":
                return None, "late"  # the service ran out of time itself and says so
            p50, p90 = answer["predicted_tokens"], answer.get("p90_tokens")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None, "garbage"
        tag = model_tag(p50, p90, self.max_tokens)
        return (tag, "") if tag else (None, "absurd")

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> RemoteTagger:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _refusal(status: int) -> str:
    if status in (429, 503):
        return "overloaded"
    return "refused" if 400 <= status < 500 else "failed"
