"""What must hold before pools are measured, beside ``bench.gates``: every pair is warm, exact, and answers alike.

pairs     every prefill engine has handed blocks to every decode engine, twice (the first transfer of a pair is no
          measure of the others), and the blocks were used where the engines count that
exact     through every pair an answer has exactly the tokens asked for
greedy    through every pair the answer is, token by token, that of a decode engine that computed the prompt itself

Emulated engines are asked all of them, but the tokens that they answer follow from a prompt's length and a token's
place alone: ``greedy`` then tells that none is lost or said twice, and nothing of what is in the blocks.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from astrolabe_lab.bench import gates
from astrolabe_lab.bench.engines import EngineClient, EngineTrouble
from astrolabe_lab.bench.gates import SETTLE_S, Verdict
from astrolabe_lab.bench.load import exactly, token_ids
from astrolabe_lab.serve.pools import handoff

GATES = ("pairs", "exact", "greedy")
FOUND = "external_prefix_cache_hits_total"  # tokens that a decode engine took from elsewhere
FAILED = "nixl_num_failed_transfers_total"
PROMPTS, ANSWER = (40, 200), 16
BLIND = "; emulated tokens follow from lengths and places: this says nothing of what is in the blocks"


@dataclass
class PairClient:
    """One pair of engines, asked in two steps as the router does."""

    prefill: EngineClient
    decode: EngineClient

    async def complete(self, prompt: list[int], **body):
        """The answer that the decode engine gives to a prompt computed by the other. Raises EngineTrouble."""
        asked = {"model": self.decode.model, "prompt": prompt, "temperature": 0.0, **body}
        name = f"gate-{uuid.uuid4().hex}"
        status, text = await self.prefill._ask(
            "POST", "/v1/completions", handoff.prefill_body(asked) | {"request_id": name}
        )
        if status != 200:
            raise EngineTrouble(f"prefill engine {self.prefill.index} answers HTTP {status}: {text[:200]}")
        handle = handoff.handle_of(json.loads(text))
        if handle is None:
            raise EngineTrouble(f"prefill engine {self.prefill.index} keeps no blocks: it is none of a pool")
        return await self.decode.complete(prompt, **body, kv_transfer_params=handle, request_id=name)


async def check_pools(
    prefill: Sequence[str], decode: Sequence[str], model: str, time_scale: float = 1.0, say=None, isolation=True,
    emulated=False,
) -> list[Verdict]:  # fmt: skip
    """Verdicts on the pools at these URLs: those of ``bench.gates`` on every engine by itself (idle, warm_up and, with
    ``isolation``, prefix_reset), then GATES on every pair. ``say`` gets each as it is reached; ``emulated`` engines'
    verdicts say what theirs are worth."""
    import aiohttp

    own = ("idle", "warm_up", "prefix_reset") if isolation else ("idle", "warm_up")
    verdicts = await gates.check([*prefill, *decode], model, own, time_scale, say)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        def clients(urls):
            return [EngineClient(session, i, url, model, 120.0 * max(1.0, time_scale)) for i, url in enumerate(urls)]

        pools = clients(prefill), clients(decode)
        pairs = [PairClient(p, d) for p in pools[0] for d in pools[1]]
        for name in GATES:
            try:
                ok, detail = await CHECKS[name](pairs, *pools)
                verdict = Verdict(name, ok, detail + BLIND * (emulated and name == "greedy"))
            except EngineTrouble as trouble:
                verdict = Verdict(name, False, str(trouble))
            verdicts.append(verdict)
            if say is not None:
                say(verdict)
    return verdicts


async def _pairs(pairs, prefill, decode) -> tuple[bool, str]:
    before = [await client.gauges() for client in decode]
    took = []
    for _ in range(2):
        started = time.monotonic()
        for pair in pairs:
            for n in PROMPTS:
                await pair.complete(token_ids(n, 0, uuid.uuid4().hex), **exactly(2))
        took.append(time.monotonic() - started)
    sent = 2 * len(prefill) * sum(n - 1 for n in PROMPTS)
    used = await _used(decode, before, sent)
    failed = sum([(await client.gauges()).value(FAILED) for client in decode]) - sum(g.value(FAILED) for g in before)
    said = f"{len(pairs)} pairs, half in {took[0]:.1f} s, half in {took[1]:.1f} s"
    if failed:
        return False, f"{failed:.0f} transfers failed ({said})"
    if used is None:
        return True, f"{said}; the engines do not count what they took from elsewhere"
    return used >= sent, f"{said}; {used:.0f} of at least {sent} prompt tokens a decode engine were taken over"


async def _used(decode, before, sent) -> float | None:
    """The fewest tokens that a decode engine has taken from elsewhere; None where engines do not count that."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        now = [await client.gauges() for client in decode]
        if not all(FOUND in gauges.values for gauges in now):
            return None
        used = min(n.value(FOUND) - b.value(FOUND) for n, b in zip(now, before, strict=True))
        if used >= sent or time.monotonic() > deadline:
            return used
        await asyncio.sleep(0.1)


