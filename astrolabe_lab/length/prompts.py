"""What a length model is given: text that any tokenizer takes, of a bounded length."""

from __future__ import annotations

MAX_CHARS = 32_768


def clean(prompt: str, max_chars: int = MAX_CHARS) -> str:
    """Return ``prompt`` as valid Unicode of at most ``max_chars`` characters, its head and its tail kept.

    Halves of a surrogate pair that stand alone (JSON may carry them, no encoding does) become U+FFFD; every
    other character, NUL among them, stays. What is asked for stands first or last in a long prompt, so the
    middle goes; with an odd ``max_chars`` the head has the one character more.
    """
    if len(prompt) > max_chars:
        tail = max_chars // 2
        prompt = prompt[: max_chars - tail] + prompt[len(prompt) - tail :]
    return valid(prompt)


def valid(text: str) -> str:
    """``text`` with U+FFFD for halves of a surrogate pair that stand alone; two that belong together become one."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
