"""``prompt_ridge``: a ridge regression on what the prompt's wording says. NumPy alone, under a millisecond a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from astrolabe_lab.errors import InputError
from astrolabe_lab.length.linear import LinearEstimator
from astrolabe_lab.length.wording import Wording


@dataclass
class PromptRidge(LinearEstimator):
    """Words, pairs of words, size, form and amounts of the prompt, weighed by a ridge on the log scale.

    vocabulary: at most so many terms. alpha: the penalty; None: the one of least held-out error.
    """

    vocabulary: int = 1000
    alpha: float | None = None
    kind = "prompt_ridge"

    def __post_init__(self):
        if isinstance(self.vocabulary, bool) or not isinstance(self.vocabulary, int) or self.vocabulary < 0:
            raise InputError(f"prompt_ridge: vocabulary={self.vocabulary!r} must be an integer >= 0")
        check_alpha(self.kind, self.alpha)

    def _learn_rows(self, prompts):
        self._wording = Wording.learn(prompts, self.vocabulary)
        return self._wording.rows(prompts), self._wording.plain_columns

    def _rows(self, prompts, interplay):
        return self._wording.rows(prompts, interplay)

    def _write_rows(self, folder: Path) -> None:
        self._wording.write(folder)

    def _read_rows(self, folder: Path) -> None:
        self._wording = Wording.read(folder)


def check_alpha(kind: str, alpha) -> None:
    """Raise InputError unless ``alpha`` is a finite number > 0 or None."""
    number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    if alpha is not None and not (number and 0 < alpha < float("inf")):
        raise InputError(f"{kind}: alpha={alpha!r} must be a number > 0, or None to have it chosen")
