"""What every run of one engine keeps to, checked by replaying its step log in plain Python."""

from collections import Counter, defaultdict, deque

import numpy as np
import pytest
from workloads import CONSTANT, KINDS, SYNCHRONOUS, Engine, cost_of, flags_of, frame, random_workload

from astrolabe_lab.errors import InputError
from astrolabe_lab.sim.engine import EngineConfig, run_one

WORKLOADS = 40


def blocks_of(tokens, config):
    return -(-tokens // config.block_size)


class Replay:
    """Replays a synchronous engine's step log and notes each broken claim in ``broken``, as (claim, step)."""

    def __init__(self, trace, config, cost, results, log):
        self.config, self.cost, self.results = config, cost, results
        self.prompt, self.output = trace["prompt_tokens"].tolist(), trace["output_tokens"].tolist()
        self.arrived = trace["arrived_s"].tolist()
        n = len(trace)
        self.computed, self.generated, self.blocks = [0] * n, [0] * n, [0] * n
        self.first_s, self.finished_s, self.ends = [None] * n, [None] * n, Counter()
        self.preempted = Counter()
        self.running, self.waiting, self.due = [], deque(), deque(range(n))
        self.free = config.usable_blocks
        self.now_s = 0.0
        self.broken = []
        batches, victims = defaultdict(list), defaultdict(list)
        for step, r, tokens in log[["step", "rid", "tokens"]].to_numpy().tolist():
            batches[int(step)].append((int(r), int(tokens)))
        for step, r in log.attrs["preemptions"].to_numpy().tolist():
            victims[step].append(r)
        for shown in log.attrs["steps"].itertuples():
            self.step = shown.step
            self.replay(batches[shown.step], victims[shown.step], shown)
        self.at_the_end()

    def claim(self, name, holds):
        if not holds:
            self.broken.append((name, self.step))

    def tokens_held(self, r):
        return self.prompt[r] + self.generated[r]

    def replay(self, batch, victims, shown):
        config = self.config
        start_s, end_s = shown.start_s, shown.end_s
        v1 = config.scheduler == "v1"
        if not self.running and not self.waiting:
            self.now_s = max(self.now_s, self.arrived[self.due[0]])
        while self.due and self.arrived[self.due[0]] <= start_s:
            self.waiting.append(self.due.popleft())
        self.claim("steps follow each other, or the arrival that ends a pause", start_s == self.now_s)

        queue = self.running
        prefill_first = config.scheduler == "v0_prefill_first"
        decodes_only = prefill_first and batch[0][0] in queue
        if decodes_only:
            self.claim("prefills go first", self.blocked(config.max_num_batched_tokens))
        for victim in victims:
            self.claim("the victim is the last running request", victim == queue[-1])
            queue.remove(victim)
            self.free += self.blocks[victim]
            self.blocks[victim] = self.computed[victim] = 0
            self.preempted[victim] += 1
        old = [(r, tokens) for r, tokens in batch if r in queue]
        new = [(r, tokens) for r, tokens in batch if r not in queue]
        self.claim("running requests are served before new ones", [r for r, _ in batch] == [r for r, _ in old + new])
        served = [r for r, _ in old]
        self.claim("running requests are served in their order", served == [r for r in queue if r in served])
        self.claim("each request is in a step once", len({r for r, _ in batch}) == len(batch))

        budget = config.max_num_batched_tokens
        sequences = len(batch)
        new_tokens = context = mixed = 0
        attention = 0.0
        for r, tokens in old:
            left = self.tokens_held(r) - self.computed[r]
            self.claim("a running request gets what it lacks, as far as the budget goes", tokens == min(left, budget))
            budget -= tokens
            decode = left == 1 and self.computed[r] >= self.prompt[r]
            context += self.computed[r]
            if not decode:
                mixed = 1
                attention += tokens * self.computed[r] + 0.5 * tokens**2
            self.computed[r] += tokens
            new_tokens += tokens
            self.hold(r, self.computed[r])
        if prefill_first:
            self.claim("a step prefills or decodes", not (old and new))
        if decodes_only or not prefill_first:
            passed_over = [r for r in queue if r not in served]
            self.claim("no running request is passed over while budget is left", not passed_over or budget == 0)
        self.claim("no admission in a V1 step that preempted", not (v1 and victims and new))
        for r, tokens in new:
            self.claim("first come, first served", self.waiting[0] == r)
            self.waiting.remove(r)
            self.claim("a prompt is cut by the budget only", tokens == min(self.tokens_held(r), budget))
            if not config.enable_chunked_prefill:
                self.claim("without chunked prefill prompts are whole", tokens == self.tokens_held(r))
            budget -= tokens
            watermark = 0 if v1 and not queue else config.watermark_blocks
            whole = blocks_of(self.tokens_held(r), config)
            self.claim("admission leaves room for the whole prompt and the watermark", self.free - whole >= watermark)
            self.computed[r] = tokens
            self.hold(r, tokens if v1 else self.tokens_held(r))
            queue.append(r)
            mixed = 1
            attention += 0.5 * tokens**2
            new_tokens += tokens
        if not decodes_only and not (v1 and victims):
            self.claim("the queue's head waits for a reason", self.blocked(budget))
        self.waiting.extendleft(victims)

        self.claim("the token budget holds", new_tokens <= config.max_num_batched_tokens)
        self.claim("the seats hold", len(queue) <= config.max_num_seqs)
        self.claim("no more blocks are held than exist", self.free >= 0)
        self.claim("the log shows the free blocks", shown.free_blocks == self.free)
        self.claim("the log shows the running", shown.running == len(queue))
        self.claim("the log shows the waiting", shown.waiting == len(self.waiting))
        seconds = self.cost.step_seconds(new_tokens, sequences, context, attention, bool(mixed))
        self.claim("a step takes its cost, to the last bit", end_s == start_s + seconds)

        self.now_s = end_s
        for r, _ in batch:
            if self.computed[r] < self.tokens_held(r):
                continue
            self.generated[r] += 1
            if self.generated[r] == 1:
                self.first_s[r] = end_s
            if self.generated[r] == self.output[r]:
                self.finished_s[r] = end_s
                self.ends[r] += 1
                queue.remove(r)
                self.free += self.blocks[r]
                self.blocks[r] = 0

    def blocked(self, budget):
        """Whether the head of the waiting queue, if any, cannot be admitted."""
        if not self.waiting or len(self.running) >= self.config.max_num_seqs or budget == 0:
            return True
        tokens = self.tokens_held(self.waiting[0])
        if not self.config.enable_chunked_prefill and tokens > budget:
            return True
        watermark = 0 if self.config.scheduler == "v1" and not self.running else self.config.watermark_blocks
        return blocks_of(tokens, self.config) + watermark > self.free

    def hold(self, r, tokens):
        more = max(0, blocks_of(tokens, self.config) - self.blocks[r])
        self.blocks[r] += more
        self.free -= more

    def at_the_end(self):
        self.step = "end"
        n = len(self.prompt)
        self.claim("every block is given back", self.free == self.config.usable_blocks and not any(self.blocks))
        self.claim("every request finishes once", self.ends == Counter(range(n)))
        self.claim("every request generates its output", self.generated == self.output)
        self.claim("nobody is left", not self.running and not self.waiting and not self.due)
        results = self.results
        self.claim("results: the first token's time", results["first_token_s"].tolist() == self.first_s)
        self.claim("results: the end's time", results["finished_s"].tolist() == self.finished_s)
        self.claim("results: generated tokens", results["generated_tokens"].tolist() == self.output)
        self.claim("results: preemptions", results["preemptions"].tolist() == [self.preempted[r] for r in range(n)])
        self.claim("results: all ok", (results["status"] == "ok").all())


@pytest.mark.parametrize("kind", SYNCHRONOUS)
def test_every_step_keeps_to_the_rules(kind):
    preemptions = steps = 0
    for seed in range(WORKLOADS):
        trace, config, cost = random_workload(seed, kind)
        results, log = run_one(trace, config, cost)
        replay = Replay(trace, config, cost, results, log)
        assert not replay.broken, (seed, Counter(name for name, _ in replay.broken), replay.broken[0], config)
        preemptions += len(log.attrs["preemptions"])
        steps += int(log["step"].iloc[-1]) + 1
    assert preemptions > WORKLOADS
    assert steps > 50 * WORKLOADS


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "async" in kind])
def test_an_asynchronous_engine_finishes_everything_within_its_limits(kind):
    for seed in range(WORKLOADS):
        trace, config, cost = random_workload(seed, kind)
        results, log = run_one(trace, config, cost)
        assert (results["status"] == "ok").all()
        assert results["generated_tokens"].equals(trace["output_tokens"].rename("generated_tokens"))
        steps = log.attrs["steps"]
        assert log.groupby("step")["tokens"].sum().max() <= config.max_num_batched_tokens
        assert steps["running"].max() <= config.max_num_seqs
        assert steps["free_blocks"].between(0, config.usable_blocks).all()
        assert (steps["start_s"].to_numpy()[1:] >= steps["end_s"].to_numpy()[:-1]).all()  # one batch computes at a time
        assert (results["first_token_s"] > trace["arrived_s"]).all()
        engine = Engine(trace, config, cost).serve().state
        assert engine.engines["free_blocks"][0] == config.usable_blocks
        assert not engine.requests["blocks"].any()
        assert not engine.requests["in_flight"].any()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_computed_are_all_tokens_once_and_again_what_preemptions_lost(kind):
    for seed in range(WORKLOADS):
        trace, config, cost = random_workload(seed, kind)
        results, log = run_one(trace, config, cost)
        tokens = log.groupby("rid")["tokens"].sum().reindex(trace["rid"])
        once = (trace["prompt_tokens"] + trace["output_tokens"] - 1).to_numpy()
        untouched = (results["preemptions"] == 0).to_numpy()
        assert (tokens.to_numpy()[untouched] == once[untouched]).all()
        assert (tokens.to_numpy() >= once).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_exactly_at_a_limit_runs_and_one_beyond_is_rejected(kind):
    base = flags_of(kind, 64) | {"max_num_seqs": 2, "block_size": 4, "watermark": 0.1}
    by_length = EngineConfig(**base, max_model_len=64, num_gpu_blocks=200)
    by_blocks = EngineConfig(**base, max_model_len=64, num_gpu_blocks=10)
    room = by_blocks.num_gpu_blocks - 1  # V1: the null block; V0: the watermark
    most = 4 * room + 1  # the last token generated is never computed
    for config, limit in ((by_length, 64), (by_blocks, most)):
        for prompt in (1, 5, limit // 2, limit - 1):
            trace = frame([0.0, 0.0, 1.0], prompt, [limit - prompt, limit + 1 - prompt, 1])
            results, log = run_one(trace, config, CONSTANT)
            assert results["status"].tolist() == ["ok", "rejected", "ok"], (config, prompt)
            assert results["generated_tokens"].tolist() == [limit - prompt, 0, 1]
            assert config.rejects(prompt, limit - prompt) == 0
            assert config.rejects(prompt, limit + 1 - prompt) == 1
            assert 1 not in log["rid"].tolist()
            assert results["finished_s"].iloc[1] == 0.0
            assert np.isnan(results["e2e_s"].iloc[1])


@pytest.mark.parametrize("scheduler", ["v0_chunked", "v0_prefill_first"])
@pytest.mark.parametrize("watermark", [0.0, 0.1])
def test_the_largest_request_of_a_v0_engine_ends_though_its_decodes_ask_for_a_spare_block(scheduler, watermark):
    for chunk in (4, 12, 13) if scheduler == "v0_chunked" else (64,):
        memory = {"block_size": 4, "num_gpu_blocks": 10, "watermark": watermark}
        config = EngineConfig(4, chunk, max_model_len=64, scheduler=scheduler, **memory)
        sizes = [(p, o) for p in range(1, 41, 2) for o in range(1, 42 - p) if not config.rejects(p, o)]
        assert len(sizes) > 250
        for prompt, output in sizes:
            engine = Engine(frame(np.zeros(2), prompt, output), config, CONSTANT)
            engine.deliver_until(np.inf)
            engine.advance(2000.0)
            assert engine.state.engines["finished"][0] == 2, (prompt, output, chunk)


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_in_and_one_token_out_take_one_step(kind):
    config = EngineConfig(max_num_seqs=1, block_size=1, num_gpu_blocks=3, max_model_len=8, **flags_of(kind, 8))
    results, log = run_one(frame(np.zeros(5), 1, 1), config, CONSTANT)
    assert results["finished_s"].tolist() == [1, 2, 3, 4, 5]
    assert results["tpot_s"].isna().all()
    assert log["tokens"].tolist() == [1] * 5


def test_a_prompt_longer_than_the_chunk_is_computed_in_chunks():
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=10)
    results, log = run_one(frame([0.0, 0.0], [25, 3], [3, 2]), config, CONSTANT)
    steps = log.groupby("step")[["rid", "tokens"]].apply(lambda rows: list(map(tuple, rows.to_numpy().tolist())))
    assert steps.tolist() == [[(0, 10)], [(0, 10)], [(0, 5), (1, 3)], [(0, 1), (1, 1)], [(0, 1)]]
    assert results["first_token_s"].tolist() == [3, 3]
    assert results["finished_s"].tolist() == [5, 4]


