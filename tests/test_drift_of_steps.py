"""The drift alarm: statuses of an engine as time goes by against the step cost it was calibrated to."""

import asyncio
from bisect import bisect
from itertools import pairwise

import numpy as np
import pytest

from astrolabe_lab.calibrate.drift import DriftMonitor, DriftWatch
from astrolabe_lab.cost import StepCost
from astrolabe_lab.engines.step_log import counts_of
from astrolabe_lab.sim.state import RUNNING, WAITING
from astrolabe_lab.sim.status import HEADER, ROW, Status

COST = StepCost.parse("base_s=0.02,per_seq_s=2e-4,per_kv_token_s=1e-6")


def status(streams, waiting=0):
    """Of streams {rid: (prompt, generated)} that decode, and so many that wait."""
    rows = np.zeros(len(streams) + waiting, ROW)
    for row, (rid, (prompt, generated)) in zip(rows, streams.items(), strict=False):
        row["rid"], row["state"], row["prompt"], row["generated"] = rid, RUNNING, prompt, generated
        row["computed"] = prompt + generated - 1
    rows["state"][len(streams) :] = WAITING
    header = np.zeros(1, HEADER)
    header["n_running"], header["n_rows"] = len(streams), len(rows)
    return Status(header, rows)


def decode(watch, seconds_of, looks=40, streams=4, every=10):
    """Let the streams decode ``every`` steps between looks, each taking ``seconds_of(step cost)``."""
    now_s, generated, prompt = 0.0, 1, 100
    for _ in range(looks):
        watch.look(status(dict.fromkeys(range(streams), (prompt, generated))), now_s)
        for _ in range(every):
            now_s += seconds_of(COST.step_seconds(streams, streams, streams * (prompt + generated - 1)))
            generated += 1


def test_steps_as_calibrated_give_a_ratio_of_one_and_no_alarm():
    watch = DriftWatch(COST)
    decode(watch, lambda s: s)
    assert watch.ratio == pytest.approx(1, abs=0.002) and not watch.alarm and watch.observed == 39


@pytest.mark.parametrize("factor", [0.7, 1.3])
def test_steps_that_take_another_time_raise_the_alarm_once_seen_often_enough(factor):
    watch = DriftWatch(COST)
    decode(watch, lambda s: factor * s, looks=8)
    assert not watch.alarm
    decode(watch, lambda s: factor * s)
    assert watch.alarm and watch.ratio == pytest.approx(factor, rel=0.01)


def test_noise_alone_raises_none():
    rng = np.random.default_rng(0)
    watch = DriftWatch(COST)
    decode(watch, lambda s: s * max(0.2, rng.normal(1, 0.4)), looks=100)
    assert not watch.alarm


def test_only_stretches_in_which_the_same_streams_decode_throughout_count():
    watch = DriftWatch(COST)
    assert watch.look(status({1: (50, 1)}), 0.0) is None
    assert watch.look(status({1: (50, 21), 2: (10, 1)}), 9.0) is None  # another has come: prompts were computed
    assert watch.look(status({1: (50, 41), 2: (10, 21)}, waiting=1), 18.0) is None
    assert watch.look(status({}), 30.0) is None
    assert watch.observed == 0 and not watch.alarm


def in_steps(queue, seats=4, budget=256, factor=1.0):
    """The statuses, and when each was published, of an engine that serves ``queue`` [(prompt, output)], as they come in
    turn, ``seats`` at a time and at most ``budget`` tokens a step; steps take ``factor`` times what COST says."""
    now_s, running, waiting = 0.0, [], [[rid, *each, 0, 0] for rid, each in enumerate(queue)]
    while running or waiting:
        left = budget - sum(max(1, r[1] - r[3]) for r in running)
        while waiting and len(running) < seats and left > 0:
            running.append(waiting.pop(0))
            left -= running[-1][1]
        rows, left = np.zeros(len(running) + len(waiting), ROW), budget
        for row, (rid, prompt, _, computed, generated) in zip(rows, [*running, *waiting], strict=True):
            row["rid"], row["prompt"], row["computed"], row["generated"] = rid, prompt, computed, generated
            row["state"] = WAITING
        for row, r in zip(rows, running, strict=False):
            row["state"], row["scheduled_now"] = RUNNING, min(max(1, r[1] - r[3]), left)
            left -= row["scheduled_now"]
        header = np.zeros(1, HEADER)
        header["taken_s"] = header["step_started_s"] = now_s
        header["n_running"], header["n_rows"] = len(running), len(rows)
        yield Status(header, rows)
        now_s += factor * COST_OF_MIXED.step_seconds(
            *counts_of(rows[rows["scheduled_now"] > 0][["prompt", "computed", "scheduled_now"]].tolist())
        )
        for row, r in zip(rows, running, strict=False):
            r[3] += int(row["scheduled_now"])
            r[4] += r[3] >= r[1]
        running = [r for r in running if r[4] < r[2]]


COST_OF_MIXED = StepCost.parse("base_s=0.02,per_seq_s=2e-4,mixed.per_token_s=1e-4")
BUSY = [(40 + 37 * j % 300, 1 + 7 * j % 23) for j in range(60)]  # a queue, prompts cut into chunks, short answers
PROMPTS = [(40 + 37 * j % 300, 1) for j in range(60)]  # as a prefill engine sees them


