"""Requests drawn anew from those of a trace: the same ones in another order, or as a population."""

from __future__ import annotations

from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.rng import stream
from astrolabe_lab.trace.columns import checked_requests

if TYPE_CHECKING:
    import pandas as pd


def sample(frame: pd.DataFrame, n: int | None, seed: int, replace: bool = False) -> pd.DataFrame:
    """Return n requests of ``frame`` in random order, numbered 0..n-1 (``rid``); None takes as many as it has.

    replace: False permutes the set and takes the first n: no request comes twice, and with n = len(frame) every
        seed has the same requests in another order (the Astrolabe paper's mode: what differs between seeds is
        order and arrivals, so that intervals tell about this very set). True draws with replacement, as a
        bootstrap does: the trace stands for a population, and intervals over seeds tell about that.

    What belongs to a request stays together: lengths, text, SLO, prefix. Arrival times do not belong to it: the
    i-th request drawn arrives when the i-th of ``frame`` did, and with n above len(frame), where some would have
    none, ``arrived_s`` is left out (``arrivals.with_arrivals`` gives new ones). The draws come from the stream
    ``trace`` of the seed. Raises InputError for n < 1, or above len(frame) without replacement.
    """
    import numpy as np

    if not len(frame):
        raise InputError("sample: the trace has no rows; give at least one request")
    n = len(frame) if n is None else n
    n = checked_requests(n)
    if not replace and n > len(frame):
        raise InputError(
            f"n={n:,} is more than the {len(frame):,} requests of the trace: take fewer, or draw with replacement "
            "(replace=True)"
        )
    rng = stream(seed, "trace")
    rows = rng.integers(len(frame), size=n) if replace else rng.permutation(len(frame))[:n]
    drawn = frame.drop(columns=["rid", "arrived_s"], errors="ignore").take(rows).reset_index(drop=True)
    drawn.insert(0, "rid", np.arange(n, dtype=np.int64))
    if "arrived_s" in frame and n <= len(frame):
        drawn.insert(1, "arrived_s", frame["arrived_s"].to_numpy()[:n])
    drawn.attrs = dict(frame.attrs) | {"sampled": {"of": len(frame), "seed": int(seed), "replace": bool(replace)}}
    return drawn
