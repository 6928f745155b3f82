"""Figures of how good length models are: beside the constant and the floor, and where they are wrong."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from astrolabe_lab.errors import InputError
from astrolabe_lab.length.evaluate import Evaluation
from astrolabe_lab.measure import require_columns
from astrolabe_lab.plots import COLOURS, TEMPLATE

GREY = "#7F7F7F"
_MOST_POINTS = 2000


def errors_beside_constant(judged: Mapping[str, Evaluation]) -> go.Figure:
    """The MAE of each model, by name, with the interval of its gain; lines for the constant median and the floor."""
    if not judged:
        raise InputError("there is nothing to draw: give at least one evaluation, by name")
    found = {name: evaluation.summary() for name, evaluation in judged.items()}
    constant = next(iter(found.values()))["constant_mae"]
    figure = go.Figure(layout={"template": TEMPLATE})
    figure.add_bar(
        x=list(found), y=[one["mae"] for one in found.values()], marker={"color": COLOURS[0]}, width=0.5,
        error_y={
            "array": [(one["reduction"] - one["reduction_low"]) * constant for one in found.values()],
            "arrayminus": [(one["reduction_high"] - one["reduction"]) * constant for one in found.values()],
        },
    )  # fmt: skip
    figure.add_hline(y=constant, line={"color": GREY, "dash": "dash"}, annotation_text="the constant median")
    floor = next(iter(found.values())).get("floor_mae")
    if floor is not None:
        figure.add_hline(y=floor, line={"color": "#222", "dash": "dot"}, annotation_text="noise floor")
    splits = next(iter(found.values()))["splits"]
    over = f"{splits} splits of the prompts" if splits > 1 else "the prompts of one split"
    figure.update_layout(
        title={"text": "Mean absolute error on prompts not seen"}, showlegend=False,
        title_subtitle_text=f"bars: 95 % interval of the gain over the constant, from {over}",
    )  # fmt: skip
    figure.update_yaxes(title="mean absolute error (tokens)", rangemode="tozero")
    return figure


def predicted_beside_true(predictions: pd.DataFrame) -> go.Figure:
    """Predicted median against true length, a point a judged answer (at most 2,000, evenly taken), on log axes."""
    require_columns(predictions, ("p50", "p90", "response_tokens", "prompt", "censored"))
    rows = predictions[~predictions["censored"]]
    rows = rows.iloc[:: max(1, -(-len(rows) // _MOST_POINTS))]
    figure = go.Figure(layout={"template": TEMPLATE})
    figure.add_scattergl(
        x=rows["response_tokens"], y=rows["p50"], mode="markers", name="an answer",
        marker={"size": 5, "color": COLOURS[0], "opacity": 0.5}, text=rows["prompt"].str.slice(0, 80),
        hovertemplate="true %{x}, predicted %{y:.0f}<br>%{text}<extra></extra>",
    )  # fmt: skip
    ends = [1, float(rows[["response_tokens", "p50"]].max().max())]
    figure.add_scatter(x=ends, y=ends, mode="lines", name="right", line={"color": "#222", "width": 1})
    figure.update_xaxes(title="true length (tokens)", type="log")
    figure.update_yaxes(title="predicted median (tokens)", type="log")
    figure.update_layout(title={"text": "Predicted and true length of answers"})
    return figure


def error_by_group(tables: Mapping[str, pd.DataFrame], what: str, label: str) -> go.Figure:
    """The MAE group by group, a line for each model in ``tables`` (``Evaluation.by(what)``); the constant's dashed."""
    if not tables:
        raise InputError("there is nothing to draw: give at least one table of groups, by the model's name")
    figure = go.Figure(layout={"template": TEMPLATE})
    for index, (name, table) in enumerate(tables.items()):
        require_columns(table, (what, "mae", "constant_mae"))
        groups = [str(group) for group in table[what]]
        figure.add_scatter(
            x=groups, y=table["mae"], name=name, mode="lines+markers", line={"color": COLOURS[index % len(COLOURS)]}
        )
    figure.add_scatter(
        x=groups, y=table["constant_mae"], name="the constant", mode="lines", line={"color": GREY, "dash": "dash"}
    )
    figure.update_xaxes(title=label, type="category")
    figure.update_yaxes(title="mean absolute error (tokens)", rangemode="tozero")
    figure.update_layout(title={"text": f"Where the error is, by {label}"})
    return figure
