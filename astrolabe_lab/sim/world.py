"""What surrounds the engines: a control plane's delays, noise on predictions, and instances that fail."""

from __future__ import annotations

import math
from dataclasses import dataclass

from astrolabe_lab.errors import InputError


@dataclass(frozen=True)
class ControlPlane:
    """Delays of a real control plane, all in s; the default is an ideal one.

    ``status_interval_s``: statuses are refreshed at its multiples; 0: read at each decision. ``tag_s``: arrival to the
    start of the decision (the length tagger). ``predict_s``: until a Predictor answers, fixed or uniform in (low,
    high), drawn for each asked instance: a decision waits for the slowest of a call, and calls add up. ``dispatch_s``:
    decision to arrival at the engine. ``routers``: requests take turns over so many routers that do not see each
    other's dispatches.
    """

    status_interval_s: float = 0.0
    tag_s: float = 0.0
    predict_s: float | tuple[float, float] = 0.0
    dispatch_s: float = 0.0
    routers: int = 1

    def __post_init__(self):
        for name in ("status_interval_s", "tag_s", "dispatch_s"):
            _check_number(f"control plane: {name}", getattr(self, name))
        low, high = self.predict_range_s
        _check_number("control plane: predict_s", low)
        _check_number("control plane: predict_s", high)
        if low > high:
            raise InputError(f"control plane: predict_s={self.predict_s} must be (low, high) with low <= high")
        if isinstance(self.routers, bool) or not isinstance(self.routers, int) or self.routers < 1:
            raise InputError(f"control plane: routers={self.routers!r} must be a whole number >= 1")

    @property
    def predict_range_s(self) -> tuple[float, float]:
        value = self.predict_s
        if isinstance(value, (tuple, list)):
            if len(value) != 2:
                raise InputError(f"control plane: predict_s={value!r} must be a number or (low, high)")
            return value[0], value[1]
        return value, value

    @property
    def ideal(self) -> bool:
        """True where every delay is zero, the status fresh and the router alone."""
        return self == ControlPlane()

    @classmethod
    def paper(cls) -> ControlPlane:
        """The Astrolabe paper's measured delays: 4.8 ms for the tagger, 62-80 ms for a Predictor."""
        return cls(tag_s=0.0048, predict_s=(0.062, 0.080))


@dataclass(frozen=True)
class LatencyNoise:
    """Gaussian relative noise on predicted latencies: each prediction is multiplied by (1 + common * g0) with one g0
    for all candidates of a request, and by (1 + candidate * g) with a g of its own (1.0 is the paper's 100 %)."""

    common: float = 0.0
    candidate: float = 0.0

    def __post_init__(self):
        _check_number("latency noise: common", self.common)
        _check_number("latency noise: candidate", self.candidate)


@dataclass(frozen=True)
class Slowdown:
    """Steps of ``instance`` that are scheduled in [start_s, end_s) take ``factor`` times as long; Predictors do not
    know."""

    instance: int
    start_s: float
    end_s: float
    factor: float

    def __post_init__(self):
        _check_window("slowdown", self)
        _check_number("slowdown: factor", self.factor)
        if self.factor == 0:
            raise InputError("slowdown: factor=0 would make steps take no time; use a number > 0")


ON_STOP = ("fail", "redispatch", "pause")


@dataclass(frozen=True)
class Outage:
    """``instance`` stops at ``start_s`` and is back, empty, at ``end_s`` (inf: never).

    ``on_stop`` says what happens to its requests: ``fail`` (status failed at that time), ``redispatch`` (a router
    chooses again for each, tokens lost), or ``pause`` (the process hangs: it goes on where it was at ``end_s``).
    Routers leave the instance out from ``start_s + detected_after_s`` to its end; until then its signals are those of
    its last moment, and what arrives there shares the fate of its requests (with ``redispatch`` the first refusal gives
    it away). What is still on its way when the instance is back is served.
    """

    instance: int
    start_s: float
    end_s: float = math.inf
    on_stop: str = "fail"
    detected_after_s: float = 0.0

    def __post_init__(self):
        _check_window("outage", self)
        _check_number("outage: detected_after_s", self.detected_after_s)
        if self.on_stop not in ON_STOP:
            raise InputError(f"outage: on_stop={self.on_stop!r} is not one of {', '.join(ON_STOP)}")
        if self.on_stop == "pause" and math.isinf(self.end_s):
            raise InputError("outage: on_stop=pause needs an end_s: requests on it would never end")


def _check_window(what: str, fault) -> None:
    if isinstance(fault.instance, bool) or not isinstance(fault.instance, int) or fault.instance < 0:
        raise InputError(f"{what}: instance={fault.instance!r} must be a whole number >= 0")
    _check_number(f"{what}: start_s", fault.start_s)
    if not isinstance(fault.end_s, (int, float)) or not fault.end_s > fault.start_s:
        raise InputError(f"{what}: end_s={fault.end_s!r} must be after start_s={fault.start_s}")


def _check_number(what: str, value) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise InputError(f"{what}={value!r} must be a finite number >= 0")
