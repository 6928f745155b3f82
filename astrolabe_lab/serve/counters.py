"""What a router counts, and its Prometheus exposition."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

DECISION_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


@dataclass
class Counters:
    """Since the router's start."""

    decisions: int = 0
    decision_s: float = 0.0
    late_predictions: int = 0
    retries: int = 0
    throttled: int = 0
    upstream_errors: int = 0
    outcomes: Counter = field(default_factory=Counter)
    lengths: Counter = field(default_factory=Counter)  # where predicted lengths came from
    buckets: list[int] = field(default_factory=lambda: [0] * len(DECISION_BUCKETS_S))

    def decided(self, seconds: float, late: int) -> None:
        self.decisions += 1
        self.decision_s += seconds
        self.late_predictions += late
        for j, edge in enumerate(DECISION_BUCKETS_S):
            if seconds <= edge:
                self.buckets[j] += 1

    def ended(self, status: str) -> None:
        self.outcomes[status] += 1

    def more(self, router):
        """Families beside these, of a router of another kind."""
        return ()

    def exposition(self, router) -> bytes:
        """The counters and the instances' state as Prometheus text."""
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        def families():
            outcomes = CounterMetricFamily("astrolabe_requests", "Requests by outcome", labels=["status"])
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
            ):
                yield CounterMetricFamily(f"astrolabe_{name}", text, value=value)
            if router.journal is not None:
                yield CounterMetricFamily("astrolabe_journal_lost", "Journal lines lost", value=router.journal.lost)
            yield from _counting(router.count_tokens)
            if router.drift is not None:
                yield from router.drift.families()
            yield from self.more(router)
            yield router.lag.family()
            decisions = HistogramMetricFamily("astrolabe_decision_seconds", "Time to choose an instance")
            edges = [(str(e), n) for e, n in zip(DECISION_BUCKETS_S, self.buckets, strict=True)]
            decisions.add_metric([], [*edges, ("+Inf", self.decisions)], self.decision_s)
            yield decisions
            now_s = router.now_s()
            for name, text, value in (
                ("in_flight", "Requests of this router at the instance", lambda i: len(i.ledger)),
                ("available", "Whether the instance gets requests", lambda i: int(i.available(now_s))),
                ("status_faults", "Failed reads of the published status", lambda i: i.status_faults),
                ("gauge_faults", "Failed reads of the engine's metrics", lambda i: i.gauge_faults),
                ("restarts", "Restarts of the engine seen", lambda i: i.restarts),
            ):
                gauge = GaugeMetricFamily(f"astrolabe_instance_{name}", text, labels=["instance"])
                for instance in router.instances:
                    gauge.add_metric([str(instance.index)], value(instance))
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
