"""vLLM 0.7's two schedulers, step by step against a plain-Python engine written from their rules.

The rules. Both: requests come and go in the order of their arrival; a prompt's blocks (for all that a request holds
by then) are taken at once when it is admitted, and only while 1 % of all blocks (the watermark) stays free beside
them; there is no null block; a running request needs a free block, also where its tokens fit into its last one, but
for an unfinished prompt that fills its blocks; where there is none, the last of the running queue loses its blocks and
starts anew; such victims go back to the head of the waiting queue, in their order, when the step has been planned.
(vLLM asks this through ``BlockTable.get_num_blocks_touched_by_append_slots``, of prompts too. One thing is simplified:
where a request that starts anew has one token of its own output left to compute, that is a decode.)

``v0_chunked``: decodes, then the prompt left unfinished, then new ones, up to the token budget; admission goes on
after a preemption. ``v0_prefill_first``: whole new prompts up to the budget; the running decode only when there is
none.
"""

from collections import deque
from dataclasses import dataclass
from math import ceil

import pytest
from workloads import CONSTANT, frame, random_workload

from astrolabe_lab.sim.engine import EngineConfig, run_one

WORKLOADS = 70
V0 = ("v0_chunked", "v0_prefill_first")


@dataclass(eq=False)
class Sequence:
    rid: int
    arrived_s: float
    prompt: int
    output: int
    tokens: int  # held: the prompt and what was generated
    computed: int = 0
    blocks: int = 0
    prefilling: bool = True  # until all that it held at admission is computed
    preemptions: int = 0
    first_token_s: float | None = None
    finished_s: float | None = None


class V0Engine:
    """The rules above, one request and one step at a time."""

    def __init__(self, trace, config, cost):
        self.config, self.cost = config, cost
        columns = trace[["rid", "arrived_s", "prompt_tokens", "output_tokens"]].itertuples(index=False)
        self.sequences = [Sequence(r, a, p, o, tokens=p) for r, a, p, o in columns]
        self.coming, self.waiting, self.running = deque(self.sequences), deque(), []
        self.free = config.num_gpu_blocks
        self.reserve = int(config.watermark * config.num_gpu_blocks)
        self.steps = []  # (start_s, end_s, [(rid, tokens), ...], [victims], free blocks, running, waiting)

    def serve(self):
        now_s = 0.0
        while self.coming or self.waiting or self.running:
            if not self.waiting and not self.running:
                now_s = max(now_s, self.coming[0].arrived_s)
            while self.coming and self.coming[0].arrived_s <= now_s:
                self.waiting.append(self.coming.popleft())
            now_s = self.step(now_s)
        return self

    def step(self, start_s):
        victims = []
        if self.config.scheduler == "v0_prefill_first":
            batch = self.admit(self.config.max_num_batched_tokens)
            if not batch:
                batch = [(s, 1) for s in self.running_with_a_block(victims)]
        else:
            batch, budget = [], self.config.max_num_batched_tokens
            prefilling = [s for s in self.running if s.prefilling]
            assert len(prefilling) <= 1 and self.running[-1:] == prefilling or not prefilling
            for s in self.running_with_a_block(victims):
                tokens = min(s.tokens - s.computed, budget)
                if tokens:
                    batch.append((s, tokens))
                    budget -= tokens
            batch += self.admit(budget)
        self.waiting.extendleft(victims)
        end_s = start_s + self.seconds(batch)
        self.steps.append(
            (start_s, end_s, [(s.rid, n) for s, n in batch], [s.rid for s in victims])
            + (self.free, len(self.running), len(self.waiting))
        )
        for s, tokens in batch:
            s.computed += tokens
            if s.computed == s.tokens:
                self.emit(s, end_s)
        return end_s

    def running_with_a_block(self, victims):
        """The running sequences in order, each when it is sure of its block; victims are taken from the tail."""
        served = 0
        while served < len(self.running):
            s = self.running[served]
            if s.tokens % self.config.block_size or self.decodes(s):
                while self.free == 0:
                    victim = self.running.pop()
                    self.free += victim.blocks
                    victim.blocks = victim.computed = 0
                    victim.prefilling = True
                    victim.preemptions += 1
                    victims.append(victim)
                    if victim is s:
                        return
                if s.tokens > s.blocks * self.config.block_size:
                    s.blocks += 1
                    self.free -= 1
            served += 1
            yield s

    def decodes(self, s):
        return s.computed >= s.prompt and s.computed + 1 == s.tokens

    def admit(self, budget):
        batch = []
        while self.waiting and budget and len(self.running) < self.config.max_num_seqs:
            s = self.waiting[0]
            blocks = ceil(s.tokens / self.config.block_size)
            if self.free - blocks < self.reserve:
                break
            if not self.config.enable_chunked_prefill and s.tokens > budget:
                break
            tokens = min(s.tokens, budget)
            budget -= tokens
            s.blocks = blocks
            self.free -= blocks
            self.running.append(self.waiting.popleft())
            batch.append((s, tokens))
        return batch

    def seconds(self, batch):
        context = sum(s.computed for s, _ in batch)
        chunks = [(s, tokens) for s, tokens in batch if not self.decodes(s)]
        attention = sum(tokens * s.computed + 0.5 * tokens**2 for s, tokens in chunks)
        return self.cost.step_seconds(sum(n for _, n in batch), len(batch), context, attention, mixed=bool(chunks))

    def emit(self, s, now_s):
        s.prefilling = False
        s.tokens += 1
        if s.tokens - s.prompt == 1:
            s.first_token_s = now_s
        if s.tokens - s.prompt == s.output:
            s.finished_s = now_s
            self.running.remove(s)
            self.free += s.blocks


