"""What a length model learns from: prompts, how long the answers were, by which model, and which were cut short."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.trace.columns import MAX_TOKENS

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Samples:
    """n answers: ``prompts`` (text), ``lengths`` (float64, tokens), ``models`` (names, or None for one unnamed
    model) and ``censored`` (bool: the answer was cut off there, its true length is at least this)."""

    prompts: list[str]
    lengths: np.ndarray
    models: list[str] | None
    censored: np.ndarray

    def __len__(self) -> int:
        return len(self.prompts)

    def sha256(self) -> str:
        """The hash of these rows, whatever their order."""
        models = self.models or [""] * len(self)
        rows = zip(models, self.lengths.tolist(), self.censored.tolist(), self.prompts, strict=True)
        digests = sorted(hashlib.sha256("\0".join(map(str, row)).encode("utf-8", "replace")).digest() for row in rows)
        return hashlib.sha256(b"".join(digests)).hexdigest()


def check_samples(prompts, lengths, models=None, censored=None) -> Samples:
    """The samples, checked. Raises InputError naming the argument and the first row that is wrong."""
    import numpy as np

    prompts = check_prompts(prompts)
    if not prompts:
        raise InputError("fit needs at least one prompt, and got none")
    try:
        values = np.asarray(lengths, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError("lengths: give a sequence of numbers, tokens of each answer") from None
    if values.shape != (len(prompts),):
        raise InputError(
            f"lengths has the shape {values.shape}, and there are {len(prompts):,} prompts: give one length a prompt"
        )
    wrong = np.flatnonzero(~((values >= 1) & (values <= MAX_TOKENS)))
    if len(wrong):
        raise InputError(
            f"lengths: row {wrong[0]} is {values[wrong[0]]:g} (allowed: 1 to {MAX_TOKENS:,} tokens); "
            f"{len(wrong):,} of {len(values):,} rows are wrong: leave them out"
        )
    cut = np.zeros(len(prompts), dtype=bool) if censored is None else np.asarray(censored)
    if cut.shape != (len(prompts),) or cut.dtype != bool:
        raise InputError(
            f"censored: give one truth value a prompt ({len(prompts):,}); True where the answer was cut off"
        )
    if cut.all():
        raise InputError(
            "every answer was cut off (censored), so how long answers are is not in the data: collect some with "
            "a higher max_tokens"
        )
    return Samples(prompts, values, check_models(models, len(prompts)), cut)


def check_prompts(prompts: Sequence[str]) -> list[str]:
    """The prompts as a list of str. Raises InputError for one text instead of a sequence, or what is not text."""
    if isinstance(prompts, (str, bytes)) or not hasattr(prompts, "__iter__"):
        raise InputError(f"prompts: give a sequence of texts, not {type(prompts).__name__}")
    prompts = list(prompts)
    for row, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise InputError(f"prompts: row {row} is {type(prompt).__name__}, not text; an empty text is allowed")
    return prompts


def check_models(models, n: int) -> list[str] | None:
    """The names of the serving models, one a row; one name stands for all rows. Raises InputError."""
    if models is None:
        return None
    models = [models] * n if isinstance(models, str) else list(models)
    if len(models) != n or not all(isinstance(name, str) and name for name in models):
        raise InputError(f"models: give one name, or one a prompt ({n:,}), each a text that is not empty")
    return models
