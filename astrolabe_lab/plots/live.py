"""Figures of running engines: each function takes frames and returns a `go.Figure`, never shows it."""

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from astrolabe_lab.measure import require_columns
from astrolabe_lab.measure.prediction import summary
from astrolabe_lab.plots import COLOURS, SYMBOLS, TEMPLATE

MOST_POINTS = 1000


def predicted_and_measured(runs: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Predicted over measured E2E of the requests of each run, by name, with the mean error of each; log axes."""
    figure = go.Figure(layout={"template": TEMPLATE})
    ends: list[float] = []
    for i, (name, frame) in enumerate(runs.items()):
        require_columns(frame, ("e2e_s", "predicted_e2e_s", "status"))
        rows = frame[(frame["status"] == "ok") & frame["predicted_e2e_s"].notna()]
        rows = rows.iloc[:: max(1, -(-len(rows) // MOST_POINTS))]
        error = f": {summary(frame)['prediction_mae_pct']:.0f} % off" if len(rows) else ": no predictions"
        figure.add_scatter(
            x=rows["e2e_s"], y=rows["predicted_e2e_s"], mode="markers", name=name + error,
            marker={"color": COLOURS[i % len(COLOURS)], "symbol": SYMBOLS[i % len(SYMBOLS)], "size": 6, "opacity": 0.7},
            hovertemplate="measured %{x:.2f} s, predicted %{y:.2f} s",
        )  # fmt: skip
        ends += [*rows["e2e_s"], *rows["predicted_e2e_s"]]
    if ends:
        line = [min(ends), max(ends)]
        figure.add_scatter(x=line, y=line, mode="lines", name="equal", line={"color": "#888", "width": 1})
    figure.update_xaxes(title="measured E2E (s)", type="log").update_yaxes(title="predicted E2E (s)", type="log")
    title = {"text": "What was predicted, and what came", "subtitle": {"text": "one point a request"}}
    return figure.update_layout(title=title)
