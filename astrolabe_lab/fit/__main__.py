"""`python -m astrolabe_lab.fit DATA_DIR [--preset NAME] [--out DIR]`: refit the presets from public timings."""

import argparse
import json
import sys
from pathlib import Path

from astrolabe_lab.errors import InputError
from astrolabe_lab.fit.data import Timings
from astrolabe_lab.fit.presets import PRESETS
from astrolabe_lab.record import write_whole


def main(argv=None):
    """Print the presets as JSON, one object each, or write DIR/NAME.json; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m astrolabe_lab.fit", description=__doc__)
    parser.add_argument("data", metavar="DATA_DIR", help="the folder that holds astrolabe/ and vidur/")
    parser.add_argument("--preset", action="append", choices=PRESETS, help="only this one (may be given again)")
    parser.add_argument("--out", metavar="DIR", help="write DIR/NAME.json instead of printing")
    args = parser.parse_args(argv)
    timings = Timings(args.data)
    try:
        if args.out and not Path(args.out).is_dir():
            raise InputError(f"--out {args.out} is no folder; create it first")
        for name in args.preset or PRESETS:
            text = json.dumps(PRESETS[name](timings).to_dict(), indent=2)
            if args.out:
                write_whole(Path(args.out) / f"{name}.json", text + "\n")
            else:
                print(text)
    except InputError as error:
        print(f"astrolabe: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
