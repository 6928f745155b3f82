"""The leading blocks of a prompt, as numbers: what two requests share that begin alike."""

from __future__ import annotations

import json
from hashlib import blake2b

from .openai_api import Asked

BLOCK_TOKENS = 64  # what a block stands for in a router's record of prefixes
BLOCK_BYTES = 4 * BLOCK_TOKENS  # of text, about as many tokens
MOST_BLOCKS = 512


def prefix_blocks(asked: Asked) -> tuple[int, ...]:
    """Numbers of the prompt's whole leading blocks, 64 token ids each, or 256 bytes of text; at most MOST_BLOCKS.

    Equal blocks have equal numbers in every process; nothing of the text can be read from them.
    """
    if asked.prompt_ids is not None:
        ids = asked.body["prompt"]
        ids = ids[0] if ids and isinstance(ids[0], list) else ids
        whole = min(len(ids) // BLOCK_TOKENS, MOST_BLOCKS)
        pieces = [json.dumps(ids[j * BLOCK_TOKENS : (j + 1) * BLOCK_TOKENS]).encode() for j in range(whole)]
    else:
        text = asked.text.encode("utf-8", "surrogatepass")
        whole = min(len(text) // BLOCK_BYTES, MOST_BLOCKS)
        pieces = [text[j * BLOCK_BYTES : (j + 1) * BLOCK_BYTES] for j in range(whole)]
    return tuple(int.from_bytes(blake2b(piece, digest_size=6).digest(), "big") for piece in pieces)
