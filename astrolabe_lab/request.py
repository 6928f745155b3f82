"""The request as a router sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """What a router may know at admission. The true output length is absent on purpose.

    ``predicted_tokens`` is 0 when no length was attached at arrival (see ``astrolabe_lab.length.attach``);
    policies that price a request refuse such a request.
    """

    rid: int
    arrived_s: float
    prompt_tokens: int
    predicted_tokens: int = 0
    slo: str = "loose"
    prefix_blocks: tuple[int, ...] = ()
