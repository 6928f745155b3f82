"""``astrolabe sweep``: a grid of runs, simulated or on running pools, kept as they end."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.cli.values import number, output_folder
from astrolabe_lab.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

SUMMARY = "make a grid of runs: simulated, on all cores or a Ray cluster, or on live pools"
EXAMPLE = "astrolabe sweep GRID.yaml --out outputs/grid"
DETAILS = (
    "GRID.yaml has the sections defaults (the same for every run), grid (lists: every combination), zip (lists walked "
    "in step), cells (settings run by run) and exclude; --keys lists what can be set. Each run is kept as it ends: "
    "the same command goes on where it was ended, and makes only what is new of a grid that has grown. A grid of "
    "prefill and decode pools runs on live ones too, one run after the other: with --cluster on pools that run, which "
    "must be the grid's, with --emulate on vLLM engines that are started as the runs need them (make vllm) and sleep "
    "the modelled steps. First come gates (every pair of engines warm, exact and alike); the first policy runs twice, "
    "for A/A."
)
EXAMPLE_GRID = """
defaults: {trace: sharegpt_like, requests: 2000, lengths: "noisy:0.25"}
grid:
  policy: [least_loaded, "astrolabe:k=2"]
  qps: {from: 20, to: 32, step: 2}
  seed: [0, 1, 2]
"""

SHOWN = 40  # rows of the table
MEASURED = ("ttft_p99_s", "e2e_mean_s", "throughput_rps", "goodput_share", "preemptions")
SIMULATED = {"on": "local", "workers": None, "keep": "summary", "mix": False, "retries": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser the options of ``sweep``."""
    parser.usage = "%(prog)s GRID.yaml --out DIR [option ...]"
    parser.epilog += "\nwith, for example, this GRID.yaml:" + EXAMPLE_GRID.replace("\n", "\n  ").rstrip()
    parser.add_argument("grid", metavar="GRID.yaml", nargs="?", help="the grid")
    parser.add_argument("--out", metavar="DIR", help="folder that keeps the runs, summary.parquet and run.json")
    parser.add_argument(
        "--cluster", metavar="DIR", help="folder of pools that astrolabe launch --pools started: run the grid on these"
    )
    parser.add_argument(
        "--emulate",
        type=number(above=0),
        metavar="SCALE",
        help="run the grid on emulated pools of its own, with so many wall s per modelled s",
    )
    parser.add_argument(
        "--redo-invalid",
        action="store_true",
        help="make live runs again that were kept and do not count (column valid)",
    )
    parser.add_argument(
        "--on", default="local", metavar="WHERE", help="local (the default), ray, or a cluster's ray://HOST:PORT"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="runs at once (default: one a core)")
    parser.add_argument(
        "--keep", choices=("summary", "requests"), default="summary", help="requests: also each run's result frame"
    )
    parser.add_argument(
        "--mix", action="store_true", help="take runs of other code as they are; the column code tells them apart"
    )
    parser.add_argument(
        "--retries", type=int, default=2, metavar="N", help="tries more for a run whose process dies (default: 2)"
    )
    parser.add_argument("--dry-run", action="store_true", help="only check the grid, count its runs, estimate the time")
    parser.add_argument("--keys", action="store_true", help="only list what a grid can set")


