"""Policies that know of prefixes and latencies against their published rules, and the record that they look into."""

from collections import Counter, OrderedDict
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from clusters import AMPLE, COST, Constant, requests, same, short_trace

from astrolabe_lab import policies
from astrolabe_lab.errors import InputError
from astrolabe_lab.policies import CacheAware, KvCost, LeastLatency, WeightedScore, draw
from astrolabe_lab.prefix_record import PrefixOverlap, PrefixRecord
from astrolabe_lab.request import Request
from astrolabe_lab.sim.cluster import ControlPlane, Outage, simulate
from astrolabe_lab.sim.signals import SIGNALS

REQUEST = Request(0, 0.0, prompt_tokens=100, predicted_tokens=20)


def cluster_of(rows, cached=(), remembered=()):
    """A cluster of instances with these signals, cached tokens of the request, and tokens remembered."""
    signals = np.zeros(len(rows), SIGNALS)
    for record, row in zip(signals, rows, strict=True):
        for name, value in row.items():
            record[name] = value
    zeros = np.zeros(len(rows), np.int64)
    overlap = PrefixOverlap(np.array(cached or zeros), zeros * np.nan, np.array(remembered or zeros))

    class Cluster(SimpleNamespace):
        def __len__(self):
            return len(signals)

    return Cluster(signals=signals, prefix_overlap=lambda request: overlap)


def chosen(policy, cluster, request=REQUEST, draws=200):
    """The instances that the policy chooses at all."""
    return {policy.choose(request, cluster, np.random.default_rng(seed)) for seed in range(draws)}


def best(values):
    return {i for i, value in enumerate(values) if value == min(values)}


def test_cache_aware_is_sglangs_rule():
    rng = np.random.default_rng(0)
    paths = Counter()
    for _ in range(300):
        load = rng.integers(0, 3, 4) * int(rng.choice([10, 50, 100])) + 20
        cached = rng.integers(0, 3, 4) * int(rng.choice([10, 15, 16, 40]))
        remembered = rng.integers(0, 3, 4) * 1000
        cluster = cluster_of([{"in_flight": n} for n in load], cached.tolist(), remembered.tolist())
        if max(load) - min(load) > 64 and max(load) > 1.5 * min(load):
            path, expected = "balance", best(load)
        elif Fraction(int(max(cached)), 100) > Fraction(3, 10):
            path, expected = "match", best(-cached)
        else:
            path, expected = "smallest", best(remembered)
        paths[path] += 1
        assert chosen(CacheAware(), cluster) == expected, (path, load, cached, remembered)
    assert min(paths.values()) > 20 and len(paths) == 3


def test_kv_cost_is_the_blocks_to_compute_and_those_in_use():
    rng = np.random.default_rng(1)
    for _ in range(200):
        rows = [
            {"prefill_tokens": int(p), "total_blocks": 50, "free_blocks": int(f), "block_size": 16}
            for p, f in zip(rng.integers(0, 3, 5) * 32, rng.integers(0, 3, 5) * 2 + 40, strict=True)
        ]
        cached = (rng.integers(0, 4, 5) * 32).tolist()
        costs = [
            Fraction(max(row["prefill_tokens"] + 100 - hit, 0), 16) + row["total_blocks"] - row["free_blocks"]
            for row, hit in zip(rows, cached, strict=True)
        ]
        assert chosen(KvCost(), cluster_of(rows, cached)) == best(costs)


def test_kv_cost_with_a_temperature_draws_by_the_softmax_of_the_scaled_costs():
    rows = [{"prefill_tokens": p, "total_blocks": 9, "free_blocks": 9, "block_size": 1} for p in (0, 50, 100)]
    cluster = cluster_of(rows)
    counts = np.zeros(3)
    rng = np.random.default_rng(2)
    for _ in range(20_000):
        counts[KvCost(temperature=0.5).choose(REQUEST, cluster, rng)] += 1
    weights = np.exp(-np.array([0.0, 0.5, 1.0]) / 0.5)
    np.testing.assert_allclose(counts / counts.sum(), weights / weights.sum(), atol=0.012)
    assert chosen(KvCost(temperature=1e-3), cluster) == {0}
    assert chosen(KvCost(temperature=1.0), cluster_of(rows[:1] * 3)) == {0, 1, 2}


def test_softmin_spends_one_draw():
    rng, other = np.random.default_rng(3), np.random.default_rng(3)
    draw.softmin(np.array([1.0, 2.0]), 0.5, rng)
    other.random()
    assert rng.random() == other.random()


