"""The marginal-cost router: its price against the equation written out, its terms, its guard."""

import numpy as np
import pytest

from astrolabe_lab.disagg import routers
from astrolabe_lab.disagg.constants import PAPER
from astrolabe_lab.disagg.marginal_cost import MarginalCost
from astrolabe_lab.disagg.view import IN_FLIGHT, POLLED, PoolsView
from astrolabe_lab.errors import InputError
from astrolabe_lab.request import Request

CONSTANTS = PAPER.with_(decode_slope_s=4e-4, kv_capacity_tokens=6000)


def cluster(seed, n_p=2, n_d=3, flying=40, numbers=None, used_tokens=None, prefilled_s=None, at=None):
    """Pools with requests at random stages; ``numbers``: of the decode engines that are healthy. ``used_tokens``,
    ``prefilled_s``: where given, the same of all, or one each. ``at``: the decode engines of those in flight."""
    rng = np.random.default_rng(seed)
    numbers = np.arange(n_d) if numbers is None else np.array(numbers)
    prefill, decode = np.zeros(n_p, POLLED), np.zeros(len(numbers), POLLED)
    prefill["instance"], decode["instance"] = np.arange(n_p), numbers
    decode["taken_s"] = 99.97
    decode["used_tokens"] = rng.integers(2000, 6000, len(numbers))
    rows = np.zeros(flying, IN_FLIGHT)
    rows["rid"] = np.arange(flying)
    rows["prompt_tokens"] = rng.integers(10, 900, flying)
    rows["predicted_tokens"] = rng.integers(1, 700, flying)
    rows["tight"] = rng.integers(0, 2, flying)
    rows["prefill"] = rng.integers(0, n_p, flying)
    rows["decode"] = rng.integers(0, n_d, flying)
    stage = rng.integers(0, 3, flying)
    rows["sent_s"] = rng.uniform(80, 99, flying)
    rows["prefilled_s"] = np.where(stage > 0, rng.uniform(99, 100, flying), np.nan)
    rows["first_token_s"] = np.where(stage > 1, rng.uniform(90, 99.9, flying), np.nan)
    rows["streamed"] = np.where(stage > 1, rng.integers(1, 300, flying), 0)
    if used_tokens is not None:
        decode["used_tokens"] = used_tokens
    if prefilled_s is not None:
        rows["prefilled_s"] = prefilled_s
    if at is not None:
        rows["decode"] = at
    return PoolsView(100.0, prefill, decode, rows, CONSTANTS)


def written_out(request, view, p, d, weights, streamed, mean=None):
    """The equation, term by term, for one pair."""
    c = view.constants
    a, b, tau, slope = c.prefill_base_s, c.prefill_per_token_s, c.decode_step_s, c.decode_slope_s
    n, o = request.prompt_tokens, mean or request.predicted_tokens
    tight = request.slo == "tight"
    T, P = c.targets_s(request.slo)
    hand_off = c.transfer_s(n)
    at_p = [j for j in view.in_flight if j["prefill"] == view.prefill[p]["instance"] and np.isnan(j["prefilled_s"])]
    at_d = [j for j in view.in_flight if j["decode"] == view.decode[d]["instance"]]

    def left(j):
        length = mean or j["predicted_tokens"]
        if np.isnan(j["first_token_s"]):
            return max(length, 10)
        return max(length - (j["streamed"] if streamed else (view.now_s - j["first_token_s"]) / tau), 10)

    B_p = 0.35 * a * len(at_p) + b * sum(j["prompt_tokens"] for j in at_p)
    B_d = slope * sum(min(left(j), o) for j in at_d)
    W = a + b * n + hand_off + o * tau
    taken = view.decode[d]["taken_s"]
    K = view.decode[d]["used_tokens"] + sum(j["prompt_tokens"] for j in at_d if not j["prefilled_s"] <= taken)
    C = (a + b * n + o * tau) * max(0, (K + n + o) / c.kv_capacity_tokens - 0.8) / 0.2
    t = [tau + slope * len(at_d), tau + slope * (len(at_d) - 1)]
    S = (3 if tight else 1) * (max(B_p + a + b * n + hand_off + t[0] - T, 0) + o * max(tau + B_d / o - P, 0))
    for j in at_d:
        P_j = c.targets_s("tight" if j["tight"] else "loose")[1]
        S += (3 if j["tight"] else 1) * left(j) * (max(t[0] - P_j, 0) - max(t[1] - P_j, 0))
    return float(np.dot(weights, [B_p + B_d, W, C, S, B_d]))


