import math

import pandas as pd
import pytest

from astrolabe_lab.errors import InputError
from astrolabe_lab.measure import SLO, attainment, goodput, met, summarise


def results(*rows, **columns):
    """A result frame from (arrived, first token, finished, tokens, status) per request."""
    frame = pd.DataFrame(rows, columns=["arrived_s", "first_token_s", "finished_s", "generated_tokens", "status"])
    return frame.assign(preemptions=0, policy="p", seed=0, **columns)


FAST, SLOW = (0.0, 1.0, 3.0, 5, "ok"), (0.0, 2.5, 6.5, 5, "ok")  # TTFT 1 and 2.5 s, TPOT 0.5 and 1 s


def test_all_targets_have_to_be_kept_and_equality_keeps_one():
    frame = results(FAST, SLOW)
    assert met(frame, SLO(ttft_s=1.0)).ttft.tolist() == [True, False]
    assert met(frame, SLO(ttft_s=1.0, tpot_s=0.4))["all"].tolist() == [False, False]
    assert met(frame, SLO(ttft_s=9, tpot_s=1.0, e2e_s=6.5))["all"].tolist() == [True, True]


def test_a_request_of_one_token_has_no_tpot_to_miss():
    one = results((0.0, 1.0, 1.0, 1, "ok"))
    assert met(one, SLO(tpot_s=1e-9))["all"].tolist() == [True]


def test_what_did_not_end_well_kept_nothing():
    frame = results(FAST, (0.0, 0.1, 0.2, 2, "failed"), (0.0, math.nan, math.nan, 0, "rejected"))
    assert met(frame, SLO(ttft_s=100))["all"].tolist() == [True, False, False]


def test_loose_requests_may_take_three_times_as_long_and_no_class_means_the_targets_as_given():
    frame = results(SLOW, SLOW, slo=["tight", "loose"])
    assert met(frame, SLO(ttft_s=1.0))["all"].tolist() == [False, True]
    assert met(frame, SLO(ttft_s=1.0, loose_factor=2.0))["all"].tolist() == [False, False]
    assert met(results(SLOW), SLO(ttft_s=1.0))["all"].tolist() == [False]


def test_attainment_is_told_by_class_and_over_all():
    frame = results(SLOW, SLOW, FAST, slo=["tight", "loose", "tight"])
    found = attainment(frame, SLO(ttft_s=1.0)).set_index("slo")
    assert found["all"].tolist() == pytest.approx([0.5, 1.0, 2 / 3])
    assert found["sent"].tolist() == [2, 1, 3] and found["tpot"].tolist() == [1, 1, 1]
    both = pd.concat([frame, frame.assign(policy="q", first_token_s=99.0, finished_s=99.9)])
    assert attainment(both, SLO(ttft_s=1.0), by=["policy"]).groupby("policy")["all"].max().tolist() == [1, 0]


def test_goodput_is_a_rate_and_a_share_of_what_was_sent():
    frame = results(FAST, SLOW, (0.0, math.nan, 4.0, 0, "failed"), slo=["tight", "loose", "tight"])
    found = goodput(frame, SLO(ttft_s=1.0))
    assert found["goodput_rps"] == pytest.approx(2 / 6.5)
    assert found["goodput_share"] == pytest.approx(2 / 3)
    assert (found["goodput_share_tight"], found["goodput_share_loose"]) == (0.5, 1.0)
    assert summarise(frame, slo=SLO(ttft_s=1.0)).iloc[0].goodput_share == pytest.approx(2 / 3)
    assert "goodput_share" not in summarise(frame)


def test_text_reads_back_as_the_targets():
    assert SLO.parse("ttft_s=0.175, tpot_s=0.0397") == SLO(ttft_s=0.175, tpot_s=0.0397)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft=1", "'ttft=1' is not key=value with a new key of ttft_s, tpot_s, e2e_s, loose_factor"),
        ("ttft_s=1,ttft_s=2", "not key=value with a new key"),
        ("ttft_s=fast", "ttft_s=fast is not a number"),
        ("ttft_s=0", "ttft_s=0.0 is not a number > 0"),
        ("ttft_s=nan", "ttft_s=nan is not a number > 0"),
        ("loose_factor=3", "no target is given"),
        ("ttft_s=1,loose_factor=0.5", "loose_factor=0.5 is below 1"),
        ("", "no target is given"),
    ],
)
def test_targets_that_are_none_are_refused_by_name(text, message):
    with pytest.raises(InputError, match=message):
        SLO.parse(text)


def test_an_unknown_class_is_refused():
    with pytest.raises(InputError, match="slo is gold; allowed are tight, loose"):
        met(results(FAST, slo=["gold"]), SLO(ttft_s=1.0))
