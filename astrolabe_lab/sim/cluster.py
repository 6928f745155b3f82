"""A cluster of engines behind a router: arrive, choose, batch, finish, in simulated time."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Sequence

import numpy as np

from astrolabe_lab import policies
from astrolabe_lab.errors import InputError
from astrolabe_lab.predictor import ADDED_DELAY, E2E, EXTENSION_TOKENS, METRICS, PENDING, TTFT, predict
from astrolabe_lab.request import Request
from astrolabe_lab.rng import stream
from astrolabe_lab.sim import kernel, twin, view
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.sim.engine import check_progress, load_requests, outcome_frame
from astrolabe_lab.sim.observe import observe, reveal
from astrolabe_lab.sim.signals import SIGNALS, read_signals
from astrolabe_lab.sim.state import ENGINE, FAILED, NONE, configure, new_state
from astrolabe_lab.sim.status import HEADER, ROW, write_status
from astrolabe_lab.sim.world import ControlPlane, LatencyNoise, Outage, Slowdown

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
    object with ``choose(request, cluster, rng)``, or text for ``policies.parse``; it is copied, so a run leaves it as it
    was. ``engine``, ``cost`` (a StepCost) and ``predictor_cost`` (what the Predictors believe; default: the truth) are
    one for all ``instances``, or a sequence of one each; engine and cost default to the preset llama2-7b-a30.
    ``compiled``: True demands the policy's compiled twin, False forbids it, None takes it where there is one; the
    outcome is the same. ``leaps=False`` single-steps the engines, with the same outcome. ``progress`` is called with
    (requests dispatched, requests in all). Times are in s; ``decision_s`` is the modelled delay of the decision.
    Raises InputError for a trace, policy, choice or setting that breaks its contract.
    """
    from astrolabe_lab import trace as trace_module

    trace = trace_module.check(trace)
    if "arrived_s" not in trace:
        raise InputError("trace: arrived_s is missing; give it arrival times with arrivals.with_arrivals(trace, qps=...)")
    if isinstance(policy, str):
        policy = policies.parse(policy)
    run = _Run(trace, policy, _engines(instances, engine, cost, predictor_cost), control, faults, seed, latency_noise, extension_tokens, leaps)
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
    if isinstance(instances, bool) or not isinstance(instances, (int, np.integer)) or instances < 1:
        raise InputError(f"instances={instances!r} must be a whole number >= 1")
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
        if len(values) != instances:
            raise InputError(f"{what}: {len(values)} given for {instances} instances; give one for all, or one each")
        spread.append(values)
    return spread


class _Router:
    """One router: its policy, its random stream and its view."""

    def __init__(self, policy, rng, number):
        self.policy = copy.deepcopy(policy)
        self.rng = rng
        self.view = view.ClusterView(number)


