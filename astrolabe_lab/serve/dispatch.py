"""A request's way to one engine and its answer's way back: bytes pass unchanged, the ledger is settled once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from astrolabe_lab.foresight import Foresight
from astrolabe_lab.request import Request

from .instance import Instance
from .ledger import InFlight
from .limits import Limits
from .live_view import LiveView
from .openai_api import Asked, Refusal
from .records import Records
from .stream import Watcher

log = logging.getLogger(__name__)
HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailers", "transfer-encoding",
     "upgrade", "content-length", "host", "content-encoding", "accept-encoding", "expect")
)  # fmt: skip
OURS = frozenset(("authorization", "x-slo-class", "x-predicted-tokens", "x-request-id"))
NOT_SENT_ON = HOP_BY_HOP | OURS | {"content-type"}  # the body is written anew, in UTF-8
END_S = 1.0  # wall, from the end of a stream to that of its connection
ERROR_BYTES = 64 << 10  # of an engine's own error, passed on


@dataclass(slots=True)
class Decision:
    """One choice and what it was made from."""

    instance: Instance
    view: LiveView
    decided_s: float  # modelled
    seconds: float  # wall


@dataclass(slots=True)
class Unanswered:
    """A dispatch of which the client has seen nothing, so that another may be tried. ``reached``: the engine had the
    request, which may be what ended it; ``status, body, kind``: of the engine's own error, where it gave one."""

    reason: str
    reached: bool
    status: int | None = None
    body: bytes = b""
    kind: str = "application/json"


class EngineFault(Exception):
    """The engine failed, in a way that is no exception of the network."""


class ServerError(EngineFault):
    """It answered 5xx."""

    def __init__(self, status: int, body: bytes, kind: str):
        super().__init__(f"HTTP {status}: {body[:300].decode('utf-8', 'replace')}")
        self.status, self.body, self.kind = status, body, kind


