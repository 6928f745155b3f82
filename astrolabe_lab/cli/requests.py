"""The options that say which requests arrive and when, for every command that takes a trace."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from astrolabe_lab.cli.values import choice_of_rows, number, whole
from astrolabe_lab.errors import InputError

if TYPE_CHECKING:
    import pandas as pd


def add_loading(add) -> None:
    """Add the options that say which requests a trace file or a generator gives; ``add`` is ``add_argument``."""
    add("--requests", "--limit", dest="requests", type=whole(1), metavar="N", help="how many: drawn, or the first")
    add("--format", help="csv, parquet, azure, burstgpt, vidur, mooncake, bailian, sharegpt or lmsys "
        "(default: the content tells)")  # fmt: skip
    add("--on-bad", choices=("error", "drop"), help="bad rows: refuse them (the default), or drop them")
    add("--unsorted", choices=("error", "sort"), help="times that go back: refuse (the default) or sort")
    add(
        "--filter",
        action="append",
        default=[],
        type=choice_of_rows,
        metavar="key=value",
        help="rows to keep: min_prompt_tokens, min_output_tokens, max_prompt_tokens, max_total_tokens, or the model, "
        "log_type, language or type that the file names; may be repeated",
    )


def add_arrivals(add) -> None:
    """Add the options that say when requests arrive."""
    add("--qps", type=number(above=0), help="requests a second (default: the trace's own times)")
    add(
        "--arrivals",
        metavar="SPEC",
        help="with --qps: poisson (the default; bursts for family:mixed), gamma, constant, "
        "bursts[:high=1.7,high_s=1,low_s=3], ramp[:start=0.5], diurnal[:amplitude=0.5,...], or trace, which "
        "stretches the trace's own times to the rate",
    )
    add("--alpha", type=number(above=0), help="shape of gamma gaps; below 1 is burstier than Poisson")


def load_requests(
    args: argparse.Namespace, text: bool = True, sample: str | None = None, times: bool = True
) -> pd.DataFrame:
    """Return the requests that the options ask for; say on stderr what was left out.

    ``text``: whether a generator writes prompts. ``sample``: ``permute`` or ``resample`` a file's requests. ``times``:
    whether they must have times. ``args.arrivals`` becomes the process that was used. Raises InputError.
    """
    from astrolabe_lab import generators, trace
    from astrolabe_lab.arrivals import parse, with_arrivals

    unasked = args.arrivals is None
    kind = args.arrivals or ("trace" if args.qps is None else generators.arrivals_of(args.trace))
    if args.qps is None and kind != "trace":
        raise InputError(f"--arrivals {kind} needs a rate: give --qps")
    if args.alpha is not None and kind in ("poisson", "constant", "trace"):
        raise InputError("--alpha is the shape of gamma gaps: give --arrivals gamma with it")
    if args.alpha is None and kind == "gamma":
        raise InputError("--arrivals gamma needs its shape: give --alpha (1 is Poisson, below 1 is burstier)")
    parse(kind, args.alpha)
    args.arrivals = kind
    loading = {name: getattr(args, name) for name in ("format", "on_bad", "unsorted") if getattr(args, name)}
    for key, value in args.filter:
        if key not in (*trace.FILTERS, *trace.CHOICES) or key in loading:
            known = ", ".join((*trace.FILTERS, *trace.CHOICES))
            raise InputError(f"--filter {key}={value} is unknown or given twice: allowed, each once, are {known}")
        loading[key] = value
    first = args.requests if generators.is_generator(args.trace) or not sample else None
    frame = generators.requests(args.trace, first, args.seed, text, **loading)
    _say_what_is_missing(args.trace, frame)
    if first is not None and len(frame) < first:
        _log(f"{args.trace} has {len(frame):,} requests, fewer than the {first:,} asked for")
    if sample:
        frame = trace.sample(frame, args.requests, args.seed, replace=sample == "resample")
    if kind == "trace" and "arrived_s" not in frame and (times or args.qps is not None):
        what = "--qps" if args.qps is None else "another process than --arrivals trace"
        raise InputError(f"{args.trace} has no arrival times: give {what}")
    if kind == "trace" and args.qps is None:
        return frame
    if unasked and "arrived_s" in frame:
        _log(f"{args.trace} has times, and --qps draws others ({kind}): --arrivals trace keeps their pattern")
    return with_arrivals(frame, args.qps, kind, seed=args.seed, alpha=args.alpha)


def _say_what_is_missing(name: str, frame) -> None:
    for key, what in (("bad_rows", "bad rows left out"), ("out_of_order_rows", "rows out of order, sorted")):
        if count := frame.attrs.get(key):
            _log(f"{name}: {count:,} {what if count > 1 else what.replace('rows', 'row', 1)}")
    for key, count in frame.attrs.get("filtered", {}).items():
        if count and key == "failed":
            _log(f"{name}: {count:,} failed requests (0 response tokens) left out")
        elif count:
            _log(f"{name}: {count:,} rows left out by {key}")


def _log(line: str) -> None:
    print(f"astrolabe: {line}", file=sys.stderr, flush=True)
