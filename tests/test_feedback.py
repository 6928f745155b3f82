"""Recalibration helps where it can and is left alone where it cannot; retraining learns what was observed."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astrolabe_lab import length
from astrolabe_lab.cli import main
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.length.feedback import fare, held_out, retrain, rows_of
from astrolabe_lab.length.observed import read_observed
from astrolabe_lab.length.recalibrated import MonotoneMap, Recalibrated, compare, recalibrate
from astrolabe_lab.serve.journal import Journal


@pytest.fixture(scope="module")
def model():
    drawn = sharegpt_like.generate(800, seed=0)
    return length.make("prompt_ridge:vocabulary=300,alpha=0.3").fit(drawn["prompt"].tolist(), drawn["output_tokens"])


@pytest.fixture(scope="module")
def recent():
    """(prompts, true lengths) that the model has not seen."""
    drawn = sharegpt_like.generate(800, seed=1)
    return drawn["prompt"].tolist(), drawn["output_tokens"].to_numpy(float)


# --- the map ------------------------------------------------------------------------------------------------

TOKENS = st.floats(1, 1e5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(TOKENS, TOKENS, st.booleans()), min_size=2, max_size=80), st.integers(1, 20), st.data())
def test_a_map_never_turns_the_order_of_two_requests_round(rows, knots, data):
    predicted, lengths, censored = (np.array(column) for column in zip(*rows, strict=True))
    censored = censored.astype(bool)
    censored[0] = False
    learned = MonotoneMap.learn(predicted, lengths, censored, min(knots, len(rows)))
    asked = np.sort(data.draw(st.lists(TOKENS, min_size=2, max_size=20)))
    told = learned(asked)
    assert np.isfinite(told).all() and (told > 0).all()
    assert (np.diff(told) >= -1e-9 * told[1:]).all()


def test_one_knot_is_the_factor_between_the_medians():
    rng = np.random.default_rng(0)
    predicted = np.exp(rng.normal(5, 1, 4001))
    learned = MonotoneMap.learn(predicted, 1.7 * predicted, np.zeros(4001, bool), 1)
    assert learned([3.0, 300.0]) == pytest.approx([5.1, 510.0])


def test_many_knots_find_a_curve():
    rng = np.random.default_rng(0)
    predicted = np.exp(rng.uniform(2, 8, 4000))
    lengths = 3 * predicted**0.7 * np.exp(0.1 * rng.standard_normal(4000))
    learned = MonotoneMap.learn(predicted, lengths, np.zeros(4000, bool), 20)
    asked = np.exp(np.linspace(2.5, 7.5, 20))
    assert learned(asked) == pytest.approx(3 * asked**0.7, rel=0.06)


def test_answers_that_were_cut_off_do_not_pull_a_map_down():
    rng = np.random.default_rng(0)
    predicted = np.exp(rng.normal(5, 0.5, 4000))
    whole = 2 * predicted * np.exp(0.3 * rng.standard_normal(4000))
    limit = np.exp(rng.normal(6, 0.7, 4000))
    seen, cut = np.minimum(whole, limit), whole > limit
    assert 0.2 < cut.mean() < 0.6
    assert MonotoneMap.learn(predicted, seen, cut, 1)([100.0]) == pytest.approx([200.0], rel=0.05)
    assert MonotoneMap.learn(predicted, seen, np.zeros(4000, bool), 1)([100.0])[0] < 185


# --- recalibration ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [lambda n: 1.6 * n, lambda n: 0.5 * n, lambda n: 3 * n**0.8])
def test_a_shift_of_lengths_is_undone_by_a_map(model, recent, change):
    prompts, true = recent
    lengths = np.maximum(np.rint(change(true)), 1)
    new, verdict = recalibrate(model, prompts, lengths)
    assert isinstance(new, Recalibrated) and verdict.helps and verdict.low > 0
    held = slice(480, None)  # what it was judged on: the figures are those errors
    assert verdict.mae_before == pytest.approx(np.abs(lengths - model.predict(prompts))[held].mean())
    assert verdict.mae_after == pytest.approx(np.abs(lengths - new.predict(prompts))[held].mean())
    assert verdict.mae_after < 0.95 * verdict.mae_before


def test_where_nothing_changed_the_model_is_kept_nearly_always():
    # predictions that are right in the median, errors of 35 %: at most one call in twenty may change anything
    rng = np.random.default_rng(1)
    prompts = [f"prompt {i}" for i in range(200)]
    known = np.exp(rng.normal(5.5, 0.8, 200))
    oracle = length.make("oracle").fit(prompts, known)
    changed = 0
    for _ in range(60):
        lengths = np.maximum(known * np.exp(0.35 * rng.standard_normal(200)), 1)
        new, verdict = recalibrate(oracle, prompts, lengths)
        changed += new is not oracle
        assert (new is oracle) == (not verdict.helps)
    assert changed <= 8  # 3 expected at the most; 9 or more has a chance below 1 %


def test_rows_that_were_all_cut_off_at_first_teach_a_bound_and_no_error(model, recent):
    prompts, true = recent
    cut = np.arange(len(prompts)) < 500
    recalibrate(model, prompts, np.maximum(true, 1), censored=cut)


def test_quantiles_hold_after_a_recalibration(model, recent):
    prompts, true = recent
    lengths = np.rint(1.6 * true) + 1
    new, _ = recalibrate(model, prompts, lengths)
    told = new.predict_quantiles(prompts, (0.1, 0.5, 0.9))
    assert (lengths[:, None] <= told).mean(axis=0) == pytest.approx([0.1, 0.5, 0.9], abs=0.06)
    assert (np.diff(told, axis=1) >= 0).all()


def test_a_recalibrated_model_survives_saving(model, recent, tmp_path):
    prompts, true = recent
    new, _ = recalibrate(model, prompts, 2 * true)
    again = length.load(new.save(tmp_path / "model"))
    assert again.predict_quantiles(prompts[:50]) == pytest.approx(new.predict_quantiles(prompts[:50]))
    assert again.median_tokens_ == new.median_tokens_


def test_a_second_recalibration_replaces_the_first(model, recent):
    prompts, true = recent
    once, _ = recalibrate(model, prompts, 3 * true)
    twice, verdict = recalibrate(once, prompts, true)
    assert verdict.helps and twice.model is model
    kept, verdict = recalibrate(once, prompts, 3 * true)
    assert kept is once and not verdict.helps
    with pytest.raises(InputError, match="not recalibrated itself"):
        Recalibrated(once)


def test_too_few_rows_are_refused(model):
    with pytest.raises(InputError, match="99 rows are too few"):
        recalibrate(model, ["a"] * 99, [1.0] * 99)


def test_a_comparison_is_a_paired_interval():
    rng = np.random.default_rng(0)
    true = np.exp(rng.normal(5, 1, 500))
    worse, better = true + 30 * rng.standard_normal(500), true + 20 * rng.standard_normal(500)
    verdict = compare(true, worse, better)
    assert verdict.helps and verdict.low < verdict.mae_before - verdict.mae_after < verdict.high
    assert not compare(true, better, worse).helps
    assert not compare(true, better, better).helps
    assert compare(true, worse, better, tests=50).low < verdict.low
    prompts = np.arange(500)
    again = compare(*(np.tile(values, 9) for values in (true, worse, better, prompts)))
    assert (again.low, again.high) == pytest.approx((verdict.low, verdict.high))  # nothing new was said
    with pytest.raises(InputError, match="29 held-out prompts tell nothing"):
        compare(true, worse, better, prompts % 29)


# --- the journal, and the commands ----------------------------------------------------------------------------


def journal_of(path, prompts, predicted, lengths, censored=None, told_by="tagger"):
    """``told_by``: where the predictions came from, one name or one a row."""
    sources = [told_by] * len(prompts) if isinstance(told_by, str) else told_by
    journal = Journal(path)
    cut = np.zeros(len(prompts), bool) if censored is None else censored
    for i, (prompt, told, came) in enumerate(zip(prompts, predicted, lengths, strict=True)):
        row = {"rid": i, "arrived_s": float(i), "predicted_tokens": round(float(told)), "prompt": prompt, "model": "m"}
        journal.write({"event": "decision", "predicted_tokens_from": sources[i]} | row)
        reason = "length" if cut[i] else "stop"
        end = {"rid": i, "time_s": i + 0.5, "status": "ok", "finish_reason": reason}
        journal.write({"event": "outcome", "output_tokens": round(float(came))} | end)
    journal.close()
    return path


@pytest.fixture(scope="module")
def drifted(model, tmp_path_factory):
    """A journal whose first 600 answers are as predicted; then the same prompts get answers 2.5 times as long."""
    drawn = sharegpt_like.generate(1800, seed=2)
    prompts, lengths = drawn["prompt"].tolist(), drawn["output_tokens"].to_numpy(float)
    lengths[600:] = np.rint(2.5 * lengths[600:])
    return journal_of(tmp_path_factory.mktemp("drift") / "router.jsonl", prompts, model.predict(prompts), lengths)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    return model.save(tmp_path_factory.mktemp("model") / "length")


def command(capsys, *words):
    code = main(["length", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_how_a_model_fares_is_told_with_the_drift(drifted, model):
    observed = read_observed(drifted)
    found = fare(observed, model.median_tokens_, reference=500)
    assert found.drift.kind == "longer" and 600 < found.drift.at < 720 and abs(found.drift.since - 600) < 60
    assert found.log_bias == pytest.approx(np.log(2.5), abs=0.12)
    assert found.watched == 1300 and found.censored == 0
    assert fare(observed.head(590), model.median_tokens_, reference=300).drift is None


def test_only_what_the_length_model_predicted_judges_it(model, recent, tmp_path, capsys, saved):
    prompts, true = recent
    told = np.rint(model.predict(prompts))
    path = journal_of(tmp_path / "sound.jsonl", prompts, told, true)
    alone = fare(read_observed(path), model.median_tokens_)
    others = np.tile(["tagger", "client", "constant: late"], len(prompts))
    some = np.repeat(np.arange(len(prompts)), 3)
    predicted = np.where(others == "tagger", told[some], 9999)
    mixed = journal_of(tmp_path / "mixed.jsonl", [prompts[i] for i in some], predicted, true[some], None, others)
    found = fare(read_observed(mixed), model.median_tokens_)
    assert found.not_predicted == 1600 and alone.not_predicted == 0
    assert (found.mae_tokens, found.log_bias, found.drift) == (alone.mae_tokens, alone.log_bias, alone.drift)
    assert main(["length", "drift", "--journal", str(mixed), "--model", str(saved)]) == 0
    assert "1,600 answers left out, whose length no model predicted" in capsys.readouterr().out
    clients = journal_of(tmp_path / "clients.jsonl", prompts, told, true, None, "client")
    with pytest.raises(InputError, match="the journal has 0 .*800 not predicted by a length model"):
        fare(read_observed(clients), model.median_tokens_)


def test_a_reference_is_what_was_asked_for_or_half_of_what_is_there(model, recent, tmp_path):
    prompts, true = recent
    cut = np.arange(len(prompts)) % 2 == 0
    observed = read_observed(journal_of(tmp_path / "j", prompts, model.predict(prompts), true, cut))
    found = fare(observed, model.median_tokens_)
    assert (found.reference, found.watched, found.censored) == (200, 200, 400)
    assert fare(observed, model.median_tokens_, reference=350).watched == 50
    with pytest.raises(InputError, match="needs at least 401 usable answers and the journal has 400 .*400 cut off"):
        fare(observed, model.median_tokens_, reference=400)
    with pytest.raises(InputError, match="needs at least 400 usable answers and the journal has 200"):
        fare(observed.head(400), model.median_tokens_)
    with pytest.raises(InputError, match="reference=199 should be at least 200"):
        fare(observed, model.median_tokens_, reference=199)


def test_a_prompt_is_held_out_wherever_it_comes_again():
    prompts = [f"p{i % 300}" for i in range(3000)]
    out = held_out(prompts, seed=0)
    assert 0.13 < out.mean() < 0.27
    assert (out[:300] == out[300:600]).all()
    assert (held_out(prompts, seed=0) == out).all() and (held_out(prompts, seed=1) != out).any()


def test_retraining_learns_what_was_observed(drifted, model):
    observed = read_observed(drifted)
    done = retrain(model, observed, window=1200, seed=0)
    assert done.against_old.helps and done.against_constant.helps
    assert done.model.kind == "prompt_ridge" and done.model.get_params() == model.get_params()
    assert done.trained_on + done.against_old.rows == 1200
    again = retrain(model, observed, window=1200, seed=0)
    some = observed["prompt"].tolist()[:20]
    assert (again.model.predict(some) == done.model.predict(some)).all()


def test_retraining_is_judged_on_serving_models_that_both_models_know():
    drawn = sharegpt_like.generate(600, seed=0)
    prompts, lengths = drawn["prompt"].tolist(), drawn["output_tokens"].to_numpy(float)
    old = length.make("constant").fit(prompts, lengths, models=["m", "n"] * 300)
    frame = drawn.assign(predicted_tokens=100, censored=False, model=["m", "new"] * 300)
    done = retrain(old, frame)
    assert done.model.models_ == ["m", "new"] and done.against_old.rows + done.unknown_model + done.trained_on == 600
    assert done.against_old.rows > 30 and done.unknown_model > 30


def test_retraining_where_nothing_changed_is_no_gain(model):
    drawn = sharegpt_like.generate(400, seed=0)
    frame = drawn.assign(predicted_tokens=100, censored=False, model=None)
    assert not retrain(model, frame).against_old.helps


def test_a_journal_without_prompts_cannot_be_learned_from(model, tmp_path):
    path = journal_of(tmp_path / "x", [None] * 300, [100] * 300, [50] * 300)
    with pytest.raises(InputError, match="--journal-prompts"):
        rows_of(read_observed(path), model)


def test_names_of_serving_models_are_passed_on_where_they_matter(model, drifted):
    assert rows_of(read_observed(drifted), model)[2] is None
    named = length.make("constant").fit(["a", "b"], [1, 2], models=["m", "n"])
    assert set(rows_of(read_observed(drifted), named)[2]) == {"m"}


def test_the_commands_find_the_drift_and_cure_it(capsys, drifted, saved, tmp_path):
    words = ("--journal", drifted, "--model", saved)
    code, found = command(capsys, "drift", *words, "--reference", 500)
    assert code == 0 and found["drift"]["kind"] == "longer"
    code, done = command(capsys, "recalibrate", *words, "--out", tmp_path / "a", "--latest", 1000)
    assert code == 0 and done["helps"] and length.load(tmp_path / "a").kind == "recalibrated"
    code, done = command(capsys, "retrain", *words, "--out", tmp_path / "b", "--latest", 1000)
    assert code == 0 and done["against_old"]["helps"] and length.load(tmp_path / "b").kind == "prompt_ridge"


def test_where_nothing_is_gained_nothing_is_written(capsys, model, saved, recent, tmp_path):
    prompts, _ = recent
    noise = np.exp(0.3 * np.random.default_rng(0).standard_normal(len(prompts)))
    told = model.predict(prompts)
    path = journal_of(tmp_path / "sound.jsonl", prompts, told, np.maximum(told * noise, 1))
    words = ("--journal", path, "--model", saved, "--out", tmp_path / "out")
    for name in ("recalibrate", "retrain"):
        code, said = command(capsys, name, *words)
        assert code == 1 and "was not written" in said["error"]
    assert not (tmp_path / "out").exists()
    code, _ = command(capsys, "retrain", *words, "--always")
    assert code == 0 and length.load(tmp_path / "out")


@pytest.mark.parametrize("name", ["recalibrate", "retrain"])
def test_a_folder_that_cannot_be_written_to_is_refused_before_the_work(
    capsys, drifted, saved, tmp_path, name, monkeypatch
):
    def work(*args, **options):
        raise AssertionError("it was begun")

    monkeypatch.setattr("astrolabe_lab.length.feedback.retrain", work)
    monkeypatch.setattr("astrolabe_lab.length.recalibrated.recalibrate", work)
    (tmp_path / "notes.txt").touch()
    code, said = command(capsys, name, "--journal", drifted, "--model", saved, "--out", tmp_path)
    assert code == 2 and "holds other files" in said["error"]


@pytest.mark.parametrize("name", ["drift", "recalibrate", "retrain"])
def test_the_commands_say_what_is_wrong_with_their_input(capsys, saved, tmp_path, name):
    out = [] if name == "drift" else ["--out", tmp_path / "out"]
    code, said = command(capsys, name, "--journal", tmp_path / "none", "--model", saved, *out)
    assert code == 2 and "cannot be read" in said["error"]
    (tmp_path / "empty").touch()
    code, said = command(capsys, name, "--journal", tmp_path / "empty", "--model", saved, *out)
    assert code == 2 and "the journal has 0" in said["error"]
