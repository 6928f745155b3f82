"""What every learned model is held against: the constant, the truth, and the truth or a model made worse."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.length import artifact, survival
from astrolabe_lab.length.estimator import Estimator

if TYPE_CHECKING:
    import numpy as np


@dataclass
class Constant(Estimator):
    """The median (and every other quantile) of the lengths seen, for each serving model; prompts do not matter.

    Answers that were cut off count as at least so long: quantiles are Kaplan-Meier's.
    """

    kind = "constant"

    def _learn(self, samples):
        import numpy as np

        names = np.array(samples.models) if samples.models else None
        groups = sorted(set(samples.models)) if samples.models else [None]
        self._levels = np.linspace(0.0, 1.0, 201)
        rows = []
        for name in groups:
            mine = slice(None) if name is None else names == name
            rows.append(survival.quantiles(samples.lengths[mine], samples.censored[mine], self._levels))
        self._tokens = np.array(rows)

    def _quantiles(self, prompts, models, levels):
        import numpy as np

        index = np.searchsorted(self.models_, models) if models else np.zeros(len(prompts), dtype=int)
        at_levels = np.array([np.interp(levels, self._levels, row) for row in self._tokens])
        return at_levels[index]

    def _write(self, folder: Path) -> dict:
        artifact.save_arrays(folder / "quantiles.npz", levels=self._levels, tokens=self._tokens)
        return {}

    def _read(self, folder: Path, noted: dict) -> None:
        arrays = artifact.load_arrays(folder / "quantiles.npz")
        self._levels, self._tokens = arrays["levels"], arrays["tokens"]


@dataclass
class Oracle(Estimator):
    """The lengths it was fitted on, told again: an upper bound, for prompts it has seen and no others.

    Of a prompt answered several times it knows the answers' quantiles, so their spread is the noise floor.
    Raises InputError when asked for a prompt that ``fit`` was not given.
    """

    kind = "oracle"

    def _learn(self, samples):
        import numpy as np

        keys = _keys(samples.prompts, samples.models)
        order = np.lexsort((samples.lengths, keys))
        self._seen, self._tokens, self._cut = keys[order], samples.lengths[order], samples.censored[order]

    def _quantiles(self, prompts, models, levels):
        import numpy as np

        keys = _keys(prompts, models)
        first, last = (np.searchsorted(self._seen, keys, side=side) for side in ("left", "right"))
        unseen = np.flatnonzero(first == last)
        if len(unseen):
            raise InputError(
                f"prompts: row {unseen[0]} is not among those the oracle was fitted on ({len(unseen):,} of "
                f"{len(prompts):,} are not): an oracle knows what it was told, and no more"
            )
        out = np.repeat(self._tokens[first][:, None], len(levels), axis=1)
        for row in np.flatnonzero(last - first > 1):
            mine = slice(first[row], last[row])
            out[row] = survival.quantiles(self._tokens[mine], self._cut[mine], levels)
        return out

    def _write(self, folder: Path) -> dict:
        artifact.save_arrays(folder / "lengths.npz", seen=self._seen, tokens=self._tokens, cut=self._cut)
        return {}

    def _read(self, folder: Path, noted: dict) -> None:
        arrays = artifact.load_arrays(folder / "lengths.npz")
        self._seen, self._tokens, self._cut = arrays["seen"], arrays["tokens"], arrays["cut"]


@dataclass
class Noisy(Estimator):
    """Another model's predictions times (1 + relative_error * z), z standard normal, at least 1 token.

    z follows from seed, prompt and serving model alone: the same request is told the same length however it is
    batched, and levels of ``relative_error`` are paired. Source: both papers inject relative Gaussian error.
    """

    model: Estimator = field(default_factory=Oracle)
    relative_error: float = 0.25
    seed: int = 0
    kind = "noisy"

    def __post_init__(self):
        if not isinstance(self.model, Estimator):
            raise InputError(f"noisy: model={self.model!r} is no length model; e.g. noisy:model=prompt_ridge")
        if not (isinstance(self.relative_error, (int, float)) and 0 <= self.relative_error < math.inf):
            raise InputError(f"noisy: relative_error={self.relative_error!r} must be a finite number >= 0")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise InputError(f"noisy: seed={self.seed!r} must be an integer >= 0")

    def _learn(self, samples):
        self.model.fit(samples.prompts, samples.lengths, models=samples.models, censored=samples.censored)

    def _quantiles(self, prompts, models, levels):
        import numpy as np

        z = _normals(_keys(prompts, models, salt=f"noisy {self.seed}"))
        factor = np.maximum(1.0 + self.relative_error * z, 0.0)
        return self.model.predict_quantiles(prompts, levels, models) * factor[:, None]

    def _write(self, folder: Path) -> dict:
        self.model.save(folder / "model")
        return {}

    def _read(self, folder: Path, noted: dict) -> None:
        self.model = artifact.load(folder / "model")


def _keys(prompts, models, salt: str = "") -> np.ndarray:
    """A 64-bit hash of each prompt and serving model, uint64 (n,)."""
    import numpy as np

    names = models or [""] * len(prompts)
    texts = (f"{salt}\0{name}\0{prompt}" for name, prompt in zip(names, prompts, strict=True))
    digests = b"".join(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, dtype="<u8")


def _normals(keys) -> np.ndarray:
    """A standard normal draw that follows from each key: Box and Muller's, from its two halves."""
    import numpy as np

    u, v = ((half.astype(np.float64) + 0.5) / 2**32 for half in (keys >> np.uint64(32), keys & np.uint64(2**32 - 1)))
    return np.sqrt(-2.0 * np.log(u)) * np.cos(2.0 * np.pi * v)