@pytest.mark.parametrize("progress", ["estimated", "streamed"])
@pytest.mark.parametrize("slo", ["tight", "loose"])
def test_prices_equal_the_equation_written_out(slo, progress):
    weights = [0.7, 1.3, 0.9, 1.1, 0.4]
    policy = MarginalCost(*weights, progress=progress)
    for seed in range(20):
        view = cluster(seed, flying=5 * seed)
        request = Request(999, 100.0, 400, 350, slo)
        prices, *_ = policy.prices(request, view)
        for p in range(2):
            for d in range(3):
                expected = written_out(request, view, p, d, weights, progress == "streamed")
                assert prices[p, d] == pytest.approx(expected, rel=1e-12), (seed, p, d)


def test_without_lengths_everybody_has_the_mean_predicted_so_far():
    policy = MarginalCost(lengths=False)
    view = cluster(3)
    policy.prices(Request(998, 99.0, 100, 500, "loose"), view)
    prices, *_ = policy.prices(Request(999, 100.0, 400, 100, "loose"), view)
    assert prices[1, 2] == pytest.approx(written_out(Request(999, 100.0, 400, 100, "loose"), view, 1, 2,
                                                     [1, 1, 1, 1, 0], False, mean=300.0))  # fmt: skip


@pytest.mark.parametrize("term", ["backlog", "own", "cache", "slo"])
def test_each_term_can_be_left_out_and_they_add_up(term):
    view, request = cluster(4), Request(999, 100.0, 700, 350, "tight")
    whole = MarginalCost().prices(request, view)[0]
    without = MarginalCost(**{term: 0}).prices(request, view)[0]
    alone = MarginalCost(**{name: float(name == term) for name in ("backlog", "own", "cache", "slo")})
    np.testing.assert_allclose(without + alone.prices(request, view)[0], whole, rtol=1e-12)
    assert (whole > without).any()


def test_what_a_request_itself_costs_with_its_hand_off_is_the_same_on_every_pair():
    request = Request(999, 100.0, 700, 350, "tight")
    own_s = MarginalCost(backlog=0, cache=0, slo=0).prices(request, cluster(4))[0]
    assert own_s.min() == own_s.max() > CONSTANTS.transfer_s(700)


def test_engines_that_are_left_out_keep_their_numbers():
    view = cluster(5, n_d=3, numbers=[0, 2])
    request = Request(999, 100.0, 400, 350, "tight")
    prices = MarginalCost().prices(request, view)[0]
    assert prices.shape == (2, 2)
    assert prices[0, 1] == pytest.approx(written_out(request, view, 0, 1, [1, 1, 1, 1, 0], False))


def test_it_takes_the_cheapest_pair_and_with_k_the_cheapest_of_those_drawn():
    view, request, rng = cluster(6), Request(999, 100.0, 400, 350, "tight"), np.random.default_rng(0)
    prices = MarginalCost().prices(request, view)[0]
    assert MarginalCost().choose(request, view, rng) == np.unravel_index(prices.argmin(), prices.shape)
    chosen = [MarginalCost(k=2).choose(request, view, rng) for _ in range(400)]
    ranks = prices.ravel().argsort().argsort().reshape(prices.shape)
    shares = np.bincount([ranks[pair] for pair in chosen], minlength=6) / 400
    np.testing.assert_allclose(shares, [2 * (5 - rank) / 30 for rank in range(6)], atol=0.08)


def test_the_guard_spreads_what_no_pair_can_serve_in_time_and_prices_the_rest():
    rng = np.random.default_rng(0)
    request = Request(999, 100.0, 400, 350, "loose")
    calm = cluster(7, flying=12, used_tokens=1000)
    for guard in ("rotate", "least"):
        assert MarginalCost(guard=guard).choose(request, calm, rng) == MarginalCost().choose(request, calm, rng)
    full = cluster(7, flying=12, used_tokens=5900)
    counts = np.bincount(full.in_flight["decode"], minlength=3)
    assert MarginalCost(guard="least").choose(request, full, rng)[1] in np.flatnonzero(counts == counts.min())
    rotating = MarginalCost(guard="rotate")
    assert sorted(rotating.choose(request, full, rng)[1] for _ in range(6)) == [0, 0, 1, 1, 2, 2]


