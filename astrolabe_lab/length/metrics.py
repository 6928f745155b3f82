"""How far predicted lengths lie from the true ones; answers that were cut off count for what they show.

Errors in tokens (mae, rmse, mape, within) are means over the answers that ended by themselves. Cut-off answers enter
``concordance`` (the pairs that they decide), ``coverage`` (by Kaplan-Meier) and ``mae_at_least``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from astrolabe_lab.length import survival

if TYPE_CHECKING:
    import numpy as np

WITHIN = (50, 100)
BUCKETS = 5
FLOOR_PROMPTS = 20
_PAIRS_AT_ONCE = 2_000_000


def errors(lengths, predicted, censored) -> dict[str, float]:
    """``n``, ``censored``, ``mae``, ``mape``, ``rmse``, ``bias`` (predicted minus true), ``within_50``,
    ``within_100`` (shares), ``mae_at_least`` and ``concordance``; tokens where nothing else is said.

    ``mae_at_least`` counts every answer, a cut-off one by how far the prediction falls short of the cut: no model
    of these answers can have a smaller mean error.
    """
    import numpy as np

    lengths, predicted, censored = _arrays(lengths, predicted, censored)
    off = (predicted - lengths)[~censored]
    true = lengths[~censored]
    short = np.where(censored, np.maximum(lengths - predicted, 0.0), np.abs(predicted - lengths))
    return {
        "n": len(lengths),
        "censored": int(censored.sum()),
        "mae": float(np.abs(off).mean()),
        "mape": float((np.abs(off) / true).mean()),
        "rmse": float(np.sqrt((off**2).mean())),
        "bias": float(off.mean()),
        **{f"within_{t}": float((np.abs(off) <= t).mean()) for t in WITHIN},
        "mae_at_least": float(short.mean()),
        "concordance": concordance(lengths, predicted, censored),
    }


def concordance(lengths, predicted, censored) -> float:
    """(pairs in the right order - pairs in the wrong order) / pairs whose true order is known: 1 is perfect, 0 is
    what a constant or a coin gets, -1 is upside down.

    A tie in the prediction counts as neither. Without cut-off answers this is Somers' D of the prediction given the
    truth; (1 + it) / 2 is Harrell's C index. NaN where no pair has a known order.
    """
    import numpy as np

    lengths, predicted, censored = _arrays(lengths, predicted, censored)
    n, score, pairs = len(lengths), 0, 0
    step = max(1, _PAIRS_AT_ONCE // max(n, 1))
    whole = np.flatnonzero(~censored)  # the shorter one of a pair must have ended by itself
    for start in range(0, len(whole), step):
        rows = whole[start : start + step, None]
        longer = (lengths[rows] < lengths) | ((lengths[rows] == lengths) & censored)
        pairs += int(longer.sum())
        score += int((longer & (predicted[rows] < predicted)).sum())
        score -= int((longer & (predicted[rows] > predicted)).sum())
    return score / pairs if pairs else float("nan")


def coverage(lengths, quantile, censored) -> float:
    """The share of true lengths at or below the predicted ``quantile`` (n,): 0.9 for a good 90 % quantile."""
    import numpy as np

    lengths, quantile, censored = _arrays(lengths, quantile, censored)
    points, reached = survival.distribution(lengths / quantile, censored)
    at = np.searchsorted(points, 1.0, side="right")
    return float(reached[at - 1]) if at else 0.0


def pinball(lengths, quantile, censored, level: float) -> float:
    """The mean quantile loss at ``level``, tokens, over answers that ended by themselves; half the MAE at 0.5."""
    import numpy as np

    lengths, quantile, censored = _arrays(lengths, quantile, censored)
    off = (lengths - quantile)[~censored]
    return float(np.maximum(level * off, (level - 1) * off).mean())


def bucket_edges(lengths, censored, buckets: int = BUCKETS) -> np.ndarray:
    """The lengths that part training answers into ``buckets`` equal shares, float64 (buckets - 1,)."""
    import numpy as np

    return survival.quantiles(lengths, censored, np.arange(1, buckets) / buckets)


def bucket_accuracy(lengths, predicted, censored, edges) -> float:
    """The share of answers whose prediction falls into the bucket of the truth; cut-off ones are left out."""
    import numpy as np

    lengths, predicted, censored = _arrays(lengths, predicted, censored)
    same = np.searchsorted(edges, lengths, side="right") == np.searchsorted(edges, predicted, side="right")
    return float(same[~censored].mean())


def mean_over_prompts(values, prompts, level: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high): the mean of values, one an answer, and Student's interval for it over the prompts.

    Answers to one prompt err alike, so what varies independently is a prompt's sum of deviations from the mean
    (the cluster-robust variance: Liang and Zeger, 1986); of one answer a prompt it is the plain t-interval. One
    prompt has no interval: low and high are NaN. ``prompts`` (n,) tells them apart, by whatever can be compared.
    """
    import numpy as np
    from scipy.stats import t

    values = np.asarray(values, dtype=np.float64)
    mean = float(values.mean())
    distinct, which = np.unique(np.asarray(prompts), return_inverse=True)
    many = len(distinct)
    if many < 2:
        return mean, float("nan"), float("nan")
    sums = np.bincount(which, values - mean)
    se = float(np.sqrt(many / (many - 1) * (sums**2).sum())) / len(values)
    half = float(t.ppf((1 + level) / 2, many - 1)) * se
    return mean, mean - half, mean + half


def noise_floor(frame) -> dict[str, float] | None:
    """What is left to the best of models, from prompts that one serving model answered more than once; None
    for fewer than FLOOR_PROMPTS of them, which tell too little.

    ``sibling_mae``: the mean difference of two answers to one prompt, the error of predicting a prompt's length by
    another answer to it. ``mae``: that over the square root of 2, the error of knowing every prompt's median if
    answers vary normally about it; whatever they do, it is between ``mae_low`` and ``mae_high``. ``mape`` likewise,
    of the relative difference. ``prompts`` says how many there were. Cut-off answers are left out.
    """
    import numpy as np

    whole = frame[~frame["censored"]]
    differences, relative = [], []
    for _, lengths in whole.groupby(["prompt_uid", "model"])["response_tokens"]:
        if len(lengths) > 1:
            values = lengths.to_numpy()
            first, second = np.triu_indices(len(values), 1)
            gaps = np.abs(values[first] - values[second])
            differences.append(gaps.mean())
            # Each answer in turn is the truth that the difference is measured against.
            relative.append((gaps * (1 / values[first] + 1 / values[second]) / 2).mean())
    if len(differences) < FLOOR_PROMPTS:
        return None
    mean = float(np.mean(differences))
    return {
        "prompts": len(differences),
        "sibling_mae": mean,
        "mae": mean / 2**0.5,
        "mae_low": mean / 2,
        "mae_high": mean,
        "mape": float(np.mean(relative)) / 2**0.5,
    }


def _arrays(lengths, predicted, censored):
    import numpy as np

    return (
        np.asarray(lengths, dtype=np.float64),
        np.asarray(predicted, dtype=np.float64),
        np.asarray(censored, dtype=bool),
    )
