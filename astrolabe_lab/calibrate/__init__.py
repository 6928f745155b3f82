"""Five minutes against a cluster, and its constants: step cost, tau_pre, tau_dec, transfers, KV capacity, SLO targets.

calibration = calibrate(cluster)            # a running cluster, its URLs, or a SimulatedTarget
calibration.save("C.json"); load("C.json").require(model="...")
"""

from astrolabe_lab.calibrate.artifact import Calibration, Slo, Streamed, Transfer, load
from astrolabe_lab.calibrate.conduct import calibrate
from astrolabe_lab.calibrate.probe import Answer, Described, Probe
from astrolabe_lab.calibrate.simulated import SimulatedTarget

__all__ = [
    "Answer", "Calibration", "Described", "Probe", "SimulatedTarget", "Slo", "Streamed", "Transfer", "calibrate",
    "load",
]  # fmt: skip
