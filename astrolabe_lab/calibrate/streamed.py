"""What a decode step takes as clients of a router see it, from one stream to all seats.

The bursts go through a router process over the engines that are calibrated, and are timed where they arrive. Their
streams begin one after another, as fast as prefill has them ready; the steps that count are those of all together.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from astrolabe_lab.calibrate.artifact import Streamed
from astrolabe_lab.calibrate.cells import STEPS, Decode, Rough
from astrolabe_lab.calibrate.fit import FLOOR, line
from astrolabe_lab.calibrate.live import LiveTarget
from astrolabe_lab.calibrate.plan import fits
from astrolabe_lab.calibrate.probe import Answer, Described, Probe
from astrolabe_lab.cost import StepCost
from astrolabe_lab.engines.cluster_file import write_cluster
from astrolabe_lab.errors import InputError
from astrolabe_lab.serve.loop_lag import between_s, told_by
from astrolabe_lab.serve.routing import RouterError, router
from astrolabe_lab.sim.config import EngineConfig

SHARE = 0.12  # of a calibration's budget
START_S = 8.0  # wall s until a router process serves
POLICY = "round_robin"  # of one engine, or one pair: the router prices nothing


@dataclass(frozen=True, slots=True)
class Streams(Decode):
    """``batch`` streams, each sent ``apart_s`` after the one before it; the earlier ones are as much longer."""

    apart_s: float = 0.0

    def probes(self, rough: Rough) -> list[Probe]:
        more = self.apart_s / rough.decoding(1)
        return [
            Probe(self.prompt_tokens, STEPS + 4 + math.ceil(more * (self.batch - 1 - j)), j * self.apart_s)
            for j in range(self.batch)
        ]

    def expected_s(self, rough: Rough) -> float:
        begun_s = 1.3 * self.batch * self.apart_s + 2 * rough.prefill(self.prompt_tokens)
        return 0.1 + begun_s + (STEPS + 4) * rough.decoding(self.batch)


def least_s(about: Described, ahead: Rough, rough: Rough, reference_tokens: int) -> float:
    """Wall seconds that ``measure_streamed`` takes at least, about."""
    cells = cells_for(about.engine, ahead, rough, reference_tokens, 0.0)
    return START_S + about.time_scale * sum(cell.expected_s(rough) for cell in cells)


def cells_for(config: EngineConfig, ahead: Rough, rough: Rough, reference_tokens: int, left_s: float) -> list[Streams]:
    """Bursts of 1, 2, 4, ... and all streams on about ``reference_tokens`` of context; on less where that takes longer
    than ``left_s`` or does not fit the engine. ``ahead``: of the engine that prefills."""
    most = config.max_num_seqs
    batches = sorted({most, *(2**k for k in range(most.bit_length()))})

    def cells(prompt_tokens: int) -> list[Streams]:
        found = [Streams(n, prompt_tokens, 1.2 * ahead.prefill(n * prompt_tokens) / n) for n in batches]
        return [cell for cell in found if fits(cell.probes(rough), config)]

    *longer, shortest = (max(4, reference_tokens * eighths // 8 - STEPS // 2) for eighths in range(8, 0, -1))
    least = cells(shortest)
    for found in map(cells, longer):
        if len(found) == len(least) and sum(cell.expected_s(rough) for cell in found) <= left_s:
            return found
    return least


def measure_streamed(
    prefill, decode, cost: StepCost, roughs: tuple[Rough, Rough], reference_tokens: int, rounds: int, left_s, rng
) -> tuple[Streamed, list[dict]]:
    """(Streamed, a row for each burst), from bursts in random order, those that fit the ``left_s()`` wall seconds left.

    ``rounds``: at most so many bursts of a size; ``cost``: prices what a context is longer or shorter than
    ``reference_tokens``; ``roughs``: of ``prefill`` and ``decode``. Raises InputError where the router does not start,
    or time is too short.
    """
    about, (ahead, rough) = decode.describe(), roughs
    rows: list[dict] = []
    with through_router(prefill, decode) as proxy:
        proxy.burst([Probe(16, 4)] * 2)  # connections, and the handshake of a first hand-off
        cells = cells_for(about.engine, ahead, rough, reference_tokens, left_s() / about.time_scale)
        before = told_by(proxy.url)
        for j in np.concatenate([rng.permutation(len(cells)) for _ in range(rounds)]):
            cell = cells[j]
            if cell.expected_s(rough) * about.time_scale > left_s():
                continue
            if row := _row(cell, proxy.burst(cell.probes(rough)), cost, reference_tokens):
                rows.append(row)
            else:  # the first stream had ended when the last one began
                cells[j] = replace(cell, apart_s=1.5 * cell.apart_s)
        late_s = between_s(before, told_by(proxy.url))
    streams, seconds = (np.array([row[name] for row in rows]) for name in ("streams", "step_s"))
    sizes = np.unique(streams).tolist()
    if len(sizes) < min(3, about.engine.max_num_seqs) or late_s is None:
        raise InputError(
            f"calibration: streams through a router could be timed in batches of {len(sizes)} sizes, and 3 are needed; "
            "give it more time (budget_s)"
        )
    best, around = line(streams - 1, seconds)
    around = [(max(0.0, low - FLOOR * b), high + FLOOR * b) for b, (low, high) in zip(best, around, strict=True)]
    return Streamed(*best, *around, tuple(sizes), len(rows), late_s), rows


def _row(cell: Streams, answers: list[Answer], cost: StepCost, reference_tokens: int) -> dict | None:
    """What a burst tells; ``step_s``: with the context of the reference."""
    if not (found := cell.read(answers, 0, 0)):
        return None
    (window,) = found
    (steps,), n = window.steps, cell.batch
    longer_s = cost.step_seconds(n, n, steps.context_tokens) - cost.step_seconds(n, n, n * reference_tokens)
    return {
        "streams": n, "steps": int(steps.times), "context_tokens": steps.context_tokens,
        "seconds": round(window.seconds, 6), "step_s": round(window.seconds / steps.times - longer_s, 7),
        "tpot_s": round(_tpot_s(answers), 7),
    }  # fmt: skip


def _tpot_s(answers: list[Answer]) -> float:
    """Seconds a token while all decode, of the median client."""
    begin, over = max(a.first_s for a in answers), min(a.last_s for a in answers)
    found = []
    for answer in answers:
        first, *_, last = np.flatnonzero((answer.times >= begin) & (answer.times <= over))
        found.append((answer.times[last] - answer.times[first]) / (answer.tokens[last] - answer.tokens[first]))
    return float(np.median(found))


@contextmanager
def through_router(prefill, decode) -> Iterator[LiveTarget]:
    """A target behind a router process over the engines of both (the same one where it does both). Raises InputError
    where the router does not start, or ends by itself."""
    about = decode.describe()
    with tempfile.TemporaryDirectory(prefix="calibration-") as folder:
        try:
            with (
                router(_words(prefill, decode, folder), folder, about.time_scale, key=False) as url,
                LiveTarget(url, about, lag=decode.lag) as target,
            ):
                yield target
        except RouterError as error:
            raise InputError(f"calibration: {error}") from None


def _words(prefill, decode, folder: str) -> list[str]:
    pools, told, about = prefill is not decode, decode.cluster, decode.describe()
    words = ["--policy", POLICY, *(["--constants-from", "paper"] if pools else [])]
    if told is not None:  # with its statuses, which are cheaper for the engines to tell than their metrics
        engines = [engine for engine in told.engines if engine["url"].rstrip("/") in (prefill.url, decode.url)]
        write_cluster(Path(folder), engines, told.config, told.cost, told.time_scale, told.model, "", told.world)
        return ["--cluster", folder, *words]
    where = ["--prefill", prefill.url, "--decode", decode.url] if pools else ["--engines", decode.url]
    return [*where, *words, "--model", about.model, "--time-scale", str(about.time_scale)]
