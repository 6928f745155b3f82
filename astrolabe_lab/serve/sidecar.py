"""The Predictor sidecar: one engine's status and predictions over HTTP, for routers on other machines.

``POST /predict`` ``{"version": 1, "prompt_tokens", "predicted_tokens", "metric"?, "waited_s"?, "dispatched"?}`` ->
``{"fits", "ttft_s", "e2e_s", "tpot_s", "added_delay_s", "reason", "status_age_s"}``; ``GET /status``; ``/healthz``;
``/metrics``. Times are modelled seconds; ``dispatched`` lists what the asking router sent there and has not seen a
token of, as ``{rid, age_s, prompt_tokens, predicted_tokens}`` (ages, because two machines have two clocks); those that
the status shows already are left out.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict

from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from astrolabe_lab.errors import InputError
from astrolabe_lab.objective import objective
from astrolabe_lab.request import Request

from .instance import Instance

VERSION = 1
MOST_DISPATCHED = 4096
WITHOUT = {
    "ledger": "the engine publishes no status that can be believed; is it up?",
    "stale": "the engine's step has begun and does not end; is it stuck?",
}


class Dispatched(BaseModel):
    """What the asking router sent to the engine and has seen no token of."""

    model_config = ConfigDict(extra="forbid", strict=True)

    rid: int
    age_s: float = Field(ge=0.0, lt=1e9)
    prompt_tokens: int = Field(ge=1, lt=2**31)
    predicted_tokens: int = Field(ge=0, lt=2**31)


class Question(BaseModel):
    """The body of ``POST /predict``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    version: int = VERSION
    prompt_tokens: int = Field(ge=1, lt=2**31)
    predicted_tokens: int = Field(ge=1, lt=2**31)
    metric: str | None = None
    waited_s: float = Field(default=0.0, ge=0.0, lt=1e9)
    dispatched: list[Dispatched] = Field(default=[], max_length=MOST_DISPATCHED)


def application(instance: Instance, time_scale: float = 1.0) -> FastAPI:
    """The sidecar of ``instance`` (with a published status and a Predictor)."""
    from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

    app = FastAPI(title="Astrolabe Predictor", docs_url=None, redoc_url=None, openapi_url=None)
    registry = CollectorRegistry()
    asked = Counter("astrolabe_predictions", "Predictions by result", ["result"], registry=registry)
    seconds = Histogram("astrolabe_prediction_seconds", "Time of one prediction", registry=registry)
    one_at_a_time = asyncio.Lock()  # the Predictor's scratch state is one

    def now_s() -> float:
        return time.monotonic() / time_scale

    @app.exception_handler(RequestValidationError)
    async def refuse(_, error: RequestValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
        return _error(422, f"{where}: {first['msg']}")

    @app.exception_handler(InputError)
    async def wrong(_, error: InputError):
        return _error(400, str(error))

    @app.post("/predict")
    async def predict(question: Question):
        if question.version != VERSION:
            raise InputError(f"version {question.version} where {VERSION} is understood")
        if question.metric is not None:
            objective(question.metric)
        async with one_at_a_time:
            started = time.perf_counter()
            at_s = now_s()
            status, source = instance.status(at_s)
            if source != "published":
                asked.labels("no_status").inc()
                return _error(503, WITHOUT[source])
            request = Request(-1, at_s - question.waited_s, question.prompt_tokens, question.predicted_tokens)
            shown = set(status.rows["rid"].tolist())
            dispatched = [
                (at_s - sent.age_s, sent.prompt_tokens, sent.predicted_tokens)
                for sent in question.dispatched
                if sent.rid not in shown
            ]
            answer = instance.predictor.predict(status, request, question.metric, now_s=at_s, dispatched=dispatched)
            seconds.observe(time.perf_counter() - started)
        asked.labels("fits" if answer.fits else "does_not_fit").inc()
        found = {name: value for name, value in asdict(answer).items() if name != "basis"}
        return {**found, "status_age_s": max(0.0, at_s - status.taken_s)}

    @app.get("/status")
    async def status():
        found, source = instance.status(now_s())
        if source != "published":
            return _error(503, WITHOUT[source])
        return Response(found.to_json(), media_type="application/json")

    @app.get("/healthz")
    async def healthz():
        _, source = instance.status(now_s())
        ok = source == "published"
        return JSONResponse({"ok": ok, "restarts": instance.restarts}, status_code=200 if ok else 503)

    @app.get("/metrics")
    async def metrics():
        return Response(generate_latest(registry), media_type="text/plain")

    return app


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status_code=status)
