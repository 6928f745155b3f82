"""``astrolabe replay``: a router's journal, decided again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from astrolabe_lab.cli.values import whole

SUMMARY = "decide a router's journal again, by any policy, and say what each choice would have cost"
EXAMPLE = "astrolabe replay /tmp/journal.jsonl --policy least_loaded --out replayed.parquet"
DETAILS = (
    "On the statuses that the router saw. Regret: predicted E2E of the choice minus that of the best candidate. "
    "With --out, a replay that was ended goes on where it was. Of a router of pools: which pairs the policy would have "
    "chosen."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("journal", metavar="JOURNAL", help="what astrolabe route --journal wrote")
    add(
        "--policy",
        metavar="NAME[:key=value,...]",
        help="see astrolabe policies (default: astrolabe:k=2, for pools marginal_cost)",
    )
    add("--preset", metavar="NAME", help="step cost to predict with, where the router had none")
    add("--seed", type=whole(0), metavar="S", help="of the policy's draws (default: the router's own)")
    add("--out", metavar="FILE", help="one row a decision: .parquet, .csv or .csv.gz")


def replay(args: argparse.Namespace) -> tuple[dict, str]:
    from astrolabe_lab.cost import preset
    from astrolabe_lab.result import check_output, save
    from astrolabe_lab.serve.pools.replay import is_of_pools
    from astrolabe_lab.serve.replay import replay as decide_again
    from astrolabe_lab.serve.replay import summary

    out = check_output(args.out) if args.out else None
    if is_of_pools(args.journal):
        return _replay_pools(args, out)
    kept = Path(f"{out}.replaying") if out else None

    def goes_on(rows: int) -> None:
        print(f"replay: going on from the {rows:,} decisions in {kept}", file=sys.stderr, flush=True)

    def progress(done: int) -> None:
        if done % 5000 == 0:
            print(f"replay: {done:,} decisions", file=sys.stderr, flush=True)

    cost = preset(args.preset).cost if args.preset else None
    frame = decide_again(args.journal, args.policy or "astrolabe:k=2", args.seed, cost, kept, progress, goes_on)
    told = {"journal": args.journal, **summary(frame)}
    text = [
        f"{told['decisions']:,} decisions under {told['policy']}",
        f"regret        mean {told['regret_mean_s']:.4f} s   p99 {told['regret_p99_s']:.4f} s   "
        f"best of the candidates {told['best_share']:.1%}",
    ]
    if told["probes"] < told["decisions"]:
        text[0] += f", {told['agreement']:.1%} as the router's own"
        text.append(
            f"router's own  mean {told['recorded_regret_mean_s']:.4f} s   p99 {told['recorded_regret_p99_s']:.4f} s   "
            f"best of the candidates {told['recorded_best_share']:.1%}"
        )
    if told["probes"]:
        text.append(
            f"{told['probes']:,} of them are probes, which went to all candidates: the router chose nothing there"
        )
    text += _of_torn(told)
    if told["without_status"]:
        text.append(f"{told['without_status']:,} decisions hold no statuses and were left out")
    if out:
        save(frame, out, **frame.attrs)
        told["out"] = str(out)
        text.append(f"wrote {out}")
    return told, "\n".join(text)


def _replay_pools(args: argparse.Namespace, out: Path | None) -> tuple[dict, str]:
    from astrolabe_lab.disagg import routers
    from astrolabe_lab.errors import InputError
    from astrolabe_lab.result import save
    from astrolabe_lab.serve.pools.replay import replay as decide_again

    if args.preset:
        raise InputError("--preset: this journal is of pools, whose policies price with its constants; leave it out")
    policy = routers.parse(args.policy or "marginal_cost")
    name = routers.spec(policy)
    frame = decide_again(args.journal, policy, name=name, seed=args.seed)
    told = {"journal": args.journal, "policy": name, "decisions": len(frame), "agreement": float(frame["same"].mean())}
    told |= frame.attrs
    text = [f"{len(frame):,} decisions over pools under {name}, {told['agreement']:.1%} as the router's own"]
    text += _of_torn(told)
    if out:
        save(frame, out, policy=name)
        told["out"] = str(out)
        text.append(f"wrote {out}")
    return told, "\n".join(text)


def _of_torn(told: dict) -> list[str]:
    line = told["torn_line"]
    return [] if line is None else [f"line {line} is torn (its writer ended while it wrote) and was left out"]
