"""What the tagging service counts, in Prometheus's terms."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class ServiceMetrics:
    """Counters of one service, in a registry of their own: several may live in one process."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, model_hash: str) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "astrolabe_tag_requests", "Requests by what became of them", ["outcome"], registry=registry
        )
        self._seconds = Histogram(
            "astrolabe_tag_request_seconds", "Seconds from header to answer", buckets=SECONDS, registry=registry
        )
        self._sizes = Histogram(
            "astrolabe_tag_batch_prompts", "Prompts that went to the model at once", buckets=SIZES, registry=registry
        )
        self._model_seconds = Histogram(
            "astrolabe_tag_model_seconds", "Seconds of a batch in the model", buckets=SECONDS, registry=registry
        )
        about = Gauge("astrolabe_tag_model_info", "The model that is served", ["model_hash"], registry=registry)
        about.labels(model_hash).set(1)

    def watch(self, batcher) -> None:
        """Report how many prompts wait in ``batcher``."""
        waiting = Gauge("astrolabe_tag_waiting_prompts", "Prompts that wait for the model", registry=self._registry)
        waiting.set_function(lambda: batcher.waiting)

    def batch(self, prompts: int, seconds: float) -> None:
        """A batch of so many prompts took so many seconds in the model."""
        self._sizes.observe(prompts)
        self._model_seconds.observe(seconds)

    def request(self, outcome: str, seconds: float) -> None:
        """A request ended: ``ok``, ``late``, ``client_gone``, ``failed`` or the code of its error."""
        self._requests.labels(outcome).inc()
        self._seconds.observe(seconds)

    def text(self) -> bytes:
        """All of it as Prometheus reads it."""
        return generate_latest(self._registry)
