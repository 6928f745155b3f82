"""``astrolabe compare``: two policies on the same requests, beside what chance alone does."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

SUMMARY = "tell whether B is better than A, from runs on the same requests"
EXAMPLE = "astrolabe compare A.parquet B.parquet"
DETAILS = (
    "A and B are results of `astrolabe simulate`, folders of such results (one for each seed), or sweeps (a folder, or "
    "its summary.parquet). Runs are paired by rate and seed and must have served the same requests at the same times. "
    "Each difference is B - A, with an interval, p corrected for the number of rows, and the seeds needed to see a "
    "difference of 2 %. A/A says how far A lies from itself: on the same requests with other draws of the router "
    "(luck), and with other arrivals. Results that say how they were made are simulated again for that; a grid on live "
    "pools ran its first policy twice, which is its luck."
)
LUCK_SEED, ARRIVALS_SEED = 1_000_003, 2_000_003  # far from the seeds that people count from 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser the options of ``compare``."""
    parser.add_argument("a", metavar="A", help="the runs compared with: a file or folder")
    parser.add_argument("b", metavar="B", help="the runs compared: a file or folder")
    parser.add_argument("--policy-a", metavar="NAME", help="where A holds several policies: which")
    parser.add_argument("--policy-b", metavar="NAME", help="where B holds several policies: which")
    where = {"action": "append", "default": [], "metavar": "COLUMN=VALUE"}
    parser.add_argument("--where", **where, help="of both, only runs with this value, as in lengths=oracle; repeatable")
    parser.add_argument("--where-a", **where, help="the same of A alone")
    parser.add_argument("--where-b", **where, help="the same of B alone")
    parser.add_argument("--again", metavar="FILE", help="A once more, made with another --policy-seed")
    parser.add_argument("--metrics", metavar="NAME,...", help="columns of the summary (default: the usual ones)")
    parser.add_argument(
        "--slo",
        metavar="key=value,...",
        help="adds goodput: ttft_s, tpot_s, e2e_s, loose_factor (default: of simulated pools, their own targets)",
    )
    parser.add_argument("--level", type=float, default=0.95, help="of intervals and tests (default: 0.95)")
    parser.add_argument(
        "--effect-pct", type=float, default=2.0, metavar="PCT", help="the difference that seeds are counted for (2)"
    )
    parser.add_argument("--no-rerun", action="store_true", help="simulate nothing: A/A only from what is given")


def compare(args: argparse.Namespace) -> tuple[dict, str]:
    """Compare the runs; return the record and the table. Raises InputError."""
    import pandas as pd

    from astrolabe_lab import measure

    slo = measure.SLO.parse(args.slo) if args.slo is not None else None
    if not (math.isfinite(args.effect_pct) and args.effect_pct > 0):
        raise InputError(f"--effect-pct {args.effect_pct} is not a number > 0")
    sides = {name: _load(path, policy, where) for name, path, policy, where in _sides(args)}
    metrics = None if args.metrics is None else list(filter(None, map(str.strip, args.metrics.split(","))))
    if metrics == []:
        raise InputError(f"--metrics {args.metrics!r} names no metric: give columns of the summary, as in ttft_p99_s")
    goodputs = [name for name in metrics or () if name.startswith("goodput")]
    if slo is None and (metrics is None or goodputs):
        slo = _promised(sides)
    a, b = (_joined(frames) for frames in sides.values())
    if slo is None and any(name not in frame for name in goodputs for frame in (a, b)):
        raise InputError(
            f"--metrics {goodputs[0]}: runs tell no targets to count goodput by: give --slo, as in "
            "ttft_s=0.175,tpot_s=0.0397"
        )
    again = _given_again(args, a)
    options = {"metrics": metrics, "slo": slo, "level": args.level, "effect_pct": args.effect_pct}
    found = measure.compare(a, b, again=again, **options)
    made = {} if args.no_rerun else _made_again(sides["A"])  # what is wrong with A and B has been said by now
    if made:
        found = measure.compare(a, b, again=made | again, **options)
    names = [str(frame["policy"].iloc[0]) if "policy" in frame else "-" for frame in (a, b)]
    source = sorted({str(name) for frame in (a, b) if "source" in frame for name in frame["source"].unique()})
    record = {
        "a": {"path": args.a, "policy": names[0]},
        "b": {"path": args.b, "policy": names[1]},
        "source": ", ".join(source),
        "seeds": int(found["seeds"].min()),
        "level": args.level,
        "effect_pct": args.effect_pct,
        "metrics": found.where(pd.notna(found), None).to_dict("records"),
    }
    mixed = _mixed_code(sides, bool(made))
    return record | {"mixed_code": mixed}, "\n".join([_text(found, names, args), *mixed])


