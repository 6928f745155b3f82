"""Prefix caching: the pool of blocks keeps its books, hits are what they should be, predictions count them.

That the schedule is vLLM's, step by step, is tests/live/test_schedule_equals_vllm.py and tests/test_recorded.py.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from clusters import COST, requests, same, short_trace
from workloads import CACHING, CONSTANT, Engine, differences, frame, random_workload

from astrolabe_lab.cost import preset
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.predictor import Predictor
from astrolabe_lab.request import Request
from astrolabe_lab.sim import kernel
from astrolabe_lab.sim.caching import look_up_newcomer
from astrolabe_lab.sim.cluster import Outage, simulate
from astrolabe_lab.sim.engine import EngineConfig, run_one
from astrolabe_lab.sim.prefixes import read_prefixes, with_pools
from astrolabe_lab.sim.state import RUNNING, WAITING, new_engines, new_state
from astrolabe_lab.sim.status_check import SOUND, find_flaw
from astrolabe_lab.trace import load, prefix_block_tokens

WORKLOADS = 40
CACHED = EngineConfig(
    max_num_seqs=8, max_num_batched_tokens=64, block_size=4, num_gpu_blocks=200, max_model_len=256,
    enable_prefix_caching=True,
)  # fmt: skip


def sharing(trace, prefix_blocks, block_tokens):
    """The trace, its prompts beginning with these blocks."""
    trace = trace.assign(prefix_blocks=[tuple(blocks) for blocks in prefix_blocks])
    trace.attrs["prefix_block_tokens"] = block_tokens
    return trace


def contents(trace, config, r, k):
    """What the first k blocks of request r contain, written out token by token."""
    tokens = trace.attrs["prefix_block_tokens"]
    prompt = int(trace["prompt_tokens"].iloc[r])
    listed = [block for block in trace["prefix_blocks"].iloc[r] for _ in range(tokens)][:prompt]
    return tuple((listed + [("own", r)] * config.block_size * k)[: config.block_size * k])


def check_books(engine, trace, config):
    """Assert that the pool agrees with the requests that hold its blocks; returns how many blocks are shared."""
    e, q = engine.state.engines[0], engine.state.requests
    pool = engine.state.pool[e["pool_at"] :][: config.usable_blocks + 1]
    lists = engine.state.lists
    held = Counter()
    said = {}
    running = [int(r) for r in engine.state.running[0, : e["n_running"]]]
    assert len({int(q["seat"][r]) for r in running}) == e["seats_taken"] == len(running)
    for r in running:
        row = lists[e["tables_at"] + q["seat"][r] * e["table_width"] :][: q["blocks"][r]]
        held.update(int(b) for b in row)
        cached = int(q["cached"][r])
        whole = contents(trace, config, r, cached)
        for k in range(cached):
            content = whole[: (k + 1) * config.block_size]
            assert said.setdefault(int(row[k]), content) == content
            assert pool["key"][row[k]] != 0
        assert q["cached"][r] * config.block_size <= q["computed"][r]
    assert {b: int(pool["references"][b]) for b in held} == dict(held)
    assert pool["references"].sum() == held.total()
    free = []
    b = int(pool["next"][0])
    while b != 0:
        assert pool["previous"][pool["next"][b]] == b
        free.append(b)
        b = int(pool["next"][b])
    assert sorted([*free, *held]) == list(range(1, config.usable_blocks + 1))
    assert len(free) == e["free_blocks"]
    remembered = []
    for slot in range(e["bucket_mask"] + 1):
        b = int(pool["bucket"][slot])
        while b != 0:
            remembered.append(b)
            b = int(pool["after"][b])
    assert sorted(remembered) == np.flatnonzero(pool["key"]).tolist()
    return sum(n > 1 for n in held.values())


@pytest.mark.parametrize("kind", CACHING)
def test_at_every_instant_the_pool_agrees_with_the_requests(kind):
    shared = preempted = 0
    for seed in range(WORKLOADS // 2):
        trace, config, cost = random_workload(100 + seed, kind)
        results, _ = run_one(trace, config, cost, log=False)
        engine = Engine(trace, config, cost)
        engine.deliver_until(np.inf)
        for now_s in np.sort(np.random.default_rng(seed).uniform(0, results["finished_s"].max(), 12)):
            engine.advance(now_s)
            shared += check_books(engine, trace, config)
        engine.advance(np.inf)
        check_books(engine, trace, config)
        preempted += int(engine.state.engines["preemptions"][0])
        assert engine.state.engines["free_blocks"][0] == config.usable_blocks
    assert shared > 50 and preempted > 50


def test_with_nothing_shared_and_memory_to_spare_caching_changes_nothing():
    for seed in range(WORKLOADS):
        trace, config, cost = random_workload(seed, "v1")
        roomy = replace(config, num_gpu_blocks=20_000, watermark=0.0)
        for asynchronous in (False, True):
            without = replace(roomy, async_scheduling=asynchronous)
            before, log = run_one(trace, without, cost)
            after, cached_log = run_one(trace, replace(without, enable_prefix_caching=True), cost)
            assert (after.pop("cached_tokens") == 0).all()
            same(before, after)
            assert log.drop(columns="step").equals(cached_log.drop(columns="step"))


def test_a_prompt_that_was_just_served_costs_its_last_block_only():
    trace = sharing(frame([0.0, 50.0, 100.0], [40, 40, 43], 5), [range(10), range(10), range(11)], 4)
    results, log = run_one(trace, CACHED, CONSTANT)
    first = log.groupby("rid")["tokens"].first()
    assert first.tolist() == [40, 4, 3]  # never the whole prompt: its last token must be computed
    assert results["cached_tokens"].tolist() == [0, 36, 40]


def test_prefixes_end_where_the_first_id_differs_though_later_ones_are_equal():
    blocks = [(1, 2, 3, 4), (1, 9, 3, 4), (7, 2, 3, 4), (1, 2, 3, 8), (1, 2, 3, 4)]
    trace = sharing(frame(np.arange(5) * 50.0, 40, 3), blocks, 8)
    _, log = run_one(trace, CACHED, CONSTANT)
    assert (40 - log.groupby("rid")["tokens"].first()).tolist() == [0, 8, 0, 24, 32]


def test_listed_blocks_that_are_no_multiple_of_the_engines_are_shared_as_far_as_whole_blocks_reach():
    trace = sharing(frame([0.0, 50.0], 40, 3), [(1, 2, 3), (1, 2, 9)], 10)  # 20 tokens in common: 5 blocks of 4
    _, log = run_one(trace, CACHED, CONSTANT)
    assert (40 - log.groupby("rid")["tokens"].first()).tolist() == [0, 20]
    trace = sharing(frame([0.0, 50.0], 40, 3), [(1, 2, 3), (1, 2, 9)], 9)  # 18 tokens: 4 whole blocks
    _, log = run_one(trace, CACHED, CONSTANT)
    assert (40 - log.groupby("rid")["tokens"].first()).tolist() == [0, 16]


def found_before(trace, block_size):
    """Tokens of whole blocks with which each prompt begins and an earlier one too, by comparing token for token."""
    size = trace.attrs["prefix_block_tokens"]
    seen, found = set(), []
    for prompt, ids in zip(trace["prompt_tokens"], trace["prefix_blocks"], strict=True):
        ends = range(block_size, min(prompt, size * len(ids)) + 1, block_size)
        starts = [(ids[: (end - 1) // size + 1], end) for end in ends]
        hit = next((k for k, start in enumerate(starts) if start not in seen), len(starts))
        found.append(min(hit, (prompt - 1) // block_size) * block_size)
        seen.update(starts)
    return found


def one_after_the_other(trace, engine):
    """What an engine with memory for everything finds of each prompt when all others before are done."""
    results, _ = run_one(trace.assign(arrived_s=np.arange(len(trace)) * 1e5), engine, CONSTANT, log=False)
    return results["cached_tokens"].tolist()


def test_with_unlimited_memory_what_is_found_is_what_was_there_before():
    found = []
    for seed in range(WORKLOADS):
        trace, config, _ = random_workload(200 + seed, "v1_caching")
        found += (expected := found_before(trace, config.block_size))
        assert one_after_the_other(trace, replace(config, num_gpu_blocks=20_000, watermark=0.0)) == expected, seed
    assert np.mean(np.array(found) > 0) > 0.3


@pytest.mark.shared
def test_the_prefixes_of_mooncakes_conversations_are_found_as_far_as_they_were_there_before(real):
    trace = load(real("traces/mooncake_fast25_conversation.jsonl.gz")).head(150)
    trace.attrs["prefix_block_tokens"] = prefix_block_tokens(trace)
    config = EngineConfig(8, 8192, 64, 200_000, 200_000, enable_prefix_caching=True)
    expected = found_before(trace, 64)
    assert one_after_the_other(trace, config) == expected and sum(expected) > 90_000


def test_the_longest_unused_prefix_is_forgotten_first():
    config = replace(CACHED, num_gpu_blocks=27, max_model_len=64)  # 26 blocks; each request fills 10, one its own
    order = ["a", "b", "a", "c", "a", "b"]
    ids = {"a": range(9), "b": range(100, 109), "c": range(200, 209)}
    trace = sharing(frame(np.arange(6) * 50.0, 37, 4), [ids[name] for name in order], 4)
    _, log = run_one(trace, config, CONSTANT)
    hits = (37 - log.groupby("rid")["tokens"].first()).tolist()
    # c takes 5 that were never used, the own block of the first, then of b the own one and the last 3 of the prompt;
    # the third a takes one more of b.
    assert hits == [0, 0, 36, 0, 36, 20]


def test_caching_takes_work_off_an_engine_that_preempts_though_no_prompt_is_shared():
    """600 blocks of 16, 400 requests at once, no common prefix: resumed requests find blocks of their own."""
    lengths = sharegpt_like.generate(400, seed=0, text=False)
    trace = lengths.assign(arrived_s=0.0)
    cost = preset("llama2-7b-a30").cost
    config = EngineConfig(num_gpu_blocks=600)
    results, log = run_one(trace, config, cost)
    cached, cached_log = run_one(trace, replace(config, enable_prefix_caching=True), cost)
    assert results["preemptions"].sum() > 300
    assert cached["preemptions"].sum() < results["preemptions"].sum()
    assert 0.80 < cached_log["tokens"].sum() / log["tokens"].sum() < 0.95
    assert cached["finished_s"].max() < results["finished_s"].max()
    assert (cached["generated_tokens"] == results["generated_tokens"]).all()


def test_an_engine_that_stops_has_an_empty_cache_when_it_is_back():
    trace = sharing(frame([0.0, 50.0, 100.0, 150.0], 40, 5), [range(10)] * 4, 4)
    engine = Engine(trace, CACHED, CONSTANT, log_rows=1000)
    engine.deliver_until(50.5)
    engine.advance(50.5)
    kernel.stop(*engine.state, 0, 50.5, False)
    check_books(engine, trace, CACHED)
    engine.serve()
    log = engine.state.log[: int(engine.state.engines["log_rows"][0])]
    first = {int(r): int(log["tokens"][log["request"] == r][0]) for r in range(4)}
    assert first == {0: 40, 1: 4, 2: 40, 3: 4}


@pytest.mark.parametrize("kind", CACHING)
def test_every_status_accounts_for_each_block_once_and_says_what_would_be_found(kind):
    shared = found = 0
    for seed in range(WORKLOADS):
        trace, config, cost = random_workload(300 + seed, kind)
        results, _ = run_one(trace, config, cost, log=False)
        engine = Engine(trace, config, cost, predicted=trace["output_tokens"])
        engine.deliver_until(np.inf)
        template = new_engines([config], [cost])[0]
        for now_s in np.sort(np.random.default_rng(seed).uniform(0, results["finished_s"].max(), 15)):
            engine.advance(now_s)
            status = engine.status(now_s)
            assert find_flaw(template, status.header, status.rows)[0] == SOUND
            rows = status.rows
            runs = rows["state"] == RUNNING
            assert status.free_blocks + (rows["blocks"] - rows["shared"])[runs].sum() == config.usable_blocks
            shared += int(rows["shared"][runs].sum())
            found += int(rows["cached"][~runs].sum())
    assert shared > 200 and found > 200


def with_a_last_request(whole, now_s, like):
    """What had arrived by now_s, and one more that arrives then, with prompt and prefix of request ``like``."""
    known = whole[whole["arrived_s"] <= now_s]
    trace = pd.concat([known, whole.iloc[[like]].assign(arrived_s=now_s)], ignore_index=True)
    trace["rid"] = range(len(trace))
    trace.attrs = dict(whole.attrs)
    return trace


def predictions(whole, config, cost, rng):
    """(TTFT and E2E predicted, and as they turn out, prediction that knows of no cache, hit in blocks) of a last
    request, of true lengths, at random instants of a run."""
    results, _ = run_one(whole, config, cost, log=False)
    for now_s in rng.uniform(whole["arrived_s"].iloc[0], results["finished_s"].max(), 4):
        trace = with_a_last_request(whole, now_s, int(rng.integers((whole["arrived_s"] <= now_s).sum())))
        last = len(trace) - 1
        engine = Engine(trace, config, cost, predicted=trace["output_tokens"])
        for r in range(last):
            kernel.deliver(*engine.state, 0, r, trace["arrived_s"].iloc[r])
        engine.advance(now_s)
        status, e, q = engine.status(now_s), engine.state.engines, engine.state.requests
        hit, _ = look_up_newcomer(e, q, engine.state.pool, e["pool_at"][0], engine.state.lists, 0, last)
        request = Request(last, now_s, int(trace["prompt_tokens"].iloc[-1]), int(trace["output_tokens"].iloc[-1]))
        predictor = Predictor(config, cost)
        found = predictor.predict(status, request, cached_tokens=hit * config.block_size)
        status.rows["cached"] = 0
        status.rows["shared"][status.rows["state"] == WAITING] = 0
        blind = predictor.predict(status, request)
        q = Engine(trace, config, cost).serve().state.requests[last]
        actual = q["first_token_s"] - now_s, q["finished_s"] - now_s
        yield (found.ttft_s, found.e2e_s), actual, (blind.ttft_s, blind.e2e_s), hit


def test_with_memory_to_spare_a_prediction_counts_the_newcomers_hits_exactly():
    hits = 0
    for seed in range(WORKLOADS):
        whole, config, cost = random_workload(500 + seed, "v1_caching")
        roomy = replace(config, num_gpu_blocks=20_000, watermark=0.0, max_num_seqs=64, max_num_batched_tokens=10_000)
        for predicted, actual, _, hit in predictions(whole, roomy, cost, np.random.default_rng(seed)):
            assert predicted == actual, seed
            hits += hit
    assert hits > 100


@pytest.mark.parametrize("kind", CACHING)
def test_short_of_memory_predictions_are_close_and_closer_than_without_the_hits(kind):
    errors = []
    for seed in range(WORKLOADS):
        workload = random_workload(700 + seed, kind)
        for found in predictions(*workload, np.random.default_rng(seed)):
            predicted, actual, blind, _ = found
            errors.append([abs(guess[1] - actual[1]) / actual[1] for guess in (predicted, blind)])
    aware, blind = np.mean(errors, axis=0)
    assert aware < 0.1 and aware < 0.9 * blind


def test_policies_and_twins_run_over_engines_of_which_some_cache():
    trace = short_trace(200, 40)
    trace = sharing(trace, [(r % 3, r % 3, r % 7) for r in range(200)], 8)
    engines = [CACHED, replace(CACHED, enable_prefix_caching=False), replace(CACHED, num_gpu_blocks=60)]
    settings = {"instances": 3, "engine": engines, "cost": COST}
    for policy in ("least_loaded", "astrolabe", "least_latency"):
        twin = simulate(trace, policy, compiled=True, **settings)
        same(twin, simulate(trace, policy, compiled=False, **settings))
        same(twin, simulate(trace, policy, leaps=False, **settings))
        assert (twin["status"] == "ok").any()
    faulty = simulate(trace, "least_loaded", faults=[Outage(0, 1.0, 3.0, "redispatch")], **settings)
    assert not (faulty["status"] == "failed").any()


def test_the_state_of_ten_thousand_requests_stays_small():
    trace = sharing(requests(np.zeros(10_000), 300, 300), [range(r, r + 18) for r in range(10_000)], 16)
    configs = [EngineConfig(enable_prefix_caching=True)] * 12
    state = with_pools(new_state(configs, [COST] * 12, len(trace)), trace)
    assert sum(array.nbytes for array in state) < 12e6


def test_what_is_no_number_of_tokens_is_refused():
    trace = sharing(frame([0.0], 10, 3), [(1,)], 4)
    for wrong in (0, -1, 2.5, "16", True):
        trace.attrs["prefix_block_tokens"] = wrong
        with pytest.raises(InputError, match="prefix_block_tokens"):
            read_prefixes(trace)


@pytest.mark.parametrize("kind", CACHING)
def test_the_predictors_counting_engine_leaps_as_it_steps(kind):
    """Without a pool an engine with prefix caching counts; that is what a Predictor runs."""
    for seed in range(WORKLOADS):
        trace, config, cost = random_workload(900 + seed, kind)
        outcomes = []
        for leaps in (False, True):
            engine = Engine(trace, config, cost)
            state = new_state([config], [cost], len(trace))
            for name in ("prompt", "output"):
                state.requests[name] = engine.state.requests[name]
            engine.state = state
            outcomes.append(engine.serve(leaps).outcome())
        assert not differences(*outcomes), seed
        assert outcomes[0]["engine.free_blocks"] == config.usable_blocks
