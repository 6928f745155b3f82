"""``astrolabe length drift | recalibrate | retrain``: what a journal says of a length model, and what helps."""

from __future__ import annotations

from dataclasses import asdict

from astrolabe_lab.cli.values import output_folder, whole
from astrolabe_lab.length.drift import LEAST_REFERENCE


class NoGain(RuntimeError):
    """The new model is not clearly better than the old one, so none was written."""


COMMANDS = {
    "drift": (
        "say whether the lengths in a journal have drifted away from what was predicted",
        "astrolabe length drift --journal router.jsonl --model outputs/length",
        "Exit code 0 whether or not there is drift; it is in the text and in --json.",
    ),
    "recalibrate": (
        "correct a length model by a monotone map, learned from a journal, if that helps",
        "astrolabe length recalibrate --journal router.jsonl --model outputs/length --out outputs/length-2",
        "The map is learned on the older 60 % of the rows and has to lower the error clearly on the latest 40 %; "
        "otherwise nothing is written and the exit code is 1.",
    ),
    "retrain": (
        "train a length model anew, from what a journal observed",
        "astrolabe length retrain --journal router.jsonl --model outputs/length --out outputs/length-2",
        "Same kind and options as the old model. A fifth of the prompts is held out; where the new model is not "
        "clearly better there, nothing is written and the exit code is 1, unless --always.",
    ),
}


def add_arguments(name: str, parser) -> None:
    """Add the options of ``astrolabe length NAME``."""
    parser.add_argument(
        "--journal", metavar="FILE", action="append", required=True, help="of a router; repeat it for several"
    )
    parser.add_argument("--model", metavar="DIR", required=True, help="folder of the length model in use")
    if name == "drift":
        parser.add_argument(
            "--window", type=whole(1), default=500, metavar="N", help="answers in an error (default: 500)"
        )
        parser.add_argument(
            "--reference",
            type=whole(LEAST_REFERENCE),
            metavar="N",
            help="first answers, taken to be sound (default: 1000, or half of fewer than 2000)",
        )
        parser.add_argument(
            "--false-alarm-every", type=float, default=1e5, metavar="N", help="answers, at the least (default: 100,000)"
        )
        return
    parser.add_argument("--out", metavar="DIR", required=True, help="folder to write the new model to")
    parser.add_argument(
        "--latest", type=whole(1), metavar="N", help="learn from the latest N answers only (default: all)"
    )
    if name == "retrain":
        parser.add_argument(
            "--seed", type=whole(0), default=0, metavar="S", help="of the prompts held out (default: 0)"
        )
        parser.add_argument("--always", action="store_true", help="write the new model even if it is no better")


def drift(args):
    from astrolabe_lab import length
    from astrolabe_lab.length.feedback import fare
    from astrolabe_lab.length.observed import read_observed

    observed = read_observed(args.journal)
    found = fare(
        observed,
        length.load(args.model).median_tokens_,
        window=args.window,
        reference=args.reference,
        false_alarm_every=args.false_alarm_every,
    )
    bias = f"{abs(found.log_bias):.0%} {'longer' if found.log_bias > 0 else 'shorter'} than predicted in the median"
    text = (
        f"last {found.window:,} answers: mean absolute error {found.mae_tokens:.1f} tokens, the constant's "
        f"{found.constant_mae_tokens:.1f}; answers are {bias}\n"
    )
    if found.drift:
        how = {"worse": "further from"}.get(found.drift.kind, found.drift.kind + " than")
        text += (
            f"DRIFT: answers came out {how} what was predicted, found at answer {found.drift.at:,} and begun near "
            f"{found.drift.since:,}; next: astrolabe length recalibrate, or retrain"
        )
    else:
        text += f"no drift in {found.watched:,} answers after the {found.reference:,} of the reference"
    if found.not_predicted:
        text += f"; {found.not_predicted:,} answers left out, whose length no model predicted (a client or a constant)"
    return asdict(found) | {"left_out": observed.attrs}, text


def recalibrate(args):
    from astrolabe_lab import length
    from astrolabe_lab.length import artifact
    from astrolabe_lab.length.feedback import rows_of
    from astrolabe_lab.length.observed import require_rows
    from astrolabe_lab.length.recalibrated import LEAST_ROWS, recalibrate

    output_folder(args.out)
    artifact.check_target(args.out)  # before the work, not after it
    estimator, observed = length.load(args.model), _observed(args)
    require_rows(observed, LEAST_ROWS, "recalibration")
    prompts, lengths, models, censored = rows_of(observed, estimator)
    new, verdict = recalibrate(estimator, prompts, lengths, models=models, censored=censored)
    if not verdict.helps:
        raise NoGain(f"no map helps: {_said(verdict)}; {args.out} was not written")
    new.save(args.out)
    return {"model": args.out, **asdict(verdict)}, f"wrote {args.out}: {_said(verdict)}"


def retrain(args):
    from astrolabe_lab import length
    from astrolabe_lab.length import artifact
    from astrolabe_lab.length.feedback import retrain

    output_folder(args.out)
    artifact.check_target(args.out)  # before the work, not after it
    done = retrain(length.load(args.model), _observed(args), seed=args.seed)
    said = f"{_said(done.against_old)}; the constant's is {done.against_constant.mae_before:.1f}"
    if not (done.against_old.helps or args.always):
        raise NoGain(f"the new model is not clearly better: {said}; {args.out} was not written (--always writes it)")
    done.model.save(args.out)
    record = {"model": args.out, "trained_on": done.trained_on, "unknown_model": done.unknown_model}
    record["against_old"] = asdict(done.against_old)
    text = f"wrote {args.out}, trained on {done.trained_on:,} answers: {said}"
    if done.unknown_model:
        text += f"; {done.unknown_model:,} answers by serving models that one of the two does not know were not judged"
    return record | {"against_constant": asdict(done.against_constant)}, text


def _observed(args):
    from astrolabe_lab.length.observed import read_observed

    observed = read_observed(args.journal)
    return observed if args.latest is None else observed.tail(args.latest)


def _said(verdict) -> str:
    return (
        f"on {verdict.rows:,} held-out answers the mean absolute error goes from {verdict.mae_before:.1f} to "
        f"{verdict.mae_after:.1f} tokens (it falls by {verdict.low:.1f} to {verdict.high:.1f})"
    )
