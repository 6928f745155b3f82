"""Claims about fitting a step cost to measured iterations, and about its table form."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

from astrolabe_lab.cost import KEYS, Grid, RangeWarning, Regime, StepCost, preset, tabulate
from astrolabe_lab.errors import InputError

pd = pytest.importorskip("pandas")

TRUTH = StepCost(Regime(0.0, 2e-2, 6e-5, 0.0, 7e-7), Regime(0.0, 1.9e-2, 1.1e-4, 3e-5, 1e-6, attention_s=1e-8))


def iterations(n=1200, noise=0.0, seed=0, cost=TRUTH):
    """Steps of every kind, priced by `cost` with a relative error."""
    rng = np.random.default_rng(seed)
    decodes, mixed = rng.integers(1, 48, n), rng.random(n) < 0.5
    chunk = np.where(mixed, rng.integers(1, 512, n), 0)
    before = np.where(mixed, rng.integers(0, 5, n) * 512, 0)
    frame = pd.DataFrame(
        {
            "new_tokens": decodes + chunk,
            "sequences": decodes + mixed,
            "context_tokens": decodes * rng.integers(50, 900, n) + before,
            "attention": chunk * before + chunk**2 / 2,
            "mixed": mixed,
        }
    )
    seconds = [cost.step_seconds(*row) for row in frame.itertuples(index=False)]
    return frame.assign(seconds=seconds * np.exp(rng.normal(0, noise, n)))


def fitted(*args, **options):
    from astrolabe_lab.fit import fit

    return fit(*args, **{"quiet": True, "draws": 60} | options)


def test_exact_iterations_give_back_the_cost_that_made_them():
    found = fitted(iterations()).cost
    np.testing.assert_allclose(found.array, TRUTH.array, rtol=1e-6, atol=1e-13)


def test_chunks_mean_the_same_as_the_attention_they_add_up_to():
    frame = iterations()
    chunks = [[(c, kv)] if m else [] for c, kv, m in zip(
        frame.new_tokens - frame.sequences + 1, 0 * frame.new_tokens, frame.mixed, strict=True)]  # fmt: skip
    pairs = np.array([sum(c * kv + c * c / 2 for c, kv in row) for row in chunks])
    by_hand = frame.assign(attention=pairs)
    given = frame.drop(columns=["attention", "mixed"]).assign(chunks=chunks)
    assert fitted(given).cost == fitted(by_hand).cost


def test_a_known_host_overhead_is_kept_apart_from_the_base():
    found = fitted(iterations(), host_s=4e-3).cost
    assert found.decode.host_s == found.mixed.host_s == 4e-3
    assert found.decode.base_s == pytest.approx(TRUTH.decode.base_s - 4e-3, rel=1e-6)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    held = []
    for seed in range(30):
        found = fitted(iterations(400, noise=0.03, seed=seed), draws=100, seed=seed)
        for name in ("decode", "mixed"):
            for key, (low, high) in found.regimes[name].intervals.items():
                held.append(low <= getattr(getattr(TRUTH, name), key) <= high)
    assert 0.86 < np.mean(held) <= 1.0 and len(held) == 30 * 8


def test_residuals_are_of_the_size_of_the_noise_in_both_regimes():
    found = fitted(iterations(3000, noise=0.05))
    for one in found.regimes.values():
        assert one.error_pct == pytest.approx(100 * 0.05 * np.sqrt(2 / np.pi), rel=0.1)
        assert abs(one.bias_pct) < 0.5 and one.worst_pct < 25
    assert found.residuals.residual_pct.abs().mean() == pytest.approx(found.summary().error_pct.mean(), rel=0.1)


def test_what_the_data_cannot_tell_apart_is_dropped_and_named():
    notes = " ".join(fitted(iterations()).warnings)
    assert "decode: per_seq_s is counted in" in notes and "sequences never varies apart" in notes
    frame = iterations()
    alone = frame[frame.mixed].assign(context_tokens=0)
    notes = " ".join(fitted(pd.concat([alone, frame[~frame.mixed]])).warnings)
    assert "mixed: per_kv_token_s is unknown: context_tokens is 0 in every iteration" in notes


def test_coefficients_that_trade_off_are_said_to():
    rng = np.random.default_rng(2)
    frame = iterations(noise=0.02)
    close = np.round(200 * frame.sequences * (1 + rng.normal(0, 0.002, len(frame))))
    found = fitted(frame.assign(context_tokens=close))
    assert found.regimes["decode"].condition > 30
    assert any("condition" in note for note in found.regimes["decode"].notes)


def test_notes_are_warnings_unless_told_to_be_quiet():
    from astrolabe_lab.fit import FitWarning, fit

    with pytest.warns(FitWarning, match="per_seq_s is counted in"):
        fit(iterations(), draws=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted(iterations())


def test_steps_outside_the_fitted_range_are_told_by_regime_and_count():
    frame = iterations()
    found = fitted(frame)
    assert found.outside(frame) == []
    far = found.outside(frame.drop(columns="seconds").assign(context_tokens=frame.context_tokens * 3))
    assert len(far) == 2 and all("context_tokens" in line and "outside the fitted" in line for line in far)
    assert far[0].startswith("decode:") and far[1].startswith("mixed:")


def test_a_fitted_cost_warns_when_an_engine_may_go_past_it():
    from astrolabe_lab.sim.engine import EngineConfig, run_one

    trace = pd.DataFrame({"rid": [0], "arrived_s": [0.0], "prompt_tokens": [20], "output_tokens": [3]})
    cost = fitted(iterations()).cost
    inside = EngineConfig(max_num_seqs=47, max_num_batched_tokens=550, num_gpu_blocks=2000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_one(trace, inside, cost)
        run_one(trace, EngineConfig(max_num_seqs=400), StepCost.parse("base_s=0.01"))  # nothing is known of its range
    with pytest.warns(RangeWarning, match=r"decode steps may have 400 sequences; .* measured up to 47"):
        run_one(trace, EngineConfig(max_num_seqs=400), cost)


def test_a_missing_regime_comes_from_the_base_or_is_refused():
    frame = iterations()
    with pytest.raises(InputError, match="none is mixed; measure some, or give base"):
        fitted(frame[~frame.mixed])
    found = fitted(frame[~frame.mixed], base=TRUTH)
    assert found.cost.mixed == TRUTH.mixed and found.cost.decode.base_s == pytest.approx(2e-2)


def test_what_is_the_base_s_keeps_its_grid_and_what_was_fitted_has_none():
    base = replace(preset("llama2-7b-a30").cost, frontend_s=1e-4, pad_sizes=(1, 2, 4))
    frame = iterations()
    found = fitted(frame[~frame.mixed], base=base).cost
    count = {"new_tokens": 512.0, "sequences": 3.0, "context_tokens": 900.0, "attention": 1e5, "mixed": True}
    assert found.step_seconds(**count) == base.step_seconds(**count) > 0.05
    assert (found.frontend_s, found.pad_sizes, found.decode_grid) == (1e-4, (), None)
    assert set(found.fitted) == {"decode", *base.fitted}


def test_no_coefficient_is_ever_negative():
    frame = iterations(300, noise=0.4, seed=3)
    assert (fitted(frame).cost.array >= 0).all()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda f: f.drop(columns="seconds"), "lack seconds"),
        (lambda f: f.drop(columns="attention"), "lack attention.*may be given as chunks"),
        (lambda f: f.assign(seconds=np.where(f.index == 7, 0.0, f.seconds)), "row 7 has seconds=.*above 0"),
        (lambda f: f.assign(new_tokens=np.where(f.index == 3, np.nan, f.new_tokens)), "row 3 has new_tokens=.*nan"),
        (lambda f: f.assign(sequences=f.new_tokens + 1), "row 0 schedules .* each gets at least one"),
        (lambda f: f.assign(mixed="yes"), "mixed must be true or false"),
        (lambda f: f.drop(columns="attention").assign(chunks=3), "chunks=3 is no list"),
        (lambda f: f.groupby("mixed").head(4), "cannot fit"),
        (lambda f: f.to_dict(), "are a DataFrame"),
    ],
)
def test_iterations_that_break_their_contract_are_refused_by_name(change, named):
    with pytest.raises(InputError, match=named):
        fitted(change(iterations()))


# The table form


class Nearest:
    """Seconds of the nearest iteration: a regressor of the plainest kind."""

    def fit(self, x, y):
        self.x, self.y = x / [500, 40_000], y
        return self

    def predict(self, x):
        return self.y[np.argmin(((x[:, None] / [500, 40_000] - self.x) ** 2).sum(axis=2), axis=1)]


def test_a_grid_tabulates_any_function_or_estimator():
    def by_hand(new, context):
        return 0.01 + 1e-4 * new + 1e-6 * context

    class Estimator:
        def predict(self, x):
            return by_hand(*x.T)

    axes = (1, 10, 100), (0, 1000)
    assert tabulate(by_hand, *axes) == tabulate(Estimator(), *axes)
    assert tabulate(by_hand, *axes).at(55, 250) == pytest.approx(by_hand(55, 250))
    with pytest.raises(InputError, match=r"gives -1 s for 1 new and 0 context tokens"):
        tabulate(lambda new, context: 0 * new - 1, *axes)
    with pytest.raises(InputError, match="one for each"):
        tabulate(lambda new, context: 0.1, *axes)
    with pytest.raises(InputError, match="neither a function nor"):
        tabulate(0.1, *axes)


def test_a_tabulated_regressor_prices_steps_near_those_it_learned():
    from astrolabe_lab.fit import fit_table

    frame = iterations(3000, noise=0.01)
    points = {"new_tokens": [1, *range(8, 560, 8)], "context_tokens": range(0, 45_000, 1500)}
    found = fit_table(frame, Nearest(), **points)
    assert found.cost.decode_grid and found.cost.mixed_grid
    assert found.fits["decode"].error_pct < 3 and found.fits["mixed"].error_pct < 6
    with pytest.raises(InputError, match="no estimator"):
        fit_table(frame, lambda x: x, **points)
    with pytest.raises(InputError, match="none is mixed"):
        fit_table(frame[~frame.mixed], Nearest(), **points)


def test_scikit_learns_regressors_can_be_tabulated():
    ensemble = pytest.importorskip("sklearn.ensemble")
    from astrolabe_lab.fit import fit_table

    found = fit_table(
        iterations(800), ensemble.ExtraTreesRegressor(20, random_state=0),
        new_tokens=[1, *range(8, 560, 16)], context_tokens=range(0, 45_000, 3000),
    )  # fmt: skip
    assert found.fits["decode"].error_pct < 5


def test_a_memo_by_batch_size_and_token_count_is_a_grid():
    """The paper memoizes predictions per (batch size, token count); on its own points a grid returns them exactly."""
    rng = np.random.default_rng(0)
    sizes, counts = (1, 4, 16, 48), (100, 1000, 10_000)
    memo = {(b, t): rng.uniform(0.01, 0.1) for b in sizes for t in counts}
    grid = Grid(sizes, counts, tuple(tuple(memo[b, t] for t in counts) for b in sizes))
    assert all(grid.at(b, t) == pytest.approx(seconds, rel=1e-15) for (b, t), seconds in memo.items())


# Text and JSON


def test_everything_beside_the_coefficients_survives_text_and_json():
    import json

    rng = np.random.default_rng(4)
    for _ in range(60):
        axes = [tuple(np.unique(rng.integers(0, 900, 5)).astype(float)) for _ in range(2)]
        grid = Grid(*axes, tuple(map(tuple, rng.uniform(0, 0.1, [len(a) for a in axes]))))
        cost = StepCost(
            Regime(*rng.uniform(1e-9, 1, 6)), Regime(*rng.uniform(1e-9, 1, 6)),
            pad_sizes=(1, 2, 4, 8)[: rng.integers(0, 5)], frontend_s=float(rng.integers(0, 2) * rng.uniform()),
            decode_grid=grid if rng.random() < 0.5 else None, mixed_grid=grid if rng.random() < 0.5 else None,
            fitted={"mixed": {"new_tokens": (1, 512)}},
        )  # fmt: skip
        assert StepCost.parse(str(cost)) == cost
        again = StepCost.from_dict(json.loads(json.dumps(cost.to_dict())))
        assert again == cost and again.fitted == cost.fitted
        assert StepCost.parse("", base=cost) == cost
    assert StepCost.parse("mixed_grid=none,decode_grid=none", base=cost).mixed_grid is None
    assert set(StepCost.parse("base_s=1").to_dict()) == {"decode", "mixed"}, "nothing beside is written when unset"


def test_overriding_a_coefficient_keeps_what_stands_beside():
    base = StepCost.parse("base_s=0.01,pad_sizes=4/8,frontend_s=0.002,mixed_grid=1/512*0*0.02/0.07")
    changed = StepCost.parse("mixed.per_token_s=1e-4,host_s=0.001", base=base)
    assert (changed.pad_sizes, changed.frontend_s, changed.mixed_grid) == ((4, 8), 0.002, base.mixed_grid)
    assert changed.mixed.per_token_s == 1e-4 and changed.decode.host_s == 0.001
    assert set(KEYS) <= set(changed.to_dict()["decode"])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("base_s=1,pad_sizes=8/4", "rising whole numbers"),
        ("base_s=1,pad_sizes=a", "whole numbers, like pad_sizes=1/2/4/8"),
        ("base_s=1,frontend_s=-1", "frontend_s=-1"),
        ("base_s=1,decode.frontend_s=1", "unknown cost key 'decode.frontend_s'"),
        ("base_s=1,mixed_grid=1/2", "is not NEW_TOKENS"),
        ("base_s=1,mixed_grid=1/2*0*0.1", "1 seconds for 2 x 1 points"),
        ("base_s=1,mixed_grid=2/1*0*0.1/0.2", "rising"),
        ("base_s=1,mixed_grid=1/2*0*0.1/-0.2", "finite numbers >= 0"),
        ("base_s=1,fitted=3", "written in presets"),
    ],
)
def test_bad_text_beside_the_coefficients_is_refused_by_name(text, named):
    with pytest.raises(InputError, match=named):
        StepCost.parse(text)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"pad_sizes": 8}, "pad_sizes=8 must be a list"),
        ({"pad_sizes": [1, 1]}, "rising whole numbers"),
        ({"frontend_s": "1"}, "frontend_s='1'"),
        ({"mixed_grid": {"new_tokens": [1]}}, "a grid is an object of"),
        ({"mixed_grid": {"new_tokens": "x", "context_tokens": [0], "seconds": [[1]]}}, "lists of numbers|rising"),
        ({"mixed_grid": {"new_tokens": [1], "context_tokens": [0], "seconds": [[1], [1, 2]]}}, "rows of one length"),
        ({"fitted": {"mixed": {"tokens": [1, 2]}}}, "ranges by regime and count"),
        ({"fitted": [1]}, "ranges by regime and count"),
    ],
)
def test_bad_json_beside_the_coefficients_is_refused_by_name(entries, named):
    with pytest.raises(InputError, match=named):
        StepCost.from_dict({"base_s": 1.0} | entries)
