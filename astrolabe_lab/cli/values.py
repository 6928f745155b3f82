"""Values of command-line options: from their text, with what is allowed said where it is none."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from astrolabe_lab import result
from astrolabe_lab.errors import InputError


def whole(low):
    """A parser of whole numbers from ``low`` up."""

    def parse(text):
        if not (text.isascii() and text.isdigit()) or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} up")
        return int(text)

    return parse


def port(text):
    """A number of a port to listen on; 0 is a free one."""
    if not (text.isascii() and text.isdigit()) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 (a free one) to 65535")
    return int(text)


def number(above=None):
    """A parser of finite numbers >= 0, or > ``above``."""

    def parse(text):
        value = _float(text)
        if not math.isfinite(value) or value < 0 or (above is not None and value <= above):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {'>= 0' if above is None else f'> {above}'}")
        return value

    return parse


def span(text):
    """``S`` as a number, ``LOW,HIGH`` as a pair of numbers."""
    parts = [number()(part) for part in text.split(",")]
    if len(parts) > 2 or parts != sorted(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is neither S nor LOW,HIGH with LOW <= HIGH")
    return parts[0] if len(parts) == 1 else tuple(parts)


def noise(text):
    """``common=REL,candidate=REL``, or one of them."""
    found = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if key not in ("common", "candidate") or not equals or key in found:
            raise argparse.ArgumentTypeError(f"{text!r} is not common=REL, candidate=REL or both with a comma")
        found[key] = number()(value)
    return found


def choice_of_rows(text):
    """``key=value``, a filter of a trace file; a limit of tokens is a number."""
    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not key=value")
    return key, whole(0)(value) if key.endswith("_tokens") else value


def output_file(path, option="--out", suffixes=result.SUFFIXES, make=False) -> Path:
    """``result.check_output``, whose InputError names the option; of an option that was not given, None."""
    return _checked(option, result.check_output, path, suffixes, make)


def output_folder(path, option="--out", files=()) -> Path:
    """``result.check_folder``, the same, also for the ``files`` that are to be written in it."""
    folder = _checked(option, result.check_folder, path)
    for name in files if folder else ():
        _checked(option, result.check_output, folder / name, (name,), True)
    return folder


def _checked(option, check, path, *how):
    try:
        return None if path is None else check(path, *how)
    except InputError as error:
        raise InputError(f"{option} {error}") from None


def _float(text):
    try:
        return float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return math.nan
