"""Figures of traces: when requests arrive, and how long they are.

Each function takes a mapping from label to trace frame and returns a `go.Figure`, in the style of `plots`.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from astrolabe_lab.errors import InputError
from astrolabe_lab.plots import COLOURS, TEMPLATE, _log_ticks, _titled
from astrolabe_lab.trace.summary import rate_windows

LENGTHS = {"prompt_tokens": "prompt tokens", "output_tokens": "output tokens"}


def arrival_rate(traces: Mapping[str, pd.DataFrame], window_s: float = 1.0) -> go.Figure:
    """Requests a second in windows of ``window_s``, a panel per trace, its mean dashed; one scale for all.

    Raises InputError for a trace without times, or a window longer than its span.
    """
    windows = {name: rate_windows(frame, window_s) for name, frame in _named(traces).items()}
    figure = make_subplots(rows=len(windows), shared_xaxes=True, vertical_spacing=0.06, subplot_titles=[*windows])
    for row, (name, found) in enumerate(windows.items(), 1):
        colour = COLOURS[(row - 1) % len(COLOURS)]
        figure.add_scatter(
            x=found["t_s"], y=found["rate_rps"], name=name, mode="lines", showlegend=False, row=row, col=1,
            line={"color": colour, "width": 1.5, "shape": "hvh"},
        )  # fmt: skip
        figure.add_hline(y=found["rate_rps"].mean(), line={"dash": "dash", "color": "#222", "width": 1}, row=row, col=1)
    highest = max(found["rate_rps"].max() for found in windows.values())
    figure.update_yaxes(range=[0, highest * 1.05])
    figure.update_yaxes(title="requests/s", row=(len(windows) + 1) // 2)
    figure.update_xaxes(title="time (s)", row=len(windows))
    figure.update_layout(template=TEMPLATE, height=190 + 130 * len(windows), margin={"t": 105})
    return _titled(figure, "When requests arrive", f"requests a second, counted in windows of {window_s:g} s")


def burstiness(traces: Mapping[str, pd.DataFrame], windows_s: tuple[float, ...] | None = None) -> go.Figure:
    """Variance over mean of the counts in windows of growing length, one line a trace; Poisson stays at 1.

    A process that is bursty on a scale of seconds rises there and falls once the windows average the bursts out. Below
    0.05, where evenly spaced arrivals lie, the chart ends.
    ``windows_s`` defaults to 1-2-5 steps that leave every trace twenty windows. Raises InputError for a trace without
    times.
    """
    figure = go.Figure(layout={"template": TEMPLATE})
    for index, (name, frame) in enumerate(_named(traces).items()):
        span_s = np.ptp(frame["arrived_s"]) if "arrived_s" in frame else np.inf
        steps = [digit * 10.0**power for power in range(-1, 6) for digit in (1, 2, 5)]
        tried = [step for step in steps if step <= span_s / 20] if windows_s is None else windows_s
        counts = [rate_windows(frame, window_s)["requests"] for window_s in tried]
        colour = COLOURS[index % len(COLOURS)]
        figure.add_scatter(
            x=tried, y=[found.var(ddof=0) / found.mean() for found in counts], name=name, mode="lines+markers",
            line={"color": colour}, marker={"color": colour},
        )  # fmt: skip
    drawn = [(x, y) for line in figure.data for x, y in zip(line.x, line.y, strict=True) if y > 0]
    figure.add_hline(y=1, line={"dash": "dash", "color": "#222", "width": 1})
    if drawn:
        (xs, ys) = zip(*drawn, strict=True)
        figure.update_xaxes(type="log", **_log_ticks(min(xs) * 0.9, max(xs) * 1.1))
        figure.update_yaxes(type="log", **_log_ticks(max(min(0.5, *ys), 0.05) * 0.9, max(2.0, *ys) * 1.1))
    figure.update_xaxes(title="length of the window (s)")
    figure.update_yaxes(title="variance / mean of counts")
    return _titled(figure, "On which scale arrivals are bursty", "dashed: Poisson, on every scale")


def lengths(traces: Mapping[str, pd.DataFrame]) -> go.Figure:
    """The share of requests with at most so many prompt tokens, and so many output tokens, one line a trace."""
    figure = make_subplots(cols=2, shared_yaxes=True, horizontal_spacing=0.05)
    shares = np.unique(np.concatenate([np.linspace(0, 1, 201), 1 - np.geomspace(1e-4, 1e-2, 30)]))
    for index, (name, frame) in enumerate(_named(traces).items()):
        for col, column in enumerate(LENGTHS, 1):
            marks = np.quantile(frame[column], shares, method="inverted_cdf")
            figure.add_scatter(
                x=marks, y=shares, name=name, legendgroup=name, showlegend=col == 1, row=1, col=col,
                line={"color": COLOURS[index % len(COLOURS)], "width": 2, "shape": "hv"},
            )  # fmt: skip
    for col, (column, title) in enumerate(LENGTHS.items(), 1):
        low = min(frame[column].min() for frame in traces.values())
        high = max(frame[column].max() for frame in traces.values())
        figure.update_xaxes(title=title, type="log", **_log_ticks(low, max(high, low + 1)), row=1, col=col)
    figure.update_yaxes(title="share of requests", range=[0, 1.01], tickformat=".0%", col=1)
    figure.update_layout(template=TEMPLATE)
    return _titled(figure, "How long requests are", "the share of requests that are at most so long")


def _named(traces: Mapping[str, pd.DataFrame]) -> Mapping[str, pd.DataFrame]:
    if not isinstance(traces, Mapping) or not traces:
        raise InputError("traces: give a mapping from label to trace frame, e.g. {'mine': frame}")
    return traces
