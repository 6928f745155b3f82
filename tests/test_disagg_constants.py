"""Calibration constants, the ledger and the pair a policy returns."""

import json
import math

import numpy as np
import pytest

from astrolabe_lab.disagg.constants import PAPER, PAPER_SIMULATOR, Constants
from astrolabe_lab.disagg.view import Ledger, check_pair
from astrolabe_lab.errors import InputError
from astrolabe_lab.request import Request


def test_constants_survive_their_dict_and_a_file(tmp_path):
    assert Constants.from_dict(PAPER.to_dict()) == PAPER
    for content in (PAPER.to_dict(), {"version": 1, "constants": PAPER.to_dict()}):
        path = tmp_path / "c.json"
        path.write_text(json.dumps(content))
        assert Constants.read(path) == PAPER
    assert Constants.read("paper-simulator") == PAPER_SIMULATOR


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tpot_s": -1}, "tpot_s=-1"),
        ({"decode_step_s": math.nan}, "decode_step_s"),
        ({"kv_capacity_tokens": 1.5}, "whole number"),
        ({"loose_factor": 0.5}, "loose_factor"),
        ({"tau": 1}, "unknown tau"),
    ],
)
def test_wrong_constants_are_named(change, told):
    with pytest.raises(InputError, match=told):
        PAPER.with_(**change)
    with pytest.raises(InputError, match=told):
        Constants.from_dict(PAPER.to_dict() | change)


def test_missing_constants_are_named():
    with pytest.raises(InputError, match="ttft_s missing"):
        Constants.from_dict({k: v for k, v in PAPER.to_dict().items() if k != "ttft_s"})


def test_a_name_that_is_none_is_told_which_there_are():
    with pytest.raises(InputError, match=r"neither calibrated \(of simulated pools\), paper, paper-simulator nor"):
        Constants.read("papre")


def test_a_batch_of_eight_costs_each_request_2_9_percent_more_per_token():
    assert PAPER.tau_dec_s(8) / PAPER.tau_dec_s(1) == pytest.approx(1.029)


def test_the_step_cost_of_constants_says_what_they_say():
    cost = PAPER.step_cost()
    assert cost.step_seconds(700, 1, 0, mixed=True) == pytest.approx(PAPER.tau_pre_s(700))
    assert cost.step_seconds(9, 9, 5000) == pytest.approx(PAPER.tau_dec_s(9))


def test_a_ledger_keeps_order_through_ends_and_growth():
    ledger, rng, open_ = Ledger(), np.random.default_rng(0), []
    for rid in range(300):
        ledger.sent(Request(rid, 0.0, 10, 20, "tight"), 0, rid % 4, float(rid))
        open_.append(rid)
        if rng.random() < 0.6:
            gone = open_.pop(int(rng.integers(len(open_))))
            assert ledger.ended(gone) and not ledger.ended(gone)
    assert ledger.rows["rid"].tolist() == open_
    ledger.prefilled(open_[1], 400.0)
    ledger.streamed(open_[1], 3, 401.0)
    ledger.streamed(open_[1], 2, 402.0)
    row = ledger.rows[1]
    assert (row["prefilled_s"], row["first_token_s"], row["streamed"]) == (400.0, 401.0, 5)
    assert np.isnan(ledger.rows["prefilled_s"][0])
    with pytest.raises(InputError, match="already in flight"):
        ledger.sent(Request(open_[0], 0.0, 1, 1), 0, 0, 0.0)


@pytest.mark.parametrize("chosen", [3, (1,), (0, 0, 0), (2, 0), (0, -1), (True, 0), (0.5, 1), None])
def test_a_choice_that_is_no_pair_of_indices_is_refused(chosen):
    with pytest.raises(InputError, match="policy mine"):
        check_pair(chosen, 2, 4, "mine")
