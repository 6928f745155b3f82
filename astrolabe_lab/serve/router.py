"""The router: OpenAI-compatible HTTP in, the same out of one of its engines, chosen by a policy.

The way of a request is the simulator's: arrive, tag, choose, dispatch, first token, finish, record.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from astrolabe_lab.errors import InputError
from astrolabe_lab.foresight import Foresight
from astrolabe_lab.request import Request
from astrolabe_lab.rng import stream as random_stream
from astrolabe_lab.serve.counters import Counters
from astrolabe_lab.serve.instance import Instance
from astrolabe_lab.serve.journal import Journal
from astrolabe_lab.serve.live_view import LiveView
from astrolabe_lab.serve.openai_api import PATHS, Asked, Refusal, parse
from astrolabe_lab.serve.remote import RemotePredictors
from astrolabe_lab.serve.stream import Watcher
from astrolabe_lab.sim.view import check_choice

HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailers", "transfer-encoding",
     "upgrade", "content-length", "host", "content-encoding", "accept-encoding", "expect")
)  # fmt: skip
OURS = frozenset(("authorization", "x-slo-class", "x-predicted-tokens", "x-request-id"))


@dataclass(frozen=True)
class Limits:
    """What bounds a router. Times in modelled s, sizes in bytes; ``in_flight``: requests in all."""

    in_flight: int = 4096
    body_bytes: int = 8 << 20
    connect_s: float = 3.0
    first_byte_s: float = 300.0
    between_bytes_s: float = 300.0
    tries: int = 3
    predict_s: float = 0.25
    probe_s: float = 2.0
    drain_s: float = 30.0


@dataclass(slots=True)
class Decision:
    """One choice and what it was made from."""

    instance: Instance
    view: LiveView
    seconds: float  # wall


@dataclass
class Router:
    """Dispatches requests to ``instances`` by ``policy``.

    ``models``: the names it answers to; ``lengths``: ``async (Asked) -> (predicted_tokens, source)``;
    ``count_tokens``: ``async (Asked) -> (prompt_tokens, source)``; ``time_scale``: wall s per modelled s. Stateless
    but for its own ledger and counters: several routers may serve one cluster.
    """

    instances: list[Instance]
    policy: object
    policy_name: str
    models: list[str]
    count_tokens: object
    lengths: object
    time_scale: float = 1.0
    limits: Limits = field(default_factory=Limits)
    journal: Journal | None = None
    api_key: str | None = None
    seed: int = 0
    keep_prompts: bool = False  # in the journal, so that a length model can be trained anew from it
    name_requests: bool = True  # tell the engines rid and predicted length in vllm_xargs
    ask: RemotePredictors | None = None  # None: the instances' own Predictors, in this process
    foresight: Foresight | None = None  # the one that the Predictors in this process were given
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self):
        if not self.instances:
            raise InputError("a router needs at least one engine")
        self._next_rid = int(time.time() * 1e3) << 20
        self._rng = random_stream(self.seed, "policy")
        self._session: aiohttp.ClientSession | None = None
        self._draining = False
        self._in_flight = 0

    def now_s(self) -> float:
        """Modelled seconds of the host's monotonic clock, which the engines' statuses use too."""
        return time.monotonic() / self.time_scale

    def warm_up(self) -> None:
        """Compile what decisions need, before the first request would wait for it."""
        request = Request(-1, self.now_s(), 16, 16)
        view = LiveView(self.instances, request.arrived_s)
        for instance, status in zip(self.instances, view.statuses, strict=True):
            if instance.predictor is not None:
                instance.predict(status, request, "e2e_s", view.now_s)

    # the application

    def application(self) -> web.Application:
        app = web.Application(client_max_size=self.limits.body_bytes, handler_args={"access_log": None})
        for path in PATHS:
            app.router.add_post(path, self.serve)
        app.router.add_get("/v1/models", self.list_models)
        app.router.add_get("/healthz", self.healthz)
        app.router.add_get("/health", self.healthz)
        app.router.add_get("/metrics", self.metrics)
        app.cleanup_ctx.append(self._running)
        app.on_shutdown.append(self._drain)
        return app

    async def _running(self, app):
        connector = aiohttp.TCPConnector(limit=0, force_close=False, keepalive_timeout=30)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        if self.ask is not None:
            await self.ask.open()
        probing = asyncio.create_task(self._probe())
        yield
        probing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await probing
        await self._session.close()
        if self.ask is not None:
            await self.ask.close()
        if hasattr(self.lengths, "close"):
            await self.lengths.close()
        if self.journal is not None:
            await asyncio.to_thread(self.journal.close)

    async def _drain(self, app) -> None:
        self._draining = True
        deadline = time.monotonic() + self.limits.drain_s
        while self._in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    # the data path

    async def serve(self, http: web.Request) -> web.StreamResponse:
        """One request, from its arrival to its row in the journal."""
        arrived_s = self.now_s()
        self._next_rid += 1
        rid = self._next_rid
        try:
            self._admit(http)
        except Refusal as refusal:
            return self._refuse(refusal, rid, arrived_s)
        self._in_flight += 1
        try:
            return await self._serve(http, rid, arrived_s)
        except Refusal as refusal:
            return self._refuse(refusal, rid, arrived_s)
        finally:
            self._in_flight -= 1

    async def _serve(self, http: web.Request, rid: int, arrived_s: float) -> web.StreamResponse:
        asked = parse(http.path, await self._body(http), http.headers, self.models)
        (prompt_tokens, counted), (predicted, tagged) = await asyncio.gather(
            self.count_tokens(asked), self.lengths(asked)
        )
        self.counters.lengths[tagged] += 1
        request = Request(rid, arrived_s, max(prompt_tokens, 1), predicted, asked.slo)
        tried: set[int] = set()
        for attempt in range(self.limits.tries):
            decision = await self._choose(request, tried)
            self._record_decision(asked, request, decision, attempt, counted, tagged)
            outcome = await self._dispatch(http, asked, request, decision)
            if outcome is not None:
                return outcome
            tried.add(decision.instance.index)
            self.counters.retries += 1
        raise Refusal(502, f"no engine answered in {self.limits.tries} tries; try again", "upstream_error")

    def _admit(self, http: web.Request) -> None:
        check_key(self.api_key, http.headers.get("authorization"))
        if self._draining:
            raise Refusal(503, "the router is shutting down", "unavailable", headers={"Retry-After": "1"})
        if self._in_flight >= self.limits.in_flight:
            self.counters.throttled += 1
            raise Refusal(
                429, f"the router has {self._in_flight} requests in flight, its bound; try again in a moment",
                "rate_limit_exceeded", "queue_full", {"Retry-After": "1"},
            )  # fmt: skip

    async def _body(self, http: web.Request) -> bytes:
        try:
            return await asyncio.wait_for(http.read(), self.limits.connect_s * 10 * self.time_scale)
        except web.HTTPRequestEntityTooLarge:
            raise Refusal(413, f"the body is larger than {self.limits.body_bytes} bytes") from None
        except TimeoutError:
            raise Refusal(408, "the body did not arrive in time") from None

    async def _choose(self, request: Request, tried: set[int]) -> Decision:
        started = time.perf_counter()
        now_s = self.now_s()
        available = [i for i in self.instances if i.index not in tried and i.available(now_s)]
        if not available and tried:
            raise Refusal(
                502, f"{len(tried)} engines were tried and none answered; try again", "upstream_error",
                headers={"Retry-After": "1"},
            )  # fmt: skip
        if not available:
            raise Refusal(
                503, f"none of the {len(self.instances)} engines is available; try again in a moment", "unavailable",
                headers={"Retry-After": "1"},
            )  # fmt: skip
        view = LiveView(available, now_s, self.ask)
        if self.ask is None:
            chosen = self.policy.choose(request, view, self._rng)
        else:  # in a thread, which may wait for the sidecars; with draws of its own, as decisions overlap
            own = random_stream(self.seed, f"policy {request.rid}")
            chosen = await asyncio.to_thread(self.policy.choose, request, view, own)
        index = check_choice(chosen, len(view), self.policy_name)
        instance = available[index]
        instance.breaker.sent(now_s)
        return Decision(instance, view, time.perf_counter() - started)

    async def _dispatch(self, http, asked: Asked, request: Request, decision: Decision) -> web.StreamResponse | None:
        """Send it to the chosen instance and its answer to the client. None: nothing came back yet, try another."""
        instance = decision.instance
        entry = instance.ledger.open(request.rid, request.prompt_tokens, request.predicted_tokens, self.now_s())
        if self.foresight is not None:
            self.foresight.observe_dispatch(entry.sent_s, request.prompt_tokens, request.predicted_tokens)
        watcher = Watcher(asked.stream)
        row = {"instance": instance.index, "dispatched_s": entry.sent_s}
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
                    upstream.content.readany(), self._wall(self.limits.between_bytes_s)
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
                self._record_outcome(request, row, watcher, entry, "aborted", "the client went away")
                raise asyncio.CancelledError() from None
            instance.breaker.failed(self.now_s())
            self.counters.upstream_errors += 1
            reason = f"{type(error).__name__}: {error}"
            if answer is None or not answer.prepared:
                self._record_outcome(request, row, watcher, entry, "retried", reason)
                return None
            self._record_outcome(request, row, watcher, entry, "failed", reason)
            await self._break_off(answer, asked, reason)
            return answer
        except (asyncio.CancelledError, ConnectionResetError):
            self._record_outcome(request, row, watcher, entry, "aborted", "the client went away")
            raise
        finally:
            instance.ledger.close(request.rid)
        ok = answer.status < 400 and watcher.complete
        if watcher.prompt_tokens and hasattr(self.count_tokens, "learn"):
            self.count_tokens.learn(asked, request.prompt_tokens, watcher.prompt_tokens)
        status = "ok" if ok else "rejected" if answer.status < 500 and answer.status >= 400 else "failed"
        self._record_outcome(request, row, watcher, entry, status, "" if ok else f"HTTP {answer.status}")
        if ok and self.foresight is not None and entry.first_token_s is not None:
            found = decision.view.predictions.get(instance.index)
            if found is not None and found.basis:
                e2e_s = self.now_s() - request.arrived_s
                self.foresight.observe_outcome(found, entry.first_token_s - request.arrived_s, e2e_s)
        return answer

    async def _send(self, http, asked: Asked, request: Request, instance: Instance) -> aiohttp.ClientResponse:
        body = asked.body
        if self.name_requests:
            extra = dict(body.get("vllm_xargs") or {})
            extra |= {"rid": request.rid, "predicted_tokens": request.predicted_tokens}
            body = {**body, "vllm_xargs": extra}
        headers = {k: v for k, v in http.headers.items() if k.lower() not in HOP_BY_HOP | OURS}
        headers["X-Request-Id"] = str(request.rid)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._wall(self.limits.connect_s))
        return await asyncio.wait_for(
            self._session.post(instance.url + asked.path, json=body, headers=headers, timeout=timeout),
            self._wall(self.limits.first_byte_s),
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

    def _wall(self, modelled_s: float) -> float:
        return modelled_s * self.time_scale

    # records

    def _record_decision(
        self, asked: Asked, request: Request, decision: Decision, attempt: int, counted: str, tagged: str
    ) -> None:
        self.counters.decided(decision.seconds, decision.view.late)
        if self.journal is None:
            return
        view = decision.view
        self.journal.write(
            {
                "event": "decision",
                "rid": request.rid,
                "time_s": view.now_s,
                "arrived_s": request.arrived_s,
                "attempt": attempt,
                "model": asked.model,
                **({"prompt": asked.text} if self.keep_prompts else {}),
                "prompt_tokens": request.prompt_tokens,
                "prompt_tokens_from": counted,
                "predicted_tokens": request.predicted_tokens,
                "predicted_tokens_from": tagged,
                "slo": request.slo,
                "policy": self.policy_name,
                "signals": [dict(zip(view.signals.dtype.names, record.item(), strict=True)) for record in view.signals],
                "status_from": view.sources,
                "predicted_e2e_s": {str(i): seconds for i, seconds in view.predicted_e2e_s.items()},
                "late": view.late,
                "instance": decision.instance.index,
                "decision_s": decision.seconds,
            }
        )

    def _record_outcome(self, request: Request, row: dict, watcher: Watcher, entry, status: str, reason: str) -> None:
        now_s = self.now_s()
        self.counters.ended(status)
        if self.journal is not None:
            first = entry.first_token_s
            self.journal.write(
                {
                    "event": "outcome",
                    "rid": request.rid,
                    "time_s": now_s,
                    "arrived_s": request.arrived_s,
                    **row,
                    "status": status,
                    "reason": reason,
                    "first_token_s": first,
                    "ttft_s": None if first is None else first - request.arrived_s,
                    "e2e_s": now_s - request.arrived_s,
                    "output_tokens": watcher.counted or watcher.tokens,
                    "prompt_tokens": watcher.prompt_tokens,
                    "finish_reason": watcher.finish_reason,
                }
            )

    def _refuse(self, refusal: Refusal, rid: int, arrived_s: float) -> web.Response:
        self.counters.ended("refused")
        if self.journal is not None:
            self.journal.write(
                {
                    "event": "outcome", "rid": rid, "time_s": self.now_s(), "arrived_s": arrived_s,
                    "status": "rejected" if refusal.status < 500 else "failed", "instance": None,
                    "reason": f"HTTP {refusal.status}: {refusal.message}", "output_tokens": 0,
                }
            )  # fmt: skip
        headers = {"X-Request-Id": str(rid), **refusal.headers}
        return web.Response(
            status=refusal.status, body=refusal.body(), content_type="application/json", headers=headers
        )

    # beside the data path

    async def _probe(self) -> None:
        """Ask every engine for its health, for ever."""
        while True:
            await asyncio.gather(*(self._probe_one(instance) for instance in self.instances))
            await asyncio.sleep(self._wall(self.limits.probe_s))

    async def _probe_one(self, instance: Instance) -> None:
        timeout = aiohttp.ClientTimeout(total=max(1.0, self._wall(self.limits.probe_s)))
        try:
            async with self._session.get(instance.url + "/health", timeout=timeout) as answer:
                ok = answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            ok = False
        instance.health.probed(ok)

    async def list_models(self, http: web.Request) -> web.Response:
        try:
            check_key(self.api_key, http.headers.get("authorization"))
        except Refusal as refusal:
            return web.Response(status=refusal.status, body=refusal.body(), content_type="application/json")
        longest = min(instance.engine.max_model_len for instance in self.instances)
        entries = [
            {"id": m, "object": "model", "created": 0, "owned_by": "astrolabe", "max_model_len": longest}
            for m in self.models
        ]
        return web.json_response({"object": "list", "data": entries})

    async def healthz(self, http: web.Request) -> web.Response:
        now_s = self.now_s()
        available = sum(instance.available(now_s) for instance in self.instances)
        ok = available > 0 and not self._draining
        return web.json_response(
            {"ok": ok, "available": available, "engines": len(self.instances)}, status=200 if ok else 503
        )

    async def metrics(self, http: web.Request) -> web.Response:
        return web.Response(body=self.counters.exposition(self), content_type="text/plain")


def check_key(key: str | None, authorization: str | None) -> None:
    """Raise Refusal unless ``authorization`` carries the key (where one is asked for)."""
    import hmac

    if key is None:
        return
    given = (authorization or "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key.encode()):
        raise Refusal(401, "the API key is missing or wrong: send Authorization: Bearer KEY", "authentication_error")
