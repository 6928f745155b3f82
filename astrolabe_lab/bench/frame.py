"""From what was sent and what came back to a result frame, and whether it can be believed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from astrolabe_lab.bench.load import Load, Served, sends_text

if TYPE_CHECKING:
    import pandas as pd

    from astrolabe_lab.measure.slo import SLO

LATENESS_SHARE = 0.01  # of the TTFT SLO: past this at the 99th percentile a run is invalid
FIELDS = (
    "scheduled_s", "sent_s", "first_token_s", "finished_s", "tokens", "status", "reason", "instance",
    "prefill_instance", "decode_instance", "predicted_e2e_s", "decision_s", "segment",
)  # fmt: skip


def frame_of(trace: pd.DataFrame, sent: list, load: Load, served: Served) -> pd.DataFrame:
    """The result frame of the requests ``sent``, one row each; ``attrs["validity"]`` says whether to believe it.

    ``prompt_tokens`` are the trace's; ``counted_prompt_tokens`` what the engine said, NaN where it said nothing. Of
    pools, beside ``instance`` (of all engines, prefill first): ``prefill_instance`` and ``decode_instance``, numbered
    in their pools from 0; -1 where no engine answered, and where the decode engine computed the prompt itself.
    """
    import numpy as np

    from astrolabe_lab.result import ordered

    columns = {name: np.array([getattr(s, name) for s in sent]) for name in FIELDS}
    frame = trace.drop(columns=["prompt"], errors="ignore").reset_index(drop=True)
    ok = columns["status"] == "ok"
    scheduled, first, finished = columns["scheduled_s"], columns["first_token_s"], columns["finished_s"]
    tokens = columns["tokens"]
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot_s = np.where(tokens > 1, (finished - first) / (tokens - 1), np.nan)
    frame = frame.assign(
        arrived_s=scheduled,
        sent_s=columns["sent_s"],
        send_late_s=columns["sent_s"] - scheduled,
        instance=columns["instance"],
        first_token_s=np.where(ok, first, np.nan),
        finished_s=finished,
        ttft_s=np.where(ok, first - scheduled, np.nan),
        tpot_s=np.where(ok, tpot_s, np.nan),
        e2e_s=np.where(ok, finished - scheduled, np.nan),
        ttft_from_send_s=np.where(ok, first - columns["sent_s"], np.nan),
        e2e_from_send_s=np.where(ok, finished - columns["sent_s"], np.nan),
        generated_tokens=tokens,
        predicted_e2e_s=columns["predicted_e2e_s"],
        decision_s=columns["decision_s"],
        status=columns["status"],
        source=served.source if served.router else load.source,
        policy=served.policy,
        seed=served.seed,
        reason=columns["reason"],
        segment=columns["segment"],
        counted_prompt_tokens=np.array([s.prompt_tokens for s in sent], dtype=float),
    )
    if served.pools:
        frame = frame.assign(**{name: columns[name] for name in ("prefill_instance", "decode_instance")})
    frame = ordered(frame)
    frame.attrs["validity"] = validity(frame, load)
    return frame


def validity(frame: pd.DataFrame, load: Load) -> dict:
    """Whether the run can be believed: ``valid``, ``why`` not, the generator's 99th percentile of lateness in modelled
    s and its bound, how many answers had another length than asked for (``exact`` loads), how many prompts had another
    than the trace says (as far as engines tell), and ``notes``."""
    import numpy as np

    late = float(np.nanpercentile(frame["send_late_s"], 99)) if len(frame) else 0.0
    bound = LATENESS_SHARE * load.ttft_slo_s
    wrong = int((frame.loc[frame["status"] == "ok", "generated_tokens"]
                 != frame.loc[frame["status"] == "ok", "output_tokens"]).sum())  # fmt: skip
    reasons, notes = [], []
    if late > bound:
        reasons.append(f"requests left late: p99 {late:.4f} s, allowed {bound:.4f} s (1 % of the TTFT SLO)")
    if load.exact and wrong:
        reasons.append(f"{wrong} answers had another number of tokens than asked for")
    counted = frame[(frame["status"] == "ok") & frame["counted_prompt_tokens"].notna()]
    others = counted[counted["counted_prompt_tokens"] != counted["prompt_tokens"]]
    if len(others) and not sends_text(load):
        reasons.append(f"{len(others)} prompts had another number of tokens for the engine than were sent")
    elif len(others):
        told, meant = counted["counted_prompt_tokens"].sum(), counted["prompt_tokens"].sum()
        notes.append(
            f"engines counted other prompt_tokens than the trace says in {len(others)} of {len(counted)} requests, "
            f"{told / meant - 1:+.1%} in sum: these are in counted_prompt_tokens, rates go by the trace"
        )
    segments = frame["segment"].unique() if len(frame) and "segment" in frame else [0]
    if len(segments) > 1:
        notes.append(
            f"the run was broken off and went on {len(segments) - 1} times: after each break the engines start empty"
        )
    return {
        "valid": not reasons, "send_late_p99_s": late, "bound_s": bound, "wrong_lengths": wrong,
        "wrong_prompts": len(others), "why": reasons, "notes": notes,
    }  # fmt: skip


def both_goodputs(frame: pd.DataFrame, slo: SLO) -> dict[str, float]:
    """``measure.slo.goodput`` counted from the schedule, and from the sending (``..._from_send``)."""
    from astrolabe_lab.measure.slo import goodput

    found = goodput(frame, slo)
    sent = goodput(frame.assign(arrived_s=frame["sent_s"]), slo)
    return found | {f"{name}_from_send": value for name, value in sent.items()}
