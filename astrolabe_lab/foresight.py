"""Foresight: what a Predictor assumes of the requests that will come after the newcomer.

A simulation that knows of no later arrival is too optimistic: in truth others join the batch while the newcomer runs.
Two remedies, apart or together; both use what a router has seen, nothing else:

``arrivals``  Later arrivals are assumed, evenly spaced at the recently observed rate, from half a spacing after the
newcomer on. Their prompts have the mean length of the last WINDOW dispatches; their outputs are quantiles of those
dispatches' predicted lengths, in golden-ratio order, so that any few of them have the distribution's shape. Even
spacing and quantiles have the mean of random draws and none of their noise.

``learned``  The decode time is multiplied by exp(w . x): a regression of log(realised / simulated) on the batch's
fullness and the length of the decode, with old outcomes forgotten and few ones distrusted. TTFT stays as simulated:
who comes later waits behind.
"""

from __future__ import annotations

import math

import numpy as np

from astrolabe_lab.errors import InputError
from astrolabe_lab.objective import FORESIGHTS, check_foresight
from astrolabe_lab.sim.compiled import compiled
from astrolabe_lab.sim.state import FAILED, FINISHED, REJECTED

ARRIVALS, LEARNED = 1, 2  # bits of FORESIGHT.kind, an index into FORESIGHTS

WINDOW = 512  # dispatches
LEAST = 16  # dispatches seen before any arrival is assumed
MOST = 1024  # arrivals assumed by one prediction
GOLDEN = 0.6180339887498949
FEATURES = 4
MEMORY = 0.998  # the weight of an outcome when the next one comes: about the last 500 count
RIDGE = 5.0  # outcomes' worth of trust in "no correction"
SURPRISE = 0.5  # a log ratio further off than this counts as this far off

FORESIGHT = np.dtype(
    [
        ("kind", "i8"),
        ("share", "f8"),  # of the observed arrivals that one instance will get
        # the last dispatches, in a ring
        ("seen", "i8"),
        ("prompt_sum", "i8"),
        ("at_s", "f8", (WINDOW,)),
        ("prompt", "i4", (WINDOW,)),
        ("predicted", "i4", (WINDOW,)),
        ("ascending", "i4", (WINDOW,)),  # the predicted lengths, sorted
        # the regression: weighted sums of x x' and x y, and what they say
        ("outcomes", "i8"),
        ("squares", "f8", (FEATURES, FEATURES)),
        ("products", "f8", (FEATURES,)),
        ("weights", "f8", (FEATURES,)),
        ("n_open", "i8"),
    ],
    align=True,
)
BASIS = np.dtype([("request", "i8"), ("decode_s", "f8"), ("x", "f8", (FEATURES,))], align=True)


def new_foresight(kind: str, share: float = 1.0) -> np.ndarray:
    """A FORESIGHT array of one record that has seen nothing. Raises InputError for another kind."""
    check_foresight(kind)
    foresight = np.zeros(1, FORESIGHT)
    foresight["kind"] = FORESIGHTS.index(kind)
    foresight["share"] = share
    return foresight


@compiled
def note_dispatch(f, at_s, prompt, predicted):
    """A request was dispatched at at_s, to whichever instance."""
    n = min(f.seen, WINDOW)
    at = f.seen % WINDOW
    if n == WINDOW:  # the oldest leaves
        f.prompt_sum -= f.prompt[at]
        k = np.searchsorted(f.ascending, f.predicted[at])
        for j in range(k, n - 1):
            f.ascending[j] = f.ascending[j + 1]
        n -= 1
    j = n
    while j > 0 and f.ascending[j - 1] > predicted:
        f.ascending[j] = f.ascending[j - 1]
        j -= 1
    f.ascending[j] = predicted
    f.at_s[at] = at_s
    f.prompt[at] = prompt
    f.predicted[at] = predicted
    f.prompt_sum += prompt
    f.seen += 1


@compiled
def spacing_s(f, now_s):
    """Time between two arrivals at an instance, in s; inf where nothing is to be assumed."""
    n = min(f.seen, WINDOW)
    if f.kind & ARRIVALS == 0 or n < LEAST:
        return np.inf
    span_s = now_s - f.at_s[(f.seen - n) % WINDOW]
    if span_s <= 0.0:
        return np.inf
    return span_s / (n * f.share)


@compiled
def lengths_of(f, m):
    """(prompt, output) tokens of the m-th assumed arrival."""
    n = min(f.seen, WINDOW)
    at = (m + 1) * GOLDEN
    return max(1, round(f.prompt_sum / n)), max(1, f.ascending[int((at - np.floor(at)) * n)])


@compiled
def describe(x, requests, seats, decode_s):
    """Fill x with the regression's features: so many requests on the instance, a decode of so many s."""
    x[0] = 1.0
    x[1] = min(1.0, requests / seats)
    x[2] = np.log1p(decode_s)
    x[3] = x[1] * x[2]


