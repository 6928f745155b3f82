"""How many seeds a comparison needs."""

import math
from collections.abc import Iterable

import numpy as np

from ..errors import InputError


def seeds_needed(
    differences: Iterable[float], effect: float, level: float = 0.95, power: float = 0.8, most: int = 100_000
) -> float:
    """How many seeds would show a true mean difference of `effect` with that power: a whole number, or inf
    above `most`.

    Of a two-sided paired t-test, from the spread of the `differences` seen; NaN for fewer than two. Raises
    InputError for an effect that is not above 0.
    """
    from scipy import stats

    values = np.asarray(list(differences), float)
    if not effect > 0:
        raise InputError(f"effect={effect!r} is not a number > 0, in the unit of the differences")
    if len(values) < 2 or not np.isfinite(values).all():
        return math.nan
    spread = float(values.std(ddof=1))

    def enough(n: int) -> bool:
        border, shift = stats.t.ppf((1 + level) / 2, n - 1), math.sqrt(n) * effect / spread
        return stats.nct.sf(border, n - 1, shift) + stats.nct.cdf(-border, n - 1, shift) >= power

    if spread == 0:
        return 2
    low, high = 1, 2
    while not enough(high):
        low, high = high, 2 * high
        if low >= most:
            return math.inf
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
