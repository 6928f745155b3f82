"""Figures of runs and sweeps: each function takes a frame and returns a `go.Figure`, never shows it.

Axes carry their units; TPOT and steps are drawn in milliseconds, all else in seconds. Colours are Okabe and
Ito's, distinct to colour-blind readers, and every line also has a marker of its own.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from astrolabe_lab.errors import InputError
from astrolabe_lab.measure import LATENCIES, latencies, listed, named, over_seeds, require_columns

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "hexagon")
KINDS: Mapping[str, str] = {"prefill": "#0072B2", "decode": "#56B4E9", "recompute": "#D55E00"}
TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#222"},
        "title": {"x": 0, "xref": "paper", "font": {"size": 16}, "subtitle": {"font": {"size": 12}}},
        "height": 430,
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "colorway": COLOURS,
        "margin": {"l": 70, "r": 20, "t": 85, "b": 60},
        "legend": {"bgcolor": "rgba(255,255,255,0.8)"},
        "hoverlabel": {"namelength": -1},
        "xaxis": {"gridcolor": "#e5e5e5", "linecolor": "#888", "ticks": "outside", "zeroline": False},
        "yaxis": {"gridcolor": "#e5e5e5", "linecolor": "#888", "ticks": "outside", "zeroline": False},
    }
)
FURTHER = ("fits", "live", "traces")  # figures of other things, loaded on first use: `plots.traces.lengths(...)`
UNITS = {"throughput_rps": ("throughput (requests/s)", 1), "output_tokens_per_s": ("output (tokens/s)", 1)}


def __getattr__(name: str):
    if name in FURTHER:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def latency_vs_qps(
    summary: pd.DataFrame, metric: str = "ttft_p99_s", level: float = 0.95, log: bool = False, over: str = "qps"
) -> go.Figure:
    """One line per policy: the mean of `metric` over seeds at each QPS, with its t-interval as error bars.

    `over` names another column of numbers that varies in the place of the rate.

    `summary` has one row per run (`policy, qps, seed, n, <metric>`). A single seed has no bars. Any column
    of the summary can be drawn; those of policies lie side by side, a few pixels apart, so that the bars can
    be told apart. Hollow marks are points where a run's queues kept growing (`regime`): their numbers grow with
    the trace. `log` makes the y axis logarithmic. A click in the legend hides a policy. Raises InputError for a
    column that is not there.
    """
    require_columns(summary, ("policy", over, "seed", metric))
    label, scale = _axis(metric)
    shown = "QPS" if over == "qps" else over.removesuffix("_s").replace("_", " ") + " (s)" * over.endswith("_s")
    points = over_seeds(summary, metric, by=("policy", over), level=level)
    points[["mean", "low", "high"]] *= scale
    floor = points.loc[points["mean"] > 0, "mean"].min() / 2  # where a bar that reaches 0 leaves a log axis
    cut = "; cut where they reach 0" * bool((points["low"] < (floor if log else 0)).any())
    points["low"] = points["low"].clip(lower=floor if log else 0)
    figure = go.Figure(layout={"template": TEMPLATE})
    lines = list(points.groupby("policy", sort=False))
    spread = _spacing(points[over]) * 0.25
    grew = summary[summary["regime"] == "finite-trace"] if "regime" in summary else summary.iloc[:0]
    hollow = set(zip(grew["policy"], grew[over], strict=True))
    for index, (policy, line) in enumerate(lines):
        line = line.sort_values(over)
        colour, symbol = COLOURS[index % len(COLOURS)], SYMBOLS[index % len(SYMBOLS)]
        bars = {
            "array": line["high"] - line["mean"], "arrayminus": line["mean"] - line["low"],
            "thickness": 1, "width": 2, "color": colour,
        }  # fmt: skip
        figure.add_scatter(
            x=line[over] + spread * ((index + 0.5) / len(lines) - 0.5), y=line["mean"], name=str(policy),
            mode="lines+markers", line={"color": colour, "width": 2},
            marker={"symbol": [symbol + "-open" * ((policy, at) in hollow) for at in line[over]], "size": 7},
            error_y=bars if line["seeds"].min() > 1 else None,
            customdata=line[over], hovertemplate=f"{shown} %{{customdata}}: %{{y:.3g}}",
        )  # fmt: skip
    figure.update_xaxes(title="arrival rate (requests/s)" if over == "qps" else shown)
    figure.update_yaxes(title=label, rangemode="tozero")
    if log:
        top = points[["mean", "high"]].max().max()
        figure.update_yaxes(type="log", **_log_ticks(points[["mean", "low"]].min().min() * 0.9, top * 1.1))
    seeds, n = int(points["seeds"].min()), int(summary["n"].min()) if "n" in summary else 0
    bar = f"bars: {level:.0%} t-interval over {seeds} seeds{cut}" if seeds > 1 else "one seed, so no bars"
    growing = ", so past capacity latency grows with the trace" if _is_latency(metric) else ""
    finite = f"; {n:,} requests a run{growing}" if n else ""
    finite += "; hollow: queues kept growing" * bool(hollow)
    return _titled(figure, f"{_head(label)} against {'load' if over == 'qps' else shown}", bar + finite)


def difference_vs_qps(
    differences: pd.DataFrame, metric: str, baseline: str, order: Sequence[str] | None = None
) -> go.Figure:
    """Each policy's gap to the baseline with its interval, hollow where chance may have made it (`clear` is False).

    `differences` is what `measure.paired_difference` found; `metric` and `baseline` name what was compared.
    `order`, the policies as another figure drew them, keeps their colours.
    """
    require_columns(differences, ("policy", "qps", "mean", "low", "high", "clear"))
    label, scale = _axis(metric)
    figure = go.Figure(layout={"template": TEMPLATE})
    names = list(differences["policy"].unique())
    order = list(order or names)
    if missing := [name for name in names if name not in order]:
        raise InputError(f"order lacks {listed(missing)}; it has {listed(order)}")
    spread = _spacing(differences["qps"]) * 0.5
    for index, name in enumerate(names):
        rows = differences[differences["policy"] == name]
        shift = spread * ((index + 0.5) / len(names) - 0.5)  # side by side, or the bars hide one another
        at = order.index(name)
        colour, symbol = COLOURS[at % len(COLOURS)], SYMBOLS[at % len(SYMBOLS)]
        figure.add_scatter(
            x=rows["qps"] + shift, y=rows["mean"] * scale, name=str(name), mode="markers",
            error_y={
                "array": (rows["high"] - rows["mean"]) * scale, "arrayminus": (rows["mean"] - rows["low"]) * scale,
                "color": colour, "thickness": 1.5,
            },
            marker={"color": colour, "size": 9, "symbol": np.where(rows["clear"], symbol, f"{symbol}-open")},
            customdata=rows["qps"], hovertemplate="QPS %{customdata}: %{y:.3g}",
        )  # fmt: skip
    figure.add_hline(y=0, line={"color": "#222", "width": 1})
    figure.update_xaxes(title="arrival rate (requests/s)")
    figure.update_yaxes(title=f"{label}, minus {baseline}'s")
    note = f"bars: the interval of each alone; hollow: no winner, corrected for all {len(differences)} comparisons"
    if differences["low"].isna().any():
        note = "one seed, so no interval and no winner: all are hollow"
    return _titled(figure, f"Paired difference to {baseline}", note)


def capacities(table: pd.DataFrame) -> go.Figure:
    """Each policy's capacity with its interval, one mark per kind; hollow where some seed is censored.

    `table` is what `capacity.table` gives.
    """
    needed = ("policy", "kind", "n", "metric", "limit_s", "capacity_qps", "low_qps", "high_qps", "censored")
    require_columns(table, needed)
    figure = go.Figure(layout={"template": TEMPLATE})
    for index, (kind, rows) in enumerate(table.groupby("kind", sort=False)):
        sizes = ", ".join(f"{n:,}" for n in sorted(rows["n"].unique()))
        symbols = np.where(rows["censored"] == "", SYMBOLS[index], f"{SYMBOLS[index]}-open")
        figure.add_scatter(
            x=rows["capacity_qps"], y=rows["policy"], mode="markers", name=f"{kind}, {sizes} requests",
            marker={"size": 10, "color": COLOURS[index], "symbol": symbols},
            error_x={
                "array": rows["high_qps"] - rows["capacity_qps"], "arrayminus": rows["capacity_qps"] - rows["low_qps"],
                "color": COLOURS[index], "thickness": 1.5,
            },
        )  # fmt: skip
    figure.update_xaxes(title="requests/s")
    figure.update_yaxes(type="category", autorange="reversed")
    pairs = dict.fromkeys(zip(table["metric"], table["limit_s"], strict=True))
    limits = ", ".join(f"{named(metric)} stays within {limit:g} s" for metric, limit in pairs)
    cut = "; hollow: a bound, some seeds cross outside the rates searched" * bool((table["censored"] != "").any())
    note = f"mean over {int(table['seeds'].min())} seeds with 95% interval{cut}"
    return _titled(figure, f"Rate at which {limits}", note)


def cdf(results: pd.DataFrame, metric: str = "ttft_s", by: str = "policy", log: bool = True) -> go.Figure:
    """The share of requests at or below each latency, one line per value of `by`; ok requests only, counts
    in the legend.

    `results` is a result frame; `metric` is `ttft_s`, `tpot_s` or `e2e_s`. Raises InputError for any other.
    """
    require_columns(results, (by, "status"))
    if metric not in (allowed := ("ttft_s", "tpot_s", "e2e_s")):
        raise InputError(f"metric={metric!r} has no CDF here; allowed are {listed(allowed)}")
    label, scale = _axis(metric)
    figure = go.Figure(layout={"template": TEMPLATE})
    shares = np.unique(np.concatenate([np.linspace(0, 1, 201), 1 - np.geomspace(1e-4, 1e-2, 40)]))
    for index, (name, rows) in enumerate(results.groupby(by, sort=False)):
        values = latencies(rows)[metric].dropna()
        legend = f"{name}: {len(values):,} of {len(rows):,}"
        marks = np.quantile(values, shares, method="inverted_cdf") * scale if len(values) else []
        colour = COLOURS[index % len(COLOURS)]
        figure.add_scatter(x=marks, y=shares, name=legend, line={"color": colour, "width": 2, "shape": "hv"})
    figure.update_xaxes(title=label)
    if log and (drawn := [mark for line in figure.data for mark in line.x if mark > 0]):
        figure.update_xaxes(type="log", **_log_ticks(min(drawn), max(drawn)))
    figure.update_yaxes(title="share of requests", range=[0, 1.01], tickformat=".0%")
    return _titled(figure, f"Distribution of {label.partition(' (')[0]}", "requests that ended well")


def queue_animation(queues: pd.DataFrame) -> go.Figure:
    """A film of every instance's queue, with a slider: bars of `decoding` and `waiting` requests, a panel
    per policy.

    `queues` comes from `measure.queue_lengths` (`t_s, instance, waiting, decoding`, optionally `policy`); an
    instance without a row at a moment holds nothing then. The film is in the figure itself, so it plays in
    an exported page.
    """
    require_columns(queues, ("t_s", "instance", "waiting", "decoding"))
    queues = queues if "policy" in queues else queues.assign(policy="")
    policies, times = list(queues["policy"].unique()), np.sort(queues["t_s"].unique())
    instances = np.sort(queues["instance"].unique())
    shown = {"decoding": COLOURS[5], "waiting": COLOURS[1]}
    table = queues.pivot_table(index="t_s", columns=["policy", "instance"], values=list(shown), fill_value=0)
    bars = [(kind, policy) for policy in policies for kind in shown]
    heights = {bar: table[bar[0]][bar[1]].reindex(columns=instances, fill_value=0).to_numpy(int) for bar in bars}
    start = len(times) // 2  # a film that opens on an empty stage looks broken
    figure = make_subplots(cols=len(policies), shared_yaxes=True, subplot_titles=policies)
    for kind, policy in bars:
        figure.add_bar(
            x=[str(i) for i in instances], y=heights[kind, policy][start].tolist(), name=LEGEND[kind],
            marker={"color": shown[kind]}, legendgroup=kind, showlegend=policy == policies[0],
            row=1, col=policies.index(policy) + 1,
        )  # fmt: skip
    figure.frames = [
        go.Frame(name=str(i), data=[{"type": "bar", "y": heights[bar][i].tolist()} for bar in bars])
        for i in range(len(times))
    ]
    tallest = max(sum(heights[kind, policy] for kind in shown).max() for policy in policies)
    figure.update_yaxes(range=[0, tallest * 1.05])
    figure.update_yaxes(title="requests", col=1)
    figure.update_xaxes(title="instance", type="category")
    figure.update_layout(template=TEMPLATE, barmode="stack", height=520, margin={"t": 110, "b": 40})
    figure.update_layout(legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.1, "yanchor": "bottom"})
    figure.update_layout(sliders=[_slider(times) | {"active": start}], updatemenus=[PLAYER])
    return _titled(figure, "Where the requests are", "drag the slider, or press play")


def schedule_chart(steps: pd.DataFrame, budget_tokens: int | None = None) -> go.Figure:
    """What an engine did step by step: each request's share of every step over time, and the tokens each
    step computed.

    `steps` comes from `measure.step_kinds` (`step, start_s, end_s, rid, tokens, kind`); crosses mark
    preemptions, from its `attrs`. `budget_tokens` draws the engine's limit per step. More than 4,000 rows
    are an InputError: cut the log.
    """
    require_columns(steps, ("step", "start_s", "end_s", "rid", "tokens", "kind"))
    if not 0 < len(steps) <= 4000:
        raise InputError(
            f"a chart of {len(steps):,} scheduled requests is not readable: cut the log to 1 .. 4,000 rows"
        )
    figure = make_subplots(rows=2, shared_xaxes=True, row_heights=[0.68, 0.32], vertical_spacing=0.06)
    for kind, colour in KINDS.items():
        rows = steps[steps["kind"] == kind]
        if rows.empty:
            continue
        length_ms = (rows["end_s"] - rows["start_s"]) * 1e3
        figure.add_bar(
            base=rows["start_s"] * 1e3, x=length_ms, y=rows["rid"].astype(str), orientation="h", row=1, col=1,
            name=kind, legendgroup=kind, marker={"color": colour, "line": {"color": "white", "width": 0.5}},
            text=rows["tokens"].where(rows["tokens"] > 1, ""), textposition="inside", textangle=0,
            insidetextanchor="middle", customdata=rows[["step", "tokens"]],
            hovertemplate="request %{y}, step %{customdata[0]}: %{customdata[1]} tokens",
        )  # fmt: skip
        sums = rows.groupby(["step", "start_s", "end_s"], as_index=False)["tokens"].sum()
        figure.add_bar(
            x=sums["start_s"] * 1e3, width=(sums["end_s"] - sums["start_s"]) * 1e3, offset=0,
            y=sums["tokens"], marker={"color": colour}, name=kind, legendgroup=kind, showlegend=False, row=2, col=1,
        )  # fmt: skip
    lost = steps.attrs.get("preemptions")
    if lost is not None and len(lost := lost.merge(steps[["step", "start_s"]].drop_duplicates(), on="step")):
        figure.add_scatter(
            x=lost["start_s"] * 1e3, y=lost["rid"].astype(str), mode="markers", name="preempted",
            marker={"symbol": "x", "size": 11, "color": "#000000"}, row=1, col=1,
        )  # fmt: skip
    if budget_tokens is not None:
        tallest = max(budget_tokens, steps.groupby("step")["tokens"].sum().max())
        figure.add_hline(y=budget_tokens, line={"dash": "dash", "color": "#222"}, row=2, col=1)
        figure.update_yaxes(range=[0, tallest * 1.1], row=2)
    order = [str(rid) for rid in sorted(steps["rid"].unique(), reverse=True)]
    figure.update_yaxes(title="request", type="category", categoryorder="array", categoryarray=order, row=1)
    figure.update_yaxes(title="tokens in the step", row=2)
    figure.update_xaxes(title="time (ms)", row=2)
    figure.update_layout(template=TEMPLATE, barmode="stack", bargap=0.15, height=560)
    figure.update_layout(legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"})
    note = "a box is one request's share of one step, its number the tokens computed"
    return _titled(figure, "The schedule", note)


LEGEND = {"decoding": "first token out, decoding", "waiting": "no first token yet"}
PLAYER = {
    "type": "buttons", "direction": "left", "showactive": False,
    "x": 0, "xanchor": "left", "y": -0.3, "yanchor": "middle", "pad": {"t": 30},
    "buttons": [
        {"label": "play", "method": "animate",
         "args": [None, {"frame": {"duration": 60}, "fromcurrent": True}]},
        {"label": "pause", "method": "animate", "args": [[None], {"mode": "immediate"}]},
    ],
}  # fmt: skip


def _slider(times: np.ndarray) -> dict:
    jump = {"mode": "immediate", "frame": {"duration": 0}}
    steps = [
        {"method": "animate", "label": f"{t:.3g}", "args": [[str(i)], jump]} for i, t in enumerate(times - times[0])
    ]
    return {
        "steps": steps,
        "currentvalue": {"prefix": "time: ", "suffix": " s"},
        "pad": {"t": 65},
        "x": 0.16,
        "len": 0.84,
    }


def _spacing(rates: pd.Series) -> float:
    """The smallest gap between two of the `rates`; 1 for a single one."""
    gaps = np.diff(np.sort(rates.unique()))
    return float(gaps.min()) if len(gaps) else 1.0


def _log_ticks(low: float, high: float) -> dict:
    """Range and ticks of a logarithmic axis, every tick labelled in full.

    Ticks are round numbers, the coarsest kind of which four lie in the range: powers of ten, then 1, 2 and 5
    times them, then finer; a range too narrow for that has a linear axis's ticks.
    """
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    for digits in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
        ticks = [float(f"{digit}e{power}") for power in powers for digit in digits]
        if sum(low <= tick <= high for tick in ticks) >= 4:
            break
    else:
        step = 10 ** np.floor(np.log10((high - low) / 2))
        step = next(step * m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= 6)
        ticks = [float(f"{n * step:.12g}") for n in range(int(np.ceil(low / step)), int(high / step) + 1)]
    return {"range": [np.log10(low), np.log10(high)], "tickvals": ticks, "ticktext": [f"{t:g}" for t in ticks]}


def _axis(metric: str) -> tuple[str, float]:
    """The axis label of a column such as `ttft_p99_s`, and the factor that turns its values into the label's
    unit."""
    if metric in UNITS:
        return UNITS[metric]
    name = next((one for one in ("e2e_per_token", "ttft", "tpot", "e2e", "itl") if metric.startswith(f"{one}_")), "")
    if not name or not metric.endswith("_s"):
        return metric.replace("_", " "), 1
    rest = metric.removesuffix("_s").removeprefix(name).strip("_")
    of = ", misses counted" * rest.endswith("_all") + ", worst third" * rest.endswith("_third")
    rest = rest.removesuffix("_all").removesuffix("_third")
    prefix = {"": "", "mean": "mean "}.get(rest, rest.upper() + " ")
    shown = "E2E per token" if name == "e2e_per_token" else name.upper()
    short = name in ("tpot", "itl", "e2e_per_token")
    return f"{prefix}{shown}{of} ({'ms' if short else 's'})", 1e3 if short else 1


def _is_latency(metric: str) -> bool:
    return metric.partition("_")[0] in LATENCIES


def _head(label: str) -> str:
    """The label without its unit, as a title begins."""
    name = label.partition(" (")[0]
    return name[0].upper() + name[1:]


def _titled(figure: go.Figure, title: str, note: str) -> go.Figure:
    return figure.update_layout(title={"text": title, "subtitle": {"text": note}})
