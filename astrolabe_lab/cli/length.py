"""``astrolabe length collect | train | evaluate``: answers to learn from, a model of their length, and its worth."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from astrolabe_lab.cli.values import number, output_file, output_folder, whole
from astrolabe_lab.errors import InputError
from astrolabe_lab.urls import url_of

OWN = "sharegpt_like"
_OWN_SIZE = 8000

COMMANDS = {
    "collect": (
        "ask the served model for answers and note how long they are",
        "astrolabe length collect --url http://127.0.0.1:8000 --prompts prompts.jsonl --out outputs/answers.jsonl",
        "Any OpenAI-compatible server. Answers end by themselves unless --max-tokens is given; texts are not kept. "
        "Stop it when you like: the same command goes on where it was.",
    ),
    "train": (
        "train a length model, judge it on prompts held out, and save it",
        "astrolabe length train --data sharegpt_like --out outputs/length\n"
        "  astrolabe length train --data outputs/answers.jsonl --model encoder --out outputs/length\n"
        "  the paper's setting, on a GPU:\n"
        "  astrolabe length train --data ShareGPT.json --limit 50000 --out outputs/length \\\n"
        "      --model encoder:encoder=roberta-base,fine_tune=true",
        "A fine-tuning keeps checkpoints beside --out: when it was stopped, the same command goes on.",
    ),
    "evaluate": (
        "judge a kind of length model on prompts it has not seen, beside the constant median",
        "astrolabe length evaluate --data sharegpt_like --model prompt_ridge --splits 3 --by length\n"
        "  astrolabe length evaluate --prompts P.jsonl --lengths L.csv --served-model NAME --pool --model encoder",
        "Splits are by distinct prompt; the interval of the gain is over splits, of a single one over "
        "its prompts. Where a model answered prompts twice, "
        "the noise floor is shown too.",
    ),
}


def add_arguments(name: str, parser) -> None:
    """Add the options of ``astrolabe length NAME``."""
    if name == "collect":
        _add_collect(parser)
        return
    _add_answers(parser)
    model = parser.add_argument_group("the model").add_argument
    model(
        "--model",
        default="prompt_ridge",
        metavar="KIND[:key=value,...]",
        help="constant, prompt_ridge, encoder, oracle or noisy (default: prompt_ridge)",
    )
    model("--test", type=number(above=0), default=0.2, metavar="SHARE", help="prompts held out (default: 0.2)")
    if name == "train":
        model("--seed", type=whole(0), default=0, metavar="S", help="of the prompts held out (default: 0)")
        model("--out", required=True, metavar="DIR", help="folder to write the model to")
        model("--checkpoint", metavar="DIR", help="of a fine-tuning (default: OUT.checkpoint)")
        return
    model("--splits", type=whole(1), default=1, metavar="N", help="seeds FIRST..FIRST+N-1 (default: 1)")
    model("--first-seed", type=whole(0), default=0, metavar="S", help="default: 0")
    model(
        "--pool",
        nargs="?",
        const="all",
        metavar="SOURCE,...",
        help="learn from other models' answers to training prompts too: all, or those of these sources",
    )
    model(
        "--keep-copies",
        action="store_true",
        help="with --pool, learn also from near copies, in other sources, of prompts that are judged",
    )
    model("--by", choices=("prompt_length", "length", "source", "model"), help="also a table of groups")
    model("--across-sources", action="store_true", help="also learn from each source and judge on every other")
    model("--splits-dir", metavar="DIR", help="keep the splits there, and take those that are there already")
    model("--out", metavar="FILE", help="predictions for the test answers: .parquet, .csv or .csv.gz")


def collect(args):
    """Send the prompts; the record says what was asked, answered, cut off and failed."""
    import asyncio

    from astrolabe_lab.length import collect as collecting
    from astrolabe_lab.length import sources

    output_file(args.out, "--out", ("",))
    if args.prompts.partition(":")[0] == OWN:
        prompts = _own(args.prompts)["prompt"].tolist()
    else:
        prompts = sources.prompts_in(args.prompts, args.prompt_column)
    if args.limit:
        prompts = prompts[: args.limit]
    asking = collecting.Asking(
        url=url_of(args.url, "--url"),
        model=args.served_model,
        api=args.api,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        samples=args.samples,
        concurrency=args.concurrency,
        retries=args.retries,
        timeout_s=args.timeout_s,
        api_key=os.environ.get(args.api_key_env) or None,
    )
    last = -1

    def progress(result):
        nonlocal last
        tenth = 20 * (result.answered + result.failed) // max(result.asked, 1)
        if tenth != last:
            last = tenth
            _say(f"{result.answered:,} of {result.asked:,} answered, {result.failed:,} failed")

    try:
        done = asyncio.run(collecting.collect(prompts, args.out, asking, progress))
    except KeyboardInterrupt:
        _say(f"stopped; what has been answered is in {args.out}: run the same again to go on")
        raise
    record = {name: getattr(done, name) for name in "model asked already answered cut_off failed".split()}
    record["out"] = str(done.path)
    text = (
        f"{done.answered:,} answers by {done.model} written to {done.path} ({done.already:,} were there, "
        f"{done.failed:,} failed); {done.cut_off:,} were cut off and count as at least so long"
    )
    if done.failed:
        raise RuntimeError(text + ": run the same again to try the failed ones")
    return record, text


def train(args):
    """Fit on the training prompts, judge on the others, save."""
    from astrolabe_lab.length import artifact, data
    from astrolabe_lab.length.evaluate import train as fit
    from astrolabe_lab.length.kinds import make

    output_folder(args.out)  # before an hour of training, not after it
    artifact.check_target(args.out)
    model = make(args.model)
    if getattr(model, "fine_tune", False):
        kept = output_folder(args.checkpoint or f"{args.out.rstrip('/')}.checkpoint", "--checkpoint")
        model.set_params(checkpoint=str(kept))
    elif args.checkpoint:
        raise InputError("--checkpoint is for a model that is fine-tuned: encoder:fine_tune=true")
    if model.kind in ("encoder",):
        model.progress = _say
    frame = _answers(args)
    fitted, drawn = fit(frame, model, seed=args.seed, test=args.test)
    fitted.save(args.out)
    drawn.save(Path(args.out) / "split.json")
    record = {
        "out": args.out,
        "data": data.describe(frame),
        "data_sha256": fitted.data_sha256_,
    } | fitted.metrics
    return record, f"{data.describe(frame)}\n{_sentence(fitted.metrics)}\nwrote {args.out}"


def evaluate(args):
    """Fit and judge on every split; the record has the means over the splits."""
    from astrolabe_lab import result
    from astrolabe_lab.length import data
    from astrolabe_lab.length.evaluate import across_sources
    from astrolabe_lab.length.evaluate import evaluate as judge

    out = output_file(args.out)
    output_folder(args.splits_dir, "--splits-dir")
    if args.keep_copies and not args.pool:
        raise InputError("--keep-copies says what --pool learns from: give --pool too")
    frame = _answers(args, keep_others=bool(args.pool))
    pool = args.pool == "all" or (args.pool.split(",") if args.pool else False)
    found = judge(
        frame,
        args.model,
        served_model=args.served_model,
        pool=pool,
        keep_copies=args.keep_copies,
        splits=args.splits,
        test=args.test,
        first_seed=args.first_seed,
        splits_dir=args.splits_dir,
        progress=_say,
    )
    record = {"model": args.model, "served_model": args.served_model} | found.summary()
    record["data"] = data.describe(frame)
    lines = [record["data"], _sentence(record)]
    if args.by:
        table = found.by(args.by)
        table[args.by] = table[args.by].astype(str)
        record["by"] = {"what": args.by, "rows": table.to_dict("records")}
        lines += ["", table.round(2).to_string(index=False)]
    if args.across_sources:
        judged = frame if args.served_model is None else data.of_model(frame, args.served_model)
        table = across_sources(judged, args.model, seed=args.first_seed, test=args.test)
        record["across_sources"] = table.to_dict("records")
        lines += ["", table.round(2).to_string(index=False)]
    if out:
        result.save(found.predictions, out, model=args.model, served_model=args.served_model)
        record["out"] = str(out)
        lines.append(f"wrote {out}")
    return record, "\n".join(lines)


def _sentence(found) -> str:
    """What an evaluation says, as text. What could not be told (one test answer, all of one length) is not in it."""

    def said(name, form):
        value = found.get(name)
        return "unknown" if value is None or value != value else format(value, form)

    interval = ""
    if said("reduction_low", "") != "unknown":
        interval = f", 95 % interval {found['reduction_low']:.1%} to {found['reduction_high']:.1%}"
    text = (
        f"MAE {said('mae', '.1f')} tokens, the constant median's {said('constant_mae', '.1f')}: "
        f"{said('reduction', '.1%')} less{interval}; MAPE {said('mape', '.0%')} ({said('constant_mape', '.0%')}), "
        f"concordance {said('concordance', '.3f')}, 90 % quantile covers {said('coverage_p90', '.1%')}; "
        f"{found['splits']} split(s), {found['n_train']:,} answers to learn from and {found['n_test']:,} to judge"
    )
    if found["n_unknown_model_test"]:
        text += f", {found['n_unknown_model_test']:,} not judged, of serving models with none to learn from"
    if found["n_pool"]:
        text += f", {found['n_pool']:,} of other models to learn from"
        text += f" ({found['n_copies_left_out']:,} to near copies of judged prompts left out)"
    if "floor_mae" in found:
        many = found.get("floor_prompts")
        text += f". Noise floor {found['floor_mae']:.1f} tokens"
        text += f" (from {many:,} prompts answered more than once)" if many else " (known)"
        text += f": {said('gap_closed', '.0%')} of the gap between constant and floor closed"
    return text


def _answers(args, keep_others: bool = False):
    """The frame of answers that the options name."""
    from astrolabe_lab.length import data

    if (args.data is None) == (args.lengths is None):
        raise InputError("answers: give --data, or --lengths with --prompts")
    if (args.lengths is None) != (args.prompts is None):
        raise InputError("--lengths and --prompts go together: one has the lengths, the other the texts, by prompt_uid")
    source = args.data or args.lengths
    if source.partition(":")[0] == OWN:
        frame = _own(source)
    else:
        columns = dict(_pair(text) for text in args.column or ())
        frame = data.load(
            source,
            prompts=args.prompts,
            columns=columns,
            split=args.dataset_split,
            max_tokens=args.cut_at,
            tokenizer=args.tokenizer,
        )
    notes = frame.attrs
    if args.served_model is not None and not keep_others:
        frame = data.of_model(frame, args.served_model)
    if args.limit:
        frame = frame.head(args.limit)
    frame.attrs = notes
    _say(data.describe(frame))
    return frame


def _own(text: str):
    """Answers made here: the requests of a ShareGPT-like trace."""
    from astrolabe_lab.length import data

    size = text.partition(":")[2] or str(_OWN_SIZE)
    if not (size.isascii() and size.isdigit() and int(size)):
        raise InputError(f"{text!r}: after {OWN}: stands the number of requests, e.g. {OWN}:{_OWN_SIZE}")
    return data.generated(int(size))


def _pair(text: str) -> tuple[str, str]:
    part, equals, name = text.partition("=")
    if not (part and equals and name):
        raise InputError(f"--column {text!r} is not PART=NAME, e.g. prompt=question")
    return part, name


def _say(line: str) -> None:
    print(f"astrolabe: {line}", file=sys.stderr, flush=True)


def _add_answers(parser) -> None:
    add = parser.add_argument_group("the answers").add_argument
    add(
        "--data",
        metavar="SOURCE",
        help="CSV, JSON, JSONL, Parquet or ShareGPT JSON (.gz allowed), what collect wrote, a folder or name of a "
        f"Hugging Face data set, or {OWN}[:N], made here",
    )
    add("--lengths", metavar="FILE", help="instead of --data: lengths alone, their texts in --prompts")
    add("--prompts", metavar="FILE", help="with --lengths: texts, joined by prompt_uid")
    add("--served-model", metavar="NAME", help="only answers of this model (with --pool: judge on these)")
    add(
        "--column",
        action="append",
        metavar="PART=NAME",
        help="where the column of a part (prompt, response, length, model, finish, censored, source, uid, sample) has "
        "another name; repeat it",
    )
    add("--dataset-split", default="train", metavar="NAME", help="of a Hugging Face data set (default: train)")
    add(
        "--cut-at",
        type=whole(1),
        metavar="N",
        help="the max_tokens that answers were given: so long means cut off",
    )
    add("--tokenizer", metavar="DIR", help="counts answers given as text (default: our own approximation)")
    add("--limit", type=whole(1), metavar="N", help="only the first N answers")


def _add_collect(parser) -> None:
    add = parser.add_argument
    add("--url", required=True, metavar="URL", help="of the server, with or without /v1")
    add("--prompts", required=True, metavar="SOURCE", help=f"a file or data set with prompts, or {OWN}[:N]")
    add("--prompt-column", metavar="NAME", help="its column of prompts, if it has another name")
    add("--out", required=True, metavar="FILE", help="JSON lines, added to")
    add("--served-model", metavar="NAME", help="default: the one that the server has")
    add("--api", choices=("chat", "completions"), default="chat", help="default: chat")
    add("--max-tokens", type=whole(1), metavar="N", help="cut answers there (default: they end by themselves)")
    add("--temperature", type=number(), metavar="T", help="default: the server's")
    add(
        "--samples",
        type=whole(1),
        default=1,
        metavar="N",
        help="answers a prompt; 2 tell the noise floor (default: 1)",
    )
    add("--concurrency", type=whole(1), default=8, metavar="N", help="requests at once (default: 8)")
    add(
        "--retries",
        type=whole(0),
        default=5,
        metavar="N",
        help="of a request, with growing waits (default: 5)",
    )
    add("--timeout-s", type=number(above=0), default=600.0, metavar="S", help="for one answer (default: 600)")
    add("--limit", type=whole(1), metavar="N", help="only the first N prompts")
    add(
        "--api-key-env",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="environment variable (OPENAI_API_KEY)",
    )
