"""How a trace is sent, and what its requests look like on the wire."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from astrolabe_lab.errors import InputError
from astrolabe_lab.rng import stream

SOURCES = ("hardware", "emulated")
FIRST_ID, LAST_ID = 5, 260  # token ids that any tokenizer has and none treats as special


@dataclass(frozen=True)
class Load:
    """How a trace is sent.

    ``exact``: every answer has exactly its true length (``ignore_eos``, min_tokens = max_tokens); False: the engine
    ends it, an emulated one by the trace's lengths. ``text``: also an exact load sends the trace's prompts as text,
    which a router can tag; as token ids they have the trace's length to the token. ``concurrency``: 0 for an open
    loop, else that many at a time, reached over ``ramp_s``. ``tell_lengths``: send the trace's ``predicted_tokens``
    along (``x-predicted-tokens``). ``time_scale``: wall s per modelled s. ``timeout_s``: modelled, for one request.
    ``source``: the world of an engine that is asked without a router, which cannot tell. ``api_key``: of the server.
    """

    model: str
    exact: bool = True
    concurrency: int = 0
    tell_lengths: bool = True
    time_scale: float = 1.0
    timeout_s: float = 600.0
    seed: int = 0
    ttft_slo_s: float = 10.0
    ramp_s: float = 0.0
    text: bool = False
    source: str = "hardware"
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self):
        if isinstance(self.concurrency, bool) or not isinstance(self.concurrency, int) or self.concurrency < 0:
            raise InputError(f"concurrency={self.concurrency!r} must be a whole number >= 0 (0: an open loop)")
        for name, least in (("time_scale", None), ("timeout_s", None), ("ttft_slo_s", None), ("ramp_s", 0.0)):
            value = getattr(self, name)
            number = not isinstance(value, bool) and isinstance(value, (int, float)) and value < math.inf
            if not number or not (value > 0 or value == least):
                raise InputError(f"{name}={value!r} must be a finite number {'> 0' if least is None else '>= 0'}")
        if self.source not in SOURCES:
            raise InputError(f"source={self.source!r} is unknown; allowed are {' and '.join(SOURCES)}")
        if self.ramp_s and not self.concurrency:
            raise InputError("ramp_s is how a closed loop starts: give concurrency, or a trace whose arrivals ramp")

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(frozen=True)
class Served:
    """What a server says of itself: ``longest``: its ``max_model_len``; the rest only a router of ours tells, and one
    that tells nothing (``router`` False) may be an engine; ``pools``: "P+D" of a router of prefill and decode."""

    longest: int
    router: bool = False
    source: str = "hardware"
    time_scale: float | None = None
    policy: str = ""
    seed: int = 0
    pools: str | None = None


async def ask_served(client, url: str, model: str, headers: dict | None = None) -> Served:
    """What is served at ``url``. Raises InputError where nothing is, or another model."""
    import aiohttp

    try:
        timeout = aiohttp.ClientTimeout(total=30)
        async with client.get(f"{url}/v1/models", timeout=timeout, headers=headers) as answer:
            if answer.status in (401, 403):
                raise InputError(f"url {url!r} asks for an API key: put it into ASTROLABE_API_KEY")
            listed = await answer.json()
            models = {entry["id"]: entry.get("max_model_len") for entry in listed["data"]}
    except (aiohttp.ClientError, TimeoutError, OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"url {url!r} does not list its models ({type(error).__name__}: {error}); is it up?") from None
    if model not in models:
        raise InputError(f"model {model!r} is not served at {url}; served: {', '.join(models)}")
    return Served(models[model] or 1 << 20, "astrolabe" in listed, **listed.get("astrolabe", {}))


def request_of(load: Load, row, longest: int) -> tuple[dict, dict]:
    """(body, headers) of a trace row for a model of at most ``longest`` tokens."""
    n, length = int(row.prompt_tokens), int(row.output_tokens)
    prompt = getattr(row, "prompt", None)
    if not isinstance(prompt, str) or not sends_text(load):
        prompt = token_ids(n, load.seed, f"prompt {row.rid}")
    body = {
        "model": load.model, "prompt": prompt, "stream": True, "temperature": 0.0,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    if load.exact:
        body |= exactly(length)
    else:
        # The room that is left says nothing of the answer's length; an emulated engine learns that from vllm_xargs.
        body |= {"max_tokens": max(1, longest - n), "vllm_xargs": {"output_tokens": length}}
    headers = {"X-SLO-Class": getattr(row, "slo", "loose"), **load.headers}
    predicted = getattr(row, "predicted_tokens", None)
    if load.tell_lengths and predicted is not None:
        headers["X-Predicted-Tokens"] = str(int(predicted))
    return body, headers


def sends_text(load: Load) -> bool:
    """Whether prompts that the trace has go out as text."""
    return load.text or not load.exact


def exactly(tokens: int) -> dict:
    """What makes an engine answer with so many tokens, no more and no fewer."""
    return {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}


def token_ids(n: int, seed: int, name: str) -> list[int]:
    """``n`` token ids that any model has, the same for the same seed and name."""
    return stream(seed, name).integers(FIRST_ID, LAST_ID, n).tolist()
