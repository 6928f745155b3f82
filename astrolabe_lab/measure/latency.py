"""Latencies of requests, and one summary row a run: vLLM's definitions."""

import math
import zlib
from collections.abc import Sequence

import numpy as np
import pandas as pd

from astrolabe_lab.errors import InputError

from . import prediction, regime
from .frames import NEEDED, STATUSES, listed, require_columns
from .slo import SLO, goodput

LATENCIES = ("ttft", "tpot", "e2e", "e2e_per_token")
PERCENTILES = (50, 90, 99)
KEYS = ("policy", "qps", "seed")


def summarise(results: pd.DataFrame, by: Sequence[str] = KEYS, slo: SLO | None = None) -> pd.DataFrame:
    """One row per run: requests by status, latencies, rates, preemptions, prediction error, and what kind of run it is.

    `results` is a result frame (one row per arrived request). `by` names the columns that tell runs apart;
    of the default three, those that the frame lacks are passed over, while a column asked for by name has to
    exist. Rows come in order of first appearance.

    Columns:

    - `n, ok, rejected, failed, aborted`;
    - `{ttft,tpot,e2e,e2e_per_token}_{mean,p50,p90,p99}_s` of the requests that ended well, NaN where none did;
      `itl_mean_s`, the mean gap between two tokens of a request, over all gaps;
    - `{ttft,tpot,e2e,e2e_per_token}_{p50,p90,p99}_all_s` of all requests sent: one that did not end well counts
      as infinitely late;
    - `duration_s` (first arrival to last finish); over it, of ok requests, `throughput_rps`,
      `output_tokens_per_s`, `total_tokens_per_s` (prompts too);
    - `preemptions` (of all requests) and `preempted`, the requests they befell; NaN where the frame does not tell, as
      of live engines, which do not say whom they preempted;
    - with an `slo`: `goodput_rps` and `goodput_share` (of the requests sent), and where the frame has classes
      `goodput_share_tight`, `goodput_share_loose`;
    - where latencies were predicted: `predicted`, `prediction_mae_pct`, `prediction_signed_pct`;
    - `regime`, `{ttft,tpot,e2e}_p99_third_s`, `waiting_growth_rps`, `waiting_growth_p`: whether the numbers would be
      the same of a longer run (`regime.summary`);
    - `workload`, a fingerprint of arrivals and lengths: equal where two runs can be compared request by request.

    Definitions are those of vLLM's load client (`vllm.benchmarks.serve`): TTFT = first token - arrival, E2E
    = finish - arrival, TPOT = (E2E - TTFT) / (generated tokens - 1), undefined for a request of one token
    and left out of its statistics; percentiles interpolate linearly. Per-token E2E is E2E / generated tokens
    (the normalised latency of the Orca and vLLM papers). They are worked out from the times, never read from a
    stored column.

    Raises InputError for a missing column or an unknown status.
    """
    by = [key for key in by if key in results.columns] if tuple(by) == KEYS else list(by)
    require_columns(results, (*NEEDED, *by))
    if unknown := sorted(set(results["status"].unique()) - set(STATUSES)):
        raise InputError(f"status is {listed(unknown)}; allowed are {listed(STATUSES)}")
    if not by:
        return pd.DataFrame([_measured(results, slo)])
    groups = results.groupby(by, sort=False, dropna=False)
    return pd.DataFrame([dict(zip(by, key, strict=True)) | _measured(rows, slo) for key, rows in groups])


def latencies(results: pd.DataFrame) -> pd.DataFrame:
    """Latencies in seconds of every request that ended well: `ttft_s, tpot_s, e2e_s, e2e_per_token_s`.

    TPOT is NaN for a request of one token, per-token E2E for one without any.
    """
    ok = results[results["status"] == "ok"]
    tokens = ok["generated_tokens"]
    ttft_s, e2e_s = ok["first_token_s"] - ok["arrived_s"], ok["finished_s"] - ok["arrived_s"]
    tpot_s = (e2e_s - ttft_s) / (tokens - 1).where(tokens > 1)
    per_token_s = e2e_s / tokens.where(tokens > 0)
    return pd.DataFrame({"ttft_s": ttft_s, "tpot_s": tpot_s, "e2e_s": e2e_s, "e2e_per_token_s": per_token_s})


def percentile(values: np.ndarray, marks: float | Sequence[float], missed: int = 0) -> np.ndarray:
    """The percentiles `marks` (0 .. 100) of `values` and of `missed` more that are infinite; NaN of nothing at all.

    Interpolates linearly between neighbours, as vLLM and numpy do; towards an infinite neighbour it is infinite.
    """
    marks = np.asarray(marks, float)
    if not missed:
        return np.percentile(values, marks) if len(values) else np.full(marks.shape, np.nan)
    ranks = marks / 100 * (len(values) + missed - 1)
    finite = np.percentile(values, 100 * np.clip(ranks / max(len(values) - 1, 1), 0, 1)) if len(values) else np.inf
    return np.where(ranks <= len(values) - 1, finite, np.inf)


def workload(results: pd.DataFrame) -> str:
    """A fingerprint of when requests arrived and how long they were, in the frame's order: eight hex digits."""
    crc = 0
    for name in ("arrived_s", "prompt_tokens", "output_tokens"):
        if name in results:
            crc = zlib.crc32(np.ascontiguousarray(results[name].to_numpy(np.float64)), crc)
    return f"{crc:08x}"


def _measured(results: pd.DataFrame, targets: SLO | None) -> dict[str, object]:
    counts = results["status"].value_counts()
    row = {"n": len(results)} | {status: int(counts.get(status, 0)) for status in STATUSES}
    times = latencies(results)
    for name in LATENCIES:
        values = times[f"{name}_s"].dropna().to_numpy()
        row[f"{name}_mean_s"] = values.mean() if len(values) else math.nan
        for suffix, missed in (("", 0), ("_all", row["n"] - row["ok"])):
            marks = percentile(values, PERCENTILES, missed)
            row |= {f"{name}_p{p}{suffix}_s": float(mark) for p, mark in zip(PERCENTILES, marks, strict=True)}
    ok = results[results["status"] == "ok"]
    tokens = ok["generated_tokens"]
    gaps = (tokens - 1).clip(lower=0).sum()
    row["itl_mean_s"] = (times["e2e_s"] - times["ttft_s"])[tokens > 1].sum() / gaps if gaps else math.nan
    row["duration_s"] = duration_s = results["finished_s"].max() - results["arrived_s"].min()
    rates = {"throughput_rps": row["ok"], "output_tokens_per_s": tokens.sum()}
    if "prompt_tokens" in results:
        rates["total_tokens_per_s"] = tokens.sum() + ok["prompt_tokens"].sum()
    row |= {name: count / duration_s if duration_s > 0 else math.nan for name, count in rates.items()}
    row |= {"preemptions": math.nan, "preempted": math.nan}
    if "preemptions" in results:
        row |= {"preemptions": int(results["preemptions"].sum()), "preempted": int((results["preemptions"] > 0).sum())}
    if targets is not None:
        row |= goodput(results, targets)
    if "predicted_e2e_s" in results:
        row |= prediction.summary(results)
    return row | regime.summary(results) | {"workload": workload(results)}
