"""The tagging service: ``POST /tag`` over a length model, batched, bounded and observable."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from concurrent.futures import Future
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import HTTPException

from astrolabe_lab.errors import InputError
from astrolabe_lab.length.batching import Batcher, ModelError, Overloaded
from astrolabe_lab.length.service_metrics import ServiceMetrics
from astrolabe_lab.length.tagging import as_tokens, check_fallback

STUCK_S = 30.0  # a batch that takes longer makes the service unhealthy


@dataclass(frozen=True)
class Limits:
    """What the service takes and how long it works on it.

    ``max_batch`` prompts go to the model at once: those that came while it was busy, and those that come within
    ``max_wait_s``, which a single prompt then waits in vain. An answer that takes
    over ``timeout_s`` is the constant, marked late; so is a body that takes over ``body_timeout_s`` an error.
    ``max_waiting`` prompts may wait, ``max_prompts`` come in one request, ``max_body_bytes`` in one body.
    """

    max_batch: int = 32
    max_wait_s: float = 0.0
    timeout_s: float = 1.0
    body_timeout_s: float = 5.0
    max_waiting: int = 1024
    max_prompts: int = 256
    max_body_bytes: int = 4 * 2**20

    def __post_init__(self):
        for name in ("max_batch", "max_waiting", "max_prompts", "max_body_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name}={value!r} should be a whole number >= 1")
        for name, least in (("max_wait_s", 0.0), ("timeout_s", 0.001), ("body_timeout_s", 0.001)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= 60:
                raise InputError(f"{name}={value!r} should be a number of seconds from {least:g} to 60")


class _Refusal(Exception):
    """What the client did wrong, or the service cannot do now: a status, a code and a sentence."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class _Gone(Exception):
    """The client has hung up."""


