"""Status files of engines that do not run: for tests of what reads them."""

import numpy as np

from astrolabe_lab.sim.state import RUNNING
from astrolabe_lab.sim.status import HEADER, ROW
from astrolabe_lab.status.published import StatusWriter


def publish(writer, taken_s, running=(), free_blocks=1055):
    """Publish that requests of (rid, prompt, generated, predicted) run."""
    header = np.zeros(1, HEADER)
    header["taken_s"], header["step_started_s"], header["free_blocks"] = taken_s, np.nan, free_blocks
    rows = np.zeros(len(running), ROW)
    for row, (rid, prompt, generated, predicted) in zip(rows, running, strict=True):
        row["rid"], row["state"], row["prompt"], row["generated"] = rid, RUNNING, prompt, generated
        row["computed"], row["predicted"] = prompt + generated - 1, predicted
        row["blocks"] = -(-(prompt + generated) // 16)
        header["free_blocks"] -= row["blocks"]
    header["n_running"] = header["n_rows"] = len(running)
    writer.write(header, rows)


def writer(path):
    return StatusWriter(path)
