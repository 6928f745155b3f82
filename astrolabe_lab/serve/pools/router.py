"""The router of two pools: a request is computed by one prefill engine, decoded by one decode engine.

arrive, tag, choose a pair, prefill (one token, blocks kept), decode (pulls the blocks, streams), record. Everything
around that is ``serve.router``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from dataclasses import dataclass, replace

import aiohttp
from aiohttp import web

from astrolabe_lab.disagg.constants import Constants
from astrolabe_lab.disagg.view import Ledger as PairLedger
from astrolabe_lab.disagg.view import PoolsView, check_pair
from astrolabe_lab.engines.cluster_file import ROLES
from astrolabe_lab.errors import InputError
from astrolabe_lab.request import Request
from astrolabe_lab.serve.answers import given_up
from astrolabe_lab.serve.dispatch import ERROR_BYTES, EngineFault, Unanswered, check_status, read_whole, unanswered
from astrolabe_lab.serve.instance import Instance
from astrolabe_lab.serve.openai_api import Asked, Refusal
from astrolabe_lab.serve.pools import handoff
from astrolabe_lab.serve.pools.occupancy import Occupancy
from astrolabe_lab.serve.pools.pair import Pair, PairDispatch
from astrolabe_lab.serve.pools.records import PoolCounters, PoolRecords
from astrolabe_lab.serve.router import Router, decision_stream
from astrolabe_lab.serve.stream import completion

RELEASE_S = 10.0  # wall s, for a decode engine to take in that a prompt's blocks are not wanted


@dataclass
class PoolRouter(Router):
    """Dispatches requests to pairs of ``instances``: the first ``n_prefill`` are the prefill pool, the others decode.

    ``policy.choose(request, PoolsView, rng)`` gives a pair. ``constants``: what the policy prices with.
    """

    n_prefill: int = 1
    constants: Constants | None = None
    poll_s: float = 0.05

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.n_prefill < len(self.instances):
            raise InputError(f"{self.n_prefill} of {len(self.instances)} engines for prefill leave no pair")
        if self.constants is None:
            raise InputError("a router of pools prices with constants: give a calibration, or constants from elsewhere")
        for role, pool in zip(ROLES, (self.prefill_pool, self.decode_pool), strict=True):
            for place, instance in enumerate(pool):
                instance.role, instance.place = role, place
        self.pairs = PairLedger()
        self.records = PoolRecords(
            self.now_s, self.policy_name, self.journal, self.keep_prompts, PoolCounters(), n_prefill=self.n_prefill
        )
        self.records.begin_pools(self)
        self.occupancy = Occupancy(self.instances, self.now_s, self.time_scale, self.poll_s)
        self._releases: set[asyncio.Task] = set()

    @property
    def prefill_pool(self) -> list[Instance]:
        return self.instances[: self.n_prefill]

    @property
    def decode_pool(self) -> list[Instance]:
        return self.instances[self.n_prefill :]

    @property
    def about(self) -> dict:
        return super().about | {"pools": f"{len(self.prefill_pool)}+{len(self.decode_pool)}"}

    def health(self, now_s: float) -> dict:
        told = super().health(now_s)
        prefill, decode = (sum(i.available(now_s) for i in pool) for pool in (self.prefill_pool, self.decode_pool))
        told |= {"prefill_available": prefill, "decode_available": decode}
        if told["ok"] and not decode:
            told |= {"ok": False, "note": "no decode engine is available"}
        elif told["ok"] and not prefill:
            told |= {"note": "no prefill engine is available: decode engines compute prompts themselves"}
        return told

    def warm_up(self) -> None:
        """Compile and import what decisions need, before the first request would wait for it."""
        now_s = self.now_s()
        request, flying = Request(-1, now_s, 16, 16), PairLedger()
        flying.sent(request, 0, 0, now_s)
        flying.prefilled(request.rid, now_s)
        flying.streamed(request.rid, 1, now_s)
        polled = self.occupancy.rows
        view = PoolsView(now_s, polled[: self.n_prefill], polled[self.n_prefill :], flying.rows, self.constants)
        policy = copy.deepcopy(self.policy)  # what it remembers of this is nothing to go on
        policy.choose(request, view, decision_stream(self.seed, request.rid, 0))

    async def _running(self, app):
        async with contextlib.asynccontextmanager(super()._running)(app):
            inner = self._dispatch
            self._session = inner.session
            self._dispatch = PairDispatch(
                inner.session, inner.now_s, inner.time_scale, inner.limits, inner.records, inner.name_requests,
                inner.count_tokens, inner.foresight,
            )  # fmt: skip
            self._dispatch.n_prefill = self.n_prefill
            polling = asyncio.create_task(self.occupancy.run(inner.session))
            yield
            for task in (polling, *self._releases):
                task.cancel()
            await asyncio.gather(polling, *self._releases, return_exceptions=True)

    async def _drain(self, app) -> None:
        await super()._drain(app)
        if self._releases:
            await asyncio.wait(self._releases, timeout=self.limits.drain_s * self.time_scale)

    # the data path

    async def _serve(self, http, request: Request, asked: Asked, origins: tuple[str, str]) -> web.StreamResponse:
        handle = given = None
        tried: dict[int, Unanswered] = {}  # in both steps
        try:
            pair, handle, refused = await self._compute(http, request, asked, origins, tried)
            if refused is not None:
                return refused
            before = len(tried)
            while True:
                # After a failed pull the blocks may be gone: the last try computes the prompt where it decodes.
                failed = len(tried) - before
                again = failed and (self._is_last(tried) or failed + 1 >= len(self.decode_pool))
                given = None if again else handle
                if again and handle is not None:
                    self.records.counters.recomputed += 1
                body = replace(asked, body=handoff.decode_body(asked.body, given))
                answer = await self._dispatch(http, body, request, pair.decision())
                if not isinstance(answer, Unanswered):
                    if answer.status >= 400:  # who refuses a request lets go of its blocks
                        handle = None if given else handle
                    return answer
                tried[pair.decode.index] = answer
                if self.limits.spent(tried):
                    raise given_up(tried)
                pair = self._choose_pair(request, set(tried), len(tried), keep=pair.prefill, alone=not pair.prefill)
                self.records.counters.retries += 1
                self._enter(request, pair, asked, len(tried), origins)
                self.pairs.prefilled(request.rid, self.now_s())
        finally:
            if handle is not None and not (given and request.rid in self._dispatch.pulled):
                self._release(asked, handle, pair.decode if request.rid in self._dispatch.pulled else None)
            self._dispatch.pulled.discard(request.rid)
            self.pairs.ended(request.rid)

    async def _compute(self, http, request: Request, asked: Asked, origins, tried: dict[int, Unanswered]):
        """Step one: (pair, what prefill says of the blocks, or None where decode must compute them, a refusal). The
        last try of several is decode's alone: one engine less to fail."""
        while True:
            pair = self._choose_pair(request, set(tried), len(tried), alone=bool(tried) and self._is_last(tried))
            self.records.counters.retries += bool(tried)
            self._enter(request, pair, asked, len(tried), origins)
            if pair.prefill is None:
                self.pairs.prefilled(request.rid, self.now_s())
                self.records.counters.recomputed += 1
                return pair, None, None
            answer = await self._prefill_to_its_end(http, asked, request, pair.prefill)
            if isinstance(answer, web.Response):
                self.records.refused_by(request, pair.prefill.index, f"HTTP {answer.status}")
                return pair, None, answer
            if not isinstance(answer, Unanswered):
                self.pairs.prefilled(request.rid, self.now_s())
                self.records.counters.recomputed += not answer
                return pair, answer or None, None
            tried[pair.prefill.index] = answer
            if self.limits.spent(tried):
                raise given_up(tried)

    def _is_last(self, tried: dict[int, Unanswered]) -> bool:
        return len(tried) + 1 >= self.limits.tries

    def _enter(self, request: Request, pair: Pair, asked: Asked, attempt: int, origins) -> None:
        self.records.pair(asked, request, pair, attempt, *origins)
        self.pairs.ended(request.rid)
        at = pair.prefill.index if pair.prefill else 0
        self.pairs.sent(request, at, pair.decode.index - self.n_prefill, self.now_s())

    async def _prefill_to_its_end(self, http, asked: Asked, request: Request, instance: Instance):
        """``_prefill``, which goes on when the client leaves: only its answer names the blocks that must be let go."""
        step = asyncio.create_task(self._prefill(http, asked, request, instance))
        try:
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            if isinstance(handle := await step, dict) and handle:
                self._release(asked, handle)
            raise

    async def _prefill(self, http, asked: Asked, request: Request, instance: Instance):
        """The handle of the blocks ({} where it keeps none), the engine's refusal as a response, or Unanswered."""
        sent_s, status, reason, handle = self.now_s(), "aborted", "the client went away", None
        instance.ledger.open(request.rid, request.prompt_tokens, 1, sent_s, False)
        try:
            async with asyncio.timeout(self.limits.first_byte_s * self.time_scale):
                async with await self._dispatch.post(http, asked, request, instance, handoff.prefill_body) as upstream:
                    await check_status(upstream)
                    if upstream.status >= 400:
                        body = await upstream.content.read(ERROR_BYTES)
                        instance.breaker.succeeded()
                        status, reason = "rejected", f"HTTP {upstream.status}"
                        headers = {"X-Request-Id": str(request.rid)}
                        return web.Response(
                            status=upstream.status, body=body, content_type=upstream.content_type, headers=headers
                        )
                    answer = completion(await read_whole(upstream, self.limits.prefill_bytes))
                    if answer is None:
                        raise EngineFault("the answer is no completion")
                    kept = handoff.handle_of(answer) or {}
                    handoff.check_blocks(kept)
                    handle = kept
                    instance.breaker.succeeded()
                    status, reason = "ok", ""
                    return handle
        except (aiohttp.ClientError, TimeoutError, OSError, EngineFault) as error:
            status, reason = "failed", f"{type(error).__name__}: {error}"
            instance.breaker.failed(self.now_s())
            self.records.counters.upstream_errors += 1
            return unanswered(error, reason)
        except Exception as error:
            status, reason = "failed", f"{type(error).__name__}: {error}"
            raise
        finally:
            instance.settle(request.rid)
            self.records.prefilled(request, instance.index, sent_s, status, reason, handoff.blocks_of(handle))

    # choosing

    def _choose_pair(self, request: Request, tried: set[int], attempt: int, keep=None, alone: bool = False) -> Pair:
        """The policy's choice among the engines that are available, but for those ``tried``; ``keep``: the prefill
        engine that has the prompt already. Where no prefill engine is left, or ``alone``, the policy is shown them all,
        and its decode engine computes the prompt. Raises Refusal where no decode engine is left."""
        started = time.perf_counter()
        now_s = self.now_s()
        prefill = [keep] if keep else [i for i in self.prefill_pool if self._may(i, tried, now_s)]
        alone = alone or not prefill
        prefill = self.prefill_pool if alone else prefill
        decode = [i for i in self.decode_pool if self._may(i, tried, now_s)]
        if not decode:
            raise Refusal(503, "no decode engine is available; try again in a moment", "unavailable",
                          headers={"Retry-After": "1"})  # fmt: skip
        self._sync()
        polled = self.occupancy.rows
        view = PoolsView(
            now_s,
            polled[[i.index for i in prefill]],
            polled[[i.index for i in decode]],
            self.pairs.rows,
            self.constants,
        )
        rng = decision_stream(self.seed, request.rid, attempt)
        p, d = check_pair(self.policy.choose(request, view, rng), len(prefill), len(decode), self.policy_name)
        decided_s = self.now_s()
        for instance in (decode[d],) if alone or keep else (prefill[p], decode[d]):
            instance.breaker.sent(decided_s)
        return Pair(None if alone else prefill[p], decode[d], view, decided_s, time.perf_counter() - started)

    def _may(self, instance: Instance, excluded: set[int], now_s: float) -> bool:
        return instance.index not in excluded and instance.available(now_s)

    def _sync(self) -> None:
        """Enter into the pairs' ledger what has been streamed since the last decision."""
        known = {int(row["rid"]): int(row["streamed"]) for row in self.pairs.rows}
        for instance in self.decode_pool:
            for entry in instance.ledger.entries.values():
                new = entry.streamed - known.get(entry.rid, entry.streamed)
                if new > 0:
                    self.pairs.streamed(entry.rid, new, entry.first_token_s or self.now_s())

    # what nobody wants any more

    def _release(self, asked: Asked, handle: dict, answers: Instance | None = None) -> None:
        """Give the blocks back through a decode engine that ``answers``, or through one with few failures."""
        now_s = self.now_s()
        instance = answers or min(self.decode_pool, key=lambda i: (not i.available(now_s), i.breaker.in_a_row))
        task = asyncio.get_running_loop().create_task(self._let_go(asked, handle, instance))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _let_go(self, asked: Asked, handle: dict, instance: Instance) -> None:
        """Tell prefill, through a decode engine, that its blocks will not be pulled; else they expire there."""
        timeout = aiohttp.ClientTimeout(total=RELEASE_S)
        try:
            body = handoff.release_body(asked.body, handle)
            async with self._session.post(
                instance.url + asked.path, json=body, timeout=timeout, allow_redirects=False
            ) as answer:
                told = 400 <= answer.status < 500
        except (aiohttp.ClientError, TimeoutError, OSError):
            told = False
        self.records.counters.released += told
        self.records.counters.left_to_expire += not told
