"""Figures of a calibration: each takes one and returns a ``go.Figure``, never shows it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from astrolabe_lab.calibrate.artifact import Calibration
from astrolabe_lab.calibrate.conduct import first_token_s
from astrolabe_lab.plots import COLOURS, TEMPLATE


def windows(calibration: Calibration) -> pd.DataFrame:
    """Every window measured: mixed, steps, new_tokens, sequences, context_tokens, seconds, priced_s, residual_pct."""
    frame = pd.DataFrame(calibration.rows["windows"])
    return frame.assign(residual_pct=100 * (frame["priced_s"] / frame["seconds"] - 1))


def decode_steps(calibration: Calibration) -> go.Figure:
    """Milliseconds of a decode step over its batch: measured points, the step cost at short and long contexts, and what
    clients of a router saw where that was measured."""
    frame = windows(calibration)
    frame = frame[~frame["mixed"]]
    streams = frame["sequences"].to_numpy()
    each = frame["context_tokens"].to_numpy() / streams
    figure = go.Figure(layout={"template": TEMPLATE})
    figure.add_scatter(
        x=streams, y=1e3 * frame["seconds"] / frame["steps"], mode="markers", name="measured",
        marker={"color": each, "colorscale": "Viridis", "size": 6, "colorbar": {"title": "context"}},
        text=[f"{c:,.0f} tokens of context a stream" for c in each],
        hovertemplate="%{x} streams, %{text}<br>%{y:.2f} ms",
    )  # fmt: skip
    batches = np.arange(1, calibration.config.max_num_seqs + 1)
    for j, context in enumerate((0, calibration.reference_tokens)):
        steps = [1e3 * calibration.cost.step_seconds(n, n, n * context) for n in batches]
        figure.add_scatter(
            x=batches, y=steps, mode="lines", name=f"step cost, context {context}", line={"color": COLOURS[j]}
        )
    if seen := calibration.streamed:
        rows = pd.DataFrame(calibration.rows["streamed"])
        figure.add_scatter(
            x=rows["streams"], y=1e3 * rows["step_s"], mode="markers", name="through a router",
            marker={"color": COLOURS[2], "size": 8, "symbol": "diamond-open"}, text=1e3 * rows["tpot_s"],
            hovertemplate="%{x} streams<br>%{y:.2f} ms, clients' TPOT %{text:.2f} ms",
        )  # fmt: skip
        line = 1e3 * (seen.base_s + seen.slope_s * (batches - 1))
        figure.add_scatter(x=batches, y=line, mode="lines", name="its slope", line={"color": COLOURS[2], "dash": "dot"})
    figure.update_xaxes(title="streams decoding together").update_yaxes(title="step (ms)", rangemode="tozero")
    return _titled(figure, "What one more stream costs every other one", "colour: context of a stream")


def first_tokens(calibration: Calibration) -> go.Figure:
    """Milliseconds to the first token over the prompt's length: measured, tau_pre, and the engine's steps alone."""
    frame = pd.DataFrame(calibration.rows["first_tokens"]).sort_values("prompt_tokens")
    sizes = np.unique(np.geomspace(1, frame["prompt_tokens"].max(), 60).astype(int))
    room = calibration.config.max_num_batched_tokens
    figure = go.Figure(layout={"template": TEMPLATE})
    figure.add_scatter(
        x=frame["prompt_tokens"], y=1e3 * frame["seconds"], mode="markers", name="measured",
        marker={"color": COLOURS[0], "size": 6},
    )  # fmt: skip
    line = 1e3 * (calibration.prefill_base_s + calibration.prefill_token_s * sizes)
    figure.add_scatter(x=sizes, y=line, mode="lines", name="tau_pre", line={"color": COLOURS[1]})
    steps = [1e3 * (first_token_s(calibration.cost, int(n), room) + calibration.overhead_s) for n in sizes]
    figure.add_scatter(x=sizes, y=steps, mode="lines", name="steps and overhead", line={"color": COLOURS[2]})
    figure.update_xaxes(title="prompt tokens").update_yaxes(title="first token (ms)", rangemode="tozero")
    return _titled(figure, "What a prompt costs on an idle engine", "a line is what the router's linear terms believe")


def transfers(calibration: Calibration) -> go.Figure:
    """Milliseconds of a hand-off over its KV blocks: each one measured, and the line of latency and seconds a block."""
    frame = pd.DataFrame(calibration.rows["transfers"])
    line = calibration.transfer
    figure = go.Figure(layout={"template": TEMPLATE})
    figure.add_scatter(
        x=frame["blocks"], y=1e3 * frame["seconds"], mode="markers", name="measured",
        marker={"color": COLOURS[0], "size": 6},
    )  # fmt: skip
    sizes = np.array([0, frame["blocks"].max()])
    priced_ms = 1e3 * (line.latency_s + line.per_block_s * sizes)
    figure.add_scatter(x=sizes, y=priced_ms, mode="lines", name="transfer cost", line={"color": COLOURS[1]})
    figure.update_xaxes(title="KV blocks").update_yaxes(title="hand-off (ms)", rangemode="tozero")
    return _titled(figure, "What it takes to hand a prompt over", "beyond the request's own way and its first step")


def residuals(calibration: Calibration) -> go.Figure:
    """Percent by which every window's price is off, over the new tokens of its step."""
    frame = windows(calibration)
    figure = go.Figure(layout={"template": TEMPLATE})
    for j, (mixed, name) in enumerate(((False, "decode only"), (True, "with a prompt"))):
        rows = frame[frame["mixed"] == mixed]
        figure.add_scatter(
            x=rows["new_tokens"], y=rows["residual_pct"], mode="markers", name=name,
            marker={"color": COLOURS[j], "size": 6}, hovertemplate="%{x}: %{y:+.2f} %",
        )  # fmt: skip
    figure.add_hline(0, line={"color": "#888", "width": 1})
    figure.update_xaxes(title="new tokens in the step", type="log").update_yaxes(title="priced over measured (%)")
    return _titled(figure, "How far the step cost is from what was timed", "0: exact; above: too dear")


def write_figures(calibration: Calibration, path: str | Path) -> Path:
    """All figures in one HTML file that needs no network."""
    from astrolabe_lab.record import write_whole

    figures = [decode_steps(calibration), first_tokens(calibration), residuals(calibration)]
    if calibration.rows.get("transfers"):  # files of before have none
        figures.append(transfers(calibration))
    parts = [figure.to_html(full_html=False, include_plotlyjs=j == 0) for j, figure in enumerate(figures)]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    title = f"<title>Calibration of {calibration.model}</title>"
    write_whole(Path(path), f"<!doctype html><meta charset=utf-8>{title}\n" + "\n".join(parts))
    return Path(path)


def _titled(figure: go.Figure, title: str, subtitle: str) -> go.Figure:
    return figure.update_layout(title={"text": title, "subtitle": {"text": subtitle}})
