"""``astrolabe studies``: the studies of prefill and decode pools as grids for ``astrolabe sweep``."""

from __future__ import annotations

import argparse
import sys

from astrolabe_lab.cli.values import whole
from astrolabe_lab.disagg.definitions import NAMES, make, write

SUMMARY = "write the studies of prefill and decode pools as grids for `astrolabe sweep`"
EXAMPLE = "astrolabe studies --out outputs/studies && astrolabe sweep outputs/studies/bursty.yaml --out outputs/bursty"
DETAILS = (
    "A study is driven at the rates where round robin is in mid-collapse, at three decode slopes. They depend on how "
    "long the runs are, so they are searched for first, which takes minutes at full size. The studies: "
    + ", ".join(NAMES)
    + "."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser the options of ``studies``."""
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the files, NAME.yaml each")
    parser.add_argument("--studies", default=",".join(NAMES), metavar="NAME,...", help="some of them (default: all)")
    parser.add_argument("--requests", type=whole(1), default=10_000, metavar="N", help="of a run (default: 10000)")
    parser.add_argument("--seeds", type=whole(1), default=10, metavar="N", help="seeds 0 .. N-1 (default: 10)")
    parser.add_argument("--search-seeds", type=whole(1), default=2, metavar="N", help="of the search (default: 2)")
    parser.add_argument("--workers", type=whole(1), metavar="N", help="runs at once in the search (one a core)")


def studies(args: argparse.Namespace) -> tuple[dict, str]:
    """Search the rates and write the grids; return the record and what a person reads. Raises InputError."""
    names = [name.strip() for name in args.studies.split(",") if name.strip()]
    grids = make(
        names, args.requests, range(args.seeds), range(args.search_seeds), workers=args.workers,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )  # fmt: skip
    paths = write(grids, args.out)
    runs = {name: len(grid) for name, grid in grids.items()}
    lines = [f"{path}: {len(grid):,} runs" for path, grid in zip(paths, grids.values(), strict=True)]
    return {"files": [str(path) for path in paths], "runs": runs}, "\n".join(lines)
