"""The one error a user can cause."""


class InputError(ValueError):
    """Wrong input from the user: the message names the input, what is allowed, and what to do next.

    The command line prints it as one line, ``astrolabe: error: ...``, and exits 2; a notebook shows it as any
    exception.
    """
