"""Figures of pools: goodput of policies with its interval over seeds, and tails over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from astrolabe_lab.disagg.compare import EMULATED, SIMULATED, SLOPE_S, slope

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


def goodput(table: pd.DataFrame, x: str, label: str, facet: str | None = None, color: str = "policy") -> go.Figure:
    """Mean goodput in % over ``x``, a line a policy with its 95 % interval; ``table`` as ``compare.means`` makes it.

    ``facet``: a column whose values get a panel each. ``label``: what the x axis says, with its unit in brackets.
    """
    import plotly.express as px

    shown = table.assign(**{name: 100 * table[name] for name in ("mean", "low", "high")})
    shown["above"], shown["below"] = shown["high"] - shown["mean"], shown["mean"] - shown["low"]
    if shown[x].dtype == object:
        shown[x] = shown[x].astype(str)
    figure = px.line(
        shown, x=x, y="mean", color=color, error_y="above", error_y_minus="below", facet_col=facet, markers=True,
        labels={"mean": "goodput (% of requests sent)", x: label, color: ""},
    )  # fmt: skip
    if shown[x].dtype == object:
        figure.update_xaxes(type="category")
    figure.update_layout(legend_orientation="h", legend_y=-0.25)
    title = f"Goodput against {label.partition(' (')[0]}"
    return _titled(figure, title, "means over seeds, with their 95 % intervals", facet)


def differences(table: pd.DataFrame, baseline: str, facet: str | None = None) -> go.Figure:
    """Points of goodput above ``baseline``, a bar a policy with its interval; ``table``: of ``compare.gains``."""
    import plotly.express as px

    shown = table.assign(above=table["high"] - table["mean"], below=table["mean"] - table["low"])
    figure = px.bar(
        shown, x="mean", y="policy", error_x="above", error_x_minus="below", facet_col=facet, orientation="h",
        labels={"mean": "points of goodput", "policy": ""},
    )  # fmt: skip
    note = "paired over seeds; all intervals hold together, at 95 %"
    return _titled(figure, f"Goodput above {baseline}", note, facet)


def tails(table: pd.DataFrame, facet: str | None = None) -> go.Figure:
    """Rolling TTFT tails in ms over time, a line a policy; ``table`` as ``compare.rolling_tail`` makes it, or the means
    of several."""
    import plotly.express as px

    shown = table.assign(ms=1e3 * table["ttft_s"])
    labels = {"ms": "P95 TTFT (ms)", "at_s": "arrival (s)", "policy": ""}
    figure = px.line(shown, x="at_s", y="ms", color="policy", facet_col=facet, labels=labels)
    figure.update_layout(legend_orientation="h", legend_y=-0.25)
    return _titled(figure, "P95 TTFT against time", "of the requests that arrived in each window", facet)


def two_worlds(tables: dict[str, pd.DataFrame]) -> go.Figure:
    """Goodput in % on live engines over that of the simulator, a point a setting; ``tables``: by study, as
    ``compare.beside`` makes them; without points where all are empty."""
    import pandas as pd
    import plotly.express as px

    parts = []
    for study, table in tables.items():
        points = (100 * table).dropna().reset_index()
        setting = [name for name in table.index.names if name != "policy"]
        text = points[setting].astype(str).agg(", ".join, axis=1) if setting and len(points) else ""
        parts.append(points.assign(study=study, setting=text))
    shown = pd.concat(parts, ignore_index=True)
    sources = [name for table in tables.values() if len(table) for name in table.columns]
    live = next((name for name in sources if name != SIMULATED), EMULATED)
    labels = {SIMULATED: "simulated goodput (% of requests sent)", live: f"{live} goodput (%)", "policy": ""}
    figure = px.scatter(
        shown, x=SIMULATED, y=live, color="policy", symbol="study", hover_data=["setting"], labels=labels
    )
    figure.update_layout(height=480)
    if shown.empty:
        return _titled(figure, "Goodput in two worlds", "no setting has runs that count in both")
    low, high = shown[[SIMULATED, live]].min(axis=None), shown[[SIMULATED, live]].max(axis=None)
    figure.add_shape(type="line", x0=low, y0=low, x1=high, y1=high, line={"dash": "dot", "color": "grey"})
    note = "a point a setting; where both agree it is on the dotted line"
    return _titled(figure, "Goodput in two worlds", note)


def residuals(table: pd.DataFrame, by: str = "service") -> go.Figure:
    """Simulated minus measured goodput in points, cell by cell; ``table`` as ``published.residuals`` makes it."""
    import plotly.express as px

    shown = table.assign(cell=table["family"] + " · " + table["policy"], points=100 * table["residual"])
    labels = {"points": "simulated minus measured (points of goodput)", "cell": ""}
    figure = px.bar(shown, x="points", y="cell", color=by, barmode="group", orientation="h", labels=labels)
    return _titled(figure.update_layout(height=480), "How far simulated goodput is from measured", "0: they agree")


def _titled(figure: go.Figure, title: str, note: str, facet: str | None = None) -> go.Figure:
    """``figure`` with its title; panels of decode slopes say them in words."""
    if facet == SLOPE_S:
        figure.for_each_annotation(lambda panel: panel.update(text=slope(float(panel.text.partition("=")[2]))))
    head = {"text": title, "subtitle": {"text": note}}
    return figure.update_layout(template="plotly_white", title=head, margin_t=100)
