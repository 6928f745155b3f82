"""A router's journal decided again, by any policy, on what the router knew; and the regret of each decision.

The journal holds the statuses that each decision was made from, so the Predictors answer what they would have answered
then. What cannot be had again is the future: the requests that follow were dispatched by the journal's policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from astrolabe_lab import policies
from astrolabe_lab.cost import StepCost
from astrolabe_lab.errors import InputError
from astrolabe_lab.foresight import Foresight
from astrolabe_lab.predictor import EXTENSION_TOKENS, Prediction, Predictor
from astrolabe_lab.prefix_record import PrefixRecord
from astrolabe_lab.request import Request
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.sim.status import Status
from astrolabe_lab.sim.view import check_choice
from astrolabe_lab.status.scrape import Gauges
from astrolabe_lab.status.status_line import reckon_again, unpack

from . import journal
from .ledger import Ledger
from .live_view import LiveView
from .prompt_prefix import BLOCK_TOKENS
from .replayed import Kept, identity_of
from .router import decision_stream

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    *("rid", "attempt", "time_s", "arrived_s", "prompt_tokens", "predicted_tokens", "slo", "candidates"),
    *("recorded_instance", "instance", "best_instance", "predicted_e2e_s", "best_e2e_s", "regret_s"),
    *("recorded_regret_s", "measured_e2e_s", "measured_regret_s"),
)

BOTH_KINDS = "decisions of whole engines and of pools in one journal; replay each router's part by itself"


def replay(
    path: str | Path,
    policy: str | object,
    seed: int | None = None,
    cost: StepCost | None = None,
    kept_in: str | Path | None = None,
    progress: Callable[[int], None] | None = None,
    goes_on: Callable[[int], None] | None = None,
) -> pd.DataFrame:
    """One row a decision of the journal: where ``policy`` would have sent the request, and what that would have cost.

    ``instance``: the policy's choice, beside ``recorded_instance`` (NaN of a probe, which went to all) and
    ``best_instance`` (the lowest predicted E2E among the candidates); ``regret_s`` = predicted E2E of the choice - that
    of the best (inf where it does not fit there, NaN where it fits nowhere), ``recorded_regret_s`` that of the
    journal's own choice (NaN of a probe). ``measured_e2e_s``: where the policy chose what was done, or the journal has
    a probe of it; ``measured_regret_s``: where all candidates were measured. Times in modelled s.

    ``seed``: of the policy's draws (default: the router's own: the journal's policy then decides as it did). ``cost``:
    for routers that had no Predictors. ``kept_in``: a file that rows are kept in as they come, from which an ended
    replay goes on (``goes_on(rows)`` is told how many there were); it is removed at the end. ``attrs``: ``torn_line``
    (number or None), ``without_status`` (decisions of an earlier journal, left out), ``policy, seed``. Raises
    InputError for a file that is no journal, or lacks what is needed.
    """
    import pandas as pd

    policy = policies.parse(policy) if isinstance(policy, str) else policy
    replayer = Replayer(path, policy, seed, cost)
    with Kept(kept_in, identity_of(path, policies.spec(policy), seed, cost)) as kept:
        if kept.resumed and goes_on is not None:
            goes_on(kept.resumed)
        rows = list(replayer.rows(kept, progress))
        if not rows and not replayer.without_status:
            raise InputError(f"journal {str(path)!r} holds no decisions")
    for row in rows:
        replayer.measure(row)
    frame = pd.DataFrame([[row[name] for name in COLUMNS] for row in rows], columns=COLUMNS)
    frame = frame.astype({name: float for name in COLUMNS if name.endswith("_s")})  # of no rows they would be objects
    frame.attrs = {
        "policy": policies.spec(policy), "seed": replayer.seed, "torn_line": replayer.torn_line,
        "without_status": replayer.without_status,
    }  # fmt: skip
    return frame


def summary(frame: pd.DataFrame) -> dict:
    """What a replay says in numbers: how often the policy's choice and the journal's were the best of the candidates,
    how often they agree, and their mean and 99th percentile of regret, in s, where the request fitted. The journal
    chose nothing where it probed: those ``probes`` count for the policy alone."""
    told = {"decisions": len(frame), **frame.attrs}
    priced = frame[np.isfinite(frame["best_e2e_s"])]
    told["priced"] = len(priced)
    own = frame[frame["recorded_instance"].notna()]
    told["probes"] = len(frame) - len(own)
    told["agreement"] = _mean(own["instance"] == own["recorded_instance"])
    for name, column in (("", "regret_s"), ("recorded_", "recorded_regret_s"), ("measured_", "measured_regret_s")):
        regret = priced[column]
        finite = regret[np.isfinite(regret)]
        told[f"{name}best_share"] = _mean(regret[regret.notna()] <= 1e-9)
        told[f"{name}regret_mean_s"] = _mean(finite)
        told[f"{name}regret_p99_s"] = float(finite.quantile(0.99)) if len(finite) else math.nan
    told["measured"] = int(frame["measured_e2e_s"].notna().sum())
    return told


@dataclass
class RecordedInstance:
    """An instance as it was at one decision, for ``LiveView``."""

    index: int
    engine: EngineConfig
    predictor: Predictor | None
    recorded: Status
    source: str
    numbers: dict
    sent: list
    gauges: Gauges = field(default_factory=Gauges)

    def status(self, now_s: float) -> tuple[Status, str]:
        return self.recorded, self.source

    def signals(self, status: Status, now_s: float, into: np.ndarray) -> None:
        for name, value in self.numbers.items():
            into[name] = value

    def unseen(self, status: Status) -> list:
        return self.sent

    def predict(self, status: Status, request: Request, metric, now_s: float, unseen: list) -> Prediction:
        if self.predictor is None:
            raise InputError("the journal's router had no Predictors: say which step cost to predict with (a preset)")
        return self.predictor.predict(status, request, metric, now_s=now_s, dispatched=unseen)


class Replayer:
    """Goes through a journal in order; knows at each decision what a router with ``policy`` would know."""

    def __init__(self, path, policy, seed: int | None, cost: StepCost | None):
        self.path, self.policy, self._cost, self._seed = path, policy, cost, seed
        self.seed = seed
        self.name = policies.spec(policy)
        self.torn_line: int | None = None
        self.without_status = 0
        self._engines: dict[int, tuple[EngineConfig, Predictor | None]] = {}
        self._foresight: Foresight | None = None
        self._prefixes: PrefixRecord | None = None
        self._ledgers: dict[int, Ledger] = {}
        self._open: dict[int, Prediction] = {}  # of the recorded choice, until its outcome
        self._measured: dict[int, dict[int, float]] = {}
        params = getattr(type(policy), "__dataclass_params__", None)
        self._remembers = params is None or not params.frozen  # its choices depend on those before
        self._learns = getattr(policy, "foresight", "none") in ("learned", "both")

    def rows(self, kept: Kept, progress=None):
        """A row a decision; their measured columns are still empty."""
        done = 0
        for entry in journal.read(self.path, torn=self._tear):
            event = entry.get("event")
            try:
                if event == "router":
                    self._begin(entry)
                elif event == "decision" and "statuses" in entry:
                    yield self._decide(entry, kept)
                    done += 1
                    if progress is not None:
                        progress(done)
                elif event == "decision":
                    self.without_status += 1
                elif event in ("outcome", "probe"):
                    self._learn(entry)
                elif event == "pair":
                    raise InputError(BOTH_KINDS)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                if isinstance(error, InputError):
                    raise InputError(f"journal {str(self.path)!r}, request {entry.get('rid')}: {error}") from None
                raise InputError(
                    f"journal {str(self.path)!r}: the {event} of request {entry.get('rid')} is damaged ({error!r})"
                ) from None

    def measure(self, row: dict) -> None:
        """Fill in what was measured, of the whole journal."""
        measured = self._measured.get(row["rid"], {})
        row["measured_e2e_s"] = measured.get(row["instance"], math.nan)
        everywhere = set(row["instances"]) <= set(measured)
        best = min((measured[i] for i in row["instances"]), default=math.nan) if everywhere else math.nan
        row["measured_regret_s"] = row["measured_e2e_s"] - best

    def _tear(self, line: int) -> None:
        self.torn_line = line

    def _begin(self, entry: dict) -> None:
        """A router started: it knows nothing of what was before."""
        if self._seed is None:
            self.seed = int(entry["seed"])
        kind = getattr(self.policy, "foresight", "none")
        self._foresight = Foresight(kind, len(entry["engines"])) if kind != "none" else None
        self._engines = {}
        for each in entry["engines"]:
            config = EngineConfig(**each["engine"])
            cost = self._cost or (StepCost.from_dict(each["cost"]) if "cost" in each else None)
            extension = each.get("extension_tokens", EXTENSION_TOKENS)
            predictor = Predictor(config, cost, extension, self._foresight) if cost else None
            self._engines[each["instance"]] = (config, predictor)
        self._prefixes = PrefixRecord(
            BLOCK_TOKENS, {i: config.usable_blocks * config.block_size for i, (config, _) in self._engines.items()}
        )
        self._ledgers = {i: Ledger() for i in self._engines}
        self._open.clear()

    def _decide(self, entry: dict, kept: Kept) -> dict:
        if not self._engines:
            raise InputError("no router line comes before its decision; is the journal's begin missing?")
        request = Request(
            entry["rid"], entry["arrived_s"], entry["prompt_tokens"], entry["predicted_tokens"], entry["slo"],
            tuple(entry["prefix_blocks"]),
        )  # fmt: skip
        recorded = entry["instance"]
        row = kept.row(request.rid, entry["attempt"])
        if row is None or self._remembers or self._learns:
            view = LiveView(self._candidates(entry), entry["time_s"], prefixes=self._prefixes)
            rng = decision_stream(self.seed, request.rid, entry["attempt"])
            index = check_choice(self.policy.choose(request, view, rng), len(view), self.name)
            if row is None or self._learns:
                e2e_s = view.predict(request, "e2e_s", range(len(view)))
                if not entry.get("probe") and (prediction := view.predictions.get(recorded)) is not None:
                    self._open[request.rid] = prediction
            if row is None:
                row = self._row(entry, request, view.instances, index, e2e_s)
                kept.keep(row)
        for i in (numbers["instance"] for numbers in entry["signals"]) if entry.get("probe") else (recorded,):
            self._ledgers[i].open(
                request.rid, request.prompt_tokens, request.predicted_tokens, entry["decided_s"]
            )  # fmt: skip
        if self._foresight is not None and not entry.get("probe"):
            self._foresight.observe_dispatch(entry["decided_s"], request.prompt_tokens, request.predicted_tokens)
        if request.prefix_blocks:
            self._prefixes.sent(request, recorded, entry["decided_s"])
        return row

    def _candidates(self, entry: dict) -> list[RecordedInstance]:
        described = (entry["signals"], entry["statuses"], entry["status_from"], entry["unseen"])
        found = []
        for numbers, packed, source, sent in zip(*described, strict=True):
            i = numbers["instance"]
            config, predictor = self._engines[i]
            if source == "published":
                status = unpack(packed)
            else:
                status = reckon_again(packed, self._ledgers[i], config, entry["time_s"])
            sent = [tuple(dispatch) for dispatch in sent]
            found.append(RecordedInstance(i, config, predictor, status, source, numbers, sent))
        return found

    @staticmethod
    def _row(entry: dict, request: Request, instances: tuple, index: int, e2e_s: np.ndarray) -> dict:
        best = int(np.argmin(e2e_s))
        fits = math.isfinite(e2e_s[best])
        own = math.nan if entry.get("probe") else entry["instance"]
        own_e2e_s = math.nan if entry.get("probe") else float(e2e_s[instances.index(own)])
        return {
            "rid": request.rid,
            "attempt": entry["attempt"],
            "time_s": entry["time_s"],
            "arrived_s": request.arrived_s,
            "prompt_tokens": request.prompt_tokens,
            "predicted_tokens": request.predicted_tokens,
            "slo": request.slo,
            "candidates": len(instances),
            "instances": list(instances),
            "recorded_instance": own,
            "instance": instances[index],
            "best_instance": instances[best] if fits else -1,
            "predicted_e2e_s": float(e2e_s[index]),
            "best_e2e_s": float(e2e_s[best]),
            "regret_s": float(e2e_s[index] - e2e_s[best]) if fits else math.nan,
            "recorded_regret_s": own_e2e_s - float(e2e_s[best]) if fits else math.nan,
        }

    def _learn(self, entry: dict) -> None:
        """A dispatch has ended, or a probe."""
        rid, i = entry["rid"], entry["instance"]
        prediction = None
        if i is not None:
            self._ledgers[i].close(rid)
        if entry["event"] == "outcome" and i is not None:
            prediction = self._open.pop(rid, None)
        if i is None or entry.get("status", "ok") != "ok":
            return
        e2e_s = float(entry["e2e_s"])
        self._measured.setdefault(rid, {})[i] = e2e_s
        if self._learns and prediction is not None and prediction.basis and entry["ttft_s"] is not None:
            self._foresight.observe_outcome(prediction, entry["ttft_s"], e2e_s)


def _mean(values) -> float:
    return float(values.mean()) if len(values) else math.nan
