"""What must hold before anything is measured, each with a verdict that goes into the record.

idle          no engine runs or holds a request of somebody else
warm_up       every engine has computed prompts short and long, alone and together
exact         an engine that is asked for so many tokens counts so many, prompt and answer
greedy        every engine gives the same answer to the same prompt: they serve the same model
prefix_reset  prefix caches are empty: reset, and a probe that was found again before is not found now
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from astrolabe_lab.bench.engines import EngineClient, EngineTrouble
from astrolabe_lab.bench.load import exactly, token_ids
from astrolabe_lab.errors import InputError
from astrolabe_lab.urls import urls_of

GATES = ("idle", "warm_up", "exact", "greedy", "prefix_reset")
ISOLATION = ("idle", "prefix_reset")  # between two runs on engines that have passed them all
IDLE_S, SETTLE_S = 30.0, 10.0  # wall s: until others' requests have ended; until metrics show what has happened
WARM_PROMPTS, WARM_TOKENS, TOGETHER = (8, 200), 8, 4
EXACT = (37, 19)  # prompt and answer tokens
GREEDY_TOKENS = 24
PROBE_BLOCKS = 3


class GateError(RuntimeError):
    """A gate did not hold; the message has its verdict."""


@dataclass(frozen=True)
class Verdict:
    """What a gate found: ``ok``, and in ``detail`` what that rests on."""

    gate: str
    ok: bool
    detail: str

    def __str__(self) -> str:
        return f"{self.gate}: {'ok' if self.ok else 'FAILED'}: {self.detail}"


def require(verdicts: Sequence[Verdict]) -> None:
    """Raise GateError where one is not ok."""
    if failed := [str(one) for one in verdicts if not one.ok]:
        raise GateError("; ".join(failed))


async def check(
    engines: Sequence[str], model: str, gates: Sequence[str] = GATES, time_scale: float = 1.0, say=None
) -> list[Verdict]:
    """The verdict of each gate on the engines at these URLs (engines, not a router), in the order of GATES.

    ``time_scale``: wall s per modelled s, which stretches what is waited for. ``say`` gets each verdict as it is
    reached. Raises InputError for a gate or URL that is none."""
    import aiohttp

    if unknown := sorted(set(gates) - set(GATES)):
        raise InputError(f"gate {unknown[0]!r} is unknown; allowed are {', '.join(GATES)}")
    if not engines:
        raise InputError("gates need the engines' own URLs: a router does not let them through")
    urls = urls_of(engines, "engines")
    verdicts = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        clients = [EngineClient(session, i, url, model, 120.0 * max(1.0, time_scale)) for i, url in enumerate(urls)]
        for name in [name for name in GATES if name in gates]:
            try:
                verdicts.append(Verdict(name, *await CHECKS[name](clients)))
            except EngineTrouble as trouble:
                verdicts.append(Verdict(name, False, str(trouble)))
            if say is not None:
                say(verdicts[-1])
    return verdicts


async def _idle(clients: list[EngineClient]) -> tuple[bool, str]:
    deadline = time.monotonic() + IDLE_S
    while True:
        unfinished = [gauges.unfinished for gauges in await _each(clients, EngineClient.gauges)]
        if not any(unfinished):
            return True, f"{len(clients)} engines hold no request"
        if time.monotonic() > deadline:
            held = ", ".join(f"engine {i}: {n}" for i, n in enumerate(unfinished) if n)
            return False, f"others' requests are still there after {IDLE_S:.0f} s ({held})"
        await asyncio.sleep(0.1)


async def _warm_up(clients: list[EngineClient]) -> tuple[bool, str]:
    async def rounds(client: EngineClient) -> list[float]:
        took = []
        for together in (1, TOGETHER):
            started = time.monotonic()
            prompts = [_ids(n) for n in WARM_PROMPTS for _ in range(together)]
            await asyncio.gather(*(client.complete(prompt, **exactly(WARM_TOKENS)) for prompt in prompts))
            took.append(time.monotonic() - started)
        return took

    first, then = await _each(clients, rounds), await _each(clients, rounds)
    slowest = [max(map(sum, took)) for took in (first, then)]
    requests = 2 * len(WARM_PROMPTS) * (1 + TOGETHER)
    return (
        True,
        f"{requests} requests on each of {len(clients)}; half in {slowest[0]:.1f} s, half in {slowest[1]:.1f}",
    )


async def _exact(clients: list[EngineClient]) -> tuple[bool, str]:
    prompt, answer = EXACT
    found = await _each(clients, lambda client: client.complete(_ids(prompt), **exactly(answer)))
    wrong = [
        f"engine {i} counts {one.prompt_tokens} and {one.completion_tokens} ({one.finish_reason})"
        for i, one in enumerate(found)
        if (one.prompt_tokens, one.completion_tokens, one.finish_reason) != (prompt, answer, "length")
    ]
    return not wrong, "; ".join(wrong) or f"{prompt} prompt and {answer} answer tokens, as asked for, on each engine"


async def _greedy(clients: list[EngineClient]) -> tuple[bool, str]:
    prompt = token_ids(32, 0, "greedy gate")
    asked = clients if len(clients) > 1 else clients * 2
    found = await _each(asked, lambda client: client.complete(prompt, **exactly(GREEDY_TOKENS)))
    first = found[0].tokens
    for client, one in zip(asked[1:], found[1:], strict=True):
        if one.tokens != first:
            at = next((k for k, (a, b) in enumerate(zip(first, one.tokens, strict=False)) if a != b), "the end")
            return False, f"engine {client.index} departs from engine 0 at token {at}: is it the same model?"
    whom = f"{len(clients)} engines" if len(clients) > 1 else "an engine asked twice"
    return True, f"{GREEDY_TOKENS} greedy tokens are equal on {whom}"


async def _prefix_reset(clients: list[EngineClient]) -> tuple[bool, str]:
    found = await _each(clients, _reset_and_probe)
    if bad := [f"engine {i}: {what}" for i, (ok, what) in enumerate(found) if not ok]:
        return False, "; ".join(bad)
    return True, "; ".join(dict.fromkeys(what for _, what in found))


async def _reset_and_probe(client: EngineClient) -> tuple[bool, str]:
    gauges = await client.gauges()
    if not gauges.caches_prefixes:
        return True, "prefix caching is off"
    prompt = _ids(PROBE_BLOCKS * gauges.block_size + 5)
    await _found_again(client, prompt)
    before = await _found_again(client, prompt)
    if said := await client.reset_prefix_cache():
        return False, said
    after = await _found_again(client, prompt)
    if said := await client.reset_prefix_cache():
        return False, said
    if not before:
        return False, "the probe was never found again although prefix caching is on: the reset cannot be checked"
    return after == 0, f"of a probe of {len(prompt)} tokens {before:.0f} were found before the reset, {after:.0f} after"


async def _found_again(client: EngineClient, prompt: list[int]) -> float:
    """How many tokens of the prompt the engine finds in its prefix cache now."""
    before = await client.gauges()
    await client.complete(prompt, **exactly(1))
    deadline = time.monotonic() + SETTLE_S
    while True:
        now = await client.gauges()
        if now.value("prefix_cache_queries_total") - before.value("prefix_cache_queries_total") >= len(prompt):
            return now.value("prefix_cache_hits_total") - before.value("prefix_cache_hits_total")
        if time.monotonic() > deadline:
            raise EngineTrouble(f"engine {client.index} does not count its prefix cache's queries")
        await asyncio.sleep(0.05)


async def _each(clients: list[EngineClient], ask) -> list:
    return list(await asyncio.gather(*(ask(client) for client in clients)))


def _ids(n: int) -> list[int]:
    """A prompt that no engine has seen."""
    return token_ids(n, 0, uuid.uuid4().hex)


CHECKS = {
    "idle": _idle, "warm_up": _warm_up, "exact": _exact, "greedy": _greedy, "prefix_reset": _prefix_reset,
}  # fmt: skip
