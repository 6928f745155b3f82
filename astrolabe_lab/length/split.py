"""Which prompts are for learning and which for judging: by distinct prompt, never by row, from a named seed."""

from __future__ import annotations

import json
import operator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.record import write_whole
from astrolabe_lab.rng import stream
from astrolabe_lab.text_files import json_object

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd


@dataclass(frozen=True)
class Split:
    """The prompts of one split, by ``prompt_uid``: ``train``, ``validation`` (may be empty) and ``test``."""

    name: str
    seed: int
    train: frozenset[str]
    validation: frozenset[str]
    test: frozenset[str]

    def rows(self, frame: pd.DataFrame, part: str) -> np.ndarray:
        """Which rows of ``frame`` belong to ``part``, bool. Raises InputError for a prompt in no part."""
        if part not in ("train", "validation", "test"):
            raise InputError(f"part {part!r} is unknown: allowed are train, validation and test")
        uids = frame["prompt_uid"]
        unknown = next((uid for uid in uids if uid not in self.train | self.validation | self.test), None)
        if unknown is not None:
            raise InputError(
                f"split {self.name}: prompt {unknown} is in none of its parts: it was made from other data; make "
                "a new one"
            )
        return uids.isin(getattr(self, part)).to_numpy()

    def save(self, path) -> Path:
        """Write the split as JSON, whole or not at all; return the path."""
        parts = {name: sorted(value) if isinstance(value, frozenset) else value for name, value in asdict(self).items()}
        write_whole(Path(path), json.dumps({"format": "astrolabe-length-split"} | parts, indent=1) + "\n")
        return Path(path)

    @classmethod
    def load(cls, path) -> Split:
        """The split that ``save`` wrote. Raises InputError for another file."""
        found = json_object(path, "this split")
        try:
            if found.pop("format") != "astrolabe-length-split":
                raise ValueError("another format")
            parts = {name: frozenset(map(str, found.pop(name))) for name in ("train", "validation", "test")}
            split = cls(**found, **parts)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} holds no split ({type(error).__name__}: {error})") from None
        if split.train & split.test or split.train & split.validation or split.validation & split.test:
            raise InputError(f"{path}: a prompt is in two parts of the split; make it again")
        return split


def by_prompt(frame: pd.DataFrame, seed: int = 0, test: float = 0.2, validation: float = 0.0) -> Split:
    """Return the split ``seed`` of the distinct prompts of ``frame``: shares ``test`` and ``validation``, rest train.

    The same prompts and seed give the same split, whatever the order and number of rows. Raises InputError where a
    part that is asked for would be empty.
    """
    for name, share in (("test", test), ("validation", validation)):
        if not (isinstance(share, (int, float)) and 0 <= share < 1):
            raise InputError(f"{name}={share!r} must be a share from 0 up to, not including, 1")
    uids = sorted(set(frame["prompt_uid"]))
    n_test, n_validation = round(len(uids) * test), round(len(uids) * validation)
    if (test and not n_test) or (validation and not n_validation) or n_test + n_validation >= len(uids):
        raise InputError(
            f"{len(uids)} distinct prompts are too few for shares of {test} (test) and {validation} (validation)"
        )
    drawn = [uids[i] for i in stream(seed, "length split").permutation(len(uids))]
    return Split(
        name=f"prompts-{operator.index(seed)}",
        seed=operator.index(seed),
        test=frozenset(drawn[:n_test]),
        validation=frozenset(drawn[n_test : n_test + n_validation]),
        train=frozenset(drawn[n_test + n_validation :]),
    )
