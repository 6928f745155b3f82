"""A ShareGPT-like trace from a seed: the paper's lengths, and prompts that foretell the answer's.

The model. A prompt is an opener, one of twelve tasks on a topic, perhaps an amount ("List 8 facts"), remarks,
perhaps a style ("Be brief."), and perhaps a pasted text of ``8 * (3315 / 8) ** (u ** SKEW)`` tokens, u
uniform. Task, amount, style and the length of the pasted text set the median of the answer; opener, remarks
and topic are there to be seen through. The answer is that median times exp(SIGMA z), z standard normal,
rounded, at least 1, and cut so that prompt and answer stay within MAX_TOTAL_TOKENS. So the best that any
length model can reach is known: ``noise_floor``.

The shares, SCALE, LONGEST_MEDIAN, LONGEST_PASTED and SKEW were fitted to the moments published for the
Astrolabe paper's ShareGPT test set, answers by Llama-2-7B (reached at n = 1,000,000 in brackets): prompt mean
246 (247), p50 35 (35), p99 2863 (2866); output mean 326 (323), p50 286 (290), p99 1001 (1002) tokens. SIGMA
puts the noise floor, 71 tokens and 22.8 %, just under the error of that paper's own length tagger, 78.8
tokens and 24.4 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from astrolabe_lab.generators.sharegpt_wording import (
    OPENER_SHARES,
    OPENER_SIZES,
    OPENERS,
    REMARK_SHARES,
    REMARK_SIZES,
    REMARKS,
    STYLES,
    TASKS,
    TOPICS,
    pasted_prose,
    wording_tokens,
)
from astrolabe_lab.rng import stream
from astrolabe_lab.tokens import APPROXIMATION, count_tokens
from astrolabe_lab.trace.columns import checked_requests

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

MAX_TOTAL_TOKENS = 4096
SIGMA = 0.28
SCALE = 1.06
LONGEST_MEDIAN = 700.0
SHORTEST_PASTED, LONGEST_PASTED, SKEW = 8, 3315, 1.265


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """The error left to a predictor that knows every prompt's conditional median, the best there is for MAE.

    mae_tokens: mean absolute error in tokens. mape: mean of |predicted - true| / true.
    log_sd: standard deviation of log(true / predicted).
    lowest_mape: what a predictor that aims at MAPE alone reaches, by predicting short.
    """

    mae_tokens: float
    mape: float
    log_sd: float
    lowest_mape: float


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What was drawn for n prompts, one array of n a feature; texts are indices into the wording's lists."""

    task: np.ndarray
    form: np.ndarray
    topic: np.ndarray
    amount: np.ndarray
    style: np.ndarray
    opener: np.ndarray
    remark: np.ndarray
    pasted_tokens: np.ndarray
    pasted_start: np.ndarray


def generate(n: int, seed: int = 0, text: bool = True) -> pd.DataFrame:
    """Return n requests: ``rid, prompt_tokens, output_tokens`` and, with ``text``, ``prompt``; no times.

    The same seed gives the same bytes; a longer trace starts with the shorter one; ``text=False`` gives the
    same lengths in a fraction of the time. ``tokens.count_tokens`` of a prompt is its ``prompt_tokens``.
    Raises InputError unless n is an integer >= 1 and seed one >= 0.
    """
    import numpy as np
    import pandas as pd

    drawn = _draw(n, seed)
    prompt_tokens = _prompt_tokens(drawn)
    noise = np.exp(SIGMA * stream(seed, "sharegpt_like noise").standard_normal(n))
    columns = {
        "rid": np.arange(n, dtype=np.int64),
        "prompt_tokens": prompt_tokens,
        "output_tokens": _answers(_median(drawn), noise, prompt_tokens),
    }
    frame = pd.DataFrame(columns | ({"prompt": _texts(drawn)} if text else {}))
    frame.attrs = {"source": f"sharegpt_like n={n} seed={seed}", "token_counter": APPROXIMATION}
    return frame


def features(n: int, seed: int = 0) -> pd.DataFrame:
    """Return what the wording of ``generate(n, seed)`` says and the median it sets: for teaching only.

    Columns: ``rid, task, topic, style, amount`` (0 where none is asked for), ``pasted_tokens`` (0 where
    nothing is pasted) and ``median_tokens`` (int64), the conditional median of ``output_tokens``.
    """
    import numpy as np
    import pandas as pd

    drawn = _draw(n, seed)
    return pd.DataFrame(
        {
            "rid": np.arange(n, dtype=np.int64),
            "task": [TASKS[i].name for i in drawn.task],
            "topic": [TOPICS[i] for i in drawn.topic],
            "style": [STYLES[i].sentence.strip() for i in drawn.style],
            "amount": drawn.amount,
            "pasted_tokens": drawn.pasted_tokens,
            "median_tokens": _answers(_median(drawn), 1.0, _prompt_tokens(drawn)),
        }
    )


