"""What a router answers beside requests: its models, health, metrics and engines."""

from __future__ import annotations

import asyncio
import hmac
import json

from aiohttp import web

from .openai_api import Refusal

BODY_S = 10.0  # wall


class Pages:
    """The pages of ``router``. Health and metrics are open; the rest asks for the API key where there is one."""

    def __init__(self, router):
        self._router = router

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/healthz", self.healthz)
        app.router.add_get("/health", self.healthz)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/instances", self.instances)
        app.router.add_get("/instances/{index}", self.instance)
        app.router.add_post("/instances/{index}", self.drain)

    async def models(self, http: web.Request) -> web.Response:
        """The router's own knowledge: no engine that is down can break it."""
        router = self._router
        check_key(router.api_key, http.headers.get("authorization"))
        longest = min(instance.engine.max_model_len for instance in router.instances)
        entries = [
            {"id": m, "object": "model", "created": 0, "owned_by": "astrolabe", "max_model_len": longest}
            for m in router.models
        ]
        return web.json_response({"object": "list", "data": entries, "astrolabe": router.about})

    async def healthz(self, http: web.Request) -> web.Response:
        told = self._router.health(self._router.now_s())
        return web.json_response(told, status=200 if told["ok"] else 503)

    async def metrics(self, http: web.Request) -> web.Response:
        return web.Response(body=self._router.counters.exposition(self._router), content_type="text/plain")

    async def instances(self, http: web.Request) -> web.Response:
        """Every engine as the router sees it."""
        check_key(self._router.api_key, http.headers.get("authorization"))
        now_s = self._router.now_s()
        return web.json_response({"instances": [_describe(each, now_s) for each in self._router.instances]})

    async def instance(self, http: web.Request) -> web.Response:
        """One engine as the router sees it."""
        check_key(self._router.api_key, http.headers.get("authorization"))
        return web.json_response(_describe(self._asked_for(http), self._router.now_s()))

    async def drain(self, http: web.Request) -> web.Response:
        """``{"draining": true}``: the engine gets no more requests, those it has go on; false: it does again.

        JSON is asked for by name, so that no web page that somebody visits can do it.
        """
        check_key(self._router.api_key, http.headers.get("authorization"))
        instance = self._asked_for(http)
        if http.content_type != "application/json":
            raise Refusal(415, "send application/json")
        try:
            told = json.loads(await read_body(http, BODY_S))
        except (ValueError, RecursionError):
            raise Refusal(400, "the body is not JSON") from None
        if not isinstance(told, dict) or set(told) != {"draining"} or not isinstance(told["draining"], bool):
            raise Refusal(400, 'send {"draining": true} or {"draining": false}')
        instance.draining = told["draining"]
        return web.json_response(_describe(instance, self._router.now_s()))

    def _asked_for(self, http: web.Request):
        index = http.match_info["index"]
        if index not in map(str, range(len(self._router.instances))):
            raise Refusal(404, f"there is no instance {index!r:.40}; they are 0..{len(self._router.instances) - 1}")
        return self._router.instances[int(index)]


def _describe(instance, now_s: float) -> dict:
    status, source = instance.status(now_s)
    age = {"status_age_s": max(0.0, now_s - status.taken_s)}
    pool = {}
    if instance.role:  # an idle engine publishes nothing new: what a policy goes by is as old as its last poll
        age = {"poll_age_s": None if instance.polled_s is None else max(0.0, now_s - instance.polled_s)}
        pool = {"role": instance.role, f"{instance.role}_instance": instance.place}
    return {
        "instance": instance.index,
        **pool,
        "url": instance.url,
        "available": instance.available(now_s),
        "healthy": instance.health.healthy,
        "draining": instance.draining,
        "breaker_open": instance.breaker.opened_s is not None,
        "in_flight": len(instance.ledger),
        "running": status.running,
        "waiting": status.waiting,
        "free_blocks": status.free_blocks,
        "status_from": source,
        **age,
        "restarts": instance.restarts,
    }


async def read_body(http: web.Request, within_s: float) -> bytes:
    """The body, whole; raises Refusal for one that is too large, too slow (wall s) or damaged."""
    try:
        return await asyncio.wait_for(http.read(), within_s)
    except web.HTTPRequestEntityTooLarge:
        raise Refusal(413, f"the body is larger than {http.client_max_size} bytes") from None
    except TimeoutError:
        raise Refusal(408, "the body did not arrive in time") from None
    except ConnectionError:
        raise asyncio.CancelledError("the client went away") from None
    except (web.RequestPayloadError, web.HTTPException, ValueError) as error:
        raise Refusal(400, f"the body cannot be read: {error}") from None


def check_key(key: str | None, authorization: str | None) -> None:
    """Raise Refusal unless ``authorization`` carries the key (where one is asked for)."""
    if key is None:
        return
    given = (authorization or "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key.encode()):
        raise Refusal(401, "the API key is missing or wrong: send Authorization: Bearer KEY", "authentication_error")
