"""Small files that people write or tools leave: read whole, as text or as a JSON object."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

from astrolabe_lab.errors import InputError


def refuse_device(path: str | Path) -> None:
    """Raise InputError for a device, which may never end; OSError for what is not there."""
    if stat.S_IFMT(os.stat(path).st_mode) in (stat.S_IFCHR, stat.S_IFBLK):
        raise InputError(f"{path} is a device, which may never end: give a file")


def text_of(path: str | Path, what: str, hint: str = "") -> str:
    """The text of a UTF-8 file, without a byte order mark.

    Raises InputError, calling the file `what` ("this grid") and ending in `hint`, where it cannot be read.
    """
    try:
        refuse_device(path)
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        undecodable = isinstance(error, UnicodeDecodeError)
        why = "it is not UTF-8" if undecodable else getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path}: cannot read {what}: {why}{hint}") from None


def json_object(path: str | Path, what: str, hint: str = "") -> dict:
    """The object in a JSON file. Raises InputError as `text_of` does, and for a file that holds none."""
    text = text_of(path, what, hint)
    try:
        found = json.loads(text)
    except RecursionError:
        raise InputError(f"{path}: {what} is nested too deep to be JSON of ours{hint}") from None
    except ValueError as error:
        raise InputError(f"{path}: {what} is not JSON ({error}){hint}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: {what} is not a JSON object, but {type(found).__name__}{hint}")
    return found
