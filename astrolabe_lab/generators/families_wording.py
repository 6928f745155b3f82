"""The words of the families' prompts: a request for so many words, and prose to the length wanted; all our own."""

from __future__ import annotations

from astrolabe_lab.generators.sharegpt_wording import LONGEST_EXCERPT, OPENERS, TOPICS, pasted_prose
from astrolabe_lab.tokens import count_tokens

# Prose follows the form's end, or stands where {prose} does. The last form of each is short enough for any prompt.
FORMS = {
    "chat": (
        "{opener}I would like to talk about {topic}. {prose} What do you think? About {words} words will do.",
        "{opener}Can we go on about {topic}? {prose} Please reply in about {words} words.",
        "About {topic}, in some {words} words: {prose}",
        "In {words} words: {prose}",
    ),
    "documents": (
        "Read the report on {topic} below and sum it up in about {words} words.\n\n{prose}",
        "What are the main points of this contract about {topic}? Use about {words} words.\n\n{prose}",
        "In {words} words: {prose}",
    ),
    "reasoning": (
        "Solve this puzzle about {topic}. {prose} Think step by step and take about {words} words.",
        "Prove or refute what is said of {topic}. {prose} Show every step, in about {words} words.",
        "Step by step, in {words} words: {prose}",
        "In {words} words: {prose}",
    ),
}
_VARIANTS = 2  # forms drawn from at random; the rest are for prompts they do not fit


def write(families, prompt_tokens, words, rng) -> list[str]:
    """Return one prompt a request, of exactly its ``prompt_tokens`` (see ``count_tokens``), asking for its words.

    The i-th prompt takes the i-th row of draws from ``rng``.
    """
    starts = len(pasted_prose().starts)
    topic_tokens = [count_tokens(topic) for topic in TOPICS]
    opener_tokens = [count_tokens(opener) for opener in OPENERS]
    fixed = {family: [_fixed_tokens(form) for form in forms] for family, forms in FORMS.items()}
    texts = []
    rows = zip(families, prompt_tokens.tolist(), words.tolist(), rng.random((len(words), 5)).tolist(), strict=True)
    for family, tokens, asked, (u, v, w, x, y) in rows:
        topic, opener, variant = int(u * len(TOPICS)), int(v * len(OPENERS)), int(w * _VARIANTS)
        forms, left = FORMS[family], -1
        for i in (variant, *range(_VARIANTS, len(forms))):
            form = forms[i]
            left = tokens - fixed[family][i] - len(str(asked))
            left -= topic_tokens[topic] * ("{topic}" in form) + opener_tokens[opener] * ("{opener}" in form)
            if left >= 1:
                break
        values = {"topic": TOPICS[topic], "opener": OPENERS[opener], "words": asked}
        texts.append(form.format(prose=_prose(left, int(x * starts), int(y * starts)), **values))
    return texts


def _fixed_tokens(form: str) -> int:
    return count_tokens(form.format(topic="", opener="", words="", prose=""))


def _prose(tokens: int, start: int, second: int) -> str:
    prose = pasted_prose()
    first = prose.excerpt(start, min(tokens, LONGEST_EXCERPT))
    return first if tokens <= LONGEST_EXCERPT else f"{first} {prose.excerpt(second, tokens - LONGEST_EXCERPT)}"