class ClientGone(Exception):
    """The client has left, or does not read what it asked for."""


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

    async def __call__(
        self, http, asked: Asked, request: Request, decision: Decision
    ) -> web.StreamResponse | Unanswered:
        """Send it to the chosen instance and its answer to the client, who has seen nothing where it is Unanswered.

        However it ends, the ledger is settled and exactly one outcome recorded. Raises Refusal for an answer that is
        not streamed and takes too long: elsewhere it would again.
        """
        instance, watcher = decision.instance, Watcher(asked.stream)
        entry = instance.ledger.open(
            request.rid, request.prompt_tokens, request.predicted_tokens, decision.decided_s, asked.stream
        )
        if self.foresight is not None:
            self.foresight.observe_dispatch(entry.sent_s, request.prompt_tokens, request.predicted_tokens)
        answer = web.StreamResponse()
        status, reason = "aborted", "the client went away"
        wait_s = self.limits.first_byte_s if asked.stream else self.limits.whole_answer_s
        try:
            async with asyncio.timeout(self.wall_s(wait_s)) as patience:
                upstream = await self._send(http, asked, request, instance)
                try:
                    await self._pass_on(upstream, http, answer, watcher, request, decision, entry, patience)
                finally:
                    upstream.close()
            status, reason = watcher.verdict(answer.status)
            if status == "failed":
                self._blame(instance)
            else:  # an engine that refuses is well
                instance.breaker.succeeded()
            if status == "ok":
                self._learn(asked, request, decision, watcher, entry)
            return answer
        except (ClientGone, asyncio.CancelledError) as gone:
            if watcher.delivered:  # who leaves with the last token has had an answer
                status, reason = watcher.verdict(answer.status)
                instance.breaker.succeeded()
            else:
                reason = str(gone) or reason
            raise asyncio.CancelledError() from None
        except (aiohttp.ClientError, TimeoutError, OSError, EngineFault) as error:
            if _has_left(http):
                raise asyncio.CancelledError() from None
            if patience.expired() and not asked.stream and not answer.prepared:
                status, reason = "failed", f"the answer was not whole after {wait_s:g} s"
                raise Refusal(504, f"{reason}; ask for fewer tokens, or stream it", "timeout_error") from None
            reason = f"{type(error).__name__}: {error}"
            self._blame(instance)
            if not answer.prepared:
                status = "retried"
                return unanswered(error, reason)
            status = "failed"
            await self._break_off(answer, reason)
            return answer
        except Exception as error:  # that nobody foresaw: the engine is not blamed for it
            status, reason = "failed", f"{type(error).__name__}: {error}"
            if not answer.prepared:
                raise
            log.exception("request %d", request.rid)
            await self._break_off(answer, reason)
            return answer
        finally:
            instance.settle(request.rid)
            self.records.outcome(request, instance.index, watcher, entry, status, reason)

    async def _send(self, http, asked: Asked, request: Request, instance: Instance) -> aiohttp.ClientResponse:
        body = asked.body
        if self.name_requests:
            given = body.get("vllm_xargs")
            extra = dict(given) if isinstance(given, dict) else {}
            extra |= {"rid": request.rid, "predicted_tokens": request.predicted_tokens}
            body = {**body, "vllm_xargs": extra}
        headers = {k: v for k, v in http.headers.items() if k.lower() not in NOT_SENT_ON}
        headers["X-Request-Id"] = str(request.rid)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.wall_s(self.limits.connect_s))
        return await self.session.post(
            instance.url + asked.path, json=body, headers=headers, timeout=timeout, allow_redirects=False
        )

    async def _pass_on(
        self, upstream, http, answer, watcher: Watcher, request, decision: Decision, entry: InFlight, patience
    ) -> None:
        """The engine's answer to the client. The head leaves with the first line of a stream: an engine that says 200
        and then nothing, or something else, can still be passed over. An answer that is not streamed leaves whole."""
        await check_status(upstream)
        loop = asyncio.get_running_loop()
        between_s, writing_s = self.wall_s(self.limits.between_bytes_s), self.wall_s(self.limits.write_s)
        if not (watcher.stream and upstream.status == 200):
            whole = await read_whole(upstream, self.limits.answer_bytes)
            watcher.feed(whole)
            watcher.end()
            if upstream.status == 200:
                _check_error(watcher)
                if watcher.error is None and not watcher.complete:
                    raise EngineFault("the answer is no completion")
            answer.content_length = len(whole)
            patience.reschedule(loop.time() + writing_s)
            await self._write(http, answer, whole, upstream, request, decision, patience)
            return await answer.write_eof()
        held = bytearray()
        while not watcher.complete and (chunk := await upstream.content.readany()):
            if watcher.feed(chunk):
                decision.instance.ledger.progress(entry, watcher.tokens, self.now_s())
            if not answer.prepared:
                _check_error(watcher)
                held += chunk
            if max(watcher.unread, len(held)) > self.limits.line_bytes:
                raise EngineFault(f"a line of its stream is longer than {self.limits.line_bytes} bytes")
            if held:
                if not watcher.begun:
                    continue
                decision.instance.breaker.answers()
                chunk, held = held, bytearray()
            patience.reschedule(loop.time() + writing_s)
            await self._write(http, answer, chunk, upstream, request, decision, patience)
            patience.reschedule(loop.time() + between_s)
        if not watcher.complete:
            raise EngineFault("the stream ended before its answer did")
        watcher.delivered = True
        patience.reschedule(loop.time() + END_S + writing_s)
        await _to_its_end(upstream)
        await answer.write_eof()

    async def _write(self, http, answer, chunk: bytes, upstream, request, decision, patience) -> None:
        try:
            if not answer.prepared:
                answer.set_status(upstream.status)
                answer.headers.update(self._headers(upstream, request, decision))
                await answer.prepare(http)
            await answer.write(chunk)
        except asyncio.CancelledError:
            if patience.expired():  # it is the client that was waited for
                if http.transport is not None:
                    http.transport.abort()
                raise ClientGone("the client did not read its answer") from None
            raise
        except (ConnectionResetError, aiohttp.ClientConnectionResetError):
            raise ClientGone("the client went away") from None

    def _blame(self, instance: Instance) -> None:
        instance.breaker.failed(self.now_s())
        self.records.counters.upstream_errors += 1

    def _learn(self, asked: Asked, request: Request, decision: Decision, watcher: Watcher, entry: InFlight) -> None:
        if watcher.prompt_tokens:
            self.count_tokens.learn(asked, request.prompt_tokens, watcher.prompt_tokens)
        found = decision.view.predictions.get(decision.instance.index)
        if self.foresight is not None and entry.first_token_s is not None and found is not None and found.basis:
            e2e_s = self.now_s() - request.arrived_s
            self.foresight.observe_outcome(found, entry.first_token_s - request.arrived_s, e2e_s)

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

    async def _break_off(self, answer: web.StreamResponse, reason: str) -> None:
        """The engine ended in the middle of a stream: tell the client, who has part of it already."""
        refusal = Refusal(502, f"the engine ended before its answer did ({reason})", "upstream_error", "engine_ended")
        with contextlib.suppress(ConnectionResetError, OSError, RuntimeError):
            await answer.write(b"data: " + refusal.body() + b"\n\n")
            await answer.write_eof()

    def wall_s(self, modelled_s: float) -> float:
        return modelled_s * self.time_scale


async def check_status(upstream: aiohttp.ClientResponse) -> None:
    """Raise EngineFault for an answer that no engine should give: it answers with 200, or refuses with 4xx."""
    if upstream.status >= 500:
        raise ServerError(upstream.status, await upstream.content.read(ERROR_BYTES), upstream.content_type)
    if upstream.status < 400 and upstream.status != 200:
        raise EngineFault(f"HTTP {upstream.status}")


async def read_whole(upstream: aiohttp.ClientResponse, most: int) -> bytearray:
    """The answer's bytes. Raises EngineFault beyond ``most``."""
    whole = bytearray()
    while chunk := await upstream.content.readany():
        whole += chunk
        if len(whole) > most:
            raise EngineFault(f"its answer is larger than {most} bytes")
    return whole


async def _to_its_end(upstream: aiohttp.ClientResponse) -> None:
    """A moment for the connection to be free for another request; it is closed otherwise."""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(END_S):
            while await upstream.content.readany():
                pass


def _check_error(watcher: Watcher) -> None:
    if watcher.error is not None and (watcher.error[1] or 500) >= 500:
        raise EngineFault(f"it answered with an error: {watcher.error[0]}")


def unanswered(error: Exception, reason: str) -> Unanswered:
    """What a dispatch that failed before the client has seen anything leaves to the next."""
    if isinstance(error, ServerError):
        return Unanswered(reason, True, error.status, error.body, error.kind)
    return Unanswered(reason, not isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)))


def _has_left(http) -> bool:
    return http.transport is None or http.transport.is_closing()
