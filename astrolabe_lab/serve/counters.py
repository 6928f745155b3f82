"""What a router counts, and its Prometheus exposition."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

DECISION_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
TTFT_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
TPOT_S = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
E2E_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)


class Seconds:
    """A Prometheus histogram with these upper ``edges``."""

    def __init__(self, edges: Sequence[float]):
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum_s = 0.0

    def seen(self, seconds: float) -> None:
        self.counts[bisect_left(self.edges, seconds)] += 1
        self.sum_s += seconds

    def family(self, name: str, text: str):
        from prometheus_client.core import HistogramMetricFamily

        names = [*map(str, self.edges), "+Inf"]
        return HistogramMetricFamily(
            name, text, buckets=list(zip(names, accumulate(self.counts), strict=True)), sum_value=self.sum_s
        )


@dataclass
class Counters:
    """Since the router's start."""

    decisions: Seconds = field(default_factory=lambda: Seconds(DECISION_S))
    ttft: Seconds = field(default_factory=lambda: Seconds(TTFT_S))
    tpot: Seconds = field(default_factory=lambda: Seconds(TPOT_S))
    e2e: Seconds = field(default_factory=lambda: Seconds(E2E_S))
    prompt_tokens: int = 0
    output_tokens: int = 0
    late_predictions: int = 0
    retries: int = 0
    throttled: int = 0
    upstream_errors: int = 0
    outcomes: Counter = field(default_factory=Counter)
    lengths: Counter = field(default_factory=Counter)  # where predicted lengths came from

    def decided(self, seconds: float, late: int) -> None:
        self.decisions.seen(seconds)
        self.late_predictions += late

    def answered(self, ttft_s: float | None, e2e_s: float, prompt_tokens: int, output_tokens: int) -> None:
        """A request has had its whole answer; ``ttft_s`` is None where it was not streamed."""
        self.e2e.seen(e2e_s)
        if ttft_s is not None:
            self.ttft.seen(ttft_s)
            if output_tokens > 1:
                self.tpot.seen((e2e_s - ttft_s) / (output_tokens - 1))
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens

    def ended(self, status: str) -> None:
        self.outcomes[status] += 1

    def more(self, router):
        """Families beside these, of a router of another kind."""
        return ()

    def exposition(self, router) -> bytes:
        """The counters and the instances' state as Prometheus text."""
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def families():
            outcomes = CounterMetricFamily(
                "astrolabe_requests",
                "Requests by outcome: ok, rejected (by an engine), refused (by the router), failed, aborted (by the "
                "client); and dispatches that were retried",
                labels=["status"],
            )
            for status, count in self.outcomes.items():
                outcomes.add_metric([status], count)
            yield outcomes
            lengths = CounterMetricFamily("astrolabe_lengths", "Predicted lengths by origin", labels=["origin"])
            for origin, count in self.lengths.items():
                lengths.add_metric([origin], count)
            yield lengths
            for name, value, text in (
                ("retries", self.retries, "Dispatches that were tried again elsewhere"),
                ("throttled", self.throttled, "Requests answered 429"),
                ("upstream_errors", self.upstream_errors, "Dispatches that failed at the engine"),
                ("late_predictions", self.late_predictions, "Predictions that came too late or failed"),
                ("prompt_tokens", self.prompt_tokens, "Prompt tokens of answered requests"),
                ("output_tokens", self.output_tokens, "Tokens of whole answers"),
            ):
                yield CounterMetricFamily(f"astrolabe_{name}", text, value=value)
            if router.journal is not None:
                yield CounterMetricFamily("astrolabe_journal_lost", "Journal lines lost", value=router.journal.lost)
            yield from _counting(router.count_tokens)
            if router.drift is not None:
                yield from router.drift.families()
            yield from self.more(router)
            yield router.lag.family()
            yield self.decisions.family("astrolabe_decision_seconds", "Time to choose an instance")
            for name, seen, text in (
                ("ttft", self.ttft, "From a request's arrival to its first token, of streamed answers"),
                ("tpot", self.tpot, "Per token after the first, of streamed answers"),
                ("e2e", self.e2e, "From a request's arrival to the end of its answer"),
            ):
                yield seen.family(f"astrolabe_{name}_seconds", f"{text}; modelled seconds")
            now_s = router.now_s()
            for name, text, value in (
                ("in_flight", "Requests of this router at the instance", lambda i: len(i.ledger)),
                ("running", "Requests in the engine's batch", lambda i: i.status(now_s)[0].running),
                ("waiting", "Requests in the engine's queue", lambda i: i.status(now_s)[0].waiting),
                ("free_blocks", "Free KV blocks of the engine", lambda i: i.status(now_s)[0].free_blocks),
                ("available", "Whether the instance gets requests", lambda i: int(i.available(now_s))),
                ("status_faults", "Failed reads of the published status", lambda i: i.status_faults),
                ("gauge_faults", "Failed reads of the engine's metrics", lambda i: i.gauge_faults),
                ("restarts", "Restarts of the engine seen", lambda i: i.restarts),
            ):
                gauge = GaugeMetricFamily(f"astrolabe_instance_{name}", text, labels=list(router.instances[0].labels))
                for instance in router.instances:
                    gauge.add_metric(list(instance.labels.values()), value(instance))
                yield gauge

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(families))
        return generate_latest(registry)


def _counting(count_tokens):
    """How well, and how long, prompt tokens are counted; nothing for a way of counting that keeps no errors."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    if not hasattr(count_tokens, "errors"):
        return
    error = GaugeMetricFamily(
        "astrolabe_prompt_tokens_error", "Counted prompt tokens against the engines', as a share", labels=["by", "of"]
    )
    for by, found in count_tokens.errors().items():
        error.add_metric([by, "absolute"], found.absolute)
        error.add_metric([by, "signed"], found.signed)
    yield error
    seconds = getattr(count_tokens, "seconds", 0.0)
    yield CounterMetricFamily("astrolabe_prompt_tokens_seconds", "Spent in the tokenizer", value=seconds)


class _Collector:
    def __init__(self, families):
        self.collect = families
