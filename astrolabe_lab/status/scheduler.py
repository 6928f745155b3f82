"""vLLM's schedulers, publishing the engine's status at each step (``--scheduler-cls``).

    --scheduler-cls astrolabe_lab.status.scheduler.StatusScheduler        (synchronous scheduling)
    --scheduler-cls astrolabe_lab.status.scheduler.AsyncStatusScheduler   (asynchronous: the default on GPUs)
    --additional-config '{"astrolabe": {"status": "/path/of/status", "steps": "/path/of/steps", "time_scale": 1.0}}'

Scheduling is vLLM's own; a step costs one pass over its requests more. Times in the status are monotonic seconds
divided by the time scale. ``steps`` (may be absent) gets what every step was and how long it took; ``facts`` gets,
once, the flags that the engine runs with. A request's ``vllm_xargs`` may carry the router's ``rid`` and
``predicted_tokens``.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from astrolabe_lab.engines.emulation import KEY
from astrolabe_lab.engines.engine_facts import write_facts
from astrolabe_lab.engines.step_log import StepLog, counts_of
from astrolabe_lab.engines.told import told
from astrolabe_lab.sim.state import RUNNING, WAITING
from astrolabe_lab.sim.status import HEADER, NEXT, NOW, ROW

from .published import CAPACITY, StatusWriter


class Scheduled(NamedTuple):
    """A request's part in a batch in flight."""

    computed: int  # tokens computed before it
    tokens: int
    emits: bool


class _Publishing:
    """Mixed into a scheduler of vLLM."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        settings = (self.vllm_config.additional_config or {}).get(KEY, {})
        self._writer = StatusWriter(settings["status"])
        self._scale = float(settings.get("time_scale", 1.0))
        self._steps = StepLog(settings.get("steps"))
        self._in_flight: list[tuple[float, dict[str, Scheduled]]] = []
        self._priced: list[tuple[float, tuple]] = []  # of the batches in flight: when scheduled, what prices them
        self._header = np.zeros(1, HEADER)
        self._rows = np.zeros(CAPACITY, ROW)
        self._unnamed = 0
        self._publish(stalled=False)
        if "facts" in settings:
            write_facts(settings["facts"], self)

    def schedule(self, *args, **kwargs):
        output = super().schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens > 0:
            now = time.monotonic()
            batch = self._batch(output.num_scheduled_tokens)
            self._in_flight.append((now, batch))
            self._priced.append((now, counts_of(
                (self.requests[rid].num_prompt_tokens, part.computed, part.tokens) for rid, part in batch.items()
            )))  # fmt: skip
            self._publish(stalled=False)
        else:
            self._publish(stalled=bool(self._in_flight))
        return output

    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduler_output.total_num_scheduled_tokens > 0 and self._in_flight:
            self._in_flight.pop(0)
            began, counts = self._priced.pop(0)
            self._steps.step(
                began / self._scale, time.monotonic() / self._scale, counts, self.has_unfinished_requests()
            )  # fmt: skip
            if self._in_flight:  # the step behind starts as this one ends
                self._in_flight[0] = (time.monotonic(), self._in_flight[0][1])
        if not self.has_unfinished_requests():
            self._publish(stalled=False)
        return outputs

    def finish_requests(self, *args, **kwargs):
        result = super().finish_requests(*args, **kwargs)
        if not self._in_flight:
            self._publish(stalled=False)
        return result

    def _batch(self, scheduled: dict[str, int]) -> dict[str, Scheduled]:
        batch = {}
        for rid, tokens in scheduled.items():
            request = self.requests[rid]
            batch[rid] = Scheduled(request.num_computed_tokens - tokens, tokens, not request.is_prefill_chunk)
        return batch

    def _publish(self, stalled: bool) -> None:
        rows = self._rows
        blocks = self.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        n = 0
        seen: set[int] = set()
        for request in self.running:
            held = blocks.get(request.request_id, ())
            if n < len(rows):
                rows[n] = self._row(request, RUNNING, len(held), 0, self._shared(held, seen))
            n += 1
        for request in self.waiting:
            if n < len(rows):
                rows[n] = self._row(request, WAITING, 0, *self._cached(request))
            n += 1
        header = self._header
        header["taken_s"] = time.monotonic() / self._scale
        header["step_started_s"] = self._in_flight[0][0] / self._scale if self._in_flight else np.nan
        header["free_blocks"] = self.kv_cache_manager.block_pool.get_num_free_blocks()
        header["n_running"] = len(self.running)
        header["n_rows"] = n
        header["stalled"] = stalled
        self._writer.write(header, rows[:n])

    def _shared(self, blocks, seen: set[int]) -> int:
        """How many of a running request's blocks one before it holds too."""
        shared = 0
        if self.kv_cache_manager.enable_caching:
            for block in blocks:
                if block.ref_cnt > 1:
                    shared += block.block_id in seen
                    seen.add(block.block_id)
        return shared

    def _cached(self, request) -> tuple[int, int]:
        """(leading blocks of a waiting request in the cache, those of them that running ones hold)."""
        manager = self.kv_cache_manager
        if not manager.enable_caching or request.num_computed_tokens > 0:
            return 0, 0
        (found,), *_ = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        return len(found), sum(block.ref_cnt > 0 for block in found)

    def _row(self, request, state: int, blocks: int, cached: int, shared: int) -> tuple:
        rid = request.request_id
        named = getattr(request, "astrolabe", None)
        if named is None:
            number = told(request.sampling_params, "rid")
            if number is None:
                self._unnamed += 1
                number = -self._unnamed
            predicted = told(request.sampling_params, "predicted_tokens", ROW["predicted"].str) or 0
            named = request.astrolabe = (number, predicted)
        now = self._in_flight[0][1].get(rid) if self._in_flight else None
        behind = self._in_flight[1][1].get(rid) if len(self._in_flight) > 1 else None
        first = now or behind
        return (
            named[0],
            state,
            request.num_prompt_tokens,
            first.computed if first else request.num_computed_tokens,
            request.num_output_tokens,
            now.tokens if now else 0,
            behind.tokens if behind else 0,
            (NOW if now and now.emits else 0) | (NEXT if behind and behind.emits else 0),
            named[1],
            blocks,
            request.num_preemptions,
            cached,
            shared,
        )


class StatusScheduler(_Publishing, Scheduler):
    """vLLM's synchronous scheduler with a published status."""


class AsyncStatusScheduler(_Publishing, AsyncScheduler):
    """vLLM's asynchronous scheduler with a published status."""
