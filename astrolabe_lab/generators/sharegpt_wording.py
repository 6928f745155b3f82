"""The words of ShareGPT-like prompts: tasks, topics, styles, and the prose of pasted texts; all our own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from astrolabe_lab.rng import stream
from astrolabe_lab.tokens import count_tokens


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of request and how long its answer is.

    ``median_tokens`` is the median answer: with ``amounts``, that for each unit of the amount asked for; with
    ``growth``, that to a pasted text of 300 tokens, growing as this power of the text's length. ``pasted`` is
    the share of requests with a text pasted under them; a task that is not ``styled`` carries no style
    sentence.
    """

    name: str
    weight: float
    median_tokens: float
    forms: tuple[str, ...]
    amounts: tuple[int, ...] = ()
    growth: float = 0.0
    pasted: float = 0.3125
    styled: bool = True


@dataclass(frozen=True, slots=True)
class Style:
    """How to answer: the sentence multiplies the median by ``factor`` and holds it to ``at_most`` tokens."""

    weight: float
    sentence: str
    factor: float = 1.0
    at_most: float = math.inf


_ITEMS = (3, 5, 8, 10, 12, 15, 20)
_WORDS = (50, 100, 150, 200, 250, 300, 400, 500, 600)
_LIST = ("List {amount} facts about {topic}.", "Give me {amount} ideas for {topic}.")
_ESSAY = ("Write {amount} words on {topic}.", "Fill {amount} words about {topic}.")
_SUMMARIZE = ("Summarize this text on {topic}.", "Sum up the text below.")
_REWRITE = ("Rewrite the text below.", "Translate this text about {topic}.")
_REVIEW = ("Find the mistakes in this text.", "Review my text on {topic}.")

TASKS = (
    Task("define", 12, 250, ("What is {topic}?", "Tell me about {topic}.", "What does {topic} mean?")),
    Task("explain", 13, 400, ("Explain {topic} to me.", "How does {topic} work?", "Teach me {topic}.")),
    Task("list", 11, 30, _LIST, amounts=_ITEMS, styled=False),
    Task("essay", 11, 1.4, _ESSAY, amounts=_WORDS, styled=False),
    Task("story", 7, 560, ("Write a story about {topic}.", "Tell a tale in which {topic} matters.")),
    Task("program", 10, 420, ("Write a program about {topic}.", "Show me code that models {topic}.")),
    Task("email", 6, 240, ("Write an email to my team about {topic}.", "Draft a letter on {topic}.")),
    Task("choose", 2.5, 4, ("Is this about {topic}, yes or no?", "Name one word for {topic}."), styled=False),
    Task("summarize", 9, 190, _SUMMARIZE, growth=0.2, pasted=1.0),
    Task("rewrite", 7, 330, _REWRITE, growth=0.8, pasted=1.0),
    Task("review", 6, 330, _REVIEW, growth=0.1, pasted=1.0),
    Task("look_up", 4, 60, ("Where does this text name {topic}?", "Quote the part on {topic}."), pasted=1.0),
)

STYLES = (
    Style(63, ""),
    Style(8, " Be brief.", factor=0.4),
    Style(9, " Explain step by step.", factor=1.25),
    Style(8, " Give as much detail as you can.", factor=1.6),
    Style(5, " Answer in one sentence.", at_most=28),
    Style(4, " Answer in a short paragraph.", at_most=85),
    Style(1.5, " Answer in one word.", at_most=3),
)

_PEOPLE = "teacher nurse student farmer writer lawyer cook driver singer doctor painter builder".split()
_PLACES = "school garden office kitchen".split()
OPENERS = (
    "",
    "Please help me. ",
    "Hello! ",
    "I have a question. ",
    *(f"I am a {person}. " for person in _PEOPLE),
    *(f"I work as a {person} at a {place} and need your help. " for person in _PEOPLE for place in _PLACES),
)
OPENER_SIZES = (1, 1, 1, 1, 12, 48)
OPENER_SHARES = (0.3, 0.15, 0.1, 0.1, 0.2, 0.15)

