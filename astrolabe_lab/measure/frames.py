"""What the columns of a result frame mean here, and what is said where one is missing."""

from collections.abc import Iterable

import pandas as pd

from astrolabe_lab.errors import InputError

STATUSES = ("ok", "rejected", "failed", "aborted")
NEEDED = ("arrived_s", "first_token_s", "finished_s", "generated_tokens", "status")


def require_columns(frame: pd.DataFrame, columns: Iterable[str]) -> None:
    """Raise InputError naming the `columns` that `frame` lacks and those it has."""
    if missing := [name for name in columns if name not in frame.columns]:
        raise InputError(f"frame lacks {listed(missing)}; it has {listed(frame.columns)}")


def listed(names: Iterable) -> str:
    """The names as a reader of an error message wants them: `a, b, c`, or `nothing`."""
    return ", ".join(map(str, names)) or "nothing"
