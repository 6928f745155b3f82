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
from astrolabe_lab.serve.dispatch import Decision, Dispatch
from astrolabe_lab.serve.instance import Instance
from astrolabe_lab.serve.journal import Journal
from astrolabe_lab.serve.limits import Limits
from astrolabe_lab.serve.live_view import LiveView
from astrolabe_lab.serve.openai_api import PATHS, Refusal, parse
from astrolabe_lab.serve.records import Records
from astrolabe_lab.serve.remote import RemotePredictors
from astrolabe_lab.sim.view import check_choice


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
    keep_prompts: bool = False  # in the journal, so that a length model can be trained anew from it
    api_key: str | None = None
    seed: int = 0
    source: str = "hardware"  # or emulated: the world that the engines are of
    name_requests: bool = True  # tell the engines rid and predicted length in vllm_xargs
    ask: RemotePredictors | None = None  # None: the instances' own Predictors, in this process
    foresight: Foresight | None = None  # the one that the Predictors in this process were given

    def __post_init__(self):
        if not self.instances:
            raise InputError("a router needs at least one engine")
        self._next_rid = int(time.time() * 1e3) << 20
        self._rng = random_stream(self.seed, "policy")
        self.records = Records(self.now_s, self.policy_name, self.journal, self.keep_prompts)
        self._dispatch: Dispatch | None = None
        self._draining = False
        self._in_flight = 0

    def now_s(self) -> float:
        """Modelled seconds of the host's monotonic clock, which the engines' statuses use too."""
        return time.monotonic() / self.time_scale

    @property
    def counters(self) -> Counters:
        return self.records.counters

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
        session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        self._dispatch = Dispatch(
            session, self.now_s, self.time_scale, self.limits, self.records, self.name_requests, self.count_tokens,
            self.foresight,
        )  # fmt: skip
        if self.ask is not None:
            await self.ask.open()
        probing = asyncio.create_task(self._probe(session))
        yield
        probing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await probing
        await session.close()
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
        self.records.counters.lengths[tagged] += 1
        request = Request(rid, arrived_s, max(prompt_tokens, 1), predicted, asked.slo)
        tried: set[int] = set()
        for attempt in range(self.limits.tries):
            decision = await self._choose(request, tried)
            self.records.decision(asked, request, decision, attempt, counted, tagged)
            outcome = await self._dispatch(http, asked, request, decision)
            if outcome is not None:
                return outcome
            tried.add(decision.instance.index)
            self.records.counters.retries += 1
        raise Refusal(502, f"no engine answered in {self.limits.tries} tries; try again", "upstream_error")

    def _admit(self, http: web.Request) -> None:
        check_key(self.api_key, http.headers.get("authorization"))
        if self._draining:
            raise Refusal(503, "the router is shutting down", "unavailable", headers={"Retry-After": "1"})
        if self._in_flight >= self.limits.in_flight:
            self.records.counters.throttled += 1
            raise Refusal(
                429, f"the router has {self._in_flight} requests in flight, its bound; try again in a moment",
                "rate_limit_exceeded", "queue_full", {"Retry-After": "1"},
            )  # fmt: skip

    async def _body(self, http: web.Request) -> bytes:
        try:
            return await asyncio.wait_for(http.read(), self.limits.body_s * self.time_scale)
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

    def _refuse(self, refusal: Refusal, rid: int, arrived_s: float) -> web.Response:
        self.records.refusal(refusal, rid, arrived_s)
        return _answer(refusal, {"X-Request-Id": str(rid)})

    # beside the data path

    async def _probe(self, session: aiohttp.ClientSession) -> None:
        """Ask every engine for its health, for ever."""
        while True:
            await asyncio.gather(*(self._probe_one(session, instance) for instance in self.instances))
            await asyncio.sleep(self.limits.probe_s * self.time_scale)

    async def _probe_one(self, session: aiohttp.ClientSession, instance: Instance) -> None:
        timeout = aiohttp.ClientTimeout(total=max(1.0, self.limits.probe_s * self.time_scale))
        try:
            async with session.get(instance.url + "/health", timeout=timeout) as answer:
                ok = answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            ok = False
        instance.health.probed(ok)

    async def list_models(self, http: web.Request) -> web.Response:
        try:
            check_key(self.api_key, http.headers.get("authorization"))
        except Refusal as refusal:
            return _answer(refusal)
        longest = min(instance.engine.max_model_len for instance in self.instances)
        entries = [
            {"id": m, "object": "model", "created": 0, "owned_by": "astrolabe", "max_model_len": longest}
            for m in self.models
        ]
        about = {"source": self.source, "time_scale": self.time_scale, "policy": self.policy_name, "seed": self.seed}
        return web.json_response({"object": "list", "data": entries, "astrolabe": about})

    async def healthz(self, http: web.Request) -> web.Response:
        now_s = self.now_s()
        available = sum(instance.available(now_s) for instance in self.instances)
        ok = available > 0 and not self._draining
        return web.json_response(
            {"ok": ok, "available": available, "engines": len(self.instances)}, status=200 if ok else 503
        )

    async def metrics(self, http: web.Request) -> web.Response:
        return web.Response(body=self.records.counters.exposition(self), content_type="text/plain")


def _answer(refusal: Refusal, headers: dict | None = None) -> web.Response:
    headers = {**(headers or {}), **refusal.headers}
    return web.Response(status=refusal.status, body=refusal.body(), content_type="application/json", headers=headers)


def check_key(key: str | None, authorization: str | None) -> None:
    """Raise Refusal unless ``authorization`` carries the key (where one is asked for)."""
    import hmac

    if key is None:
        return
    given = (authorization or "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key.encode()):
        raise Refusal(401, "the API key is missing or wrong: send Authorization: Bearer KEY", "authentication_error")
