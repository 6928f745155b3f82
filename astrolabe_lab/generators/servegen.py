"""Requests drawn from ServeGen's clients: each at its own rate and burstiness, with its own lengths, window by window.

ServeGen publishes, for the models of a cloud provider, what each client sent in windows of ten minutes: how many
requests a second, the law of the gaps between them (Gamma or Weibull) and the distributions of its lengths. The
sum over clients is burstier and more varied than any one law; that is what this generator keeps.
Source: "ServeGen: Workload Characterization and Generation of Large Language Model Serving in Production" and the
folders of its repository.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.generators.servegen_files import WINDOW_S, Client, distribution, read_clients
from astrolabe_lab.generators.servegen_windows import draw_window
from astrolabe_lab.trace.columns import MAX_REQUESTS, checked_requests, ordered_frame

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd


@dataclass(frozen=True)
class Clients:
    """The clients of one model. ``window_s`` is how long their windows last."""

    clients: tuple[Client, ...]
    window_s: float
    _read: dict = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def starts_s(self) -> np.ndarray:
        """When windows begin, over all clients: float64, increasing."""
        import numpy as np

        return np.unique(np.concatenate([client.start_s for client in self.clients]))

    @cached_property
    def rates_rps(self) -> np.ndarray:
        """Requests a second: float64 (clients, windows), 0 where a client has no such window."""
        import numpy as np

        rates = np.zeros((len(self.clients), len(self.starts_s)))
        for row, client in zip(rates, self.clients, strict=True):
            row[np.searchsorted(self.starts_s, client.start_s)] = client.rate_rps
        return rates

    def distribution(self, client: Client, start_s: float, field: str) -> tuple[np.ndarray, np.ndarray]:
        """The values and cumulated probabilities of a length in a client's longer window, read once."""
        key = client.name, start_s, field
        if key not in self._read:
            self._read[key] = distribution(client, start_s, field, client.lengths[start_s][field])
        return self._read[key]

    def table(self) -> pd.DataFrame:
        """One row a client: ``client, mean_rps`` over all windows, ``active`` (share of windows with requests),
        ``cv`` (median of the measured ones, NaN without any) and ``has_lengths``; busiest first."""
        import numpy as np
        import pandas as pd

        rows = [
            {
                "client": client.name,
                "mean_rps": rates.mean(),
                "active": (rates > 0).mean(),
                "cv": np.median(client.cv[client.law > 0]) if client.law.any() else math.nan,
                "has_lengths": client.lengths is not None,
            }
            for client, rates in zip(self.clients, self.rates_rps, strict=True)
        ]
        return pd.DataFrame(rows).sort_values("mean_rps", ascending=False, kind="stable", ignore_index=True)


def load(path: str | Path | Sequence[str | Path], missing: str = "error") -> Clients:
    """Return the clients of a folder, or of a tar of one, or of several that make up one (rates here, lengths there).

    missing: what to do about a client without lengths: ``error`` refuses, ``drop`` leaves it out. Raises InputError,
    naming file and line, for what is damaged.
    """
    import numpy as np

    if missing not in ("error", "drop"):
        raise InputError(f"missing={missing!r} is unknown: allowed are error and drop")
    found = read_clients(path)
    without = [client for client in found if client.lengths is None]
    if without and (missing == "error" or len(without) == len(found)):
        names = ", ".join(client.name for client in without[:6])
        raise InputError(
            f"{found[0].source}: {len(without)} of {len(found)} clients have no dataset.json ({names}): add the files, "
            "or leave these clients out with missing='drop'"
        )
    found = [client for client in found if client.lengths is not None]
    steps = [np.diff(client.start_s).min() for client in found if len(client.start_s) > 1]
    return Clients(tuple(found), float(min(steps, default=WINDOW_S)))


