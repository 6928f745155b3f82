"""What a router writes down: one entry a decision, one when it ends, one for a request that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from astrolabe_lab.request import Request
from astrolabe_lab.serve.counters import Counters
from astrolabe_lab.serve.journal import Journal
from astrolabe_lab.serve.ledger import InFlight
from astrolabe_lab.serve.openai_api import Asked, Refusal
from astrolabe_lab.serve.stream import Watcher


@dataclass
class Records:
    """Counts everything, and journals it where there is a ``journal`` (``keep_prompts``: with the texts, so that a
    length model can be trained anew from it)."""

    now_s: Callable[[], float]
    policy_name: str
    journal: Journal | None = None
    keep_prompts: bool = False
    counters: Counters = field(default_factory=Counters)

    def decision(self, asked: Asked, request: Request, decision, attempt: int, counted: str, tagged: str) -> None:
        """A choice has been made (a ``dispatch.Decision``); where the two token counts came from."""
        self.counters.decided(decision.seconds, decision.view.late)
        if self.journal is None:
            return
        view = decision.view
        self.journal.write(
            {
                "event": "decision",
                "rid": request.rid,
                "time_s": view.now_s,
                "arrived_s": request.arrived_s,
                "attempt": attempt,
                "model": asked.model,
                **({"prompt": asked.text} if self.keep_prompts else {}),
                "prompt_tokens": request.prompt_tokens,
                "prompt_tokens_from": counted,
                "predicted_tokens": request.predicted_tokens,
                "predicted_tokens_from": tagged,
                "slo": request.slo,
                "policy": self.policy_name,
                "signals": [dict(zip(view.signals.dtype.names, record.item(), strict=True)) for record in view.signals],
                "status_from": view.sources,
                "predicted_e2e_s": {str(i): seconds for i, seconds in view.predicted_e2e_s.items()},
                "late": view.late,
                "instance": decision.instance.index,
                "decision_s": decision.seconds,
            }
        )

    def outcome(
        self, request: Request, instance: int, watcher: Watcher, entry: InFlight, status: str, reason: str = ""
    ) -> None:
        """A dispatch has ended: ok, rejected, failed, aborted, or retried (another dispatch follows)."""
        now_s = self.now_s()
        self.counters.ended(status)
        if self.journal is not None:
            first = entry.first_token_s
            self.journal.write(
                {
                    "event": "outcome",
                    "rid": request.rid,
                    "time_s": now_s,
                    "arrived_s": request.arrived_s,
                    "instance": instance,
                    "dispatched_s": entry.sent_s,
                    "status": status,
                    "reason": reason,
                    "first_token_s": first,
                    "ttft_s": None if first is None else first - request.arrived_s,
                    "e2e_s": now_s - request.arrived_s,
                    "output_tokens": watcher.counted or watcher.tokens,
                    "prompt_tokens": watcher.prompt_tokens,
                    "finish_reason": watcher.finish_reason,
                }
            )

    def refusal(self, refusal: Refusal, rid: int, arrived_s: float) -> None:
        """The router answers by itself."""
        self.counters.ended("refused")
        if self.journal is not None:
            self.journal.write(
                {
                    "event": "outcome", "rid": rid, "time_s": self.now_s(), "arrived_s": arrived_s,
                    "status": "rejected" if refusal.status < 500 else "failed", "instance": None,
                    "reason": f"HTTP {refusal.status}: {refusal.message}", "output_tokens": 0,
                }
            )  # fmt: skip
