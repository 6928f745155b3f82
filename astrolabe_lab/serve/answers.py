"""What a router answers by itself: after the last try, and where there is nothing to serve. In OpenAI's shape."""

from __future__ import annotations

from aiohttp import web

from .dispatch import Unanswered
from .openai_api import Refusal


def given_up(tried: dict[int, Unanswered]) -> Refusal:
    """What the client is told after the last try: the engine's own error, where one gave any."""
    last = list(tried.values())[-1]
    if last.status is not None:
        return EngineRefusal(last)
    if sum(t.reached for t in tried.values()) > 1:
        why = f"{len(tried)} engines failed while they had this request, so no other is tried"
        return Refusal(502, f"{why} ({last.reason})", "upstream_error", "engines_failed")
    why = f"{len(tried)} engines were tried and none answered"
    return Refusal(502, f"{why} ({last.reason})", "upstream_error", "no_answer", {"Retry-After": "1"})


class EngineRefusal(Refusal):
    """An engine's own error, passed on as it came."""

    def __init__(self, answer: Unanswered):
        super().__init__(answer.status, answer.reason)
        self._answer = answer
        self.content_type = answer.kind

    def body(self) -> bytes:
        return self._answer.body


def as_response(refusal: Refusal, headers: dict | None = None) -> web.Response:
    """The refusal over HTTP."""
    headers = {**(headers or {}), **refusal.headers}
    return web.Response(
        status=refusal.status, body=refusal.body(), content_type=refusal.content_type, headers=headers
    )  # fmt: skip


@web.middleware
async def openai_errors(http: web.Request, handler):
    """Refusals, and aiohttp's own (no such path, no such method), in OpenAI's shape."""
    try:
        return await handler(http)
    except Refusal as refusal:
        return as_response(refusal)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return as_response(Refusal(error.status, f"{http.method} {http.path}: {error.reason}", headers=allow))