def test_weighted_score_is_llm_ds_rule():
    rng = np.random.default_rng(4)
    for _ in range(200):
        rows = [
            {"waiting": int(w), "total_blocks": 64, "free_blocks": int(f)}
            for w, f in zip(rng.integers(0, 3, 5) * int(rng.choice([0, 1, 4])), rng.integers(0, 5, 5) * 16, strict=True)
        ]
        cached = (rng.integers(0, 5, 5) * 25).tolist()
        waiting = [row["waiting"] for row in rows]
        span = max(waiting) - min(waiting)
        score = [
            2 * (Fraction(max(waiting) - row["waiting"], span) if span else 1)
            + 2 * Fraction(row["free_blocks"], 64)
            + 3 * Fraction(hit, 100)
            for row, hit in zip(rows, cached, strict=True)
        ]
        top = {i for i, value in enumerate(score) if value == max(score)}
        got = chosen(WeightedScore(), cluster_of(rows, cached))
        assert got <= top and (len(top) > 1 or got == top)  # equal fractions may differ in the last bit


def test_least_latency_adds_queue_prefill_and_decode_times():
    rows = [
        {"queue_s": 1.0, "prefill_s_per_token": 0.001, "decode_s_per_token": 0.02},  # 1 + 0.1 + 0.4
        {"queue_s": 0.2, "prefill_s_per_token": 0.002, "decode_s_per_token": 0.055},  # 0.2 + 0.2 + 1.1
        {"queue_s": 0.0, "prefill_s_per_token": 0.004, "decode_s_per_token": 0.05},  # 0.4 + 1.0
    ]
    assert chosen(LeastLatency(), cluster_of(rows)) == {2}
    assert chosen(LeastLatency(), cluster_of(rows), Request(0, 0.0, 1000, 1)) == {0}
    assert chosen(LeastLatency(), cluster_of(rows[1:]), Request(0, 0.0, 1, 1)) == {1}


def test_the_means_that_an_engine_publishes_are_those_of_its_requests():
    """One at a time: no queue, prefill of one step of a second, a second a token after that."""
    second = type(COST).parse("base_s=1")
    seen = []

    class Looking(Constant):
        def choose(self, request, cluster, rng):
            seen.append(cluster[0])
            return 0

    Looking.__deepcopy__ = lambda self, memo: self
    simulate(requests([0.0, 50.0, 50.25, 150.0], [10, 30, 60, 5], [5, 2, 3, 1]), Looking(), instances=1,
             engine=AMPLE, cost=second)  # fmt: skip
    assert [(x.queue_s, x.prefill_s_per_token, x.decode_s_per_token) for x in seen[:2]] == [(0, 0, 0), (0, 0.1, 1)]
    last = seen[3]
    assert last.queue_s == pytest.approx((0.0 + 0.0 + 0.75) / 3)
    assert last.prefill_s_per_token == pytest.approx(3 / 100)
    assert last.decode_s_per_token == pytest.approx((4 + 1 + 2) / (4 + 1 + 2))


@pytest.mark.parametrize(
    "text",
    ["cache_aware:threshold=0.5", "kv_cost:temperature=0.5", "weighted_score:queue=1.0,kv=0.5", "least_latency"],
)
def test_text_and_policy_say_the_same(text):
    assert policies.spec(policies.parse(text)) == text
    assert policies.parse(policies.spec(policies.parse(text))) == policies.parse(text)


@pytest.mark.parametrize("text", ["kv_cost:temperature=-1", "cache_aware:ratio=nan", "weighted_score:kv=inf"])
def test_options_that_are_no_weights_are_refused(text):
    with pytest.raises(InputError, match="must be a finite number >= 0"):
        policies.parse(text)


# --- the record ---------------------------------------------------------------------------------------------------


def request_of(blocks, prompt_tokens=None):
    return Request(0, 0.0, prompt_tokens or 10 * len(blocks), 5, "loose", tuple(blocks))


class PlainRecord:
    """The record written without economy: each instance's blocks as whole prefixes, longest unused first."""

    def __init__(self, most):
        self.most = most
        self.held = {i: OrderedDict() for i in range(3)}

    def sent(self, blocks, i, now_s):
        held = self.held[i]
        for k in range(min(len(blocks), self.most), 0, -1):
            held.pop(tuple(blocks[:k]), None)
            held[tuple(blocks[:k])] = now_s
        while len(held) > self.most:
            held.popitem(last=False)

    def overlap(self, blocks, i, now_s):
        k = 0
        while k < len(blocks) and tuple(blocks[: k + 1]) in self.held[i]:
            k += 1
        return 10 * k, now_s - self.held[i][tuple(blocks[:k])] if k else np.nan, 10 * len(self.held[i])


