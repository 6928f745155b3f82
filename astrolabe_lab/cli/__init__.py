"""The command line: one parser, one way to report results and errors.

A command is a function of the parsed arguments that returns ``(record, text)``: the JSON object of ``--json``
and what a person reads instead. While it runs, whatever is printed goes to stderr: stdout carries the result.
Exit codes: 0 done, 1 failed, 2 wrong use, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import math
import os
import signal
import sys

from astrolabe_lab import __version__
from astrolabe_lab.errors import InputError

DESCRIPTION = "Astrolabe Lab: where should the next LLM request go?"


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are InputErrors, reported like every other wrong input."""

    def error(self, message):
        raise InputError(f"{message} (see {self.prog} --help)")


class Help(argparse.HelpFormatter):
    """Wraps every text but the example."""

    def _fill_text(self, text, width, indent):
        return text if text.startswith("example:") else super()._fill_text(text, width, indent)


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code."""
    _open_streams()
    if is_process := argv is None:
        argv = sys.argv[1:]
    as_json, debug = "--json" in argv, "--debug" in argv
    try:
        args = _parse(argv)
        with _terminable(), contextlib.redirect_stdout(sys.stderr):
            record, text = args.command(args)
        if record is None:  # it has said by itself what there was to say
            return 0
        return _say(_one_line_json(record) if as_json else text, 0)
    except InputError as error:
        return _fail(str(error), 2, as_json, debug)
    except KeyboardInterrupt as stop:
        if is_process:  # what the libraries still have to say at exit is of no use
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        return 143 if isinstance(stop, Terminated) else 130
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        why = f"{where}{error.strerror}" if error.strerror else f"{type(error).__name__}: {error}"
        hint = (
            "; free some space and start it again" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""
        )
        return _fail(f"{why}{hint}" + " (--debug shows where)" * (not debug), 1, as_json, debug)
    except MemoryError as error:
        return _fail(f"this machine has too little memory for that ({error}): ask for less", 1, as_json, debug)
    except Exception as error:
        own = type(error).__module__.startswith("astrolabe_lab")
        message = str(error) if own else f"{type(error).__name__}: {error}"
        return _fail(message if own or debug else f"{message} (--debug shows where)", 1, as_json, debug)


class Terminated(KeyboardInterrupt):
    """SIGTERM has come: ends whatever runs as Ctrl-C does."""


@contextlib.contextmanager
def _terminable():
    def end(*_):
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not the main thread, which alone gets signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _open_streams() -> None:
    """Make stdout and stderr usable whatever the shell closed, and whatever letters a path or message holds."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # also, the next file opened would become the file descriptor that is free
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
        elif name == "stdout" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _parse(argv):
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.command is _run and not any(word.startswith("-") for word in rest):
        args.parameters += rest  # argparse takes no key=value that follows an option
    elif rest:
        parser.error(f"unknown: {' '.join(rest)}")
    return args


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command; building it imports nothing heavy."""
    from astrolabe_lab.cli import bench as cli_bench
    from astrolabe_lab.cli import calibrate as cli_calibrate
    from astrolabe_lab.cli import capacity as cli_capacity
    from astrolabe_lab.cli import compare as cli_compare
    from astrolabe_lab.cli import feedback as cli_feedback
    from astrolabe_lab.cli import fidelity as cli_fidelity
    from astrolabe_lab.cli import length as cli_length
    from astrolabe_lab.cli import live as cli_live
    from astrolabe_lab.cli import replay as cli_replay
    from astrolabe_lab.cli import sidecar as cli_sidecar
    from astrolabe_lab.cli import simulate as cli_simulate
    from astrolabe_lab.cli import studies as cli_studies
    from astrolabe_lab.cli import sweep as cli_sweep
    from astrolabe_lab.cli import tag as cli_tag
    from astrolabe_lab.cli import trace as cli_trace

    parser = Parser(prog="astrolabe", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"astrolabe-lab {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name, command, summary, example, description="", to=commands):
        sub = to.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}. {description}".strip(),
            epilog=f"example:\n  {example}",
            formatter_class=Help,
            allow_abbrev=False,
        )
        sub.set_defaults(command=command)
        sub.add_argument("--json", action="store_true", help="print exactly one JSON object on stdout")
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return sub

    doctor = add("doctor", _doctor, "say what this machine can run, and what adds the rest", "astrolabe doctor")
    doctor.add_argument("--deep", action="store_true", help="also import vLLM in a process of its own (slow)")

    run = add(
        "run",
        _run,
        "run a notebook from top to bottom",
        "astrolabe run notebooks/03_dispatch_sweep.ipynb seeds=[0,1] instances=4",
        "Parameters are checked against the notebook's own; one line per cell goes to stderr.",
    )
    run.add_argument("notebook", metavar="NOTEBOOK", help="path of an .ipynb file")
    run.add_argument("parameters", metavar="key=value", nargs="*", help="replaces a default of the notebook")
    run.add_argument("--out", metavar="DIR", help="folder for its outputs (default: outputs/NAME)")
    run.add_argument("--timeout-s", type=float, default=1800.0, metavar="S", help="limit for a cell (default: 1800)")

    cli_fidelity.add_arguments(
        add(
            "fidelity",
            cli_fidelity.fidelity,
            cli_fidelity.SUMMARY,
            cli_fidelity.EXAMPLE,
            cli_fidelity.DETAILS,
        )
    )
    cli_trace.add_arguments(add("trace", None, cli_trace.SUMMARY, cli_trace.EXAMPLE, cli_trace.DETAILS))
    cli_simulate.add_arguments(
        add(
            "simulate",
            cli_simulate.simulate,
            cli_simulate.SUMMARY,
            cli_simulate.EXAMPLE,
            cli_simulate.DETAILS,
        )
    )

    length = commands.add_parser("length", help="make, judge and mend models of how long answers will be")
    lengths = length.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (cli_length, cli_feedback):
        for name, (summary, example, details) in module.COMMANDS.items():
            sub = add(name, getattr(module, name), summary, example, details, to=lengths)
            module.add_arguments(name, sub)

    cli_tag.add_arguments(add("tag", cli_tag.tag, cli_tag.SUMMARY, cli_tag.EXAMPLE, cli_tag.DETAILS))
    cli_sweep.add_arguments(add("sweep", cli_sweep.sweep, cli_sweep.SUMMARY, cli_sweep.EXAMPLE, cli_sweep.DETAILS))
    told = cli_studies.SUMMARY, cli_studies.EXAMPLE, cli_studies.DETAILS
    cli_studies.add_arguments(add("studies", cli_studies.studies, *told))

    for command, module in (("compare", cli_compare), ("capacity", cli_capacity)):
        module.add_arguments(add(command, getattr(module, command), module.SUMMARY, module.EXAMPLE, module.DETAILS))

    report = add(
        "report",
        _report,
        "gather executed notebooks into one offline HTML file",
        "astrolabe report outputs --out outputs/report.html",
    )
    report.add_argument("folder", metavar="DIR", help="folder that holds executed notebooks, at any depth")
    report.add_argument("--out", metavar="FILE", required=True, help="the HTML file to write")

    launch = add("launch", cli_live.launch, cli_live.LAUNCH_SUMMARY, cli_live.LAUNCH_EXAMPLE, cli_live.LAUNCH_DETAILS)
    cli_live.add_launch(launch)
    route = add("route", cli_live.route, cli_live.ROUTE_SUMMARY, cli_live.ROUTE_EXAMPLE, cli_live.ROUTE_DETAILS)
    cli_live.add_route(route)
    cli_bench.add_arguments(add("bench", cli_bench.bench, cli_bench.SUMMARY, cli_bench.EXAMPLE, cli_bench.DETAILS))
    for command, module in (("calibrate", cli_calibrate),):
        module.add_arguments(add(command, getattr(module, command), module.SUMMARY, module.EXAMPLE, module.DETAILS))

    for command, module in (("replay", cli_replay), ("sidecar", cli_sidecar)):
        module.add_arguments(add(command, getattr(module, command), module.SUMMARY, module.EXAMPLE, module.DETAILS))

    add("policies", _policies, "list the dispatch policies and their options", "astrolabe policies")
    add("presets", _presets, "list the presets: model, device, error and source", "astrolabe presets")
    return parser


# --- commands ---------------------------------------------------------------------------------------------


def _doctor(args):
    from astrolabe_lab import doctor

    findings = doctor.examine(deep=args.deep)
    return findings, doctor.describe(findings)


def _run(args):
    from astrolabe_lab.cli.values import output_folder
    from astrolabe_lab.run import run_notebook

    output_folder(args.out)
    executed = run_notebook(args.notebook, args.parameters, args.out, cell_timeout_s=args.timeout_s)
    return {"notebook": str(executed), "out_dir": str(executed.parent)}, f"wrote {executed}"


def _report(args):
    from astrolabe_lab.cli.values import output_file
    from astrolabe_lab.report import build, failures

    out = output_file(args.out, "--out", (".html",))
    build(args.folder, out)
    failed = {str(path): why for path, why in failures(args.folder).items()}
    for path, why in failed.items():
        print(f"astrolabe: {path} is of a failed run: {why}", file=sys.stderr, flush=True)
    size = out.stat().st_size
    record = {"report": str(out), "bytes": size, "failed": failed}
    return record, f"wrote {out} ({size / 1e6:.1f} MB, opens without a network)"


def _presets(args):
    from astrolabe_lab import cost

    found = {name: cost.preset(name) for name in cost.presets()}
    kept = {name: {"model": one.model, "device": one.device, "source": one.source} for name, one in found.items()}
    for name, one in found.items():
        kept[name]["error"] = one.error
    lines = []
    for name, about in kept.items():
        errors = (f"{what} {of['mean_abs_pct']:g} %" for what, of in about["error"].items() if "mean_abs_pct" in of)
        lines += [name, f"    {about['model']} on {about['device']}"]
        lines.append(f"    mean error of the fit: {', '.join(errors) or 'see --json'}")
    return {"presets": kept}, "\n".join(lines)


def _policies(args):
    import textwrap
    from dataclasses import fields

    from astrolabe_lab import policies
    from astrolabe_lab.disagg import routers

    def described(names):
        return {
            name: {
                "about": " ".join(kind.__doc__.strip().partition("\n\n")[0].split()),
                "options": {option.name: option.default for option in fields(kind) if option.repr},
                "needs_lengths": getattr(kind, "needs_lengths", False),
            }
            for name, kind in names.items()
        }

    found, pairs = described(policies.NAMES), described(routers.NAMES)
    lines = []
    for title, group in (("", found), ("with --pools, for prefill and decode engines:", pairs)):
        lines += ["", title] if title else []
        for name, policy in group.items():
            options = ",".join(f"{key}={value}" for key, value in policy["options"].items())
            lines.append(f"{name}:{options}" if options else name)
            lines += textwrap.wrap(policy["about"], 100, initial_indent="    ", subsequent_indent="    ")
    return {"policies": found, "pool_policies": pairs}, "\n".join(lines)


# --- output -----------------------------------------------------------------------------------------------


def _fail(message: str, code: int, as_json: bool, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exc()
    with contextlib.suppress(OSError):
        print(f"astrolabe: error: {message}", file=sys.stderr, flush=True)
    return _say(_one_line_json({"error": message}), code) if as_json else code


def _say(text: str, code: int) -> int:
    """Print on stdout and return ``code``; a reader that hung up, or a full disk, makes it 1."""
    try:
        print(text, flush=True)
        return code
    except OSError as error:
        # stdout is flushed once more at exit: give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"astrolabe: error: cannot print the result: {error.strerror}", file=sys.stderr)
        return code or 1


def _one_line_json(record: dict) -> str:
    return json.dumps(plain(record), allow_nan=False)


def plain(value):
    """The value in JSON's own types: NumPy scalars unwrapped, NaN and infinities as null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item") and callable(value.item):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
