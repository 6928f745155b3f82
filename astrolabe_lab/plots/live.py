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


def queues_over_time(watched: pd.DataFrame) -> go.Figure:
    """Running (lines) and waiting (dotted) requests of every instance over time, as a router saw them."""
    require_columns(watched, ("time_s", "instance", "running", "waiting"))
    figure = go.Figure(layout={"template": TEMPLATE})
    for i, (instance, rows) in enumerate(watched.groupby("instance")):
        for name, dash in (("running", "solid"), ("waiting", "dot")):
            figure.add_scatter(
                x=rows["time_s"], y=rows[name], mode="lines", name=f"{instance}: {name}", legendgroup=str(instance),
                line={"color": COLOURS[i % len(COLOURS)], "dash": dash, "shape": "hv"},
            )  # fmt: skip
    figure.update_xaxes(title="time (s)").update_yaxes(title="requests", rangemode="tozero")
    return figure.update_layout(title="What the router saw of its engines")


def regret(replays: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Of each policy, by name, the share of decisions whose regret is at most so much; a log axis from 1 ms."""
    figure = go.Figure(layout={"template": TEMPLATE})
    for i, (name, frame) in enumerate(replays.items()):
        require_columns(frame, ("regret_s",))
        values = frame["regret_s"].dropna().clip(lower=1e-3).sort_values()
        share = [(j + 1) / len(values) for j in range(len(values))]
        best = (frame["regret_s"] <= 1e-9).mean()
        figure.add_scatter(
            x=values, y=share, mode="lines", name=f"{name}: best {best:.0%}",
            line={"color": COLOURS[i % len(COLOURS)], "shape": "hv"},
        )  # fmt: skip
    figure.update_xaxes(title="regret (s of predicted E2E)", type="log").update_yaxes(
        title="share of decisions", range=[0, 1.02]
    )
    return figure.update_layout(title="How much worse than the best candidate")


def worlds(frames: Mapping[str, pd.DataFrame], metric: str = "e2e_s") -> go.Figure:
    """The distribution of a latency in each world, by name: one trace, the same policy."""
    figure = go.Figure(layout={"template": TEMPLATE})
    for i, (name, frame) in enumerate(frames.items()):
        values = frame.loc[frame["status"] == "ok", metric].dropna().sort_values()
        share = [(j + 1) / len(values) for j in range(len(values))]
        figure.add_scatter(x=values, y=share, mode="lines", name=name, line={"color": COLOURS[i % len(COLOURS)]})
    label = metric.removesuffix("_s").upper()
    figure.update_xaxes(title=f"{label} (s)", type="log").update_yaxes(title="share of requests", range=[0, 1.02])
    return figure.update_layout(title="One trace in each world")
