"""The bursts of a calibration: rounds over all cells in random order, as many as the budget allows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from astrolabe_lab.calibrate.cells import Decode, Mixed, Prefill, Probe, Rough
from astrolabe_lab.errors import InputError
from astrolabe_lab.sim.config import EngineConfig

LONG_S = 4.0  # seconds of prefill that a burst's context may cost, at most
WITNESSES = 6
EDGES = (1, 8, 16, 32, 48, 64, 72, 96, 128, 136, 192, 256, 264, 384, 512, 768, 1024, 1536)  # tiles end at 64, 128, 256


def roughly(target) -> Rough:
    """What steps take on this engine, from its first answers. Twice, as the first ones warm it up."""
    config = target.describe().engine
    room = config.max_num_batched_tokens
    longest = max(1, min(4 * room, config.max_model_len - 2, (config.usable_blocks - 1) * config.block_size // 2))
    for _ in range(2):
        (single,) = target.burst([Probe(16, 24)])
        pair = target.burst([Probe(16, 24)] * min(8, config.max_num_seqs))
        (short,) = target.burst([Probe(1, 1)])
        (long,) = target.burst([Probe(longest, 1)])
    steps = single.tokens[-1] - single.tokens[0]
    if steps < 8 or not len(long.times):
        raise InputError("calibration: the engine did not stream its tokens; is it an OpenAI-compatible vLLM?")
    alone = float(single.times[-1] - single.times[0]) / steps
    together = float(np.median([(a.times[-1] - a.times[0]) / (a.tokens[-1] - a.tokens[0]) for a in pair]))
    first = max(short.first_s - short.sent_s, 1e-4)
    per_token = max((long.first_s - long.sent_s - first) / longest, 1e-8)
    return Rough(alone, max(0.0, (together - alone) / len(pair)), first, per_token, room)


@dataclass(frozen=True)
class Plan:
    """Cells of a round; ``refined`` adds sizes where the last round saw a bend."""

    decode: tuple[Decode, ...]
    mixed: tuple[Mixed, ...]
    prefill: tuple[Prefill, ...]

    @property
    def cells(self):
        return [*self.decode, *self.mixed, *self.prefill]

    def expected_s(self, rough: Rough) -> float:
        return sum(cell.expected_s(rough) + 0.1 for cell in self.cells)


def plan_for(config: EngineConfig, rough: Rough, prefills: bool = True, decodes: bool = True) -> Plan:
    """The cells for an engine: batches 1..max at short and long contexts, prompts 1..chunk beside few and many
    witnesses, chunked prompts, first tokens."""
    if config.max_num_seqs < 2:
        raise InputError("max_num_seqs=1 cannot be calibrated: a second seat must watch how long prompts take")
    tokens = int(0.9 * config.usable_blocks) * config.block_size
    affordable = LONG_S / max(rough.token_s + rough.chunk_s / rough.room, 1e-9)
    decode = []
    batches = _batches(config.max_num_seqs)
    for batch in batches:
        for share in (0.0, 1.0) if batch not in (1, batches[-1]) else (0.0, 0.5, 1.0):
            out = Decode(batch, 16).output_tokens(rough.room)
            most = min(config.max_model_len - 1, tokens // batch, int(affordable / batch))
            prompt = max(1, min(16, most - out), int(share * (most - out)))
            cell = Decode(batch, prompt)
            while cell.prompt_tokens > 1 and (
                cell.prompt_tokens + cell.output_tokens(rough.room) > config.max_model_len
                or batch * (-(-(cell.prompt_tokens + cell.output_tokens(rough.room)) // config.block_size) + 1)
                > config.usable_blocks
            ):
                cell = Decode(batch, max(1, int(0.93 * cell.prompt_tokens)))
            if cell not in decode and fits([*cell.probes(rough)], config):
                decode.append(cell)
    mixed = _mixed(config, rough, tokens, affordable)
    top = int(min(config.max_model_len - 2, affordable, tokens))
    sizes = sorted({int(n) for n in np.geomspace(max(1, min(16, top)), top, 7)})
    prefill = (Prefill(tuple(sizes)),)
    return Plan(tuple(decode) if decodes else (), tuple(mixed), prefill if prefills else ())


def _mixed(config: EngineConfig, rough: Rough, tokens: int, affordable: float) -> list[Mixed]:
    """A few witnesses see every size, several at a time; many of them, on short and long contexts, see some; a few see
    prompts of several chunks. Steps with fewer new tokens than there are witnesses count as the smallest seen."""
    room = config.max_num_batched_tokens
    edges = sorted({n for n in (*EDGES, *range(2048, room, 1024), room) if n <= room})
    few = max(1, min(WITNESSES, (config.max_num_seqs - 1) // 2))  # fewer than the many below: both numbers tell
    found = []
    sizes = sorted({1, *(n - few for n in edges if n > few)})
    for part in np.array_split(np.array(sizes), max(1, len(sizes) // 6)):
        if few:
            found.append(Mixed(few, 16, tuple(int(n) for n in part)))
    for many in sorted({min(config.max_num_seqs - 1, most) for most in (16, 160)}):
        some = [n - many for n in (8, 64, 128, room // 2, room) if many < n - 1 and n <= room]
        long = int(min(config.max_model_len - 600, 0.7 * tokens / many if many else 0, affordable / max(many, 1)))
        for prompt in (16, long):
            if some and many > 1 and prompt > 0:
                found.append(Mixed(many, prompt, tuple(some)))
    longest = min(config.max_model_len - 2, affordable, tokens / 2)
    chunks = [m * (room - few) for m in (1, 2, 4, 8) if m * (room - few) < longest]
    if few and len(chunks) > 1:
        found.append(Mixed(few, 16, tuple(chunks)))
    return [cell for cell in found if fits(cell.probes(rough), config)]


def fits(probes, config: EngineConfig) -> bool:
    """Whether the probes fit the KV cache all at once, and each the model's length."""
    blocks = sum(-(-(p.prompt_tokens + p.output_tokens) // config.block_size) for p in probes if p.output_tokens > 1)
    brief = max((-(-p.prompt_tokens // config.block_size) + 1 for p in probes if p.output_tokens == 1), default=0)
    longest = max(p.prompt_tokens + p.output_tokens for p in probes)
    return blocks + brief <= config.usable_blocks and longest <= config.max_model_len


def _batches(most: int) -> list[int]:
    """1, 2, 4, ... and beyond 16 also the values half way, up to ``most``."""
    sizes = {1, most}
    size = 2
    while size < most:
        sizes |= {size} | ({size + size // 2} if size >= 16 and size + size // 2 < most else set())
        size *= 2
    return sorted(sizes)
