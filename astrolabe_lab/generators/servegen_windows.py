"""One client of ServeGen in one window: how many requests, when, and how long."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.generators.servegen_files import FIELDS, Client
from astrolabe_lab.rng import stream

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

_NAMES = {"input_tokens": "prompt_tokens", "output_tokens": "output_tokens", "reason_ratio": "reason_ratio"}


def draw_window(pool, i: int, at: int, rate_rps: float, seed: int, shape: str, coupled: bool) -> pd.DataFrame:
    """Return the requests of client ``i`` in window ``at`` of the pool, at this rate: perhaps none.

    Columns: ``arrived_s`` (on the folder's clock), ``prompt_tokens, output_tokens``, perhaps ``reason_ratio``, and
    ``client``. ``shape`` and ``coupled`` as in ``servegen.generate``. Raises InputError where lengths are missing.
    """
    import numpy as np
    import pandas as pd

    client, start_s = pool.clients[i], float(pool.starts_s[at])
    here = int(np.searchsorted(client.start_s, start_s))
    rng = _rng(client.name, here, seed)
    mean = rate_rps * pool.window_s
    count = int(mean) + int(rng.random() < mean - int(mean))
    from_s, fields = client.distributions(start_s)
    arrived_s = start_s + pool.window_s * _places(client, here, count, shape, rng)
    columns = {"arrived_s": np.minimum(arrived_s, np.nextafter(start_s + pool.window_s, 0))}  # not rounded out of it
    together = rng.random(count)
    for name in FIELDS:
        if name not in fields and name == "reason_ratio":
            continue
        if name not in fields:
            raise InputError(f"{client.source}: client {client.name}, window {from_s:g}: no {name}")
        values, cumulated = pool.distribution(client, from_s, name)
        drawn = values[np.searchsorted(cumulated, together if coupled else rng.random(count), side="right")]
        columns[_NAMES[name]] = drawn if name == "reason_ratio" else np.maximum(drawn, 1).astype(np.int64)
    return pd.DataFrame(columns).assign(client=client.name)


def weibull_shape(cv: float) -> float:
    """Return the shape at which a Weibull law has this coefficient of variation, from 0.02 to 200.

    1 + cv^2 = Gamma(1 + 2/k) / Gamma(1 + 1/k)^2 falls as k grows; solved by bisection on log k.
    """
    low, high = math.log(0.02), math.log(200.0)
    for _ in range(60):
        middle = (low + high) / 2
        k = math.exp(middle)
        too_wide = math.lgamma(1 + 2 / k) - 2 * math.lgamma(1 + 1 / k) > math.log1p(cv * cv)
        low, high = (middle, high) if too_wide else (low, middle)
    return math.exp((low + high) / 2)


def _rng(name: str, window: int, seed: int) -> np.random.Generator:
    """A generator of each client's and window's own, so that leaving some out changes no other."""
    import numpy as np

    own = stream(seed, f"servegen {name}").bit_generator.seed_seq
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(own.entropy, spawn_key=(window,))))


def _places(client: Client, here: int, count: int, shape: str, rng) -> np.ndarray:
    """Where in the window, from 0 to 1, the requests fall: the ends of all but the last of count + 1 scaled gaps."""
    import numpy as np

    k = float(client.shape[here])
    if client.law[here] == 2:
        gaps = rng.weibull(weibull_shape(float(client.cv[here])) if shape == "cv" else k, count + 1)
    else:
        gaps = rng.standard_gamma(k, count + 1)
    gaps /= gaps.max() or 1.0  # a Weibull law of a small shape reaches numbers whose sum is infinite
    return np.cumsum(gaps)[:-1] / (gaps.sum() or 1.0)
