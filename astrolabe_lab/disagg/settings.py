"""What text and grids say of pools, in the simulator's own terms."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, replace

from astrolabe_lab.disagg.constants import Constants
from astrolabe_lab.disagg.state import HandOff
from astrolabe_lab.errors import InputError

MOST = 10_000  # engines in a pool


def parse_pools(text) -> tuple[int, int]:
    """(prefill, decode) of ``P+D`` text or a pair, e.g. "2+4". Raises InputError."""
    if isinstance(text, str):
        found = re.fullmatch(r"\s*(\d+)\s*\+\s*(\d+)\s*", text)
        text = (int(found[1]), int(found[2])) if found else text
    pair = tuple(text) if isinstance(text, (tuple, list)) else ()
    if len(pair) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST for n in pair):
        raise InputError(
            f"pools={text!r} is not P+D, the numbers of prefill and decode engines, each 1..{MOST:,}; write 2+4, say"
        )
    return pair


def hand_off(given: str | Mapping[str, object], base: HandOff | None = None) -> HandOff:
    """The hand-off ``base`` (default: the default) with ``key=value,...`` applied, as text or a mapping of typed or
    textual values. Raises InputError."""
    defaults = {field.name: field.default for field in fields(HandOff)}
    told = key_values(given, defaults)
    typed = {key: _typed(key, told[key], defaults[key]) if isinstance(told[key], str) else told[key] for key in told}
    return replace(base or HandOff(), **typed)


def constants(given: object, true: Constants) -> Constants:
    """The constants that a setting names: ``calibrated`` (then those that are ``true``), another name, a file, a
    mapping, or Constants. Raises InputError."""
    if isinstance(given, Constants):
        return given
    if isinstance(given, Mapping):
        return Constants.from_dict(dict(given))
    if given == "calibrated":
        return true
    return Constants.read(str(given))


def slo_of(constants: Constants):
    """The targets of the constants as ``measure.SLO``. Of those that are true of the pools: what a router believes is
    no promise to anybody."""
    from astrolabe_lab.measure import SLO

    return SLO(ttft_s=constants.ttft_s, tpot_s=constants.tpot_s, loose_factor=constants.loose_factor)


def key_values(given: str | Mapping[str, object], allowed: Collection[str]) -> dict[str, object]:
    """A hand-off's settings, of text (``key=value,...``) or a mapping. Raises InputError for text that is none, a key
    that is not allowed or given twice."""
    found: dict[str, object] = {}
    for key, value in given.items() if isinstance(given, Mapping) else _pairs(given):
        if key not in allowed:
            raise InputError(f"hand-off: unknown key {key!r}; allowed: {', '.join(allowed)}")
        if key in found:
            raise InputError(f"hand-off: {key} is given twice")
        found[key] = value
    return found


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = (p.strip() for p in part.partition("="))
        if not equals or not value:
            raise InputError(f"hand-off: {part!r} is not key=value (example: base_s=0.04,polls=end)")
        yield key, value


def _typed(key: str, value: str, default: object) -> object:
    if isinstance(default, bool):
        if value.lower() not in ("true", "false"):
            raise InputError(f"hand-off: {key}={value} must be true or false")
        return value.lower() == "true"
    if isinstance(default, str):
        return value
    try:
        return float(value)
    except ValueError:
        raise InputError(f"hand-off: {key}={value} must be a number, in s") from None
