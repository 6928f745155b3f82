"""What bounds a router, as options of ``astrolabe route``; the rest of ``serve.limits.Limits`` is as it is there."""

from __future__ import annotations

from astrolabe_lab.cli.values import number, whole
from astrolabe_lab.serve.limits import Limits


def add_limits(add) -> None:
    default = Limits()
    add(
        "--max-in-flight", type=whole(1), default=default.in_flight, metavar="N",
        help=f"requests in all; further ones get 429 (default: {default.in_flight})",
    )  # fmt: skip
    add(
        "--first-byte-s", type=number(above=0), default=default.first_byte_s, metavar="S",
        help=f"modelled s that an engine has for the first byte of a stream (default: {default.first_byte_s:g})",
    )  # fmt: skip
    add(
        "--whole-answer-s", type=number(above=0), default=default.whole_answer_s, metavar="S",
        help=f"modelled s that it has for an answer that is not streamed (default: {default.whole_answer_s:g})",
    )  # fmt: skip
    add(
        "--tries", type=whole(1), default=default.tries, metavar="N",
        help=f"engines, or pairs of them, that one request is tried at, at most (default: {default.tries})",
    )  # fmt: skip


def limits_of(args) -> Limits:
    return Limits(
        in_flight=args.max_in_flight,
        first_byte_s=args.first_byte_s,
        whole_answer_s=args.whole_answer_s,
        tries=args.tries,
    )
