"""What a stock vLLM engine tells of itself at ``/metrics``: its queue, its KV cache, its mean times."""

from __future__ import annotations

from dataclasses import dataclass

WANTED = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:request_queue_time_seconds_sum": "queue_sum",
    "vllm:request_queue_time_seconds_count": "requests",
    "vllm:request_prefill_time_seconds_sum": "prefill_sum",
    "vllm:request_prompt_tokens_sum": "prompt_tokens",
    "vllm:request_decode_time_seconds_sum": "decode_sum",
    "vllm:request_generation_tokens_sum": "generated_tokens",
}


@dataclass(slots=True)
class Gauges:
    """An engine's own numbers. Times in modelled s; means are since its start, 0 where there were none yet.

    ``taken_s``: when it was asked, -inf before the first answer; ``ended_since``: requests of the asking router that
    ended while the answer was under way or after it, so that they are not taken for another client's.
    """

    taken_s: float = -float("inf")
    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0
    queue_s: float = 0.0
    prefill_s_per_token: float = 0.0
    decode_s_per_token: float = 0.0
    ended_since: int = 0


def value_of(line: str) -> float:
    """The number at the end of a line of an exposition. Raises ValueError where there is none."""
    return float(line.rpartition(" ")[2])


def read_gauges(text: str, taken_s: float, time_scale: float) -> Gauges:
    """The gauges in a Prometheus exposition of vLLM's. Raises ValueError where it is none: a schema that has changed
    must not look like an idle engine."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("vllm:"):
            continue
        name = line.partition("{")[0].partition(" ")[0]
        if name in WANTED:
            key = WANTED[name]
            found[key] = found.get(key, 0.0) + value_of(line)  # one line an engine of a data-parallel
    if missing := {"running", "waiting", "kv_usage"} - set(found):
        raise ValueError(f"/metrics lacks {', '.join(sorted(missing))}: no vLLM, or another version of it")
    if not all(0.0 <= value < 1e15 for value in found.values()):
        raise ValueError("/metrics holds numbers that no engine has")

    def mean(total: str, count: float) -> float:
        return found.get(total, 0.0) / count / time_scale if count > 0 else 0.0

    requests = found.get("requests", 0.0)
    return Gauges(
        taken_s, found["running"], found["waiting"], found["kv_usage"], mean("queue_sum", requests),
        mean("prefill_sum", found.get("prompt_tokens", 0.0)),
        mean("decode_sum", found.get("generated_tokens", 0.0) - requests),
    )  # fmt: skip
