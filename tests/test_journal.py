"""A journal loses lines where the disk is full, never requests, and never half a line."""

import errno
import os
import subprocess
import sys
import textwrap
import time

import pytest

from astrolabe_lab.errors import InputError
from astrolabe_lab.serve import journal


def test_what_is_written_is_read_in_order(tmp_path):
    kept = journal.Journal(tmp_path / "deep" / "j")
    for rid in range(1000):
        kept.write({"event": "outcome", "rid": rid})
    kept.close()
    assert [e["rid"] for e in journal.read(tmp_path / "deep" / "j")] == list(range(1000))
    assert (kept.written, kept.lost) == (1000, 0)


def test_on_a_full_disk_lines_are_lost_counted_and_told_once_and_nobody_waits(tmp_path, monkeypatch, caplog):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    kept = journal.Journal(tmp_path / "j")
    for rid in range(100):
        kept.write({"event": "outcome", "rid": rid})
        time.sleep(0.01)
    kept.close()
    assert (kept.written, kept.lost) == (0, 100)
    assert "No space left" in kept.trouble
    first, last = caplog.messages
    assert "loses lines: No space left on device" in first and "100 lines lost, 0 written" in last


def test_lines_that_wait_past_the_bound_are_told_as_lost(tmp_path, caplog):
    kept = journal.Journal(tmp_path / "j", bound=1, waits=True)
    kept.write({"event": "outcome", "rid": 1})
    kept.write({"event": "outcome", "rid": 2})
    kept.start()
    kept.close()
    assert [e["rid"] for e in journal.read(tmp_path / "j")] == [1]
    assert "loses lines: 1 lines wait for the disk" in caplog.messages[0]


@pytest.mark.parametrize("place", ["/dev/full", "/dev/null", "pipe", ""])
def test_what_is_no_file_is_no_journal(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(InputError, match=f"journal {place!r} cannot be written: it is no regular file"):
        journal.Journal(place)


def test_a_journal_is_one_writer_s_until_it_ends(tmp_path):
    (tmp_path / "j").write_bytes(journal.line_of({"event": "x", "rid": 1}) + b"torn")
    first, second = (journal.Journal(tmp_path / "j", waits=True) for _ in range(2))
    second.write({"event": "x", "rid": 2})
    second.close()
    assert (tmp_path / "j").read_bytes().endswith(b"torn")  # it never started
    first.start()
    with pytest.raises(InputError, match="is being written by another router"):
        journal.Journal(tmp_path / "j")
    first.close()
    third = journal.Journal(tmp_path / "j")
    third.write({"event": "x", "rid": 3})
    third.close()
    assert [e["rid"] for e in journal.read(tmp_path / "j")] == [1, 3]


def test_a_disk_that_fills_up_and_is_freed_leaves_whole_lines_only(tmp_path):
    """A limit on the file's size stands in for the disk's: the write in which it is met is a partial one."""
    story = f"""
        import resource, time
        from astrolabe_lab.serve.journal import Journal
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        kept = Journal({str(tmp_path / "j")!r})
        kept.write({{"event": "x", "rid": 0, "pad": "x" * 100}})
        time.sleep(0.5)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))
        for rid in range(1, 50):
            kept.write({{"event": "x", "rid": rid, "pad": "x" * 100}})
        time.sleep(0.8)
        assert kept.lost > 0 and "large" in kept.trouble, (kept.lost, kept.trouble)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        kept.write({{"event": "x", "rid": 50, "pad": "x" * 100}})
        kept.close()
        print(kept.written, kept.lost)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(story)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    written, lost = map(int, done.stdout.split())
    rids = [e["rid"] for e in journal.read(tmp_path / "j")]
    assert len(rids) == written and written + lost == 51
    assert rids[0] == 0 and rids[-1] == 50


def test_a_torn_last_line_is_cut_by_the_next_writer_and_said_to_the_reader(tmp_path):
    path = tmp_path / "j"
    path.write_bytes(journal.line_of({"event": "x", "rid": 1}) + b'{"version":1,"rid":2,"pa')
    told = []
    assert [e["rid"] for e in journal.read(path, torn=told.append)] == [1]
    assert told == [2]
    kept = journal.Journal(path)
    kept.write({"event": "x", "rid": 3})
    kept.close()
    assert [e["rid"] for e in journal.read(path)] == [1, 3]


def test_an_entry_that_is_no_json_costs_itself_alone(tmp_path):
    kept = journal.Journal(tmp_path / "j")
    kept.write({"event": "x", "rid": 1})
    kept.write({"event": "x", "rid": 2, "what": object()})
    kept.write({"event": "x", "rid": 3})
    kept.close()
    assert [e["rid"] for e in journal.read(tmp_path / "j")] == [1, 3]
    assert kept.lost == 1 and "no place in a journal" in kept.trouble


def test_a_journal_that_cannot_be_opened_or_read_says_so(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        journal.Journal(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        list(journal.read(tmp_path / "nothing"))
    (tmp_path / "j").write_text('{"version": 2}\n')
    with pytest.raises(InputError, match="line 1: not an entry of version 1"):
        list(journal.read(tmp_path / "j"))
    (tmp_path / "j").write_text('{"version": 1}\n')
    with pytest.raises(InputError, match="line 1: does not say of which event it is"):
        list(journal.read(tmp_path / "j"))
    (tmp_path / "j").write_text("[" * 100_000 + "\n")
    with pytest.raises(InputError, match="line 1: not JSON"):
        list(journal.read(tmp_path / "j"))
