"""What a router of pools writes down, and a frame of it: one row a request, both steps in it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from astrolabe_lab.request import Request
from astrolabe_lab.serve.counters import Counters
from astrolabe_lab.serve.openai_api import Asked
from astrolabe_lab.serve.records import Records

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class PoolCounters(Counters):
    """Beside those of a router. ``recomputed``: prompts that a decode engine was asked to compute itself; ``released``:
    kept blocks that nobody wanted, given back; ``left_to_expire``: those of which prefill could not be told."""

    recomputed: int = 0
    released: int = 0
    left_to_expire: int = 0
    blocks_handed: int = 0

    def more(self, router):
        """What only a router of pools counts."""
        from prometheus_client.core import CounterMetricFamily

        for name, text in (
            ("recomputed", "Prompts that a decode engine was asked to compute itself"),
            ("released", "Prompts whose blocks nobody wanted and that were given back"),
            ("left_to_expire", "Prompts whose blocks nobody wanted and that could not be given back"),
            ("blocks_handed", "KV blocks that prefill engines kept for decode engines"),
        ):
            yield CounterMetricFamily(f"astrolabe_{name}", text, value=getattr(self, name))
        failed = CounterMetricFamily(
            "astrolabe_failed_transfers", "KV transfers that failed, as the engine counts them",
            labels=list(router.instances[0].labels),
        )  # fmt: skip
        for at, count in router.occupancy.failed.items():
            failed.add_metric(list(router.instances[at].labels.values()), count)
        yield failed


@dataclass
class PoolRecords(Records):
    """One ``pair`` entry a choice, ``prefilled`` when a first step ends, ``outcome`` when the request does."""

    counters: PoolCounters = field(default_factory=PoolCounters)
    n_prefill: int = 1

    def begin_pools(self, router) -> None:
        """A router of pools starts: which engines are in which, and what it prices with."""
        if self.journal is None:
            return
        self.journal.write(
            {
                "event": "pools", "time_s": self.now_s(), "policy": self.policy_name, "seed": router.seed,
                "source": router.source, "time_scale": router.time_scale, "poll_s": router.poll_s,
                "models": router.models,
                "prefill": [i.url for i in router.prefill_pool], "decode": [i.url for i in router.decode_pool],
                "engine": asdict(router.instances[0].engine), "constants": router.constants.to_dict(),
            }
        )  # fmt: skip

    def pair(self, asked: Asked, request: Request, pair, attempt: int, counted: str, tagged: str) -> None:
        """A choice has been made."""
        self.counters.decided(pair.seconds, 0)
        if self.journal is None:
            return
        view = pair.seen
        self.journal.write(
            {
                "event": "pair", "rid": request.rid, "client_rid": asked.client_rid, "time_s": view.now_s,
                "arrived_s": request.arrived_s, "attempt": attempt, "model": asked.model,
                **({"prompt": asked.text} if self.keep_prompts else {}),
                "prompt_tokens": request.prompt_tokens, "prompt_tokens_from": counted,
                "predicted_tokens": request.predicted_tokens, "predicted_tokens_from": tagged, "slo": request.slo,
                "policy": self.policy_name, "prefill": _plain(view.prefill), "decode": _plain(view.decode),
                "in_flight": _plain(view.in_flight),
                "prefill_instance": pair.prefill.index if pair.prefill else -1,
                "decode_instance": pair.decode.index - self.n_prefill, "decided_s": pair.decided_s,
                "decision_s": pair.seconds,
            }
        )  # fmt: skip

    def prefilled(self, request: Request, instance: int, sent_s: float, status: str, reason: str, blocks: int) -> None:
        """The first step has ended: ok, failed (another follows), rejected or aborted."""
        self.counters.blocks_handed += blocks
        if self.journal is not None:
            self.journal.write(
                {
                    "event": "prefilled", "rid": request.rid, "time_s": self.now_s(), "prefill_instance": instance,
                    "sent_s": sent_s, "status": status, "reason": reason, "blocks": blocks,
                }
            )  # fmt: skip

    def refused_by(self, request: Request, instance: int, reason: str) -> None:
        """An engine refuses the request in the first step."""
        if self._may_end(request.rid, "rejected"):
            self._write(request.rid, self.now_s(), request.arrived_s, "rejected", reason, instance, output_tokens=0)


def rows(path: str | Path) -> pd.DataFrame:
    """One row a request of a router's journal, in the order they arrived.

    rid, arrived_s, prompt_tokens, predicted_tokens, slo, prefill_instance, decode_instance, prefill_finished_s,
    transfer_started_s (the decode engine was asked), first_token_s, finished_s, ttft_s, e2e_s, generated_tokens,
    blocks, attempts, decision_s, status, reason, policy, client_rid (its X-Request-Id, if it had one); modelled
    seconds. prefill_instance is -1 where the decode engine computed the prompt itself. Raises InputError for a damaged
    journal.
    """
    import pandas as pd

    from astrolabe_lab.errors import InputError
    from astrolabe_lab.serve.journal import numbered

    found: dict[int, dict] = {}
    for line, entry in numbered(path):
        try:
            _into(found, entry)
        except (KeyError, TypeError) as error:
            raise InputError(
                f"journal {str(path)!r}, line {line}: its {entry['event']} is damaged ({error!r})"
            ) from None
    frame = pd.DataFrame(list(found.values()))
    return frame.sort_values("arrived_s", ignore_index=True) if len(frame) else frame


def _into(found: dict[int, dict], entry: dict) -> None:
    """What the entry tells of a request goes into its row."""
    if (rid := entry.get("rid")) is None:
        return
    row = found.setdefault(rid, {"rid": rid, "attempts": 0, "status": "unfinished"})
    if entry["event"] == "pair":
        row["attempts"] += 1
        for name in (
            "arrived_s", "prompt_tokens", "predicted_tokens", "slo", "prefill_instance", "decode_instance",
            "decision_s", "policy",
        ):  # fmt: skip
            row[name] = entry[name]
        row["client_rid"] = entry.get("client_rid")
    elif entry["event"] == "prefilled" and entry["status"] == "ok":
        row["prefill_finished_s"], row["blocks"] = entry["time_s"], entry["blocks"]
    elif entry["event"] == "outcome":
        row.setdefault("arrived_s", entry["arrived_s"])
        if entry["status"] == "retried":
            return
        row |= {
            "status": entry["status"], "reason": entry["reason"], "finished_s": entry["time_s"],
            "transfer_started_s": row.get("prefill_finished_s"), "first_token_s": entry.get("first_token_s"),
            "ttft_s": entry.get("ttft_s"), "e2e_s": entry.get("e2e_s"),
            "generated_tokens": entry.get("output_tokens", 0),
        }  # fmt: skip


def _plain(rows: np.ndarray) -> list[dict]:
    """Records as JSON has them: NaN and infinities are null."""
    return [
        {
            name: (None if isinstance(value, float) and not np.isfinite(value) else value)
            for name, value in zip(rows.dtype.names, row.item(), strict=True)
        }
        for row in rows
    ]
