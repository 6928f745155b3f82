"""The one error a user can cause."""


class InputError(ValueError):
    """Wrong input from the user: the message names the input, what is allowed, and what to do next.

    The command line prints it as one line, ``astrolabe: error: ...``, and exits 2; a notebook shows it as any
    exception.
    """


def check_kind(what: str, value, kind: type, example: str) -> None:
    """Raise InputError for a value that is not of the class `kind`; `example` says how to make one."""
    if not isinstance(value, kind):
        raise InputError(f"{what}: {value!r} is no {kind.__name__}; write {example}")
