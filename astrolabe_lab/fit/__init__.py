"""Step costs from measurements.

`fit` takes measured iterations. `presets` holds how the shipped presets were derived from public kernel timings, as
code that can be run again: `python -m astrolabe_lab.fit DATA_DIR` prints them as JSON.
"""

from astrolabe_lab.fit.iterations import FitWarning, RegimeFit, StepFit, check_iterations, fit
from astrolabe_lab.fit.regression import Fit, relative_least_squares

__all__ = ["Fit", "FitWarning", "RegimeFit", "StepFit", "check_iterations", "fit", "relative_least_squares"]
