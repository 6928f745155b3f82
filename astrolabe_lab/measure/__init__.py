"""What runs measured, and how sure that is.

From one row per request: `summarise` (latencies, rates, goodput, prediction error), `steady` (without warm-up and
drain). From one row per run: `over_seeds`, `paired_difference`, `up_to`, `compare`. `capacity` finds the highest rate
that keeps an SLO, `rank_one` replays decisions on the candidates that were not chosen.
"""

from .counterfactual import rank_one, replay_decisions
from .families import holm, simultaneous
from .frames import NEEDED, STATUSES, listed, require_columns
from .gaps import inter_token_latencies, token_gaps
from .inside import queue_lengths, schedule_differences, step_kinds
from .intervals import interval, over_seeds, p_value, t_interval, wilson
from .knee import KINDS, Capacity, capacity, crossing, named
from .latency import LATENCIES, PERCENTILES, latencies, percentile, summarise, workload
from .paired import beside, best_and_undecided, first_above, paired_difference, paired_table, verdicts
from .power import seeds_needed
from .prediction import load_at_arrival, prediction_error, relative_errors
from .regime import phases, steady, steady_rates, steady_window, trend, waiting_trend, worst_third
from .slo import SLO, attainment, goodput, met
from .upto import up_to
from .versus import METRICS as COMPARED
from .versus import compare

__all__ = [
    "COMPARED",
    "Capacity",
    "KINDS",
    "LATENCIES",
    "NEEDED",
    "PERCENTILES",
    "SLO",
    "STATUSES",
    "attainment",
    "beside",
    "best_and_undecided",
    "capacity",
    "compare",
    "crossing",
    "first_above",
    "goodput",
    "holm",
    "inter_token_latencies",
    "interval",
    "latencies",
    "listed",
    "load_at_arrival",
    "met",
    "named",
    "over_seeds",
    "p_value",
    "paired_difference",
    "paired_table",
    "percentile",
    "phases",
    "prediction_error",
    "queue_lengths",
    "rank_one",
    "relative_errors",
    "replay_decisions",
    "require_columns",
    "schedule_differences",
    "seeds_needed",
    "simultaneous",
    "steady",
    "steady_rates",
    "steady_window",
    "step_kinds",
    "summarise",
    "t_interval",
    "token_gaps",
    "trend",
    "up_to",
    "verdicts",
    "waiting_trend",
    "wilson",
    "workload",
    "worst_third",
]
