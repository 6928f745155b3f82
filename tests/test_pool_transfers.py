"""Emulated hand-offs without vLLM: the shared link, and the desk where blocks are kept."""

import math
import time

import pytest

from astrolabe_lab.calibrate import Transfer
from astrolabe_lab.disagg import settings
from astrolabe_lab.engines.engine_process import free_port
from astrolabe_lab.errors import InputError
from astrolabe_lab.serve.pools.desk import Caller, Desk
from astrolabe_lab.serve.pools.launch import HAND_OFF, Handover
from astrolabe_lab.serve.pools.link import Link

LATENCY_S, BLOCK_S = 0.5, 0.01


def ends(starts, until_s=100.0, every_s=None):
    """{name: when it ended} of transfers {name: (start, blocks)}, polled every so often."""
    link, found, now = Link(Transfer(LATENCY_S, BLOCK_S)), {}, 0.0
    due = sorted(starts.items(), key=lambda item: item[1][0])
    while now < until_s and len(found) < len(starts):
        while due and due[0][1][0] <= now:
            name, (at, blocks) = due.pop(0)
            link.start(name, blocks, at)
        for name in link.poll(now):
            found[name] = now
        now = round(now + (every_s or 0.001), 9)
    return found


def test_one_transfer_takes_its_latency_and_its_blocks():
    assert ends({"a": (0.0, 100)})["a"] == pytest.approx(LATENCY_S + 100 * BLOCK_S, abs=2e-3)


def test_transfers_at_once_share_the_bandwidth_and_none_is_lost():
    together = ends({"a": (0.0, 100), "b": (0.0, 100)})
    assert together["a"] == together["b"] == pytest.approx(LATENCY_S + 200 * BLOCK_S, abs=3e-3)
    short = ends({"a": (0.0, 100), "b": (0.0, 10)})
    assert short["b"] == pytest.approx(LATENCY_S + 20 * BLOCK_S, abs=3e-3)
    assert short["a"] == pytest.approx(LATENCY_S + 110 * BLOCK_S, abs=3e-3)  # work is conserved


def test_a_link_that_is_asked_rarely_is_late_by_no_more_than_that():
    for every_s in (0.001, 0.3):
        found = ends({"a": (0.0, 50), "b": (0.2, 50), "c": (5.0, 1)}, every_s=every_s)
        exact = {"a": 0.5 + 0.2 + 0.3 * 2, "b": 0.5 + 0.2 + 0.3 * 2 + 0.2, "c": 5.51}
        for name, at in exact.items():
            assert at - 1e-6 <= found[name] <= at + every_s + 3e-3


def test_a_desk_keeps_blocks_until_they_are_pulled_or_expire():
    desk, port, caller = Desk(), free_port(), Caller()
    desk.open(port)
    now = time.monotonic()
    desk.keep("pulled", now + 60)
    desk.keep("expired", now - 1)
    caller.ask(port, "pulled", 1)
    caller.ask(port, "never kept", 2)
    caller.ask(free_port(), "pulled", 3)  # nobody is there: its engine has died
    said = {}
    while len(said) < 3:
        said |= dict(caller.answers())
    assert said == {1: True, 2: False, 3: False}
    caller.done(port, "pulled")
    gone = []
    while len(gone) < 2:
        gone += desk.gone()
    assert sorted(gone) == [("expired", False), ("pulled", True)]
    assert len(desk) == 0 and desk.gone() == []
    caller.close()


BAD = {
    "base_s": (math.nan, math.inf, -1, "0.1", True),
    "per_block_s": (math.nan, math.inf, -1),
    "expiry_s": (math.nan, math.inf, 0.0, -1),
    "fail_share": (math.nan, math.inf, -0.1, 2),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_hand_off_that_no_cluster_file_could_tell_is_refused_before_engines_start(name, value):
    told = dict(zip(HAND_OFF, (0.0, 0.0, 1.0, 0.0), strict=True)) | {name: value}
    base_s, per_block_s, *others = told.values()
    with pytest.raises(InputError, match=rf"hand-off: {name}={value!r} must be"):
        Handover(Transfer(base_s, per_block_s), *others)
    if type(value) in (int, float):
        with pytest.raises(InputError, match=rf"hand-off: {name}={float(value)!r} must be"):
            Handover.parse(f"{name}={value}")


def test_a_hand_off_may_take_no_time_and_always_fail():
    assert Handover.parse("base_s=0,per_block_s=0,fail_share=1").to_dict()["fail_share"] == 1


@pytest.mark.parametrize("read", [Handover.parse, settings.hand_off])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("base_s=0.1,base_s=0.2", "base_s is given twice"),
        ("base=0.1", "unknown key 'base'; allowed: base_s, "),
        ("base_s", "'base_s' is not key=value"),
        ("base_s=soon", "base_s=soon must be a number"),
    ],
)
def test_a_hand_off_is_read_alike_by_launch_and_by_simulate(read, text, told):
    with pytest.raises(InputError, match=f"hand-off: {told}"):
        read(text)
