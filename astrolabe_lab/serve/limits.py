"""What bounds a router."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Times in modelled s, sizes in bytes; ``in_flight``: requests in all; ``tries``: dispatches of one request."""

    in_flight: int = 4096
    body_bytes: int = 8 << 20
    body_s: float = 30.0
    connect_s: float = 3.0
    first_byte_s: float = 300.0
    between_bytes_s: float = 300.0
    tries: int = 3
    probe_s: float = 2.0
    drain_s: float = 30.0