def test_a_request_arriving_at_the_very_end_of_a_step_is_in_the_next():
    arrived = [0.0, 2.0, np.nextafter(2.0, 3)]
    results, log = run_one(frame(arrived, 4, 4), EngineConfig(), CONSTANT)
    assert log.groupby("rid")["start_s"].min().tolist() == [0, 2, 3]


def test_simultaneous_arrivals_are_served_in_the_order_of_the_trace():
    results, log = run_one(frame(np.full(30, 7.0), 5, 3), EngineConfig(max_num_seqs=3), CONSTANT)
    assert log.drop_duplicates("rid")["rid"].tolist() == list(range(30))
    assert results["first_token_s"].is_monotonic_increasing


@pytest.mark.parametrize("leaps", [False, True])
def test_a_pause_of_years_is_skipped(leaps):
    year_s = 3.2e7
    results, _ = run_one(frame([0.0, year_s, 9 * year_s], 10, 100), EngineConfig(), CONSTANT, log=False, leaps=leaps)
    assert results["e2e_s"].tolist() == [100, 100, 100]


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_thousand_requests_at_once_all_finish(kind):
    rng = np.random.default_rng(3)
    trace = frame(np.zeros(20_000), rng.integers(1, 100, 20_000), rng.integers(1, 100, 20_000))
    config = EngineConfig(max_num_seqs=16, max_model_len=256, num_gpu_blocks=60, **flags_of(kind, 256))
    results, _ = run_one(trace, config, CONSTANT, log=False)
    assert (results["status"] == "ok").all()
    assert (results["generated_tokens"] == trace["output_tokens"]).all()
    assert results["preemptions"].sum() > 0


