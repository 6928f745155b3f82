"""The served model was replaced: the same prompts, other answers."""

import numpy as np
import pytest

from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.length.shifted import generate
from astrolabe_lab.trace import check


@pytest.mark.parametrize("change", ["none", "longer", "reasoning"])
def test_prompts_stay_and_frames_keep_the_contract(change):
    frame, plain = generate(300, seed=4, change=change), sharegpt_like.generate(300, seed=4)
    check(frame, times=False)
    assert frame["prompt"].tolist() == plain["prompt"].tolist()
    assert frame.equals(generate(300, seed=4, change=change))
    assert generate(100, seed=4, change=change)["output_tokens"].tolist() == frame["output_tokens"].tolist()[:100]


def test_longer_answers_keep_their_order_and_reasoning_turns_it_round():
    plain = sharegpt_like.generate(3000, seed=4)["output_tokens"].to_numpy(float)
    longer = generate(3000, seed=4, change="longer")["output_tokens"].to_numpy(float)
    assert np.median(longer / plain) == 2.0 and np.corrcoef(plain, longer)[0, 1] > 0.98
    reasoning = generate(3000, seed=4, change="reasoning")["output_tokens"].to_numpy(float)
    ranks = [np.argsort(np.argsort(values)) for values in (plain, longer, reasoning)]
    assert np.corrcoef(ranks[0], ranks[2])[0, 1] < 0.5 < 0.98 < np.corrcoef(ranks[0], ranks[1])[0, 1]


def test_another_change_is_refused():
    with pytest.raises(InputError, match="none, longer, reasoning"):
        generate(10, change="shorter")
