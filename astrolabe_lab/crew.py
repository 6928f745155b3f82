"""Many jobs on a few processes, where a job that fails or kills its process is named.

The standard library's process pool cannot say which job killed a worker; one pipe per worker can. Processes
are spawned, never forked: compiled code and its threads do not survive a fork. They do not run the main script
again either, as spawned ones otherwise do: jobs travel by value, so nothing of it is needed there, and a script
needs no `if __name__ == "__main__":`.
"""

import contextlib
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, get_context, parent_process
from types import ModuleType

import cloudpickle

from .errors import InputError


class CrewError(RuntimeError):
    """A job crashed, or its process died; the message starts with the job's name."""


def cores() -> int:
    """How many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def each(job: Callable, items: Sequence, workers: int) -> Iterator[tuple[int, object]]:
    """(index, job(items[index])) for every item, as they end, on `workers` processes; 1 is this process.

    `str(item)` names an item in errors. A job's InputError comes through with that name before it; any other
    exception, or the death of a process, is a CrewError. However it ends, also by Ctrl-C, no process is left.
    """
    if workers == 1:
        return _here(job, items)
    return _spread(_pickled((job, list(items))), [str(item) for item in items], workers)


def _here(job: Callable, items: Sequence) -> Iterator[tuple[int, object]]:
    for index, item in enumerate(items):
        try:
            result = job(item)
        except InputError as error:
            raise InputError(f"{item}: {error}") from error
        except Exception as error:
            raise CrewError(f"{item}: {type(error).__name__}: {error}") from error
        yield index, result


def _spread(payload: bytes, names: list[str], workers: int) -> Iterator[tuple[int, object]]:
    context = get_context("spawn")
    todo = iter(range(len(names)))
    busy, crew = {}, []

    def give(pipe, process) -> None:
        if (index := next(todo, None)) is not None:
            busy[pipe] = index, process
            with contextlib.suppress(OSError):
                pipe.send(index)

    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            with _unseen_main():
                process.start()
            theirs.close()  # or the end of the worker would not end the pipe
            crew.append((ours, process))
        for pipe, process in crew:
            with contextlib.suppress(OSError):  # dead already: the read that follows says so
                pipe.send_bytes(payload)  # as an argument it would block `start` for ever if the worker dies early
            give(pipe, process)
        while busy:
            for pipe in connection.wait(busy):
                index, process = busy.pop(pipe)
                try:
                    result, error = pipe.recv()
                except (EOFError, OSError):
                    process.join(5)
                    raise CrewError(f"{names[index]}: {_death(process.exitcode)}") from None
                if error:
                    kind, text = error
                    raise kind(f"{names[index]}: {text}")
                yield index, result
                give(pipe, process)
    finally:
        for _, process in crew:
            process.terminate()
        for _, process in crew:
            process.join(5)


@contextlib.contextmanager
def _unseen_main() -> Iterator[None]:
    """Hides the main module, whose file a process started meanwhile would run."""
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _work(pipe) -> None:
    """A worker: gets the job and its items, then runs those whose numbers come in and sends back
    (result, None) or (None, error)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job, items = pickle.loads(pipe.recv_bytes())
    while True:
        try:
            index = pipe.recv()
        except EOFError:
            return
        try:
            answer = job(items[index]), None
        except InputError as error:
            answer = None, (InputError, str(error))
        except Exception as error:
            answer = None, (CrewError, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        pipe.send(answer)


def _end_with_parent() -> None:
    """A parent that was killed ends no worker: it would compute on, for nobody."""
    parent_process().join()
    os._exit(1)


def _pickled(value: object) -> bytes:
    try:  # by value, so that a class or a lambda of a script or a notebook cell reaches another process
        return cloudpickle.dumps(value)
    except Exception as error:
        raise InputError(f"this cannot be sent to another process ({error}); use workers=1") from error


def _death(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        names = {int(known): known.name for known in signal.Signals}
        hint = "; often it is memory: use fewer workers" if exitcode == -9 else ""
        return f"its process was killed by {names.get(-exitcode, f'signal {-exitcode}')}{hint}"
    return f"its process ended early (exit code {exitcode}), see its message above"