@pytest.mark.parametrize("queue", [BUSY, PROMPTS])
@pytest.mark.parametrize("factor", [0.7, 1.0, 1.3])
def test_steps_of_a_busy_engine_count_whatever_is_computed_in_them(queue, factor):
    watch = DriftWatch(COST_OF_MIXED)
    statuses = [*in_steps(queue, factor=factor)]
    for before, after in pairwise(statuses):
        watch.step(before, after)
    assert watch.observed > 0.9 * (len(statuses) - 1)
    assert watch.ratio == pytest.approx(factor, rel=1e-6) and watch.alarm is (factor != 1.0)


@pytest.mark.parametrize("queue", [BUSY, PROMPTS])
def test_steps_that_were_missed_are_not_taken_for_one(queue):
    watch = DriftWatch(COST_OF_MIXED)
    statuses = [*in_steps(queue)]
    for apart in (2, 3, 5):
        for before, after in zip(statuses, statuses[apart:], strict=False):
            assert watch.step(before, after) is None
    assert watch.observed == 0


def test_under_asynchronous_scheduling_the_step_queued_behind_is_the_next_one():
    before, after = status({1: (100, 0), 2: (60, 0)}, waiting=1), status({2: (60, 0), 3: (70, 0)})
    before.rows["rid"][2], before.rows["computed"], after.rows["computed"] = 3, 0, 0
    before.rows["scheduled_now"], before.rows["scheduled_next"] = (100, 0, 0), (0, 60, 0)
    after.rows["scheduled_now"], after.rows["scheduled_next"] = (60, 0), (0, 70)
    before.header["step_started_s"], after.header["step_started_s"] = 1.0, 1.0 + 2 * 0.0302
    assert DriftWatch(COST_OF_MIXED).step(before, after) == pytest.approx(2)


def test_a_step_before_an_engine_idled_does_not_count():
    watch = DriftWatch(COST_OF_MIXED)
    lone, other = next(in_steps([(50, 1)])), next(in_steps([(50, 9), (60, 9)]))
    other.rows["rid"] += 7
    other.header["step_started_s"] = 9.0
    assert watch.step(lone, other) is None and watch.step(status({}), lone) is None


class Silent:
    """Publishes nothing; one stream decodes, slower than COST has it."""

    def __init__(self, index):
        self.index = index

    def status(self, now_s):
        return status({1: (10, 1 + round(now_s / 0.03))}), "ledger"


class Published:
    """An engine that shows every step for three reads of its status."""

    def __init__(self, index, statuses=None):
        self.index, self.reads = index, 0
        self.statuses = statuses or [*in_steps(BUSY * 3, factor=1.4)]

    def status(self, now_s):
        self.reads += 1
        return self.statuses[min(self.reads // 3, len(self.statuses) - 1)], "published"


@pytest.mark.parametrize(("kind", "cost"), [(Silent, COST), (Published, COST_OF_MIXED)])
def test_the_monitor_says_it_once_and_tells_prometheus(kind, cost):
    clock, said = [0.0], []
    instances = [kind(0), kind(1)]
    for each in instances:
        each.labels = {"instance": str(each.index), "role": "decode"}
    monitor = DriftMonitor(instances, cost, lambda: clock[0], time_scale=1e-9, warn=said.append)

    async def story():
        for _ in range(60):
            for instance in instances:
                await monitor.look(instance)
            clock[0] += 0.3

    asyncio.run(story())
    assert len(said) == 2 and "drift: steps of instance 0 take 1." in said[0]
    observed, ratio, alarm = monitor.families()
    assert all(s.value >= 12 for s in observed.samples) and len(observed.samples) == 2
    assert [(s.labels, s.value) for s in alarm.samples] == [(each.labels, 1) for each in instances]
    assert all(1.3 < s.value < 1.6 for s in ratio.samples)


def test_the_end_of_an_alarm_is_said_and_so_is_the_next_one():
    statuses = [each for factor in (1.4, 1.0, 1.4) for each in in_steps(BUSY, factor=factor)]
    engine, said = Published(0, statuses), []
    monitor = DriftMonitor([engine], COST_OF_MIXED, lambda: 0.0, time_scale=1e-9, warn=said.append)

    async def story():
        while engine.reads // 3 < len(statuses) - 3:
            await monitor.look(engine)

    asyncio.run(story())
    first, over, again = said
    assert "take what was calibrated again (1.00)" in over and "calibrate anew" in first and "calibrate anew" in again


class Timed:
    """Publishes each step as it begins; a read of the status takes ``poll_s``."""

    def __init__(self, clock, factor, poll_s=0.006):
        self.index, self.clock, self.poll_s = 0, clock, poll_s
        self.statuses = [*in_steps(BUSY, factor=factor)]
        self.started_s = [float(each.header["step_started_s"][0]) for each in self.statuses]

    def status(self, now_s):
        self.clock[0] += self.poll_s
        return self.statuses[bisect(self.started_s, self.clock[0]) - 1], "published"


@pytest.mark.parametrize("factor", [1.0, 4.0, 20.0, 500.0])
def test_an_engine_is_found_slow_however_slow_it_is(factor):
    clock = [0.0]
    engine = Timed(clock, factor)
    monitor = DriftMonitor([engine], COST_OF_MIXED, lambda: clock[0], time_scale=1e-9)

    async def story():
        for _ in range(20):
            await monitor.look(engine)

    asyncio.run(story())
    watch = monitor.watches[0]
    assert watch.observed >= 12 and watch.alarm is (factor > 1)
    assert watch.ratio == pytest.approx(1.0, abs=0.01) if factor == 1 else watch.ratio > 2.5
