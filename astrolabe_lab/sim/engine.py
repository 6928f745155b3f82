"""One engine, run to the end: what notebooks look at step by step and what vLLM's own scheduler is compared with."""

from __future__ import annotations

import numpy as np

from astrolabe_lab.cost import StepCost, warn_outside
from astrolabe_lab.errors import InputError, check_kind
from astrolabe_lab.sim import kernel
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.sim.prefixes import with_pools
from astrolabe_lab.sim.state import FINISHED, INBOX, NONE, REJECTED, RUNNING, WAITING, State, new_state

__all__ = ["EngineConfig", "run_one", "load_requests", "EngineStuckError"]


MOST_LOG_ROWS = 50_000_000  # 3 GB


class EngineStuckError(RuntimeError):
    """The engine can make no progress: a defect of the engine, never of the input."""


def load_requests(state: State, prompt, output, predicted=None) -> None:
    """Write token counts (arrays, one value a request) into the state's unborn requests."""
    state.requests["prompt"] = prompt
    state.requests["output"] = output
    state.requests["predicted"] = 0 if predicted is None else predicted


def check_progress(state: State) -> None:
    """Raise EngineStuckError when an engine found nothing to schedule though requests were waiting, and InputError
    when requests have no end because their times are past what a float holds."""
    stuck = np.flatnonzero(state.engines["stuck"])
    if stuck.size:
        raise EngineStuckError(f"engine {stuck[0]} has requests waiting, none running, and cannot admit any")
    if np.isin(state.requests["state"], (INBOX, WAITING, RUNNING)).any():
        raise InputError("times grow past what a float can hold: give smaller step costs, delays or slowdowns")


def run_one(trace, config: EngineConfig = EngineConfig(), cost=None, log: bool = True, leaps: bool = False):
    """Results and step log of one engine that serves ``trace`` alone, to the last request.

    ``trace``: a trace frame (rid, arrived_s, prompt_tokens, output_tokens). ``cost``: a StepCost (default: the preset
    llama2-7b-a30's). Returns ``(results, steps)``: results has one row a request (rid, arrived_s, prompt_tokens,
    output_tokens, first_token_s, finished_s, ttft_s, tpot_s, e2e_s, generated_tokens, preemptions, with prefix caching
    cached_tokens (found at all its admissions), and status); steps has
    one row a scheduled request and step (step, start_s, end_s, rid, tokens), in scheduling order. ``steps.attrs`` holds
    two more frames: ``preemptions`` (step, rid) and ``steps`` (step, start_s, end_s, free_blocks, running, waiting).
    With ``log=False`` steps is None. ``leaps`` turns on leaps over decode-only stretches, which a log cannot show.
    Raises InputError for a trace that breaks the contract.
    """
    import pandas as pd

    from astrolabe_lab import trace as trace_module

    trace = trace_module.check(trace)
    if log and leaps:
        raise InputError("run_one: a step log needs every step; choose log=False or leaps=False")
    if cost is None:
        from astrolabe_lab.cost import preset

        cost = preset("llama2-7b-a30").cost
    check_kind("config", config, EngineConfig, "EngineConfig(...)")
    check_kind("cost", cost, StepCost, "StepCost.parse(...)")
    warn_outside([(config, cost)])
    prompt = trace["prompt_tokens"].to_numpy()
    output = trace["output_tokens"].to_numpy()
    served = ~config.rejects(prompt, output)
    rows = int((output + prompt // config.max_num_batched_tokens + 4)[served].sum()) if log else 0
    if rows > MOST_LOG_ROWS:
        raise InputError(
            f"run_one: the step log would have about {rows:,} rows, one a request and step, and may have "
            f"{MOST_LOG_ROWS:,}; give fewer or shorter requests, or log=False"
        )
    while True:
        state = with_pools(new_state([config], [cost], len(trace), log_rows=rows), trace)
        load_requests(state, prompt, output)
        for r, ready_s in enumerate(trace["arrived_s"].to_numpy()):
            kernel.deliver(*state, 0, r, ready_s)
        kernel.advance(*state, 0, np.inf, NONE, leaps)
        check_progress(state)
        if state.engines["log_rows"][0] <= rows or not log:
            break
        rows = int(state.engines["log_rows"][0])  # preemptions made more steps than estimated
    given = {name: trace[name] for name in ("rid", "arrived_s", "prompt_tokens", "output_tokens")}
    results = pd.DataFrame(given | outcomes(trace["arrived_s"].to_numpy(), state))
    if not log:
        return results, None
    rids = trace["rid"].to_numpy()
    raw = pd.DataFrame(state.log[: int(state.engines["log_rows"][0])])
    raw["rid"] = rids[raw["request"].to_numpy()]
    steps = raw.loc[raw["tokens"] > 0, ["step", "start_s", "end_s", "rid", "tokens"]].reset_index(drop=True)
    steps.attrs["preemptions"] = raw.loc[raw["tokens"] == 0, ["step", "rid"]].reset_index(drop=True)
    columns = ["step", "start_s", "end_s", "free_blocks", "running", "waiting"]
    steps.attrs["steps"] = raw.loc[raw["tokens"] > 0, columns].drop_duplicates("step").reset_index(drop=True)
    return results, steps


def outcomes(arrived_s, state: State) -> dict[str, np.ndarray]:
    """The outcome columns of every request (see ``run_one``), in the state's order; NaN where there is no outcome.

    Times are the client's: ``frontend_s`` after the steps'. What routers know is the engines': their ledgers hear of an
    end when its step ends.
    """
    q = state.requests
    ok = q["state"] == FINISHED
    generated = q["generated"].astype(np.int64)
    frontend_s = np.where(ok, state.engines["frontend_s"][q["instance"]], 0.0)
    first_token_s = np.where(ok, q["first_token_s"], np.nan) + frontend_s
    finished_s = q["finished_s"] + frontend_s
    tpot_s = np.full(len(q), np.nan)
    several = ok & (generated > 1)
    tpot_s[several] = (finished_s[several] - first_token_s[several]) / (generated[several] - 1)
    status = np.full(len(q), "failed", dtype=object)
    status[ok] = "ok"
    status[q["state"] == REJECTED] = "rejected"
    return {
        "first_token_s": first_token_s,
        "finished_s": finished_s,
        "ttft_s": first_token_s - arrived_s,
        "tpot_s": tpot_s,
        "e2e_s": np.where(ok, finished_s - arrived_s, np.nan),
        "generated_tokens": generated,
        "preemptions": q["preemptions"].astype(np.int64),
        **({"cached_tokens": q["reused"].astype(np.int64)} if state.engines["caching"].any() else {}),
        "status": status,
    }
