"""What a run measured: one row per run from one row per request, and how sure the seeds make us."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from .errors import InputError

LATENCIES = ("ttft", "tpot", "e2e")
PERCENTILES = (50, 90, 99)
STATUSES = ("ok", "rejected", "failed", "aborted")
KEYS = ("policy", "qps", "seed")
NEEDED = ("arrived_s", "first_token_s", "finished_s", "generated_tokens", "status")


def summarise(results: pd.DataFrame, by: Sequence[str] = KEYS) -> pd.DataFrame:
    """One row per run: requests by status, latencies of those that ended well, rates, preemptions.

    `results` is a result frame (one row per arrived request). `by` names the columns that tell runs apart;
    of the default three, those that the frame lacks are passed over, while a column asked for by name has to
    exist. Rows come in order of first appearance.

    Columns: `n, ok, rejected, failed, aborted`; `{ttft,tpot,e2e}_{mean,p50,p90,p99}_s`; `duration_s` (first
    arrival to last finish), `throughput_rps` and `output_tokens_per_s` (of ok requests, over that duration),
    `preemptions` (of all requests). Latencies are NaN where no request ended well.

    Definitions are those of vLLM's load client (`vllm.benchmarks.serve`): TTFT = first token - arrival, E2E
    = finish - arrival, TPOT = (E2E - TTFT) / (generated tokens - 1), undefined for a request of one token
    and left out of its statistics; percentiles interpolate linearly. They are worked out from the times,
    never read from a stored column.

    Raises InputError for a missing column or an unknown status.
    """
    by = [key for key in by if key in results.columns] if tuple(by) == KEYS else list(by)
    require_columns(results, (*NEEDED, *by))
    if unknown := sorted(set(results["status"].unique()) - set(STATUSES)):
        raise InputError(f"status is {listed(unknown)}; allowed are {listed(STATUSES)}")
    if not by:
        return pd.DataFrame([_measured(results)])
    groups = results.groupby(by, sort=False, dropna=False)
    return pd.DataFrame([dict(zip(by, key, strict=True)) | _measured(rows) for key, rows in groups])


def latencies(results: pd.DataFrame) -> pd.DataFrame:
    """TTFT, TPOT and E2E in seconds of every request that ended well, as columns `ttft_s, tpot_s, e2e_s`."""
    ok = results[results["status"] == "ok"]
    ttft_s, e2e_s = ok["first_token_s"] - ok["arrived_s"], ok["finished_s"] - ok["arrived_s"]
    after_first = (ok["generated_tokens"] - 1).where(ok["generated_tokens"] > 1)
    return pd.DataFrame({"ttft_s": ttft_s, "tpot_s": (e2e_s - ttft_s) / after_first, "e2e_s": e2e_s})


def _measured(results: pd.DataFrame) -> dict[str, float]:
    counts = results["status"].value_counts()
    row = {"n": len(results)} | {status: int(counts.get(status, 0)) for status in STATUSES}
    times = latencies(results)
    for name in LATENCIES:
        values = times[f"{name}_s"].dropna().to_numpy()
        row[f"{name}_mean_s"] = values.mean() if len(values) else math.nan
        marks = np.percentile(values, PERCENTILES) if len(values) else [math.nan] * len(PERCENTILES)
        row |= {f"{name}_p{p}_s": mark for p, mark in zip(PERCENTILES, marks, strict=True)}
    row["duration_s"] = duration_s = results["finished_s"].max() - results["arrived_s"].min()
    tokens = results.loc[results["status"] == "ok", "generated_tokens"].sum()
    row["throughput_rps"] = row["ok"] / duration_s if duration_s > 0 else math.nan
    row["output_tokens_per_s"] = tokens / duration_s if duration_s > 0 else math.nan
    row["preemptions"] = int(results["preemptions"].sum()) if "preemptions" in results else 0
    return row


# --- how sure: intervals over seeds -----------------------------------------------------------------------


def t_quantile(probability: float, dof: int) -> float:
    """The value that Student's t with `dof` degrees of freedom stays below with `probability`.

    `dof` is a whole number >= 1. Bisects the closed form that whole degrees have (Abramowitz and
    Stegun 26.7.3-4).
    """
    if not 0 < probability < 1 or dof < 1 or dof != int(dof):
        raise InputError(f"t_quantile({probability}, {dof}): want 0 < probability < 1 and a whole dof >= 1")
    if probability < 0.5:
        return -t_quantile(1 - probability, dof)
    low, high = 0.0, math.pi / 2  # bounds of theta = atan(t / sqrt(dof)), which grows with t
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _within(middle, int(dof)) < 2 * probability - 1 else (low, middle)
    return math.sqrt(dof) * math.tan(low)


def _within(theta: float, dof: int) -> float:
    """P(|T| < sqrt(dof) tan(theta))."""
    sine, cosine, odd = math.sin(theta), math.cos(theta), dof % 2
    term, total = cosine if odd else 1.0, 0.0
    for j in range(dof // 2):  # odd: cos + 2/3 cos^3 + ..; even: 1 + 1/2 cos^2 + 1/2 3/4 cos^4 + ..
        total += term
        term *= cosine * cosine * (2 * j + 1 + odd) / (2 * j + 2 + odd)
    return 2 / math.pi * (theta + sine * total) if odd else sine * total


def t_interval(values: Iterable[float], level: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high): the mean of independent runs and the t-interval covering its true value.

    One value has no interval: low and high are NaN. NaN among the values makes all three NaN. Raises
    InputError for no value, or a level outside (0, 1).
    """
    values = np.asarray(list(values), float)
    if not 0 < level < 1:
        raise InputError(f"level={level} is outside (0, 1), e.g. 0.95")
    if not len(values):
        raise InputError("an interval needs at least one value, got none")
    mean = float(values.mean())
    if len(values) == 1:
        return mean, math.nan, math.nan
    half = t_quantile((1 + level) / 2, len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def over_seeds(
    summary: pd.DataFrame, metric: str, by: Sequence[str] = ("policy", "qps"), level: float = 0.95
) -> pd.DataFrame:
    """Mean and t-interval of `metric` over seeds, a row per point: `*by, mean, low, high, seeds`."""
    require_columns(summary, (*by, metric))
    rows = []
    for key, runs in summary.groupby(list(by), sort=False, dropna=False):
        mean, low, high = t_interval(runs[metric], level)
        rows.append((*key, mean, low, high, len(runs)))
    return pd.DataFrame(rows, columns=[*by, "mean", "low", "high", "seeds"])


def paired_difference(summary: pd.DataFrame, metric: str, baseline: str, level: float = 0.95) -> pd.DataFrame:
    """How far each policy's `metric` lies from the baseline's at the same qps and seed, with its t-interval.

    Two policies at one seed see the same arrivals and lengths, so the luck of the draw cancels in their
    difference: its interval is far narrower than what two separate intervals suggest. `clear` is True where
    it excludes zero. Columns: `policy, qps, mean, low, high, seeds, clear`. Raises InputError when the
    baseline is absent or unpaired.
    """
    require_columns(summary, ("policy", "qps", "seed", metric))
    if baseline not in (names := list(summary["policy"].unique())):
        raise InputError(f"baseline={baseline!r} is not among the policies: {listed(names)}")
    table = summary.pivot(index=["qps", "seed"], columns="policy", values=metric)
    if holes := [name for name in names if table[name].isna().any()]:
        raise InputError(f"{listed(holes)}: {metric} is missing at some qps and seed, so it cannot be paired")
    rows = []
    for name in (n for n in names if n != baseline):
        for qps, values in (table[name] - table[baseline]).groupby("qps"):
            mean, low, high = t_interval(values, level)
            rows.append((name, qps, mean, low, high, len(values), low > 0 or high < 0))
    return pd.DataFrame(rows, columns=["policy", "qps", "mean", "low", "high", "seeds", "clear"])


def best_and_undecided(summary: pd.DataFrame, metric: str, level: float = 0.95) -> pd.DataFrame:
    """At each qps the policy of the lowest mean `metric`, and those that the seeds cannot tell from it.

    Columns: `qps, best, mean, undecided` (their names, empty where the best is clear of all others).
    With one seed nothing can be told apart, so all others are undecided.
    """
    means = over_seeds(summary, metric, level=level)
    rows = []
    for qps, points in means.groupby("qps"):
        best = points.loc[points["mean"].idxmin()]
        at_qps = summary[summary["qps"] == qps]
        others = paired_difference(at_qps, metric, best["policy"], level)
        rows.append((qps, best["policy"], best["mean"], ", ".join(others.loc[~others["clear"], "policy"])))
    return pd.DataFrame(rows, columns=["qps", "best", "mean", "undecided"])


def verdicts(summary: pd.DataFrame, metric: str, baseline: str, level: float = 0.95) -> pd.DataFrame:
    """At how many rates each policy's `metric` is clearly lower than the baseline's, clearly higher, or undecided.

    Indexed by policy; `paired_difference` decides, and raises InputError.
    """
    differences = paired_difference(summary, metric, baseline, level)
    signs = np.where(differences["clear"], np.sign(differences["mean"]), 0)
    counted = differences.assign(lower=signs < 0, higher=signs > 0, undecided=signs == 0)
    return counted.groupby("policy", sort=False)[["lower", "higher", "undecided"]].sum()


def first_above(summary: pd.DataFrame, metric: str, limit: float) -> dict[str, float | str]:
    """For each policy the lowest qps at which the mean of `metric` over seeds exceeds `limit`, or "never"."""
    means = over_seeds(summary, metric)
    above = means[means["mean"] > limit].groupby("policy")["qps"].min()
    return {policy: above.get(policy, "never") for policy in means["policy"].unique()}


def beside(guesses: Mapping[str, object], measured: Mapping[str, object]) -> pd.DataFrame:
    """A table of what was guessed and what was measured, a row for each of `measured`."""
    rows = [(question, str(guesses.get(question, "-")), str(answer)) for question, answer in measured.items()]
    return pd.DataFrame(rows, columns=["question", "you guessed", "measured"]).set_index("question").rename_axis(None)


# --- what happened inside: frames for the figures ---------------------------------------------------------


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
    require_columns(step_log, ("step", "rid", "tokens"))
    lost = step_log.attrs.get("preemptions")
    lost = [] if lost is None else sorted(zip(lost["step"], lost["rid"], strict=True), reverse=True)
    prompt = dict(zip(trace["rid"], trace["prompt_tokens"], strict=True))
    computed, generated = dict.fromkeys(prompt, 0), dict.fromkeys(prompt, 0)
    redoing, kinds = set(), []
    for step, rid, tokens in zip(step_log["step"], step_log["rid"], step_log["tokens"], strict=True):
        while lost and lost[-1][0] <= step:
            victim = lost.pop()[1]
            computed[victim] = 0
            redoing.add(victim)
        kinds.append("recompute" if rid in redoing else "decode" if generated[rid] else "prefill")
        computed[rid] += tokens
        if computed[rid] == prompt[rid] + generated[rid]:
            generated[rid] += 1
            redoing.discard(rid)
    return step_log.assign(kind=kinds)


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


def require_columns(frame: pd.DataFrame, columns: Iterable[str]) -> None:
    """Raise InputError naming the `columns` that `frame` lacks and those it has."""
    if missing := [name for name in columns if name not in frame.columns]:
        raise InputError(f"frame lacks {listed(missing)}; it has {listed(frame.columns)}")


def listed(names: Iterable) -> str:
    """The names as a reader of an error message wants them: `a, b, c`, or `nothing`."""
    return ", ".join(map(str, names)) or "nothing"
