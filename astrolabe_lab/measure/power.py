"""How many seeds a comparison needs."""

import math

from astrolabe_lab.errors import InputError

MOST = 1_000_000


def seeds_needed(spread: float, effect: float, level: float = 0.95, power: float = 0.8) -> float:
    """How many seeds would show a true mean difference of `effect` with that power: a whole number from 2 on.

    `spread` is the standard deviation of the paired differences between seeds, in the unit of `effect`. Of a
    two-sided paired t-test; inf above a million, NaN for a spread that is NaN. Raises InputError for an effect
    that is not above 0.
    """
    from scipy import stats

    if not effect > 0:
        raise InputError(f"effect={effect!r} is not a number > 0, in the unit of the differences")
    if math.isnan(spread):
        return math.nan

    def enough(n: int) -> bool:
        border, shift = stats.t.ppf((1 + level) / 2, n - 1), math.sqrt(n) * effect / spread
        wrong_side = stats.nct.cdf(-border, n - 1, shift) if shift < 3 else 0.0  # scipy's is NaN far out
        return stats.nct.sf(border, n - 1, shift) + wrong_side >= power

    if spread < 1e-3 * effect or enough(2):
        return 2
    low, high = 2, 4
    while not enough(high):
        low, high = high, 2 * high
        if low >= MOST:
            return math.inf
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
