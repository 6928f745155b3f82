"""One run of a cluster: each request arrives, is chosen an instance for, is batched there, finishes."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from astrolabe_lab import policies
from astrolabe_lab.foresight import BASIS
from astrolabe_lab.prefix_record import PrefixOverlap, PrefixRecord
from astrolabe_lab.request import Request
from astrolabe_lab.rng import stream
from astrolabe_lab.sim import kernel, twin, view
from astrolabe_lab.sim.asking import Asking
from astrolabe_lab.sim.engine import check_progress, load_requests, outcomes
from astrolabe_lab.sim.faults import Faults
from astrolabe_lab.sim.knowledge import Knowledge
from astrolabe_lab.sim.prefixes import block_tokens, with_pools
from astrolabe_lab.sim.state import FAILED, NONE, new_state
from astrolabe_lab.sim.status import ROW

CHUNK = 500  # requests dispatched between two chances for Ctrl-C: compiled code sees none


class Router:
    """One router: its policy, its random stream, its view, and its record of the prefixes that it has sent."""

    def __init__(self, policy, rng, number, prefixes):
        self.policy = copy.deepcopy(policy)
        # The same draws from a generator that does not hold its seed: whoever knew that could draw the lengths' noise.
        self.rng = np.random.Generator(np.random.PCG64(0))
        self.rng.bit_generator.state = rng.bit_generator.state
        self.view = view.ClusterView(number)
        self.prefixes = prefixes


class Run:
    """One run. The policy sees ``Router.view`` and a ``Request``, nothing else."""

    # At one instant: ends of faults before starts, so that one may follow another at once, then requests on their way.
    END, START, DISPATCH, ARRIVE, RETRY = range(5)

    def __init__(self, trace, policy, engines, control, faults, seed, noise, extension, leaps):
        configs, costs, predictor_costs = engines
        self.has_twin = twin.twin_of(policy) is not None and control.ideal and not faults
        control = replace(control, routers=min(control.routers, len(trace)))  # more would get no request
        self.trace = trace
        self.policy = policy
        self.name = policies.spec(policy)
        self.control = control
        self.leaps = leaps
        self.arrived = trace["arrived_s"].to_numpy(dtype=np.float64)
        self.state = with_pools(new_state(configs, costs, len(trace), control.routers), trace)
        predicted = trace["predicted_tokens"].to_numpy() if "predicted_tokens" in trace else None
        load_requests(self.state, trace["prompt_tokens"].to_numpy(), trace["output_tokens"].to_numpy(), predicted)
        self.state.requests["router"] = np.arange(len(trace)) % control.routers
        self.knowledge = Knowledge(self.state, control, leaps)
        foresight = getattr(policy, "foresight", "none")
        self.asking = Asking(self.knowledge, configs, predictor_costs, control, noise, seed, extension, foresight)
        self.number = view.register(self.asking.answer, self.prefix_overlap)
        capacity = {i: c.usable_blocks * c.block_size for i, c in enumerate(configs)}
        self.routers = [
            Router(
                policy,
                stream(seed, "policy" if j == 0 else f"policy/{j}"),
                self.number,
                PrefixRecord(block_tokens(trace), capacity),
            )
            for j in range(control.routers)
        ]
        self.predicted_e2e = np.full(len(trace), np.nan)
        self.decision_s = np.full(len(trace), float(control.tag_s))
        # what happens between arrivals, as a heap of (time, (rank, sequence), action, arguments)
        self.events: list = []
        self.sequence = 0
        self.faults = Faults(self, faults)
        self.known: list[tuple] | None = None  # what routers may know of each request, for policy objects
        self.twin_rows: np.ndarray | None = None
        self.twin_opened: np.ndarray | None = None
        self.twin: tuple | None = None  # as twin_of describes it, its counter where it stands

    def compiled(self, progress) -> None:
        """Run the policy's compiled twin."""
        total = len(self.arrived)
        for first in range(0, total, CHUNK):
            last = min(first + CHUNK, total)
            self.leave_to_twin(first, last)
            if progress:
                progress(last, total)
        self.drain()

    def decide_all(self, progress) -> None:
        """Ask the policy object at each decision."""
        total = len(self.arrived)
        report = max(1, total // 50)
        for first in range(0, total, report):
            last = min(first + report, total)
            self.ask_policy(first, last)
            if progress and last < total:
                progress(last, total)
        self.finish_events()
        self.drain()
        if progress:
            progress(total, total)

    def leave_to_twin(self, first: int, last: int) -> None:
        """Dispatch requests first..last-1 by the policy's compiled twin."""
        asking = self.asking
        if self.twin is None:
            self.twin = twin.twin_of(self.policy)
            asks = self.twin[0] == twin.ASTROLABE
            self.twin_rows = np.zeros(len(self.arrived) + 1 if asks else 1, ROW)
            self.twin_opened = np.zeros(len(self.arrived) if asking.foresights[0]["kind"][0] else 0, BASIS)
            asking.foresights[0]["share"] = 1.0 / len(self.state.engines)
            if asks:
                asking.make_room(len(self.arrived) + 2)
        kind, k, asked_for, extra = self.twin
        extra = twin.run(
            self.state, self.arrived, first, last, kind, k, asked_for, extra, self.routers[0].rng, asking.noise_rng,
            float(asking.noise.common), float(asking.noise.candidate),
            (
                asking.scratch, asking.templates, self.knowledge.header, self.twin_rows, asking.foresights[0],
                self.twin_opened, asking.extension,
            ),
            self.leaps, self.predicted_e2e,
        )  # fmt: skip
        self.twin = kind, k, asked_for, extra

    def ask_policy(self, first: int, last: int) -> None:
        """Dispatch requests first..last-1 by the policy object, and let happen what happens before the last of them."""
        if self.known is None:
            self.known = self._known(self.trace)
        queries = (self.arrived[first:last] + self.control.tag_s).tolist()
        for a, now_s in enumerate(queries, first):
            self.finish_events(now_s)
            self.decide(now_s, a)

    def finish_events(self, until_s: float = np.inf) -> None:
        """Let happen what is planned for up to that time."""
        while self.events and self.events[0][0] <= until_s:
            at_s, _, act, what = heapq.heappop(self.events)
            act(at_s, *what)

    def at(self, time_s: float, rank: int, act: Callable, *what) -> None:
        """Call ``act(time_s, *what)`` at that time; at one instant lower ranks come first, then those planned first."""
        self.sequence += 1
        heapq.heappush(self.events, (time_s, (rank, self.sequence), act, what))

    def decide(self, now_s: float, r: int) -> None:
        """Choose an instance for request r at now_s and send it there."""
        knowledge, asking = self.knowledge, self.asking
        if not knowledge.healthy:
            self._fail(now_s, r)
            return
        j = r % self.control.routers
        router = self.routers[j]
        knowledge.look(j, now_s)
        router.view.instances = knowledge.healthy
        router.view.signals = knowledge.signals
        request = Request(*self.known[r])
        asking.begin(self.name, j, now_s, r)
        chosen = router.policy.choose(request, router.view, router.rng)
        i = knowledge.healthy[view.check_choice(chosen, len(knowledge.healthy), self.name)]
        router.prefixes.sent(request, i, now_s)
        asking.dispatched(r, i, request)
        if asking.asked:
            self.predicted_e2e[r] = asking.asked.get(i, np.nan)
        tokens = request.prompt_tokens + request.predicted_tokens
        decided_s = now_s + asking.wait_s
        ready_s = decided_s + self.control.dispatch_s
        if knowledge.statuses[i] is not None or ready_s > now_s:
            knowledge.unseen[j][i].append((decided_s, ready_s, request.prompt_tokens, request.predicted_tokens, r))
        if decided_s > now_s:
            self.decision_s[r] += asking.wait_s
            self.at(decided_s, self.DISPATCH, self._send, i, j, tokens)
        else:
            self._send(now_s, i, j, tokens)
        if ready_s > now_s:
            self.at(ready_s, self.ARRIVE, self._deliver, r, i, j, tokens)
        else:
            self._deliver(now_s, r, i, j, tokens)

    def prefix_overlap(self, request: Request) -> PrefixOverlap:
        """``ClusterView.prefix_overlap`` of the router that is deciding."""
        asking = self.asking
        return self.routers[asking.j].prefixes.overlap(request, self.knowledge.healthy, asking.now_s)

    def _send(self, _, i: int, j: int, tokens: int) -> None:
        """Enter a dispatch to instance i into router j's ledger."""
        self.knowledge.sent[i, j, 0] += 1
        self.knowledge.sent[i, j, 1] += tokens

    def _deliver(self, now_s: float, r: int, i: int, j: int, tokens: int) -> None:
        """Request r reaches instance i. Where that has stopped, it shares the fate of those that were there."""
        if not self.faults.refuses(i):
            kernel.deliver(*self.state, i, r, now_s)
            return
        self.state.requests["instance"][r] = i
        self.knowledge.sent[i, j] -= (1, tokens)
        if self.faults.down[i].on_stop == "fail":
            self._fail(now_s, r)
        else:
            self.faults.leave_out(i)  # the refusal gives it away
            self.at(now_s, self.RETRY, self.decide, r)

    def _fail(self, now_s: float, r: int) -> None:
        self.state.requests["state"][r] = FAILED
        self.state.requests["finished_s"][r] = now_s

    def drain(self) -> None:
        """Run the engines to their ends, one by one: compiled code sees no Ctrl-C."""
        for i in range(len(self.state.engines)):
            kernel.advance(*self.state, i, np.inf, NONE, self.leaps)
        check_progress(self.state)

    @staticmethod
    def _known(trace) -> list[tuple]:
        """What a router may know of each request, in the order of ``Request``'s fields."""
        columns = [trace[name].tolist() for name in ("rid", "arrived_s", "prompt_tokens")]
        for name, default in (("predicted_tokens", 0), ("slo", "loose"), ("prefix_blocks", ())):
            columns.append(trace[name].tolist() if name in trace else [default] * len(trace))
        return [(*row[:-1], tuple(row[-1])) for row in zip(*columns, strict=True)]

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
