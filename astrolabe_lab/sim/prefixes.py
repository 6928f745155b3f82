"""What the requests of a trace share: their prefixes, as the engines' block pools compare them.

A trace's ``prefix_blocks`` lists ids of the leading blocks of each prompt, each of ``prefix_block_tokens`` tokens (the
trace says how many; Mooncake's 512 by default). Requests whose first k ids are equal have the same tokens as
far as both prompts reach into these k blocks; all other tokens are a request's own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from astrolabe_lab.errors import InputError
from astrolabe_lab.sim.caching import clear_pools
from astrolabe_lab.sim.compiled import blocks_of
from astrolabe_lab.sim.state import BLOCK, State

PREFIX_BLOCK_TOKENS = 512


class Prefixes(NamedTuple):
    """Request r lists ``chains[at[r]:]``, one number for each of its leading blocks of ``block_tokens`` that holds some
    of its ``listed_tokens[r]``; equal numbers say that all up to there is equal."""

    chains: np.ndarray  # int32
    at: np.ndarray  # (R,) int64
    listed_tokens: np.ndarray  # (R,) int64
    block_tokens: int


def read_prefixes(trace) -> Prefixes:
    """The prefixes of a trace frame. Raises InputError for a ``prefix_block_tokens`` that is no number of tokens."""
    tokens = block_tokens(trace)
    prompts = trace["prompt_tokens"].tolist()
    at = np.zeros(len(prompts), np.int64)
    listed = np.zeros(len(prompts), np.int64)
    if "prefix_blocks" not in trace:
        return Prefixes(np.zeros(0, np.int32), at, listed, tokens)
    numbers: dict[tuple[int, int], int] = {}  # (number of the chain before, id) -> number
    chains: list[int] = []
    for r, (ids, prompt) in enumerate(zip(trace["prefix_blocks"], prompts, strict=True)):
        at[r] = len(chains)
        listed[r] = min(prompt, len(ids) * tokens)
        chain = 0
        for one in ids[: -(-prompt // tokens)]:
            chain = numbers.setdefault((chain, one), len(numbers) + 1)
            chains.append(chain)
    return Prefixes(np.array(chains, np.int32), at, listed, tokens)


def block_tokens(trace) -> int:
    """How many tokens each id of the trace's ``prefix_blocks`` stands for."""
    from astrolabe_lab.trace import prefix_block_tokens

    tokens = prefix_block_tokens(trace)
    if tokens is None:
        return PREFIX_BLOCK_TOKENS
    if isinstance(tokens, bool) or not isinstance(tokens, (int, np.integer)) or not 1 <= tokens < 2**31:
        raise InputError(f"trace: prefix_block_tokens={tokens!r} must be a whole number of tokens, at least 1")
    return int(tokens)


def with_pools(state: State, trace) -> State:
    """The state with a pool of KV blocks for every engine that caches prefixes, and the requests of ``trace`` in it.
    Without such an engine it is the state itself."""
    engines = state.engines
    caching = np.flatnonzero(engines["caching"])
    if not len(caching):
        return state
    prefixes = read_prefixes(trace)
    state.requests["prefix_at"], state.requests["listed_tokens"] = prefixes.at, prefixes.listed_tokens
    blocks, at = 0, len(prefixes.chains)
    for i in caching:
        e = engines[i]
        usable, seats = int(e["usable_blocks"]), int(e["max_num_seqs"]) + 1  # one for a waiting request's look-up
        width = min(blocks_of(int(e["max_model_len"]), int(e["block_size"])), usable)
        e["prefix_block_tokens"] = prefixes.block_tokens
        e["bucket_mask"] = 2 ** (usable.bit_length() - 1) - 1
        e["pool_at"], e["tables_at"], e["table_width"], e["seats_at"] = blocks, at, width, at + seats * width
        blocks += usable + 1
        at += seats * (width + 1)
    lists = np.zeros(at, np.int32)
    lists[: len(prefixes.chains)] = prefixes.chains
    pool = np.zeros(blocks, BLOCK)
    clear_pools(engines, pool, lists)
    return state._replace(pool=pool, lists=lists)
