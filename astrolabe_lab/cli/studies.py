"""``astrolabe studies``: the studies of prefill and decode pools as grids for ``astrolabe sweep``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from astrolabe_lab.cli.values import number, output_folder, whole
from astrolabe_lab.disagg.definitions import NAMES, make, write
from astrolabe_lab.errors import InputError

SUMMARY = "write the studies of prefill and decode pools as grids for `astrolabe sweep`"
EXAMPLE = "astrolabe studies --out outputs/studies && astrolabe sweep outputs/studies/bursty.yaml --out outputs/bursty"
DETAILS = (
    "A study is driven at the rates where round robin is in mid-collapse, at three decode slopes. They depend on how "
    "long the runs are, so they are searched for first, in the simulator, which takes minutes at full size. The grids "
    "run in the simulator and, all but leak and services, on emulated pools (astrolabe sweep --emulate): give those "
    "fewer --requests and --seeds, and one of the --slopes. With --cluster one rate is "
    "searched on running emulated pools, and studies of these are written; every run is kept in DIR/search, and the "
    "same command goes on where it was ended. The studies: " + ", ".join(NAMES) + "."
)
SIMULATED = {"requests": 10_000, "seeds": 10}
LIVE = {"requests": 200, "seeds": 3}
ONLY_LIVE = ("rates", "start_qps")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser the options of ``studies``."""
    add = parser.add_argument
    add("--out", required=True, metavar="DIR", help="folder for the files, NAME.yaml each")
    add("--studies", metavar="NAME,...", help="some of them (default: all; with --cluster those of one set of pools)")
    add("--requests", type=whole(1), metavar="N", help="of a run (default: 10000; with --cluster 200)")
    add("--seeds", type=whole(1), metavar="N", help="seeds 0 .. N-1 (default: 10; with --cluster 3)")
    add("--slopes", type=_slopes, metavar="S,...", help="decode slopes, s a stream (default: 5.5e-05,0.0002,0.0004)")
    add(
        "--policy",
        action="append",
        metavar="NAME[:key=value,...]",
        help="of studies that compare policies, instead of their own; may be given several times",
    )
    add("--search-seeds", type=whole(1), default=2, metavar="N", help="of the search (default: 2)")
    add("--workers", type=whole(1), metavar="N", help="runs at once in the search (one a core)")
    add("--cluster", metavar="DIR", help="folder of pools that astrolabe launch --pools started: search on these")
    add("--rates", type=whole(2), metavar="N", help="with --cluster: tried at most (default: 8)")
    add("--start-qps", type=number(above=0), metavar="QPS", help="with --cluster: the first rate (default: 8)")


def studies(args: argparse.Namespace) -> tuple[dict, str]:
    """Search the rates and write the grids; return the record and what a person reads. Raises InputError."""
    if args.cluster and args.workers:
        raise InputError("--workers is of simulated runs: pools that run take one run at a time")
    if args.cluster and args.slopes:
        raise InputError("--slopes is of simulated pools: those that run have the slope that they have")
    if args.cluster and args.policy:
        raise InputError("--policy is of studies at simulated rates: write the policies into the grid's file")
    if not args.cluster and (given := [name for name in ONLY_LIVE if getattr(args, name)]):
        raise InputError(f"--{given[0].replace('_', '-')} is of a search on running pools: give --cluster DIR too")
    names = None if args.studies is None else [name.strip() for name in args.studies.split(",") if name.strip()]
    output_folder(args.out, files=[f"{name}.yaml" for name in names or NAMES])
    requests, seeds = (
        getattr(args, name) or (LIVE if args.cluster else SIMULATED)[name] for name in ("requests", "seeds")
    )
    if args.cluster:
        grids, record, lines = _live(args, names, requests, seeds)
    else:
        grids = make(
            names or NAMES, requests, range(seeds), range(args.search_seeds), workers=args.workers,
            slopes_s=args.slopes, policies=args.policy, say=lambda line: print(line, file=sys.stderr, flush=True),
        )  # fmt: skip
        record, lines = {}, []
    paths = write(grids, args.out)
    runs = {name: len(grid) for name, grid in grids.items()}
    more = ", and A/A beside them" if args.cluster else ""
    lines += [f"{path}: {len(grid):,} runs{more}" for path, grid in zip(paths, grids.values(), strict=True)]
    return {"files": [str(path) for path in paths], "runs": runs} | record, "\n".join(lines)


def _slopes(text: str) -> list[float]:
    return [number(above=0)(word) for word in text.split(",") if word.strip()]


def _live(args, names, requests: int, seeds: int) -> tuple[dict, dict, list[str]]:
    """(the grids, the record's entry of their rate, lines for people)."""
    from astrolabe_lab.serve.pools import search

    given = {name: getattr(args, name) for name in ONLY_LIVE if getattr(args, name)}
    grids, anchor = search.make(
        names or search.NAMES, args.cluster, Path(args.out) / "search", requests, range(seeds),
        range(args.search_seeds), **given,
    )  # fmt: skip
    invalid = int((~anchor.probes["valid"]).sum())
    told = {name: getattr(anchor, name) for name in ("qps", "goodput", "low", "high")}
    around = f" [{anchor.low:.1%}, {anchor.high:.1%}]" * (args.search_seeds > 1)
    line = f"round robin keeps {anchor.goodput:.1%}{around} of its targets at {anchor.qps:.4g} requests a second, found"
    line += f" in {len(anchor.probes)} runs" + f"; in {invalid} router or load generator fell behind" * bool(invalid)
    return grids, {"anchor": told | {"runs": len(anchor.probes), "invalid": invalid}}, [line]
