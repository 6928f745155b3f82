"""An engine that answers as it is told: OpenAI-compatible, no vLLM. For tests of the router."""

import asyncio
import json
from contextlib import asynccontextmanager

from aiohttp import web

from astrolabe_lab.serve.limits import Limits

# A router's limits. A test that waits for one sets that one: a busy host stalls for a while.
QUICK = Limits(probe_s=0.05, drain_s=1.0)


class ScriptedEngine:
    """``script`` decides what the next answers are.

    ok; http:STATUS; silent (accepts, never answers); head (200 and nothing more); refuse (closes without an answer);
    break (closes in mid-stream); cut (ends in mid-stream, properly for HTTP); error (an error event for a first
    event), late-error (in mid-stream); twice (its end comes twice); mortal (a request with ``seed`` ends the engine).
    ``metrics``: what ``/metrics`` says, None for 404, once ``telling`` is set; ``compresses``: whole answers, where
    that is accepted; ``hold_at``: the token of a stream that waits until ``going`` is set.
    """

    def __init__(self, tokens=8, token_s=0.0, first_s=0.0):
        self.tokens, self.token_s, self.first_s = tokens, token_s, first_s
        self.script = "ok"
        self.metrics = None
        self.compresses = False
        self.telling = asyncio.Event()
        self.telling.set()
        self.hold_at = 0
        self.going = asyncio.Event()
        self.going.set()
        self.model = "m"  # that it lists
        self.text = " t"  # of a token
        self.text_tokens = 7  # that it counts in a prompt of text
        self.healthy = True
        self.seen = []
        self.aborted = 0
        self.running = 0
        self.url = ""
        self._runner = None
        self._port = 0

    async def start(self):
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/completions", self.answer)
        app.router.add_post("/v1/chat/completions", self.answer)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.tell)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, backlog=2048)
        await site.start()
        self._port = site._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        return self

    async def stop(self):
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    async def health(self, http):
        return web.Response(status=200 if self.healthy else 503)

    async def tell(self, http):
        text = self.metrics
        await self.telling.wait()
        return web.Response(text=text) if text is not None else web.Response(status=404)

    def die(self):
        """As SIGKILL would: every connection breaks, nobody listens any more."""
        runner, self._runner = self._runner, None
        for site in runner.sites:
            site._server.close()
        for connection in runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()

    async def models(self, http):
        return web.json_response({"object": "list", "data": [{"id": self.model, "max_model_len": 4096}]})

    async def answer(self, http):
        body = await http.json()
        self.seen.append(body)
        self.running += 1
        try:
            return await self._answer(http, body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def _answer(self, http, body):
        if self.script.startswith("http:"):
            status = int(self.script[5:])
            return web.json_response({"error": {"message": "as told", "type": "told", "code": status}}, status=status)
        if self.script == "silent":
            await asyncio.sleep(3600)
        if self.script == "mortal" and "seed" in body:
            self.die()
            return web.Response()
        if self.script == "refuse":
            http.transport.close()
            return web.Response()
        n = body.get("max_tokens") or self.tokens
        await asyncio.sleep(self.first_s)
        prompt = body.get("prompt")
        asked = len(prompt) if isinstance(prompt, list) else self.text_tokens
        usage = {"prompt_tokens": asked, "completion_tokens": n, "total_tokens": asked + n}
        if not body.get("stream"):
            await asyncio.sleep(self.token_s * n)
            answer = web.json_response(
                {"id": "x", "object": "text_completion", "model": body["model"], "usage": usage,
                 "choices": [{"index": 0, "text": " t" * n, "finish_reason": "length"}]}
            )  # fmt: skip
            if self.compresses:
                answer.enable_compression()
            return answer
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(http)
        if self.script == "head":
            await asyncio.sleep(3600)
        for j in range(n):
            if j == self.hold_at:
                await self.going.wait()
            if self.script == "error" or (self.script == "late-error" and j == n // 2):
                error = {"message": "EngineDeadError", "type": "InternalServerError", "code": 500}
                await answer.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n")
                return answer
            if self.script == "cut" and j == n // 2:
                return answer
            choice = {"index": 0, "text": self.text, "finish_reason": "length" if j == n - 1 else None}
            event = {"id": "x", "choices": [choice]}
            await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if self.script == "break" and j == n // 2:
                http.transport.close()
                return answer
            if self.token_s:
                await asyncio.sleep(self.token_s)
        if (body.get("stream_options") or {}).get("include_usage"):
            await answer.write(b"data: " + json.dumps({"id": "x", "choices": [], "usage": usage}).encode() + b"\n\n")
        end = b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\ndata: [DONE]\n\n"
        await answer.write(end * 2 if self.script == "twice" else b"data: [DONE]\n\n")
        if self.script == "lingers":
            await asyncio.sleep(3600)
        await answer.write_eof()
        return answer


@asynccontextmanager
async def scripted_engines(n, **options):
    engines = [await ScriptedEngine(**options).start() for _ in range(n)]
    try:
        yield engines
    finally:
        for engine in engines:
            await engine.stop()
