"""Step costs from measurements.

`fit` takes measured iterations and gives the linear model; `fit_table` tabulates a regressor of any kind. `presets`
holds how the shipped presets were derived from public kernel timings, as code that can be run again:
`python -m astrolabe_lab.fit DATA_DIR` prints them as JSON.
"""

from astrolabe_lab.fit.iterations import FitWarning, RegimeFit, StepFit, check_iterations, fit
from astrolabe_lab.fit.regression import Fit, relative_least_squares
from astrolabe_lab.fit.tables import TableFit, fit_table

__all__ = [
    "Fit", "FitWarning", "RegimeFit", "StepFit", "TableFit", "check_iterations", "fit", "fit_table",
    "relative_least_squares",
]  # fmt: skip
