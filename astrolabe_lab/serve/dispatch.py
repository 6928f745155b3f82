"""A request's way to one engine and its answer's way back: bytes pass unchanged, the ledger is settled once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from astrolabe_lab.foresight import Foresight
from astrolabe_lab.request import Request
from astrolabe_lab.serve.instance import Instance
from astrolabe_lab.serve.limits import Limits
from astrolabe_lab.serve.live_view import LiveView
from astrolabe_lab.serve.openai_api import Asked, Refusal
from astrolabe_lab.serve.records import Records
from astrolabe_lab.serve.stream import Watcher

HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailers", "transfer-encoding",
     "upgrade", "content-length", "host", "content-encoding", "accept-encoding", "expect")
)  # fmt: skip
OURS = frozenset(("authorization", "x-slo-class", "x-predicted-tokens", "x-request-id"))


@dataclass(slots=True)
class Decision:
    """One choice and what it was made from."""

    instance: Instance
    view: LiveView
    seconds: float  # wall


@dataclass
class Dispatch:
    """Dispatches by ``session``. ``now_s``: the modelled clock; ``name_requests``: tell the engines rid and predicted
    length (in ``vllm_xargs``); ``foresight``, ``count_tokens``: told what was dispatched and what came of it."""

    session: aiohttp.ClientSession
    now_s: Callable[[], float]
    time_scale: float
    limits: Limits
    records: Records
    name_requests: bool
    count_tokens: object
    foresight: Foresight | None = None

    async def __call__(self, http, asked: Asked, request: Request, decision: Decision) -> web.StreamResponse | None:
        """Send it to the chosen instance and its answer to the client. None: nothing came back yet, try another.

        However it ends, the ledger is settled and exactly one outcome recorded.
        """
        records = self.records
        instance = decision.instance
        entry = instance.ledger.open(request.rid, request.prompt_tokens, request.predicted_tokens, self.now_s())
        if self.foresight is not None:
            self.foresight.observe_dispatch(entry.sent_s, request.prompt_tokens, request.predicted_tokens)
        watcher = Watcher(asked.stream)
        answer = None
        try:
            upstream = await self._send(http, asked, request, instance)
            try:
                if upstream.status >= 500:
                    detail = (await upstream.content.read(2000)).decode("utf-8", "replace")
                    raise aiohttp.ClientError(f"HTTP {upstream.status}: {detail}")
                instance.breaker.succeeded()
                answer = web.StreamResponse(status=upstream.status, headers=self._headers(upstream, request, decision))
                answer.content_length = upstream.content_length if not asked.stream else None
                first = True
                while chunk := await asyncio.wait_for(
                    upstream.content.readany(), self.wall_s(self.limits.between_bytes_s)
                ):
                    if first:
                        await answer.prepare(http)
                        first = False
                    if watcher.feed(chunk) and entry.first_token_s is None:
                        entry.first_token_s = self.now_s()
                    entry.streamed = watcher.tokens
                    await answer.write(chunk)
                if first:
                    await answer.prepare(http)
                watcher.end()
                await answer.write_eof()
            finally:
                upstream.close()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if http.transport is None or http.transport.is_closing():
                records.outcome(request, instance.index, watcher, entry, "aborted", "the client went away")
                raise asyncio.CancelledError() from None
            instance.breaker.failed(self.now_s())
            records.counters.upstream_errors += 1
            reason = f"{type(error).__name__}: {error}"
            if answer is None or not answer.prepared:
                records.outcome(request, instance.index, watcher, entry, "retried", reason)
                return None
            records.outcome(request, instance.index, watcher, entry, "failed", reason)
            await self._break_off(answer, asked, reason)
            return answer
        except (asyncio.CancelledError, ConnectionResetError):
            records.outcome(request, instance.index, watcher, entry, "aborted", "the client went away")
            raise
        finally:
            instance.ledger.close(request.rid)
        ok = answer.status < 400 and watcher.complete
        status = "ok" if ok else "rejected" if answer.status < 500 and answer.status >= 400 else "failed"
        records.outcome(request, instance.index, watcher, entry, status, "" if ok else f"HTTP {answer.status}")
        if ok:
            self._learn(asked, request, decision, watcher, entry)
        return answer

    def _learn(self, asked: Asked, request: Request, decision: Decision, watcher: Watcher, entry) -> None:
        if watcher.prompt_tokens:
            self.count_tokens.learn(asked, request.prompt_tokens, watcher.prompt_tokens)
        found = decision.view.predictions.get(decision.instance.index)
        if self.foresight is not None and entry.first_token_s is not None and found is not None and found.basis:
            e2e_s = self.now_s() - request.arrived_s
            self.foresight.observe_outcome(found, entry.first_token_s - request.arrived_s, e2e_s)

    async def _send(self, http, asked: Asked, request: Request, instance: Instance) -> aiohttp.ClientResponse:
        body = asked.body
        if self.name_requests:
            extra = dict(body.get("vllm_xargs") or {})
            extra |= {"rid": request.rid, "predicted_tokens": request.predicted_tokens}
            body = {**body, "vllm_xargs": extra}
        headers = {k: v for k, v in http.headers.items() if k.lower() not in HOP_BY_HOP | OURS}
        headers["X-Request-Id"] = str(request.rid)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.wall_s(self.limits.connect_s))
        return await asyncio.wait_for(
            self.session.post(instance.url + asked.path, json=body, headers=headers, timeout=timeout),
            self.wall_s(self.limits.first_byte_s),
        )

    def _headers(self, upstream, request: Request, decision: Decision) -> dict:
        headers = {k: v for k, v in upstream.headers.items() if k.lower() not in HOP_BY_HOP}
        headers["X-Request-Id"] = str(request.rid)
        headers["X-Astrolabe-Instance"] = str(decision.instance.index)
        headers["X-Astrolabe-Decision-Ms"] = f"{decision.seconds * 1e3:.3f}"
        predicted = decision.view.predicted_e2e_s.get(decision.instance.index)
        if predicted is not None:
            headers["X-Astrolabe-Predicted-E2E-S"] = f"{predicted:.6f}"
        headers["X-Astrolabe-Predicted-Tokens"] = str(request.predicted_tokens)
        return headers

    async def _break_off(self, answer: web.StreamResponse, asked: Asked, reason: str) -> None:
        """The engine ended in the middle of an answer: tell the client, who has part of it already."""
        with contextlib.suppress(ConnectionResetError, OSError, RuntimeError):
            if asked.stream:
                refusal = Refusal(502, f"the engine ended before its answer did ({reason})", "upstream_error")
                await answer.write(b"data: " + refusal.body() + b"\n\n")
                await answer.write_eof()
            elif answer._req is not None and answer._req.transport is not None:
                answer._req.transport.close()

    def wall_s(self, modelled_s: float) -> float:
        return modelled_s * self.time_scale
