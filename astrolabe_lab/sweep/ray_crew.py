"""`crew.each` on a Ray cluster: the same promises, with a node in the place of a process.

The package itself travels with the jobs, so that every node runs this code; what it stands on (numba, pandas, ...)
has to be installed there.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import cloudpickle

from astrolabe_lab.errors import InputError
from astrolabe_lab.sweep.crew import Failure, attempt, judged, pickled

from . import identity

AHEAD = 2  # jobs handed to the cluster for each of its processors, so that none waits


def each(
    job: Callable,
    items: Sequence,
    address: str,
    workers: int | None,
    *,
    retries: int = 0,
    failures: str = "raise",
    modules: Sequence[ModuleType] = (),
) -> Iterator[tuple[int, object]]:
    """(index, job(items[index])) for every item, as they end, on the cluster at `address`; see `crew.each`.

    `address`: "ray" is the cluster this process is connected to, or RAY_ADDRESS names, or runs on this machine, or else
    one of this machine's own; otherwise what `ray.init` takes. `workers`: at most so many jobs at once (default: as
    many as the cluster has processors). A job whose node or process dies is run elsewhere, `retries` times. `modules`
    travel with the jobs: those that the nodes cannot import.
    """
    with _by_value(modules):
        payload = pickled((job, list(items)))
    return judged(_spread(payload, len(items), address, workers, retries), items, failures)


@contextlib.contextmanager
def _by_value(modules: Sequence[ModuleType]) -> Iterator[None]:
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _spread(payload: bytes, total: int, address: str, workers: int | None, retries: int) -> Iterator:
    ray = _ray()
    name = identity.fingerprint(payload)
    with _connected(ray, address):
        import numpy as np

        shared = ray.put(np.frombuffer(payload, np.uint8))  # an array is read in place, on every node
        work = ray.remote(num_cpus=1, max_retries=0)(_work)
        todo, tries, busy = deque(range(total)), [0] * total, {}
        try:
            while todo or busy:
                most = workers or AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
                while todo and len(busy) < most:
                    index = todo.popleft()
                    tries[index] += 1
                    busy[work.remote(shared, name, identity.code(), index)] = index
                ready, _ = ray.wait(list(busy), timeout=1.0)  # returns now and then, for Ctrl-C
                for reference in ready:
                    index = busy.pop(reference)
                    try:
                        result = ray.get(reference)
                    except ray.exceptions.RayError as error:
                        if not _is_loss(ray, error):
                            result = Failure(f"{type(error).__name__}: {error}", tries[index])
                        elif tries[index] <= retries:
                            todo.appendleft(index)
                            continue
                        else:
                            result = Failure(f"its process or node was lost: {_first_line(error)}", tries[index])
                    yield index, result
        finally:
            for reference in busy:
                with contextlib.suppress(Exception):
                    ray.cancel(reference, force=True)


def _is_loss(ray, error: Exception) -> bool:
    lost = ("WorkerCrashedError", "NodeDiedError", "OutOfMemoryError", "ObjectLostError", "OwnerDiedError")
    kinds = tuple(kind for name in lost if (kind := getattr(ray.exceptions, name, None)))
    return isinstance(error, kinds)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _work(payload, name: str, code: str, index: int) -> object:
    """A task: what comes of the item."""
    if identity.code() != code:
        there = ", ".join(f"{package} {version}" for package, version in identity.versions().items())
        return Failure(f"the node runs other code or packages than this machine ({there}): install the same there")
    if name not in _held:
        _held.clear()
        _held[name] = pickle.loads(payload)
    job, items = _held[name]
    return attempt(job, items[index])


_held: dict[str, tuple[Callable, list]] = {}  # what this worker process unpacked last


@contextlib.contextmanager
def _connected(ray, address: str) -> Iterator[None]:
    """Connected to the cluster; a connection that was there before stays."""
    if ray.is_initialized():
        yield
        return
    package = Path(__file__).parents[1]
    options = {
        "runtime_env": {"py_modules": [str(package)], "excludes": ["**/__pycache__/**"]},
        "log_to_driver": False,
        "logging_level": "warning",
    }
    _reach(address)
    on_end = signal.getsignal(signal.SIGTERM)
    try:
        if address == "ray":
            try:
                ray.init("auto", **options)
            except ConnectionError:
                ray.init(**options)
        else:
            ray.init(address, **options)
    except Exception as error:
        raise InputError(f"cannot reach a Ray cluster at {address!r}: {_first_line(error)}") from error
    with contextlib.suppress(ValueError):  # not the main thread, which alone has handlers
        signal.signal(signal.SIGTERM, on_end)  # Ray's own would end this process without a word
    try:
        yield
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Raise InputError where nobody listens at an address HOST:PORT: Ray itself would try for ever."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"cannot reach a Ray cluster at {address!r}: {error}") from None


def _ray():
    try:
        import ray
    except ImportError:
        raise InputError("Ray is not installed here: pip install 'astrolabe-lab[ray]', or use on='local'") from None
    return ray