def test_the_guard_acts_where_every_decode_engine_is_past_the_tight_pace():
    rng, request = np.random.default_rng(0), Request(999, 100.0, 20, 350, "loose")
    # 80 streams each: 13 + 0.4 * 80 = 45 ms a step, 39.7 allowed
    view = cluster(8, flying=240, used_tokens=0, prefilled_s=90.0)
    assert (MarginalCost().prices(request, view).step_s > CONSTANTS.tpot_s).all()
    counts = np.bincount(view.in_flight["decode"], minlength=3)
    assert MarginalCost(guard="least").choose(request, view, rng)[1] == counts.argmin()


@pytest.mark.parametrize(
    ("streams", "used_tokens", "slo", "allowed"),
    [
        ((40, 40, 40), (0, 0, 0), "loose", {0, 1, 2}),  # 29 ms a step: all keep four fifths of 39.7
        ((80, 60, 20), (0, 0, 0), "tight", {2}),
        ((80, 60, 20), (0, 0, 0), "loose", {0}),  # the fullest is given up, the next is let recover
        ((80, 60, 20), (4800, 0, 0), "loose", {1}),  # it has no memory
        ((220, 60, 20), (0, 0, 0), "loose", {1}),  # it is too slow for loose ones
        ((80, 70, 60), (0, 0, 0), "tight", {0}),  # none keeps the pace: one is given up, for the others' sake
        ((80, 72, 68), (4800,) * 3, "tight", {2}),  # nothing is left to give up: the fewest requests
    ],
)
def test_the_guard_that_spares_gives_up_the_fullest_decode_engine_instead_of_all(streams, used_tokens, slo, allowed):
    request, rng = Request(999, 100.0, 20, 350, slo), np.random.default_rng(0)
    at = np.repeat(np.arange(3), streams)
    view = cluster(9, flying=at.size, used_tokens=used_tokens, prefilled_s=90.0, at=at)
    chosen = {MarginalCost(guard="spare", k=k).choose(request, view, rng)[1] for k in (0, 2) for _ in range(20)}
    assert chosen <= allowed


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("marginal_cost:slo=-1", "weight"),
        ("marginal_cost:progress=seen", "progress"),
        ("marginal_cost:guard=true", "guard"),
        ("marginal_cost:k=-1", "k=-1"),
        ("marginal_cost:weight=1", "options"),
        ("marginal_cots", "Did you mean marginal_cost"),
    ],
)
def test_wrong_options_are_named(text, told):
    with pytest.raises(InputError, match=told):
        routers.parse(text)


@pytest.mark.parametrize("text", ["round_robin", "length_threshold:window=50", "marginal_cost:slo=0.0,guard=least"])
def test_policies_survive_their_text(text):
    assert routers.spec(routers.parse(text)) == text


def test_the_threshold_is_the_median_of_the_last_predictions():
    policy = routers.parse("length_threshold:window=50")
    rng, seen = np.random.default_rng(1), []
    for _ in range(300):
        seen.append(int(rng.integers(1, 900)))
        assert policy._usual(seen[-1]) == np.median(seen[-50:])


def test_long_requests_go_to_the_least_loaded_decode_engine_and_short_ones_in_turn():
    view, rng = cluster(9, flying=30), np.random.default_rng(0)
    counts = np.bincount(view.in_flight["decode"], minlength=3)
    policy = routers.parse("length_threshold")
    policy.choose(Request(1, 100.0, 10, 100), view, rng)
    assert policy.choose(Request(2, 100.0, 10, 900), view, rng)[1] == counts.argmin()
    assert [policy.choose(Request(3, 100.0, 10, 5), view, rng)[1] for _ in range(3)] == [1, 2, 0]


def test_a_request_without_a_predicted_length_is_refused():
    with pytest.raises(InputError, match="no predicted length"):
        MarginalCost().choose(Request(1, 100.0, 10), cluster(0), np.random.default_rng(0))