def test_an_empty_engine_starts_at_the_first_arrival():
    results, log = run_one(frame([3.25], 2, 1), EngineConfig(), CONSTANT)
    assert (log["start_s"].iloc[0], results["ttft_s"].iloc[0]) == (3.25, 1.0)


def test_a_log_grows_with_the_preemptions_that_make_a_run_longer():
    config = EngineConfig(max_num_seqs=30, block_size=1, num_gpu_blocks=60, max_model_len=60)
    results, log = run_one(frame(np.zeros(30), 2, 50), config, CONSTANT)
    assert results["preemptions"].sum() > 30
    assert log.groupby("rid").size().min() >= 50
    assert log.attrs["steps"]["step"].tolist() == list(range(len(log.attrs["steps"])))


def test_a_step_log_and_leaps_exclude_each_other():
    with pytest.raises(InputError, match="log=False or leaps=False"):
        run_one(frame([0.0], 1, 1), EngineConfig(), CONSTANT, log=True, leaps=True)


def test_the_mixed_regime_prices_any_step_that_computes_a_prompt():
    cost = cost_of([[0, 1, 0, 0, 0, 0], [0, 100, 0, 0, 0, 0]])
    config = EngineConfig(max_num_batched_tokens=50)
    _, log = run_one(frame([0.0, 250.0], [60, 5], [4, 2]), config, cost)
    steps = log.attrs["steps"]
    # two chunks of the first, its three decodes; the second arrives in an idle engine: its prompt, its decode
    assert (steps["end_s"] - steps["start_s"]).tolist() == [100, 100, 1, 1, 1, 100, 1]
