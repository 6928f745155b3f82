"""The bursts of a calibration: rounds over all cells in random order, as many as the budget allows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from astrolabe_lab.calibrate.cells import Decode, Mixed, Prefill, Probe, Rough
from astrolabe_lab.errors import InputError
from astrolabe_lab.sim.config import EngineConfig

LONG_S = 4.0  # seconds of prefill that a burst's context may cost, at most
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
            if cell not in decode and _fits([*cell.probes(rough)], config):
                decode.append(cell)
    mixed = _mixed(config, rough, tokens, affordable)
    top = int(min(config.max_model_len - 2, affordable, tokens))
    sizes = sorted({int(n) for n in np.geomspace(max(1, min(16, top)), top, 7)})
    prefill = (Prefill(tuple(sizes)),)
    return Plan(tuple(decode) if decodes else (), tuple(mixed), prefill if prefills else ())


def _mixed(config: EngineConfig, rough: Rough, tokens: int, affordable: float) -> list[Mixed]:
    """One witness sees every size, several at a time; more of them, short and long, see a few; one sees long ones."""
    room = config.max_num_batched_tokens
    edges = sorted({n for n in (*EDGES, *range(2048, room, 1024), room) if n <= room})
    found = []
    single = [n - 1 for n in edges if n >= 2]
    for part in np.array_split(np.array(single), max(1, len(single) // 6)):
        found.append(Mixed(1, 16, tuple(int(n) for n in part)))
    many = min(config.max_num_seqs - 1, 16)
    few = [n for n in (8, 64, 128, room // 2, room) if many < n - 1 and n <= room]
    long = int(min(config.max_model_len - 600, 0.7 * tokens / many, affordable / many))
    for prompt in (16, long):
        if few and many > 1 and prompt > 0:
            found.append(Mixed(many, prompt, tuple(n - many for n in few)))
    chunks = [int(m * (room - 1)) for m in (1, 2, 4, 8) if m * (room - 1) < min(config.max_model_len - 2, affordable)]
    if len(chunks) > 1:
        found.append(Mixed(1, 16, tuple(chunks)))
    return [cell for cell in found if _fits(cell.probes(rough), config)]


def _fits(probes, config: EngineConfig) -> bool:
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
