"""A file of results that one process writes at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from astrolabe_lab.errors import InputError


@contextmanager
def alone(path: str | Path) -> Iterator[None]:
    """Keep other processes from what is kept in ``path``, as long as the context lasts; it may be entered again within.

    Raises InputError where another process has it, or its folder cannot be written.
    """
    import filelock

    path = Path(path)
    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"), timeout=0, is_singleton=True)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise InputError(f"{path} is in use by another run: wait for its end, or give another output") from None
    except OSError as error:
        raise InputError(f"{path}: nothing can be kept there: {error.strerror}") from None
    try:
        yield
    finally:
        if lock.lock_counter == 1:
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
