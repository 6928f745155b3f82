"""Claims about the predicted lengths attached at arrival."""

import math
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab.errors import InputError
from astrolabe_lab.length import attach


def frame(outputs, **columns):
    return pd.DataFrame({"rid": range(len(outputs)), "prompt_tokens": 10, "output_tokens": outputs} | columns)


def test_the_oracle_tells_the_true_length():
    assert attach(frame([3, 500]), "oracle")["predicted_tokens"].tolist() == [3, 500]


def test_a_constant_tells_all_the_same():
    assert attach(frame([3, 500]), "constant:256")["predicted_tokens"].tolist() == [256, 256]


def test_a_trace_keeps_its_own_predictions():
    own = frame([3, 500], predicted_tokens=[7, 8])
    assert attach(own, "trace")["predicted_tokens"].tolist() == [7, 8]
    assert attach(own, "oracle")["predicted_tokens"].tolist() == [3, 500]
    assert own["predicted_tokens"].tolist() == [7, 8]


def test_noise_is_gaussian_relative_error_of_the_size_asked_for():
    n, relative = 50_000, 0.25
    error = attach(frame([100_000] * n), f"noisy:{relative}", seed=4)["predicted_tokens"] / 100_000 - 1
    assert abs(error.mean()) < 4 * relative / math.sqrt(n)
    assert abs(error.std() - relative) < 4 * relative / math.sqrt(2 * n)
    assert np.mean(np.abs(error) < relative) == pytest.approx(0.6827, abs=0.01)


def test_no_noise_is_the_oracle_and_no_prediction_falls_below_one_token():
    trace = frame(range(1, 1001))
    assert attach(trace, "noisy:0")["predicted_tokens"].equals(attach(trace, "oracle")["predicted_tokens"])
    assert attach(trace, "noisy:3")["predicted_tokens"].min() == 1


def test_noise_levels_are_paired_and_seeds_are_not():
    trace = frame([1_000_000] * 500)
    small, large = (attach(trace, f"noisy:{r}")["predicted_tokens"] - 1_000_000 for r in (0.1, 0.2))
    np.testing.assert_allclose(large, 2 * small, atol=2)
    assert not attach(trace, "noisy:0.1", seed=1)["predicted_tokens"].equals(small + 1_000_000)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("trace", "use oracle, constant:N, noisy:REL or tagger:DIR"),
        ("tagger:models/x", "is no folder, so it is no length model"),
        ("tagger:", "allowed are"),
        ("tagger", "allowed are"),
        ("perfect", "allowed are trace, oracle, constant:N, noisy:REL, tagger:DIR"),
        ("oracle:1", "allowed are"),
        ("noisy", "allowed are"),
        ("constant", "allowed are"),
        ("constant:0", "integer from 1"),
        ("constant:2.5", "integer from 1"),
        ("constant:99999999999999999999", "integer from 1"),
        ("noisy:-0.1", "finite number >= 0"),
        ("noisy:nan", "finite number >= 0"),
        ("noisy:much", "finite number >= 0"),
        (None, "allowed are"),
    ],
)
def test_wrong_specs_are_named_with_what_is_allowed(spec, says):
    with pytest.raises(InputError, match=says):
        attach(frame([5], prompt="Hello?"), spec)


def test_predictions_of_a_trace_are_checked():
    with pytest.raises(InputError, match="row 1: predicted_tokens is 0"):
        attach(frame([5, 5], predicted_tokens=[1, 0]), "trace")


def test_importing_it_loads_nothing_heavy():
    code = (
        "import sys, astrolabe_lab.length, astrolabe_lab.arrivals, astrolabe_lab.generators.sharegpt_like;"
        "print([m for m in ('pandas', 'numba', 'pyarrow', 'torch', 'vllm', 'plotly') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
