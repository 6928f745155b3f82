"""What bounds a router."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Times in modelled s, sizes in bytes; ``in_flight``: requests in all; ``tries``: engines, or pairs of them, that
    are chosen for one request, whichever step of a pair failed; ``failures``: those of them in which an engine had the
    request and failed, for it may be the request that ends engines."""

    in_flight: int = 4096
    body_bytes: int = 8 << 20
    answer_bytes: int = 64 << 20  # of one that is not streamed; an engine that sends more is at fault
    line_bytes: int = 4 << 20  # of one that is: a first event may echo the prompt
    prefill_bytes: int = 16 << 20
    head_s: float = 30.0  # from a connection to the end of its first request's head
    body_s: float = 30.0
    connect_s: float = 3.0
    first_byte_s: float = 300.0  # of an answer that is streamed
    between_bytes_s: float = 300.0
    whole_answer_s: float = 3600.0  # of one that is not; an engine that takes longer is not to blame
    write_s: float = 60.0  # for a client to take what it was sent
    tries: int = 3
    failures: int = 2
    probe_s: float = 2.0
    scrape_s: float = 0.5  # engines that publish no status
    drain_s: float = 30.0

    def spent(self, tried: dict) -> bool:
        """Whether a request is tried no more after these ``Unanswered``, by engine."""
        return len(tried) >= self.tries or sum(each.reached for each in tried.values()) >= self.failures
