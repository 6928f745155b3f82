"""A journal of pools that is damaged: one error that names the line, or what is left of it."""

import pytest

from astrolabe_lab import InputError
from astrolabe_lab.cli import main
from astrolabe_lab.disagg.constants import PAPER
from astrolabe_lab.disagg.view import IN_FLIGHT, POLLED
from astrolabe_lab.serve import journal
from astrolabe_lab.serve.pools.records import rows

ENGINE = dict.fromkeys(POLLED.names, 0) | {"capacity_tokens": 60_000, "taken_s": None}
FLYING = dict.fromkeys(IN_FLIGHT.names, 0) | {"prefilled_s": None, "first_token_s": None}
POOLS = {"event": "pools", "seed": 0, "constants": PAPER.to_dict()}
PAIR = {
    "event": "pair", "rid": 7, "time_s": 1.0, "arrived_s": 0.5, "attempt": 0, "prompt_tokens": 20,
    "predicted_tokens": 9, "slo": "tight", "prefill": [ENGINE], "decode": [ENGINE, ENGINE | {"instance": 1}],
    "in_flight": [FLYING], "prefill_instance": 0, "decode_instance": 1,
}  # fmt: skip
GONE = object()


@pytest.fixture
def told(tmp_path, capsys):
    """Gives (exit code, what is said) of a replay of these entries."""

    def replayed(*entries, end=b""):
        (tmp_path / "j").write_bytes(b"".join(map(journal.line_of, entries)) + end)
        code = main(["replay", str(tmp_path / "j"), "--policy", "random"])
        said = capsys.readouterr()
        return code, said.out + said.err

    return replayed


def with_(entry, name, value):
    return {k: v for k, v in (entry | {name: value}).items() if v is not GONE}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, GONE) for name in ("decode", "in_flight", "rid", "slo", "attempt", "decode_instance", "time_s")]
    + [("decode", []), ("decode", 5), ("decode", [{}]), ("decode", [5]), ("decode", [ENGINE | {"running": "x"}])]
    + [("decode", [ENGINE | {"running": 2**70}]), ("in_flight", [{"rid": "x"}]), ("time_s", None), ("time_s", 1e400)]
    + [("in_flight", [FLYING | {"sent_s": "x"}]), ("slo", "zzz"), ("slo", []), ("rid", None), ("rid", "x")]
    + [("prompt_tokens", bad) for bad in (-5, 0, 1e400, 2.5, "x", True, 2**70)]
    + [("attempt", bad) for bad in (-1, 0.5, "x")],
)
def test_a_damaged_pair_is_named_by_its_line(told, name, value):
    code, said = told(POOLS, PAIR, with_(PAIR, name, value))
    assert code == 2 and "line 3: its pair is damaged (" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("name", ["seed", "constants"])
def test_a_damaged_begin_is_named_by_its_line(told, name):
    for value in (GONE, "x", 5.5):
        code, said = told(with_(POOLS, name, value), PAIR)
        assert code == 2 and "line 1: its pools is damaged (" in said


def test_an_entry_without_its_event_is_named_by_its_line(told):
    for event in (GONE, ["pools"], None):
        code, said = told(POOLS, with_(PAIR, "event", event), PAIR)
        assert code == 2 and "line 2: does not say of which event it is" in said


def test_a_journal_cut_at_its_begin_says_so(told):
    code, said = told(PAIR)
    assert code == 2 and "line 1: its pair is damaged (no pools line comes before it" in said


def test_a_torn_last_line_is_told(told):
    code, said = told(POOLS, PAIR, end=journal.line_of(PAIR)[:60])
    assert code == 0 and "1 decisions over pools" in said and "line 3 is torn" in said


def test_a_journal_of_whole_engines_and_of_pools_is_replayed_as_neither(told):
    decision = {"event": "decision", "rid": 1}
    code, said = told(POOLS, PAIR, decision)
    assert code == 2 and "line 3: decisions of whole engines and of pools in one journal" in said
    code, said = told(decision, POOLS, PAIR)
    assert code == 2 and "decisions of whole engines and of pools in one journal" in said


def test_a_frame_of_a_damaged_journal_is_refused(tmp_path):
    (tmp_path / "j").write_bytes(journal.line_of(with_(PAIR, "slo", GONE)))
    with pytest.raises(InputError, match="line 1: its pair is damaged"):
        rows(tmp_path / "j")
