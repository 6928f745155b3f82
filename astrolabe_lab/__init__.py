"""Astrolabe Lab: where should the next LLM request go?

Names resolve on first use, so importing the package stays instant and loads neither pandas nor numba:

    import astrolabe_lab as lab
    frame = lab.trace.load("trace.csv")
    result = lab.simulate(frame, lab.policies.parse("astrolabe:k=2"), instances=12)
"""

from importlib import import_module

__version__ = "0.1.0"

_MODULES = (
    "arrivals calibrate capacity cost disagg errors fit generators length measure oracle plots policies predictor "
    "published recorded report request rng run sim sweep trace"
).split()
_INNER = {
    "families": "generators.families",
    "servegen": "generators.servegen",
    "sharegpt_like": "generators.sharegpt_like",
}
_HOME = {
    "ControlPlane": "sim.cluster",
    "EngineConfig": "sim.engine",
    "InputError": "errors",
    "LatencyNoise": "sim.cluster",
    "Predictor": "predictor",
    "Request": "request",
    "StepCost": "cost",
    "preset": "cost",
    "run_one": "sim.engine",
    "simulate": "sim.cluster",
    "stream": "rng",
    "summarise": "measure",
}
__all__ = sorted({*_MODULES, *_INNER, *_HOME})


def __getattr__(name):
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _INNER:
        return import_module(f"{__name__}.{_INNER[name]}")
    if name in _HOME:
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(__all__)}")


def __dir__():
    return sorted({*globals(), *__all__})
