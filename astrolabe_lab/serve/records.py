"""What a router writes down: one entry a decision, one when it ends, one for a request that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from astrolabe_lab.request import Request

from .counters import Counters
from .journal import Journal, Packed
from .ledger import InFlight
from .openai_api import Asked, Refusal
from .stream import Watcher

if TYPE_CHECKING:
    from .dispatch import Decision
    from .router import Router


@dataclass
class Records:
    """Counts everything, and journals it where there is a ``journal`` (``keep_prompts``: with the texts, so that a
    length model can be trained anew from it). A request has one end: what is told of it after that is left out."""

    now_s: Callable[[], float]
    policy_name: str
    journal: Journal | None = None
    keep_prompts: bool = False
    counters: Counters = field(default_factory=Counters)
    _ended: set[int] = field(default_factory=set, repr=False)  # of requests still under way: those with an outcome

    def begin(self, router: Router) -> None:
        """A router starts: what its decisions are made with, so that a replay can make them again."""
        if self.journal is None:
            return
        engines = []
        for each in router.instances:
            known = {"instance": each.index, "url": each.url, "engine": asdict(each.engine)}
            if each.predictor is not None:
                known |= {"cost": each.predictor.cost.to_dict(), "extension_tokens": each.predictor.extension_tokens}
            engines.append(known)
        self.journal.write(
            {
                "event": "router", "time_s": self.now_s(), "policy": self.policy_name, "seed": router.seed,
                "source": router.source, "time_scale": router.time_scale, "models": router.models, "engines": engines,
            }
        )  # fmt: skip

    def probe(self, request: Request, decision: Decision, model: str) -> None:
        """A request goes to all instances of the decision's view at once (``probes``)."""
        asked = Asked({}, "", model, True, prompt_ids=request.prompt_tokens)
        self.decision(asked, request, decision, 0, "ids", "probe", probe=True)

    def decision(
        self, asked: Asked, request: Request, decision: Decision, attempt: int, counted: str, tagged: str, **more
    ) -> None:
        """A choice has been made; where the two token counts came from."""
        self.counters.decided(decision.seconds, decision.view.late)
        if self.journal is None:
            return
        view = decision.view
        self.journal.write(
            {
                "event": "decision",
                "rid": request.rid,
                "client_rid": asked.client_rid,
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
                "prefix_blocks": request.prefix_blocks,
                "policy": self.policy_name,
                "signals": [dict(zip(view.signals.dtype.names, record.item(), strict=True)) for record in view.signals],
                "status_from": view.sources,
                "statuses": list(map(Packed, view.statuses, view.gauges)),
                "unseen": view.unseen,
                "predicted_e2e_s": {str(i): seconds for i, seconds in view.predicted_e2e_s.items()},
                "late": view.late,
                "instance": decision.instance.index,
                "decided_s": decision.decided_s,
                "decision_s": decision.seconds,
                **more,
            }
        )

    def outcome(
        self, request: Request, instance: int, watcher: Watcher, entry: InFlight, status: str, reason: str = ""
    ) -> None:
        """A dispatch has ended: ok, rejected, failed, aborted, or retried (another dispatch or a refusal follows)."""
        if not self._may_end(request.rid, status):
            return
        now_s, first = self.now_s(), entry.first_token_s
        ttft_s, e2e_s = None if first is None else first - request.arrived_s, now_s - request.arrived_s
        if status == "ok":
            prompt_tokens = watcher.prompt_tokens or request.prompt_tokens
            self.counters.answered(ttft_s, e2e_s, prompt_tokens, watcher.output_tokens)
        self._write(
            request.rid, now_s, request.arrived_s, status, reason, instance, dispatched_s=entry.sent_s,
            first_token_s=first, ttft_s=ttft_s, e2e_s=e2e_s, output_tokens=watcher.output_tokens,
            prompt_tokens=watcher.prompt_tokens, finish_reason=watcher.finish_reason,
        )  # fmt: skip

    def probed(self, request: Request, answers) -> None:
        """A probe has ended; ``answers``: of each instance ``ttft_s, e2e_s, status``."""
        for answer in answers if self.journal is not None else ():
            told = {"rid": request.rid, "time_s": self.now_s(), "instance": answer.instance, "status": answer.status}
            self.journal.write({"event": "probe", **told, "ttft_s": answer.ttft_s, "e2e_s": answer.e2e_s})

    def refusal(self, refusal: Refusal, rid: int, arrived_s: float) -> None:
        """The router answers by itself."""
        status = "rejected" if refusal.status < 500 else "failed"
        if self._may_end(rid, "refused"):
            reason = f"HTTP {refusal.status}: {refusal.message}"
            self._write(rid, self.now_s(), arrived_s, status, reason, None, output_tokens=0)

    def left(self, rid: int, arrived_s: float) -> None:
        """The client went away, perhaps before any dispatch."""
        if self._may_end(rid, "aborted"):
            self._write(rid, self.now_s(), arrived_s, "aborted", "the client went away", None, output_tokens=0)

    def forget(self, rid: int) -> None:
        """Nothing more will be told of the request."""
        self._ended.discard(rid)

    def _may_end(self, rid: int, status: str) -> bool:
        if rid in self._ended:
            return False
        if status != "retried":
            self._ended.add(rid)
        self.counters.ended(status)
        return True

    def _write(self, rid, time_s, arrived_s, status, reason, instance, **more) -> None:
        if self.journal is not None:
            told = {"rid": rid, "time_s": time_s, "arrived_s": arrived_s, "status": status, "reason": reason}
            self.journal.write({"event": "outcome", **told, "instance": instance, **more})
