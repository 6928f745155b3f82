"""``astrolabe trace``: make a trace of a generator or another file, and say what a trace is like."""

from __future__ import annotations

import argparse
from pathlib import Path

from astrolabe_lab.cli.requests import add_arrivals, add_loading, load_requests
from astrolabe_lab.cli.values import output_file, whole
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import SPECS

SUMMARY = "make traces, convert them, and say what they are like"
EXAMPLE = (
    "astrolabe trace make family:mixed --requests 10000 --qps 9 --out mixed.csv\n  astrolabe trace describe mixed.csv"
)
DETAILS = f"SPEC is a trace file of any format, or a generator: {SPECS}."
_EXAMPLES = {
    "make": "astrolabe trace make BurstGPT_1.csv --filter model=GPT-4 --sample resample --requests 5000 --qps 4 "
    "--out gpt4.parquet",
    "describe": "astrolabe trace describe servegen:deepseek-r1,start_s=64800,duration_s=3600",
}
_MAKE = "write a trace: drawn by a generator, or read from a file of any format, chosen, resampled and timed anew"
_DESCRIBE = "rates, burstiness, lengths, families and shared prefixes of a trace"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser the commands ``make`` and ``describe``."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary, command in (("make", _MAKE, make), ("describe", _DESCRIBE, describe)):
        usage = f"astrolabe trace {name} SPEC" + " --out FILE" * (name == "make") + " [option ...]"
        sub = commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}. {DETAILS}", usage=usage,
            epilog=f"example:\n  {_EXAMPLES[name]}", formatter_class=parser.formatter_class, allow_abbrev=False,
        )  # fmt: skip
        sub.set_defaults(command=command)
        sub.add_argument("trace", metavar="SPEC", help="a trace file or a generator")
        add_loading(sub.add_argument_group("what is read or drawn").add_argument)
        add_arrivals(sub.add_argument_group("when it arrives").add_argument)
        if name == "make":
            _add_making(sub.add_argument_group("what is written").add_argument)
        sub.add_argument("--seed", type=whole(0), default=0, metavar="S", help="of every random stream (0)")
        sub.add_argument("--json", action="store_true", help="print exactly one JSON object on stdout")
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _add_making(add) -> None:
    add("--out", required=True, metavar="FILE", help="the trace: .csv or .parquet, with or without .gz")
    add("--sample", choices=("permute", "resample"), help="--requests of the trace in random order, each at most once, "
        "or drawn with replacement")  # fmt: skip
    add("--lengths", metavar="SPEC", help="predicted lengths to write: oracle, constant:N, noisy:REL, tagger:DIR")
    add("--no-text", dest="text", action="store_false", help="leave out the prompts")


def make(args: argparse.Namespace) -> tuple[dict, str]:
    """Write the trace; return the record and what a person reads. Raises InputError."""
    from astrolabe_lab import length, trace
    from astrolabe_lab.trace.summary import describe as numbers_of
    from astrolabe_lab.trace.summary import text as shown

    out = output_file(args.out, "--out", (".csv", ".csv.gz", ".parquet", ".parquet.gz"))
    if out.exists() and Path(args.trace).exists() and out.samefile(args.trace):
        raise InputError(f"--out {out} is the trace itself, which would be replaced; give another name")
    frame = load_requests(args, args.text, args.sample, times=False)
    if args.lengths:
        frame = length.attach(frame, args.lengths, seed=args.seed)
    if not args.text:
        frame = frame.drop(columns="prompt", errors="ignore")
    trace.save(frame, out)
    numbers = numbers_of(frame)
    asked = {name: getattr(args, name) for name in "trace requests sample qps arrivals alpha lengths seed".split()}
    record = {"out": str(out), "rows": len(frame), **asked, "summary": numbers}
    return record, f"{shown(numbers)}\nwrote {out} ({len(frame):,} rows)"


def describe(args: argparse.Namespace) -> tuple[dict, str]:
    """Return what the trace is like, as a record and for a person to read. Raises InputError."""
    from astrolabe_lab.trace.summary import describe as numbers_of
    from astrolabe_lab.trace.summary import text as shown

    frame = load_requests(args, text=False, times=False)
    numbers = numbers_of(frame)
    about = {name: frame.attrs[name] for name in ("format", "rows_read", "bad_rows", "filtered") if name in frame.attrs}
    return {"trace": str(args.trace), **about, **numbers}, f"{args.trace}\n{shown(numbers)}"
