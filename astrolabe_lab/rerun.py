"""A simulated result made again from what it says about itself: other luck, or other arrivals."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from astrolabe_lab.measure import SLO

NEEDED = ("policy", "instances", "engine", "cost", "control", "latency_noise", "seed")
NEEDED_OF_POOLS = (
    *("policy", "pools", "engine", "cost", "hand_off", "constants", "service", "signals", "poll_s", "seed"),
)
UNKNOWN = (KeyError, TypeError, AttributeError, ValueError)  # raised by settings of another version, or damaged ones


def about_of(results: pd.DataFrame) -> dict:
    """What the frame says about how it was made; nothing where it says nothing that we understand."""
    about = results.attrs.get("astrolabe")
    return about if isinstance(about, dict) else {}


def can_rerun(results: pd.DataFrame, other_arrivals: bool = False) -> bool:
    """Whether the frame, as `astrolabe simulate` writes it to Parquet, tells enough to be made again."""
    about = about_of(results)
    known = not _lacks(about) and set(results.get("source", ())) == {"simulated"}
    return known and (about.get("qps") is not None or not other_arrivals)


def rerun(results: pd.DataFrame, policy_seed: int | None = None, seed: int | None = None) -> pd.DataFrame:
    """The result frame of the same policy and cluster, or pools, on the same requests, or at another `seed`.

    `results` is what `astrolabe simulate --out FILE.parquet` wrote and pandas read: its `attrs` hold the settings.
    `policy_seed` gives the routers other draws. `seed` gives the requests, in another random order, other arrivals
    of the same kind at the same rate, and the routers other draws. Neither: the same result once more. Raises
    InputError where the frame does not tell its settings (CSV has no place for them), was not simulated, or
    kept the trace's own times, of which there are no others.
    """
    from astrolabe_lab import trace
    from astrolabe_lab.arrivals import with_arrivals
    from astrolabe_lab.trace.columns import COLUMNS

    about = about_of(results)
    if not can_rerun(results, seed is not None):
        lacks = _lacks(about)
        why = f"it does not tell {', '.join(lacks)}" if lacks else "it is not simulated, or keeps its trace's own times"
        raise InputError(f"this result cannot be made again: {why}; results of `astrolabe simulate` in Parquet can")
    requests = results[[name for name in COLUMNS if name in results]]
    if seed is not None:
        kind = about.get("arrivals") or "poisson"
        if kind == "trace":  # its own times, stretched: any others would be of another kind
            raise InputError("this result cannot be made again with other arrivals: its times are the trace's own")
        drawn = trace.sample(requests.drop(columns="arrived_s"), None, seed)
        requests = with_arrivals(drawn, about["qps"], kind, seed, about.get("alpha"))
    try:
        simulate = _of_pools(about) if "pools" in about else _of_engines(about)
    except UNKNOWN as error:
        raise InputError(f"this result cannot be made again: it was made in a way unknown here ({error})") from error
    return simulate(
        requests,
        seed=about["seed"] if seed is None else seed,
        policy_seed=about.get("policy_seed") if policy_seed is None and seed is None else policy_seed,
    )


def promised(results: pd.DataFrame) -> SLO | None:
    """The targets that requests to simulated pools had, whatever the router believed; None for other results."""
    about = about_of(results)
    if "pools" not in about or _lacks(about):
        return None
    from astrolabe_lab.disagg.settings import slo_of
    from astrolabe_lab.disagg.simulate import calibrated

    try:
        made = _of_pools(about).keywords
    except UNKNOWN as error:
        raise InputError(f"the targets of this result are not known: it was made in another way ({error})") from error
    return slo_of(calibrated(*(made[name] for name in ("engine", "cost", "hand_off", "service"))))


def _lacks(about: dict) -> list[str]:
    return [name for name in (NEEDED_OF_POOLS if "pools" in about else NEEDED) if name not in about]


def _of_engines(about: dict) -> partial:
    """`simulate` with the settings of a result of whole engines."""
    from astrolabe_lab import policies
    from astrolabe_lab.cost import StepCost
    from astrolabe_lab.sim.cluster import ControlPlane, LatencyNoise, simulate
    from astrolabe_lab.sim.config import EngineConfig

    predict_s = about["control"]["predict_s"]
    control = about["control"] | {"predict_s": tuple(predict_s) if isinstance(predict_s, list) else predict_s}
    return partial(
        simulate,
        policy=policies.parse(about["policy"]),
        instances=about["instances"],
        engine=EngineConfig.from_dict(about["engine"]),
        cost=StepCost.from_dict(about["cost"]),
        control=ControlPlane(**control),
        latency_noise=LatencyNoise(**about["latency_noise"]),
    )


def _of_pools(about: dict) -> partial:
    """`simulate_pools` with the settings of a result of pools."""
    from astrolabe_lab.cost import StepCost
    from astrolabe_lab.disagg import routers
    from astrolabe_lab.disagg.constants import Constants
    from astrolabe_lab.disagg.simulate import simulate_pools
    from astrolabe_lab.disagg.state import HandOff
    from astrolabe_lab.sim.config import EngineConfig

    return partial(
        simulate_pools,
        policy=routers.parse(about["policy"]),
        pools=about["pools"],
        engine=EngineConfig.from_dict(about["engine"]),
        cost=StepCost.from_dict(about["cost"]),
        hand_off=HandOff(**about["hand_off"]),
        constants=Constants.from_dict(about["constants"]),
        service=about["service"],
        signals=about["signals"],
        poll_s=about["poll_s"],
    )