def _mixed_code(sides: dict[str, list[pd.DataFrame]], again: bool) -> list[str]:
    """Lines for people where runs of different code stand beside each other."""
    from astrolabe_lab.rerun import about_of
    from astrolabe_lab.sweep.identity import code

    found, lines = {}, []
    for name, frames in sides.items():
        told = [frame["code"] if "code" in frame else [about_of(frame).get("code")] for frame in frames]
        found[name] = {str(one) for codes in told for one in codes if one is not None}
    if len(known := found["A"] | found["B"]) > 1:
        told = "; ".join(f"{name}: {', '.join(sorted(codes))}" for name, codes in found.items())
        lines.append(f"Made by {len(known)} versions of the code, which may be the difference: {told}.")
    if again and not found["A"] <= {code()}:
        lines.append(f"A again was made by the code that is here, {code()}, and A by other code.")
    return lines


def _sides(args):
    return (
        ("A", args.a, args.policy_a, args.where + args.where_a),
        ("B", args.b, args.policy_b, args.where + args.where_b),
    )


def _load(path: str, policy: str | None, where: list[str] = ()) -> list[pd.DataFrame]:
    """The frames of a file or folder, of one policy, and only the rows that `where` asks for."""
    import pandas as pd

    path = Path(path)
    if path.is_dir():
        if (path / "summary.parquet").is_file():
            files = [path / "summary.parquet"]
        else:
            files = sorted(path.glob("*.parquet"))
        if not files:
            raise InputError(f"{path}: no summary.parquet of a sweep and no .parquet results in this folder")
    elif path.is_file():
        files = [path]
    else:
        raise InputError(f"{path} does not exist: give a result file, a folder of them, or a sweep's folder")
    frames = []
    for file in files:
        try:
            frame = pd.read_parquet(file) if file.suffix == ".parquet" else pd.read_csv(file)
        except Exception as error:
            raise InputError(f"{file} cannot be read as a result: {error}") from None
        if not len(frame) or "seed" not in frame and "arrived_s" not in frame:
            has = ", ".join(map(str, frame.columns[:12]))
            raise InputError(
                f"{file} is no result: it has {len(frame):,} rows of {has}; give what `astrolabe simulate` or "
                "`astrolabe sweep` wrote"
            )
        if policy is not None:
            if "policy" not in frame or policy not in set(frame["policy"]):
                has = ", ".join(map(str, frame["policy"].unique())) if "policy" in frame else "none"
                raise InputError(f"{file} has no policy {policy!r}; it has {has}")
            about = frame.attrs
            frame = frame[frame["policy"] == policy]
            frame.attrs = about
        frames.append(_only(frame, where, file))
    return frames


def _only(frame: pd.DataFrame, where: list[str], file: Path) -> pd.DataFrame:
    for condition in where:
        column, equals, value = (part.strip() for part in condition.partition("="))
        if not equals or column not in frame:
            columns = ", ".join(frame.columns)
            raise InputError(f"--where {condition}: not COLUMN=VALUE with a column of {file}: {columns}")
        has = frame[column]
        try:
            kept = has == float(value)
        except ValueError:
            kept = has.astype(str) == value
        kept |= has.astype(str) == value
        if not kept.any():
            values = ", ".join(map(str, has.unique()))
            raise InputError(f"--where {condition}: {file} has no such run; its {column} are {values}")
        about = frame.attrs
        frame = frame[kept]
        frame.attrs = about
    return frame


def _promised(sides: dict[str, list[pd.DataFrame]]):
    """The targets that the runs themselves tell; None where some tell none. Raises InputError where they differ."""
    from astrolabe_lab.rerun import promised

    found = {name: {promised(frame) for frame in frames} for name, frames in sides.items()}
    targets = found["A"] | found["B"]
    if len(targets - {None}) > 1:
        told = "; ".join(f"{name} {' and '.join(map(_targets, slos))}" for name, slos in found.items())
        raise InputError(
            f"runs promised their requests different targets ({told}): give those to count goodput by, as in --slo "
            "ttft_s=0.175,tpot_s=0.0397, or --metrics without goodput"
        )
    return None if None in targets else targets.pop()


def _targets(slo) -> str:
    if slo is None:
        return "none told"
    return f"TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s, loose {slo.loose_factor:g}x"


