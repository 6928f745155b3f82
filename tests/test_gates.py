"""The gates before a measurement: each lets a sound engine pass and stops at the fault that it is for."""

import asyncio
import zlib
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from astrolabe_lab import bench
from astrolabe_lab.bench.engines import Gauges
from astrolabe_lab.errors import InputError

MODEL = "m"
BLOCK = 16


class CachingEngine:
    """Answers as vLLM does, with a prefix cache of whole blocks. ``fault`` names what it does wrong."""

    def __init__(self, fault=""):
        self.fault = fault
        self.cached = set()
        self.queries = self.hits = 0
        self.asked = []
        self.running = 3 if fault == "busy" else 0

    async def serve(self):
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/metrics", self.metrics)
        if self.fault != "no dev mode":
            app.router.add_post("/reset_prefix_cache", self.reset)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        return self

    async def complete(self, http):
        body = await http.json()
        prompt, n = body["prompt"], body["max_tokens"]
        self.asked.append(len(prompt))
        if self.fault == "dead":
            return web.json_response({"error": "no"}, status=500)
        found = [tuple(prompt[: i + BLOCK]) for i in range(0, len(prompt) - BLOCK, BLOCK)]
        hits = 0
        while hits < len(found) and found[hits] in self.cached:
            hits += 1
        if self.fault != "caches off":
            self.queries += len(prompt)
            self.hits += 0 if self.fault == "never hits" else hits * BLOCK
        self.cached.update(found)
        seed = zlib.crc32(str(prompt).encode()) + (1 if self.fault == "another model" else 0)
        counted = n + 1 if self.fault == "miscounts" else n
        return web.json_response(
            {
                "choices": [{"text": "x", "token_ids": [(seed + i) % 97 for i in range(n)], "finish_reason": "length"}],
                "usage": {"prompt_tokens": len(prompt), "completion_tokens": counted},
            }
        )

    async def metrics(self, http):
        on = "False" if self.fault == "caches off" else "True"
        text = f"""# HELP vllm:num_requests_running x
vllm:num_requests_running{{engine="0",model_name="m"}} {self.running}.0
vllm:num_requests_waiting{{engine="0",model_name="m"}} 0.0
vllm:cache_config_info{{block_size="{BLOCK}",enable_prefix_caching="{on}",engine="0"}} 1.0
vllm:prefix_cache_queries_total{{engine="0"}} {float(self.queries)}
vllm:prefix_cache_hits_total{{engine="0"}} {float(self.hits)}
"""
        return web.Response(text="go_goroutines 1" if self.fault == "no engine" else text)

    async def reset(self, http):
        if self.fault == "refuses to reset":
            return web.json_response({"success": False})
        if self.fault != "pretends to reset":
            self.cached.clear()
        return web.json_response({"success": True})

    async def stop(self):
        await self._runner.cleanup()


@asynccontextmanager
async def engines(*faults):
    served = [await CachingEngine(fault).serve() for fault in faults]
    try:
        yield served
    finally:
        for engine in served:
            await engine.stop()


def verdicts(*faults, gates=bench.GATES, **options):
    async def story():
        async with engines(*faults) as served:
            return await bench.check([e.url for e in served], MODEL, gates, **options), served

    return asyncio.run(asyncio.wait_for(story(), 60))


def test_sound_engines_pass_every_gate_in_order_and_end_with_nothing_cached():
    said = []
    found, served = verdicts("", "", say=said.append)
    assert [one.gate for one in found] == list(bench.GATES)
    assert all(one.ok for one in found), found
    assert said == found
    assert all(not engine.cached and engine.hits > 0 for engine in served)
    bench.require(found)


@pytest.mark.parametrize(
    ("fault", "gate", "said"),
    [
        ("miscounts", "exact", r"engine 1 counts 37 and 20"),
        ("another model", "greedy", r"engine 1 departs from engine 0 at token 0"),
        (
            "pretends to reset",
            "prefix_reset",
            r"engine 1: of .* 53 tokens 48 were found before the reset, 48 after",
        ),
        ("refuses to reset", "prefix_reset", r"engine 1: HTTP 200"),
        ("no dev mode", "prefix_reset", r"VLLM_SERVER_DEV_MODE=1"),
        ("never hits", "prefix_reset", r"never found again"),
        ("dead", "warm_up", r"engine 1 answers HTTP 500"),
        ("no engine", "idle", r"engine 1 at .* shows no vLLM metrics"),
    ],
)
def test_each_fault_stops_its_gate_and_names_the_engine(fault, gate, said):
    found, _ = verdicts("", fault, gates=(gate,))
    assert not found[0].ok
    with pytest.raises(bench.GateError, match=said):
        bench.require(found)


def test_others_requests_stop_the_gate_for_idle_engines(monkeypatch):
    monkeypatch.setattr("astrolabe_lab.bench.gates.IDLE_S", 0.2)
    found, _ = verdicts("", "busy", gates=("idle",))
    assert not found[0].ok and "engine 1: 3" in found[0].detail


def test_an_engine_without_prefix_caching_needs_no_reset():
    found, served = verdicts("caches off", gates=("prefix_reset",))
    assert found[0].ok and found[0].detail == "prefix caching is off"
    assert served[0].asked == []


def test_one_engine_alone_is_asked_twice_for_its_greedy_answer():
    found, served = verdicts("", gates=("greedy",))
    assert found[0].ok and "an engine asked twice" in found[0].detail and len(served[0].asked) == 2


def test_between_runs_only_idleness_and_the_caches_are_looked_at():
    found, served = verdicts("", gates=bench.ISOLATION)
    assert [one.gate for one in found] == ["idle", "prefix_reset"]
    assert len(served[0].asked) == 3


@pytest.mark.parametrize(
    ("urls", "gates", "said"),
    [
        ([], bench.GATES, "engines' own URLs"),
        (["ftp://x"], bench.GATES, "is not a URL"),
        (["http://x"], ("hot",), "hot"),
    ],
)
def test_gates_and_engines_that_are_none_are_refused(urls, gates, said):
    with pytest.raises(InputError, match=said):
        asyncio.run(bench.check(urls, MODEL, gates))


def test_metrics_are_read_as_prometheus_writes_them():
    text = 'vllm:a{x="1",y="a\\"}b"} 2.0\nvllm:a{x="2"} 3\nvllm:b 1e3\n# vllm:c 7\nother 9\nvllm:d{x="1"} oops\n'
    assert Gauges.of(text).values == {"a": 5.0, "b": 1000.0}