def steps_of(log):
    """The engine's log in the form of V0Engine.steps."""
    shown = log.attrs["steps"]
    steps = [(row.start_s, row.end_s, [], [], row.free_blocks, row.running, row.waiting) for row in shown.itertuples()]
    for step, rid, tokens in log[["step", "rid", "tokens"]].to_numpy().tolist():
        steps[int(step)][2].append((int(rid), int(tokens)))
    for step, rid in log.attrs["preemptions"].to_numpy().tolist():
        steps[step][3].append(rid)
    return steps


@pytest.mark.parametrize("scheduler", V0)
def test_every_step_is_that_of_the_rules(scheduler):
    pressed = 0
    for seed in range(WORKLOADS):
        trace, config, cost = random_workload(1000 + seed, scheduler)
        results, log = run_one(trace, config, cost)
        rules = V0Engine(trace, config, cost).serve()
        for number, (ours, theirs) in enumerate(zip(steps_of(log), rules.steps, strict=False)):
            assert ours == theirs, (seed, number, config)
        assert int(log["step"].iloc[-1]) + 1 == len(rules.steps), seed
        for name in ("first_token_s", "finished_s", "preemptions"):
            assert results[name].tolist() == [getattr(s, name) for s in rules.sequences], (seed, name)
        pressed += results["preemptions"].sum() > 0
    assert pressed > WORKLOADS // 2  # most of the workloads run short of memory


def served(trace, **flags):
    _, log = run_one(trace, EngineConfig(**{"watermark": 0.0, "max_model_len": 64} | flags), CONSTANT)
    return steps_of(log)


def test_v0_chunked_decodes_first_then_goes_on_with_the_prompt_then_admits():
    trace = frame([0, 0, 1, 3], [2, 20, 6, 6], [9, 2, 2, 2])
    steps = served(trace, scheduler="v0_chunked", max_num_batched_tokens=10, max_num_seqs=10)
    assert [step[2] for step in steps[:4]] == [
        [(0, 2), (1, 8)],
        [(0, 1), (1, 9)],
        [(0, 1), (1, 3), (2, 6)],
        [(0, 1), (1, 1), (2, 1), (3, 6)],
    ]


def test_v0_chunked_takes_a_prompts_blocks_at_admission():
    trace = frame([0.0], 40, 2)
    flags = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "block_size": 4, "num_gpu_blocks": 20}
    assert [step[4] for step in served(trace, scheduler="v0_chunked", **flags)] == [10] * 5 + [9]
    assert [step[4] for step in served(trace, scheduler="v1", **flags)] == [
        17,
        15,
        13,
        11,
        9,
        8,
    ]  # one is the null block


@pytest.mark.parametrize("scheduler", V0)
def test_v0_keeps_the_watermark_free_at_admission_even_of_an_empty_engine(scheduler):
    flags = {
        "scheduler": scheduler,
        "max_num_batched_tokens": 64,
        "block_size": 1,
        "num_gpu_blocks": 40,
        "watermark": 0.25,
    }
    assert EngineConfig(**flags, max_num_seqs=8, max_model_len=64).watermark_blocks == 10
    together = served(frame([0, 0], [20, 10], 1), max_num_seqs=8, **flags)
    assert [step[2] for step in together] == [[(0, 20), (1, 10)]]
    apart = served(frame([0, 0], [20, 11], 1), max_num_seqs=8, **flags)
    assert [step[2] for step in apart] == [[(0, 20)], [(1, 11)]]
    results, _ = run_one(frame([0, 0], [30, 31], 1), EngineConfig(**flags, max_num_seqs=8, max_model_len=64), CONSTANT)
    assert results["status"].tolist() == ["ok", "rejected"]