@compiled
def correction(f, x):
    """The factor on the decode time; 1 before the first outcome."""
    y = 0.0
    for k in range(FEATURES):
        y += f.weights[k] * x[k]
    return np.exp(min(max(y, -1.0), 1.0))


@compiled
def note_outcome(f, x, simulated_s, realised_s):
    """A decode simulated to take simulated_s, with features x, took realised_s."""
    expected = 0.0
    for k in range(FEATURES):
        expected += f.weights[k] * x[k]
    y = np.log(realised_s / simulated_s)
    y = min(max(y, expected - SURPRISE), expected + SURPRISE)
    root = np.zeros((FEATURES, FEATURES))  # Cholesky's, of squares + ridge
    for a in range(FEATURES):
        f.products[a] = MEMORY * f.products[a] + x[a] * y
        for b in range(FEATURES):
            f.squares[a, b] = MEMORY * f.squares[a, b] + x[a] * x[b]
    for a in range(FEATURES):
        for b in range(a + 1):
            left = f.squares[a, b] + (RIDGE if a == b else 0.0)
            for k in range(b):
                left -= root[a, k] * root[b, k]
            root[a, b] = np.sqrt(left) if a == b else left / root[b, b]
    for a in range(FEATURES):
        left = f.products[a]
        for k in range(a):
            left -= root[a, k] * f.weights[k]
        f.weights[a] = left / root[a, a]
    for a in range(FEATURES - 1, -1, -1):
        left = f.weights[a]
        for k in range(a + 1, FEATURES):
            left -= root[k, a] * f.weights[k]
        f.weights[a] = left / root[a, a]
    f.outcomes += 1


@compiled
def open_prediction(f, opened, request, basis):
    """Keep what was predicted of a request that has been dispatched; basis: its simulated decode time, features."""
    row = opened[f.n_open]
    row.request = request
    row.decode_s = basis[0]
    for k in range(FEATURES):
        row.x[k] = basis[1 + k]
    f.n_open += 1


@compiled
def settle(f, opened, requests):
    """Learn from the open predictions whose requests have finished; those that never will are dropped."""
    kept = 0
    for k in range(f.n_open):
        q = requests[opened[k].request]
        if q.state == FINISHED:
            decode_s = q.finished_s - q.first_token_s
            if decode_s > 0.0 and opened[k].decode_s > 0.0:
                note_outcome(f, opened[k].x, opened[k].decode_s, decode_s)
        elif q.state != FAILED and q.state != REJECTED:
            opened[kept] = opened[k]
            kept += 1
    f.n_open = kept


class Foresight:
    """What one router or sidecar has seen, for its Predictors: ``Predictor(engine, cost, foresight=...)``.

    ``kind``: arrivals, learned, both or none. ``instances``: how many engines share the dispatches that are observed
    here; a sidecar that sees only its own engine's says 1. Several Predictors may share one object; they then share
    the correction that it learns.
    """

    def __init__(self, kind: str = "arrivals", instances: int = 1):
        if isinstance(instances, bool) or not isinstance(instances, int) or instances < 1:
            raise InputError(f"foresight: instances={instances!r} must be a whole number >= 1")
        self.record = new_foresight(kind, 1.0 / instances)

    @property
    def outcomes(self) -> int:
        """How many outcomes have been learned from."""
        return int(self.record["outcomes"][0])

    def observe_dispatch(self, at_s: float, prompt_tokens: int, predicted_tokens: int) -> None:
        """Tell of a dispatch, in order of time. Raises InputError for what can be none."""
        seen = int(self.record["seen"][0])
        last_s = self.record["at_s"][0, (seen - 1) % WINDOW] if seen else -math.inf
        if not (math.isfinite(at_s) and at_s >= last_s):
            raise InputError(f"foresight: at_s={at_s} must be finite and not before the last dispatch ({last_s})")
        for name, tokens in (("prompt_tokens", prompt_tokens), ("predicted_tokens", predicted_tokens)):
            if not 1 <= tokens < 2**31:
                raise InputError(f"foresight: {name}={tokens} must be a whole number >= 1")
        note_dispatch(self.record[0], at_s, prompt_tokens, predicted_tokens)

    def observe_outcome(self, prediction, ttft_s: float, e2e_s: float) -> None:
        """Tell how the request of a ``Prediction`` (made with this foresight) fared: TTFT and E2E in s.

        Nothing is learned from one without decode (a single token) or a Prediction of TTFT alone.
        Raises InputError for times that are none.
        """
        if not (math.isfinite(ttft_s) and math.isfinite(e2e_s) and 0.0 <= ttft_s <= e2e_s):
            raise InputError(f"foresight: outcome ttft_s={ttft_s}, e2e_s={e2e_s} must be finite, 0 <= ttft_s <= e2e_s")
        if prediction.basis and prediction.basis[0] > 0.0 and e2e_s > ttft_s:
            note_outcome(self.record[0], np.array(prediction.basis[1:]), prediction.basis[0], e2e_s - ttft_s)