def create_app(estimator, *, fallback: int, model_hash: str = "", limits: Limits = Limits()) -> FastAPI:
    """The ASGI application that serves ``estimator``; one thread of its own runs the model.

    ``POST /tag`` takes ``{"prompt": text, "model": name of the served model or null}`` and answers
    ``{"predicted_tokens", "p90_tokens", "source", "model_hash", "late"}``; with ``"prompts": [...]`` (and
    ``"models": [...]``) it answers ``{"tags": [...], "model_hash", "late"}``, in the same order. An answer that is late
    is ``fallback`` with source ``constant`` and p90 null. ``GET /healthz`` is 200 while the model answers,
    ``GET /metrics`` Prometheus text. Errors are ``{"error": {"message", "type", "code"}}``.
    """
    fallback = check_fallback(fallback)
    metrics = ServiceMetrics(model_hash)
    batcher: Batcher | None = None
    started_s = time.monotonic()

    @contextlib.asynccontextmanager
    async def lifespan(_app):
        nonlocal batcher
        batcher = Batcher(
            estimator,
            max_batch=limits.max_batch,
            max_wait_s=limits.max_wait_s,
            max_waiting=limits.max_waiting,
            on_batch=metrics.batch,
        )
        metrics.watch(batcher)
        try:
            yield
        finally:
            await asyncio.to_thread(batcher.close)

    app = FastAPI(title="Astrolabe length tagger", lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.post("/tag")
    async def tag(request: Request) -> Response:
        began_s, outcome = time.perf_counter(), "failed"
        try:
            prompts, models, many = _asked(await _body(request, limits), limits)
            tags = await _tags(request, prompts, models)
            outcome = "late" if tags is None else "ok"
            tags = tags or [{"predicted_tokens": fallback, "p90_tokens": None, "source": "constant"}] * len(prompts)
            about = {"model_hash": model_hash, "late": outcome == "late"}
            return _json(200, {"tags": tags} | about if many else tags[0] | about)
        except _Refusal as refusal:
            outcome = refusal.code
            return _error(refusal.status, refusal.code, str(refusal))
        except _Gone:
            outcome = "client_gone"
            return Response(status_code=499)
        finally:
            metrics.request(outcome, time.perf_counter() - began_s)

    async def _tags(request: Request, prompts: list[str], models: list[str | None]) -> list[dict] | None:
        """The tags, or None when the time is over."""
        waiting: list[Future] = []
        try:
            waiting += (batcher.submit(*one) for one in zip(prompts, models, strict=True))
        except (Overloaded, InputError) as error:
            for future in waiting:
                future.cancel()
            status, code = (503, "overloaded") if isinstance(error, Overloaded) else (400, "unknown_model")
            raise _Refusal(status, code, str(error)) from None
        answers = asyncio.gather(*map(asyncio.wrap_future, waiting))
        answers.add_done_callback(lambda done: done.cancelled() or done.exception())  # asyncio wants it looked at
        gone = asyncio.ensure_future(_hung_up(request))
        try:
            await asyncio.wait((answers, gone), timeout=limits.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not answers.done():
                if gone.done():
                    raise _Gone
                return None
            return [_tag(*quantiles) for quantiles in answers.result()]
        except ModelError as error:
            raise _Refusal(500, "model_failed", str(error)) from None
        finally:
            gone.cancel()
            answers.cancel()  # also takes what has not begun out of the model's queue

    @app.get("/healthz")
    async def healthz() -> Response:
        stuck = batcher.busy_s > STUCK_S
        about = {"model_hash": model_hash, "waiting": batcher.waiting, "uptime_s": time.monotonic() - started_s}
        return _json(503 if stuck else 200, {"status": "stuck" if stuck else "ok"} | about)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.text(), media_type=metrics.media_type)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def not_here(request: Request, error: HTTPException) -> Response:
        message = "there are POST /tag, GET /healthz and GET /metrics"
        return _error(error.status_code, "not_found" if error.status_code == 404 else "wrong_method", message)

    return app


def _tag(p50: float, p90: float) -> dict:
    predicted = as_tokens(max(p50, 1.0))
    p90_tokens = as_tokens(max(p90, p50, 1.0))
    if predicted is None or p90_tokens is None:
        raise ModelError(f"the length model answered {p50:g} and {p90:g} tokens")
    return {"predicted_tokens": predicted, "p90_tokens": p90_tokens, "source": "model"}


# --- what was asked ---------------------------------------------------------------------------------------


async def _body(request: Request, limits: Limits) -> bytes:
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    charset = parameters.partition("charset=")[2].strip("\"' ").lower()
    if kind.strip().lower() != "application/json" or charset not in ("", "utf-8", "utf8"):
        raise _Refusal(415, "content_type", "send application/json in UTF-8: set the header Content-Type")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise _Refusal(415, "content_encoding", "send the body uncompressed")
    length = request.headers.get("content-length", "0")
    too_large = _Refusal(413, "too_large", f"the body is over {limits.max_body_bytes:,} bytes: send fewer prompts")
    if length.isdecimal() and (len(length) > 18 or int(length) > limits.max_body_bytes):
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise _Gone
                part = message.get("body", b"")
                if (size := size + len(part)) > limits.max_body_bytes:
                    raise too_large
                parts.append(part)
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        message = f"the body did not arrive within {limits.body_timeout_s:g} s"
        raise _Refusal(408, "slow_body", message) from None


def _asked(body: bytes, limits: Limits) -> tuple[list[str], list[str | None], bool]:
    """(prompts, models, whether a list was asked for)."""
    try:
        asked = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _Refusal(400, "not_utf8", f"the body is not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise _Refusal(400, "not_json", f"the body is not JSON: {error}") from None
    if not isinstance(asked, dict):
        raise _Refusal(400, "invalid", 'the body should be an object, e.g. {"prompt": "..."}')
    many = "prompts" in asked
    allowed = ("prompts", "models") if many else ("prompt", "model")
    if unknown := sorted(set(asked) - set(allowed)):
        raise _Refusal(400, "invalid", f"{unknown[0][:80]!r} is unknown here: allowed are {' and '.join(allowed)}")
    if allowed[0] not in asked:
        raise _Refusal(400, "invalid", 'the prompt is missing: send {"prompt": "..."} or {"prompts": [...]}')
    prompts = asked["prompts"] if many else [asked["prompt"]]
    models = asked.get("models") if many else [asked.get("model")]
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= limits.max_prompts:
        raise _Refusal(400, "invalid", f"prompts should be a list of 1 to {limits.max_prompts} texts")
    models = [None] * len(prompts) if models is None else models
    if not isinstance(models, list) or len(models) != len(prompts):
        raise _Refusal(400, "invalid", f"models should be a list of {len(prompts)} names, one a prompt, or null")
    for what, values, types in (("prompt", prompts, str), ("model", models, (str, type(None)))):
        if wrong := [value for value in values if not isinstance(value, types)]:
            raise _Refusal(400, "invalid", f"{what} is of type {type(wrong[0]).__name__}, should be text")
    return prompts, models, many


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# --- what is answered -------------------------------------------------------------------------------------


def _error(status: int, code: str, message: str) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    headers = {"Retry-After": "1"} if status == 503 else None
    return _json(status, {"error": {"message": message, "type": kind, "code": code}}, headers)


def _json(status: int, record: dict, headers: dict | None = None) -> Response:
    """A JSON response in ASCII: what a client sent may hold what UTF-8 cannot."""
    return Response(json.dumps(record), status_code=status, headers=headers, media_type="application/json")
