"""Many jobs on a few processes, where a job that fails or kills its process is named, and the others go on.

The standard library's process pool cannot say which job killed a worker, and ends with it; one pipe per worker can.
Processes are spawned, never forked: compiled code and its threads do not survive a fork. They do not run the main
script again either, as spawned ones otherwise do: jobs travel by value, so nothing of it is needed there, and a script
needs no `if __name__ == "__main__":`.
"""

import contextlib
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from types import ModuleType

import cloudpickle

from astrolabe_lab.errors import InputError


class CrewError(RuntimeError):
    """A job crashed, or its process died; the message starts with the job's name."""


@dataclass(frozen=True)
class Failure:
    """Why a job has no result, and how often it was tried."""

    cause: str
    tries: int = 1


def cores() -> int:
    """How many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def each(
    job: Callable, items: Sequence, workers: int, *, retries: int = 0, failures: str = "raise"
) -> Iterator[tuple[int, object]]:
    """(index, job(items[index])) for every item, as they end, on `workers` processes; 1 is this process.

    `str(item)` names an item in errors. A job's InputError comes through with that name before it. An item whose
    process dies is given to a new process, `retries` times. Any other exception, or one death more, is a CrewError;
    with `failures="yield"` a Failure stands in the place of the result, and the others go on. However it ends, also
    by Ctrl-C, no process is left.
    """
    if failures not in ("raise", "yield"):
        raise InputError(f"failures={failures!r} is unknown: allowed are raise and yield")
    if workers == 1:
        done = _here(job, items)
    else:
        done = _spread(pickled((job, list(items))), len(items), workers, retries)
    return judged(done, items, failures)


def judged(done: Iterator, items: Sequence, failures: str) -> Iterator[tuple[int, object]]:
    """The same results, where what is to be raised is raised, under the item's name."""
    with contextlib.closing(done):
        for index, result in done:
            if isinstance(result, InputError):
                raise InputError(f"{items[index]}: {result}") from result
            if isinstance(result, Failure) and failures == "raise":
                raise CrewError(f"{items[index]}: {result.cause}")
            yield index, result


def attempt(job: Callable, item: object, details: bool = True) -> object:
    """job(item); the InputError that it raised, or a Failure for another exception."""
    try:
        return job(item)
    except InputError as error:
        return error
    except Exception as error:
        where = f"\n{traceback.format_exc()}" if details else ""
        return Failure(f"{type(error).__name__}: {error}{where}")


def _here(job: Callable, items: Sequence) -> Iterator[tuple[int, object]]:
    for index, item in enumerate(items):
        yield index, attempt(job, item, details=False)


def _spread(payload: bytes, total: int, workers: int, retries: int) -> Iterator[tuple[int, object]]:
    todo = deque(range(total))
    tries = [0] * total
    busy, crew = {}, {}

    def hire() -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs,), daemon=True)
        with _unseen_main():
            process.start()
        theirs.close()  # or the end of the worker would not end the pipe
        crew[ours] = process

    def equip(pipe) -> None:
        with contextlib.suppress(OSError):  # dead already: the read that follows says so
            pipe.send_bytes(payload)  # as an argument it would block `start` for ever if the worker dies early

    def give(pipe) -> None:
        if todo:
            busy[pipe] = index = todo.popleft()
            tries[index] += 1
            with contextlib.suppress(OSError):
                pipe.send(index)

    context = get_context("spawn")
    try:
        for _ in range(workers):
            hire()
        for pipe in list(crew):
            equip(pipe)
            give(pipe)
        while busy:
            for pipe in connection.wait(busy):
                index = busy.pop(pipe)
                try:
                    result = pipe.recv()
                except (EOFError, OSError):
                    process = crew.pop(pipe)
                    process.join(5)
                    if tries[index] <= retries:
                        todo.appendleft(index)
                    else:
                        yield index, Failure(_death(process.exitcode), tries[index])
                    if todo:
                        hire()
                        equip(pipe := next(reversed(crew)))
                        give(pipe)
                    continue
                yield index, result
                give(pipe)
    finally:
        for process in crew.values():
            process.terminate()
        for process in crew.values():
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
    """A worker: gets the job and its items, then runs those whose numbers come in and sends back what came of them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job, items = pickle.loads(pipe.recv_bytes())
    while True:
        try:
            index = pipe.recv()
        except EOFError:
            return
        pipe.send(attempt(job, items[index]))


def _end_with_parent() -> None:
    """A parent that was killed ends no worker: it would compute on, for nobody."""
    parent_process().join()
    os._exit(1)


def pickled(value: object) -> bytes:
    """`value` as bytes for `pickle.loads`, with classes and functions of a script or a notebook cell in it."""
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        raise InputError(f"this cannot be sent to another process ({error}); use workers=1") from error


def _death(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        names = {int(known): known.name for known in signal.Signals}
        hint = "; often it is memory: use fewer workers" if exitcode == -9 else ""
        return f"its process was killed by {names.get(-exitcode, f'signal {-exitcode}')}{hint}"
    return f"its process ended early (exit code {exitcode}), see its message above"