def sweep(args: argparse.Namespace) -> tuple[dict, str]:
    """Make the runs; return the record and what a person reads. Raises InputError, CrewError, StoreError, GateError."""
    from astrolabe_lab import sweep

    if args.keys:
        from astrolabe_lab.sweep import keys

        dotted = (f"{group}.{key}" for group in keys.GROUPS for key in keys.members(group))
        return {"keys": [*keys.PLAIN, *keys.others(), *dotted]}, keys.described()
    if args.grid is None:
        raise InputError("the grid is missing: astrolabe sweep GRID.yaml --out DIR (see astrolabe sweep --help)")
    live = args.cluster or args.emulate
    if args.cluster and args.emulate:
        raise InputError("--cluster and --emulate: runs are made on pools that run, or on emulated ones of their own")
    if live and (given := [name for name, value in SIMULATED.items() if getattr(args, name) != value]):
        raise InputError(
            f"--{given[0].replace('_', '-')} is of simulated runs: on live pools they are made one by one, and all is "
            "kept"
        )
    if args.redo_invalid and not live:
        raise InputError("--redo-invalid is of runs on live pools: give --cluster or --emulate too")
    if args.dry_run and live:
        return _live_estimate(args)
    if args.dry_run:
        found = sweep.estimate(args.grid, args.workers)
        return found, (
            f"{found['runs']:,} runs, {found['requests']:,} requests\n"
            f"about {_span(found['wall_s'])} on {found['workers']} cores ({_span(found['computing_s'])} of computing; "
            f"from {found['trials']} trial runs)"
        )
    if not args.out:
        raise InputError("--out is missing: the folder that keeps the runs (or --dry-run, to look at the grid only)")
    output_folder(args.out, files=("summary.parquet",))
    began = time.perf_counter()
    frame = (_live if live else _simulated)(args)
    wall_s = time.perf_counter() - began
    summary = Path(args.out) / "summary.parquet"
    runs = sweep.read(args.out).attrs["sweep"]["runs"]
    record = {"out": args.out, "summary": str(summary), "rows": len(frame), "runs": runs}
    text = f"{len(frame):,} runs ({runs['made_before']:,} made before) in {_span(wall_s)}"
    codes = sorted(set(frame["code"])) if "code" in frame else []
    if len(codes) > 1:
        text += f"\nrows of {len(codes)} versions of the code, told apart by the column code: {', '.join(codes)}"
    sound = frame[frame["valid"]] if "valid" in frame else frame
    if invalid := len(frame) - len(sound):
        text += f"\n{invalid:,} of them do not count (columns valid, why); --redo-invalid makes them again:\n"
        text += _table_of_invalid(frame[~frame["valid"]])
    if same_requests(frame):
        text += "\nall seeds have the same requests at the same times: they differ in the router's luck alone (sample: "
        text += "permute or resample, or arrivals that are drawn, make them differ)"
    text += f"\n\n{_table(sound)}" * bool(len(sound)) + f"\nwrote {summary}"
    told = {"codes": codes, "invalid": invalid, "source": frame["source"].iloc[0], "wall_s": wall_s}
    return record | told, text


def _simulated(args: argparse.Namespace) -> pd.DataFrame:
    from astrolabe_lab.sweep import run

    return run(
        args.grid, args.out, on=args.on, workers=args.workers, keep=args.keep, mix=args.mix, retries=args.retries
    )


def _live(args: argparse.Namespace) -> pd.DataFrame:
    from astrolabe_lab.serve.pools.studies import Emulated, run
    from astrolabe_lab.sweep import Grid

    pools = args.cluster or Emulated(args.emulate)
    return run(Grid.given(args.grid), pools, args.out, redo_invalid=args.redo_invalid)


def _live_estimate(args: argparse.Namespace) -> tuple[dict, str]:
    from astrolabe_lab.serve.pools.studies import Emulated, estimate
    from astrolabe_lab.sweep import Grid

    found = estimate(Grid.given(args.grid), args.cluster or Emulated(args.emulate))
    return found, (
        f"{found['runs']:,} runs, {found['requests']:,} requests, on {found['pools']:,} set"
        f"{'s' * (found['pools'] > 1)} of pools\nabout {_span(found['wall_s'])}, one run after the other"
    )


def same_requests(frame: pd.DataFrame) -> bool:
    """Whether, at some rate, several seeds faced one and the same set of requests."""
    at = frame.groupby("qps", dropna=False)
    return bool(((at["seed"].nunique() > 1) & (at["workload"].nunique() == 1)).any())


def _table_of_invalid(frame: pd.DataFrame) -> str:
    from astrolabe_lab.sweep.cell import varied

    names = list(dict.fromkeys([*varied(frame), "seed", "why"]))
    text = frame[names].head(SHOWN).to_string(index=False)
    return text + f"\n... and {len(frame) - SHOWN:,} rows more" * (len(frame) > SHOWN)


def _table(frame: pd.DataFrame) -> str:
    """Means over seeds, a row for everything else that varies: as many rows as a screen holds."""
    from astrolabe_lab.sweep.cell import varied

    measured = [name for name in MEASURED if name in frame]
    by = varied(frame)
    groups = frame.groupby([frame[name].astype(str) if name not in ("policy", "qps") else frame[name] for name in by])
    shown = groups[measured].mean().assign(seeds=groups["seed"].nunique())
    if "regime" in frame:
        shown["regime"] = groups["regime"].agg(lambda found: ", ".join(sorted(set(found))))
    rest = len(shown) - SHOWN
    text = f"means over seeds:\n{shown.head(SHOWN).reset_index().to_string(index=False, float_format='{:.4g}'.format)}"
    return text + (f"\n... and {rest:,} rows more" if rest > 0 else "")


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
