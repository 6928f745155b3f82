"""The experiments of the second paper as sweep definitions: each function returns a Grid for ``sweep.run``.

The decode slope (seconds that a further stream adds to a decode step) is an axis of all of them, for with the paper's
own, 0.055 ms, most of its effects are too small to be seen. ``anchors``: {slope in s: requests a second}, the rates
where round robin is in mid-collapse (``saturation.find``). Every policy at one seed meets the same requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from astrolabe_lab.sweep import Grid

SLOPES_S = (5.5e-5, 2e-4, 4e-4)
BASELINES = ("round_robin", "least_loaded", "length_threshold")
LEARNED = "marginal_cost"  # the paper's router, as far as it can be reconstructed
SAMPLED = "marginal_cost:k=2"  # what the paper names as the remedy for its collapse, and leaves undone
GUARDED = "marginal_cost:progress=streamed,guard=spare"  # ours: counts what has streamed, gives up one engine, not all
EVEN = "marginal_cost:progress=streamed,guard=least"  # the same, that spreads what no pair can serve in time
PREDICTED = "predicted"  # ours: runs two pairs forward for each request, so a run takes several times as long
POLICIES = (*BASELINES, LEARNED, SAMPLED, GUARDED)
OVERLOADED = (*POLICIES, EVEN)  # for engines that are too few
SUSPECTS = ("marginal_cost:slo=0", "marginal_cost:guard=least")  # of the collapse, and of what stops it
CORNER = ("round_robin", "least_loaded", LEARNED, SAMPLED, *SUSPECTS, EVEN, GUARDED)
FAMILIES = ("mixed", "chat", "documents", "reasoning")
TERMS = {
    "all terms": LEARNED,
    "no lengths": "marginal_cost:lengths=false",
    "no backlog": "marginal_cost:backlog=0",
    "no own work": "marginal_cost:own=0",  # the hand-off is in it, and all of it is the same for every pair
    "no cache": "marginal_cost:cache=0",
    "no slo": "marginal_cost:slo=0",
    "and what others lose": "marginal_cost:others=1",
    "streamed, not estimated": "marginal_cost:progress=streamed",
}
GPUS = {3: "1+2", 4: "1+3", 5: "2+3", 6: "2+4", 7: "2+5", 8: "2+6"}
BLOCK = 16  # tokens
TRAIN = "bursts:high=2.5,high_s=10,low_s=20"  # 2.5 times the mean rate for 10 s, then 20 s of calm


def settings(requests: int, family: str = "mixed", lengths: str = "noisy:0.3", **more) -> dict[str, object]:
    """What all runs of a study have in common: the paper's 2 + 4 engines, unless ``more`` says else."""
    return {"trace": f"family:{family}", "requests": requests, "pools": "2+4", "lengths": lengths} | more


def _points(anchors: Mapping[float, float], factors: Iterable[float] = (1.0,)) -> list[dict]:
    """An axis of slopes with their rates; with several ``factors`` also the column ``load``."""
    factors = [*factors]
    return [{"decode_slope_s": slope, "qps": qps * factor} for slope, qps in anchors.items() for factor in factors]


def _grid(defaults: dict, points: list[dict], *axes: list[dict], seeds: Sequence[int]) -> Grid:
    grid = Grid([points, *axes, [{"seed": seed} for seed in seeds]], defaults)
    grid.check()
    return grid


def _policies(policies: Iterable[str] | Mapping[str, str]) -> list[dict]:
    if isinstance(policies, Mapping):
        return [{"policy": policy, "label": label} for label, policy in policies.items()]
    return [{"policy": policy} for policy in policies]


def bursty(anchors, seeds, requests, policies=(*POLICIES, PREDICTED)) -> Grid:
    """Mixed traffic in bursts, 2 prefill and 4 decode engines (the paper's Table II)."""
    return _grid(settings(requests), _points(anchors), _policies(policies), seeds=seeds)


def calibration(anchors, seeds, requests, policies=(LEARNED, GUARDED)) -> Grid:
    """The same router with constants that are true and with those of the paper's simulator."""
    told = [{"constants": name} for name in ("calibrated", "paper-simulator")]
    return _grid(settings(requests), _points(anchors), _policies(policies), told, seeds=seeds)


