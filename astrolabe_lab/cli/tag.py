"""The command ``astrolabe tag``: serve a saved length model until SIGTERM."""

from __future__ import annotations

import json
import math
import sys

from astrolabe_lab.errors import InputError
from astrolabe_lab.length.precision import CHOICES, prepare
from astrolabe_lab.length.tagging import MAX_ANSWER_TOKENS

SUMMARY = "serve a length model: POST /tag tells how long an answer will be"
EXAMPLE = "astrolabe tag --model outputs/length --port 8100"
DETAILS = (
    "Prints one JSON line with the URL once requests are taken, then stays until SIGTERM or Ctrl-C. Also GET /healthz "
    "and GET /metrics (Prometheus)."
)


def add_arguments(parser) -> None:
    """Add the options of ``astrolabe tag``."""
    parser.add_argument("--model", metavar="DIR", required=True, help="folder of a saved length model")
    parser.add_argument("--port", type=int, default=8100, metavar="P", help="0 takes a free one (default: 8100)")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1, this machine only")
    parser.add_argument(
        "--constant", type=int, metavar="TOKENS", help="told where the model is late (default: its training median)"
    )
    parser.add_argument("--max-batch", type=int, default=32, metavar="N", help="prompts at once (default: 32)")
    parser.add_argument("--max-wait-ms", type=float, default=0.0, metavar="MS", help="to gather a batch (default: 0)")
    parser.add_argument(
        "--timeout-ms", type=float, default=1000.0, metavar="MS", help="then the constant is told (default: 1000)"
    )
    parser.add_argument(
        "--precision", choices=CHOICES, default="auto", help="of an encoder on the CPU (default: the faster one)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="cores for an encoder (default: half, if faster)")


def tag(args):
    """Serve; the one JSON line goes to the process's own stdout when the service is ready."""
    try:
        from astrolabe_lab.length.service import Limits, create_app
        from astrolabe_lab.length.serving import address, listen, serve
    except ImportError as error:
        raise InputError(f"astrolabe tag needs the package {error.name}: pip install 'astrolabe-lab[serve]'") from None
    from astrolabe_lab import length
    from astrolabe_lab.length.artifact import read_manifest

    _check(args)
    limits = Limits(max_batch=args.max_batch, max_wait_s=args.max_wait_ms / 1e3, timeout_s=args.timeout_ms / 1e3)
    sock = listen(args.host, args.port)
    with sock:
        print(f"astrolabe: loading {args.model}", file=sys.stderr, flush=True)
        estimator = length.load(args.model)
        manifest = read_manifest(args.model)
        fallback = round(estimator.median_tokens_) if args.constant is None else args.constant
        about = {"kind": manifest["kind"], "model_hash": manifest["weights"].removeprefix("weights-")}
        about |= prepare(estimator, args.precision, args.threads, limits.max_batch)
        app = create_app(estimator, fallback=fallback, model_hash=about["model_hash"], limits=limits)
        ready = {"url": address(sock), "role": "tagger", "constant": fallback} | about
        serve(app, sock, lambda: print(json.dumps(ready), file=sys.__stdout__, flush=True))
    print("astrolabe: the tagger has ended", file=sys.stderr, flush=True)
    return None, None


def _check(args) -> None:
    """Raise InputError for a number that is out of its range, by the option's name, before anything is loaded."""
    for option, value, least, most in (
        ("--port", args.port, 0, 65535),
        ("--constant", args.constant, 1, MAX_ANSWER_TOKENS),
        ("--max-batch", args.max_batch, 1, math.inf),
        ("--max-wait-ms", args.max_wait_ms, 0, 60_000),
        ("--timeout-ms", args.timeout_ms, 1, 60_000),
        ("--threads", args.threads, 1, math.inf),
    ):
        if value is not None and not least <= value <= most:
            upto = f"from {least} to {most:,}" if math.isfinite(most) else f"{least} or more"
            raise InputError(f"{option} {value:g} should be {upto}")
