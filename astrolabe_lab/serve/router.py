"""The router: OpenAI-compatible HTTP in, the same out of one of its engines, chosen by a policy.

The way of a request is the simulator's: arrive, tag, choose, dispatch, first token, finish, record.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import secrets
import time
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from astrolabe_lab.errors import InputError
from astrolabe_lab.foresight import Foresight
from astrolabe_lab.prefix_record import PrefixRecord
from astrolabe_lab.request import Request
from astrolabe_lab.rng import stream as random_stream
from astrolabe_lab.sim.view import check_choice

from .answers import as_response, given_up, openai_errors
from .counters import Counters
from .dispatch import Decision, Dispatch, Unanswered
from .instance import Instance
from .journal import Journal
from .limits import Limits
from .live_view import LiveView
from .loop_lag import LoopLag
from .openai_api import PATHS, Asked, Refusal, parse
from .pages import Pages, check_key, read_body
from .prompt_prefix import BLOCK_TOKENS, prefix_blocks
from .records import Records
from .remote import RemotePredictors
from .watch import Watch

log = logging.getLogger(__name__)
ENGINE_KEEP_ALIVE_S = 3.0  # below uvicorn's 5 s, lest a request leaves on a connection that the engine is closing
AS_IT_IS = {"Accept-Encoding": "identity"}  # bytes pass unchanged to clients who may understand no compression


@dataclass
class Router:
    """Dispatches requests to ``instances`` by ``policy``.

    ``models``: the names it answers to; ``lengths``: ``async (Asked) -> (predicted_tokens, source)``;
    ``count_tokens``: ``async (Asked) -> (prompt_tokens, source)``; ``time_scale``: wall s per modelled s. Stateless
    but for its own ledger, counters and record of prefixes: several routers may serve one cluster.
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
        if hasattr(self.lengths, "check_models"):
            self.lengths.check_models(self.models)
        if self.ask is not None and getattr(self.policy, "foresight", "none") != "none":
            raise InputError(
                f"policy {self.policy_name!r}: sidecars predict without foresight; leave foresight or the sidecars out"
            )
        # Two routers over one cluster must not give one number twice, even if they started together.
        self._next_rid = (int(time.time() * 1e3) << 20) + secrets.randbits(20)
        self.records = Records(self.now_s, self.policy_name, self.journal, self.keep_prompts)
        self.prefixes = PrefixRecord(
            BLOCK_TOKENS, {i.index: i.engine.usable_blocks * i.engine.block_size for i in self.instances}
        )
        self.lag = LoopLag()
        self.in_flight = 0
        self.draining = False
        self._dispatch: Dispatch | None = None
        self.drift = None  # a calibrate.drift.DriftMonitor, where watch_drift was called
        self.records.begin(self)

    def now_s(self) -> float:
        """Modelled seconds of the host's monotonic clock, which the engines' statuses use too."""
        return time.monotonic() / self.time_scale

    def new_rid(self) -> int:
        """A number that no other request has."""
        self._next_rid += 1
        return self._next_rid

    @property
    def counters(self) -> Counters:
        return self.records.counters

    @property
    def about(self) -> dict:
        """What it tells its clients of itself."""
        return {"source": self.source, "time_scale": self.time_scale, "policy": self.policy_name, "seed": self.seed}

    def health(self, now_s: float) -> dict:
        """``ok``: whether it can serve a request now; how many engines are ``available``, of how many; ``note``: why it
        cannot, or cannot as usual."""
        available = sum(instance.available(now_s) for instance in self.instances)
        told = {"ok": available > 0 and not self.draining, "available": available, "engines": len(self.instances)}
        if not told["ok"]:
            told["note"] = "the router is shutting down" if self.draining else "no engine is available"
        return told

    def watch_drift(self, cost) -> None:
        """Compare the steps of all instances with the calibrated ``cost`` while it runs: gauges, an alarm."""
        from astrolabe_lab.calibrate.drift import DriftMonitor

        self.drift = DriftMonitor(self.instances, cost, self.now_s, self.time_scale, warn=log.warning)

    def warm_up(self) -> None:
        """Compile what decisions need, before the first request would wait for it. Raises InputError where the policy
        asks for predictions and nobody predicts."""
        request = Request(-1, self.now_s(), 16, 16)
        view = LiveView(self.instances, request.arrived_s, prefixes=self.prefixes)
        for instance, status in zip(self.instances, view.statuses, strict=True):
            if instance.predictor is not None:
                instance.predict(status, request, "e2e_s", view.now_s)
        if self.ask is None:  # a copy: what it remembers of this is nothing to go on
            copy.deepcopy(self.policy).choose(request, view, decision_stream(self.seed, request.rid, 0))

    # the application

    def application(self) -> web.Application:
        app = web.Application(
            client_max_size=self.limits.body_bytes, handler_args={"access_log": None}, middlewares=[openai_errors]
        )
        for path in PATHS:
            app.router.add_post(path, self.serve)
        Pages(self).add_to(app)
        app.cleanup_ctx.append(self._running)
        app.on_shutdown.append(self._drain)
        return app

    async def _running(self, app):
        async with contextlib.AsyncExitStack() as ends:  # each of them whatever becomes of the others
            if self.journal is not None:
                ends.push_async_callback(asyncio.to_thread, self.journal.close)
            if hasattr(self.lengths, "close"):
                ends.push_async_callback(self.lengths.close)
            if self.ask is not None:
                await self.ask.open()
                ends.push_async_callback(self.ask.close)
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=ENGINE_KEEP_ALIVE_S)
            session = aiohttp.ClientSession(connector=connector, auto_decompress=False, headers=AS_IT_IS)
            await ends.enter_async_context(session)
            self._dispatch = Dispatch(
                session, self.now_s, self.time_scale, self.limits, self.records, self.name_requests, self.count_tokens,
                self.foresight,
            )  # fmt: skip
            watch = Watch(session, self.instances, self.now_s, self.time_scale, self.limits)
            ends.enter_context(self.lag.watching())
            for watching in (watch, self.drift):
                if watching is not None:
                    ends.push_async_callback(_end, asyncio.create_task(watching.run()))
            yield

    async def _drain(self, app) -> None:
        self.draining = True
        deadline = time.monotonic() + self.limits.drain_s * self.time_scale
        while self.in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    # the data path

    async def serve(self, http: web.Request) -> web.StreamResponse:
        """One request, from its arrival to its one row in the journal."""
        arrived_s = self.now_s()
        rid = self.new_rid()
        self.in_flight += 1
        request = None
        try:
            self._admit(http)
            request, asked, origins = await self._read(http, rid, arrived_s)
            return await self._serve(http, request, asked, origins)
        except Refusal as refusal:
            self.records.refusal(refusal, rid, arrived_s)
            return as_response(refusal, {"X-Request-Id": str(rid)})
        except asyncio.CancelledError:
            self.records.left(rid, arrived_s)
            raise
        except Exception as error:  # whatever it is: the request still gets its answer and its row
            log.exception("request %d", rid)
            refusal = Refusal(500, f"the router failed ({type(error).__name__}: {error})", "internal_error")
            self.records.refusal(refusal, rid, arrived_s)
            return as_response(refusal, {"X-Request-Id": str(rid)})
        finally:
            self.in_flight -= 1
            self.records.forget(rid)

    def _admit(self, http: web.Request) -> None:
        check_key(self.api_key, http.headers.get("authorization"))
        if self.draining:
            raise Refusal(503, "the router is shutting down", "unavailable", headers={"Retry-After": "1"})
        if self.in_flight > self.limits.in_flight:
            self.records.counters.throttled += 1
            raise Refusal(
                429, f"the router has {self.in_flight - 1} requests in flight, its bound; try again in a moment",
                "rate_limit_exceeded", "queue_full", {"Retry-After": "1"},
            )  # fmt: skip

    async def _read(self, http: web.Request, rid: int, arrived_s: float) -> tuple[Request, Asked, tuple[str, str]]:
        """The request with what a policy may know of it; where its two token counts came from."""
        body = await read_body(http, self.limits.body_s * self.time_scale)
        asked = parse(http.path, body, http.headers, self.models)
        (prompt_tokens, counted), (predicted, tagged) = await asyncio.gather(
            self.count_tokens(asked), self.lengths(asked)
        )
        self.records.counters.lengths[tagged] += 1
        request = Request(rid, arrived_s, max(prompt_tokens, 1), predicted, asked.slo, prefix_blocks(asked))
        return request, asked, (counted, tagged)

    async def _serve(self, http, request: Request, asked: Asked, origins: tuple[str, str]) -> web.StreamResponse:
        tried: dict[int, Unanswered] = {}
        while True:
            decision = await self._choose(request, tried)
            self.records.counters.retries += bool(tried)
            self.records.decision(asked, request, decision, len(tried), *origins)
            answer = await self._dispatch(http, asked, request, decision)
            if not isinstance(answer, Unanswered):
                return answer
            tried[decision.instance.index] = answer
            if self.limits.spent(tried):
                raise given_up(tried)

    async def _choose(self, request: Request, tried: dict[int, Unanswered]) -> Decision:
        started = time.perf_counter()
        now_s = self.now_s()
        available = [i for i in self.instances if i.index not in tried and i.available(now_s)]
        if not available and tried:
            raise given_up(tried)
        if not available:
            taken_out = sum(instance.draining for instance in self.instances)
            why = f" ({taken_out} taken out of service)" if taken_out else ""
            raise Refusal(
                503, f"none of the {len(self.instances)} engines is available{why}; try again in a moment",
                "unavailable", headers={"Retry-After": "1"},
            )  # fmt: skip
        view = LiveView(available, now_s, self.ask, self.prefixes)
        # Draws of its own for each decision: a replay that begins anywhere draws alike.
        rng = decision_stream(self.seed, request.rid, len(tried))
        if self.ask is None:
            chosen = self.policy.choose(request, view, rng)
        else:  # in a thread, which may wait for the sidecars
            chosen = await asyncio.to_thread(self.policy.choose, request, view, rng)
        instance = available[check_choice(chosen, len(view), self.policy_name)]
        decided_s = self.now_s()
        instance.breaker.sent(decided_s)
        if request.prefix_blocks:
            self.prefixes.sent(request, instance.index, decided_s)
        return Decision(instance, view, decided_s, time.perf_counter() - started)


async def _end(watching: asyncio.Task) -> None:
    """End a task that runs as long as the router; one that has ended before is told of."""
    watching.cancel()
    try:
        await watching
    except asyncio.CancelledError:
        pass
    except Exception:
        log.exception("the router went on without watching its engines")


def decision_stream(seed: int, rid: int, attempt: int):
    """The generator that a policy draws from in this decision."""
    return random_stream(seed, f"policy {rid} {attempt}")