def noise_floor(n: int = 20_000, seed: int = 0) -> NoiseFloor:
    """Return the expected errors of the conditional median on the prompts of ``generate(n, seed)``.

    Computed from the parameters, over 200 equally likely values of the noise; no answer is drawn. Without
    rounding and cuts, c = exp(SIGMA^2 / 2) erf(SIGMA / sqrt 2) = 0.229 gives MAE = c * mean median, MAPE = c,
    log_sd = SIGMA.
    """
    import numpy as np

    drawn = _draw(n, seed)
    median, prompt_tokens = _median(drawn), _prompt_tokens(drawn)
    best = _answers(median, 1.0, prompt_tokens)
    shorter = _answers(median, math.exp(-(SIGMA**2)), prompt_tokens)
    levels = 200
    sums = np.zeros(5)
    for i in range(levels):
        noise = math.exp(SIGMA * NormalDist().inv_cdf((i + 0.5) / levels))
        true = _answers(median, noise, prompt_tokens)
        error, log_error, short_error = np.abs(true - best), np.log(true / best), np.abs(true - shorter)
        terms = error, error / true, log_error, log_error**2, short_error / true
        sums += [term.mean() for term in terms]
    mae, mape, log_mean, log_square, lowest_mape = (sums / levels).tolist()
    return NoiseFloor(mae, mape, math.sqrt(log_square - log_mean**2), lowest_mape)


def _draw(n: int, seed: int) -> _Drawn:
    """Draw the wording of n prompts; row i takes the i-th row of uniforms, whatever n is."""
    import numpy as np

    n = checked_requests(n)
    u = stream(seed, "sharegpt_like wording").random((n, 10)).T
    task = _weighted(u[0], [t.weight for t in TASKS])
    of_task = {name: np.array([getattr(t, name) for t in TASKS])[task] for name in ("pasted", "styled")}
    forms = np.array([len(t.forms) for t in TASKS])[task]
    amount = np.zeros(n, dtype=np.int64)
    for i, t in enumerate(TASKS):
        if t.amounts:
            rows = task == i
            amount[rows] = np.array(t.amounts)[_even(u[3, rows], len(t.amounts))]
    pasted = np.rint(SHORTEST_PASTED * (LONGEST_PASTED / SHORTEST_PASTED) ** (u[7] ** SKEW))
    return _Drawn(
        task=task,
        form=_even(u[2], forms),
        topic=_even(u[1], len(TOPICS)),
        amount=amount,
        style=np.where(of_task["styled"], _weighted(u[4], [s.weight for s in STYLES]), 0),
        opener=_member(u[5], OPENER_SHARES, OPENER_SIZES),
        remark=_member(u[9], REMARK_SHARES, REMARK_SIZES),
        pasted_tokens=np.where(u[6] < of_task["pasted"], pasted, 0).astype(np.int64),
        pasted_start=_even(u[8], len(pasted_prose().starts)),
    )


def _median(drawn: _Drawn) -> np.ndarray:
    """The median answer that the wording sets, float64 (n,)."""
    import numpy as np

    base, growth = np.array([(t.median_tokens, t.growth) for t in TASKS])[drawn.task].T
    factor, at_most = np.array([(s.factor, s.at_most) for s in STYLES])[drawn.style].T
    pasted = (np.maximum(drawn.pasted_tokens, 1) / 300.0) ** growth
    median = SCALE * base * np.maximum(drawn.amount, 1) * pasted * factor
    return np.minimum(median, np.minimum(at_most, LONGEST_MEDIAN))


def _answers(median, noise, prompt_tokens) -> np.ndarray:
    import numpy as np

    return np.clip(np.rint(median * noise), 1, MAX_TOTAL_TOKENS - prompt_tokens).astype(np.int64)


def _prompt_tokens(drawn: _Drawn) -> np.ndarray:
    """Tokens of each prompt, added up from those of its parts: spaces and marks set the parts off."""
    import numpy as np

    forms, with_topic = np.zeros((2, len(TASKS), max(len(t.forms) for t in TASKS)), dtype=np.int64)
    for i, t in enumerate(TASKS):
        for j, form in enumerate(t.forms):
            forms[i, j], with_topic[i, j] = wording_tokens(form), "{topic}" in form
    sentences = [s.sentence for s in STYLES]
    topic, style, opener, remark = (
        np.array([count_tokens(text) for text in texts])[choice]
        for choice, texts in (
            (drawn.topic, TOPICS),
            (drawn.style, sentences),
            (drawn.opener, OPENERS),
            (drawn.remark, REMARKS),
        )
    )
    digits = np.where(drawn.amount > 0, np.char.str_len(drawn.amount.astype(str)), 0)
    pasted = np.where(drawn.pasted_tokens > 0, drawn.pasted_tokens + 1, 0)  # 1 for the blank line
    at = drawn.task, drawn.form
    return forms[at] + with_topic[at] * topic + digits + style + opener + remark + pasted


def _texts(drawn: _Drawn) -> list[str]:
    prose = pasted_prose()
    columns = (getattr(drawn, name).tolist() for name in _Drawn.__slots__)
    texts = []
    for task, form, topic, amount, style, opener, remark, pasted, start in zip(*columns, strict=True):
        request = TASKS[task].forms[form].replace("{topic}", TOPICS[topic]).replace("{amount}", str(amount))
        text = OPENERS[opener] + request + REMARKS[remark] + STYLES[style].sentence
        texts.append(text + "\n\n" + prose.excerpt(start, pasted) if pasted else text)
    return texts


def _weighted(u, weights) -> np.ndarray:
    import numpy as np

    edges = np.cumsum(weights) / np.sum(weights)
    return np.minimum(np.searchsorted(edges, u, side="right"), len(weights) - 1)


def _even(u, count) -> np.ndarray:
    return (u * count).astype("int64")


def _member(u, shares, sizes) -> np.ndarray:
    """Index into consecutive families of ``sizes`` members: a family by its share, a member of it evenly."""
    weights = [share / size for share, size in zip(shares, sizes, strict=True) for _ in range(size)]
    return _weighted(u, weights)
