"""Four families of requests that stress different resources: chat, documents, reasoning, and the three mixed.

Prompt and answer lengths are lognormal, rounded and clipped (a draw beyond a limit is the limit), and independent
of each other. The families are those of the second paper ("Calibrate, Then Route", its Table I names what each
stresses); its table of parameters is missing, so the numbers below are ours.

The prompt asks for an answer of so many words, 0.75 a token, and that is all that can be known of it beforehand:
given the prompt, the answer is lognormal about that median with NOISE_SIGMA, clipped as before. So the best
predictor's error is known, as for ``sharegpt_like``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.generators.families_wording import write
from astrolabe_lab.rng import stream
from astrolabe_lab.tokens import APPROXIMATION
from astrolabe_lab.trace.columns import checked_requests

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

NOISE_SIGMA = 0.28  # of log(answer) given the prompt, as in sharegpt_like
WORDS_PER_TOKEN = 0.75


@dataclass(frozen=True, slots=True)
class Lengths:
    """A lognormal law of token counts: its median, the standard deviation of its logarithm, and its limits."""

    median: float
    sigma: float
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Family:
    """What requests of a kind look like; ``tight`` is the share with a tight SLO."""

    prompt: Lengths
    output: Lengths
    tight: float


FAMILIES = {
    "chat": Family(Lengths(200, 0.7, 8, 1024), Lengths(200, 0.5, 16, 512), tight=0.75),
    "documents": Family(Lengths(1200, 0.4, 300, 4000), Lengths(120, 0.5, 16, 400), tight=0.25),
    "reasoning": Family(Lengths(120, 0.6, 16, 600), Lengths(700, 0.5, 200, 2400), tight=0.50),
}
MIXED_SHARES = {"chat": 0.65, "documents": 0.15, "reasoning": 0.20}
MIXED_TIGHT = 0.75  # of every family's requests in the mixture
NAMES = (*FAMILIES, "mixed")
ARRIVALS = dict.fromkeys(FAMILIES, "poisson") | {"mixed": "bursts:high=1.7,high_s=1,low_s=3"}


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What was drawn for n requests, one array of n a feature."""

    family: np.ndarray  # index into FAMILIES
    tight: np.ndarray
    prompt_tokens: np.ndarray
    median_tokens: np.ndarray
    output_tokens: np.ndarray


def generate(name: str, n: int, seed: int = 0, text: bool = True) -> pd.DataFrame:
    """Return n requests: ``rid, prompt_tokens, output_tokens, slo, family`` and, with ``text``, ``prompt``.

    name: ``chat``, ``documents``, ``reasoning`` or ``mixed`` (65 / 15 / 20 % of them, three in four tight). There are
    no times: ``arrivals.with_arrivals(frame, qps, ARRIVALS[name], seed)`` gives those of the paper, bursts for
    ``mixed``. The same seed gives the same bytes, a longer trace starts with the shorter one, and
    ``tokens.count_tokens`` of a prompt is its ``prompt_tokens``. Raises InputError for another name, unless n is an
    integer >= 1, or for a seed that is none.
    """
    import numpy as np
    import pandas as pd

    drawn = _draw(name, n, seed)
    kinds = np.array(list(FAMILIES), dtype=object)
    columns = {
        "rid": np.arange(n, dtype=np.int64),
        "prompt_tokens": drawn.prompt_tokens,
        "output_tokens": drawn.output_tokens,
        "slo": np.where(drawn.tight, "tight", "loose").astype(object),
        "family": kinds[drawn.family],
    }
    if text:
        words = _words(drawn.median_tokens)
        wording = stream(seed, f"family {name} wording")
        columns["prompt"] = write(columns["family"], drawn.prompt_tokens, words, wording)
    frame = pd.DataFrame(columns)
    frame.attrs = {"source": f"family:{name} n={n} seed={seed}", "token_counter": APPROXIMATION}
    return frame


def features(name: str, n: int, seed: int = 0) -> pd.DataFrame:
    """Return what the prompts of ``generate(name, n, seed)`` tell: for teaching, and to judge length models by.

    Columns: ``rid, family``, ``words`` (the words asked for) and ``median_tokens`` (int64), the conditional median
    of ``output_tokens``, which no predictor beats in mean absolute error.
    """
    import numpy as np
    import pandas as pd

    drawn = _draw(name, n, seed)
    return pd.DataFrame(
        {
            "rid": np.arange(n, dtype=np.int64),
            "family": np.array(list(FAMILIES), dtype=object)[drawn.family],
            "words": _words(drawn.median_tokens),
            "median_tokens": np.rint(drawn.median_tokens).astype(np.int64),
        }
    )


def _draw(name: str, n: int, seed: int) -> _Drawn:
    """Row i takes the i-th row of draws, whatever n is."""
    import numpy as np

    if name not in NAMES:
        raise InputError(f"family {name!r} is unknown: allowed are {', '.join(NAMES)}")
    n = checked_requests(n)
    which, slo = stream(seed, f"family {name}").random((n, 2)).T
    z_prompt, z_asked, z_noise = stream(seed, f"family {name} lengths").standard_normal((n, 3)).T
    if name == "mixed":
        shares = np.cumsum([MIXED_SHARES[family] for family in FAMILIES])
        family = np.minimum(np.searchsorted(shares, which, side="right"), len(FAMILIES) - 1)
        tight = slo < MIXED_TIGHT
    else:
        family = np.full(n, list(FAMILIES).index(name))
        tight = slo < FAMILIES[name].tight
    prompt = _Laws(family, [kind.prompt for kind in FAMILIES.values()])
    output = _Laws(family, [kind.output for kind in FAMILIES.values()])
    asked = np.sqrt(output.sigma**2 - NOISE_SIGMA**2) * z_asked
    return _Drawn(
        family=family,
        tight=tight,
        prompt_tokens=prompt.tokens(prompt.sigma * z_prompt),
        median_tokens=np.clip(output.median * np.exp(asked), output.low, output.high),
        output_tokens=output.tokens(asked + NOISE_SIGMA * z_noise),
    )


class _Laws:
    """The parameters of each request's law, one array of n each."""

    def __init__(self, family, laws):
        import numpy as np

        columns = np.array([(law.median, law.sigma, law.low, law.high) for law in laws])[family].T
        self.median, self.sigma, self.low, self.high = columns

    def tokens(self, log_factor):
        import numpy as np

        return np.clip(np.rint(self.median * np.exp(log_factor)), self.low, self.high).astype(np.int64)


def _words(median_tokens):
    import numpy as np

    return np.maximum(np.rint(WORDS_PER_TOKEN * median_tokens), 1).astype(np.int64)
