"""Forward simulation as the price of a pair: right where nothing is unknown, and of the ledger alone."""

import numpy as np
import pytest

import astrolabe_lab as lab
from astrolabe_lab.arrivals import with_arrivals
from astrolabe_lab.disagg import routers, simulate_pools
from astrolabe_lab.disagg.constants import PAPER
from astrolabe_lab.disagg.predicted import PredictedPair
from astrolabe_lab.disagg.view import IN_FLIGHT, POLLED, PoolsView
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import families
from astrolabe_lab.request import Request


def trace_of(n, qps, seed=0):
    frame = lab.length.attach(families.generate("mixed", n, seed=seed, text=False), "oracle")
    return with_arrivals(frame, qps, "poisson", seed)


class Recorder:
    """Sends in turn, and keeps what is predicted for where it sends."""

    needs_lengths = True

    def __init__(self):
        self.inner, self.kept = PredictedPair(), {}

    def __deepcopy__(self, memo):
        return self

    def choose(self, request, cluster, rng):
        pair = request.rid % len(cluster.prefill), request.rid // 2 % len(cluster.decode)
        self.kept[request.rid] = self.inner.predict(request, cluster, *pair)
        return pair


def test_a_lone_request_is_predicted_to_the_last_digit():
    recorder = Recorder()
    found = simulate_pools(trace_of(8, 0.01), recorder)
    predicted = np.array([recorder.kept[rid] for rid in found["rid"]])
    np.testing.assert_allclose(predicted[:, 0], found["ttft_s"], atol=1e-9)
    np.testing.assert_allclose(predicted[:, 1], found["e2e_s"], atol=1e-9)


def test_under_load_predictions_rank_what_happens():
    recorder = Recorder()
    found = simulate_pools(trace_of(250, 20), recorder)
    predicted = np.array([recorder.kept[rid] for rid in found["rid"]])
    assert np.corrcoef(predicted[:, 0], found["ttft_s"])[0, 1] > 0.8
    assert np.median(np.abs(predicted[:, 1] / found["e2e_s"] - 1)) < 0.05


def test_a_request_that_can_never_run_is_priced_out():
    recorder = Recorder()
    trace = trace_of(4, 1)
    trace["predicted_tokens"] = [10, 70_000, 10, 10]
    simulate_pools(trace, recorder)
    assert np.isinf(recorder.kept[1]).all() and np.isfinite(recorder.kept[2]).all()


@pytest.mark.parametrize(
    ("prompt", "predicted", "streamed"),
    [
        (3000, 50, 0),  # its prompt alone is too large
        (500, 10_000, 0),  # its answer will be
        (1000, 10_000, 500),  # and this one decodes, in the memory that the newcomer waits for
        (1590, 100, 60),  # it has more than there can be
    ],
)
def test_a_forecast_ends_though_what_is_in_flight_has_no_room_in_the_believed_memory(prompt, predicted, streamed):
    known = np.zeros(1, IN_FLIGHT)
    known["prompt_tokens"], known["predicted_tokens"], known["streamed"] = prompt, predicted, streamed
    known["prefilled_s"], known["first_token_s"] = 1.0, 1.0 if streamed else np.nan
    polled = np.zeros(1, POLLED)
    view = PoolsView(2.0, polled, polled, known, PAPER.with_(kv_capacity_tokens=1600))
    ttft_s, e2e_s = PredictedPair().predict(Request(7, 2.0, 200, 20), view, 0, 0)
    assert 0 < ttft_s < e2e_s < 60


def test_the_pair_with_the_lowest_predicted_ttft_gives_shorter_waits_than_turns():
    trace = trace_of(200, 24)
    waits_s = {
        name: simulate_pools(trace, name)["ttft_s"].mean() for name in ("round_robin", "predicted:k=0,metric=ttft_s")
    }
    assert waits_s["predicted:k=0,metric=ttft_s"] < 0.99 * waits_s["round_robin"]


@pytest.mark.parametrize(("text", "told"), [("predicted:k=-1", "k=-1"), ("predicted:metric=tpot_s", "late_s, e2e_s")])
def test_wrong_options_are_named(text, told):
    with pytest.raises(InputError, match=told):
        routers.parse(text)
