"""ShareGPT-like requests after the served model was replaced: the same prompts, other answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

CHANGES = ("none", "longer", "reasoning")
LONGER = 2.0
# Tokens of thought before the answer, in the median, and how much of the old answer is left after it.
THOUGHT = {
    "define": 300, "explain": 500, "program": 700, "choose": 600, "review": 600, "look_up": 600, "summarize": 100,
}  # fmt: skip
TERSER = {"story": 0.4, "essay": 0.5, "rewrite": 0.4, "list": 0.6, "email": 0.6}


def generate(n: int, seed: int = 0, change: str = "none") -> pd.DataFrame:
    """The requests of ``sharegpt_like.generate(n, seed)`` as another served model answers them.

    change: ``none``; ``longer``: every answer is twice as long, so that the order of requests stays; ``reasoning``: the
    new model thinks before it answers questions, programs and reviews, and is terse where it writes (stories, essays,
    letters), so that much of what used to be short is long now, and the other way round. Raises InputError for another
    change, or as ``sharegpt_like.generate`` does.
    """
    import numpy as np

    from astrolabe_lab.generators import sharegpt_like
    from astrolabe_lab.rng import stream

    if change not in CHANGES:
        raise InputError(f"change={change!r} is unknown: allowed are {', '.join(CHANGES)}")
    frame = sharegpt_like.generate(n, seed=seed)
    lengths = frame["output_tokens"].to_numpy(float)
    if change == "longer":
        lengths = LONGER * lengths
    elif change == "reasoning":
        task = sharegpt_like.features(n, seed=seed)["task"]
        spread = np.exp(sharegpt_like.SIGMA * stream(seed, "thoughts").standard_normal(n))
        lengths = lengths * task.map(TERSER).fillna(1.0) + task.map(THOUGHT).fillna(0.0) * spread
    most = sharegpt_like.MAX_TOTAL_TOKENS - frame["prompt_tokens"].to_numpy()
    out = frame.assign(output_tokens=np.clip(np.rint(lengths), 1, most).astype(np.int64))
    out.attrs = frame.attrs | {"source": f"{frame.attrs['source']} change={change}"}
    return out
