"""The published status: what is read is what was written, whole, whoever reads when."""

import multiprocessing
import time

import numpy as np
import pytest
from published_engines import publish

from astrolabe_lab.errors import InputError
from astrolabe_lab.serve.published import StatusReader, StatusWriter
from astrolabe_lab.sim.status import HEADER, ROW


def write_for(path, seconds):
    """Statuses in which every number says which one it is."""
    writer = StatusWriter(path)
    j, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        j += 1
        n = j % 97
        header, rows = np.zeros(1, HEADER), np.zeros(n, ROW)
        header["taken_s"], header["n_rows"], header["n_running"], header["free_blocks"] = j, n, n, j
        rows["rid"] = rows["prompt"] = rows["computed"] = rows["predicted"] = j
        writer.write(header, rows)


def test_no_read_beside_a_writer_in_another_process_is_torn(tmp_path):
    path = tmp_path / "status"
    writer = multiprocessing.get_context("spawn").Process(target=write_for, args=(path, 3.0))
    writer.start()
    try:
        while not path.exists():
            time.sleep(0.01)
        reader = StatusReader(path)
        reads, seen = 0, set()
        while writer.is_alive():
            status = reader.read()
            which = int(status.taken_s)
            assert len(status.rows) == which % 97
            for name in ("rid", "prompt", "computed", "predicted"):
                assert (status.rows[name] == which).all(), name
            assert status.free_blocks == which
            reads += 1
            seen.add(which)
        assert reads > 100
        assert len(seen) > 20
    finally:
        writer.kill()
        writer.join()


def test_a_restarted_engine_is_told_from_its_predecessor(tmp_path):
    path = tmp_path / "status"
    publish(StatusWriter(path), 1.0)
    first = StatusReader(path)
    assert first.current()
    publish(StatusWriter(path), 2.0)
    assert not first.current()
    assert first.read().taken_s == 1.0
    second = StatusReader(path)
    assert second.read().taken_s == 2.0
    assert second.epoch != first.epoch


def test_a_status_whose_engine_died_while_writing_is_refused_not_returned(tmp_path):
    path = tmp_path / "status"
    writer = StatusWriter(path)
    publish(writer, 1.0, [(1, 32, 4, 64)])
    reader = StatusReader(path)
    writer._control["sequence"] += 1
    with pytest.raises(TimeoutError, match="dead or stuck"):
        reader.read()


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 5000])
def test_a_file_that_is_no_status_is_named(tmp_path, content):
    path = tmp_path / "status"
    path.write_bytes(content)
    with pytest.raises(InputError, match="status of an engine"):
        StatusReader(path)


def test_requests_past_the_capacity_are_counted_not_written(tmp_path):
    writer = StatusWriter(tmp_path / "status", capacity=2)
    publish(writer, 1.0, [(j, 16, 1, 9) for j in range(5)])
    status = StatusReader(tmp_path / "status").read()
    assert len(status.rows) == 2
    assert int(status.header["n_rows"][0]) == 5
