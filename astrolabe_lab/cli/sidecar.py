"""``astrolabe sidecar``: one engine's Predictor as a service."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from astrolabe_lab.cli.calibrate import step_cost
from astrolabe_lab.cli.values import port, whole
from astrolabe_lab.errors import InputError

SUMMARY = "serve the Predictor of one engine, for routers that do not predict themselves"
EXAMPLE = "astrolabe sidecar --cluster /tmp/cluster --instance 0 --port 8101"
DETAILS = "Prints one JSON line with its URL when it serves, then stays until SIGTERM."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cluster", required=True, metavar="DIR", help="folder of a cluster that astrolabe launch started")
    add("--instance", required=True, type=whole(0), metavar="I", help="which of its engines")
    add("--preset", metavar="NAME|FILE", help="step cost of a cluster that tells none; or a calibration")
    add("--cost", default="", metavar="key=value,...", help="the same, or changes to the preset's")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on (default: 127.0.0.1)")
    add("--port", type=port, default=0, metavar="P", help="to listen on (default: a free one)")


def sidecar(args: argparse.Namespace) -> tuple[None, None]:
    from astrolabe_lab.engines.cluster_file import read_cluster
    from astrolabe_lab.length.serving import address, listen, serve
    from astrolabe_lab.predictor import Predictor, empty_status
    from astrolabe_lab.request import Request
    from astrolabe_lab.serve.instance import Instance
    from astrolabe_lab.serve.sidecar import application

    cluster = read_cluster(args.cluster)
    if args.instance >= len(cluster.engines):
        raise InputError(f"instance {args.instance}: the cluster has engines 0..{len(cluster.engines) - 1}")
    if cluster.cost is not None and (args.preset or args.cost):
        raise InputError(
            f"cluster {args.cluster!r} tells its step cost, which routers journal: leave --preset and --cost out"
        )
    cost = step_cost(args, cluster.cost)
    if cost is None:
        raise InputError(
            f"cluster {args.cluster!r} has no step cost to predict with: give --cost, or --preset with a calibration "
            "(astrolabe calibrate makes one, and notebook 22 fits a cost)"
        )
    engine = cluster.engines[args.instance]
    predictor = Predictor(cluster.config, cost)
    predictor.predict(empty_status(0.0, cluster.config), Request(-1, 0.0, 16, 16))  # compiles, before anybody waits
    instance = Instance(args.instance, engine["url"], cluster.config, predictor, Path(engine["status"]))
    with listen(args.host, args.port) as sock:
        ready = {"url": address(sock), "role": "sidecar", "instance": args.instance}
        app = application(instance, cluster.time_scale)
        serve(app, sock, lambda: print(json.dumps(ready), file=sys.__stdout__, flush=True))
    return None, None
