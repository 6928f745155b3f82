"""What "Calibrate, Then Route" measured on eight A40s, as far as our copy of it says.

Its tables are missing from the copy: these are the numbers in its text. Goodput is the share of requests within their
targets; pools are 2 prefill + 4 decode unless said. Where the text gives a bound only, ``at_least`` is True.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

LEARNED = "marginal_cost"
GOODPUT, P99 = "goodput_share", "ttft_p99_s"


@dataclass(frozen=True)
class Cell:
    """One number: the study and setting it belongs to, the policy, the metric, its value."""

    study: str
    setting: str
    policy: str
    metric: str
    value: float
    at_least: bool = False


CELLS = (
    Cell("families", "mixed", LEARNED, GOODPUT, 0.864),
    Cell("families", "mixed", "least_loaded", GOODPUT, 0.835),
    Cell("families", "reasoning", LEARNED, GOODPUT, 0.955),
    Cell("families", "chat", "length_threshold", GOODPUT, 0.855),
    Cell("families", "chat", LEARNED, GOODPUT, 0.760),
    Cell("families", "documents", "round_robin", GOODPUT, 0.585),
    Cell("families", "documents", "least_loaded", GOODPUT, 0.695, at_least=True),
    Cell("families", "documents", "length_threshold", GOODPUT, 0.695, at_least=True),
    Cell("families", "documents", LEARNED, GOODPUT, 0.695, at_least=True),
    Cell("constants", "paper-simulator", LEARNED, GOODPUT, 0.819),
    Cell("constants", "calibrated", LEARNED, GOODPUT, 0.864),
    Cell("width", "2+3", LEARNED, GOODPUT, 0.816),
    Cell("width", "2+3", "least_loaded", GOODPUT, 0.822),
    Cell("width", "2+4", LEARNED, GOODPUT, 0.864),
    Cell("width", "2+4", "least_loaded", GOODPUT, 0.835),
    Cell("width", "2+6", LEARNED, GOODPUT, 0.858),
    Cell("width", "2+6", "round_robin", GOODPUT, 0.860),
    Cell("gpus", "1+2", LEARNED, GOODPUT, 0.292),
    Cell("gpus", "1+2", "round_robin", GOODPUT, 0.680),
    Cell("gpus", "5", LEARNED, GOODPUT, 0.823),
    Cell("gpus", "6", LEARNED, GOODPUT, 0.870),
    Cell("load", "lowest", "round_robin", GOODPUT, 0.880),
    Cell("load", "highest", "round_robin", GOODPUT, 0.733),
    Cell("load", "lowest", "round_robin", P99, 0.22),
    Cell("load", "highest", "round_robin", P99, 0.56),
    Cell("tails", "operating point", LEARNED, P99, 0.321),
    Cell("tails", "operating point", "round_robin", P99, 0.337),
    Cell("tails", "operating point", "least_loaded", P99, 0.346),
)
ROUND_ROBIN = {c.setting: c.value for c in CELLS if (c.study, c.policy) == ("families", "round_robin")}
# Points of goodput that the router loses without a term (positive: it gains).
ABLATION = {("no lengths", "steady"): -3.2, ("no lengths", "saturated"): -4.7, ("no slo", "steady"): -1.7,
            ("no slo", "saturated"): 3.7}  # fmt: skip
LENGTH_ERROR = (0.838, 0.880)  # lowest and highest goodput over errors of 0 to 150 %
WINNERS = {"mixed": LEARNED, "reasoning": LEARNED, "chat": "length_threshold"}
# Section VI: mean absolute residual over its 4 x 4 grid, and workloads whose winner it got right.
SIMULATORS = {"serial": (0.067, 0), "batching": (0.068, 0)}


def cells(study: str | None = None) -> pd.DataFrame:
    """The numbers of a study, or all: ``study, setting, policy, metric, value, at_least``."""
    import pandas as pd

    frame = pd.DataFrame([cell.__dict__ for cell in CELLS])
    return frame if study is None else frame[frame["study"] == study].reset_index(drop=True)


def residuals(summary: pd.DataFrame, by: str = "service") -> pd.DataFrame:
    """Simulated minus measured goodput of every known cell of the families: ``by, family, policy, measured, at_least,
    simulated, low, high, residual``.

    ``summary``: rows of a sweep with ``trace`` (family:NAME), ``policy`` and the column ``by``. Where only a bound was
    measured the residual is how far the simulated value falls below it.
    """
    import pandas as pd

    from astrolabe_lab import measure

    table = measure.over_seeds(summary, GOODPUT, by=[by, "trace", "policy"])
    known = {(cell.setting, cell.policy): cell for cell in CELLS if cell.study == "families"}
    rows = []
    for row in table.itertuples():
        family = row.trace.removeprefix("family:")
        if (cell := known.get((family, row.policy))) is None:
            continue
        residual = row.mean - cell.value
        if cell.at_least:
            residual = min(residual, 0.0)
        first = getattr(row, by)
        rows.append((first, family, row.policy, cell.value, cell.at_least, row.mean, row.low, row.high, residual))
    names = [by, "family", "policy", "measured", "at_least", "simulated", "low", "high", "residual"]
    return pd.DataFrame(rows, columns=names)
