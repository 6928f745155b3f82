"""Whether running engines still take the time they were calibrated to take."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from astrolabe_lab.cost import StepCost
from astrolabe_lab.engines.step_log import in_flight_s
from astrolabe_lab.sim.state import RUNNING
from astrolabe_lab.sim.status import HEADER, ROW, Status

POLLS_A_STEP = 4  # reads of a status while a step of the calibrated length lasts
PATIENCE_STEPS = 5  # so many times that length it is waited for


@dataclass
class DriftWatch:
    """Compares statuses of one engine as time goes by with its calibrated step cost.

    Of an engine that publishes its status, single steps count (``step``), whatever was computed in them and whoever
    waits; but no step that none follows at once, as of a prompt that a prefill engine has to itself. One that does not
    end in good time counts as what it has taken so far (``overdue``). Of an engine that does not publish, the router
    knows only what streams (``look``): between two looks, the stream that got most tokens tells how many steps there
    were. Only stretches in which the same streams decoded throughout and nobody waited count: nothing is seen where
    engines queue or compute prompts, and nothing at all of prefill engines.

    ``ratio``: median of observed over calibrated times of the last ``window`` steps or stretches; ``alarm``: it is more
    than ``tolerance`` off, with ``least`` seen; ``settled``: it is not half as far off.
    """

    cost: StepCost
    tolerance: float = 0.15
    window: int = 60
    least: int = 12
    steps_a_look: int = 8
    observed: int = 0
    _ratios: deque = field(default_factory=lambda: deque(maxlen=60), repr=False)
    _last: tuple[float, dict[int, tuple[int, int]]] | None = field(default=None, repr=False)

    def __post_init__(self):
        self._ratios = deque(maxlen=self.window)

    def look(self, status: Status, now_s: float) -> float | None:
        """Take in a status read at ``now_s`` (modelled s). Returns the ratio it adds, or None."""
        rows = status.rows[(status.rows["state"] == RUNNING)]
        decoding = {
            int(r["rid"]): (int(r["prompt"]), int(r["generated"])) for r in rows if r["computed"] >= r["prompt"]
        }
        steady = len(decoding) == len(rows) == len(status.rows) and decoding
        if not steady or self._last is None or self._last[1].keys() != decoding.keys():
            self._last = (now_s, decoding) if steady else None
            return None
        begun_s, before = self._last
        steps = max(decoding[rid][1] - before[rid][1] for rid in decoding)
        if steps < self.steps_a_look:
            return None
        self._last = (now_s, decoding)
        context = sum(prompt + (generated + before[rid][1]) / 2 - 1 for rid, (prompt, generated) in decoding.items())
        return self._add(now_s - begun_s, steps * self.cost.step_seconds(len(decoding), len(decoding), context))

    def step(self, before: Status, after: Status) -> float | None:
        """Take in the step in flight of ``before``; ``after``: a later status that the engine published. Returns the
        ratio it adds, or None where they are not of two steps in a row."""
        if not _follows(before, after):
            return None
        return self._add(_started_s(after) - _started_s(before), in_flight_s(before, self.cost))

    def overdue(self, status: Status, now_s: float) -> float:
        """Take in the step in flight of ``status``, which has not ended at ``now_s``. Returns the ratio it adds."""
        return self._add(now_s - _started_s(status), in_flight_s(status, self.cost))

    def _add(self, observed_s: float, priced_s: float) -> float:
        ratio = observed_s / priced_s
        self._ratios.append(ratio)
        self.observed += 1
        return ratio

    @property
    def ratio(self) -> float:
        """NaN before anything was observed."""
        return float(np.median(self._ratios)) if self._ratios else math.nan

    @property
    def alarm(self) -> bool:
        return len(self._ratios) >= self.least and abs(self.ratio - 1) > self.tolerance

    @property
    def settled(self) -> bool:
        return abs(self.ratio - 1) < self.tolerance / 2


def _started_s(status: Status) -> float:
    return float(status.header["step_started_s"][0])


def _follows(before: Status, after: Status) -> bool:
    """Whether ``after`` shows the very next step after that of ``before``, begun as that one ended.

    Who runs on must have computed what ``before`` scheduled and no more, and whose prompt was not done must run on. And
    somebody must tell that the engine did not idle in between: one who runs on, or the first who was not in the step,
    whose turn was then.
    """
    now = {int(row["rid"]): row for row in after.rows if row["state"] == RUNNING}
    ran = before.rows[before.rows["scheduled_now"] > 0]
    witnesses = []
    for row in ran:
        computed = row["computed"] + row["scheduled_now"]
        if (later := now.get(int(row["rid"]))) is not None:
            witnesses.append(later)
        if computed < row["prompt"] if later is None else later["computed"] != computed:
            return False
    for row in before.rows[before.rows["scheduled_now"] == 0][:1]:
        if (later := now.get(int(row["rid"]))) is not None and later["computed"] == row["computed"]:
            witnesses.append(later)
    return len(ran) > 0 and any(row["scheduled_now"] > 0 for row in witnesses)


class DriftMonitor:
    """A DriftWatch for each of a router's instances; ``run`` looks every ``every_s`` modelled s, until cancelled."""

    def __init__(self, instances, cost: StepCost, now_s, time_scale: float = 1.0, every_s: float = 0.25, warn=None):
        self.watches = {instance.index: DriftWatch(cost) for instance in instances}
        self._instances, self._now_s, self._scale, self._every_s = instances, now_s, time_scale, every_s
        self._warn = warn or (lambda line: None)
        self._told: set[int] = set()

    async def look(self, instance) -> None:
        """One look at an instance, which waits for a step of an engine that publishes. An alarm is said aloud once, and
        once more when it is over."""
        now_s = self._now_s()
        status, source = instance.status(now_s)
        watch = self.watches[instance.index]
        if source == "published":
            # Not the step that is met: a long one is met more often than a short one.
            before = await self._next(instance, status)
            after = before and await self._next(instance, before)
            if after:
                watch.step(before, after)
        else:
            watch.look(status, now_s)
        if watch.alarm and instance.index not in self._told:
            self._told.add(instance.index)
            self._warn(
                f"drift: steps of instance {instance.index} take {watch.ratio:.2f} times what was calibrated; "
                "calibrate anew (astrolabe calibrate)"
            )
        elif watch.settled and instance.index in self._told:
            self._told.remove(instance.index)
            self._warn(f"drift: steps of instance {instance.index} take what was calibrated again ({watch.ratio:.2f})")

    async def _next(self, instance, status: Status) -> Status | None:
        """What the instance publishes of the next step; None where it idles or the step is overdue."""
        watch = self.watches[instance.index]
        poll_s = in_flight_s(status, watch.cost) / POLLS_A_STEP
        if not poll_s:
            return None
        for _ in range(PATIENCE_STEPS * POLLS_A_STEP):
            await asyncio.sleep(poll_s * self._scale)
            found, source = instance.status(self._now_s())
            if source != "published":
                return None
            if _started_s(found) != _started_s(status):
                return found
        watch.overdue(status, self._now_s())
        return None

    async def run(self) -> None:
        await asyncio.gather(*(self._watch(instance) for instance in self._instances))

    async def _watch(self, instance) -> None:
        while True:
            await self.look(instance)
            await asyncio.sleep(self._every_s * self._scale)

    def families(self):
        """Prometheus families: how much was observed of every instance, its ratio where anything was, its alarm."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        names = list(self._instances[0].labels)
        observed = CounterMetricFamily(
            "astrolabe_step_drift_observed", "Steps or stretches compared with the calibration", labels=names
        )
        ratio = GaugeMetricFamily("astrolabe_step_drift_ratio", "Observed over calibrated step time", labels=names)
        alarm = GaugeMetricFamily("astrolabe_step_drift_alarm", "1: the calibration no longer holds", labels=names)
        for instance in self._instances:
            watch, labels = self.watches[instance.index], list(instance.labels.values())
            observed.add_metric(labels, watch.observed)
            if watch.observed:
                ratio.add_metric(labels, watch.ratio)
            alarm.add_metric(labels, int(watch.alarm))
        return observed, ratio, alarm


def looks_until_alarm(cost: StepCost, slower: float, config, most: int = 400, every_s: float = 0.25) -> int | None:
    """After how many looks the alarm is raised for an engine that decodes with half its seats, each step ``slower``
    times as long as ``cost`` says; None where ``most`` looks raise none."""
    watch, streams, prompt = DriftWatch(cost), max(1, config.max_num_seqs // 2), 64
    now_s, generated, look_s = 0.0, 1, 0.0
    for look in range(1, most + 1):
        look_s += every_s
        while now_s < look_s:
            now_s += slower * cost.step_seconds(streams, streams, streams * (prompt + generated - 1))
            generated += 1
        watch.look(_decoding(streams, prompt, generated), now_s)
        if watch.alarm:
            return look
    return None


def _decoding(streams: int, prompt: int, generated: int) -> Status:
    """The status of an engine in which so many equal streams decode."""
    rows = np.zeros(streams, ROW)
    rows["rid"], rows["state"] = np.arange(streams), RUNNING
    rows["prompt"], rows["generated"], rows["computed"] = prompt, generated, prompt + generated - 1
    header = np.zeros(1, HEADER)
    header["n_running"] = header["n_rows"] = streams
    return Status(header, rows)
