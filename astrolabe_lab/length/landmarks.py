"""Likeness to some of the prompts: a Gaussian kernel on embeddings, as rows of numbers that a ridge can weigh.

A ridge on the embedding itself knows only directions; on likeness it can also say "answers to prompts like this one
are short", which is most of what short instructions share. With as many landmarks as prompts the two are the kernel
ridge itself; with fewer, Nystroem's approximation (Williams and Seeger, 2001).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.length import artifact
from astrolabe_lab.rng import stream

if TYPE_CHECKING:
    import numpy as np

WIDTH = 0.5  # of the kernel, on unit vectors
WEIGHT = 2.0  # beside the wording's rows, whose terms have length 1


class Landmarks:
    """``points`` (m, width), unit vectors, and ``whiten`` (m, m): kernel values times it are the rows."""

    def __init__(self, points: np.ndarray, whiten: np.ndarray):
        self.points, self.whiten = points, whiten

    @classmethod
    def learn(cls, vectors: np.ndarray, at_most: int, seed: int) -> Landmarks:
        """Landmarks drawn from the unit vectors (n, width), all of them where they are few enough."""
        import numpy as np

        n = len(vectors)
        drawn = np.arange(n) if n <= at_most else np.sort(stream(seed, "length landmarks").permutation(n)[:at_most])
        points = vectors[drawn]
        values, axes = np.linalg.eigh(_kernel(points, points).astype(np.float64))
        keep = values > values[-1] * 1e-6  # two prompts of one embedding give no second direction
        return cls(points, (axes[:, keep] / np.sqrt(values[keep] / WEIGHT)).astype(np.float32))

    def rows(self, vectors: np.ndarray) -> np.ndarray:
        """float32 (n, up to m); two rows' product approaches WEIGHT times the kernel."""
        return _kernel(vectors, self.points) @ self.whiten

    def write(self, folder: Path) -> None:
        """Write the landmarks into ``folder``."""
        artifact.save_arrays(folder / "landmarks.npz", points=self.points, whiten=self.whiten)

    @classmethod
    def read(cls, folder: Path) -> Landmarks:
        """What ``write`` wrote."""
        return cls(**artifact.load_arrays(folder / "landmarks.npz"))


def _kernel(a, b):
    import numpy as np

    return np.exp((a @ b.T - 1.0) / np.float32(WIDTH**2))
