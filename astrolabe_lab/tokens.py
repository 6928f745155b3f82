"""How many tokens a text has: nobody's tokenizer but our own, or yours."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from astrolabe_lab.errors import InputError

APPROXIMATION = "astrolabe approximation"

# Up to ten letters of an alphabet, one letter of any other script, one digit, a run of line ends, one other
# mark.
_PIECE = re.compile(r"[^\W\d_\u0250-\U0010ffff]{1,10}|[^\W\d_]|\d|\n+|[^\w\s]|_")


def count_tokens(text: str) -> int:
    """Return about how many tokens a byte-pair tokenizer makes of ``text``; the empty text has 0.

    A token is a word of up to ten letters (a longer one is several), a digit, a mark, or a run of line ends,
    so counts add up over texts joined at spaces. Against the SmolLM2 tokenizer (49,152 entries) on 15,362
    prompts of eleven public sources the total is 0.6 % high and one prompt is off by 6 % on average; text in
    other scripts is off by more.
    """
    return len(_PIECE.findall(text))


def counter(tokenizer=None) -> tuple[Callable[[str], int], str]:
    """Return ``(count, name)``: a function from text to tokens and the name to record beside its counts.

    ``tokenizer`` is None (our approximation), a folder or file of a Hugging Face ``tokenizer.json``, an
    object with ``encode``, or a callable giving a count, the tokens, or a mapping with ``input_ids``. Special
    tokens count where the tokenizer adds them, as in vLLM's benchmarks. Raises InputError when none of these
    is given.
    """
    if tokenizer is None:
        return count_tokens, APPROXIMATION
    if isinstance(tokenizer, (str, os.PathLike)):
        encode, name = _from_folder(Path(tokenizer)), f"tokenizer.json of {Path(tokenizer).name}"
    elif hasattr(tokenizer, "encode"):
        encode, name = (
            tokenizer.encode,
            str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__),
        )
    elif callable(tokenizer):
        encode, name = tokenizer, getattr(tokenizer, "__name__", type(tokenizer).__name__)
    else:
        raise InputError(
            f"tokenizer={tokenizer!r} is not usable: give a folder with tokenizer.json, a callable or None"
        )
    return lambda text: _length(encode(text), name), name


def _length(encoded, name: str) -> int:
    if isinstance(encoded, int):
        return encoded
    ids = encoded["input_ids"] if isinstance(encoded, dict) else getattr(encoded, "ids", encoded)
    try:
        return len(ids)
    except TypeError:
        raise InputError(f"tokenizer {name!r} gave {encoded!r}: it must give a count or a sequence of tokens") from None


def _from_folder(path: Path):
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            f"tokenizer={str(path)!r}: there is no {file.name} there; give a folder that holds tokenizer.json"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InputError(
            f"tokenizer={str(path)!r} needs the package 'tokenizers': pip install tokenizers, or leave tokenizer out"
        ) from None
    try:
        return Tokenizer.from_file(str(file)).encode
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise InputError(f"tokenizer={str(path)!r}: {file.name} cannot be read ({error})") from None
