"""Requests by one name: a generator's, with its options, or a trace file's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.generators.families import ARRIVALS
from astrolabe_lab.generators.families import NAMES as FAMILIES
from astrolabe_lab.trace.columns import as_floats

if TYPE_CHECKING:
    import pandas as pd

NAMES = ("sharegpt_like", *(f"family:{name}" for name in FAMILIES))  # those that need no file
SPECS = f"{', '.join(NAMES)} or servegen:PATH[,key=value,...]"
_SERVEGEN = {"start_s": float, "duration_s": float, "qps": float, "clients": int, "shape": str, "coupled": bool}
_SERVEGEN |= {"missing": str}


def is_generator(spec: object) -> bool:
    """Whether ``spec`` names a generator; what has a generator's prefix but is none is one too, to be complained of."""
    return isinstance(spec, str) and (spec == "sharegpt_like" or spec.startswith(("family:", "servegen:")))


def arrivals_of(spec: object) -> str:
    """Return the arrival process that goes with the requests where none is asked for, as ``arrivals.parse`` reads it.

    Poisson; for ``family:mixed`` the paper's bursts. A ServeGen draw has times of its own (``trace``).
    """
    if isinstance(spec, str) and spec.startswith("servegen:"):
        return "trace"
    return ARRIVALS.get(spec.removeprefix("family:"), "poisson") if is_generator(spec) else "poisson"


def draw(spec: str, n: int | None, seed: int = 0, text: bool = True) -> pd.DataFrame:
    """Return n requests of the generator ``spec``, with texts where it has them and ``text`` is true.

    spec: ``sharegpt_like``, ``family:NAME`` or ``servegen:PATH[,key=value,...]``: a folder of ServeGen clients or a
    tar of one, or two joined by ``+``, and the options of ``servegen.generate``. Only the last has times, and only
    there may n be None. Raises InputError for another spec.
    """
    from astrolabe_lab.generators import families, servegen, sharegpt_like

    if not is_generator(spec):
        raise InputError(f"generator {spec!r} is unknown: allowed are {SPECS}")
    if spec.startswith("servegen:"):
        paths, options = _servegen(spec)
        return servegen.generate(paths, n, seed, **options)
    if spec not in NAMES:
        raise InputError(f"generator {spec!r} is unknown: allowed are {SPECS}")
    if n is None:
        raise InputError(f"{spec} draws as many requests as you say: give their number (requests=N, --requests N)")
    if spec == "sharegpt_like":
        return sharegpt_like.generate(n, seed=seed, text=text)
    return families.generate(spec.removeprefix("family:"), n, seed=seed, text=text)


def requests(
    spec: str | Path, n: int | None = None, seed: int = 0, text: bool = True, **loading: object
) -> pd.DataFrame:
    """Return the requests of a generator, or the first n of a trace file (None: all).

    ``loading`` goes to ``trace.load`` and is refused for a generator. Raises InputError as ``draw`` and ``load`` do.
    """
    from astrolabe_lab.trace import load

    if not is_generator(spec):
        frame = load(spec, **loading)
        return frame if n is None else frame.head(n)
    if stray := sorted(name for name, value in loading.items() if value is not None):
        raise InputError(f"{', '.join(stray)}: this goes with a trace file, and {spec} draws its own requests")
    return draw(spec, n, seed, text)


def _servegen(spec: str) -> tuple[list[Path], dict[str, object]]:
    path, options = spec.removeprefix("servegen:"), {}
    while "," in path and path.rpartition(",")[2].partition("=")[0] in _SERVEGEN:
        path, _, part = path.rpartition(",")
        key, _, text = part.partition("=")
        if key in options:
            raise InputError(f"{spec!r}: {key} is given twice")
        options[key] = _value(spec, key, text)
    if not path:
        raise InputError(f"{spec!r}: the path is missing: servegen:PATH[,key=value,...]")
    whole = Path(path).expanduser()
    if "," in path and not whole.exists():
        given = path.partition(",")[2]
        raise InputError(f"{spec!r}: {given!r} is no option; servegen has {', '.join(_SERVEGEN)}")
    paths = [whole] if whole.exists() or "+" not in path else [Path(one).expanduser() for one in path.split("+")]
    return paths, options


def _value(spec: str, key: str, text: str) -> object:
    kind = _SERVEGEN[key]
    if kind is str:
        return text
    if kind is bool:
        if text not in ("true", "false"):
            raise InputError(f"{spec!r}: {key}={text!r} is not usable: true or false")
        return text == "true"
    number = float(as_floats([text])[0])
    if number != number or (kind is int and not number.is_integer()):
        raise InputError(f"{spec!r}: {key}={text!r} is not {'a whole number' if kind is int else 'a number'}")
    return kind(number)
