"""Length models that turn prompts into rows of numbers and weigh them linearly: what these have in common."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.length import artifact
from astrolabe_lab.length.estimator import Estimator
from astrolabe_lab.length.head import Head
from astrolabe_lab.length.pooled import PooledHead

if TYPE_CHECKING:
    import numpy as np


class LinearEstimator(Estimator):
    """Subclasses say what the rows are: ``_learn_rows``, ``_rows``, ``_write_rows`` and ``_read_rows``. One serving
    model gets a Head; several get a PooledHead. The last columns of the rows, the wording's interplay, are used where
    that lowers the held-out error."""

    alpha: float | None

    def _learn_rows(self, prompts: list[str]) -> tuple[np.ndarray, int]:
        """Learn from distinct prompts how to make rows; theirs, float32 (p, d), and how many columns are plain."""
        raise NotImplementedError

    def _rows(self, prompts: list[str], interplay: bool) -> np.ndarray:
        """The rows of these prompts, the columns that are not plain only if ``interplay``."""
        raise NotImplementedError

    def _reread(self, weights: np.ndarray) -> np.ndarray:
        """Weights of the rows of ``_learn_rows``, (d,) or (d, k), as weights of what ``_rows`` gives for a prompt."""
        return weights

    def _write_rows(self, folder: Path) -> None:
        raise NotImplementedError

    def _read_rows(self, folder: Path) -> None:
        raise NotImplementedError

    def _learn(self, samples):
        import numpy as np

        distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(samples.prompts))}
        prompt = np.array([distinct[text] for text in samples.prompts])
        rows, plain = self._learn_rows(list(distinct))
        names = sorted(set(samples.models)) if samples.models else []
        if names:
            _check_uncut(names, samples)
        model = np.searchsorted(names, samples.models) if len(names) > 1 else None

        def head(x):
            if model is None:
                return Head.learn(x[prompt], samples.lengths, samples.censored, prompt, self.alpha)
            return PooledHead.learn(x, prompt, model, samples.lengths, samples.censored, self.alpha)

        self._head, self._interplay = head(rows[:, :plain]), False
        if plain < rows.shape[1]:
            richer = head(rows)
            if richer.loss < self._head.loss:
                self._head, self._interplay = richer, True
        self._head = self._head.through(self._reread)

    def _quantiles(self, prompts, models, levels):
        import numpy as np

        rows = self._rows(prompts, self._interplay)
        if isinstance(self._head, Head):
            return self._head.quantiles(rows, levels)
        return self._head.quantiles(rows, np.searchsorted(self.models_, models), levels)

    def _write(self, folder: Path) -> dict:
        self._write_rows(folder)
        artifact.save_arrays(folder / "head.npz", **self._head.arrays())
        return {"pooled": isinstance(self._head, PooledHead), "interplay": self._interplay}

    def _read(self, folder: Path, noted: dict) -> None:
        self._read_rows(folder)
        self._interplay = bool(noted["interplay"])
        kind = PooledHead if noted["pooled"] else Head
        self._head = kind.from_arrays(artifact.load_arrays(folder / "head.npz"))


def _check_uncut(names: list[str], samples) -> None:
    """Raise InputError for a serving model none of whose answers ended by itself."""
    known = {model for model, cut in zip(samples.models, samples.censored, strict=True) if not cut}
    for name in names:
        if name not in known:
            raise InputError(
                f"models: every answer of serving model {name!r} was cut off (censored), so how long its answers are "
                "is not in the data: leave them out, or collect some with a higher max_tokens"
            )
