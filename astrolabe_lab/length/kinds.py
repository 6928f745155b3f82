"""The kinds of length model, by name; each is imported when it is asked for."""

from __future__ import annotations

import difflib
from dataclasses import fields
from importlib import import_module

from astrolabe_lab.errors import InputError


def _lazy(module: str, name: str):
    return lambda: getattr(import_module(f"astrolabe_lab.length.{module}"), name)


KINDS = {  # those that are saved; all but the last are trained
    "constant": _lazy("baselines", "Constant"),
    "prompt_ridge": _lazy("ridge", "PromptRidge"),
    "encoder": _lazy("encoder", "Encoder"),
    "oracle": _lazy("baselines", "Oracle"),
    "noisy": _lazy("baselines", "Noisy"),
    "recalibrated": _lazy("recalibrated", "Recalibrated"),
}


def make(text: str):
    """The unfitted estimator that ``KIND[:key=value,...]`` describes, e.g. ``prompt_ridge:alpha=3``.

    ``noisy`` takes ``model``, ``relative_error`` and ``seed``: ``noisy:model=oracle,relative_error=0.5``.
    Raises InputError listing what is allowed.
    """
    name, _, rest = str(text).strip().partition(":")
    if name == "recalibrated":
        raise InputError(
            "length model recalibrated is not trained: astrolabe length recalibrate makes it, from a trained model "
            "and a router's journal"
        )
    trained = [kind for kind in KINDS if kind != "recalibrated"]
    if name not in trained:
        close = difflib.get_close_matches(name, trained, n=1)
        raise InputError(
            f"length model {name!r} is unknown; allowed: {', '.join(trained)}, with options as KIND:key=value,..."
            + (f". Did you mean {close[0]}?" if close else "")
        )
    kind = KINDS[name]()
    allowed = {field.name: field for field in fields(kind) if field.init}
    values = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            raise InputError(f"length model {name}: {part!r} is not key=value")
        if key not in allowed:
            options = f"its options: {', '.join(allowed)}" if allowed else "it has no options"
            raise InputError(f"length model {name}: unknown option {key!r}; {options}")
        if key in values:
            raise InputError(f"length model {name}: {key} is given twice")
        values[key] = make(value) if key == "model" else _typed(name, key, value, allowed[key])
    return kind(**values)


def _typed(name, key, value, field):
    form = str(field.type)
    if value.lower() == "none" and "None" in form:
        return None
    try:
        if "bool" in form:
            return {"true": True, "false": False}[value.lower()]
        for number in (int, float):
            if number.__name__ in form.split(" | "):
                return number(value)
    except (KeyError, ValueError):
        what = "true or false" if "bool" in form else "a whole number" if "int" in form else "a number"
        raise InputError(f"length model {name}: {key}={value} must be {what}") from None
    return value
