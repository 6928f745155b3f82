"""vLLM's own scheduler as an oracle: the schedule that vLLM makes of a trace, on a CPU and without a model.

Nothing here knows how the compiled engine works, and the engine takes nothing from here, so their agreement
means something. Driven is the stock ``Scheduler`` (or ``AsyncScheduler``) with its own KV cache manager, by
the control flow of ``EngineCore.step`` and ``step_with_batch_queue`` (vllm/v1/engine/core.py, vLLM 0.32).
Only the model is made up: a step takes ``StepCost.step_seconds`` and samples a token for each request whose
known tokens are all computed by its end.
"""

from collections import deque
from dataclasses import dataclass, field
from time import perf_counter

from astrolabe_lab.errors import InputError
from astrolabe_lab.trace import prefix_block_tokens
from astrolabe_lab.vllm_scheduler import block_hasher, own_token, request, scheduler


def can_never_run(frame, config):
    """Return a boolean array: true for rows over ``max_model_len`` or over ``num_gpu_blocks`` - 1 blocks.

    One block is vLLM's null block; the last output token is never written to the cache, hence the other - 1.
    """
    prompt, output = frame["prompt_tokens"].to_numpy(), frame["output_tokens"].to_numpy()
    blocks = -(-(prompt + output - 1) // config.block_size)
    return (prompt + output > config.max_model_len) | (blocks > config.num_gpu_blocks - 1)


def run_vllm(frame, config, cost, max_steps=None):
    """Return (result frame, step log) of one vLLM engine serving ``frame``.

    ``frame`` has rid, arrived_s, prompt_tokens, output_tokens and, for prefix caching, may have prefix_blocks with
    the attribute prefix_block_tokens (see ``trace``); ``config`` has the attributes of
    ``EngineConfig``; ``cost`` is a ``StepCost``. The result frame, in the order of ``frame``: rid,
    first_token_s, finished_s, generated_tokens, preemptions. The step log has one row per scheduled
    request, in scheduling order: step, start_s, end_s, rid, tokens. Its ``attrs`` hold ``preemptions``
    (step, rid), in order, and ``steps`` (step, start_s, end_s, free_blocks, running, waiting), the last
    three as schedule() left them.

    Steps without tokens are not counted; a preemption made by such a schedule() carries the number of the
    next step that has some. With ``async_scheduling`` the scheduler runs one step ahead of the device, and
    start_s is when the device begins. Left out is the millisecond a real engine sleeps after an empty
    schedule(). ``max_steps`` stops early: what had not happened by then is NaN.

    Raises InputError for requests that can never run (vLLM would spin on them) and for settings that vLLM
    refuses.
    """
    run = _Run(frame, config, cost)
    run.until_idle(max_steps)
    return run.result_frame(), run.step_log()


def steps_per_second(frame, config, cost, max_steps=None):
    """Return how many steps a second vLLM's scheduler makes on this load, counting its own two calls only."""
    if frame.empty:
        raise InputError("steps_per_second needs at least one request")
    run = _Run(frame, config, cost)
    run.until_idle(max_steps)
    return len(run.steps) / run.scheduler_wall_s


@dataclass(slots=True)
class _Batch:
    output: object  # vLLM's SchedulerOutput
    samples: dict  # rid -> whether this step samples a token for it
    end_s: float


@dataclass(slots=True)
class _Outcome:
    first_token_s: float = float("nan")
    finished_s: float = float("nan")
    generated_tokens: int = 0
    preemptions: int = 0


@dataclass
class _Run:
    frame: object
    config: object
    cost: object
    rows: list = field(default_factory=list)
    steps: list = field(default_factory=list)
    preemptions: list = field(default_factory=list)
    device_free_s: float = 0.0
    scheduler_wall_s: float = 0.0

    def __post_init__(self):
        if (never := can_never_run(self.frame, self.config)).any():
            rids = self.frame["rid"].to_numpy()[never]
            raise InputError(
                f"{len(rids)} requests can never run (first: rid {rids[0]}): prompt + output must be at most "
                f"max_model_len={self.config.max_model_len} and fit in num_gpu_blocks - 1 = "
                f"{self.config.num_gpu_blocks - 1} blocks of {self.config.block_size} tokens; "
                "drop the rows where oracle.can_never_run(frame, config) is true"
            )
        self.outcomes = {str(rid): _Outcome() for rid in self.frame["rid"]}
        if len(self.outcomes) < len(self.frame):
            raise InputError("rid must be unique: number the requests 0..n-1")
        self.scheduler = scheduler(self.config)
        self.hasher = block_hasher(self.config)
        self.prefix_block_tokens = prefix_block_tokens(self.frame) or 512  # Mooncake's
        self._record_preemptions()

    def _record_preemptions(self):
        preempt = self.scheduler._preempt_request

        def recorded(request, *args, **kwargs):
            self.preemptions.append((len(self.steps), int(request.request_id)))
            self.outcomes[request.request_id].preemptions += 1
            return preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = recorded

    def until_idle(self, max_steps=None):
        """Run EngineCore's loop: a queue one batch deep is ``step``, two deep ``step_with_batch_queue``."""
        depth = 2 if self.config.async_scheduling else 1
        arrivals = deque(self.frame.sort_values("arrived_s", kind="stable").itertuples(index=False))
        in_flight, now = deque(), 0.0
        while max_steps is None or len(self.steps) < max_steps:
            while arrivals and arrivals[0].arrived_s <= now:
                row = arrivals.popleft()
                self.scheduler.add_request(request(row, self.prefix_block_tokens, self.hasher))
            if not self.scheduler.has_requests() and not in_flight:
                if not arrivals:
                    return
                now = float(arrivals[0].arrived_s)
                continue
            if self.scheduler.has_requests():
                in_flight.append(self._schedule(now))
                scheduled = in_flight[-1].output.total_num_scheduled_tokens > 0
                if len(in_flight) < depth and (scheduled or self.scheduler.has_requests()):
                    continue
                self._refuse_to_spin(in_flight)
            batch = in_flight.popleft()
            now = max(now, batch.end_s)
            self._update(batch, now)

    def _schedule(self, now):
        preempted_before, began = len(self.preemptions), perf_counter()
        output = self.scheduler.schedule()
        self.scheduler_wall_s += perf_counter() - began
        self.idle_schedule = not output.num_scheduled_tokens and len(self.preemptions) == preempted_before
        start_s = max(now, self.device_free_s)
        if not output.num_scheduled_tokens:
            return _Batch(output, {}, start_s)
        samples, mixed, context_tokens, attention = {}, False, 0, 0.0
        for rid, tokens in output.num_scheduled_tokens.items():
            served = self.scheduler.requests[rid]
            before = served.num_computed_tokens - tokens  # schedule() has already counted this step's tokens
            samples[rid] = not served.is_prefill_chunk
            context_tokens += before
            decodes = tokens == 1 and samples[rid] and before >= served.num_prompt_tokens
            if not decodes:
                mixed = True
                attention += tokens * before + tokens * tokens / 2
        seconds = self.cost.step_seconds(
            output.total_num_scheduled_tokens, len(samples), context_tokens, attention, mixed
        )
        self.device_free_s = end_s = start_s + seconds
        step = len(self.steps)
        for rid, tokens in output.num_scheduled_tokens.items():
            self.rows.append((step, start_s, end_s, int(rid), tokens))
        free_blocks = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        self.steps.append((step, start_s, end_s, free_blocks, *self.scheduler.get_request_counts()))
        return _Batch(output, samples, end_s)

    def _refuse_to_spin(self, in_flight):
        """Raise if the last schedule() changed nothing and nothing in flight can change the next one."""
        executing = any(batch.samples for batch in in_flight)
        if self.idle_schedule and not executing and self.scheduler.has_unfinished_requests():
            running, waiting = self.scheduler.get_request_counts()
            raise RuntimeError(
                f"vLLM's scheduler makes no progress after {len(self.steps)} steps: {running} running, "
                f"{waiting} waiting, nothing scheduled, nothing in flight; raise num_gpu_blocks"
            )

    def _update(self, batch, now):
        from vllm.v1.outputs import ModelRunnerOutput

        model_output = ModelRunnerOutput(
            req_ids=list(batch.samples),
            req_id_to_index={rid: i for i, rid in enumerate(batch.samples)},
            sampled_token_ids=[[own_token(rid)] if sampled else [] for rid, sampled in batch.samples.items()],
        )
        began = perf_counter()
        replies = self.scheduler.update_from_output(batch.output, model_output)
        self.scheduler_wall_s += perf_counter() - began
        for reply in (reply for client in replies.values() for reply in client.outputs):
            outcome = self.outcomes[reply.request_id]
            if outcome.generated_tokens == 0:
                outcome.first_token_s = now
            outcome.generated_tokens += len(reply.new_token_ids)
            if reply.finish_reason is not None:
                outcome.finished_s = now

    def result_frame(self):
        import pandas as pd

        columns = ("first_token_s", "finished_s", "generated_tokens", "preemptions")
        values = {name: [getattr(o, name) for o in self.outcomes.values()] for name in columns}
        return pd.DataFrame({"rid": self.frame["rid"].to_numpy(), **values})

    def step_log(self):
        import pandas as pd

        log = pd.DataFrame(self.rows, columns=["step", "start_s", "end_s", "rid", "tokens"])
        log.attrs["preemptions"] = pd.DataFrame(self.preemptions, columns=["step", "rid"], dtype="int64")
        log.attrs["steps"] = pd.DataFrame(
            self.steps, columns=["step", "start_s", "end_s", "free_blocks", "running", "waiting"]
        )
        return log
