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
from astrolabe_lab.text_files import json_object

if TYPE_CHECKING:
    import numpy as np

HEAD_CHARS, TAIL_CHARS = 600, 300
# What is asked for usually stands in the first line, and what it is to be done with after it.
OPENING_CHARS = 300
OPENING_TERMS, INTERPLAY_TERMS = 400, 100
_PRESENCE, _INTERPLAY = 0.3, 2.0
_INTERPLAY_WITH = ("log_words_after_the_first_line", "log_largest_amount")
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
        return _grams(prompt)
    return _grams(prompt[:HEAD_CHARS]) + _grams(prompt[-TAIL_CHARS:])


def opening_terms(prompt: str) -> list[str]:
    """The words and pairs of words of the prompt's first line, at most OPENING_CHARS of it."""
    return _grams(prompt.strip().partition("\n")[0][:OPENING_CHARS])


def _grams(text: str) -> list[str]:
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
    """A vocabulary of terms with their weights, learned from prompts; turns prompts into rows of numbers.

    The columns: terms of the prompt, its FORM, and then the *interplay* of its opening: which of the ``opening`` terms
    are there, and for the commonest of these, how much text follows and the largest amount that is named. "Rewrite"
    asks for the more the longer the text, "summarize" hardly does: what no sum of word and size can say.
    """

    def __init__(self, vocabulary, opening, weights: np.ndarray, center: np.ndarray, spread: np.ndarray):
        self.vocabulary: dict[str, int] = {term: i for i, term in enumerate(vocabulary)}
        self.opening: dict[str, int] = {term: i for i, term in enumerate(opening)}
        self.weights, self.center, self.spread = weights, center, spread

    @classmethod
    def learn(cls, prompts: list[str], size: int, minimum: int = 2) -> Wording:
        """The ``size`` terms found in the most prompts, at least ``minimum`` of them, with their inverse frequency."""
        import numpy as np

        common = _common(map(terms, prompts), size, minimum)
        opening = _common(map(opening_terms, prompts), min(size, OPENING_TERMS), minimum)
        weights = np.array([1.0 + math.log(len(prompts) / n) for n, _ in common])
        forms = np.array([form(prompt) for prompt in prompts])
        spread = forms.std(axis=0)
        center, spread = forms.mean(axis=0), np.where(spread > 1e-9, spread, 1.0)
        return cls([term for _, term in common], [term for _, term in opening], weights, center, spread)

    @property
    def plain_columns(self) -> int:
        """How many columns come before the interplay."""
        return len(self.vocabulary) + len(FORM)

    @property
    def names(self) -> list[str]:
        """What each column is."""
        opening = list(self.opening)
        first = [f"opening: {term}" for term in opening]
        interplay = [f"{name} after: {term}" for name in _INTERPLAY_WITH for term in opening[:INTERPLAY_TERMS]]
        return [*self.vocabulary, *FORM, *first, *interplay]

    def rows(self, prompts: list[str], interplay: bool = True) -> np.ndarray:
        """float32 (n, columns), without the interplay if asked so: terms by weighted count, scaled to length 1 a
        prompt; forms standardised."""
        import numpy as np

        size, plain = len(self.vocabulary), self.plain_columns
        some = min(len(self.opening), INTERPLAY_TERMS)
        columns = plain + (len(self.opening) + some * len(_INTERPLAY_WITH) if interplay else 0)
        out = np.zeros((len(prompts), columns), dtype=np.float32)
        forms = [FORM.index(name) for name in _INTERPLAY_WITH]
        for row, prompt in zip(out, prompts, strict=True):
            counts = Counter(i for term in terms(prompt) if (i := self.vocabulary.get(term)) is not None)
            if counts:
                at = np.fromiter(counts, dtype=np.int64)
                values = (1.0 + np.log(np.fromiter(counts.values(), dtype=np.float64))) * self.weights[at]
                row[at] = values / np.linalg.norm(values)
            row[size:plain] = (np.array(form(prompt)) - self.center) / self.spread / math.sqrt(len(FORM))
            if interplay:
                there = {i for term in opening_terms(prompt) if (i := self.opening.get(term)) is not None}
                at = np.array(sorted(there), dtype=np.int64)
                row[plain + at] = _PRESENCE
                start, few = plain + len(self.opening), at[at < some]
                for j, name in enumerate(forms):
                    row[start + j * some + few] = _INTERPLAY * row[size + name]
        return out

    def write(self, folder: Path) -> None:
        """Write the vocabulary as JSON and its weights as .npz into ``folder``."""
        words = {"vocabulary": list(self.vocabulary), "opening": list(self.opening)}
        write_whole(folder / "vocabulary.json", json.dumps(words))
        arrays = {"weights": self.weights, "center": self.center, "spread": self.spread}
        artifact.save_arrays(folder / "wording.npz", **arrays)

    @classmethod
    def read(cls, folder: Path) -> Wording:
        """What ``write`` wrote."""
        words = json_object(folder / "vocabulary.json", "this vocabulary")
        return cls(**words, **artifact.load_arrays(folder / "wording.npz"))


def _common(found, size: int, minimum: int) -> list[tuple[int, str]]:
    """The ``size`` terms that are in the most of the texts, at least ``minimum``, with how many these are."""
    counts = Counter()
    for some in found:
        counts.update(set(some))
    return sorted(((n, term) for term, n in counts.items() if n >= minimum), key=lambda x: (-x[0], x[1]))[:size]
