"""What a sweep left in its folder, read back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab import record
from astrolabe_lab.errors import InputError

from .store import REQUESTS, SUMMARY

if TYPE_CHECKING:
    import pandas as pd


def read(folder: str | Path) -> pd.DataFrame:
    """The frame that the sweep in `folder` gave; its `attrs["sweep"]` is what run.json says of it.

    Raises InputError where there is none.
    """
    import pandas as pd

    path = Path(folder) / SUMMARY
    if not path.is_file():
        raise InputError(f"{folder} holds no {SUMMARY}: run a sweep with out={str(folder)!r} first")
    frame = pd.read_parquet(path)
    frame.attrs["sweep"] = record.read(Path(folder))
    return frame


def read_requests(folder: str | Path, **where: object) -> pd.DataFrame:
    """The requests of all runs kept in `folder` (keep="requests"), one row each, told apart by the sweep's columns.

    `where` picks runs, by a value or a list for columns of the summary: policy="random", qps=[20, 24]. Raises
    InputError for a column that the sweep has not, or where nothing is left.
    """
    import pandas as pd

    summary = read(folder)
    for name, value in where.items():
        if name not in summary:
            raise InputError(f"{folder}: the sweep has no column {name!r}; it has {', '.join(summary.columns)}")
        summary = summary[summary[name].isin(value if isinstance(value, (list, tuple)) else [value])]
    tells = list(summary.columns[: list(summary.columns).index("n")])
    frames = []
    for row in summary.to_dict("records"):
        path = Path(folder) / REQUESTS / f"{row['run']}.parquet"
        if not path.is_file():
            raise InputError(f"{folder}: the requests of run {row['run']} were not kept: keep='requests' keeps them")
        frames.append(pd.read_parquet(path).assign(**{name: row[name] for name in tells}))
    if not frames:
        raise InputError(f"{folder}: no run has {', '.join(f'{name}={value!r}' for name, value in where.items())}")
    return pd.concat(frames, ignore_index=True)
