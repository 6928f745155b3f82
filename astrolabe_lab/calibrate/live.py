"""Running engines as targets: probes over HTTP, as a router would stream them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from astrolabe_lab.calibrate.probe import Answer, Described, Probe
from astrolabe_lab.calibrate.simulated import modelled_device
from astrolabe_lab.errors import InputError
from astrolabe_lab.rng import stream
from astrolabe_lab.serve.loop_lag import LoopLag
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.urls import urls_of

if TYPE_CHECKING:
    from astrolabe_lab.engines.cluster_file import ClusterFile

FIRST_ID, LAST_ID = 5, 260  # token ids that any tokenizer has and none treats as special


class LiveTarget:
    """The engine at ``url``. A context manager: leaving it ends its connections.

    Times are modelled seconds. Bytes are only stamped while a burst runs and read afterwards, so that reading them
    delays none. ``loop_lag_s``: 99th percentile of how late the event loop was during bursts, wall seconds.
    ``cluster``: the cluster that the engine is of, where its file is known; ``lag``: of a target whose lateness counts
    together with this one's.
    """

    wall = True
    transfer = None

    def __init__(
        self, url: str, described: Described, seed: int = 0, timeout_s: float = 120.0,
        cluster: ClusterFile | None = None, lag: LoopLag | None = None,
    ):  # fmt: skip
        self.url = url.rstrip("/")
        self.cluster = cluster
        self._described = described
        self._scale = described.time_scale
        self._rng = stream(seed, f"prompts {time.time_ns()}")  # no prompt of an earlier calibration is in a cache
        self._timeout_s = timeout_s
        self.lag = lag or LoopLag()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="calibration", daemon=True)
        self._thread.start()
        self._session = self._run(self._open())

    def now_s(self) -> float:
        return time.monotonic() / self._scale

    def describe(self) -> Described:
        return self._described

    @property
    def loop_lag_s(self) -> float | None:
        return self.lag.p99_s()

    def kv_blocks(self) -> int:
        """As the engine's own metrics say; else as its flags do."""
        text = self._run(self._text("/metrics"))
        return _labelled(text, "vllm:cache_config_info", "num_gpu_blocks") or self._described.engine.num_gpu_blocks

    def burst(self, probes: list[Probe]) -> list[Answer]:
        """The answers to ``probes``. Raises InputError for an engine that refuses or breaks off."""
        return self._run(self._burst(probes))

    def prompt(self, tokens: int) -> list[int]:
        """Token ids that were never sent before."""
        return self._rng.integers(FIRST_ID, LAST_ID, tokens).tolist()

    def body(self, prompt: list[int], output_tokens: int) -> dict:
        return {
            "model": self._described.model, "prompt": prompt, "max_tokens": output_tokens,
            "min_tokens": output_tokens, "ignore_eos": True, "temperature": 0.0, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip

    async def _burst(self, probes: list[Probe]) -> list[Answer]:
        bodies = [self.body(self.prompt(p.prompt_tokens), p.output_tokens) for p in probes]
        begun = time.monotonic()
        with self.lag.watching():
            return await asyncio.gather(*(self._one(p, b, begun) for p, b in zip(probes, bodies, strict=True)))

    async def _one(self, probe: Probe, body: dict, begun: float) -> Answer:
        left = begun + probe.after_s * self._scale - time.monotonic()
        if left > 0:
            await asyncio.sleep(left)
        sent = time.monotonic()
        arrived = await self.stream(self.url + "/v1/completions", body)
        times, tokens = read_tokens(arrived)
        if not len(tokens) or tokens[-1] != probe.output_tokens:
            got = tokens[-1] if len(tokens) else 0
            raise InputError(f"{self.url} answered {got} tokens where exactly {probe.output_tokens} were asked for")
        return Answer(probe, sent / self._scale, times / self._scale, tokens)

    async def stream(self, url: str, body: dict, headers: dict | None = None) -> list[tuple[float, bytes]]:
        """(when, bytes) of everything that arrives. Raises InputError for an answer other than 200."""
        import aiohttp

        arrived = []
        try:
            async with self._session.post(url, json=body, headers=headers) as answer:
                if answer.status != 200:
                    raise InputError(f"{url} answered HTTP {answer.status}: {(await answer.text())[:300]}")
                async for chunk in answer.content.iter_any():
                    arrived.append((time.monotonic(), chunk))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise InputError(f"{url} broke off ({type(error).__name__}: {error}); is the engine up?") from None
        return arrived

    async def _open(self):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=self._timeout_s * max(1.0, self._scale))
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)

    async def _text(self, path: str) -> str:
        async with self._session.get(self.url + path) as answer:
            return await answer.text() if answer.status == 200 else ""

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        self._run(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class PoolTarget(LiveTarget):
    """A decode engine behind the prefill engine ``prefill``: ``handoff`` times what comes from there."""

    transfer = True

    def __init__(self, url: str, described: Described, prefill: LiveTarget, **options):
        super().__init__(url, described, **options)
        self._prefill = prefill

    def handoff(self, prompt_tokens: int) -> float:
        """Modelled seconds from the request here, its prompt computed over there, to its first token. Raises InputError
        where prefill keeps no blocks."""
        return self._run(self._handoff(prompt_tokens))

    async def _handoff(self, prompt_tokens: int) -> float:
        from astrolabe_lab.serve.pools import handoff

        body = self.body(self.prompt(prompt_tokens), 1)
        name = {"X-Request-Id": f"calibration-{uuid.uuid4().hex}"}
        path = "/v1/completions"
        said = await self.stream(self._prefill.url + path, handoff.prefill_body(body), name)
        handle = handoff.handle_of(json.loads(b"".join(chunk for _, chunk in said)))
        if handle is None:
            raise InputError(f"{self._prefill.url} keeps no KV blocks for decode: is it a prefill engine of a pool?")
        sent = time.monotonic()
        times, _ = read_tokens(await self.stream(self.url + path, handoff.decode_body(body, handle), name))
        if not len(times):
            raise InputError(f"{self.url} answered no token to a prompt that was handed over")
        return float(times[0] - sent) / self._scale


def read_tokens(arrived: list[tuple[float, bytes]]) -> tuple[np.ndarray, np.ndarray]:
    """(times, tokens in all) of a stream with ``continuous_usage_stats``, for every event that brought some."""
    times, tokens, left, seen = [], [], b"", 0
    for at, chunk in arrived:
        *lines, left = (left + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:") or (payload := line[5:].strip()) == b"[DONE]":
                continue
            usage = json.loads(payload).get("usage") or {}
            count = usage.get("completion_tokens", 0)
            if count > seen:
                seen = count
                times.append(at)
                tokens.append(count)
    return np.array(times, float), np.array(tokens, int)


def of(cluster):
    """The target of a running cluster's first engine, to be closed after use (a context manager)."""
    return targets_of(cluster)[0]


def targets_of(cluster):
    """(prefill target, decode target), the same one where engines do both. Raises InputError for anything else."""
    from astrolabe_lab.engines.cluster_file import read_cluster

    if isinstance(cluster, tuple) and len(cluster) == 2:
        return cluster
    if hasattr(cluster, "burst"):
        return cluster, cluster
    folder = getattr(cluster, "folder", cluster)
    if not isinstance(folder, (str, Path)):
        raise InputError(
            f"{type(cluster).__name__} cannot be calibrated; give a running cluster, its folder, a SimulatedTarget, or "
            "engines_at(URLS)"
        )
    found = read_cluster(folder)
    roles = {engine.get("role") for engine in found.engines}
    device = device_of_cluster(folder, found.cost)
    flags = step_flags(found.engines[0]["url"])
    described = Described(found.model, device, found.config, found.world, found.time_scale, flags)
    if roles == {"prefill", "decode"}:
        first = {role: next(e["url"] for e in found.engines if e["role"] == role) for role in roles}
        prefill = LiveTarget(first["prefill"], described, cluster=found)
        return prefill, PoolTarget(first["decode"], described, prefill, cluster=found)
    target = LiveTarget(found.engines[0]["url"], described, cluster=found)
    return target, target


def engines_at(urls, decode_urls=None, model=None, engine="", device=None, time_scale=1.0):
    """The target of engines at ``urls`` ("URL,...", all of one kind), or the pair of targets of two pools.

    What is not given is asked of the first engine: the model, and its flags (where it runs in vLLM's dev mode, as ours
    do). Raises InputError for what it does not tell.
    """
    url = urls_of(urls, "--engines" if decode_urls is None else "--prefill")[0]
    if decode_urls is not None:
        decode_url = urls_of(decode_urls, "--decode")[0]
        described = describe_engine(url, model, engine, device, time_scale)
        prefill = LiveTarget(url, described)
        return prefill, PoolTarget(decode_url, described, prefill)
    return LiveTarget(url, describe_engine(url, model, engine, device, time_scale))


def describe_engine(url: str, model=None, engine="", device=None, time_scale=1.0) -> Described:
    """What runs at ``url``, as it says itself where it is not told."""
    served = _get_json(url + "/v1/models")
    if served is None:
        raise InputError(f"{url} does not list its models; is an engine up there?")
    names = [entry["id"] for entry in served["data"]]
    if model is None and len(names) != 1 or model is not None and model not in names:
        raise InputError(f"model {model!r} at {url}: served are {', '.join(names)}; give one of them")
    said = flags_of(url)
    if not said and not engine:
        raise InputError(f"{url} does not tell its engine flags (vLLM's dev mode is off): give --engine key=value,...")
    config = EngineConfig.parse(engine, EngineConfig.from_dict(said)) if said else EngineConfig.parse(engine)
    flags = step_flags(url)
    return Described(model or names[0], device or local_device(), config, "hardware", float(time_scale), flags)


def flags_of(url: str) -> dict:
    """The engine flags that ``/server_info`` shows; empty where it is off."""
    found = _get_json(url + "/server_info?config_format=json")
    try:
        config = found["vllm_config"]
        scheduler, cache = config["scheduler_config"], config["cache_config"]
        said = {
            "max_num_seqs": scheduler["max_num_seqs"],
            "max_num_batched_tokens": scheduler["max_num_batched_tokens"],
            "enable_chunked_prefill": scheduler["enable_chunked_prefill"],
            "async_scheduling": bool(scheduler.get("async_scheduling")),
            "enable_prefix_caching": bool(cache["enable_prefix_caching"]),
            "block_size": cache["block_size"],
            "max_model_len": config["model_config"]["max_model_len"],
        }
    except (KeyError, TypeError):
        return {}
    text = _get_text(url + "/metrics") or ""
    blocks = _labelled(text, "vllm:cache_config_info", "num_gpu_blocks") or cache.get("num_gpu_blocks")
    return said | ({"num_gpu_blocks": blocks} if blocks else {})


STEP_FLAGS = {
    "dtype": ("model_config", "dtype"), "quantization": ("model_config", "quantization"),
    "enforce_eager": ("model_config", "enforce_eager"), "cache_dtype": ("cache_config", "cache_dtype"),
    "tensor_parallel_size": ("parallel_config", "tensor_parallel_size"),
    "pipeline_parallel_size": ("parallel_config", "pipeline_parallel_size"),
}  # fmt: skip


def step_flags(url: str) -> dict:
    """The flags beside an EngineConfig's that change what a step takes, as ``/server_info`` shows them; empty where it
    is off."""
    found = _get_json(url + "/server_info?config_format=json")
    config = found.get("vllm_config") if isinstance(found, dict) else None
    if not isinstance(config, dict):
        return {}
    told = {name: (config.get(part) or {}).get(key) for name, (part, key) in STEP_FLAGS.items()}
    return {name: value for name, value in told.items() if isinstance(value, (str, int, float, bool))}


def _get_text(url: str) -> str | None:
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.read().decode()
    except (OSError, ValueError):
        return None


def _get_json(url: str):
    try:
        return json.loads(_get_text(url) or "null")
    except ValueError:
        return None


def device_of_cluster(folder, cost=None) -> str:
    """What the engines of a cluster run on; of engines at URLs (no folder), this machine's device."""
    from astrolabe_lab.engines.cluster_file import read_cluster

    if folder is not None and (found := read_cluster(folder)).world == "emulated":
        return modelled_device("emulated", cost if cost is not None else found.cost)
    return local_device()


def local_device() -> str:
    """The GPU that this machine has, else its processor."""
    from astrolabe_lab.record import facts

    hardware = facts()["hardware"]
    return ", ".join(sorted(set(hardware["gpus"]))) or hardware["cpu"]


def _labelled(text: str, name: str, label: str) -> int | None:
    for line in text.splitlines():
        if line.startswith(name + "{"):
            value = line.partition(f'{label}="')[2].partition('"')[0]
            if value.isdigit():
                return int(value)
    return None
