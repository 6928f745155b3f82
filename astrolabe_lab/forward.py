"""One prediction in compiled code: the engine, rebuilt from its status, runs forward until the newcomer has finished.

``predict`` is what the Predictor, the simulated router and the compiled twins call.
"""

from __future__ import annotations

import numpy as np

from astrolabe_lab.foresight import ARRIVALS, FEATURES, LEARNED, MOST, correction, describe, lengths_of, spacing_s
from astrolabe_lab.objective import ADDED_DELAY, TPOT, TTFT
from astrolabe_lab.sim import kernel
from astrolabe_lab.sim.compiled import compiled
from astrolabe_lab.sim.restore import assumed_output, restore
from astrolabe_lab.sim.state import FINISHED, INBOX, NONE, RUNNING, WAITING

AT_ONCE = 16  # assumed arrivals handed over at a time
ANSWER = 6 + FEATURES  # numbers: TTFT, E2E, TPOT, (scratch), added delay; simulated decode time and its features

PENDING = np.dtype(
    [
        ("ready_s", "f8"),
        ("prompt", "i4"),
        ("predicted", "i4"),
        ("cached", "i4"),  # its leading blocks that the engine has in its cache
        ("shared", "i4"),  # of these, those that a running request holds
    ],
    align=True,
)


@compiled
def place(engines, requests, running, batch, done, log, grids, pool, lists, r, prompt, predicted, output, ready_s):
    """Make r a request that nobody has seen yet, and hand it to the engine. False: it can never run."""
    q = requests[r]
    q.prompt = prompt
    q.predicted = predicted
    q.output = output
    q.computed = 0
    q.generated = 0
    q.placeholders = 0
    q.in_flight = 0
    q.stale = 0
    q.blocks = 0
    q.cached = 0
    q.shared = 0
    q.preemptions = 0
    q.router = 0
    q.first_token_s = np.nan
    q.finished_s = np.nan
    return kernel.deliver(engines, requests, running, batch, done, log, grids, pool, lists, 0, r, ready_s)


@compiled
def advance_among(engines, requests, running, batch, done, log, grids, pool, lists, f, start_s, first, target):
    """Run the engine while more requests arrive, from start_s on, as foresight f expects; they are handed over in time,
    a few at once. Ends when ``target`` has finished, or with none, all requests before ``first`` have."""
    gap_s = spacing_s(f, start_s)
    most = MOST if gap_s < np.inf else 0
    m = 0
    while m < most and engines[0].stuck == 0:
        for _ in range(min(AT_ONCE, most - m)):
            prompt, output = lengths_of(f, m)
            until_s = start_s + (m + 0.5) * gap_s
            r = first + m
            place(engines, requests, running, batch, done, log, grids, pool, lists, r, prompt, output, output, until_s)
            m += 1
        kernel.advance(engines, requests, running, batch, done, log, grids, pool, lists, 0, until_s, target, True)
        if target != NONE:
            if requests[target].state == FINISHED:
                return
            continue
        unfinished = False
        for r in range(first):
            unfinished |= requests[r].state in (INBOX, WAITING, RUNNING)
        if not unfinished:
            return
    kernel.advance(engines, requests, running, batch, done, log, grids, pool, lists, 0, np.inf, target, True)


@compiled
def forward(scratch, template, header, rows, pending, newcomer, foresight, metric, extension, out):
    """Simulate forward until the newcomer (``pending[newcomer]``, or -1 for none) has finished.

    Writes (ttft, e2e, tpot) of the newcomer, in s from its ready time, to out[:3], and the summed finish times of all
    others known to out[3] when the metric asks for them. Returns False when the newcomer does not fit.
    """
    engines, requests, running, batch, done, log, grids, pool, lists = scratch
    restore(engines, requests, running, batch, grids, template, header, rows, extension)
    n = header[0].n_rows
    target = NONE
    known = n + pending.size - (1 if newcomer < 0 else 0)
    for r in range(n, known):
        p = r - n
        prompt = pending[p].prompt
        predicted = pending[p].predicted
        output = max(predicted, 1)
        if p != newcomer:
            output = assumed_output(engines[0], prompt, 0, predicted, extension)
        at_s = pending[p].ready_s
        fits = place(
            engines, requests, running, batch, done, log, grids, pool, lists, r, prompt, predicted, output, at_s
        )
        requests[r].cached = pending[p].cached
        requests[r].shared = pending[p].shared
        requests[r].kept_until = pending[p].shared - pending[p].cached
        if p == newcomer:
            if not fits:
                return False
            target = r
            if metric == TTFT:
                requests[r].output = 1  # what follows its first token does not change when that comes
    until = NONE if metric == ADDED_DELAY else target
    f = foresight[0]
    at_s = pending[pending.size - 1].ready_s
    advance_among(engines, requests, running, batch, done, log, grids, pool, lists, f, at_s, known, until)
    if engines[0].stuck == 1:
        return False
    total = 0.0
    if metric == ADDED_DELAY:
        for r in range(known):
            if requests[r].state == FINISHED and r != target:
                total += requests[r].finished_s
    out[3] = total
    if target != NONE:
        q = requests[target]
        ready_s = pending[newcomer].ready_s
        frontend_s = engines[0].frontend_s
        out[0] = q.first_token_s + frontend_s - ready_s
        out[1] = q.finished_s + frontend_s - ready_s
        out[2] = (q.finished_s - q.first_token_s) / (q.output - 1) if q.output > 1 else 0.0
    return True


@compiled
def predict(scratch, template, header, rows, pending, foresight, metric, extension, out):
    """Predict for the newcomer, the last of ``pending``; ``out`` (ANSWER numbers) gets its times in s from its ready
    time. Returns False when it does not fit. The scratch state needs room for all rows, pending and MOST."""
    newcomer = pending.size - 1
    if not forward(scratch, template, header, rows, pending, newcomer, foresight, metric, extension, out):
        return False
    if metric == ADDED_DELAY:
        others_with = out[3]
        ttft, e2e, tpot = out[0], out[1], out[2]
        forward(scratch, template, header, rows, pending, -1, foresight, metric, extension, out)
        out[4] = e2e + others_with - out[3]
        out[0], out[1], out[2] = ttft, e2e, tpot
    if foresight[0].kind & LEARNED != 0 and metric != TTFT:
        decode_s = out[1] - out[0]
        out[5] = decode_s
        describe(out[6:], header[0].n_rows + pending.size, template[0].max_num_seqs, decode_s)
        factor = correction(foresight[0], out[6:])
        out[1] = out[0] + decode_s * factor
        out[2] *= factor
        out[4] += out[1] - out[0] - decode_s
    return True


@compiled
def value_of(out, code, others, wait):
    """The number that an Objective (code, others, wait) compares; ``out`` as predict() fills it."""
    if code == TTFT:
        return out[0]
    if code == TPOT:
        return out[2]
    if code == ADDED_DELAY:
        shared = out[4] if others == 1.0 else out[1] + others * (out[4] - out[1])
        return shared + wait * out[0]
    return out[1]


def room_ahead(foresight: np.ndarray) -> int:
    """Requests of a scratch state that a prediction with this foresight needs beyond those it knows."""
    return MOST if foresight["kind"][0] & ARRIVALS else 0
