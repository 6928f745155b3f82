"""What foresight and blends of objectives buy, on 12 simulated instances: two tables, over seeds.

    python tests/objectives.py foresight [--qps 12 20 24 28 32] [--seeds 8] [--decisions 150]
    python tests/objectives.py blend [--metrics blend:0.25 added_delay_s ...] [--qps 24 30 34 38] [--lengths noisy:0.25]

`foresight`: the error of predicted E2E by load with and without it, whether the choices get better (paired over seeds,
corrected for all comparisons of the table), and Rank-1 by replayed decisions (`--decisions` a rate, 0: none).
`blend`: how far mean E2E and P99 TTFT lie from those of own E2E, paired and corrected alike. Seeds from
`--first-seed` on; whoever chooses among blends on some seeds tells their effect from others.

The lengths are the paper's 10,000 where the shared folder is, each seed a permutation of them, or those of
`--trace sharegpt_like`.
"""

import argparse
import sys

import pandas as pd
from speed import paper_lengths

from astrolabe_lab import measure, sweep
from astrolabe_lab.arrivals import with_arrivals
from astrolabe_lab.length import attach

INSTANCES = 12
KINDS = ("none", "arrivals", "learned", "both")
BLENDS = ("blend:0.25", "blend:0.1:0.3", "added_delay_s")


def runs_of(args, policies, requests):
    """The summary frame of policies (label -> text) x rates x seeds."""
    trace, sample = (requests, "permute") if args.trace == "paper" else ("sharegpt_like", "head")
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    return sweep.sweep(
        trace, policies, args.qps, seeds, requests=args.requests, sample=sample, lengths=args.lengths,
        workers=args.workers, instances=INSTANCES,
    )  # fmt: skip


def differences(runs, metric, baseline):
    """Rows "policy, by rate": mean relative difference from the baseline in %, its interval, * where it is clear."""
    base = runs[runs["policy"] == baseline].set_index(["qps", "seed"])[metric]
    at = pd.MultiIndex.from_frame(runs[["qps", "seed"]])
    shares = runs.assign(share=100 * (runs[metric].to_numpy() / base.loc[at].to_numpy() - 1))
    found = measure.paired_difference(shares, "share", baseline)
    cells = [
        f"{row.mean:+.1f} ({row.low_all:+.1f}..{row.high_all:+.1f}){'*' if row.clear else ' '}"
        for row in found.itertuples(index=False)
    ]
    table = found.assign(cell=cells).pivot(index="policy", columns="qps", values="cell")
    return table.loc[list(dict.fromkeys(found["policy"]))]


def show_differences(runs, metrics, baseline):
    for metric in metrics:
        print(f"\n{metric}: % from {baseline} (interval for all of the table together; * clear after correction)")
        means = runs[runs["policy"] == baseline].groupby("qps")[metric].mean()
        print("  of", ", ".join(f"{mean:.3g} at {qps:g} QPS" for qps, mean in means.items()))
        print(differences(runs, metric, baseline).to_string())


def ranks(args, requests):
    """Rank-1 and regret by kind of foresight and rate, from replayed decisions of the first seed."""
    rows = []
    own = requests.sample(frac=1, random_state=args.first_seed).head(args.requests).reset_index(drop=True)
    for qps in args.qps:
        trace = attach(with_arrivals(own.assign(rid=own.index), qps, seed=args.first_seed), args.lengths)
        for kind in KINDS:
            replays = measure.replay_decisions(
                trace, f"astrolabe:k=2,foresight={kind}", decisions=args.decisions, instances=INSTANCES
            )
            rows.append({"foresight": kind, "qps": qps} | measure.rank_one(replays))
            print(f"replayed {args.decisions} decisions at {qps:g} QPS, {kind}", file=sys.stderr)
    return pd.DataFrame(rows)


def foresight(args, requests):
    runs = runs_of(args, {kind: f"astrolabe:k=2,foresight={kind}" for kind in KINDS}, requests)
    for column, what in (("prediction_mae_pct", "mean absolute"), ("prediction_signed_pct", "mean")):
        print(f"\n{what} error of predicted E2E, % (95 % interval over seeds)")
        found = measure.over_seeds(runs, column)
        cells = [f"{row.mean:.1f} ({row.low:.1f}..{row.high:.1f})" for row in found.itertuples(index=False)]
        print(found.assign(cell=cells).pivot(index="policy", columns="qps", values="cell").loc[list(KINDS)].to_string())
    show_differences(runs, ("e2e_mean_s", "ttft_p99_s"), "none")
    if args.decisions:
        print("\nRank-1, and what a choice cost over the better of the two candidates")
        print(ranks(args, requests).round(3).to_string(index=False))


def blend(args, requests):
    policies = {"e2e_s": "astrolabe:k=2"} | {m: f"astrolabe:k=2,metric={m}" for m in args.metrics}
    show_differences(runs_of(args, policies, requests), ("e2e_mean_s", "ttft_p99_s", "e2e_p99_s"), "e2e_s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("foresight", "blend"))
    parser.add_argument("--qps", type=float, nargs="+")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--lengths", default="oracle")
    parser.add_argument("--trace", choices=("paper", "sharegpt_like"), default="paper")
    parser.add_argument("--metrics", nargs="+", default=BLENDS)
    parser.add_argument("--decisions", type=int, default=150)
    parser.add_argument("--workers", type=int)
    args = parser.parse_args()
    args.qps = args.qps or {"foresight": [12, 20, 24, 28, 32], "blend": [24, 30, 34, 38]}[args.what]
    requests, source = paper_lengths()
    print(f"{args.requests:,} requests a run, {args.seeds} seeds from {args.first_seed}, predicted: {args.lengths}")
    print(source if args.trace == "paper" else "sharegpt_like lengths")
    {"foresight": foresight, "blend": blend}[args.what](args, requests)


if __name__ == "__main__":
    main()