@pytest.mark.parametrize("scheduler", V0)
def test_v0_has_a_watermark_of_one_percent_and_no_null_block(scheduler):
    config = EngineConfig(scheduler=scheduler, num_gpu_blocks=1056, max_num_batched_tokens=4096)
    assert (config.watermark, config.watermark_blocks, config.usable_blocks) == (0.01, 10, 1056)
    assert EngineConfig(num_gpu_blocks=1056).usable_blocks == 1055


@pytest.mark.parametrize("scheduler", V0)
def test_a_v0_decode_asks_for_a_free_block_even_where_its_token_fits(scheduler):
    # 4 + 4 blocks of 4 tokens hold both prompts of 14 and two more tokens each, but no block is left over
    flags = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "block_size": 4}
    trace = frame([0, 0], 14, 2)
    tight = served(trace, scheduler=scheduler, num_gpu_blocks=8, **flags)
    assert tight[1][2:4] == ([(0, 1)], [1])
    roomy = served(trace, scheduler=scheduler, num_gpu_blocks=9, **flags)
    assert roomy[1][2:4] == ([(0, 1), (1, 1)], [])
    v1 = served(trace, scheduler="v1", num_gpu_blocks=9, **flags)  # of them one is the null block
    assert v1[1][2:4] == ([(0, 1), (1, 1)], [])


def test_an_unfinished_v0_prompt_asks_for_a_free_block_unless_it_fills_its_own():
    # 6 blocks of 4 tokens: 0 takes one, its first decode another; the rest is the second prompt's
    flags = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "block_size": 4, "num_gpu_blocks": 6}
    filling = served(frame([0, 0], [4, 16], 2), scheduler="v0_chunked", **flags)
    assert [step[2:4] for step in filling[:2]] == [([(0, 4), (1, 4)], []), ([(0, 1), (1, 7)], [])]
    not_filling = served(frame([0, 0], [4, 15], 2), scheduler="v0_chunked", **flags)
    assert [step[2:4] for step in not_filling[:2]] == [([(0, 4), (1, 4)], []), ([(0, 1)], [1])]


def test_v0_chunked_admits_others_in_the_step_that_preempted_and_the_victim_comes_before_them_after():
    # 10 blocks of one token: 0 holds 4, 1 holds 5; the second decode finds none free, so 1 starts anew
    trace = frame([0, 0, 1], [4, 5, 2], [3, 3, 1])
    flags = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "block_size": 1, "num_gpu_blocks": 10}
    steps = served(trace, scheduler="v0_chunked", **flags)
    assert steps[1][2:4] == ([(0, 1), (2, 2)], [1])
    assert steps[2][2] == [(0, 1)] and steps[3][2] == [(1, 6)]
    steps = served(trace, scheduler="v1", **flags | {"num_gpu_blocks": 11})
    assert (1, [1]) in [(number, step[3]) for number, step in enumerate(steps)]
    assert steps[1][2] == [(0, 1)]


def test_victims_of_one_step_rejoin_the_head_in_their_order():
    trace = frame([0, 0, 0, 0, 1], [1, 1, 1, 1, 1], [30, 30, 30, 30, 1])
    steps = served(
        trace,
        scheduler="v0_chunked",
        max_num_batched_tokens=64,
        max_num_seqs=4,
        block_size=1,
        num_gpu_blocks=40,
    )
    assert sum(len(step[3]) for step in steps) > 1
    order = []
    for _, _, batch, victims, *_ in steps:
        for rid, _ in batch:
            order = order if rid in order else [*order, rid]
        assert victims == sorted(victims, reverse=True)  # the last running first: equal arrivals run in their order
    assert order == [0, 1, 2, 3, 4]


def test_v0_prefill_first_lets_prompts_pass_before_decodes():
    trace = frame([0, 1, 2, 3], 6, 3)
    steps = served(trace, scheduler="v0_prefill_first", max_num_batched_tokens=64, max_num_seqs=8)
    assert [step[2] for step in steps] == [[(r, 6)] for r in range(4)] + [[(r, 1) for r in range(4)]] * 2
