"""What a prompt's wording says, as numbers: its words and pairs of words, its size, its form, the amounts it names.

NumPy alone; only the first and last words of a long prompt are looked at one by one, so that its cost is bounded.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.length import artifact
from astrolabe_lab.record import write_whole

if TYPE_CHECKING:
    import numpy as np

HEAD_CHARS, TAIL_CHARS = 600, 300
_TOKEN = re.compile(r"[^\W\d_]+(?:'[a-z]+)?|\d[\d.,]*|[^\w\s]", re.UNICODE)
_WORD = re.compile(r"\w+")
# A number, and the word that says what it counts.
_AMOUNT = re.compile(r"\b(\d{1,5})(?:st|nd|rd|th)?[ -]+([^\W\d_]+)")
_UNITS = ("word", "sentence", "paragraph", "line", "character", "page", "bullet", "step", "minute", "year")
FORM = (
    "log_chars",
    "log_words",
    "log_words_after_the_first_line",
    "log_lines",
    "log_sentences",
    "questions",
    "ends_with_a_question",
    "code",
    "digits",
    "capitals",
    "other_scripts",
    "log_largest_amount",
    "has_amount",
    *(f"log_amount_of_{unit}s" for unit in _UNITS),
)


def terms(prompt: str) -> list[str]:
    """The words and pairs of words at the head and the tail of the prompt, lower-case; numbers are one word."""
    if len(prompt) <= HEAD_CHARS + TAIL_CHARS:
        return _grams(prompt, "")
    return _grams(prompt[:HEAD_CHARS], "") + _grams(prompt[-TAIL_CHARS:], "")


def _grams(text: str, prefix: str) -> list[str]:
    words = ["<number>" if word[0].isdigit() else word for word in _TOKEN.findall(text.lower())]
    pairs = [f"{first} {second}" for first, second in zip(words, words[1:], strict=False)]
    start = [f"^ {words[0]}"] if words else []
    return words + pairs + start


def form(prompt: str) -> list[float]:
    """The values of ``FORM`` for one prompt."""
    words = len(_WORD.findall(prompt[:40_000]))
    first, _, rest = prompt.strip().partition("\n")
    size = max(len(prompt), 1)
    sample = prompt[: HEAD_CHARS + TAIL_CHARS]
    amounts = {}
    largest = 0
    for number, unit in _AMOUNT.findall(sample.lower()):
        largest = max(largest, int(number))
        amounts[unit.removesuffix("s")] = max(amounts.get(unit.removesuffix("s"), 0), int(number))
    near = max(len(sample), 1)
    return [
        math.log1p(size),
        math.log1p(words),
        math.log1p(len(_WORD.findall(rest[:40_000]))),
        math.log1p(prompt.count("\n")),
        math.log1p(len(re.findall(r"[.!?。？！]+", prompt[:40_000]))),
        math.log1p(prompt.count("?")),
        float(prompt.rstrip().endswith(("?", "？"))),
        float("```" in prompt or "def " in prompt or "{" in prompt or ");" in prompt),
        sum(map(str.isdigit, sample)) / near,
        sum(map(str.isupper, sample)) / near,
        sum(char > "\u024f" for char in sample) / near,
        math.log1p(largest),
        float(largest > 0),
        *(math.log1p(amounts.get(unit, 0)) for unit in _UNITS),
    ]


class Wording:
    """A vocabulary of terms with their weights, learned from prompts; turns prompts into rows of numbers."""

    def __init__(
        self, vocabulary: dict[str, int], weights: np.ndarray, center: np.ndarray, spread: np.ndarray
    ):
        self.vocabulary, self.weights, self.center, self.spread = vocabulary, weights, center, spread

    @classmethod
    def learn(cls, prompts: list[str], size: int, minimum: int = 2) -> Wording:
        """The ``size`` terms found in the most prompts, at least ``minimum`` of them, with their inverse frequency."""
        import numpy as np

        found = Counter()
        for prompt in prompts:
            found.update(set(terms(prompt)))
        common = sorted(
            ((n, term) for term, n in found.items() if n >= minimum), key=lambda x: (-x[0], x[1])
        )[:size]
        weights = np.array([1.0 + math.log(len(prompts) / n) for n, _ in common])
        forms = np.array([form(prompt) for prompt in prompts])
        spread = forms.std(axis=0)
        vocabulary = {term: i for i, (_, term) in enumerate(common)}
        return cls(vocabulary, weights, forms.mean(axis=0), np.where(spread > 1e-9, spread, 1.0))

    @property
    def names(self) -> list[str]:
        """What each column is: the terms, then the names in ``FORM``."""
        return [*self.vocabulary, *FORM]

    def rows(self, prompts: list[str]) -> np.ndarray:
        """float32 (n, terms + forms): terms by weighted count, scaled to length 1 a prompt; forms standardised."""
        import numpy as np

        size = len(self.vocabulary)
        out = np.zeros((len(prompts), size + len(FORM)), dtype=np.float32)
        for row, prompt in zip(out, prompts, strict=True):
            counts = Counter(i for term in terms(prompt) if (i := self.vocabulary.get(term)) is not None)
            if counts:
                at = np.fromiter(counts, dtype=np.int64)
                values = (1.0 + np.log(np.fromiter(counts.values(), dtype=np.float64))) * self.weights[at]
                row[at] = values / np.linalg.norm(values)
            row[size:] = (np.array(form(prompt)) - self.center) / self.spread / math.sqrt(len(FORM))
        return out

    def write(self, folder: Path) -> None:
        """Write the vocabulary as JSON and its weights as .npz into ``folder``."""
        write_whole(folder / "vocabulary.json", json.dumps(list(self.vocabulary)))
        arrays = {"weights": self.weights, "center": self.center, "spread": self.spread}
        artifact.save_arrays(folder / "wording.npz", **arrays)

    @classmethod
    def read(cls, folder: Path) -> Wording:
        """What ``write`` wrote."""
        terms = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
        return cls({term: i for i, term in enumerate(terms)}, **artifact.load_arrays(folder / "wording.npz"))
