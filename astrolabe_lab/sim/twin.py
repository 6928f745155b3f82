"""Compiled twins: whole runs of the policies that large sweeps need, equal draw for draw to the policy objects.

A twin runs where the control plane is ideal and nothing fails; elsewhere, and for every other policy, the object
itself is called at each decision. Both use the same scores, the same draws and the same engines.
"""

from __future__ import annotations

import numpy as np

from astrolabe_lab.foresight import LEARNED, note_dispatch, open_prediction, settle
from astrolabe_lab.forward import ANSWER, PENDING, predict, value_of
from astrolabe_lab.objective import TTFT, Objective, objective
from astrolabe_lab.policies import Astrolabe, LeastLatency, LeastLoaded, LlumnixMinus, Random, RoundRobin, draw, scores
from astrolabe_lab.sim import kernel
from astrolabe_lab.sim.caching import look_up_newcomer
from astrolabe_lab.sim.compiled import compiled
from astrolabe_lab.sim.signals import SIGNALS, read_counts
from astrolabe_lab.sim.state import NONE
from astrolabe_lab.sim.status import write_status

KINDS = (Random, RoundRobin, LeastLoaded, LlumnixMinus, Astrolabe, LeastLatency)
RANDOM, ROUND_ROBIN, LEAST_LOADED, LLUMNIX_MINUS_A, LLUMNIX_MINUS_B, ASTROLABE, LEAST_LATENCY = range(7)
UNASKED = Objective(0)

_sample_k = compiled(draw.sample_k)
_argmin = compiled(draw.argmin_loop)
_uniform = compiled(draw.uniform)
_requests = compiled(scores.requests)
_latency = compiled(scores.latency)
_llumnix_minus_a = compiled(scores.llumnix_minus_a)
_llumnix_minus_b = compiled(scores.llumnix_minus_b)


def twin_of(policy) -> tuple[int, int, Objective, int] | None:
    """(kind, k, objective, counter or defrag) of the policy's compiled twin, or None where it has none."""
    kind = type(policy)
    if kind not in KINDS:
        return None
    if kind is Astrolabe:
        return None if callable(policy.metric) else (ASTROLABE, policy.k, objective(policy.metric), 0)
    if kind is LlumnixMinus:
        return (LLUMNIX_MINUS_A if policy.variant == "a" else LLUMNIX_MINUS_B), 0, UNASKED, int(policy.defrag)
    if kind is LeastLatency:
        return LEAST_LATENCY, 0, UNASKED, 0
    if kind is RoundRobin:
        return ROUND_ROBIN, 0, UNASKED, policy.count
    return KINDS.index(kind), 0, UNASKED, 0


@compiled
def noisy(value, common, candidate):
    return value * (1.0 + common) * (1.0 + candidate)


@compiled
def ask(
    engines, requests, running, batch, done, log, grids, pool, lists, i, t, r, metric, ask_with, pending, out
):  # fmt: skip
    """Predict request r at instance i, ready at t; out as ``predictor.predict``'s. False: it does not fit."""
    scratch, templates, header, rows, foresight, _, extension = ask_with
    write_status(engines, requests, running, batch, done, log, grids, pool, lists, i, t, header, rows)
    cached, idle = look_up_newcomer(engines, requests, pool, engines[i].pool_at, lists, i, r)
    pending[0].ready_s = t
    pending[0].prompt = requests[r].prompt
    pending[0].predicted = requests[r].predicted
    pending[0].cached = cached
    pending[0].shared = cached - idle
    return predict(scratch, templates[i : i + 1], header, rows, pending, foresight, metric, extension, out)


@compiled
def run(
    state, arrived, first, last, kind, k, asked_for, extra, rng, noise_rng, common, candidate, ask_with, leaps,
    predicted_e2e,
):  # fmt: skip
    """Dispatch requests first..last-1 in order of arrival; returns the round-robin counter. ``ask_with``: scratch
    state, templates, status header and rows, foresight and what it still waits to learn, extension rule."""
    metric, others, wait = asked_for
    foresight, opened = ask_with[4], ask_with[5]
    f = foresight[0]
    engines, requests, running, batch, done, log, grids, pool, lists = state
    n = engines.size
    signals = np.zeros(n, SIGNALS)
    pending = np.zeros(1, PENDING)
    out = np.zeros(ANSWER)
    asked = k if k > 0 else n
    values = np.empty(asked)
    e2e = np.empty(asked)
    bases = np.empty((asked, ANSWER - 5))
    for r in range(first, last):
        t = arrived[r]
        chosen = 0
        if kind == ASTROLABE:
            drawn = _sample_k(n, asked, rng)
            shared = common * noise_rng.standard_normal() if common > 0.0 else 0.0
            found = False
            if f.kind & LEARNED != 0:
                kernel.advance_all(engines, requests, running, batch, done, log, grids, pool, lists, t, leaps)
                settle(f, opened, requests)
            for j in range(asked):
                i = drawn[j]
                kernel.advance(engines, requests, running, batch, done, log, grids, pool, lists, i, t, NONE, leaps)
                fits = ask(
                    engines, requests, running, batch, done, log, grids, pool, lists,
                    i, t, r, metric, ask_with, pending, out,
                )  # fmt: skip
                own = candidate * noise_rng.standard_normal() if candidate > 0.0 else 0.0
                values[j] = np.inf
                e2e[j] = np.nan
                if fits:
                    values[j] = noisy(value_of(out, metric, others, wait), shared, own)
                    bases[j] = out[5:]
                    if metric != TTFT:
                        e2e[j] = noisy(out[1], shared, own)
                    found = True
            if found:
                j = _argmin(values, rng)
                chosen = drawn[j]
                predicted_e2e[r] = e2e[j]
                if f.kind & LEARNED != 0 and metric != TTFT:
                    open_prediction(f, opened, r, bases[j])
            else:
                chosen = _uniform(n, rng)
            if f.kind != 0:
                note_dispatch(f, t, requests[r].prompt, requests[r].predicted)
        elif kind == RANDOM:
            chosen = _uniform(n, rng)
        elif kind == ROUND_ROBIN:
            chosen = extra % n
            extra += 1
        else:
            for i in range(n):
                kernel.advance(engines, requests, running, batch, done, log, grids, pool, lists, i, t, NONE, leaps)
                read_counts(engines, requests, i, t, signals[i])
            if kind == LEAST_LOADED:
                chosen = _argmin(_requests(signals), rng)
            elif kind == LEAST_LATENCY:
                chosen = _argmin(_latency(signals, requests[r].prompt, requests[r].predicted), rng)
            elif kind == LLUMNIX_MINUS_A:
                chosen = _argmin(_llumnix_minus_a(signals), rng)
            else:
                chosen = _argmin(_llumnix_minus_b(signals, extra == 1), rng)
        kernel.advance(engines, requests, running, batch, done, log, grids, pool, lists, chosen, t, NONE, leaps)
        kernel.deliver(engines, requests, running, batch, done, log, grids, pool, lists, chosen, r, t)
    return extra
