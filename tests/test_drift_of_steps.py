"""The drift alarm: statuses of an engine as time goes by against the step cost it was calibrated to."""

import numpy as np
import pytest

from astrolabe_lab.calibrate.drift import DriftMonitor, DriftWatch
from astrolabe_lab.cost import StepCost
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


class Instance:
    def __init__(self, index):
        self.index, self.at = index, 0

    def status(self, now_s):
        return status({1: (10, 1 + round(now_s / 0.03))}), "published"


def test_the_monitor_says_it_once_and_tells_prometheus():
    clock, said = [0.0], []
    monitor = DriftMonitor([Instance(0), Instance(1)], COST, lambda: clock[0], warn=said.append)
    for _ in range(60):
        monitor.look()
        clock[0] += 0.3
    assert len(said) == 2 and "drift: steps of instance 0 take 1." in said[0]
    ratio, alarm = monitor.families()
    assert [s.value for s in alarm.samples] == [1, 1]
    assert all(1.3 < s.value < 1.6 for s in ratio.samples)