def generate(
    source: Clients | str | Path | Sequence[str | Path],
    n: int | None = None,
    seed: int = 0,
    *,
    start_s: float | None = None,
    duration_s: float | None = None,
    qps: float | None = None,
    clients: int | Sequence[str] | None = None,
    shape: str = "fitted",
    coupled: bool = False,
    missing: str = "error",
) -> pd.DataFrame:
    """Return requests as the clients sent them: ``rid, arrived_s, prompt_tokens, output_tokens, client`` and, where the
    folder gives it, ``reason_ratio``.

    source: what ``load`` takes or gives. start_s: seconds from the first day's midnight at which the trace begins
        (default: the first window; 64800 is 18:00); arrived_s counts from there.
    n, duration_s: how many requests, or for how many seconds (default: an hour). With both, the first n of these.
    qps: the mean rate over the span. All clients are scaled by one factor, so their shares, the shape of the day and
        the laws of the gaps stay. Default: the folder's own rates.
    clients: so many, those with the most requests over all windows, or a list of names. Default: all.
    shape: ``fitted`` takes the shape of the gaps' law that ServeGen fitted; ``cv`` the shape at which the law has the
        coefficient of variation that ServeGen measured. They differ for Weibull, whose fit is by likelihood.
    coupled: ServeGen's own generator draws all lengths of a request from one uniform number, so that the longest
        prompt has the longest answer; True does that. The folder tells nothing of how they depend: by default
        they are independent.
    missing: see ``load``.

    In each window a client sends rate * window requests, a fraction left over being one more by chance, so that the
    mean is exact. The gaps between them are independent draws of the law, scaled together to fill the window; where
    the law's longest gaps are as long as the window, their coefficient of variation comes out below the law's. A
    length of 0 counts as 1. Each client and window has draws of its own from the seed: leaving out a client changes
    no other.
    Raises InputError for wrong arguments, a span without requests, or more requests asked for than there are.
    """
    import numpy as np
    import pandas as pd

    pool = source if isinstance(source, Clients) else load(source, missing)
    _check(n, duration_s, qps, shape)
    first, last = float(pool.starts_s[0]), float(pool.starts_s[-1] + pool.window_s)
    start_s = first if start_s is None else float(start_s)
    if not first <= start_s < last:
        raise InputError(f"start_s={start_s:g} is outside the windows there are: from {first:g} to {last:g} s")
    if duration_s is not None and start_s + duration_s > last:
        raise InputError(f"duration_s={duration_s:g} from {start_s:g} s on passes the last window's end, {last:g} s")
    chosen = _chosen(pool, clients)
    end_s = _end(pool, chosen, n, start_s, duration_s, qps, last)
    expected = _expected(pool, chosen, start_s, end_s)
    if expected <= 0:
        raise InputError(f"no client sends anything from {start_s:g} to {end_s:g} s: choose another span or clients")
    factor = 1.0 if qps is None else qps * (end_s - start_s) / expected

    to_fill = duration_s is None and n is not None
    parts, count = [], 0
    for at in np.flatnonzero((pool.starts_s + pool.window_s > start_s) & (pool.starts_s < last)):
        if pool.starts_s[at] >= end_s and not (to_fill and count < n):
            break
        rates = pool.rates_rps[:, at] * factor
        if (sent := count + rates[chosen].sum() * pool.window_s) > MAX_REQUESTS:
            raise InputError(
                f"the clients send {sent:.3g} requests up to {pool.starts_s[at] + pool.window_s:g} s, more than the "
                f"{MAX_REQUESTS:,} that are drawn at once: take fewer clients, a shorter span or less qps"
            )
        drawn = (draw_window(pool, i, at, rates[i], seed, shape, coupled) for i in chosen if rates[i] > 0)
        new = [part[part["arrived_s"] >= start_s] for part in drawn]
        parts, count = parts + new, count + sum(map(len, new))
    frame = pd.concat(parts, ignore_index=True).sort_values("arrived_s", kind="stable", ignore_index=True)
    frame = frame if to_fill else frame[frame["arrived_s"] < end_s]
    if not len(frame) or (n is not None and len(frame) < n):
        raise InputError(
            f"the clients send {len(frame):,} requests in this span, {n or 1:,} are asked for: begin earlier, take "
            "more clients, or scale them up with qps"
        )
    frame = frame.head(n if n is not None else len(frame)).reset_index(drop=True)
    frame["arrived_s"] -= start_s
    frame.insert(0, "rid", np.arange(len(frame), dtype=np.int64))
    if "reason_ratio" in frame and frame["reason_ratio"].isna().any():  # some clients have it, some do not
        frame = frame.drop(columns="reason_ratio")
    frame = ordered_frame({name: frame[name].to_numpy() for name in frame})
    frame.attrs = {
        "source": f"servegen start_s={start_s:g} seed={seed} n={len(frame)}",
        "format": "servegen",
        "clients": len(chosen),
        "rate_factor": factor,
        "window_s": pool.window_s,
    }
    return frame


def _check(n, duration_s, qps, shape) -> None:
    if shape not in ("fitted", "cv"):
        raise InputError(f"shape={shape!r} is unknown: allowed are fitted and cv")
    if n is not None:
        checked_requests(n)
    for name, value in (("duration_s", duration_s), ("qps", qps)):
        good = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value) and value > 0
        if value is not None and not good:
            raise InputError(f"{name}={value!r} is not usable: a finite number > 0")


def _chosen(pool: Clients, clients) -> list[int]:
    """Indices of the clients asked for, in the folder's order."""
    names = [client.name for client in pool.clients]
    if clients is None:
        return list(range(len(names)))
    if isinstance(clients, Sequence) and not isinstance(clients, str):
        unknown = [name for name in clients if name not in names]
        if unknown or not clients:
            raise InputError(f"clients={list(clients)!r}: the names there are {', '.join(names)}")
        return sorted({names.index(name) for name in clients})
    if isinstance(clients, bool) or not hasattr(clients, "__index__") or not 1 <= clients <= len(names):
        raise InputError(f"clients={clients!r} is not usable: from 1 to {len(names)}, or a list of names")
    busiest = pool.table()["client"].head(operator.index(clients))
    return sorted(names.index(name) for name in busiest)


def _expected(pool: Clients, chosen: list[int], start_s: float, end_s: float) -> float:
    """The requests that these clients sent from ``start_s`` to ``end_s``, by their rates."""
    import numpy as np

    overlap = np.minimum(pool.starts_s + pool.window_s, end_s) - np.maximum(pool.starts_s, start_s)
    return float(pool.rates_rps[chosen].sum(axis=0) @ np.maximum(overlap, 0.0))


def _end(pool: Clients, chosen, n, start_s, duration_s, qps, last) -> float:
    """Where the span ends: asked for, an hour, or where n requests are to be expected (a whole window, with qps)."""
    if duration_s is not None:
        return start_s + duration_s
    if n is None:
        return min(start_s + 3600.0, last)
    if qps is not None:
        return min(start_s + math.ceil(n / qps / pool.window_s) * pool.window_s, last)
    ends = (float(at) + pool.window_s for at in pool.starts_s if at + pool.window_s > start_s)
    return next((end for end in ends if _expected(pool, chosen, start_s, end) >= n), last)
