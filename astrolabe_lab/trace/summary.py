"""What a trace is like: its rate, burstiness, lengths and shared prefixes, in numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

WINDOWS_S = (1.0, 10.0, 60.0)


def describe(frame: pd.DataFrame) -> dict[str, object]:
    """Return the numbers of a trace, as JSON takes them; parts that it lacks are None.

    ``requests``; ``arrivals``: ``span_s, rate_rps`` ((n - 1) / span), ``gap_cv`` (standard deviation over mean of
    the gaps; 1 is Poisson), ``simultaneous`` (share of requests that arrive at the very time of the one before), and
    for windows of 1, 10 and 60 s ``peak_rps`` and ``dispersion`` (variance over mean of the counts; 1 is Poisson;
    None with fewer than ten windows);
    ``prompt_tokens, output_tokens, total_tokens``: ``mean, p50, p90, p99, max``; ``correlation`` of the two (of
    ranks); ``families`` and ``slo``: the share of each; ``clients``: how many; ``prefix``: ``block_tokens``,
    ``distinct_blocks`` and ``reusable``, the share of prompt tokens in blocks that an earlier prompt began with as
    well: what a cache that forgets nothing would save at most. Raises InputError for a frame that is no trace.
    """
    from astrolabe_lab.trace import check

    frame = check(frame, times="arrived_s" in frame)
    prompt, output = frame["prompt_tokens"], frame["output_tokens"]
    ranks = frame[["prompt_tokens", "output_tokens"]].rank()
    constant = prompt.nunique() == 1 or output.nunique() == 1
    return {
        "requests": len(frame),
        "arrivals": _arrivals(frame["arrived_s"].to_numpy()) if "arrived_s" in frame else None,
        "prompt_tokens": _sizes(prompt),
        "output_tokens": _sizes(output),
        "total_tokens": _sizes(prompt + output),
        "correlation": None if constant else float(ranks.corr().iloc[0, 1]),
        "families": _shares(frame, "family"),
        "slo": _shares(frame, "slo"),
        "clients": int(frame["client"].nunique()) if "client" in frame else None,
        "prefix": _prefix(frame) if "prefix_blocks" in frame else None,
    }


def rate_windows(frame: pd.DataFrame, window_s: float) -> pd.DataFrame:
    """Return one row a window from the first arrival on: ``t_s`` (its middle), ``requests``, ``rate_rps`` and
    ``gap_cv`` (of the gaps that begin in it, NaN below ten).

    The last window, unless the trace ends with it, is left out, as it holds too few. Raises InputError for a trace
    without times, or a window that is not > 0 and at most the span.
    """
    import numpy as np
    import pandas as pd

    if "arrived_s" not in frame:
        raise InputError("the trace has no arrived_s, so no rate: arrivals.with_arrivals adds times")
    times = frame["arrived_s"].to_numpy()
    span_s = times[-1] - times[0]
    if not 0 < window_s <= span_s:
        raise InputError(f"window_s={window_s!r} is not usable: > 0 and at most the trace's span, {span_s:g} s")
    windows = int(span_s / window_s)
    which = np.minimum(((times - times[0]) / window_s).astype(np.int64), windows)
    counts = np.bincount(which, minlength=windows + 1)[:windows]
    gaps, at = np.diff(times), which[:-1]
    some = np.bincount(at, minlength=windows + 1)[:windows]
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.bincount(at, gaps, minlength=windows + 1)[:windows] / some
        square = np.bincount(at, gaps**2, minlength=windows + 1)[:windows] / some
        cv = np.sqrt(np.maximum(square - mean**2, 0)) / mean
    return pd.DataFrame(
        {
            "t_s": times[0] + (np.arange(windows) + 0.5) * window_s,
            "requests": counts,
            "rate_rps": counts / window_s,
            "gap_cv": np.where(some >= 10, cv, np.nan),
        }
    )


def text(numbers: dict) -> str:
    """The numbers of ``describe`` for a person to read."""
    lines = [f"requests    {numbers['requests']:,}"]
    if found := numbers["arrivals"]:
        lines.append(f"arrivals    {_shown(found['rate_rps'])} requests/s over {found['span_s']:,.1f} s")
        tied = f"; {found['simultaneous']:.1%} arrive with the one before" if found["simultaneous"] else ""
        lines.append(f"gaps        coefficient of variation {_shown(found['gap_cv'])} (Poisson: 1){tied}")
        for window in found["windows"]:
            lines.append(
                f"{window['window_s']:>4g} s      peak {_shown(window['peak_rps'])} requests/s, "
                f"dispersion of counts {_shown(window['dispersion'])} (Poisson: 1)"
            )
    else:
        lines.append("arrivals    none: give a rate where the trace is used")
    lines.append(f"{'':12}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}")
    for name in ("prompt", "output", "total"):
        cells = "".join(f"{value:>10,.0f}" for value in numbers[f"{name}_tokens"].values())
        lines.append(f"{name + ' tokens':13}{cells[1:]}")
    lines.append(f"rank correlation of prompt and output tokens: {_shown(numbers['correlation'])}")
    for name, title in (("families", "families"), ("slo", "slo")):
        if shares := numbers[name]:
            listed = ", ".join(f"{key} {share:.1%}" for key, share in list(shares.items())[:8])
            lines.append(f"{title:12}{listed}{', ...' if len(shares) > 8 else ''}")
    if numbers["clients"] is not None:
        lines.append(f"clients     {numbers['clients']:,}")
    if found := numbers["prefix"]:
        size = "of unknown size" if found["block_tokens"] is None else f"of {found['block_tokens']} tokens"
        lines.append(f"prefixes    {found['distinct_blocks']:,} distinct blocks {size}")
        if found["reusable"] is not None:
            lines.append(f"            {found['reusable']:.1%} of prompt tokens were in an earlier prompt's prefix too")
    return "\n".join(lines)


def _arrivals(times: np.ndarray) -> dict[str, object]:
    import numpy as np

    gaps, span_s = np.diff(times), float(times[-1] - times[0])
    moves = len(gaps) > 0 and span_s > 0
    windows = []
    for window_s in WINDOWS_S:
        few = span_s / window_s < 1e8  # else the counts fit no memory
        counts = np.bincount(((times - times[0]) / window_s).astype(np.int64)) if few else np.zeros(0)
        whole = counts[: int(span_s / window_s)]
        dispersion = float(whole.var() / whole.mean()) if len(whole) >= 10 else None
        peak = float(counts.max() / window_s) if len(counts) else None
        windows.append({"window_s": window_s, "peak_rps": peak, "dispersion": dispersion})
    return {
        "first_s": float(times[0]),
        "span_s": span_s,
        "rate_rps": len(gaps) / span_s if moves else None,
        "gap_cv": float(gaps.std() / gaps.mean()) if moves else None,
        "simultaneous": float((gaps == 0).mean()) if len(gaps) else 0.0,
        "windows": windows,
    }


def _sizes(tokens: pd.Series) -> dict[str, float]:
    p50, p90, p99 = tokens.quantile([0.5, 0.9, 0.99]).tolist()
    return {"mean": float(tokens.mean()), "p50": p50, "p90": p90, "p99": p99, "max": int(tokens.max())}


def _shares(frame, name: str) -> dict[str, float] | None:
    return frame[name].value_counts(normalize=True).to_dict() if name in frame else None


def _prefix(frame) -> dict[str, object]:
    from astrolabe_lab.trace import prefix_block_tokens

    size, seen, reused = prefix_block_tokens(frame), set(), 0
    for blocks, prompt_tokens in zip(frame["prefix_blocks"], frame["prompt_tokens"].tolist(), strict=True):
        known = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        reused += min(known * (size or 0), prompt_tokens)
        seen.update(blocks)
    share = reused / int(frame["prompt_tokens"].sum()) if size else None
    return {"block_tokens": size, "distinct_blocks": len(seen), "reusable": share}


def _shown(value) -> str:
    return "-" if value is None else f"{value:.4g}"
