"""An engine on HTTP that batches as vLLM does, in the smallest form, and logs what its steps really took. No vLLM."""

import asyncio
import json
import time
from contextlib import asynccontextmanager

from aiohttp import web


class TimedEngine:
    """Decodes what runs, gives the rest of ``room`` tokens to prompts in order; a step sleeps what ``cost`` says.

    Of pools it is either engine: it keeps blocks for decode by saying so, and of a prompt that was handed over computes
    the last token. ``log``: (mixed, new_tokens, sequences, context_tokens, attention, seconds as it was) of every step;
    its seconds go from the end of the step before it, if there was one, as those that its clients see.
    """

    def __init__(self, cost, seats, room, blocks=512, model="m"):
        self.cost, self.seats, self.room, self.blocks, self.model = cost, seats, room, blocks, model
        self.waiting, self.running, self.log, self.url = [], [], [], ""

    async def answer(self, http):
        body = await http.json()
        handed = (body.get("kv_transfer_params") or {}).get("do_remote_prefill")
        job = {"prompt": len(body["prompt"]), "want": body["max_tokens"], "made": 0, "came": asyncio.Queue(),
               "computed": len(body["prompt"]) - 1 if handed else 0}  # fmt: skip
        self.waiting.append(job)
        if not body["stream"]:
            while await job["came"].get() is not None:
                pass
            return web.json_response({"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [[1]]}})
        assert body["stream_options"]["continuous_usage_stats"] and body["ignore_eos"]
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(http)
        while (made := await job["came"].get()) is not None:
            event = {"choices": [{"index": 0, "text": " t"}], "usage": {"completion_tokens": made}}
            await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def run(self):
        ended = None
        while True:
            plan, left, mixed, context, attention = [], self.room, False, 0, 0.0
            while self.waiting and len(self.running) < self.seats:
                self.running.append(self.waiting.pop(0))
            for job in sorted(self.running, key=lambda j: j["made"] == 0):
                known = job["prompt"] + job["made"]
                n = min(known - job["computed"], left)
                if n < 1:
                    continue
                left -= n
                context += job["computed"]
                if job["computed"] < job["prompt"]:
                    mixed = True
                    attention += n * job["computed"] + n * n / 2
                plan.append((job, n))
            if not plan:
                await asyncio.sleep(0.0005)
                ended = None
                continue
            began = time.monotonic() if ended is None else ended
            counts = self.room - left, len(plan), context, attention
            await asyncio.sleep(self.cost.step_seconds(*counts, mixed))
            for job, n in plan:
                job["computed"] += n
                if job["computed"] >= job["prompt"] + job["made"]:
                    job["made"] += 1
                    job["came"].put_nowait(job["made"])
                    if job["made"] == job["want"]:
                        job["came"].put_nowait(None)
                        self.running.remove(job)
            ended = time.monotonic()
            self.log.append((mixed, *counts, ended - began))

    async def models(self, http):
        return web.json_response({"data": [{"id": self.model, "max_model_len": 2048}]})

    async def health(self, http):
        return web.Response()

    async def metrics(self, http):
        return web.Response(text=f'vllm:cache_config_info{{num_gpu_blocks="{self.blocks}"}} 1.0\n')

    @asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_post("/v1/completions", self.answer)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/health", self.health)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        running = asyncio.create_task(self.run())
        try:
            yield self
        finally:
            running.cancel()
            await runner.cleanup()
