"""Pools of exact engines behind a P/D router, simulated: ``simulate_pools`` is the one entrance."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import numpy as np

from astrolabe_lab.cost import StepCost, warn_outside
from astrolabe_lab.disagg import kernel, routers
from astrolabe_lab.disagg.constants import PAPER, Constants
from astrolabe_lab.disagg.marginal_cost import MarginalCost
from astrolabe_lab.disagg.observe import look
from astrolabe_lab.disagg.services import service_of
from astrolabe_lab.disagg.settings import parse_pools
from astrolabe_lab.disagg.state import ENDED, HandOff, new_pools
from astrolabe_lab.disagg.view import IN_FLIGHT, POLLED, PoolsView, check_pair
from astrolabe_lab.errors import InputError, check_kind
from astrolabe_lab.request import Request
from astrolabe_lab.rng import stream
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.sim.engine import EngineStuckError, outcomes
from astrolabe_lab.sim.state import FAILED, FINISHED, REJECTED

SIGNALS = ("own", "leaked")


def simulate_pools(
    trace,
    policy,
    *,
    pools: str | tuple[int, int] = "2+4",
    engine: EngineConfig | tuple[EngineConfig, EngineConfig] | None = None,
    cost: StepCost | tuple[StepCost, StepCost] | None = None,
    hand_off: HandOff | None = None,
    constants: Constants | None = None,
    service: str = "exact",
    poll_s: float = 0.05,
    signals: str = "own",
    seed: int = 0,
    policy_seed: int | None = None,
    progress: Callable[[int, int], None] | None = None,
):
    """The result frame of ``trace`` routed by ``policy`` over prefill and decode pools: one row a request.

    ``trace``: a trace frame with arrival times, classes (``slo``) and, where the policy needs them,
    ``predicted_tokens``. ``policy``: an object with ``choose(request, cluster, rng)`` that returns a pair, or text for
    ``routers.parse``; a run works on a copy. ``pools``: "P+D". ``engine`` and ``cost``: one for both pools, or a pair
    (prefill, decode); the defaults are the second paper's, ``cost`` from ``PAPER``'s step cost. ``hand_off``: how KV
    caches move. ``constants``: what the router believes; default: ``calibrated``, what is true of these pools.
    ``service``: exact (vLLM's schedule), or the paper's simplifications batching and serial. ``poll_s``: how often the
    router polls the engines' occupancy (0: at each decision). ``signals="leaked"``: the router is told the true lengths
    of what is in flight, as no proxy could be, and ``MarginalCost`` counts what has streamed of them: it knows what is
    left, whatever its constants and ``progress``. ``policy_seed``: of the router's draws, where not ``seed``.

    Beside the trace's columns: prefill_instance, decode_instance, prefill_finished_s, transfer_started_s,
    transfer_finished_s, and the outcome's (``sim.engine.run_one``). Times in s. Raises InputError for a trace, policy,
    choice or setting that breaks its contract.
    """
    import pandas as pd

    from astrolabe_lab import trace as trace_module

    trace = trace_module.check(trace)
    if "arrived_s" not in trace:
        raise InputError(
            "trace: arrived_s is missing; give it arrival times with arrivals.with_arrivals(trace, qps=...)"
        )
    policy = routers.parse(policy) if isinstance(policy, str) else policy
    name = routers.spec(policy)
    _check_policy(policy, name, "predicted_tokens" in trace)
    shape = parse_pools(pools)
    hand_off = HandOff() if hand_off is None else hand_off
    check_kind("hand_off", hand_off, HandOff, "HandOff(base_s=0.04)")
    if isinstance(poll_s, bool) or not isinstance(poll_s, (int, float)) or not 0 <= poll_s < np.inf:
        raise InputError(f"poll_s={poll_s!r} must be a finite number >= 0, in s")
    if signals not in SIGNALS:
        raise InputError(f"signals={signals!r} is not one of {', '.join(SIGNALS)}")
    configs, costs = _pair("engine", engine, EngineConfig), _pair("cost", cost, StepCost)
    warn_outside(zip(configs, costs, strict=True))
    configs, hand_off = service_of(service, configs, hand_off)
    if constants is None:
        constants = calibrated(configs, costs, hand_off)
    check_kind("constants", constants, Constants, 'Constants.read("paper")')
    state = new_pools(trace, *(([c] * n, [k] * n) for c, k, n in zip(configs, costs, shape, strict=True)), hand_off)
    run = _Run(trace, policy, name, state, constants, float(poll_s), signals == "leaked")
    prompt, output = trace["prompt_tokens"].to_numpy(), trace["output_tokens"].to_numpy()
    run.never = configs[0].rejects(prompt, np.ones_like(output)) | configs[1].rejects(prompt, output)
    run.serve(stream(seed if policy_seed is None else policy_seed, "policy"), progress)
    return pd.DataFrame({**trace, **run.columns(), "source": "simulated", "policy": name, "seed": seed}, trace.index)


class _Run:
    """One run: each request arrives, is chosen a pair for, is prefilled, handed over, decoded, finishes."""

    def __init__(self, trace, policy, name, state, constants, poll_s, leak):
        self.trace = trace
        self.policy = copy.deepcopy(policy)
        if leak and isinstance(self.policy, MarginalCost):  # else wrong constants would hide what is true
            self.policy.progress = "streamed"
        self.name = name
        self.state = state
        self.poll_s = poll_s
        self.leak = leak
        self.constants = constants
        self.polled = np.zeros(len(state.prefill.engines), POLLED), np.zeros(len(state.decode.engines), POLLED)
        self.rows = np.zeros(len(trace), IN_FLIGHT)

    def serve(self, rng, progress) -> None:
        # The same draws from a generator that does not hold its seed: whoever knew that could draw the lengths' noise.
        draws = np.random.Generator(np.random.PCG64(0))
        draws.bit_generator.state = rng.bit_generator.state
        trace, state, polled = self.trace, self.state, self.polled
        sizes = len(polled[0]), len(polled[1])
        arrived = trace["arrived_s"].tolist()
        columns = [trace[name].tolist() for name in ("rid", "arrived_s", "prompt_tokens")]
        for column, default in (("predicted_tokens", 0), ("slo", "loose")):
            columns.append(trace[column].tolist() if column in trace else [default] * len(trace))
        report = max(1, len(trace) // 50)
        for r, now_s in enumerate(arrived):
            if progress and r and r % report == 0:
                progress(r, len(trace))
            if self.never[r]:
                state.decode.requests[r]["state"] = REJECTED
                state.decode.requests[r]["finished_s"] = now_s
                continue
            n = look(state, now_s, self.poll_s, self.leak, *polled, self.rows)
            view = PoolsView(now_s, *polled, self.rows[:n], self.constants)
            chosen = self.policy.choose(Request(*[column[r] for column in columns]), view, draws)
            kernel.send(state, r, *check_pair(chosen, *sizes, self.name), now_s)
        kernel.run(state, np.inf)
        if progress:
            progress(len(trace), len(trace))
        left = np.flatnonzero((state.way["phase"] != ENDED) & ~self.never)
        if left.size:
            raise EngineStuckError(f"{left.size} requests never ended; the first is row {left[0]}")

    def columns(self) -> dict[str, np.ndarray]:
        state, way = self.state, self.state.way
        requests = state.decode.requests
        outcome = outcomes(self.trace["arrived_s"].to_numpy(), state.decode)
        status = outcome.pop("status")
        outcome["preemptions"] = outcome["preemptions"] + state.prefill.requests["preemptions"]
        known = np.isin(requests["state"], (FINISHED, FAILED))
        frontend_s = np.where(known, state.prefill.engines["frontend_s"][0], 0.0)
        return {
            "prefill_instance": way["prefill"].astype(np.int64),
            "decode_instance": way["decode"].astype(np.int64),
            "prefill_finished_s": way["prefilled_s"] + frontend_s,
            "transfer_started_s": way["pull_s"].copy(),
            "transfer_finished_s": way["landed_s"].copy(),
            **outcome,
            "transfer_failed": way["failed"] > 0,
            "status": status,
        }


def calibrated(engine, cost, hand_off: HandOff | None = None, service: str = "exact") -> Constants:
    """The constants of a router that knows these pools; arguments as ``simulate_pools`` takes them.

    In the second paper's pools, whatever their decode slope, the targets are the paper's.
    """
    configs, costs = _pair("engine", engine, EngineConfig), _pair("cost", cost, StepCost)
    own = abs(costs[1].step_seconds(1, 1, 0) - PAPER.decode_step_s) < 1e-9
    configs, hand_off = service_of(service, configs, HandOff() if hand_off is None else hand_off)
    return Constants.of_world(configs, costs, hand_off, (PAPER.ttft_s, PAPER.tpot_s) if own else None)


def paper_world(decode_slope_s: float | None = None) -> tuple[EngineConfig, StepCost]:
    """An engine of the second paper's testbed: Qwen2.5-3B on an A40, 60,000 KV tokens, ``PAPER``'s step cost.

    ``decode_slope_s``: seconds that each further stream adds to a decode step, where not the paper's 0.055 ms; a
    stream alone takes as long as ever.
    """
    blocks = PAPER.kv_capacity_tokens // PAPER.block_size + 1  # vLLM keeps one
    limits = {name: getattr(PAPER, name) for name in ("max_num_seqs", "max_num_batched_tokens", "block_size")}
    constants = PAPER if decode_slope_s is None else PAPER.with_(decode_slope_s=decode_slope_s)
    return EngineConfig(**limits, num_gpu_blocks=blocks, max_model_len=32_768), constants.step_cost()


def _pair(what: str, value, kind) -> tuple:
    """(prefill, decode): the second paper's where None is given."""
    if value is None:
        value = paper_world()[kind is StepCost]
    values = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(values) != 2:
        raise InputError(f"{what}: {len(values)} given; give one for both pools, or a pair (prefill, decode)")
    for one in values:
        example = "EngineConfig(...)" if kind is EngineConfig else "StepCost.parse(...)"
        check_kind(what, one, kind, f"{example}, one for both pools, or a pair")
        if kind is EngineConfig and (one.scheduler != "v1" or one.enable_prefix_caching or one.async_scheduling):
            raise InputError(
                "engine: pools run scheduler=v1 without enable_prefix_caching and async_scheduling; leave them out"
            )
    return values


def _check_policy(policy, name: str, lengths: bool) -> None:
    if isinstance(policy, type):
        raise InputError(f"policy {policy.__name__} is a class; give an object of it: {policy.__name__}(...)")
    if not callable(getattr(policy, "choose", None)):
        raise InputError(f"policy {policy!r} has no method choose(request, cluster, rng)")
    try:
        inspect.signature(policy.choose).bind("request", "cluster", "rng")
    except TypeError as error:
        raise InputError(f"policy {name}: choose(request, cluster, rng) cannot be called so: {error}") from None
    except ValueError:
        pass  # a builtin that tells no signature
    if getattr(policy, "needs_lengths", False) and not lengths:
        raise InputError(
            f"policy {name} needs predicted lengths and the trace has no predicted_tokens: attach them with "
            "length.attach (on the command line: --lengths oracle, constant:N or noisy:REL)"
        )