def families(anchors: Mapping[str, Mapping[float, float]], seeds, requests, policies=(*POLICIES, PREDICTED)) -> Grid:
    """Four kinds of traffic, each at its own rate; ``anchors``: by family, then as elsewhere."""
    points = [{"trace": f"family:{family}"} | point for family, rates in anchors.items() for point in _points(rates)]
    return _grid(settings(requests), points, _policies(policies), seeds=seeds)


def width(anchors, seeds, requests, widths=(3, 4, 6), policies=POLICIES) -> Grid:
    """Decode engines to choose among, at the rate of 2 + 4."""
    pools = [{"pools": f"2+{n}"} for n in widths]
    return _grid(settings(requests), _points(anchors), pools, _policies(policies), seeds=seeds)


def gpus(anchors, seeds, requests, shapes: Mapping[int, str] = GPUS, policies=OVERLOADED) -> Grid:
    """3 to 8 GPUs, at the rate of 2 + 4: the starved end is 1 + 2."""
    pools = [{"pools": shape} for shape in shapes.values()]
    return _grid(settings(requests), _points(anchors), pools, _policies(policies), seeds=seeds)


def starved(rates: Sequence[float], slopes, seeds, requests, polls_s=(0.05, 1.0), policies=CORNER) -> Grid:
    """1 + 2 engines from comfort to far beyond what they can do, with signals of several ages."""
    points = [{"decode_slope_s": slope, "qps": qps} for slope in slopes for qps in rates]
    ages = [{"poll_s": poll_s} for poll_s in polls_s]
    return _grid(settings(requests, pools="1+2"), points, ages, _policies(policies), seeds=seeds)


def load(anchors, seeds, requests, factors=(0.5, 0.75, 1.0, 1.25, 1.5), policies=OVERLOADED) -> Grid:
    """From light load to overload, in parts of the rate of mid-collapse."""
    return _grid(settings(requests), _points(anchors, factors), _policies(policies), seeds=seeds)


def train(anchors, seeds, requests, factor=0.8, policies=POLICIES) -> Grid:
    """A train of bursts at ``factor`` of the rate of mid-collapse; kept with its requests, it gives rolling tails."""
    return _grid(settings(requests, arrivals=TRAIN), _points(anchors, [factor]), _policies(policies), seeds=seeds)


def ablation(anchors, seeds, requests, factors=(1.0, 1.25), terms: Mapping[str, str] = TERMS, family="mixed") -> Grid:
    """The router without one of its terms, at two operating points."""
    return _grid(settings(requests, family), _points(anchors, factors), _policies(terms), seeds=seeds)


def length_error(anchors, seeds, requests, errors=(0.0, 0.5, 1.0, 1.5), policies=None) -> Grid:
    """Relative errors of the predicted lengths, up to the paper's 150 %."""
    policies = policies or ("length_threshold", LEARNED, GUARDED)
    told = [{"lengths": f"noisy:{error:g}"} for error in errors]
    return _grid(settings(requests), _points(anchors), told, _policies(policies), seeds=seeds)


def kv_budget(anchors, seeds, requests, tokens=(60_000, 30_000, 16_000, 8_000), policies=None) -> Grid:
    """KV memory of an engine, down to the regime that the paper did not reach; the router knows it."""
    policies = policies or (*BASELINES, LEARNED, "marginal_cost:cache=0", GUARDED)
    # The longest request of the mixture has to fit; one block is vLLM's own.
    memory = [{"engine.num_gpu_blocks": n // BLOCK + 1} for n in tokens]
    return _grid(settings(requests), _points(anchors), memory, _policies(policies), seeds=seeds)


def services(anchors: Mapping[tuple[str, str, float], float], seeds, requests, policies=(*BASELINES, LEARNED)) -> Grid:
    """Service models, each at its own rates; ``anchors``: {(service, family, slope in s): requests a second}."""
    points = [
        {"service": service, "trace": f"family:{family}", "decode_slope_s": slope, "qps": qps}
        for (service, family, slope), qps in anchors.items()
    ]
    return _grid(settings(requests), points, _policies(policies), seeds=seeds)


def leak(anchors, seeds, requests, policies=(LEARNED, GUARDED)) -> Grid:
    """A router told what no proxy can know, the true lengths of what is in flight, with right and wrong constants."""
    signals = [{"signals": name} for name in ("own", "leaked")]
    told = [{"constants": name} for name in ("calibrated", "paper-simulator")]
    return _grid(settings(requests), _points(anchors), _policies(policies), signals, told, seeds=seeds)
