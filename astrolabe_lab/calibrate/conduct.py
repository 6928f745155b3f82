"""A calibration from begin to end: rough times, rounds of bursts within the budget, constants."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

import numpy as np

from astrolabe_lab.calibrate.artifact import Calibration, Slo
from astrolabe_lab.calibrate.cells import FirstToken, Observation, Prefill, chunked
from astrolabe_lab.calibrate.fit import Fitted, fit, line
from astrolabe_lab.calibrate.plan import Plan, plan_for, roughly
from astrolabe_lab.calibrate.transfer import measure_transfer
from astrolabe_lab.cost import StepCost
from astrolabe_lab.errors import InputError
from astrolabe_lab.rng import stream

LAG_BOUND_S = 0.005
RESIDUAL_BOUND = 0.05
TTFT_FACTOR, TPOT_FACTOR = 2.6, 3.0  # of the unloaded values; Calibrate-then-Route's targets over its constants
REFERENCE_TOKENS = 256
RESERVE = 0.12  # of the budget: what a round may overrun, and the transfers
LAST = 0.02  # of the budget, which nothing may take


@dataclass
class Measured:
    """What has been observed so far."""

    windows: list[Observation] = field(default_factory=list)
    first_tokens: list[FirstToken] = field(default_factory=list)
    streamed: list[dict] = field(default_factory=list)  # a row for each burst through a router
    transfers: list[dict] = field(default_factory=list)  # a row for each hand-off
    bursts: int = 0
    rounds: int = 0
    missing: int = 0  # windows that were asked for and could not be read


def calibrate(
    cluster,
    budget_s: float = 300.0,
    seed: int = 0,
    rounds: int = 8,
    reference_tokens: int = REFERENCE_TOKENS,
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    """The Calibration of ``cluster``, measured on its first engine (pools: the first of each) in at most ``budget_s``.

    ``cluster``: what ``engines.launch.launch`` returns or its folder, a ``SimulatedTarget``, what ``live.engines_at``
    makes of URLs, or a pair of targets (prefill, decode). ``rounds``: at most so many passes over all cells.
    ``progress`` gets one line at a time (default: standard error). Raises InputError where
    the budget does not last for one round, or too little could be measured.
    """
    from astrolabe_lab.calibrate.live import targets_of

    say = progress or (lambda line: print(line, file=sys.stderr, flush=True))
    prefill, decode = targets_of(cluster)
    try:
        return _calibrate(prefill, decode, budget_s, seed, rounds, reference_tokens, say)
    finally:
        if not hasattr(cluster, "burst") and not isinstance(cluster, tuple):  # targets made here are closed here
            for target in {id(t): t for t in (prefill, decode)}.values():
                target.close()


def _calibrate(prefill, decode, budget_s, seed, rounds, reference_tokens, say) -> Calibration:
    pools = prefill is not decode
    clock = _Clock([prefill, decode] if pools else [prefill], budget_s)
    measured, roughs = Measured(), {}
    plans: list[tuple[object, Plan]] = []
    for target, kinds in (
        ((prefill, {"decodes": not pools}), (decode, {"prefills": False})) if pools else ((prefill, {}),)
    ):
        rough = roughs[id(target)] = roughly(target)
        plan = plan_for(target.describe().engine, rough, **kinds)
        if pools and target is decode:
            plan = Plan(plan.decode, plan.mixed[:1], ())
        plans.append((target, plan))
    both = roughs[id(prefill)], roughs[id(decode)]
    if runs := hasattr(decode, "url"):  # so that a router can stand before it
        from astrolabe_lab.calibrate import streamed as through

        clock.kept_s = max(through.SHARE * budget_s, through.least_s(decode.describe(), *both, reference_tokens))
    a_round_s = sum(plan.expected_s(roughs[id(target)]) for target, plan in plans)
    rng = stream(seed, "calibration order")
    if clock.left_s(RESERVE) < a_round_s:
        plans = [(target, _halved(plan)) for target, plan in plans]
        say(f"calibrate: the budget of {budget_s:.0f} s does not last for all cells; measuring every other one")
        a_round_s = sum(plan.expected_s(roughs[id(target)]) for target, plan in plans)
        if clock.left_s(RESERVE) < a_round_s:
            needed = (a_round_s + clock.spent_s + clock.kept_s) / (1 - RESERVE)
            raise InputError(
                f"budget_s={budget_s:g} is too little here: one round needs about {needed:.0f} s of {clock.unit} time "
                f"(time scale {prefill.describe().time_scale:g})"
            )
    for _ in range(rounds):
        begun_s = clock.spent_s
        order = [(target, cell) for target, plan in plans for cell in plan.cells]
        for j in rng.permutation(len(order)):
            target, cell = order[j]
            _measure(target, cell, roughs[id(target)], measured)
            if clock.left_s(RESERVE / 2) <= 0:
                break
        measured.rounds += 1
        took_s = clock.spent_s - begun_s
        say(
            f"calibrate: round {measured.rounds}, {len(measured.windows)} windows of steps, "
            f"{len(measured.first_tokens)} first tokens, {clock.spent_s:.0f} of {budget_s:.0f} s"
        )
        if clock.left_s(RESERVE) < took_s:
            break
    fitted = fit(measured.windows, seed)
    transfer = None
    if _hands_off(decode):
        transfer, measured.transfers = measure_transfer(prefill, decode, fitted, clock.left_s(LAST), rng)
    streamed = None
    if runs:
        clock.kept_s = 0.0
        streamed, measured.streamed = through.measure_streamed(
            prefill, decode, fitted.cost, both, reference_tokens, rounds, lambda: clock.left_s(LAST), rng
        )
        say(f"calibrate: {streamed.bursts} bursts through a router, {clock.spent_s:.0f} of {budget_s:.0f} s")
    return _assemble(prefill, decode, measured, fitted, transfer, streamed, reference_tokens, clock.spent_s, seed)


class _Clock:
    """The budget, in wall seconds (modelled ones for a simulated cluster); ``kept_s`` of it are for what comes last."""

    def __init__(self, targets, budget_s: float):
        if isinstance(budget_s, bool) or not isinstance(budget_s, (int, float)) or not 0 < budget_s < 1e6:
            raise InputError(f"budget_s={budget_s!r} must be a number of seconds > 0")
        self._targets = [(t, t.now_s(), t.describe().time_scale) for t in targets]
        self._shared = all(hasattr(t, "wall") for t in targets)
        self.budget_s, self.kept_s = float(budget_s), 0.0

    @property
    def unit(self) -> str:
        return "wall" if self._shared else "simulated"

    @property
    def spent_s(self) -> float:
        spent = [(t.now_s() - begun) * scale for t, begun, scale in self._targets]
        return max(spent) if self._shared else sum(spent)

    def left_s(self, reserve: float) -> float:
        return (1 - reserve) * self.budget_s - self.kept_s - self.spent_s


def _measure(target, cell, rough, measured: Measured) -> None:
    answers = target.burst(cell.probes(rough))
    found = cell.read(answers, measured.bursts, rough.room)
    measured.bursts += 1
    if isinstance(cell, Prefill):
        measured.first_tokens += found
        measured.missing += len(cell.sizes) - len(found)
    else:
        measured.windows += found
        measured.missing += len(getattr(cell, "sizes", (1,))) - len(found)


def _halved(plan: Plan) -> Plan:
    def every_other(cells):
        return tuple(cell for j, cell in enumerate(cells) if j % 2 == 0 or j == len(cells) - 1)

    return Plan(every_other(plan.decode), plan.mixed, plan.prefill)


def _hands_off(target) -> bool:
    return getattr(target, "transfer", None) is not None


def _assemble(prefill, decode, measured, fitted: Fitted, transfer, streamed, reference, spent_s, seed) -> Calibration:
    from astrolabe_lab.record import facts

    about, config = decode.describe(), decode.describe().engine
    chunk = prefill.describe().engine.max_num_batched_tokens
    sizes = np.array([f.prompt_tokens for f in measured.first_tokens], float)
    seconds = np.array([f.seconds for f in measured.first_tokens])
    if len(np.unique(sizes)) < 3:
        raise InputError("calibration: first tokens of 3 prompt lengths are needed; give it more time (budget_s)")
    (base_s, token_s), (around_base, around_token) = line(sizes, seconds)
    overhead = seconds - np.array([first_token_s(fitted.cost, int(n), chunk) for n in sizes])
    most = config.max_num_seqs

    def step(cost: StepCost, streams: int) -> float:
        return cost.step_seconds(streams, streams, streams * reference)

    def slope(cost: StepCost) -> float:
        return (step(cost, most) - step(cost, 1)) / (most - 1) if most > 1 else 0.0

    decode_s = step(fitted.cost, 1)
    derived = {
        "decode_s": fitted.interval(lambda cost: step(cost, 1)),
        "decode_slope_s": fitted.interval(slope),
        "prefill_base_s": around_base,
        "prefill_token_s": around_token,
    }
    handed_s = transfer.seconds(-(-reference // config.block_size)) if transfer else 0.0
    unloaded_s = base_s + token_s * reference + handed_s
    residuals = _residuals(fitted)
    return Calibration(
        model=about.model,
        device=about.device,
        source=about.source,
        engine=asdict(config),
        cost=fitted.cost,
        intervals={name: list(pair) for name, pair in (fitted.intervals | derived).items()},
        prefill_base_s=base_s,
        prefill_token_s=token_s,
        decode_s=decode_s,
        decode_slope_s=slope(fitted.cost),
        overhead_s=max(0.0, float(np.median(overhead))),
        reference_tokens=reference,
        kv_blocks=decode.kv_blocks(),
        slo=Slo(TTFT_FACTOR * unloaded_s, TPOT_FACTOR * decode_s),
        transfer=transfer,
        streamed=streamed,
        flags=dict(about.flags),
        time_scale=about.time_scale,
        bends=fitted.bends,
        gates=_gates(prefill, decode, residuals, streamed),
        residuals=residuals,
        rows=_rows(measured, fitted),
        seconds=round(spent_s, 3),
        rounds=measured.rounds,
        seed=seed,
        date=datetime.now(UTC).date().isoformat(),
        versions=facts()["versions"],
    )


def first_token_s(cost: StepCost, prompt_tokens: int, room: int) -> float:
    """Seconds of the steps that compute a prompt on an idle engine."""
    return sum(
        cost.step_seconds(size, 1, done, size * done + size * size / 2, mixed=True)
        for done, size in chunked(prompt_tokens, room)
    )


def _residuals(fitted: Fitted) -> dict:
    found = {}
    for regime, mixed in (("decode", False), ("mixed", True)):
        off, unseen, cells = [], [], {}
        for (seconds, priced, is_mixed, cell), unseen_s in zip(fitted.residuals, fitted.unseen_s, strict=True):
            if is_mixed == mixed:
                off.append(priced / seconds - 1)
                unseen.append(unseen_s / seconds - 1)
                cells.setdefault(cell, []).append(off[-1])
        told = np.abs([each for each in unseen if np.isfinite(each)])
        found[regime] = {
            "windows": len(off),
            "mean_abs_pct": round(100 * float(np.mean(np.abs(off))), 3),
            "worst_cell_pct": round(100 * max(abs(float(np.median(each))) for each in cells.values()), 3),
            "unseen_windows": len(told),
            "unseen_mean_abs_pct": round(100 * float(np.mean(told)), 3) if len(told) else None,
        }
    return found


def _gates(prefill, decode, residuals, streamed) -> dict:
    worst = max(residuals[regime]["worst_cell_pct"] for regime in residuals) / 100
    gates = {"worst_cell": {"value": worst, "bound": RESIDUAL_BOUND, "ok": worst <= RESIDUAL_BOUND}}
    lags = [t.loop_lag_s for t in (prefill, decode) if getattr(t, "loop_lag_s", None) is not None]
    late = {"loop_lag_p99_s": max(lags)} if lags else {}
    if streamed is not None:
        late["proxy_loop_lag_p99_s"] = streamed.loop_lag_p99_s
    return gates | {name: {"value": s, "bound": LAG_BOUND_S, "ok": s <= LAG_BOUND_S} for name, s in late.items()}


def _rows(measured: Measured, fitted: Fitted) -> dict:
    windows = []
    for observation, (seconds, priced, _, _) in zip(measured.windows, fitted.residuals, strict=True):
        chunks = [s for s in observation.steps if s.mixed]
        plain = [s for s in observation.steps if not s.mixed]
        chief = chunks[0] if chunks else plain[0]
        windows.append(
            {"mixed": bool(chunks), "steps": int(sum(s.times for s in observation.steps)),
             "new_tokens": chief.new_tokens, "sequences": chief.sequences, "context_tokens": chief.context_tokens,
             "seconds": round(seconds, 6), "priced_s": round(priced, 6), "burst": observation.burst}
        )  # fmt: skip
    tokens = [{"prompt_tokens": f.prompt_tokens, "seconds": round(f.seconds, 6)} for f in measured.first_tokens]
    return {
        "windows": windows, "first_tokens": tokens, "streamed": measured.streamed, "transfers": measured.transfers,
        "unread": measured.missing,
    }  # fmt: skip
