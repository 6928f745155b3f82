"""What happened inside a run: frames for the figures of queues and schedules."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pandas as pd

from astrolabe_lab.errors import InputError

from .frames import NEEDED, require_columns


def queue_lengths(results: pd.DataFrame, moments: int = 200) -> pd.DataFrame:
    """How many requests each instance held at evenly spaced moments.

    Columns `t_s, instance, waiting, decoding` (and `policy` where the frame has one). `waiting`: arrived and
    sent there, no first token yet (queued or prefilling); `decoding`: first token out, not finished.
    Rejected requests held no place. Moments run from the first arrival to the last finish, the same for
    every policy, so that frames compare.
    """
    require_columns(results, ("instance", *NEEDED))
    if moments < 2:
        raise InputError(f"moments={moments} is too few for a film: use 2 or more")
    held = results[results["finished_s"].notna() & (results["status"] != "rejected")]
    if held.empty:
        raise InputError("no request of this frame was held by an instance, so there are no queues to show")
    times = np.linspace(held["arrived_s"].min(), held["finished_s"].max(), moments)
    keys = ["policy", "instance"] if "policy" in held else ["instance"]
    parts = []
    for key, rows in held.groupby(keys, sort=False):
        arrived, finished = np.sort(rows["arrived_s"]), np.sort(rows["finished_s"])
        first = np.sort(rows["first_token_s"].fillna(rows["finished_s"]))
        came, began, left = (np.searchsorted(edge, times, side="right") for edge in (arrived, first, finished))
        labels = dict(zip(keys, key, strict=True))
        parts.append(pd.DataFrame(labels | {"t_s": times, "waiting": came - began, "decoding": began - left}))
    return pd.concat(parts, ignore_index=True)


def step_kinds(step_log: pd.DataFrame, trace: pd.DataFrame) -> pd.DataFrame:
    """The step log with a column `kind`: prefill, decode, or recompute (what a preemption threw away).

    A step that computes all that is left of a request yields its next token. `step_log` is the engine's
    (`step, start_s, end_s, rid, tokens`; preemptions in `attrs`), `trace` gives `rid, prompt_tokens`.
    """
    return step_log.assign(kind=[kind for kind, _ in walk(step_log, trace)])


def walk(step_log: pd.DataFrame, trace: pd.DataFrame) -> Iterator[tuple[str, bool]]:
    """(kind, whether the request's next token came of it) of each row of a step log, in its order."""
    require_columns(step_log, ("step", "rid", "tokens"))
    lost = step_log.attrs.get("preemptions")
    lost = [] if lost is None else sorted(zip(lost["step"], lost["rid"], strict=True), reverse=True)
    prompt = dict(zip(trace["rid"], trace["prompt_tokens"], strict=True))
    computed, generated = dict.fromkeys(prompt, 0), dict.fromkeys(prompt, 0)
    redoing = set()
    for step, rid, tokens in zip(step_log["step"], step_log["rid"], step_log["tokens"], strict=True):
        while lost and lost[-1][0] <= step:
            victim = lost.pop()[1]
            computed[victim] = 0
            redoing.add(victim)
        kind = "recompute" if rid in redoing else "decode" if generated[rid] else "prefill"
        computed[rid] += tokens
        if emits := computed[rid] == prompt[rid] + generated[rid]:
            generated[rid] += 1
            redoing.discard(rid)
        yield kind, emits


def schedule_differences(ours: pd.DataFrame, theirs: pd.DataFrame) -> dict[str, int]:
    """How many steps and preemptions of two step logs differ, and how many `theirs` has.

    A step differs when its requests, their order or their token counts do, or when one log lacks it; a
    preemption when its step or victim does. Returns `steps, different_steps, preemptions,
    different_preemptions`.
    """
    steps, lost = [], []
    for log in (ours, theirs):
        rows = zip(log["step"], log["rid"], log["tokens"], strict=True)
        scheduled: dict[int, list] = {}
        for step, rid, tokens in rows:
            scheduled.setdefault(step, []).append((rid, tokens))
        steps.append(scheduled)
        victims = log.attrs["preemptions"]
        lost.append(Counter(zip(victims["step"], victims["rid"], strict=True)))
    return {
        "steps": len(steps[1]),
        "different_steps": sum(steps[0].get(n) != steps[1].get(n) for n in steps[0].keys() | steps[1].keys()),
        "preemptions": lost[1].total(),
        "different_preemptions": (lost[0] - lost[1]).total() + (lost[1] - lost[0]).total(),
    }
