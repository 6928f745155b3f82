"""Prefill and decode engines that answer as they are told and keep account of KV blocks. No vLLM."""

import asyncio
import json
from contextlib import asynccontextmanager

from aiohttp import web
from scripted_engine import ScriptedEngine


class PoolEngine(ScriptedEngine):
    """``held``: handles of blocks it keeps for a pull; ``pulled``, ``recomputed``, ``let_go``: what decode did of them.

    Scripts beside those of ScriptedEngine: ``die_after`` (prefill answers, then its blocks are gone), ``die_pulling``
    (decode closes the connection before its first byte, without having pulled), ``garble`` (decode answers other tokens
    after a pull). ``underway``: prefill's answers arrive once it is set, of whatever was computed before.
    """

    def __init__(self, pools, **options):
        super().__init__(**options)
        self.pools = pools
        self.held, self.pulled, self.recomputed, self.let_go = {}, [], [], []
        self.metrics = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
        self.metrics += "vllm:num_preemptions_total 0\n"
        self.short = 0  # tokens that its answers lack
        self.underway = asyncio.Event()
        self.underway.set()
        self.alone = 0  # requests it got without a handle, and without being asked to keep blocks

    async def _answer(self, http, body):
        params = body.get("kv_transfer_params")
        if params and params.get("do_remote_decode"):
            return await self._prefill(http, body)
        if params and params.get("do_remote_prefill"):
            if self.script == "die_pulling":
                http.transport.close()
                return web.Response()
            found = self.pools[params["remote_engine_id"]].held.pop(params["remote_request_id"], None)
            if body["max_tokens"] > 10**6:
                self.let_go.append(params["remote_request_id"])
                return web.json_response(
                    {"error": {"message": "too long", "type": "BadRequest", "code": 400}}, status=400
                )
            (self.pulled if found else self.recomputed).append(params["remote_request_id"])
        else:
            self.alone += 1
        if body.get("return_token_ids") and self.script in ("ok", "garble"):
            return self._tokens(body, garbled=self.script == "garble" and bool(params))
        return await super()._answer(http, body)

    def _tokens(self, body, garbled):
        """A greedy answer: token ids that follow from the prompt."""
        n = body["max_tokens"] - self.short
        tokens = [(sum(body["prompt"]) + j * j) % 97 + garbled * (j > n // 2) for j in range(n)]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": n}
        choice = {"index": 0, "text": "", "token_ids": tokens, "finish_reason": "length"}
        return web.json_response({"model": body["model"], "usage": usage, "choices": [choice]})

    async def _prefill(self, http, body):
        assert body["max_tokens"] == 1 and not body["stream"] and "stream_options" not in body
        answer = await super()._answer(http, body)
        if self.script not in ("ok", "die_after"):
            await self.underway.wait()
            return answer
        name = http.headers.get("X-Request-Id") or body["request_id"]
        handle = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2, 3]],
                  "remote_engine_id": self.url, "remote_request_id": name}  # fmt: skip
        if self.script == "ok":
            self.held[name] = handle
        await self.underway.wait()
        return web.json_response(json.loads(answer.body) | {"kv_transfer_params": handle})


@asynccontextmanager
async def scripted_pools(prefill, decode, **options):
    """(prefill engines, decode engines)."""
    pools = {}
    engines = [await PoolEngine(pools, **options).start() for _ in range(prefill + decode)]
    pools.update({engine.url: engine for engine in engines})
    try:
        yield engines[:prefill], engines[prefill:]
    finally:
        for engine in engines:
            await engine.stop()
