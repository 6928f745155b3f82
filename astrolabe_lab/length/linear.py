"""Length models that turn prompts into rows of numbers and weigh them linearly: what these have in common."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.length import artifact
from astrolabe_lab.length.estimator import Estimator
from astrolabe_lab.length.head import Head
from astrolabe_lab.length.pooled import PooledHead

if TYPE_CHECKING:
    import numpy as np


class LinearEstimator(Estimator):
    """Subclasses say what the rows are: ``_learn_rows``, ``_rows``, ``_write_rows`` and ``_read_rows``. One serving
    model gets a Head; several get a PooledHead."""

    alpha: float | None

    def _learn_rows(self, prompts: list[str]) -> np.ndarray:
        """Learn from distinct prompts how to make rows, and return theirs, float32 (p, d)."""
        raise NotImplementedError

    def _rows(self, prompts: list[str]) -> np.ndarray:
        raise NotImplementedError

    def _write_rows(self, folder: Path) -> None:
        raise NotImplementedError

    def _read_rows(self, folder: Path) -> None:
        raise NotImplementedError

    def _learn(self, samples):
        import numpy as np

        distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(samples.prompts))}
        prompt = np.array([distinct[text] for text in samples.prompts])
        rows = self._learn_rows(list(distinct))
        names = sorted(set(samples.models)) if samples.models else []
        if len(names) > 1:
            model = np.searchsorted(names, samples.models)
            self._head = PooledHead.learn(rows, prompt, model, samples.lengths, samples.censored, self.alpha)
        else:
            self._head = Head.learn(rows[prompt], samples.lengths, samples.censored, prompt, self.alpha)

    def _quantiles(self, prompts, models, levels):
        import numpy as np

        rows = self._rows(prompts)
        if isinstance(self._head, Head):
            return self._head.quantiles(rows, levels)
        return self._head.quantiles(rows, np.searchsorted(self.models_, models), levels)

    def _write(self, folder: Path) -> dict:
        self._write_rows(folder)
        artifact.save_arrays(folder / "head.npz", **self._head.arrays())
        return {"pooled": isinstance(self._head, PooledHead)}

    def _read(self, folder: Path, noted: dict) -> None:
        self._read_rows(folder)
        kind = PooledHead if noted["pooled"] else Head
        self._head = kind.from_arrays(artifact.load_arrays(folder / "head.npz"))
