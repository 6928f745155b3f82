"""Inter-token latencies: the gaps between the tokens of a request, which a result frame holds only the sum of."""

import numpy as np
import pandas as pd

from astrolabe_lab.errors import InputError

from .frames import NEEDED, require_columns
from .inside import walk


def token_gaps(step_log: pd.DataFrame, trace: pd.DataFrame) -> pd.DataFrame:
    """Each gap between two successive tokens of a request, in the order they end: `rid, ended_s, itl_s`.

    `step_log` and `trace` are the engine's (`sim.engine.run_one`). A token comes at the end of the step that computed
    all that its request had left. This is vLLM's ITL, of tokens that are sent one by one: its mean is over gaps, not
    over requests as TPOT's is, and a preemption is one long gap. Raises InputError for a missing column.
    """
    require_columns(step_log, ("end_s",))
    emits = np.fromiter((emitted for _, emitted in walk(step_log, trace)), bool, len(step_log))
    tokens = step_log.loc[emits, ["rid", "end_s"]]
    itl_s = tokens.groupby("rid", sort=False)["end_s"].diff()
    later = itl_s.notna()
    gaps = {"rid": tokens.loc[later, "rid"], "ended_s": tokens.loc[later, "end_s"], "itl_s": itl_s[later]}
    return pd.DataFrame(gaps).reset_index(drop=True)


def inter_token_latencies(results: pd.DataFrame, engine=None, cost=None, dispatch_s: float = 0.0) -> pd.DataFrame:
    """The gaps of a simulated run's requests, `instance, rid, ended_s, itl_s`, instance by instance.

    `results` is one run's result frame, `engine` and `cost` those it was made with (default: the preset
    llama2-7b-a30's, as `simulate`'s), `dispatch_s` its control plane's. What an engine does follows from what it was
    sent and when, so each is run once more alone, with a step log; a result that does not come out again, to a
    billionth of a second, is an InputError: then engine or cost are others, or instances failed or were slowed.
    """
    from astrolabe_lab.sim.config import EngineConfig
    from astrolabe_lab.sim.engine import run_one

    require_columns(results, ("instance", "rid", "prompt_tokens", "output_tokens", *NEEDED))
    if engine is None or cost is None:
        from astrolabe_lab.cost import preset

        default = preset("llama2-7b-a30")
        engine = EngineConfig.from_dict(default.engine) if engine is None else engine
        cost = default.cost if cost is None else cost
    parts = []
    for instance, rows in results[results["status"] == "ok"].groupby("instance"):
        waited_s = rows.get("decision_s", 0.0)
        sent = pd.DataFrame({"arrived_s": rows["arrived_s"] + waited_s + dispatch_s})
        sent = sent.join(rows[["rid", "prompt_tokens", "output_tokens"]]).sort_values("arrived_s", kind="stable")
        again, steps = run_one(sent.reset_index(drop=True), engine, cost)
        expected = rows.set_index("rid")["finished_s"].reindex(again["rid"]).to_numpy()
        if not np.allclose(again["finished_s"], expected, rtol=0, atol=1e-9):
            worst = float(np.nanmax(np.abs(again["finished_s"] - expected)))
            raise InputError(
                f"instance {instance} does not come out again (off by {worst:.3g} s): give the engine, cost and "
                "dispatch_s of the run; runs with outages or slowdowns cannot be taken apart"
            )
        parts.append(token_gaps(steps, sent).assign(instance=instance))
    if not parts:
        raise InputError("no request of this frame ended well, so there are no gaps between tokens")
    gaps = pd.concat(parts, ignore_index=True)
    return gaps[["instance", "rid", "ended_s", "itl_s"]]
