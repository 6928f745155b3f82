"""What the tests of trace files share: a frame of every column, awkward texts, and the error of a refusal."""

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab import trace
from astrolabe_lab.errors import InputError

HEADER = "rid,arrived_s,prompt_tokens,output_tokens\n"


def refusal(*args, **kwargs):
    """The message with which trace.load refuses, one line."""
    with pytest.raises(InputError) as raised:
        trace.load(*args, **kwargs)
    message = str(raised.value)
    assert "\n" not in message
    return message


def full_frame():
    awkward = [
        "",
        "NA",
        "null",
        'quote " and, comma',
        "two\nlines",
        "cr\rlf\r\n",
        " spaced ",
        "\u00e9\u4e2d\U0001f600",
    ]
    n = len(awkward)
    frame = pd.DataFrame(
        {
            "rid": np.arange(n)[::-1] * 3,
            "arrived_s": np.cumsum(np.random.default_rng(0).random(n)) / 3,
            "prompt_tokens": range(3, n + 3),
            "output_tokens": range(10**9 - n, 10**9),
            "predicted_tokens": [1] * n,
            "slo": ["tight", "loose"] * (n // 2),
            "family": ["chat"] * n,
            "prompt": awkward,
            "prefix_blocks": [(1, 2, 3), ()] * (n // 2),
            "prefix_block_tokens": 1,
            "client": awkward[::-1],
            "reason_ratio": np.linspace(0, 1, n),
        }
    )
    return trace.check(frame)


def conversation(prompt, answer, **more):
    turns = [
        {"from": "human", "value": prompt},
        {"from": "gpt", "value": answer},
        {"from": "human", "value": "more"},
    ]
    return {"id": "x", "conversations": turns} | more


def words(n):
    return " ".join(["word"] * n)
