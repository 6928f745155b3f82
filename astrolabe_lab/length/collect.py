"""Answers from the served model itself: prompts sent to an OpenAI-compatible endpoint, lengths from its ``usage``.

One JSON line an answer, written when it comes and never changed: a run that is stopped goes on where it was.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from astrolabe_lab.errors import InputError
from astrolabe_lab.length.data import prompt_uid
from astrolabe_lab.urls import url_of

APIS = ("chat", "completions")
_RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_GIVE_UP_AFTER = 10  # requests in a row to which the server failed to give an answer


@dataclass(frozen=True)
class Asking:
    """How the endpoint is asked. What is None is left to the server; ``seed`` is never sent, since some engines end
    on it.

    url: the server, with or without ``/v1``. model: None asks the server which one it serves. api: ``chat``, or
    ``completions`` for a model without a chat template. max_tokens: None lets every answer end by itself, which a
    server may only do for ``chat``. samples: answers a prompt. retries: of a request that failed for a passing reason.
    """

    url: str
    model: str | None = None
    api: str = "chat"
    max_tokens: int | None = None
    temperature: float | None = None
    samples: int = 1
    concurrency: int = 8
    retries: int = 5
    timeout_s: float = 600.0
    api_key: str | None = None

    def __post_init__(self):
        url_of(self.url, "url")
        if self.api not in APIS:
            raise InputError(f"api {self.api!r} is unknown: allowed are {' and '.join(APIS)}")
        if self.api == "completions" and self.max_tokens is None:
            raise InputError(
                "api completions cuts answers at 16 tokens unless max_tokens says otherwise: give max_tokens"
            )
        for name, least in (("max_tokens", 1), ("samples", 1), ("concurrency", 1), ("retries", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise InputError(f"{name}={value!r} must be an integer >= {least}")
        if not self.timeout_s > 0:
            raise InputError(f"timeout_s={self.timeout_s!r} must be above 0")

    @property
    def base(self) -> str:
        """The URL that ``/chat/completions`` and ``/models`` follow."""
        url = url_of(self.url, "url")
        return url if url.endswith("/v1") else f"{url}/v1"


@dataclass
class Collected:
    """What a run did: ``asked`` now, ``already`` there, ``answered``, ``cut_off`` (of those answered, by length),
    ``failed``, and the ``model`` that answered."""

    path: Path
    model: str
    asked: int = 0
    already: int = 0
    answered: int = 0
    cut_off: int = 0
    failed: int = 0


async def collect(
    prompts: Sequence[str], out, asking: Asking, progress: Callable[[Collected], None] | None = None
) -> Collected:
    """Ask for every prompt's answers that ``out`` lacks, appending one JSON line each; return what was done.

    A line holds ``prompt_uid, prompt, sample, model, prompt_tokens, response_tokens, finish_reason, latency_s``, and
    how it was asked; no text of the answer. A request that fails for good leaves a line with ``error``, and with
    ``refused`` true where the server lives and will not answer this prompt; the next run tries it again, after all that
    were never asked. Empty prompts are left out, prompts given twice are asked once.

    Raises InputError where nothing answers at the URL, the key or the model is refused, ``out`` holds answers to
    other questions, or another process writes to it; RuntimeError when the server has failed ten requests in a row
    (no connection, no answer in time, errors of its own, no lengths), which refusals are not.
    """
    try:
        import aiohttp
    except ImportError:
        raise InputError("collecting needs the package 'aiohttp': make length, or install the extra 'length'") from None

    out = Path(out)
    texts = {prompt_uid(prompt): prompt for prompt in prompts if prompt.strip()}
    if not texts:
        raise InputError("there are no prompts to send: all are empty")
    headers = {"Authorization": f"Bearer {asking.api_key}"} if asking.api_key else {}
    timeout = aiohttp.ClientTimeout(total=asking.timeout_s)
    connector = aiohttp.TCPConnector(limit=asking.concurrency)
    with _appending(out) as file:
        async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
            model = asking.model or await _served_model(session, asking)
            how = {"api": asking.api, "max_tokens": asking.max_tokens, "temperature": asking.temperature}
            done, failed = _settled(out, model, how)
            wanted = [(uid, sample) for sample in range(asking.samples) for uid in texts]
            todo = sorted((key for key in wanted if key not in done), key=failed.__contains__)  # else in their order
            result = Collected(out, model, asked=len(todo), already=len(wanted) - len(todo))
            await _ask_all(session, asking, model, how, texts, todo, file, result, progress)
    return result


async def _ask_all(session, asking, model, how, texts, todo, file, result, progress):
    """Some at a time; the first error that concerns all of them ends the others."""
    queue = iter(todo)
    failing = 0

    async def work():
        nonlocal failing
        for uid, sample in queue:
            row = await _ask(session, asking, model, texts[uid])
            said = {"prompt_uid": uid, "prompt": texts[uid], "sample": sample, "model": model} | row | how
            said["asked"] = datetime.now(UTC).isoformat(timespec="seconds")
            os.write(file, (json.dumps(said) + "\n").encode())  # one write a line: nothing is ever half there
            if "error" in row:
                result.failed += 1
                failing = 0 if row["refused"] else failing + 1
                if failing >= _GIVE_UP_AFTER:
                    raise RuntimeError(
                        f"{failing} requests in a row have failed, the last with: {row['error']}; {result.answered:,} "
                        f"answers are in {result.path}: run the same again to go on"
                    )
            else:
                failing = 0
                result.answered += 1
                result.cut_off += row["finish_reason"] == "length"
            if progress:
                progress(result)

    workers = [asyncio.create_task(work()) for _ in range(min(asking.concurrency, len(todo)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        os.fsync(file)


async def _ask(session, asking, model, prompt) -> dict:
    """One answer's row, or one with ``error`` once the retries are used up."""
    import aiohttp

    body: dict = {"model": model, "stream": False}
    if asking.api == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
        path = "/chat/completions"
    else:
        body["prompt"] = prompt
        path = "/completions"
    body |= {
        name: value
        for name, value in (("max_tokens", asking.max_tokens), ("temperature", asking.temperature))
        if value is not None
    }
    for attempt in range(asking.retries + 1):
        wait_s = min(_FIRST_WAIT_S * 2**attempt, _LONGEST_WAIT_S) * random.uniform(0.5, 1.0)
        began = time.perf_counter()
        try:
            async with session.post(asking.base + path, json=body) as response:
                text = await response.text(errors="replace")
                if response.status == 200:
                    row = _row(text)
                    return row | {"latency_s": round(time.perf_counter() - began, 6)} if "error" not in row else row
                error = f"HTTP {response.status}: {_message(text)}"
                if response.status in (401, 403, 404):
                    raise InputError(f"{asking.base}{path} refuses model {model!r}: {error}")
                if response.status not in _RETRIED:
                    return {"error": error, "refused": True}
                asked_for = response.headers.get("Retry-After", "")
                if asked_for.isdigit():
                    wait_s = max(wait_s, min(float(asked_for), asking.timeout_s))
        except (aiohttp.ClientError, TimeoutError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        if attempt < asking.retries:
            await asyncio.sleep(wait_s)
    return {"error": f"{error} (after {asking.retries + 1} tries)", "refused": False}


def _row(text: str) -> dict:
    """The row of a whole answer; one with ``error`` where the server left out what a length needs."""
    try:
        answer = json.loads(text)
        choice, usage = answer["choices"][0], answer["usage"]
        row = {
            "prompt_tokens": int(usage["prompt_tokens"]),
            "response_tokens": int(usage["completion_tokens"]),
            "finish_reason": choice["finish_reason"],
        }
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as problem:
        error = f"the answer lacks choices or usage ({type(problem).__name__}: {problem}): {text[:100]!r}"
        return {"error": error, "refused": False}
    if row["finish_reason"] not in ("stop", "length"):
        error = f"finish_reason is {row['finish_reason']!r}: neither a natural end nor a cut by length"
        return {"error": error, "refused": True}
    return row


def _message(text: str) -> str:
    try:
        found = json.loads(text)
        found = found.get("error", found)
        text = found.get("message", found) if isinstance(found, dict) else found
    except (ValueError, AttributeError, RecursionError):
        pass
    return " ".join(str(text).split())[:200]


async def _served_model(session, asking) -> str:
    """The one model that the server has. Raises InputError for none, or several."""
    import aiohttp

    try:
        async with session.get(f"{asking.base}/models") as response:
            text = await response.text(errors="replace")
            if response.status != 200:
                raise InputError(f"{asking.base}/models: HTTP {response.status}: {_message(text)}; give --served-model")
            names = [entry["id"] for entry in json.loads(text)["data"]]
    except (aiohttp.ClientError, TimeoutError) as problem:
        raise InputError(f"nothing answers at {asking.base}: {problem}; is the server up?") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{asking.base}/models does not list models as OpenAI's API does; give the model") from None
    if len(names) != 1:
        raise InputError(f"{asking.base} serves {len(names)} models ({', '.join(names[:10])}): say which")
    return names[0]


def _settled(out: Path, model: str, how: dict) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """Which (prompt_uid, sample) ``out`` has an answer to, and which failed. Raises InputError for answers asked for
    in another way."""
    done, failed = set(), set()
    for number, line in enumerate(out.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            key, asked = (row["prompt_uid"], row["sample"]), {name: row[name] for name in how}
            other = row["model"] != model or asked != how
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InputError(f"{out}, line {number}: no line that collect wrote; give another file") from None
        if other:
            was = ", ".join(f"{name}={value}" for name, value in ({"model": row["model"]} | asked).items())
            raise InputError(f"{out} holds answers asked for in another way ({was}): give another file")
        (failed if "error" in row else done).add(key)
    return done, failed


@contextmanager
def _appending(out: Path):
    """The file descriptor of ``out``, ours alone, a torn last line (a crash of the machine) cut off."""
    if not out.parent.is_dir():
        raise InputError(f"{out}: the folder {out.parent} does not exist; create it first")
    try:
        file = os.open(out, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror}") from None
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"{out}: another process is collecting into it; wait for it, or give another file"
            ) from None
        content = out.read_bytes()
        if content and not content.endswith(b"\n"):
            os.ftruncate(file, content.rfind(b"\n") + 1)
        yield file
    finally:
        os.close(file)
