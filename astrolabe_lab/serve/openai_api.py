"""What the router reads of an OpenAI-compatible request, and the errors it answers itself, in OpenAI's shape."""

from __future__ import annotations

import json
from dataclasses import dataclass

SLO_CLASSES = ("tight", "loose")
PATHS = ("/v1/completions", "/v1/chat/completions")


class Refusal(Exception):
    """A request that the router answers itself: HTTP status, message, OpenAI error type and code, extra headers."""

    content_type = "application/json"

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code=None, headers=None):
        super().__init__(message)
        self.status, self.message, self.kind, self.code = status, message, kind, code
        self.headers = headers or {}

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.code}
        return json.dumps({"error": error}).encode()


@dataclass(slots=True)
class Asked:
    """A parsed request. ``text``: what the tagger reads; ``prompt_ids``: how many token ids the prompt is, where it is
    given as ids; ``messages``: of a chat; ``slo``: its class; ``client_rid``: its X-Request-Id."""

    body: dict
    path: str
    model: str
    stream: bool
    text: str = ""
    prompt_ids: int | None = None
    messages: list | None = None
    slo: str = "loose"
    max_tokens: int | None = None
    predicted_tokens: int | None = None
    client_rid: str | None = None


def parse(path: str, raw: bytes, headers, models: list[str]) -> Asked:
    """The request in ``raw``. Raises Refusal for what no engine could answer: not JSON, not UTF-8, not an object, an
    unknown model, a prompt of no allowed kind, an unknown SLO class. Everything else is the engine's to judge. Who
    names no model gets the only one that is served."""
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, f"content-type {kind!r} is not supported: send application/json")
    try:
        body = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Refusal(400, f"the body is not UTF-8 ({error.reason} at byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refusal(400, f"the body is a JSON {type(body).__name__}; send an object")
    if body.get("model") in (None, "") and len(models) == 1:  # as vLLM takes it
        body["model"] = models[0]
    model = body.get("model")
    if not isinstance(model, str):
        raise Refusal(400, f"model={model!r:.60} must be a string; served here: {', '.join(models)}")
    if model not in models:
        raise Refusal(
            404, f"The model {model!r:.200} does not exist; served here: {', '.join(models)}", "NotFoundError",
            "model_not_found",
        )  # fmt: skip
    stream = body.get("stream", False)
    if not isinstance(stream, (bool, type(None))):
        raise Refusal(400, f"stream={stream!r:.60} must be true or false")
    asked = Asked(body, path, model, bool(stream), slo=_slo(headers), client_rid=_client_rid(headers))
    asked.max_tokens = _whole(body, "max_tokens") or _whole(body, "max_completion_tokens")
    asked.predicted_tokens = _predicted(headers)
    if isinstance(xargs := body.get("vllm_xargs"), dict):  # an engine of ours would take another kind for unknown
        _whole(xargs, "output_tokens")
    if path == PATHS[0]:
        _read_prompt(asked)
    else:
        _read_messages(asked)
    return asked


def _slo(headers) -> str:
    slo = headers.get("x-slo-class", "loose")
    if slo not in SLO_CLASSES:
        raise Refusal(400, f"x-slo-class={slo!r:.60} is unknown; allowed: {', '.join(SLO_CLASSES)}")
    return slo


def _client_rid(headers) -> str | None:
    """Its first 200 characters; what is no Unicode in it is replaced."""
    return headers.get("x-request-id", "")[:200].encode(errors="replace").decode() or None


def _predicted(headers) -> int | None:
    value = headers.get("x-predicted-tokens")
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 10 and 1 <= int(value) < 2**31):
        raise Refusal(400, f"x-predicted-tokens={value!r:.60} must be a whole number from 1 to 2147483647")
    return int(value)


def _whole(body: dict, name: str) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refusal(400, f"{name}={value!r:.60} must be a whole number")
    return value


def _read_prompt(asked: Asked) -> None:
    prompt = asked.body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        asked.text = prompt
    elif isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        asked.prompt_ids = len(prompt)
    elif isinstance(prompt, list) and prompt and all(isinstance(each, (str, list)) for each in prompt):
        raise Refusal(400, f"prompt holds {len(prompt)} prompts; the router dispatches one a request: send them apart")
    else:
        raise Refusal(400, "prompt must be a string or a list of token ids")


def _read_messages(asked: Asked) -> None:
    messages = asked.body.get("messages")
    if not (isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)):
        raise Refusal(400, "messages must be a list of objects with role and content")
    asked.messages = messages
    asked.text = "\n".join(_content(message.get("content")) for message in messages)


def _content(content) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return ""