def test_the_record_is_that_of_whole_prefixes_with_the_longest_unused_forgotten():
    rng = np.random.default_rng(5)
    for most in (1, 3, 8, 40):
        record, plain = PrefixRecord(10, dict.fromkeys(range(3), 10 * most)), PlainRecord(most)
        for now_s in range(400):
            blocks = rng.integers(0, 3, rng.integers(0, 6)).tolist()
            if rng.random() < 0.02:
                record.forget(1)
                plain.held[1].clear()
            i = int(rng.integers(3))
            record.sent(request_of(blocks, 60), i, float(now_s))
            plain.sent(blocks, i, float(now_s))
            asked = rng.integers(0, 3, rng.integers(0, 6)).tolist()
            found = record.overlap(request_of(asked, 60), range(3), now_s + 0.5)
            expected = [plain.overlap(asked, i, now_s + 0.5) for i in range(3)]
            np.testing.assert_array_equal(np.array(found), np.array(expected, float).T)
            assert len(record) == len(set().union(*plain.held.values()))


def test_a_record_does_not_grow_without_bound():
    record = PrefixRecord(16, {0: 1600, 1: 1600})
    for r in range(5000):
        record.sent(request_of(range(100 * r, 100 * r + 12), 200), r % 2, float(r))
    assert len(record) == 200
    assert record.overlap(request_of([1], 16), [0, 1], 1e4).remembered_tokens.tolist() == [1600, 1600]


def test_an_overlap_is_no_longer_than_the_prompt():
    record = PrefixRecord(10, {0: 1000})
    record.sent(request_of([1, 2, 3], 25), 0, 0.0)
    assert record.overlap(request_of([1, 2, 3], 25), [0], 1.0).tokens.tolist() == [25]
    assert record.overlap(request_of([1, 2, 3], 12), [0], 1.0).tokens.tolist() == [12]


# --- in a cluster -------------------------------------------------------------------------------------------------


def conversations(n=240, qps=30.0, instructions=8):
    """Requests whose prompts begin with one of so many instructions of 48 tokens."""
    trace = short_trace(n, qps)
    rng = np.random.default_rng(6)
    trace["prompt_tokens"] += 48
    trace["prefix_blocks"] = [tuple(range(100 * g, 100 * g + 6)) for g in rng.integers(instructions, size=n)]
    trace.attrs["prefix_block_tokens"] = 8
    return trace


class Watching:
    """Round robin over all but the last instance; keeps what it was told of overlaps."""

    def __init__(self):
        self.seen, self.count = [], 0

    def __deepcopy__(self, memo):
        return self

    def choose(self, request, cluster, rng):
        self.seen.append((request, cluster.instances, cluster.prefix_overlap(request)))
        self.count += 1
        return self.count % (len(cluster) - 1)


def test_a_router_knows_what_it_sent_where_and_how_long_ago():
    watching = Watching()
    trace = conversations()
    results = simulate(trace, watching, instances=4, engine=AMPLE, cost=COST)
    last: dict = {}
    for (request, instances, overlap), chose in zip(watching.seen, results["instance"], strict=True):
        for k, i in enumerate(instances):
            sent_s = last.get((i, request.prefix_blocks[0]))
            assert overlap.tokens[k] == (0 if sent_s is None else 48)
            expected_s = np.nan if sent_s is None else request.arrived_s - sent_s
            assert overlap.age_s[k] == pytest.approx(expected_s, abs=1e-9, nan_ok=True)
        last[chose, request.prefix_blocks[0]] = request.arrived_s
    assert overlap.remembered_tokens.tolist() == [8 * 48, 8 * 48, 8 * 48, 0]


def test_routers_do_not_see_each_others_dispatches_and_forget_an_instance_that_was_down():
    watching = Watching()
    trace = conversations()
    down_s, back_s = trace["arrived_s"].iloc[80], trace["arrived_s"].iloc[120]
    simulate(
        trace, watching, instances=4, engine=AMPLE, cost=COST, control=ControlPlane(routers=240),
    )  # fmt: skip
    assert not any(overlap.tokens.any() for _, _, overlap in watching.seen)
    watching = Watching()
    simulate(trace, watching, instances=4, engine=AMPLE, cost=COST, faults=[Outage(1, down_s, back_s, "redispatch")])
    after = [overlap for request, _, overlap in watching.seen if request.arrived_s >= back_s]
    assert after[0].remembered_tokens[1] == 0 and after[0].remembered_tokens[2] > 0


@pytest.mark.parametrize("policy", ["cache_aware", "kv_cost", "weighted_score"])
def test_policies_that_know_of_prefixes_find_more_in_the_caches_than_round_robin(policy):
    trace = conversations(600, 40.0, instructions=64)  # 768 blocks in all; each cache holds a third of them
    engine = replace(AMPLE, num_gpu_blocks=250, enable_prefix_caching=True)
    settings = {"instances": 4, "engine": engine, "cost": COST}
    ours, blind = simulate(trace, policy, **settings), simulate(trace, "round_robin", **settings)
    assert ours["cached_tokens"].sum() > 1.5 * blind["cached_tokens"].sum() > 0
    same(ours, simulate(trace, policy, leaps=False, **settings))
