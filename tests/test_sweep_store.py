"""The folder of a sweep: what it keeps, what it takes up again, what it refuses to mix."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pandas as pd
import pytest

from astrolabe_lab import record, sweep
from astrolabe_lab.errors import InputError
from astrolabe_lab.sweep import identity, store
from astrolabe_lab.sweep.crew import CrewError

ROOT = Path(__file__).resolve().parent.parent
BASE = {"trace": "sharegpt_like", "requests": 40, "instances": 2}
GRID = {"defaults": BASE, "grid": {"policy": ["random", "least_loaded"], "qps": [4, 5], "seed": [0, 1]}}


SLOW = {"kind": "slowdown", "instance": 0, "start_s": 0, "end_s": 1, "factor": 2}


class Counts:
    """The first instance; each run that asks it leaves a file."""

    def __init__(self, folder):
        self.folder = str(folder)
        self.new = True

    def choose(self, request, cluster, rng):
        if self.new:
            self.new = False
            Path(self.folder, f"run.{time.time_ns()}").touch()
        return 0


def run(grid, out=None, **options):
    return sweep.run(grid, out, **{"workers": 1, "progress": False} | options)


def measured(frame):
    return frame.drop(columns=["wall_s", "code", "run"], errors="ignore")


def lines(folder):
    return [json.loads(line) for line in (folder / store.RUNS).read_text().splitlines()]


def made(grid, out, tmp_path, **options):
    """How many runs a call made."""
    before = len(lines(out)) if (out / store.RUNS).exists() else 0
    run(grid, out, **options)
    return len(lines(out)) - before


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def test_the_kept_rows_are_those_of_a_sweep_that_keeps_nothing(out):
    kept = run(GRID, out)
    pd.testing.assert_frame_equal(measured(kept), measured(run(GRID)))
    pd.testing.assert_frame_equal(sweep.read(out), kept, check_dtype=False)
    noted = record.read(out)
    assert noted["status"] == "ok" and noted["runs"] == {"all": 8, "made": 8, "made_before": 0, "failed": 0}
    assert noted["parameters"] == GRID and noted["seed"] == [0, 1] and noted["rows"] == {"summary.parquet": 8}
    assert noted["versions"]["numpy"] and noted["hardware"]["cores"] and "commit" in noted


def test_the_same_again_computes_nothing_and_gives_the_same_rows(out, monkeypatch):
    first = run(GRID, out)
    monkeypatch.setattr("astrolabe_lab.sweep.crew.each", lambda *_, **__: pytest.fail("a run was made"))
    again = run(GRID, out)
    pd.testing.assert_frame_equal(first, again)  # wall_s too: it is the old one's
    assert record.read(out)["runs"]["made_before"] == 8


def test_a_grid_that_grows_makes_only_what_is_new_and_one_that_shrinks_shows_only_its_own(out, tmp_path):
    assert made(GRID, out, tmp_path) == 8
    wider = GRID | {"grid": GRID["grid"] | {"qps": [4, 5, 6]}}
    assert made(wider, out, tmp_path) == 4
    narrow = GRID | {"grid": GRID["grid"] | {"policy": ["random"]}}
    assert made(narrow, out, tmp_path) == 0
    assert set(sweep.read(out).policy) == {"random"}
    pd.testing.assert_frame_equal(measured(run(wider, out)), measured(run(wider)))


def test_other_ways_to_say_the_same_are_the_same_runs(out, tmp_path):
    run({"defaults": BASE | {"engine": "max_num_seqs=24"}, "grid": {"policy": ["random"], "qps": [4.0]}}, out)
    same = {"engine": {"max_num_seqs": 24}, "label": "R"}
    same = {"defaults": BASE | same, "cells": [{"policy": "random", "qps": 4}]}
    assert made(same, out, tmp_path) == 0
    assert sweep.read(out).policy.tolist() == ["R"]


def test_a_call_in_python_and_a_grid_share_their_runs(out, tmp_path):
    run(GRID, out)
    before = len(lines(out))
    sweep.sweep("sharegpt_like", ["random"], [4], [1], requests=40, instances=2, out=out, workers=1, progress=False)
    assert len(lines(out)) == before


@pytest.mark.parametrize(
    "change",
    [
        {"requests": 41}, {"instances": 3}, {"lengths": "noisy:0.5"}, {"engine.max_num_seqs": 24},
        {"cost.host_s": 0.001}, {"delays": "paper"}, {"latency_noise.common": 0.1}, {"extension_tokens": 11},
        {"arrivals": "constant"}, {"faults": [SLOW]}, {"predictor_cost.base_s": 0.1},
        {"seed": 7}, {"qps": 4.5}, {"policy": "astrolabe:k=1"}, {"trace": "family:chat"},
    ],
    ids=lambda change: "".join(change),
)  # fmt: skip
def test_every_setting_that_can_change_a_result_makes_another_run(out, tmp_path, change):
    one = {"policy": "astrolabe:k=2", "qps": 4, "seed": 0}
    run({"defaults": BASE, "cells": [one]}, out)
    assert made({"defaults": BASE, "cells": [one | change]}, out, tmp_path) == 1


# --- what ends a sweep ------------------------------------------------------------------------------------


def test_an_interrupted_sweep_keeps_what_it_has_says_how_to_go_on_and_does(out, capsys):
    def stop(done, total, row):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(GRID, out, progress=stop)
    assert "sweep: ended with 3 of 8 runs kept in" in capsys.readouterr().err
    noted = record.read(out)
    assert noted["status"] == "interrupted" and noted["runs"]["made"] == 3 and len(sweep.read(out)) == 3
    whole = run(GRID, out)
    assert record.read(out)["runs"] == {"all": 8, "made": 5, "made_before": 3, "failed": 0}
    pd.testing.assert_frame_equal(measured(whole), measured(run(GRID)))


CLI_GRID = "defaults: {trace: sharegpt_like, requests: 20000, instances: 8, delays: paper}\n" + (
    "grid: {policy: [random], qps: [20], seed: {from: 0, to: 40, step: 1}}\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_the_command_goes_on_after_ctrl_c_and_after_it_was_killed(tmp_path, out, sign):
    (tmp_path / "grid.yaml").write_text(CLI_GRID)
    words = [sys.executable, "-m", "astrolabe_lab.cli", "sweep", tmp_path / "grid.yaml", "--out", out, "--workers=2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    end = time.monotonic() + 200
    while not ((out / store.RUNS).exists() and len(lines(out)) >= 2):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    os.killpg(process.pid, sign) if sign == signal.SIGINT else process.send_signal(sign)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == (130 if sign == signal.SIGINT else -9)
    assert ("the same again goes on from there" in told) == (sign == signal.SIGINT)
    kept = len(lines(out))
    few = CLI_GRID.replace("to: 40", f"to: {kept}")
    (tmp_path / "grid.yaml").write_text(few)
    done = subprocess.run([*words, "--json"], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["runs"] == {"all": kept + 1, "made": told["runs"]["made"], "made_before": told["runs"]["made_before"],
                            "failed": 0}  # fmt: skip
    assert told["runs"]["made_before"] >= kept - 1  # at most the one torn by the kill is made again
    assert len(sweep.read(out)) == kept + 1


class Dies:
    """Ends its process whenever it is asked, or only the first time."""

    def __init__(self, once=None):
        self.once = once

    def choose(self, request, cluster, rng):
        if self.once is None or not Path(self.once).exists():
            if self.once:
                Path(self.once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 0


def test_a_run_whose_worker_was_killed_is_made_again(out, tmp_path):
    grid = {"defaults": BASE | {"qps": 4}, "cells": [{"policy": Dies(str(tmp_path / "died"))}, {"policy": "random"}]}
    rows = run(grid, out, workers=2)
    assert (tmp_path / "died").exists() and rows.policy.tolist() == ["Dies", "random"]


def test_a_run_that_keeps_killing_its_worker_is_named_with_its_cause_and_the_others_are_made(out):
    policies = [{"policy": Dies()}, *({"policy": "random", "seed": seed} for seed in range(4))]
    with pytest.raises(CrewError, match="^Dies at 4 QPS, seed 0: .*killed by SIGKILL.*4 of 5 runs are in"):
        run({"defaults": BASE | {"qps": 4}, "cells": policies}, out, workers=2, retries=1)
    noted = record.read(out)
    assert noted["status"] == "failed" and noted["runs"] == {"all": 5, "made": 4, "made_before": 0, "failed": 1}
    assert "SIGKILL" in noted["failed"]["Dies at 4 QPS, seed 0"]
    assert len(sweep.read(out)) == 4


class Breaks:
    def choose(self, request, cluster, rng):
        raise ZeroDivisionError("in choose")


def test_a_policy_that_breaks_is_named_the_others_are_made_and_only_it_is_tried_again(out, tmp_path):
    grid = {"defaults": BASE | {"qps": 4}, "cells": [{"policy": Breaks()}, {"policy": "random"}]}
    for _ in range(2):
        with pytest.raises(CrewError, match="Breaks at 4 QPS, seed 0: ZeroDivisionError: in choose"):
            run(grid, out)
    assert len(lines(out)) == 1 and record.read(out)["runs"]["made_before"] == 1


# --- damage -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_line_that_was_cut_short_is_named_and_its_run_made_again(out, capsys, cut):
    whole = run(GRID, out)
    path = out / store.RUNS
    path.write_bytes(path.read_bytes()[:-cut])
    again = run(GRID, out)
    told = capsys.readouterr().err
    assert ("line 8 is damaged" in told) == (cut > 1)
    pd.testing.assert_frame_equal(measured(again), measured(whole))
    run(GRID, out)  # the new line does not hang on to the torn one
    assert record.read(out)["runs"]["made_before"] == 8


@pytest.mark.parametrize("junk", [b"\x00" * 50, b"{}", b"[1, 2]", b'{"key": 3}', b"\xff\xfe", b"[" * 5000])
def test_whatever_a_line_holds_it_is_never_taken_for_a_result(out, capsys, junk):
    run(GRID, out)
    path = out / store.RUNS
    kept = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*kept[:3], junk + b"\n", *kept[4:]]))
    run(GRID, out)
    assert "line 4 is damaged" in capsys.readouterr().err
    assert record.read(out)["runs"]["made"] == 1


def test_a_full_disk_ends_the_sweep_with_what_to_do_and_tears_nothing(out, monkeypatch):
    real = store.Store._append
    count = 0

    def full(self, text):
        nonlocal count
        count += 1
        if count == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, text)

    monkeypatch.setattr(store.Store, "_append", full)
    with pytest.raises(sweep.StoreError, match="cannot write: No space left on device. The runs made so far are kept"):
        run(GRID, out)
    monkeypatch.undo()
    assert len(lines(out)) == 3
    run(GRID, out)
    assert record.read(out)["runs"]["made_before"] == 3


def test_a_write_that_the_disk_takes_only_in_part_is_taken_back(out):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    run(GRID, out)
    with store.Store(out) as held:
        before = (out / store.RUNS).read_bytes()

        class Short:
            def seek(self, *where):
                return len(before)

            def write(self, text):
                (out / store.RUNS).write_bytes(before + text[:10])
                return 10

            def truncate(self, size):
                os.truncate(out / store.RUNS, size)

            def close(self):
                pass

        held._file = Short()
        with pytest.raises(OSError, match="No space left"):
            held._append("{}" * 20)
    assert (out / store.RUNS).read_bytes() == before


def test_infinite_and_missing_numbers_come_back_as_they_were(out):
    with store.Store(out) as held:
        held._contents["k"] = {"key": "k", "settings": "s", "trace": "t", "preset": "p"}
        held.add("k", {"a": float("inf"), "b": float("nan"), "c": -float("inf"), "d": 1, "e": "x"})
    with store.Store(out) as held:
        row = held.row("k")
    assert row["a"] == float("inf") and row["b"] != row["b"] and row["c"] == -float("inf")
    assert (row["d"], row["e"]) == (1, "x")


# --- what is not mixed ------------------------------------------------------------------------------------


def test_runs_of_other_code_are_refused_unless_asked_for_and_then_marked(out, monkeypatch):
    run(GRID, out)
    old = identity.code()
    monkeypatch.setattr(identity, "code", lambda: "feedfacefeedface")
    with pytest.raises(InputError, match=f"8 of code {old} .*not mixed.*--mix"):
        run(GRID, out)
    wider = GRID | {"grid": GRID["grid"] | {"qps": [4, 5, 6]}}
    rows = run(wider, out, mix=True)
    assert set(rows.code[rows.qps == 6]) == {"feedfacefeedface"} and set(rows.code[rows.qps < 6]) == {old}
    assert record.read(out)["codes"] == sorted([old, "feedfacefeedface"])
    monkeypatch.undo()
    with pytest.raises(InputError, match="4 of code feedfacefeedface"):
        run(wider, out)


def test_a_trace_that_has_changed_under_its_name_is_refused(out, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("prompt_tokens,output_tokens\n" + "10,20\n" * 20)
    grid = {"defaults": {"trace": str(path), "instances": 1}, "cells": [{"policy": "random", "qps": 4}]}
    run(grid, out)
    path.write_text("prompt_tokens,output_tokens\n" + "10,21\n" * 20)
    with pytest.raises(InputError, match="the contents of its trace have changed since"):
        run(grid, out)
    assert made(grid, out, tmp_path, mix=True) == 1
    path.write_text("# no\nprompt_tokens,output_tokens\n".replace("# no\n", "") + "10,20\n" * 20)
    assert made(grid, out, tmp_path, mix=True) == 0  # the first contents again


def test_a_preset_that_has_changed_under_its_name_is_refused(out, tmp_path):
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"cost": {"base_s": 0.01}}))
    grid = {"defaults": BASE | {"preset": str(path)}, "cells": [{"policy": "random", "qps": 4}]}
    run(grid, out)
    path.write_text(json.dumps({"cost": {"base_s": 0.02}}))
    with pytest.raises(InputError, match="the contents of its preset have changed since"):
        run(grid, out)


def test_a_policy_of_ones_own_is_another_when_its_code_or_what_it_holds_is(out, tmp_path):
    def policy(text, **names):
        exec(text, names)
        return names["Own"]()

    source = "class Own:\n    limit = 1\n    def choose(self, request, cluster, rng):\n        return helper(0)\n"
    versions = [
        policy("def helper(x):\n    return x\n" + source),
        policy("def helper(x):\n    return x + 0\n" + source),
        policy("def helper(x):\n    return x\n" + source.replace("limit = 1", "limit = 2")),
        policy("shift = 0\ndef helper(x):\n    return x + shift\n" + source),
        policy("shift = 1 - 1\ndef helper(x):\n    return x + shift * 2\n" + source),
    ]
    prints = [identity.of_value(one) for one in versions]
    assert len(set(prints)) == len(prints)
    assert identity.of_value(policy("def helper(x):\n    return x\n" + source)) == prints[0]
    assert identity.of_value(Counts("a")) != identity.of_value(Counts("b")) == identity.of_value(Counts("b"))


def test_a_policy_of_ones_own_is_taken_up_again_and_not_after_a_change(out, tmp_path):
    grid = {"defaults": BASE | {"qps": 4}, "cells": [{"policy": Counts(tmp_path)}]}
    run(grid, out)
    run(grid, out)
    asked = list(tmp_path.glob("run.*"))
    assert len(asked) == 1


def test_what_cannot_be_told_apart_is_not_stored(out):
    class Holds:
        def __init__(self):
            self.lock = threading.Lock()

        def choose(self, request, cluster, rng):
            return 0

    grid = {"defaults": BASE | {"qps": 4}, "cells": [{"policy": Holds()}]}
    with pytest.raises(InputError, match="cannot be told from others of its kind"):
        run(grid, out)


def test_the_fingerprint_of_the_code_covers_every_module_that_a_run_loads():
    script = (
        "import sys\nfrom astrolabe_lab import sweep\n"
        "shared = {'trace': 'family:chat', 'requests': 5, 'qps': 2, 'delays': 'paper'}\n"
        "grid = {'defaults': shared, 'cells': [{'policy': 'astrolabe'}]}\n"
        "sweep.run(grid, workers=1, progress=False)\n"
        "print(*(name for name in sys.modules if name.startswith('astrolabe_lab.')))"
    )
    words, environment = [sys.executable, "-c", script], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    tops = {name.split(".")[1] for name in done.stdout.split()}
    assert {"sim", "measure", "policies", "sweep"} <= tops
    assert tops & set(identity.APART) <= {"record"}  # it is asked whether somebody watches, and for the commit


# --- the folder -------------------------------------------------------------------------------------------


def test_two_sweeps_do_not_share_a_folder_at_once(out):
    script = "import sys, time\nfrom astrolabe_lab.sweep.store import Store\nfrom astrolabe_lab import record\n" + (
        "s = Store(sys.argv[1])\ns.note(new=True, status='running', sweep={}, process='process 12 on here')\n"
        "print('held', flush=True)\ntime.sleep(60)\n"
    )
    words, environment = [sys.executable, "-c", script, out], os.environ | {"PYTHONPATH": str(ROOT)}
    holder = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(InputError, match=r"is in use by another sweep \(process 12 on here\)"):
        run(GRID, out)
    holder.kill()
    holder.wait()
    assert len(run(GRID, out)) == 8  # the lock of a dead process holds nobody up


def test_a_folder_that_holds_something_else_is_left_alone(out):
    out.mkdir()
    (out / "run.json").write_text(json.dumps({"notebook": "00_tour.ipynb", "status": "ok"}))
    with pytest.raises(InputError, match="holds the results of 00_tour.ipynb"):
        run(GRID, out)
    assert json.loads((out / "run.json").read_text())["notebook"] == "00_tour.ipynb"


def test_the_folder_must_be_one(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot make this folder"):
        run(GRID, tmp_path / "file")


def test_the_requests_of_every_run_are_kept_when_asked_and_read_back_by_column(out):
    run(GRID, out)
    rows = run(GRID, out, keep="requests")  # made again: their requests were not kept
    assert record.read(out)["runs"]["made"] == 8
    requests = sweep.read_requests(out, policy="random", qps=[5])
    assert len(requests) == 80 and set(requests.policy) == {"random"} and set(requests.qps) == {5}
    one = rows[(rows.policy == "random") & (rows.qps == 5) & (rows.seed == 1)].iloc[0]
    assert requests[requests.seed == 1].ttft_s.mean() == pytest.approx(one.ttft_mean_s)
    (out / store.REQUESTS / f"{one.run}.parquet").unlink()
    run(GRID, out, keep="requests")
    assert record.read(out)["runs"]["made"] == 1
    with pytest.raises(InputError, match="no column 'polcy'"):
        sweep.read_requests(out, polcy="random")
    with pytest.raises(InputError, match="no run has policy='none'"):
        sweep.read_requests(out, policy="none")


def test_reading_what_is_not_there_says_what_to_do(tmp_path):
    with pytest.raises(InputError, match="run a sweep with out="):
        sweep.read(tmp_path)
    with pytest.raises(InputError, match="keep='requests' needs a folder"):
        run(GRID, keep="requests")
