"""Likeness to known prompts: a Gaussian kernel on embeddings, as rows of numbers that a ridge can weigh.

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
WEIGHT = 4.0  # beside the wording's rows, whose terms have length 1
EXACT, OF_MORE = 4000, 1000  # every prompt is a landmark up to so many prompts; so many are drawn of more
_JITTER = 1e-4  # two prompts of one embedding are not quite the same


class Landmarks:
    """``points`` (m, width), unit vectors that others are compared with, and while it is learned from ``whiten``
    (m, m): kernel values times it are rows whose products are WEIGHT times the kernel."""

    def __init__(self, points: np.ndarray, whiten: np.ndarray | None = None):
        self.points, self.whiten = points, whiten

    @classmethod
    def learn(cls, vectors: np.ndarray, at_most: int | None, seed: int) -> Landmarks:
        """Landmarks drawn from the unit vectors (n, width), all of them where they are few enough.

        at_most: how many; None takes all of up to EXACT, and OF_MORE where there are more.
        """
        import numpy as np
        from scipy.linalg import cholesky, solve_triangular

        n = len(vectors)
        if at_most is None:
            at_most = EXACT if n <= EXACT else OF_MORE
        drawn = np.arange(n) if n <= at_most else np.sort(stream(seed, "length landmarks").permutation(n)[:at_most])
        points = vectors[drawn]
        kernel = _kernel(points, points).astype(np.float64)
        kernel[np.diag_indices_from(kernel)] += _JITTER
        lower = cholesky(kernel, lower=True, overwrite_a=True, check_finite=False)
        whiten = solve_triangular(lower, np.eye(len(points)), lower=True, overwrite_b=True, check_finite=False).T
        return cls(points, (whiten * WEIGHT**0.5).astype(np.float32))

    def rows(self, vectors: np.ndarray) -> np.ndarray:
        """What a ridge learns from, float32 (n, m); two rows' product approaches WEIGHT times the kernel."""
        return self.likeness(vectors) @ self.whiten

    def likeness(self, vectors: np.ndarray) -> np.ndarray:
        """The kernel of each vector with each landmark, float32 (n, m)."""
        return _kernel(vectors, self.points)

    def write(self, folder: Path) -> None:
        """Write the landmarks into ``folder``."""
        artifact.save_arrays(folder / "landmarks.npz", points=self.points)

    @classmethod
    def read(cls, folder: Path) -> Landmarks:
        """What ``write`` wrote."""
        return cls(artifact.load_arrays(folder / "landmarks.npz")["points"])


def _kernel(a, b):
    import numpy as np

    return np.exp((a @ b.T - 1.0) / np.float32(WIDTH**2))