class _Run:
    """One run. The policy sees ``_Router.view`` and a ``Request``, nothing else."""

    def __init__(self, trace, policy, engines, control, faults, seed, noise, extension, leaps):
        configs, costs, predictor_costs = engines
        n = len(configs)
        if not callable(getattr(policy, "choose", None)):
            raise InputError(f"policy {policy!r} has no method choose(request, cluster, rng)")
        if getattr(policy, "needs_lengths", False) and "predicted_tokens" not in trace:
            raise InputError(
                f"policy {policies.spec(policy)} needs predicted lengths and the trace has no predicted_tokens: attach them with "
                "length.attach (on the command line: --lengths oracle, constant:N or noisy:REL)"
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
            running=np.zeros((1, self.state.running.shape[1]), np.int32), batch=np.zeros_like(self.state.batch[:1])
        )
        self.control = control
        self.noise = noise
        self.extension = extension
        self.leaps = leaps
        self.noise_rng = stream(seed, "noise")
        self.delay_rng = stream(seed, "delays")
        self.number = view.register(self.answer)
        self.routers = [
            _Router(policy, stream(seed, "policy" if j == 0 else f"policy/{j}"), self.number) for j in range(control.routers)
        ]
        self.sent = np.zeros((n, control.routers, 2), np.int64)
        self.predicted_e2e = np.full(len(trace), np.nan)
        self.decision_s = np.zeros(len(trace))
        self.delayed = control.tag_s > 0.0 or control.predict_range_s[1] > 0.0
        # what the routers know
        self.base = np.zeros(n, SIGNALS)
        self.taken_s = np.zeros(n)
        self.reachable = np.ones(n, np.bool_)
        self.shown = np.zeros(n, SIGNALS)
        self.statuses: list = [None] * n  # (header, rows) where the current state cannot be read
        self.refreshed_s = -np.inf
        self.unseen: list[list[list]] = [[[] for _ in range(n)] for _ in range(control.routers)]
        self.ledger: list = []  # (time, seq, instance, router, tokens) of decisions still being taken
        self.sequence = 0
        # faults
        self.down: dict[int, Outage] = {}
        self.paused: set[int] = set()
        self.retries: list = []  # (time, seq, request)
        self.events = self._events(faults, n)
        self._set_healthy(tuple(range(n)))
        self.header = np.zeros(1, HEADER)
        self.rows = np.zeros(256, ROW)
        self.out = np.zeros(5)

    # --- compiled ----------------------------------------------------------------------------------------------

    def compiled(self, progress):
        kind, k, metric, extra = twin.twin_of(self.policy)
        if k > len(self.configs):
            raise InputError(f"policy {self.name}: k={k} is outside 1..{len(self.configs)} (the cluster has {len(self.configs)} healthy instances)")
        total = len(self.arrived)
        rows = np.zeros(total + 1 if kind == twin.ASTROLABE else 1, ROW)
        if kind == twin.ASTROLABE:
            self._room(total + 2)
        chunk = total if progress is None else max(500, total // 50)
        for first in range(0, total, max(1, chunk)):
            last = min(first + chunk, total)
            extra = twin.run(
                *self.state, self.arrived, first, last, kind, k, metric, extra, self.routers[0].rng, self.noise_rng,
                float(self.noise.common), float(self.noise.candidate), self.extension, self.leaps,
                self.templates, *self.scratch, self.header, rows, self.predicted_e2e,
            )  # fmt: skip
            if progress:
                progress(last, total)
        kernel.advance_all(*self.state, np.inf, self.leaps)
        check_progress(self.state)

    # --- one decision at a time --------------------------------------------------------------------------------

    def decide_all(self, progress):
        total = len(self.arrived)
        tag_s = self.control.tag_s
        queries = (self.arrived + tag_s).tolist()
        tokens = np.stack([self.state.requests["prompt"], self.state.requests["predicted"]], axis=1).tolist()
        arrived = self.arrived.tolist()
        rids = self.trace["rid"].tolist()
        slo = self.trace["slo"].tolist() if "slo" in self.trace else None
        prefixes = self.trace["prefix_blocks"].tolist() if "prefix_blocks" in self.trace else None
        report = max(1, total // 50)
        a = 0
        while a < total or self.retries or self.events:
            at = queries[a] if a < total else np.inf
            if self.retries and self.retries[0][0] < at:
                at = self.retries[0][0]
            if self.events and self.events[0][0] <= at:
                self._fault(*heapq.heappop(self.events))
                continue
            if self.retries and self.retries[0][0] <= at:
                at, _, r = heapq.heappop(self.retries)
            else:
                r = a
                a += 1
                if progress and a % report == 0:
                    progress(a, total)
            extra = {}
            if slo is not None:
                extra["slo"] = slo[r]
            if prefixes is not None:
                extra["prefix_blocks"] = tuple(prefixes[r])
            self.decide(r, at, Request(rids[r], arrived[r], *tokens[r], **extra))
        self._advance(np.inf)
        if progress:
            progress(total, total)
        check_progress(self.state)

    def decide(self, r: int, now_s: float, request: Request) -> None:
        """Choose an instance for request r at now_s and hand it over."""
        j = r % self.control.routers
        router = self.routers[j]
        if not self.healthy:
            self._fail(r, now_s)
            return
        self._look(j, now_s)
        self.deciding = (r, j, now_s)
        self.asked: dict[int, float] = {}
        self.wait_s = 0.0
        index = view.check_choice(router.policy.choose(request, router.view, router.rng), len(self.healthy), self.name)
        i = self.healthy[index]
        decided_s = now_s + self.wait_s
        if self.asked:
            self.predicted_e2e[r] = self.asked.get(i, np.nan)
        if self.delayed:
            waited_s = self.decision_s[r]
            self.decision_s[r] = self.wait_s + (now_s - request.arrived_s if waited_s == 0.0 else waited_s)
        tokens = request.prompt_tokens + request.predicted_tokens
        if self.wait_s > 0.0:
            self.sequence += 1
            heapq.heappush(self.ledger, (decided_s, self.sequence, i, j, tokens))
        else:
            self.sent[i, j, 0] += 1
            self.sent[i, j, 1] += tokens
        ready_s = decided_s + self.control.dispatch_s
        if self.statuses[i] is not None or ready_s > now_s:
            self.unseen[j][i].append((decided_s, ready_s, request.prompt_tokens, request.predicted_tokens))
        if i in self.down and i not in self.paused:
            self._refused(r, i, j, ready_s)
        else:
            kernel.deliver(*self.state, i, r, ready_s)

    def _look(self, j: int, now_s: float) -> None:
        """Bring router j's view to now_s: fresh signals, or those of the last refresh."""
        while self.ledger and self.ledger[0][0] <= now_s:
            _, _, i, router, tokens = heapq.heappop(self.ledger)
            self.sent[i, router, 0] += 1
            self.sent[i, router, 1] += tokens
        interval_s = self.control.status_interval_s
        if interval_s == 0.0 and not self.paused:
            observe(*self.state, now_s, self.leaps, self.reachable, self.base, self.taken_s, self.sent, j, self.order, self.shown)
            return
        if interval_s == 0.0:
            self._advance(now_s)
            self._refresh(now_s, keep=False)
        else:
            at = np.floor(now_s / interval_s) * interval_s
            if at > self.refreshed_s:
                self._advance(at)
                self._refresh(at, keep=True)
                self.refreshed_s = at
        reveal(self.base, self.taken_s, now_s, self.sent, self.state.done, j, self.order, self.shown)

    def _refresh(self, now_s: float, keep: bool) -> None:
        """Read the reachable engines' signals at now_s; with ``keep`` their statuses too."""
        for i in np.flatnonzero(self.reachable):
            read_signals(*self.state[:4], i, now_s, self.base[i])
            self.taken_s[i] = now_s
            if keep:
                self._keep_status(i, now_s)

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
                f"policy {self.name} asks for a prediction and request {request.rid} has no predicted length: attach them with "
                "length.attach (on the command line: --lengths oracle, constant:N or noisy:REL)"
            )
        if not callable(metric) and metric not in METRICS:
            raise InputError(f"metric={metric!r} is not one of {', '.join(METRICS)}, nor a callable")
        code = E2E if callable(metric) else METRICS.index(metric)
        _, j, now_s = self.deciding
        low, high = self.control.predict_range_s
        ready_s = now_s + 0.5 * (low + high) + self.control.dispatch_s
        wait_s = ready_s - request.arrived_s
        common = self.noise.common * self.noise_rng.standard_normal() if self.noise.common > 0.0 else 0.0
        answers = np.full((5, len(instances)), np.inf)
        for column, index in enumerate(instances):
            i = self.healthy[index]
            fits = self._predict(i, j, now_s, ready_s, request, code)
            if high > 0.0:
                self.wait_s = max(self.wait_s, self.delay_rng.uniform(low, high))
            own = self.noise.candidate * self.noise_rng.standard_normal() if self.noise.candidate > 0.0 else 0.0
            if fits:
                factor = (1.0 + common, 1.0 + own)
                for row, value in ((0, self.out[0] + wait_s), (1, self.out[1] + wait_s), (2, self.out[2]), (4, self.out[4] + wait_s)):
                    answers[row, column] = value * factor[0] * factor[1]
                if code != TTFT:
                    self.asked[i] = float(answers[1, column])
        if callable(metric):
            values = np.asarray(metric(view.Predictions(answers[0], answers[1], answers[2])), dtype=np.float64)
            if values.shape != (len(instances),):
                raise InputError(f"policy {self.name}: the metric returned shape {values.shape} for {len(instances)} instances")
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
        return predict(*self.scratch, self.templates[i : i + 1], header, rows, pending, code, self.extension, self.out)

    def _room(self, n: int) -> None:
        if n > len(self.scratch.requests):
            grown = new_state(self.configs[:1], [np.zeros((2, 6))], 2 * n)
            self.scratch = self.scratch._replace(requests=grown.requests)

    # --- faults ------------------------------------------------------------------------------------------------

    def _events(self, faults, n: int) -> list:
        """Faults as a heap of (time, seq, what, fault)."""
        events = []
        windows: dict[int, list] = {}
        for fault in faults:
            if not isinstance(fault, (Outage, Slowdown)):
                raise InputError(f"fault {fault!r} is neither an Outage nor a Slowdown")
            if fault.instance >= n:
                raise InputError(f"fault: instance={fault.instance} is outside 0..{n - 1}")
            kind = type(fault)
            for other in windows.setdefault((kind, fault.instance), []):
                if fault.start_s < other.end_s and other.start_s < fault.end_s:
                    raise InputError(f"fault: two {kind.__name__.lower()}s of instance {fault.instance} overlap; separate them")
            windows[kind, fault.instance].append(fault)
            times = [("start", fault.start_s), ("end", fault.end_s)]
            if kind is Outage:
                times.insert(1, ("detect", fault.start_s + fault.detected_after_s))
            # At one instant ends come before starts, so that one fault may follow another at once.
            events += [(t, what != "end", k, what, fault) for k, (what, t) in enumerate(times) if np.isfinite(t)]
        events = [(t, (late, seq), what, fault) for seq, (t, late, _, what, fault) in enumerate(events)]
        heapq.heapify(events)
        return events

    def _fault(self, now_s: float, _, what: str, fault) -> None:
        i = fault.instance
        self._advance(now_s)
        if isinstance(fault, Slowdown):
            self.state.engines["slow_factor"][i] = fault.factor if what == "start" else 1.0
            return
        if what == "start":
            self.down[i] = fault
            self.reachable[i] = False
            read_signals(*self.state[:4], i, now_s, self.base[i])
            self.taken_s[i] = now_s
            self._keep_status(i, now_s)
            if fault.on_stop == "pause":
                self.paused.add(i)
            else:
                for r in kernel.stop(*self.state, i, now_s, fault.on_stop == "redispatch"):
                    if fault.on_stop == "redispatch":
                        self._retry(int(r), now_s)
        elif what == "detect" and self.down.get(i) is fault:
            self._set_healthy(tuple(x for x in self.healthy if x != i))
        elif what == "end":
            if i in self.paused:
                self.paused.remove(i)
                e = self.state.engines[i : i + 1]
                hung_s = now_s - fault.start_s
                e["start_s"] += hung_s
                e["end_s"] += hung_s
                e["now_s"] += hung_s
            self.state.engines["now_s"][i] = max(self.state.engines["now_s"][i], now_s)
            del self.down[i]
            self.reachable[i] = True
            self.statuses[i] = None
            self.refreshed_s = -np.inf
            self._set_healthy(tuple(sorted({*self.healthy, i})))

    def _refused(self, r: int, i: int, j: int, ready_s: float) -> None:
        """A dispatch reached a stopped instance: the request shares the fate of those that were there."""
        self.sent[i, j] -= (1, self.state.requests["prompt"][r] + self.state.requests["predicted"][r])
        if self.down[i].on_stop == "fail":
            self._fail(r, ready_s)
            return
        self._set_healthy(tuple(x for x in self.healthy if x != i))  # the refusal gives it away
        self._retry(r, ready_s)

    def _retry(self, r: int, now_s: float) -> None:
        self.sequence += 1
        heapq.heappush(self.retries, (now_s, self.sequence, r))

    def _fail(self, r: int, now_s: float) -> None:
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
        outcome = outcome_frame(self.trace, self.state)
        instance = self.state.requests["instance"].astype(np.int64)
        frame = self.trace.copy()
        frame["instance"] = instance
        for column in ("first_token_s", "finished_s", "ttft_s", "tpot_s", "e2e_s", "generated_tokens", "preemptions"):
            frame[column] = outcome[column].to_numpy()
        frame["predicted_e2e_s"] = self.predicted_e2e
        frame["decision_s"] = np.where(instance < 0, np.nan, self.decision_s)
        frame["status"] = outcome["status"].to_numpy()
        frame["source"] = "simulated"
        frame["policy"] = name
        frame["seed"] = seed
        frame.attrs = {}
        return frame
