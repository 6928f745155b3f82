"""Near copies: one prompt in two sources, set apart by a word or a mark, which a split by exact text lets through."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

LIKENESS = 0.75
_WORD = re.compile(r"\w+")


def near(prompts: list[str], others: list[str], likeness: float = LIKENESS) -> np.ndarray:
    """For each of ``prompts`` the largest likeness to one of ``others`` that is at least ``likeness``, else 0.

    Likeness is Jaccard's: words that both have over words that either has, whatever case and order. float64 (n,).
    """
    import numpy as np
    from scipy.sparse import csr_matrix

    numbers: dict[str, int] = {}
    rows, columns = [], []
    for i, text in enumerate([*prompts, *others]):
        words = {numbers.setdefault(word, len(numbers)) for word in _WORD.findall(text.lower())}
        rows += [i] * len(words)
        columns += words
    shape = (len(prompts) + len(others), max(len(numbers), 1))
    found = csr_matrix((np.ones(len(rows), dtype=np.float32), (rows, columns)), shape=shape)
    size = np.asarray(found.sum(axis=1)).ravel()
    out = np.zeros(len(prompts))
    theirs = found[len(prompts) :].T.tocsr()
    for start in range(0, len(prompts), 256):
        stop = min(start + 256, len(prompts))
        both = (found[start:stop] @ theirs).tocoo()
        either = size[start + both.row] + size[len(prompts) + both.col] - both.data
        np.maximum.at(out, start + both.row, both.data / either)
    return np.where(out >= likeness, out, 0.0)
