"""Claims about drawing requests anew: a permutation keeps the set, a resample stands for a population."""

import math

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab import trace
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.rng import stream


@pytest.fixture(scope="module")
def frame():
    drawn = sharegpt_like.generate(500, seed=4, text=False)
    return drawn.assign(
        arrived_s=np.arange(500) / 7.0,
        predicted_tokens=drawn["output_tokens"],
        prefix_blocks=[(i,) for i in range(500)],
        prefix_block_tokens=4096,
    )


def contents(frame):
    return sorted(zip(frame["prompt_tokens"], frame["output_tokens"], frame["prefix_blocks"], strict=True))


def test_permuting_keeps_the_set_and_what_belongs_to_each_request(frame):
    drawn = trace.sample(frame, 500, seed=1)
    assert contents(drawn) == contents(frame) and not drawn["prompt_tokens"].equals(frame["prompt_tokens"])
    assert (drawn["predicted_tokens"] == drawn["output_tokens"]).all()
    assert drawn["rid"].tolist() == list(range(500)) and trace.check(drawn).equals(drawn[list(trace.check(drawn))])
    assert trace.sample(frame, None, seed=1).equals(drawn)


def test_fewer_are_a_part_of_the_set_without_repetition_and_the_first_of_more(frame):
    few, more = trace.sample(frame, 100, seed=1), trace.sample(frame, 300, seed=1)
    assert few.equals(more.head(100)) and few["prefix_blocks"].nunique() == 100


def test_with_replacement_any_number_is_drawn_and_the_set_varies(frame):
    drawn = trace.sample(frame, 2000, seed=1, replace=True)
    assert len(drawn) == 2000 and set(contents(drawn)) <= set(contents(frame)) and "arrived_s" not in drawn
    same = trace.sample(frame, 500, seed=1, replace=True)
    # Of n draws with replacement a share of 1 - 1/e differ, with a standard deviation of sqrt(n (1/e - 2/e^2)).
    distinct = same["prefix_blocks"].nunique()
    assert abs(distinct - 500 * (1 - 1 / math.e)) < 5 * math.sqrt(500 * (1 / math.e - 2 / math.e**2))


def test_permuted_means_do_not_vary_and_resampled_ones_vary_as_a_population_s(frame):
    """The reason for the choice: only a resample tells how far another set of requests could lie off."""
    means = {
        replace: np.array([trace.sample(frame, 500, s, replace)["output_tokens"].mean() for s in range(400)])
        for replace in (False, True)
    }
    assert np.ptp(means[False]) == 0
    expected = frame["output_tokens"].std(ddof=0) / math.sqrt(500)
    assert means[True].std() == pytest.approx(expected, rel=4 / math.sqrt(2 * 400))
    assert abs(means[True].mean() - frame["output_tokens"].mean()) < 4 * expected / math.sqrt(400)


def test_arrivals_stay_where_they_are(frame):
    for replace in (False, True):
        assert trace.sample(frame, 300, 2, replace)["arrived_s"].equals(frame["arrived_s"].head(300))
    assert "arrived_s" not in trace.sample(frame.drop(columns="arrived_s"), 300, seed=2)


def test_the_draw_depends_on_the_seed_alone(frame):
    one = trace.sample(frame, 50, seed=3)
    stream(3, "arrivals").random(100)
    pd.testing.assert_frame_equal(one, trace.sample(frame, 50, seed=3))
    assert not one.equals(trace.sample(frame, 50, seed=4))
    assert one.attrs["sampled"] == {"of": 500, "seed": 3, "replace": False}


def test_wrong_input_is_named_with_what_to_do(frame):
    with pytest.raises(InputError, match="n=501 is more than the 500 requests.*replace=True"):
        trace.sample(frame, 501, seed=0)
    for n in (0, -1, 2.5, "3", True):
        with pytest.raises(InputError, match="integer >= 1"):
            trace.sample(frame, n, seed=0, replace=True)
    with pytest.raises(InputError, match="seed="):
        trace.sample(frame, 5, seed=-1)
    with pytest.raises(InputError, match="no rows"):
        trace.sample(frame.head(0), 5, seed=0, replace=True)
