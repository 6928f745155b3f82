"""Figures of length models at work."""

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab.errors import InputError
from astrolabe_lab.length.figures import error_over_time, gaps_by_lengths
from astrolabe_lab.length.model_figures import error_by_group


def test_gaps_that_are_not_clear_are_hollow_and_bars_are_the_interval():
    gaps = pd.DataFrame(
        {"policy": ["x", "y"], "mean": [1.0, 2.0], "low": [-1.0, 1.5], "high": [3.0, 4.0], "clear": [False, True]}
    )
    figure = gaps_by_lengths({"astrolabe": gaps, "min_tokens": gaps}, "mean TTFT (ms)", "oracle")
    assert [trace.name for trace in figure.data] == ["astrolabe", "min_tokens"]
    drawn = figure.data[0]
    assert list(drawn.error_y.array) == [2.0, 2.0] and list(drawn.error_y.arrayminus) == [2.0, 0.5]
    assert [symbol.endswith("-open") for symbol in drawn.marker.symbol] == [True, False]
    assert "oracle" in figure.layout.title.text
    with pytest.raises(InputError, match="clear"):
        gaps_by_lengths({"a": gaps.drop(columns="clear")}, "x", "oracle")


def test_no_table_of_groups_is_nothing_to_draw():
    with pytest.raises(InputError, match="nothing to draw"):
        error_by_group({}, "length", "tenths")


def test_errors_over_time_are_drawn_beside_the_constants_with_their_marks():
    requests = np.arange(100, 200)
    frame = pd.DataFrame({"request": requests, "mae_tokens": 50.0, "constant_mae_tokens": 80.0})
    figure = error_over_time({"old": frame, "new": frame}, {"change": 120, "alarm": 140})
    assert [trace.name for trace in figure.data] == ["old", "new", "the constant"]
    assert [shape.x0 for shape in figure.layout.shapes] == [120, 140]
    assert [note.text for note in figure.layout.annotations] == ["change", "alarm"]
    assert len(error_over_time({"old": frame}, {}, constant=False).data) == 1