async def _exact(pairs, prefill, decode) -> tuple[bool, str]:
    for pair in pairs:
        for n in PROMPTS:
            found = await pair.complete(token_ids(n, 0, uuid.uuid4().hex), **exactly(ANSWER))
            counted = found.prompt_tokens, found.completion_tokens, found.finish_reason
            if counted != (n, ANSWER, "length"):
                where = f"pair {pair.prefill.index}, {pair.decode.index}"
                return False, f"{where} counts {counted[0]} and {counted[1]} ({counted[2]}), not {n} and {ANSWER}"
    return True, f"prompts of {PROMPTS[0]} and {PROMPTS[1]}, {ANSWER} answer tokens, as asked for through every pair"


async def _greedy(pairs, prefill, decode) -> tuple[bool, str]:
    for n in PROMPTS:
        prompt = token_ids(n, 0, f"greedy gate of pools {uuid.uuid4().hex}")
        alone = (await decode[0].complete(prompt, **exactly(ANSWER))).tokens
        for pair in pairs:
            for client in (
                pair.prefill,
                pair.decode,
            ):  # lest blocks of the asking before are taken for those handed over
                if (await client.gauges()).caches_prefixes and (said := await _reset(client)):
                    return False, f"engine at {client.url}: {said}"
            found = (await pair.complete(prompt, **exactly(ANSWER))).tokens
            if found != alone:
                at = next((k for k, (a, b) in enumerate(zip(alone, found, strict=False)) if a != b), "the end")
                return False, (
                    f"pair {pair.prefill.index}, {pair.decode.index} departs at token {at} from an engine that "
                    "computed the prompt itself: are blocks lost or mixed up on the way?"
                )
        for client in decode[1:]:
            if (await client.complete(prompt, **exactly(ANSWER))).tokens != alone:
                return False, f"decode engine {client.index} departs from decode engine 0: is it the same model?"
    return (
        True,
        f"{ANSWER} greedy tokens are equal through {len(pairs)} pairs and on engines that compute by themselves",
    )


async def _reset(client: EngineClient) -> str:
    """What kept the prefix cache from being emptied; a prefill engine must first have let its blocks go."""
    deadline = time.monotonic() + SETTLE_S
    while said := await client.reset_prefix_cache():
        if time.monotonic() > deadline:
            return said
        await asyncio.sleep(0.1)
    return ""


CHECKS = {"pairs": _pairs, "exact": _exact, "greedy": _greedy}


async def failed_transfers(urls: Sequence[str], model: str) -> float:
    """Transfers that failed at these decode engines since they started, as they count them."""
    import aiohttp

    async with aiohttp.ClientSession() as session:
        clients = [EngineClient(session, i, url, model) for i, url in enumerate(urls)]
        return sum([(await client.gauges()).value(FAILED) for client in clients])
