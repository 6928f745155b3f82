"""Claims about the figures of traces: what is drawn is what the trace holds."""

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab import arrivals
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import families
from astrolabe_lab.plots import traces as plots_traces


@pytest.fixture(scope="module")
def traces():
    frame = families.generate("mixed", 4000, seed=1, text=False)
    kinds = {"even": "constant", "poisson": "poisson", "bursts": "bursts:high=3,high_s=10,low_s=30"}
    return {name: arrivals.with_arrivals(frame, 20.0, kind, 1) for name, kind in kinds.items()}


def test_the_rate_is_drawn_window_by_window_on_one_scale(traces):
    figure = plots_traces.arrival_rate(traces, window_s=2.0)
    assert [line.name for line in figure.data] == [*traces]
    for line, frame in zip(figure.data, traces.values(), strict=True):
        at = frame["arrived_s"].to_numpy() - frame["arrived_s"].iloc[0]
        counts = np.histogram(at, np.arange(len(line.y) + 2) * 2.0)[0][:-1]
        assert (np.array(line.y) * 2).tolist() == counts.tolist()
    assert figure.layout.yaxis.range == figure.layout.yaxis3.range
    assert figure.layout.yaxis.range[1] > max(max(line.y) for line in figure.data)


def test_dispersion_is_one_for_poisson_and_grows_with_the_window_under_bursts(traces):
    even, poisson, bursts = plots_traces.burstiness(traces).data
    assert max(even.y) < 1 and np.abs(np.array(poisson.y) - 1).max() < 0.9
    assert bursts.y[-1] > 10 * bursts.y[0] and (np.diff(bursts.y) > 0).all()
    assert max(poisson.x) <= np.ptp(traces["poisson"]["arrived_s"]) / 20  # twenty windows at least
    assert plots_traces.burstiness(traces, windows_s=(1.0, 4.0)).data[0].x == (1.0, 4.0)


def test_lengths_are_drawn_as_shares(traces):
    figure = plots_traces.lengths(traces)
    assert len(figure.data) == 2 * len(traces)
    prompt, output = figure.data[:2]
    frame = traces["even"]
    for line, column in ((prompt, "prompt_tokens"), (output, "output_tokens")):
        below = [(frame[column] <= x).mean() for x in line.x]
        assert (np.array(below) >= np.array(line.y) - 1e-12).all() and line.x[-1] == frame[column].max()
    assert [line.showlegend for line in figure.data] == [True, False] * 3


def test_one_length_for_all_can_be_drawn():
    frame = pd.DataFrame({"rid": [0, 1], "prompt_tokens": [7, 7], "output_tokens": [1, 1]})
    assert len(plots_traces.lengths({"same": frame}).data) == 2


def test_what_has_no_times_or_is_no_mapping_is_refused(traces):
    without = {"x": traces["even"].drop(columns="arrived_s")}
    for draw in (plots_traces.arrival_rate, plots_traces.burstiness):
        with pytest.raises(InputError, match="no arrived_s"):
            draw(without)
    for wrong in ({}, traces["even"], None):
        with pytest.raises(InputError, match="mapping from label to trace frame"):
            plots_traces.lengths(wrong)


def test_a_window_longer_than_the_trace_is_refused(traces):
    with pytest.raises(InputError, match="at most the trace's span"):
        plots_traces.arrival_rate(traces, window_s=1e6)
