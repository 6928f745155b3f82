"""Disaggregated serving: prefill and decode pools, the routers that pair them, and their simulator.

``constants``: what a router takes its cluster to cost. ``view``: what it knows at a decision. ``routers``: the policies
by name. ``simulate``: pools of exact engines, with the hand-off between them.

    frame = lab.disagg.simulate_pools(trace, "marginal_cost", pools="2+4")
"""

from importlib import import_module

_MODULES = (
    "compare constants figures marginal_cost policies published routers saturation services settings studies view"
).split()
_HOME = {
    "Constants": "constants",
    "HandOff": "state",
    "calibrated": "simulate",
    "MarginalCost": "marginal_cost",
    "parse_pools": "settings",
    "paper_world": "simulate",
    "simulate_pools": "simulate",
}
__all__ = sorted({*_MODULES, *_HOME})


def __getattr__(name):
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _HOME:
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(__all__)}")
