"""``prompt_ridge``: a ridge regression on what the prompt's wording says. NumPy alone, under a millisecond a prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from astrolabe_lab.errors import InputError
from astrolabe_lab.length import artifact
from astrolabe_lab.length.estimator import Estimator
from astrolabe_lab.length.head import Head
from astrolabe_lab.length.wording import Wording
from astrolabe_lab.record import write_whole


@dataclass
class PromptRidge(Estimator):
    """Words, pairs of words, size, form and amounts of the prompt, weighed by a ridge on the log scale.

    vocabulary: at most so many terms. alpha: the penalty; None: the one of least held-out error.
    """

    vocabulary: int = 1000
    alpha: float | None = None
    kind = "prompt_ridge"

    def __post_init__(self):
        if isinstance(self.vocabulary, bool) or not isinstance(self.vocabulary, int) or self.vocabulary < 0:
            raise InputError(f"prompt_ridge: vocabulary={self.vocabulary!r} must be an integer >= 0")
        if self.alpha is not None and not (isinstance(self.alpha, (int, float)) and self.alpha > 0):
            raise InputError(f"prompt_ridge: alpha={self.alpha!r} must be a number > 0, or None")

    def _learn(self, samples):
        import numpy as np

        distinct, groups = np.unique(np.array(samples.prompts, dtype=object), return_inverse=True)
        self._wording = Wording.learn(distinct.tolist(), self.vocabulary)
        rows = self._wording.rows(distinct.tolist())[groups]
        names = sorted(set(samples.models)) if samples.models else []
        self._head = Head.learn(
            self._with_model(rows, samples.models, names),
            samples.lengths,
            samples.censored,
            groups,
            self.alpha,
        )

    def _quantiles(self, prompts, models, levels):
        rows = self._wording.rows(prompts)
        return self._head.quantiles(self._with_model(rows, models, self.models_), levels)

    def _with_model(self, rows, models, names):
        """The rows with a column for each serving model, where there are several."""
        import numpy as np

        if len(names) < 2:
            return rows
        return np.hstack([rows, np.array(models)[:, None] == np.array(names)]).astype(rows.dtype)

    def _write(self, folder: Path) -> dict:
        wording = self._wording
        arrays = {"weights": wording.weights, "center": wording.center, "spread": wording.spread}
        artifact.save_arrays(folder / "wording.npz", **arrays)
        write_whole(folder / "vocabulary.json", json.dumps(list(wording.vocabulary), ensure_ascii=True))
        artifact.save_arrays(folder / "head.npz", **self._head.arrays())
        return {"alpha": float(self._head.alpha)}

    def _read(self, folder: Path, noted: dict) -> None:
        vocabulary = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
        arrays = artifact.load_arrays(folder / "wording.npz")
        self._wording = Wording({term: i for i, term in enumerate(vocabulary)}, **arrays)
        self._head = Head(**artifact.load_arrays(folder / "head.npz"))
