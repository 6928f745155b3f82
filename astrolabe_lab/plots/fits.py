"""Figures of fits and of replays: each function takes a frame and returns a `go.Figure`, never shows it."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from astrolabe_lab.measure import require_columns
from astrolabe_lab.plots import COLOURS, SYMBOLS, TEMPLATE

REGIMES = {True: "mixed", False: "decode only"}
SHOWN = 2000  # points of a scatter; more only cost bytes


def step_times(steps: pd.DataFrame) -> go.Figure:
    """Seconds of timed steps (`new_tokens, context_tokens, mixed, seconds`) over their new tokens, by regime."""
    require_columns(steps, ("new_tokens", "context_tokens", "mixed", "seconds"))
    figure = go.Figure(layout={"template": TEMPLATE})
    for i, (mixed, name) in enumerate(REGIMES.items()):
        rows = _thinned(steps[steps["mixed"] == mixed])
        figure.add_scatter(
            x=rows["new_tokens"], y=rows["seconds"] * 1e3, mode="markers", name=name,
            marker={"color": COLOURS[i], "symbol": SYMBOLS[i], "size": 5, "opacity": 0.6},
            text=[f"{tokens:,.0f} tokens of context" for tokens in rows["context_tokens"]],
            hovertemplate="%{x:,} new tokens, %{text}<br>%{y:.1f} ms",
        )  # fmt: skip
    figure.update_xaxes(title="new tokens in the step", type="log").update_yaxes(title="step (ms)", type="log")
    return _titled(figure, "What a step takes", "one point a timed batch; the spread at equal x is context")


def residuals(by_model: dict[str, pd.DataFrame], over: str = "context_tokens") -> go.Figure:
    """Residuals (`residual_pct, mixed`, and the count `over`) of several models of the same steps, side by side."""
    figure = make_subplots(1, len(by_model), shared_yaxes=True, subplot_titles=list(by_model), horizontal_spacing=0.03)
    for column, frame in enumerate(by_model.values(), 1):
        require_columns(frame, ("residual_pct", "mixed", over))
        for i, (mixed, name) in enumerate(REGIMES.items()):
            rows = _thinned(frame[frame["mixed"] == mixed])
            figure.add_scatter(
                x=rows[over], y=rows["residual_pct"], mode="markers", name=name, legendgroup=name,
                showlegend=column == 1, marker={"color": COLOURS[i], "symbol": SYMBOLS[i], "size": 5, "opacity": 0.6},
                hovertemplate="%{x:,}: %{y:+.1f} %", row=1, col=column,
            )  # fmt: skip
        figure.update_xaxes(title=over.replace("_", " "), row=1, col=column)
    figure.add_hline(0, line={"color": "#888", "width": 1}).update_yaxes(title="priced over timed (%)", col=1)
    figure.update_layout(template=TEMPLATE)
    return _titled(figure, "How far the price of a step is from its timing", "0: exact; above: too dear")


def errors(table: pd.DataFrame) -> go.Figure:
    """The table of `fidelity.compare` (`metric, statistic, error_pct, peer_error_pct`) as bars, ours and the peer's."""
    require_columns(table, ("metric", "statistic", "error_pct", "peer_error_pct"))
    metrics = list(table["metric"].unique())
    names = {"ttft": "TTFT", "tpot": "TPOT"}
    titles = [names.get(metric, metric) for metric in metrics]
    figure = make_subplots(1, len(metrics), shared_yaxes=True, subplot_titles=titles, horizontal_spacing=0.03)
    for column, metric in enumerate(metrics, 1):
        rows = table[table["metric"] == metric]
        for i, (name, key) in enumerate({"here": "error_pct", "its own simulator": "peer_error_pct"}.items()):
            if rows[key].notna().any():
                figure.add_bar(
                    x=rows["statistic"], y=rows[key], name=name, legendgroup=name, showlegend=column == 1,
                    marker={"color": COLOURS[i]}, hovertemplate="%{x}: %{y:+.1f} %", row=1, col=column,
                )  # fmt: skip
    figure.add_hline(0, line={"color": "#888", "width": 1}).update_yaxes(title="simulated over measured (%)", col=1)
    figure.update_layout(template=TEMPLATE)
    return _titled(figure, "The replay against the measured run", "0: equal")


def measured_and_simulated(requests: pd.DataFrame) -> go.Figure:
    """Each request's measured and simulated TTFT (`arrived_s, ttft_s, sim_ttft_s`) over its arrival."""
    require_columns(requests, ("arrived_s", "ttft_s", "sim_ttft_s"))
    figure = go.Figure(layout={"template": TEMPLATE})
    for i, (name, key) in enumerate({"measured": "ttft_s", "simulated": "sim_ttft_s"}.items()):
        figure.add_scatter(
            x=requests["arrived_s"], y=requests[key], mode="markers", name=name,
            marker={"color": COLOURS[i], "symbol": SYMBOLS[i], "size": 5, "opacity": 0.7},
            hovertemplate="arrived at %{x:.1f} s: %{y:.2f} s",
        )  # fmt: skip
    figure.update_xaxes(title="arrival (s)").update_yaxes(title="TTFT (s)", rangemode="tozero")
    return _titled(figure, "Request by request", "one point a request and world")


def _thinned(rows):
    return rows.iloc[np.unique(np.linspace(0, len(rows) - 1, min(SHOWN, len(rows))).astype(int))] if len(rows) else rows


def _titled(figure, title, note):
    return figure.update_layout(title={"text": title, "subtitle": {"text": note}})