_REMARKS = (
    " Use plain language.",
    " The readers are new to the subject.",
    " I have read two books on it already.",
    " Keep a friendly tone.",
    " This is for a class that meets on Monday.",
    " Avoid jargon where you can.",
    " My first try was not good enough.",
    " I would like to show it to my friends.",
    " Take your time.",
    " It matters to me because my work depends on it.",
    " Think about what a beginner would ask.",
    " I will read it on the train tomorrow.",
)
REMARKS = ("", *("".join((_REMARKS * 2)[i : i + k]) for k in range(1, 6) for i in range(len(_REMARKS))))
REMARK_SIZES = (1, 12, 12, 12, 12, 12)  # none, and one to five in a row
REMARK_SHARES = (0.5, 0.2, 0.12, 0.08, 0.05, 0.05)

TOPICS = tuple(
    """gravity,chess,bread,volcanoes,jazz,coral reefs,the stock market,black holes,solar power,photosynthesis
    the printing press,sleep,machine learning,public transport,ancient Rome,the immune system,coffee,opera
    renewable energy,city planning,time zones,the water cycle,bicycles,encryption,vaccines,the Silk Road,bees
    earthquakes,supply chains,haiku,tea,glaciers,databases,compilers,game theory,inflation,the moon landing
    antibiotics,origami,marathon running,wind turbines,dinosaurs,load balancing,batteries,poetry,robotics
    astronomy,recycling,fermentation,migration of birds,tides,sorting algorithms,bridges,color theory
    probability,the violin,maps,deep sea life,clocks,cheese""".replace("\n    ", ",").split(",")
)

_ADJECTIVES = """old quiet bright narrow distant patient early heavy simple golden curious steady hidden
    warm""".split()
_NOUNS = """river bridge letter engine garden mountain signal market window teacher captain village station
    forest harbor winter lantern road machine painter island meadow tower story clock measure valley
    journey""".split()
_VERBS = """carries follows crosses reaches changes keeps opens repeats guides meets leaves finds watches
    joins""".split()
_JOINS = "near beyond behind under above before after without toward inside".split()
_SENTENCE = (_ADJECTIVES, _NOUNS, _VERBS, _ADJECTIVES, _NOUNS, _JOINS, _NOUNS)
LONGEST_EXCERPT = 3_500
_BREAK = "\n\n"


@dataclass(frozen=True, slots=True)
class Prose:
    """A long text to paste from: where its tokens end, and which of them open a sentence."""

    text: str
    ends: tuple[int, ...]
    starts: tuple[int, ...]

    def excerpt(self, start: int, tokens: int) -> str:
        """Return ``tokens`` tokens (at most 3,500) from the sentence ``start`` on, cut off where they end."""
        first = self.starts[start]
        begin = self.ends[first - 1] if first else 0
        cut = self.text[begin : self.ends[first + tokens - 1]].removeprefix(" ")
        # A blank line at the end would be lost on whoever strips the prompt: the next word instead.
        return cut.removesuffix(_BREAK) + " The" if cut.endswith(_BREAK) else cut


@cache
def pasted_prose() -> Prose:
    """Return the prose that prompts are pasted from; tokens are those of ``count_tokens``."""
    rng = stream(0, "pasted prose")
    pieces: list[str] = []
    starts: list[int] = []
    while len(pieces) < 20_000 + LONGEST_EXCERPT:
        *picks, shape, gap = rng.random(len(_SENTENCE) + 2)
        words = [choices[int(u * len(choices))] for u, choices in zip(picks, _SENTENCE, strict=True)]
        if pieces and gap < 0.15:
            pieces.append(_BREAK)
        starts.append(len(pieces))
        pieces.append(" The" if pieces and pieces[-1] != _BREAK else "The")
        pieces += [f" {word}" for word in (*words[:3], "the", *words[3:5])]
        if shape < 0.4:
            pieces.append(",")
        if shape < 0.8:
            pieces += [f" {word}" for word in (words[5], "the", words[6])]
        pieces.append(".")
    ends, total = [], 0
    for piece in pieces:
        total += len(piece)
        ends.append(total)
    usable = tuple(start for start in starts if start <= len(pieces) - LONGEST_EXCERPT)
    return Prose("".join(pieces), tuple(ends), usable)


def wording_tokens(form: str) -> int:
    """Return the tokens of a task's form without what fills its slots."""
    return count_tokens(form.replace("{topic}", "").replace("{amount}", ""))
