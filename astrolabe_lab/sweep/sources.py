"""The requests that runs share: read once where the sweep starts, prepared and kept where runs are made."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab import generators
from astrolabe_lab.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

GENERATORS = generators.NAMES  # those that need no file, and so draw where runs are made
SAMPLES = ("head", "permute", "resample")
KEPT = 4  # prepared sets that a process keeps


@dataclass(frozen=True)
class Requests:
    """Which requests a run serves; runs with equal ones share them."""

    source: str  # the fingerprint of a frame in `Sources.frames`, or a generator
    count: int | None
    sample: str
    lengths: str
    seed: int


class Sources:
    """The traces of a sweep, read once, by the fingerprint of their requests; generators draw where runs are made."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.frames: dict[str, pd.DataFrame] = {}
        self._read: dict[object, pd.DataFrame] = {}
        self._found: dict[object, str] = {}

    def requests(
        self, trace: object, count: int | None, sample: str, lengths: str, seed: int, **loading: object
    ) -> Requests:
        """What runs on this trace serve: a trace frame, the path of a file (`loading` goes to `trace.load`), or a
        generator. What a length model predicts is worked out here, where the model is."""
        tagged, drawn = lengths.startswith("tagger:"), generators.is_generator(trace)
        if drawn and trace in GENERATORS and not tagged:
            return Requests(trace, count, sample, lengths, seed)
        named = (trace, count, seed) if drawn else id(trace) if hasattr(trace, "columns") else str(trace)
        key = named, tuple(sorted(loading.items())), lengths if tagged else ""
        if key not in self._found:
            frame = generators.draw(trace, count, seed, text=tagged) if drawn else self._frame(trace, loading)
            self._found[key] = self._keep(frame, lengths)
        return Requests(self._found[key], None if drawn else count, sample, "trace" if tagged else lengths, seed)

    def _frame(self, trace: object, loading: dict) -> pd.DataFrame:
        import pandas as pd

        from astrolabe_lab.trace import load

        if isinstance(trace, pd.DataFrame):
            return trace
        if not isinstance(trace, (str, Path)):
            raise InputError(f"trace={trace!r} is no file, trace frame or generator ({generators.SPECS})")
        key = str(trace), tuple(sorted(loading.items()))
        if key not in self._read:
            path = Path(trace).expanduser()
            self._read[key] = load(self.folder / path if self.folder else path, **loading)
        return self._read[key]

    def _keep(self, frame: pd.DataFrame, lengths: str) -> str:
        from astrolabe_lab import length

        from .identity import of_requests

        if lengths.startswith("tagger:"):
            frame = length.attach(frame, lengths)
        frame = frame.drop(columns="prompt", errors="ignore")  # no run reads it
        found = of_requests(frame)
        self.frames[found] = frame
        return found


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
    from astrolabe_lab import length, trace

    if requests.source in GENERATORS:
        frame = generators.draw(requests.source, requests.count, requests.seed, text=False)
    else:
        frame = frames[requests.source]
        count = len(frame) if requests.count is None else requests.count
        if requests.sample == "head":
            frame = frame.head(count)
        else:
            frame = trace.sample(frame, count, requests.seed, replace=requests.sample == "resample")
    return length.attach(frame, requests.lengths, requests.seed)
