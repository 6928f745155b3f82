"""A vLLM executor that sleeps the modelled step instead of running a model.

Everything else of the engine is vLLM's own: API server, tokenizer, scheduler, KV cache manager, metrics. It needs a
folder with ``config.json`` and a tokenizer (``model_files.write``), no weights, and these flags (``launch`` sets them):

    --distributed-executor-backend astrolabe_lab.engines.emulate.EmulatedExecutor
    --additional-config '{"astrolabe": {"cost": {...}, "time_scale": 4.0}}'

A request's true length comes in its ``vllm_xargs`` as ``output_tokens``: the engine then emits end-of-sequence as that
token. Without it a request goes on until ``max_tokens``. Runs inside vLLM's engine process.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from .emulation import Disturbance, Emulation
from .pace import PaceWriter, step_end
from .told import told

WORDS = 200  # distinct tokens that emulated answers are made of


@dataclass(slots=True)
class Sequence:
    """A request as a model runner knows it."""

    prompt: int
    sampled: int
    length: int | None  # true output length, tokens; None: unknown, goes on until max_tokens


class EmulatedExecutor(Executor):
    """Prices every step that vLLM schedules and answers when that time has passed."""

    supports_pp = False

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def _init_executor(self) -> None:
        self.emulation = Emulation.of(self.vllm_config.additional_config)
        if self.emulation.async_scheduling:
            # The CPU platform turns it off for its own workers; this executor is what would wait for a GPU.
            self.vllm_config.scheduler_config.async_scheduling = True
        config = self.model_config.hf_config
        eos = getattr(config, "eos_token_id", None)
        self._eos = eos[0] if isinstance(eos, list) else eos
        self._words = range(config.vocab_size - WORDS, config.vocab_size) if config.vocab_size > 2 * WORDS else [1]
        self._sequences: dict[str, Sequence] = {}
        self._planned: tuple[ModelRunnerOutput, float, bool] | None = None
        self._last: set[str] = set()
        self._device = Device(self.emulation)
        self._device.start()

    # what vLLM asks before it serves

    def determine_available_memory(self) -> list[int]:
        return [1 << 40]  # --num-gpu-blocks-override says how many blocks there are

    def get_kv_cache_specs(self) -> list[dict[str, FullAttentionSpec]]:
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size, num_kv_heads=1, head_size=64, dtype=torch.float16
        )
        return [{"layer": spec}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["LBHNC"]]

    def set_kv_cache_layout(self, layout_name: str) -> None:
        pass

    def initialize_from_config(self, kv_cache_configs) -> None:
        pass

    def compile_or_warm_up_model(self) -> None:
        pass

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
        """Worker calls that have no meaning without a worker; answers None."""
        if not non_block:
            return [None]
        future: Future = Future()
        future.set_result([None])
        return future

    # a step

    def execute_model(self, scheduler_output, non_block: bool = False):
        for rid in scheduler_output.finished_req_ids:
            self._sequences.pop(rid, None)
        if scheduler_output.total_num_scheduled_tokens == 0:
            return _done(EMPTY_MODEL_RUNNER_OUTPUT) if non_block else EMPTY_MODEL_RUNNER_OUTPUT
        self._planned = self._plan(scheduler_output)
        return _done(None) if non_block else None

    def sample_tokens(self, grammar_output, non_block: bool = False):
        planned, self._planned = self._planned, None
        future = self._device.submit(*planned)
        return future if non_block else future.result()

    def _plan(self, scheduled) -> tuple[ModelRunnerOutput, float, bool]:
        """The step's output, its modelled seconds, and whether it continues the step before it."""
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduled.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            if new.req_id not in self._sequences:
                length = told(new.sampling_params, "output_tokens")
                self._sequences[new.req_id] = Sequence(len(new.prompt_token_ids or ()), 0, length)
        ids, tokens = [], []
        context = 0
        attention = 0.0
        mixed = False
        for rid, n in scheduled.num_scheduled_tokens.items():
            sequence = self._sequences[rid]
            done = computed[rid]
            known = sequence.prompt + sequence.sampled
            context += done
            if done < sequence.prompt or known - done > 1:
                mixed = True
                attention += n * float(done) + 0.5 * n * n
            ids.append(rid)
            tokens.append([self._next(sequence)] if done + n >= known else [])
        seconds = self.emulation.cost.step_seconds(
            scheduled.total_num_scheduled_tokens, len(ids), context, attention, mixed
        )
        continues, self._last = not self._last.isdisjoint(ids), set(ids)
        return ModelRunnerOutput(ids, {rid: j for j, rid in enumerate(ids)}, tokens), seconds, continues

    def _next(self, sequence: Sequence) -> int:
        sequence.sampled += 1
        if sequence.sampled == sequence.length and self._eos is not None:
            return self._eos
        return self._words[(sequence.prompt + sequence.sampled) % len(self._words)]

    # the rest of an executor

    def take_draft_token_ids(self):
        return None

    def reset_mm_cache(self) -> None:
        pass

    def reset_encoder_cache(self) -> None:
        pass

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        self._device.stop()


class Device(threading.Thread):
    """The emulated GPU: steps run one after another, each taking its modelled time on the wall clock."""

    def __init__(self, emulation: Emulation):
        super().__init__(name="emulated-device", daemon=True)
        self._scale = emulation.time_scale
        self._disturbance = Disturbance(emulation.control)
        self._random = random.Random(emulation.seed)
        self._steps: queue.SimpleQueue = queue.SimpleQueue()
        self._free_at = 0.0
        self._pace = PaceWriter(emulation.pace or None)

    def submit(self, output: ModelRunnerOutput, seconds: float, continues: bool) -> Future:
        future: Future = Future()
        self._steps.put((future, output, seconds, continues, time.monotonic()))
        return future

    def stop(self) -> None:
        self._steps.put(None)

    def run(self) -> None:
        while (step := self._steps.get()) is not None:
            future, output, seconds, continues, submitted = step
            disturbance = self._disturbance.now()
            while disturbance.stalled:
                time.sleep(0.005)
                submitted = self._free_at = time.monotonic()
                disturbance = self._disturbance.now()
            seconds *= disturbance.slowdown
            if disturbance.jitter:
                seconds *= max(0.0, self._random.gauss(1.0, disturbance.jitter))
            wall_s = seconds * self._scale
            end = step_end(self._free_at, submitted, wall_s, continues)
            slipped = end - wall_s - self._free_at if continues else 0.0
            self._free_at = end
            if (left := end - time.monotonic()) > 0:
                time.sleep(left)
            self._pace.step(wall_s, slipped + time.monotonic() - end)
            future.set_result(output)


def _done(value) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future