def _given_again(args, a: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """A once more without a simulation: the file that --again names, or the second run of A's policy beside it."""
    from astrolabe_lab.disagg.compare import AGAIN

    if args.again:
        return {"policy": _joined(_load(args.again, args.policy_a, args.where + args.where_a))}
    runs = ["qps", "seed"]
    if "policy" not in a or not {*runs} <= {*a}:
        return {}
    try:
        twice = _joined(_load(args.a, a["policy"].iloc[0] + AGAIN, args.where + args.where_a))
    except InputError:  # it has no such runs: what else could be wrong with it was said when A itself was read
        return {}
    # Where the grid has not ended, some are missing.
    return {"policy": twice} if set(twice[runs].itertuples(index=False)) == set(a[runs].itertuples(index=False)) else {}


def _joined(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """One frame of all runs; a result made at a rate gets it as a column."""
    import pandas as pd

    from astrolabe_lab.rerun import about_of

    parts = []
    for frame in frames:
        rate = about_of(frame).get("qps")
        frame = frame.assign(qps=rate) if rate is not None and "qps" not in frame else frame.copy(deep=False)
        frame.attrs = {}
        parts.append(frame)
    return pd.concat(parts, ignore_index=True)


def _made_again(frames: list[pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """A's runs again, as far as they tell how they were made: with other luck, and with other arrivals."""
    from astrolabe_lab.rerun import about_of, can_rerun, rerun

    made: dict[str, list] = {}
    for kind, shift in (("policy", LUCK_SEED), ("arrivals", ARRIVALS_SEED)):
        if not all(can_rerun(frame, kind == "arrivals") for frame in frames):
            continue
        for frame in frames:
            about = about_of(frame)
            if kind == "arrivals" and about.get("arrivals") == "trace":
                break
            line = f"A again, other {'luck' if kind == 'policy' else kind}: {len(frame):,} requests"
            print(f"astrolabe: {line}, seed {about['seed']}", file=sys.stderr, flush=True)
            other = {"policy_seed": shift + about["seed"]} if kind == "policy" else {"seed": shift + about["seed"]}
            try:
                again = rerun(frame, **other)
            except InputError as error:
                raise InputError(f"A again: {error}; --no-rerun compares without it") from error
            again.attrs = dict(frame.attrs)
            made.setdefault(kind, []).append(again)
    return {kind: _joined(runs) for kind, runs in made.items() if len(runs) == len(frames)}


def _text(found: pd.DataFrame, names: list[str], args) -> str:
    seeds = int(found["seeds"].min())
    several = "qps" in found
    head = f"{'metric':22}" + ("   qps" if several else "")
    head += f"{'A':>11}{'B':>11}{'B - A':>10}  {f'{args.level:.0%} interval':^18} {'p':>7}  {'winner':12}"
    head += f"{'A/A luck':^18}{'A/A arrivals':^18}{'seeds':>7}"
    lines = [f"A: {names[0]} ({args.a})", f"B: {names[1]} ({args.b})", "", head]
    for row in found.to_dict("records"):
        line = f"{row['metric']:22}" + (f"{row['qps']:6g}" if several else "")
        line += f"{_number(row['a']):>11}{_number(row['b']):>11}{_pct(row['pct']):>10}  "
        winner = "cannot tell" if row["interval"].startswith("none") else row["winner"]
        line += f"{_span(row['low_pct'], row['high_pct']):^18} {_p(row['p_holm']):>7}  {winner:12}"
        for kind in ("policy", "arrivals"):
            low, high = row[f"aa_{kind}_low_pct"], row[f"aa_{kind}_high_pct"]
            line += f"{_span(low, high) if not math.isnan(low) else _pct(row[f'aa_{kind}_pct']):^18}"
        needed = row["seeds_needed"]
        line += f"{'-' if math.isnan(needed) else '>10^6' if math.isinf(needed) else f'{needed:,.0f}':>7}"
        lines.append(line.rstrip())
    lines += [
        "",
        f"{seeds} seed{'s' * (seeds > 1)}; {_intervals(found)}; p corrected for the {len(found)} rows (Holm).",
        "A/A: A against itself, on the same requests with other draws of the router (luck), and with other arrivals.",
        f"seeds: needed to see a difference of {args.effect_pct:g} % with 80 % power, corrected for the rows.",
    ]
    for side in "ab":
        if lost := int((found.drop_duplicates("qps") if several else found.head(1))[f"{side}_lost"].sum()):
            lines.append(
                f"{side.upper()} lost {lost:,} request{'s' * (lost > 1)}: rejected, failed or aborted. Rows ending in "
                "_all_s count them as infinitely late; the other latencies are of those that ended well, and no side "
                "that lost more wins them."
            )
    if found["aa_policy_pct"].isna().all():
        lines.append(
            "No A/A row of luck: these files do not tell how to make A again; give --again FILE, A made with"
            " another --policy-seed (in a sweep: the key policy_seed)."
        )
    return "\n".join(lines)


def _intervals(found: pd.DataFrame) -> str:
    """What the intervals are of, and why some rows, or all, have none."""
    kinds = dict.fromkeys(found["interval"])
    some = [kind for kind in kinds if not kind.startswith("none")]
    if len(some) == len(kinds):
        return f"intervals are {' or '.join(some)}"
    why = [word for word in ("short", "past capacity") if any(word in kind for kind in kinds)]
    none = f"a single run{' that is ' * bool(why)}{' or '.join(why)} gives none, several seeds do"
    return f"intervals are {' or '.join(some)}, and for other rows {none}" if some else f"no intervals: {none}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _pct(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:+.1f} %"


def _span(low: float, high: float) -> str:
    return "-" if math.isnan(low) else f"[{low:+.1f}, {high:+.1f}]"


def _p(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}" if value >= 0.001 else "<0.001"
