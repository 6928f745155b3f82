"""Asking engines directly, beside the router: their gauges, one completion, an empty prefix cache."""

from __future__ import annotations

import asyncio
import json
import math
import re
from dataclasses import dataclass, field

LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
PREFIX = "vllm:"


@dataclass(frozen=True)
class Gauges:
    """What an engine's ``/metrics`` says: ``values`` by vLLM's name, without its prefix, summed over labels; ``cache``:
    the flags of its KV cache."""

    values: dict[str, float] = field(default_factory=dict)
    cache: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> Gauges:
        values: dict[str, float] = {}
        cache: dict[str, str] = {}
        for line in text.splitlines():
            if not line.startswith(PREFIX):
                continue
            name, labels, value = _parts(line)
            if name == "cache_config_info":
                cache = labels
            elif value is not None:
                values[name] = values.get(name, 0.0) + value
        return cls(values, cache)

    @property
    def unfinished(self) -> int:
        """Requests that run or wait."""
        return int(self.values.get("num_requests_running", 0) + self.values.get("num_requests_waiting", 0))

    @property
    def caches_prefixes(self) -> bool:
        return self.cache.get("enable_prefix_caching", "").lower() == "true"

    @property
    def block_size(self) -> int:
        told = self.cache.get("block_size", "")
        return int(told) if told.isdigit() else 16

    def value(self, name: str) -> float:
        return self.values.get(name, 0.0)


@dataclass(frozen=True)
class Asked:
    """An answer: its token ids (its text, where an engine tells none), its counts."""

    tokens: tuple
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str


class EngineTrouble(RuntimeError):
    """An engine that did not do what it was asked."""


@dataclass
class EngineClient:
    """One vLLM engine at ``url``; ``index``: its place among the engines."""

    session: object
    index: int
    url: str
    model: str
    timeout_s: float = 120.0

    async def gauges(self) -> Gauges:
        """Raises EngineTrouble where ``/metrics`` is not a vLLM engine's."""
        status, text = await self._ask("GET", "/metrics")
        found = Gauges.of(text) if status == 200 else Gauges()
        if not found.values:
            raise EngineTrouble(f"engine {self.index} at {self.url} shows no vLLM metrics (HTTP {status})")
        return found

    async def complete(self, prompt: list[int], **body) -> Asked:
        """The greedy answer to ``prompt``. Raises EngineTrouble."""
        asked = {"model": self.model, "prompt": prompt, "temperature": 0.0, "return_token_ids": True, **body}
        status, text = await self._ask("POST", "/v1/completions", asked)
        if status != 200:
            raise EngineTrouble(f"engine {self.index} answers HTTP {status}: {text[:200]}")
        try:
            answer = json.loads(text)
            choice, usage = answer["choices"][0], answer["usage"]
            tokens = tuple(choice.get("token_ids") or choice["text"])
            return Asked(tokens, usage["prompt_tokens"], usage["completion_tokens"], choice["finish_reason"])
        except (ValueError, LookupError, TypeError) as error:
            raise EngineTrouble(f"engine {self.index} answers no completion ({error!r}): {text[:200]}") from None

    async def reset_prefix_cache(self) -> str:
        """Empty when vLLM says that it did; else what it said."""
        status, text = await self._ask("POST", "/reset_prefix_cache")
        if status == 404:
            return "it has no /reset_prefix_cache: start it with VLLM_SERVER_DEV_MODE=1"
        if status != 200 or '"success":false' in text.replace(" ", ""):
            return f"HTTP {status}: {text[:100]}"
        return ""

    async def _ask(self, method: str, path: str, body: dict | None = None) -> tuple[int, str]:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        try:
            async with self.session.request(method, self.url + path, json=body, timeout=timeout) as answer:
                return answer.status, await answer.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineTrouble(f"engine {self.index} at {self.url}: {type(error).__name__}: {error}") from None


async def preemptions(urls: list[str]) -> float:
    """How often the engines at ``urls`` together have preempted since they started; NaN where one does not tell."""
    import aiohttp

    async with aiohttp.ClientSession() as session:
        clients = [EngineClient(session, i, url, "") for i, url in enumerate(urls)]
        try:
            told = await asyncio.gather(*(client.gauges() for client in clients))
        except EngineTrouble:
            return math.nan
    return sum(gauges.values.get("num_preemptions_total", math.nan) for gauges in told) if told else math.nan


def _parts(line: str) -> tuple[str, dict[str, str], float | None]:
    """Name without prefix, labels, value of a line of the Prometheus text format."""
    name, brace, rest = line[len(PREFIX) :].partition("{")
    labels, _, value = rest.rpartition("}") if brace else ("", "", "")
    if not brace:
        name, _, value = name.partition(" ")
    try:
        return name, dict(LABEL.findall(labels)), float(value.split()[0])
    except (ValueError, IndexError):
        return name, {}, None
