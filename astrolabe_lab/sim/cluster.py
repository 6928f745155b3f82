"""A cluster of engines behind a router: arrive, choose, batch, finish, in simulated time."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from astrolabe_lab import policies
from astrolabe_lab.cost import StepCost
from astrolabe_lab.errors import InputError
from astrolabe_lab.predictor import (
    ADDED_DELAY,
    E2E,
    EXTENSION_TOKENS,
    METRICS,
    PENDING,
    TTFT,
    check_extension,
    predict,
)
from astrolabe_lab.request import Request
from astrolabe_lab.rng import stream
from astrolabe_lab.sim import kernel, twin, view
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.sim.engine import check_progress, load_requests, outcomes
from astrolabe_lab.sim.observe import observe, reveal
from astrolabe_lab.sim.signals import SIGNALS, read_signals
from astrolabe_lab.sim.state import ENGINE, FAILED, NONE, configure, new_state
from astrolabe_lab.sim.status import HEADER, ROW, write_status
from astrolabe_lab.sim.world import ControlPlane, LatencyNoise, Outage, Slowdown

# At one instant: ends of faults before starts, so that one may follow another at once, then requests on their way.
END, START, DISPATCH, ARRIVE, RETRY = range(5)

MOST = 100_000  # instances
CHUNK = 500  # requests dispatched between two chances for Ctrl-C: compiled code sees none

ATTACH = "attach them with length.attach (on the command line: --lengths oracle, constant:N or noisy:REL)"

__all__ = ["ControlPlane", "LatencyNoise", "Outage", "Slowdown", "simulate"]


def simulate(
    trace,
    policy,
    *,
    instances: int = 12,
    engine: EngineConfig | Sequence[EngineConfig] | None = None,
    cost=None,
    predictor_cost=None,
    control: ControlPlane = ControlPlane(),
    faults: Sequence[Outage | Slowdown] = (),
    seed: int = 0,
    latency_noise: LatencyNoise = LatencyNoise(),
    extension_tokens: int = EXTENSION_TOKENS,
    compiled: bool | None = None,
    leaps: bool = True,
    progress: Callable[[int, int], None] | None = None,
):
    """The result frame of ``trace`` dispatched by ``policy`` over a simulated cluster: one row a request.

    ``trace``: a trace frame with arrival times, and ``predicted_tokens`` where the policy needs them. ``policy``: an
    object with ``choose(request, cluster, rng)``, or text for ``policies.parse``; a run works on a copy. ``engine``,
    ``cost`` (a StepCost) and ``predictor_cost`` (what the Predictors believe; default: the truth) are one for all
    ``instances``, or a sequence of one each; engine and cost default to the preset llama2-7b-a30.
    ``compiled``: True demands the policy's compiled twin, False forbids it, None takes it where there is one; the
    outcome is the same. ``leaps=False`` single-steps the engines, with the same outcome. ``progress`` is called with
    (requests dispatched, requests in all). Times are in s; ``decision_s`` is the modelled delay of the decision.
    Raises InputError for a trace, policy, choice or setting that breaks its contract.
    """
    from astrolabe_lab import trace as trace_module

    trace = trace_module.check(trace)
    if "arrived_s" not in trace:
        raise InputError(
            "trace: arrived_s is missing; give it arrival times with arrivals.with_arrivals(trace, qps=...)"
        )
    if isinstance(policy, str):
        policy = policies.parse(policy)
    if not isinstance(control, ControlPlane):
        raise InputError(f"control={control!r} is no ControlPlane; write control=ControlPlane(status_interval_s=0.1)")
    if not isinstance(latency_noise, LatencyNoise):
        raise InputError(f"latency_noise={latency_noise!r} is no LatencyNoise; write LatencyNoise(common=0.3)")
    check_extension(extension_tokens)
    run = _Run(
        trace,
        policy,
        _engines(instances, engine, cost, predictor_cost),
        control,
        faults,
        seed,
        latency_noise,
        extension_tokens,
        leaps,
    )
    name = policies.spec(policy)
    has_twin = twin.twin_of(policy) is not None and control.ideal and not faults
    if compiled and not has_twin:
        raise InputError(f"policy {name}: no compiled twin under these settings; leave compiled=None")
    try:
        if has_twin and compiled is not False:
            run.compiled(progress)
        else:
            run.decide_all(progress)
    finally:
        view.forget(run.number)
    return run.frame(name, seed)


def _engines(instances, engine, cost, predictor_cost):
    """(configs, costs, predictor costs), one an instance."""
    if isinstance(instances, bool) or not isinstance(instances, (int, np.integer)) or not 1 <= instances <= MOST:
        raise InputError(f"instances={instances!r} must be a whole number >= 1, at most {MOST:,}")
    if engine is None or cost is None:
        from astrolabe_lab.cost import preset

        default = preset("llama2-7b-a30")
        engine = EngineConfig.from_dict(default.engine) if engine is None else engine
        cost = default.cost if cost is None else cost
    spread = []
    for what, value in (("engine", engine), ("cost", cost), ("predictor_cost", predictor_cost)):
        if value is None:
            value = spread[1]
        values = list(value) if isinstance(value, (list, tuple)) else [value] * instances
        kind, example = (EngineConfig, "EngineConfig()") if what == "engine" else (StepCost, "StepCost.parse(...)")
        for wrong in (v for v in values if not isinstance(v, kind)):
            raise InputError(f"{what}: {wrong!r} is no {kind.__name__}; give one for all, or one each: {example}")
        if len(values) != instances:
            raise InputError(f"{what}: {len(values)} given for {instances} instances; give one for all, or one each")
        spread.append(values)
    return spread


class _Router:
    """One router: its policy, its random stream and its view."""

    def __init__(self, policy, rng, number):
        self.policy = copy.deepcopy(policy)
        # The same draws from a generator that does not hold its seed: whoever knew that could draw the lengths' noise.
        self.rng = np.random.Generator(np.random.PCG64(0))
        self.rng.bit_generator.state = rng.bit_generator.state
        self.view = view.ClusterView(number)


class _Run:
    """One run. The policy sees ``_Router.view`` and a ``Request``, nothing else."""

    def __init__(self, trace, policy, engines, control, faults, seed, noise, extension, leaps):
        configs, costs, predictor_costs = engines
        control = replace(control, routers=min(control.routers, len(trace)))  # more would get no request
        n = len(configs)
        if isinstance(policy, type):
            raise InputError(f"policy {policy.__name__} is a class; give an object of it: {policy.__name__}(...)")
        if not callable(getattr(policy, "choose", None)):
            raise InputError(f"policy {policy!r} has no method choose(request, cluster, rng)")
        if getattr(policy, "needs_lengths", False) and "predicted_tokens" not in trace:
            raise InputError(
                f"policy {policies.spec(policy)} needs predicted lengths and the trace has no predicted_tokens: "
                f"{ATTACH}"
            )
        if isinstance(policy, policies.Astrolabe) and policy.k > n:
            raise InputError(
                f"policy {policies.spec(policy)}: k={policy.k} is outside 1..{n} (the cluster has {n} instances)"
            )
        self.trace = trace
        self.policy = policy
        self.name = policies.spec(policy)
        self.arrived = trace["arrived_s"].to_numpy(dtype=np.float64)
        self.state = new_state(configs, [c.array for c in costs], len(trace), control.routers)
        predicted = trace["predicted_tokens"].to_numpy() if "predicted_tokens" in trace else None
        load_requests(self.state, trace["prompt_tokens"].to_numpy(), trace["output_tokens"].to_numpy(), predicted)
        self.state.requests["router"] = np.arange(len(trace)) % control.routers
        self.templates = np.zeros(n, ENGINE)
        for template, config, believed in zip(self.templates, configs, predictor_costs, strict=True):
            configure(template, config, believed.array)
        self.configs = configs
        self.scratch = new_state(configs[:1], [costs[0].array], 256)._replace(
            running=np.zeros((1, self.state.running.shape[1]), np.uint32),
            batch=np.zeros_like(self.state.batch[:1]),
        )
        self.control = control
        self.noise = noise
        self.extension = extension
        self.leaps = leaps
        self.noise_rng = stream(seed, "noise")
        self.delay_rng = stream(seed, "delays")
        self.number = view.register(self.answer)
        self.routers = [
            _Router(policy, stream(seed, "policy" if j == 0 else f"policy/{j}"), self.number)
            for j in range(control.routers)
        ]
        self.sent = np.zeros((n, control.routers, 2), np.int64)
        self.predicted_e2e = np.full(len(trace), np.nan)
        self.decision_s = np.full(len(trace), float(control.tag_s))
        # what the routers know
        self.base = np.zeros(n, SIGNALS)
        self.taken_s = np.zeros(n)
        self.reachable = np.ones(n, np.bool_)
        self.shown = np.zeros(n, SIGNALS)
        self.statuses: list = [None] * n  # (header, rows) where the current state cannot be read
        self.refreshed_s = -np.inf
        self.unseen: list[list[list]] = [[[] for _ in range(n)] for _ in range(control.routers)]
        # faults
        self.down: dict[int, Outage] = {}
        self.paused: set[int] = set()
        # what happens between arrivals, as a heap of (time, (rank, sequence), action, arguments)
        self.events: list = []
        self.sequence = 0
        self._plan(faults, n)
        self._set_healthy(tuple(range(n)))
        self.header = np.zeros(1, HEADER)
        self.rows = np.zeros(256, ROW)
        self.out = np.zeros(5)

    @staticmethod
    def _known(trace) -> list[tuple]:
        """What a router may know of each request, in the order of ``Request``'s fields."""
        columns = [trace[name].tolist() for name in ("rid", "arrived_s", "prompt_tokens")]
        for name, default in (("predicted_tokens", 0), ("slo", "loose"), ("prefix_blocks", ())):
            columns.append(trace[name].tolist() if name in trace else [default] * len(trace))
        return [(*row[:-1], tuple(row[-1])) for row in zip(*columns, strict=True)]

    # --- compiled ----------------------------------------------------------------------------------------------

    def compiled(self, progress):
        kind, k, metric, extra = twin.twin_of(self.policy)
        total = len(self.arrived)
        rows = np.zeros(total + 1 if kind == twin.ASTROLABE else 1, ROW)
        if kind == twin.ASTROLABE:
            self._room(total + 2)
        for first in range(0, total, CHUNK):
            last = min(first + CHUNK, total)
            extra = twin.run(
                self.state, self.arrived, first, last, kind, k, metric, extra, self.routers[0].rng, self.noise_rng,
                float(self.noise.common), float(self.noise.candidate),
                (self.scratch, self.templates, self.header, rows, self.extension), self.leaps, self.predicted_e2e,
            )  # fmt: skip
            if progress:
                progress(last, total)
        self._drain()
        check_progress(self.state)

    # --- one decision at a time --------------------------------------------------------------------------------

    def decide_all(self, progress):
        total = len(self.arrived)
        self.known = self._known(self.trace)
        queries = (self.arrived + self.control.tag_s).tolist()
        report = max(1, total // 50)
        a = 0
        while a < total or self.events:
            now_s = queries[a] if a < total else np.inf
            if self.events and self.events[0][0] <= now_s:
                at_s, _, act, what = heapq.heappop(self.events)
                act(at_s, *what)
                continue
            self.decide(now_s, a)
            a += 1
            if progress and a % report == 0:
                progress(a, total)
        self._drain()
        if progress:
            progress(total, total)
        check_progress(self.state)

    def _drain(self) -> None:
        """Run the engines to their ends, one by one: compiled code sees no Ctrl-C."""
        for i in range(len(self.configs)):
            kernel.advance(*self.state, i, np.inf, NONE, self.leaps)

    def _at(self, time_s: float, rank: int, act: Callable, *what) -> None:
        """Call ``act(time_s, *what)`` at that time; at one instant lower ranks come first, then those planned first."""
        self.sequence += 1
        heapq.heappush(self.events, (time_s, (rank, self.sequence), act, what))

    def decide(self, now_s: float, r: int) -> None:
        """Choose an instance for request r at now_s and hand it over."""
        j = r % self.control.routers
        router = self.routers[j]
        if not self.healthy:
            self._fail(now_s, r)
            return
        self._look(j, now_s)
        request = Request(*self.known[r])
        self.deciding = (j, now_s)
        self.asked: dict[int, float] = {}
        self.wait_s = 0.0
        index = view.check_choice(router.policy.choose(request, router.view, router.rng), len(self.healthy), self.name)
        i = self.healthy[index]
        if self.asked:
            self.predicted_e2e[r] = self.asked.get(i, np.nan)
        tokens = request.prompt_tokens + request.predicted_tokens
        decided_s = now_s + self.wait_s
        ready_s = decided_s + self.control.dispatch_s
        if self.statuses[i] is not None or ready_s > now_s:
            self.unseen[j][i].append((decided_s, ready_s, request.prompt_tokens, request.predicted_tokens))
        if decided_s > now_s:
            self.decision_s[r] += self.wait_s
            self._at(decided_s, DISPATCH, self._send, i, j, tokens)
        else:
            self._send(now_s, i, j, tokens)
        if ready_s > now_s:
            self._at(ready_s, ARRIVE, self._deliver, r, i, j, tokens)
        else:
            self._deliver(now_s, r, i, j, tokens)

    def _send(self, _, i: int, j: int, tokens: int) -> None:
        """Enter a dispatch to instance i into router j's ledger."""
        self.sent[i, j, 0] += 1
        self.sent[i, j, 1] += tokens

    def _deliver(self, now_s: float, r: int, i: int, j: int, tokens: int) -> None:
        """Request r reaches instance i. Where that has stopped, it shares the fate of those that were there."""
        if i not in self.down or i in self.paused:
            kernel.deliver(*self.state, i, r, now_s)
            return
        self.state.requests["instance"][r] = i
        self.sent[i, j] -= (1, tokens)
        if self.down[i].on_stop == "fail":
            self._fail(now_s, r)
        else:
            self._set_healthy(tuple(x for x in self.healthy if x != i))  # the refusal gives it away
            self._at(now_s, RETRY, self.decide, r)

    def _look(self, j: int, now_s: float) -> None:
        """Bring router j's view to now_s: fresh signals, or those of the last refresh, and its own ledger."""
        if self.control.status_interval_s == 0.0 and not self.paused:
            known = self.reachable, self.base, self.taken_s
            observe(self.state, now_s, self.leaps, *known, self.sent, j, self.order, self.shown)
            return
        self._refresh_due(now_s)
        self._advance(now_s)
        if self.control.status_interval_s == 0.0:
            for i in np.flatnonzero(self.reachable):
                self._read(i, now_s)
        reveal(self.base, self.taken_s, now_s, self.sent, self.state.done, j, self.order, self.shown)

    def _refresh_due(self, now_s: float) -> None:
        """Refresh the reachable engines' signals and statuses as of the last multiple of the interval, unless done;
        called before anything happens at a later time."""
        interval_s = self.control.status_interval_s
        at_s = min(np.floor(now_s / interval_s) * interval_s, now_s) if interval_s > 0.0 else -np.inf
        if at_s > self.refreshed_s:
            self.refreshed_s = at_s
            self._advance(at_s)
            for i in np.flatnonzero(self.reachable):
                self._read(i, at_s)
                self._keep_status(i, at_s)

    def _read(self, i: int, now_s: float) -> None:
        read_signals(*self.state[:4], i, now_s, self.base[i])
        self.taken_s[i] = now_s

    def _keep_status(self, i: int, now_s: float) -> None:
        self._write_status(i, now_s)
        self.statuses[i] = (self.header.copy(), self.rows[: int(self.header["n_rows"][0])].copy())
        for unseen in self.unseen:
            unseen[i] = [sent for sent in unseen[i] if sent[1] > now_s]

    def _write_status(self, i: int, now_s: float) -> None:
        while not write_status(*self.state[:4], i, now_s, self.header, self.rows):
            self.rows = np.zeros(2 * int(self.header["n_rows"][0]), ROW)

    def _advance(self, until_s: float) -> None:
        if not self.paused:
            kernel.advance_all(*self.state, until_s, self.leaps)
            return
        for i in range(len(self.configs)):
            if i not in self.paused:
                kernel.advance(*self.state, i, until_s, NONE, self.leaps)

    # --- predictions -------------------------------------------------------------------------------------------

    def answer(self, request: Request, metric, instances) -> np.ndarray:
        """What ``ClusterView.predict`` returns: ask the instances' Predictors, each with its delay and noise."""
        if request.predicted_tokens < 1:
            raise InputError(
                f"policy {self.name} asks for a prediction and request {request.rid} has no predicted length: {ATTACH}"
            )
        if not callable(metric) and metric not in METRICS:
            raise InputError(f"metric={metric!r} is not one of {', '.join(METRICS)}, nor a callable")
        code = E2E if callable(metric) else METRICS.index(metric)
        unknown = [index for index in instances if not 0 <= index < len(self.healthy)]
        if unknown:
            raise InputError(
                f"policy {self.name}: predict() was asked for instance {unknown[0]}; the cluster has "
                f"{len(self.healthy)} healthy instances, 0..{len(self.healthy) - 1}"
            )
        j, now_s = self.deciding
        low, high = self.control.predict_range_s
        ready_s = now_s + 0.5 * (low + high) + self.control.dispatch_s
        wait_s = ready_s - request.arrived_s
        common = self.noise.common * self.noise_rng.standard_normal() if self.noise.common > 0.0 else 0.0
        answers = np.full((5, len(instances)), np.inf)
        slowest_s = 0.0
        for column, index in enumerate(instances):
            i = self.healthy[index]
            fits = self._predict(i, j, now_s, ready_s, request, code)
            if high > 0.0:
                slowest_s = max(slowest_s, self.delay_rng.uniform(low, high))
            own = self.noise.candidate * self.noise_rng.standard_normal() if self.noise.candidate > 0.0 else 0.0
            if fits:
                factor = (1.0 + common, 1.0 + own)
                for row, value in (
                    (0, self.out[0] + wait_s),
                    (1, self.out[1] + wait_s),
                    (2, self.out[2]),
                    (4, self.out[4] + wait_s),
                ):
                    answers[row, column] = value * factor[0] * factor[1]
                if code != TTFT:
                    self.asked[i] = float(answers[1, column])
        self.wait_s += slowest_s  # calls after one another add up
        if callable(metric):
            found = metric(view.Predictions(answers[0], answers[1], answers[2]))
            try:
                values = np.asarray(found, dtype=np.float64)
            except (TypeError, ValueError):
                raise InputError(f"policy {self.name}: the metric returned {found!r}, not numbers") from None
            if values.shape != (len(instances),):
                raise InputError(
                    f"policy {self.name}: the metric returned shape {values.shape} for {len(instances)} instances"
                )
            return values
        return answers[{TTFT: 0, E2E: 1, ADDED_DELAY: 4}.get(code, 2)]

    def _predict(self, i, j, now_s, ready_s, request, code) -> bool:
        if self.statuses[i] is None:
            self._write_status(i, now_s)
            header, rows = self.header, self.rows
        else:
            header, rows = self.statuses[i]
        unseen = self.unseen[j][i]
        if unseen:
            taken_s = header["taken_s"][0]
            unseen = self.unseen[j][i] = [sent for sent in unseen if sent[1] > taken_s]
        known = [sent[1:] for sent in unseen if sent[0] <= now_s]
        pending = np.zeros(len(known) + 1, PENDING)
        for row, sent in enumerate(known):
            pending[row] = sent
        pending[-1] = (ready_s, request.prompt_tokens, request.predicted_tokens)
        self._room(int(header["n_rows"][0]) + len(pending))
        template = self.templates[i : i + 1]
        return predict(self.scratch, template, header, rows, pending, code, self.extension, self.out)

    def _room(self, n: int) -> None:
        if n > len(self.scratch.requests):
            grown = new_state(self.configs[:1], [np.zeros((2, 6))], 2 * n)
            self.scratch = self.scratch._replace(requests=grown.requests)

    # --- faults ------------------------------------------------------------------------------------------------

    def _plan(self, faults, n: int) -> None:
        """Check the faults and plan their starts, detections and ends."""
        windows: dict[tuple, list] = {}
        if not isinstance(faults, (list, tuple)):
            raise InputError(f"faults: {faults!r} is no list; write faults=[...]")
        for fault in faults:
            if not isinstance(fault, (Outage, Slowdown)):
                raise InputError(f"fault {fault!r} is neither an Outage nor a Slowdown")
            if fault.instance >= n:
                raise InputError(f"fault: instance={fault.instance} is outside 0..{n - 1}")
            kind = type(fault)
            for other in windows.setdefault((kind, fault.instance), []):
                if fault.start_s < other.end_s and other.start_s < fault.end_s:
                    raise InputError(
                        f"fault: two {kind.__name__.lower()}s of instance {fault.instance} overlap; separate them"
                    )
            windows[kind, fault.instance].append(fault)
            if kind is Slowdown:
                self._at(fault.start_s, START, self._slow, fault.instance, fault.factor)
                self._at(fault.end_s, END, self._slow, fault.instance, 1.0)
                continue
            self._at(fault.start_s, START, self._stop, fault)
            self._at(fault.start_s + fault.detected_after_s, START, self._detect, fault)
            if np.isfinite(fault.end_s):
                self._at(fault.end_s, END, self._come_back, fault)

    def _slow(self, now_s: float, i: int, factor: float) -> None:
        self._happens(now_s)
        self.state.engines["slow_factor"][i] = factor

    def _stop(self, now_s: float, fault: Outage) -> None:
        i = fault.instance
        self._happens(now_s)
        self._read(i, now_s)
        self._keep_status(i, now_s)
        self.reachable[i] = False
        self.down[i] = fault
        if fault.on_stop == "pause":
            self.paused.add(i)
            return
        for r in kernel.stop(*self.state, i, now_s, fault.on_stop == "redispatch"):
            if fault.on_stop == "redispatch":
                self._at(now_s, RETRY, self.decide, int(r))

    def _detect(self, _, fault: Outage) -> None:
        if self.down.get(fault.instance) is fault:
            self._set_healthy(tuple(x for x in self.healthy if x != fault.instance))

    def _come_back(self, now_s: float, fault: Outage) -> None:
        i = fault.instance
        self._happens(now_s)
        engine = self.state.engines[i]
        if i in self.paused:
            self.paused.remove(i)
            for field in ("start_s", "end_s", "now_s"):
                engine[field] += now_s - fault.start_s
        engine["now_s"] = max(engine["now_s"], now_s)
        del self.down[i]
        self.reachable[i] = True
        self.statuses[i] = None
        if self.control.status_interval_s > 0.0:
            self._read(i, now_s)
            self._keep_status(i, now_s)
        self._set_healthy(tuple(sorted({*self.healthy, i})))

    def _happens(self, now_s: float) -> None:
        """Bring everything up to now_s, where something is about to happen."""
        self._refresh_due(now_s)
        self._advance(now_s)

    def _fail(self, now_s: float, r: int) -> None:
        self.state.requests["state"][r] = FAILED
        self.state.requests["finished_s"][r] = now_s

    def _set_healthy(self, healthy: tuple[int, ...]) -> None:
        self.healthy = healthy
        self.order = np.array(healthy, np.int64)
        shown = self.shown[: len(healthy)].view()
        shown.flags.writeable = False
        for router in self.routers:
            router.view.instances = healthy
            router.view.signals = shown

    # --- results -----------------------------------------------------------------------------------------------

    def frame(self, name: str, seed: int):
        """The result frame: the trace's columns, then the outcome's."""
        import pandas as pd

        outcome = outcomes(self.arrived, self.state)
        status = outcome.pop("status")
        instance = self.state.requests["instance"].astype(np.int64)
        decided = {
            "predicted_e2e_s": self.predicted_e2e,
            "decision_s": np.where(instance < 0, np.nan, self.decision_s),
            "status": status,
            "source": "simulated",
            "policy": name,
            "seed": seed,
        }
        return pd.DataFrame({**self.trace, "instance": instance, **outcome, **decided}, index=self.trace.index)
