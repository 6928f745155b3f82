"""What a predicted length is worth: errors of the ways to predict, capacities, paired gaps."""

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab import sweep
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.length import attach, metrics
from astrolabe_lab.length.worth import by_lengths, capacities, errors_of, gaps, regained


@pytest.fixture(scope="module")
def frame():
    return sharegpt_like.generate(3000, seed=0, text=False)


def test_the_oracle_is_never_wrong_and_a_constant_knows_no_order(frame):
    rows = errors_of(frame, ["oracle", "constant:290"]).set_index("lengths")
    assert rows.loc["oracle"].tolist() == [0, 0, 0, 1]
    true = frame["output_tokens"]
    assert rows.loc["constant:290", "mae_tokens"] == pytest.approx((true - 290).abs().mean())
    assert rows.loc["constant:290", "mape_pct"] == pytest.approx(100 * ((true - 290).abs() / true).mean())
    assert rows.loc["constant:290", "concordance"] == 0


def test_noise_of_a_relative_error_has_the_error_of_its_normal(frame):
    rows = errors_of(frame, ["noisy:0.1", "noisy:0.3", "noisy:1.0"]).set_index("lengths")
    assert rows.loc["noisy:0.3", "mape_pct"] == pytest.approx(30 * np.sqrt(2 / np.pi), rel=0.08)
    told = attach(frame, "noisy:0.3")["predicted_tokens"]
    assert rows.loc["noisy:0.3", "concordance"] == metrics.concordance(
        frame["output_tokens"], told, np.zeros(3000, bool)
    )
    assert rows["mae_tokens"].is_monotonic_increasing and rows["concordance"].is_monotonic_decreasing


def test_runs_of_one_policy_are_told_apart_by_their_lengths():
    summary = pd.DataFrame({"policy": ["a", "a", "b"], "lengths": ["x", "y", "x"], "v": [1, 2, 3]})
    assert by_lengths(summary, "a")["policy"].tolist() == ["x", "y"]
    with pytest.raises(InputError, match="'c' has no runs here; there are a, b"):
        by_lengths(summary, "c")


def test_a_capacity_is_where_the_curve_crosses_the_limit():
    rates = [10.0, 20.0, 30.0]
    curves = {"crosses": [1.0, 1.0, 100.0], "never": [1.0, 1.0, 1.0], "at once": [50.0, 60.0, 70.0]}
    rows = [
        {"policy": name, "seed": 0, "qps": qps, "ttft_p99_all_s": value}
        for name, values in curves.items()
        for qps, value in zip(rates, values, strict=True)
    ]
    found = capacities(pd.DataFrame(rows), limit_s=10).set_index("policy")
    assert found["capacity_qps"].to_dict() == pytest.approx({"crosses": 25.0, "never": 30.0, "at once": 10.0})
    assert found["censored"].to_dict() == {"crosses": "", "never": "above", "at once": "below"}


def test_gaps_are_paired_over_seeds():
    rng = np.random.default_rng(0)
    luck = rng.normal(0, 10, 10)
    parts = [
        pd.DataFrame({"policy": name, "seed": range(10), "v": 100 + luck + shift + rng.normal(0, 0.1, 10)})
        for name, shift in (("base", 0.0), ("higher", 1.0), ("same", 0.0))
    ]
    found = gaps(pd.concat(parts), "v", "base").set_index("policy")
    assert found.loc["higher", "mean"] == pytest.approx(1.0, abs=0.2) and found.loc["higher", "clear"]
    assert not found.loc["same", "clear"] and found.loc["same", "low"] < 0 < found.loc["same", "high"]
    assert found.loc["higher", "own"] == pytest.approx(101 + luck.mean(), abs=0.2)


def runs_of(rng, seeds, loss=10.0, share=0.5, sd=4.0):
    """Runs whose cure gets ``share`` of the mean loss back."""
    best = rng.normal(100, 30, seeds)
    parts = {"best": best, "worst": best + loss + rng.normal(0, sd, seeds)}
    parts["cured"] = best + (1 - share) * loss + rng.normal(0, sd, seeds)
    return pd.concat([pd.DataFrame({"policy": p, "seed": range(seeds), "v": v}) for p, v in parts.items()])


def test_the_share_of_a_loss_that_is_regained_has_an_interval_that_covers_it():
    rng = np.random.default_rng(0)
    found = np.array([regained(runs_of(rng, 10), "v", "best", "worst", "cured") for _ in range(1000)])
    assert np.mean((found[:, 1] <= 0.5) & (found[:, 2] >= 0.5)) == pytest.approx(0.95, abs=0.02)
    assert ((found[:, 1] <= found[:, 0]) & (found[:, 0] <= found[:, 2])).all()
    unclear = regained(runs_of(rng, 10, loss=0.5), "v", "best", "worst", "cured")
    assert unclear[1:] == (-np.inf, np.inf)


def test_predicted_lengths_change_nothing_for_a_policy_that_reads_none():
    grid = {"policy": ["least_loaded"], "lengths": ["oracle", "constant:5"], "qps": [6.0], "seed": [0]}
    defaults = {"trace": "sharegpt_like", "requests": 100, "instances": 2}
    summary = sweep.run({"defaults": defaults, "grid": grid}, workers=1, progress=False)
    table = by_lengths(summary, "least_loaded").set_index("policy")
    assert table.loc["oracle", "ttft_mean_s"] == table.loc["constant:5", "ttft_mean_s"]
