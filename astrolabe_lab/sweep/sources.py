"""The requests that runs share: read once where the sweep starts, prepared and kept where runs are made."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

GENERATORS = ("sharegpt_like",)
SAMPLES = ("head", "permute", "resample")
KEPT = 4  # prepared sets that a process keeps


@dataclass(frozen=True)
class Requests:
    """Which requests a run serves; runs with equal ones share them."""

    source: str  # the fingerprint of a frame in `Sources`, or a generator
    count: int | None
    sample: str
    lengths: str
    seed: int


class Sources:
    """The traces of a sweep, by the fingerprint of their requests; `name` is a file, a frame or a generator."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.frames: dict[str, pd.DataFrame] = {}
        self._known: dict[object, str] = {}

    def find(self, trace: object, **loading: str) -> str:
        """What `Requests.source` calls this trace; reads it if it is a file not yet read."""
        import pandas as pd

        from astrolabe_lab.trace import load

        if isinstance(trace, str) and trace in GENERATORS:
            return trace
        key = id(trace) if isinstance(trace, pd.DataFrame) else (str(trace), *sorted(loading.items()))
        if key not in self._known:
            if isinstance(trace, pd.DataFrame):
                frame = trace
            elif isinstance(trace, (str, Path)):
                frame = load(self._path(trace), **loading)
            else:
                raise InputError(f"trace={trace!r} is no file, trace frame or generator ({', '.join(GENERATORS)})")
            self._known[key] = self._keep(frame)
        return self._known[key]

    def _path(self, trace: str | Path) -> Path:
        path = Path(trace).expanduser()
        return self.folder / path if self.folder and not path.is_absolute() else path

    def _keep(self, frame: pd.DataFrame) -> str:
        from .identity import of_requests

        frame = frame.drop(columns="prompt", errors="ignore")  # no run reads it
        print_ = of_requests(frame)
        self.frames[print_] = frame
        return print_


_prepared: OrderedDict[Requests, pd.DataFrame] = OrderedDict()


def prepared(requests: Requests, frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The requests with their predicted lengths, without arrivals of the run's; the last few are kept."""
    if requests in _prepared:
        _prepared.move_to_end(requests)
    else:
        _prepared[requests] = _prepare(requests, frames)
        while len(_prepared) > KEPT:
            _prepared.popitem(last=False)
    return _prepared[requests]


def _prepare(requests: Requests, frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    from astrolabe_lab import length, sharegpt_like, trace

    if requests.source == "sharegpt_like":
        frame = sharegpt_like.generate(requests.count, seed=requests.seed, text=False)
    else:
        frame = frames[requests.source]
        count = len(frame) if requests.count is None else requests.count
        if requests.sample == "head":
            frame = frame.head(count)
        else:
            frame = trace.sample(frame, count, requests.seed, replace=requests.sample == "resample")
    return length.attach(frame, requests.lengths, requests.seed)
