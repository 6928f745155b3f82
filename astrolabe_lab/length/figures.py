"""Figures of length models at work: what their error costs, and how it moves when the work changes."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from astrolabe_lab.measure import require_columns
from astrolabe_lab.plots import COLOURS, SYMBOLS, TEMPLATE


def gaps_by_lengths(found: Mapping[str, pd.DataFrame], label: str, baseline: str) -> go.Figure:
    """How far each way to predict lies from the baseline, a colour for each name in ``found``.

    ``found``: frames of ``worth.gaps``, by policy. ``label`` says what was measured, with its unit. Points are hollow
    where the gap is not clear of zero, so that the seeds name no winner.
    """
    figure = go.Figure(layout={"template": TEMPLATE})
    for index, (name, gaps) in enumerate(found.items()):
        require_columns(gaps, ("policy", "mean", "low", "high", "clear"))
        colour, symbol = COLOURS[index % len(COLOURS)], SYMBOLS[index % len(SYMBOLS)]
        figure.add_scatter(
            x=gaps["policy"], y=gaps["mean"], name=name, mode="markers",
            error_y={
                "array": gaps["high"] - gaps["mean"], "arrayminus": gaps["mean"] - gaps["low"],
                "color": colour, "thickness": 1.5,
            },
            marker={
                "color": colour, "size": 10,
                "symbol": [symbol if clear else f"{symbol}-open" for clear in gaps["clear"]],
            },
        )  # fmt: skip
    figure.add_hline(y=0, line={"color": "#222", "width": 1})
    figure.update_layout(scattermode="group", title={"text": f"{label}, minus that of {baseline}"})
    figure.update_layout(title_subtitle_text="bars: 95 % interval over seeds; hollow: not clear of zero, so no winner")
    figure.update_xaxes(title="predicted lengths", type="category")
    figure.update_yaxes(title=label)
    return figure


def error_over_time(
    rolled: Mapping[str, pd.DataFrame], marks: Mapping[str, float], note: str = "", constant: bool = True
) -> go.Figure:
    """Mean absolute errors over a sliding window, a line for each model in ``rolled`` (``drift.rolling_error``).

    ``marks``: vertical lines, by what they say, at numbers of requests. The constant's error is drawn dashed.
    """
    figure = go.Figure(layout={"template": TEMPLATE})
    for index, (name, frame) in enumerate(rolled.items()):
        require_columns(frame, ("request", "mae_tokens", "constant_mae_tokens"))
        figure.add_scatter(
            x=frame["request"], y=frame["mae_tokens"], name=name, mode="lines",
            line={"color": COLOURS[index % len(COLOURS)], "width": 2},
        )  # fmt: skip
    if constant:
        first = next(iter(rolled.values()))
        figure.add_scatter(
            x=first["request"], y=first["constant_mae_tokens"], name="the constant", mode="lines",
            line={"color": "#7F7F7F", "width": 2, "dash": "dash"},
        )  # fmt: skip
    for index, (text, request) in enumerate(marks.items()):
        figure.add_vline(x=request, line={"color": "#222", "width": 1, "dash": "dot"})
        figure.add_annotation(
            x=request, y=1 - 0.08 * index, yref="paper", text=text, showarrow=False, xanchor="left", xshift=4
        )
    figure.update_xaxes(title="requests, in the order of their arrival")
    figure.update_yaxes(title="mean absolute error (tokens)", rangemode="tozero")
    figure.update_layout(title={"text": "The error of predicted lengths over time"}, title_subtitle_text=note)
    return figure
