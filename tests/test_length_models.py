"""Claims about length models that need NumPy alone: what each predicts, and how it is kept on disk."""

import json
import math
import os
import time

import numpy as np
import pytest

from astrolabe_lab import length
from astrolabe_lab.errors import InputError
from astrolabe_lab.length import artifact, survival
from astrolabe_lab.length.baselines import Constant, Noisy, Oracle
from astrolabe_lab.length.head import Head, Ridge, mean_above
from astrolabe_lab.length.pooled import PooledHead
from astrolabe_lab.length.ridge import PromptRidge
from astrolabe_lab.length.wording import FORM, Wording, form, terms

RNG = np.random.default_rng(7)
VERBS = {"List": 60, "Name": 5, "Explain": 300, "Write": 600}


def answers(n, seed=0, sd=0.2):
    """Prompts whose verb sets the median of the answer, and lognormal lengths about it."""
    rng = np.random.default_rng(seed)
    verbs = rng.choice(list(VERBS), n)
    prompts = [f"{verb} something about topic {i % 17}." for i, verb in enumerate(verbs)]
    medians = np.array([VERBS[verb] for verb in verbs], dtype=float)
    return prompts, np.maximum(1, np.rint(medians * np.exp(sd * rng.standard_normal(n)))), medians


# --- what each predicts ---------------------------------------------------------------------------------------


def test_the_constant_is_the_median_whatever_the_prompt():
    model = Constant().fit(["a", "b", "c"], [10, 20, 90])
    assert model.predict(["never seen", ""]).tolist() == [20.0, 20.0]
    assert model.predict_quantiles(["x"], (0.25, 0.75)).tolist() == [[15.0, 55.0]]


def test_every_serving_model_has_its_own_constant():
    model = Constant().fit(["a", "b", "c", "d"], [1, 3, 100, 300], models=["small", "small", "large", "large"])
    assert model.predict(["x", "x"], ["large", "small"]).tolist() == [200.0, 2.0]
    with pytest.raises(InputError, match="tells 2 serving models apart.*large, small"):
        model.predict(["x"])
    with pytest.raises(InputError, match="'huge' is unknown.*knows large, small"):
        model.predict(["x"], "huge")


def test_the_oracle_tells_what_it_was_told_and_refuses_the_rest():
    model = Oracle().fit(["a", "b", "b"], [7, 10, 30])
    assert model.predict(["b", "a"]).tolist() == [20.0, 7.0]
    with pytest.raises(InputError, match="row 1 is not among those the oracle was fitted on"):
        model.predict(["a", "c"])


def test_noise_is_relative_gaussian_and_paired_over_its_levels():
    prompts = [f"prompt {i}" for i in range(20_000)]
    small, large = (
        Noisy(Oracle(), relative).fit(prompts, np.full(len(prompts), 1e6)).predict(prompts) / 1e6 - 1
        for relative in (0.1, 0.2)
    )
    np.testing.assert_allclose(large, 2 * small, atol=1e-9)
    assert abs(small.mean()) < 4 * 0.1 / math.sqrt(len(small))
    assert small.std() == pytest.approx(0.1, rel=0.03)
    assert np.mean(np.abs(small) < 0.1) == pytest.approx(0.6827, abs=0.015)


def test_noise_tells_a_prompt_the_same_however_it_is_batched():
    prompts, lengths, _ = answers(40)
    model = Noisy(Constant(), 0.5, seed=3).fit(prompts, lengths)
    together = model.predict(prompts)
    assert [model.predict([prompt])[0] for prompt in prompts] == together.tolist()
    assert not np.array_equal(Noisy(Constant(), 0.5, seed=4).fit(prompts, lengths).predict(prompts), together)


def test_the_ridge_finds_the_medians_that_the_words_set():
    prompts, lengths, _ = answers(600)
    unseen, true, medians = answers(400, seed=1)
    model = PromptRidge(vocabulary=60).fit(prompts, lengths)
    best = np.abs(true - medians).mean()
    assert np.abs(true - model.predict(unseen)).mean() < 1.1 * best
    told = model.predict_quantiles(unseen, (0.1, 0.5, 0.9))
    assert (np.diff(told, axis=1) > 0).all()
    assert np.mean(true[:, None] <= told, axis=0) == pytest.approx([0.1, 0.5, 0.9], abs=0.06)


def test_amounts_count_as_numbers_not_as_words():
    rng = np.random.default_rng(0)
    amounts = rng.choice([3, 4, 6, 9, 14, 20], 300)
    model = PromptRidge(vocabulary=30).fit([f"List {n} facts." for n in amounts], 30.0 * amounts)
    assert model.predict(["List 11 facts."])[0] == pytest.approx(330, rel=0.15)  # an amount it has not seen


@pytest.mark.parametrize("prompt", ["", " ", "\ud800 half", "日本語のテキスト", "🙂" * 500, "a\0b", "x" * 200_000])
def test_any_text_gets_a_length(prompt):
    prompts, lengths, _ = answers(60)
    told = PromptRidge(vocabulary=20).fit(prompts, lengths).predict_quantiles([prompt], (0.5, 0.9))
    assert told.shape == (1, 2) and np.isfinite(told).all() and 1 <= told[0, 0] <= told[0, 1]


def test_the_ridge_needs_under_a_millisecond_a_prompt():
    prompts, lengths, _ = answers(300)
    model = PromptRidge().fit(prompts, lengths)
    prompt = " ".join(f"word{i}" for i in range(128))
    took = []
    for _ in range(200):  # the fastest of many: others may be using the machine
        began = time.perf_counter()
        model.predict([prompt])
        took.append(time.perf_counter() - began)
    assert min(took) < 1e-3


def test_several_serving_models_learn_from_each_other():
    """A model with ten answers predicts well, because another one has answered hundreds."""
    prompts, lengths, _ = answers(500)
    few, own, _ = answers(10, seed=2)
    unseen, _, medians = answers(200, seed=3)
    names = ["large"] * 500 + ["small"] * 10
    both = PromptRidge(vocabulary=40).fit(prompts + few, np.r_[lengths, np.maximum(own * 0.5, 1)], models=names)
    alone = PromptRidge(vocabulary=40).fit(few, np.maximum(own * 0.5, 1))
    true = 0.5 * medians
    shared, single = (np.abs(told - true).mean() for told in (both.predict(unseen, "small"), alone.predict(unseen)))
    assert shared < 0.5 * single
    assert np.median(both.predict(unseen, "small") / both.predict(unseen, "large")) == pytest.approx(0.5, rel=0.2)


# --- answers that were cut off --------------------------------------------------------------------------------


def test_quantiles_without_cuts_are_numpys():
    values = RNG.lognormal(size=101)
    levels = np.linspace(0, 1, 21)
    np.testing.assert_allclose(survival.quantiles(values, np.zeros(101, bool), levels), np.quantile(values, levels))


def test_kaplan_meier_is_the_textbooks():
    """Survival after each death of the sample 6+ 6 6 6 7 9+ 10 10+ 11+ 13 16 ... (Freireich and others, 1963)."""
    months = [6, 6, 6, 6, 7, 9, 10, 10, 11, 13, 16, 17, 19, 20, 22, 23, 25, 32, 32, 34, 35]
    cut = [0, 0, 0, 1, 0, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1]
    points, reached = survival.distribution(np.array(months, float), np.array(cut, bool))
    survived = dict(zip(points.tolist(), (1 - reached).round(4).tolist(), strict=True))
    expected = {6: 0.8571, 7: 0.8067, 10: 0.7529, 13: 0.6902, 16: 0.6275, 22: 0.5378, 23: 0.4482}
    assert {month: survived[month] for month in expected} == expected


def test_a_cut_changes_no_quantile_below_it_whatever_ties():
    values = [1.0, *[50.0] * 8, 100.0, 200.0]
    cut = np.array(values) == 200.0
    assert survival.quantiles(values, cut, [0.5])[0] == 50.0
    assert survival.distribution(np.array(values), cut)[0].tolist() == [1.0, 50.0, 100.0]
    levels = np.linspace(0, 1, 41)
    for _ in range(20):
        tied = np.r_[RNG.integers(1, 9, 30), 9.0]
        np.testing.assert_allclose(survival.quantiles(tied, tied == 9.0, levels), np.quantile(tied, levels))


def test_where_all_was_cut_the_largest_value_bounds_every_quantile():
    assert survival.quantiles([3.0, 7.0], [True, True], [0.1, 0.9]).tolist() == [7.0, 7.0]
    names, lengths, cut = ["m", "m", "n", "n"], [10, 20, 64, 64], np.array([False, False, True, True])
    constant = Constant().fit(list("abcd"), lengths, models=names, censored=cut)
    assert constant.predict(["e", "e"], ["m", "n"]).tolist() == [15.0, 64.0]
    assert Oracle().fit(["a", "a", "b"], [64, 64, 5], censored=cut[[2, 3, 0]]).predict(["a"]).tolist() == [64.0]
    with pytest.raises(InputError, match="every answer of serving model 'n' was cut off"):
        PromptRidge(vocabulary=40).fit(list("abcd"), lengths, models=names, censored=cut)


@pytest.mark.parametrize("make", [Constant, lambda: PromptRidge(vocabulary=40)])
def test_cut_off_answers_do_not_pull_the_prediction_down(make):
    """Lengths cut at random: a model that is told so stays near the truth, one that is not falls far below."""
    prompts, lengths, _ = answers(1500, sd=0.4)
    limit = np.random.default_rng(5).uniform(20, 900, len(lengths))
    cut = lengths > limit
    seen = np.where(cut, np.floor(limit), lengths)
    whole = make().fit(prompts, lengths).predict(prompts).mean()
    told = make().fit(prompts, seen, censored=cut).predict(prompts).mean()
    untold = make().fit(prompts, seen).predict(prompts).mean()
    assert 0.2 < cut.mean() < 0.5
    assert abs(told - whole) < 0.3 * abs(untold - whole)


def test_the_mean_above_a_point_is_that_of_a_sample():
    z = np.random.default_rng(0).standard_normal(2_000_000)
    for a in (-1.0, 0.0, 1.5):
        assert mean_above(np.array([a]))[0] == pytest.approx(z[z > a].mean(), abs=0.01)
    assert mean_above(np.array([40.0]))[0] == pytest.approx(40.025, abs=1e-3)


# --- the arithmetic -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "d"), [(30, 5), (12, 40)])
@pytest.mark.parametrize("weighted", [False, True])
def test_held_out_predictions_are_those_of_fits_without_the_prompt(n, d, weighted):
    x, y = RNG.standard_normal((n, d)), RNG.standard_normal(n)
    weights = RNG.uniform(0.5, 3, n) if weighted else np.ones(n)
    groups = np.arange(n) // 2  # two answers a prompt
    held = Ridge(x, groups, weights).held_out(y, 0.7)
    for group in (0, 3):
        rest, mine = groups != group, groups == group
        # The rows' centre is that of all rows, prompts held out included; the slope is fitted anew.
        centered = x - np.average(x, axis=0, weights=weights)
        a = np.c_[np.ones(rest.sum()), centered[rest]]
        penalty = np.diag([0.0, *[0.7] * d])
        solution = np.linalg.solve(a.T * weights[rest] @ a + penalty, a.T * weights[rest] @ y[rest])
        np.testing.assert_allclose(held[mine], np.c_[np.ones(mine.sum()), centered[mine]] @ solution, atol=1e-5)


def test_heads_come_back_from_their_arrays():
    x = RNG.standard_normal((40, 6)).astype(np.float32)
    lengths, uncut = np.exp(5 + 0.3 * x[:, 0]) + 1, np.zeros(40, bool)
    head = Head.learn(x, lengths, uncut, np.arange(40))
    again = Head.from_arrays({name: np.asarray(value) for name, value in head.arrays().items()})
    assert np.array_equal(again.quantiles(x, [0.1, 0.9]), head.quantiles(x, [0.1, 0.9]))
    model = np.arange(40) % 2
    pooled = PooledHead.learn(x, np.arange(40), model, lengths, uncut)
    again = PooledHead.from_arrays({name: np.asarray(value) for name, value in pooled.arrays().items()})
    assert np.array_equal(again.quantiles(x, model, [0.5]), pooled.quantiles(x, model, [0.5]))


def test_a_prompts_form_is_a_number_for_every_name():
    assert len(form("")) == len(FORM) == len(form("Write 200 words.\n\nfoo(); bar()?"))
    found = dict(zip(FORM, form("In 200 words, why?"), strict=True))
    assert found["log_words"] == pytest.approx(math.log1p(4))
    assert found["log_largest_amount"] == pytest.approx(math.log1p(200))
    assert found["ends_with_a_question"] == 1.0
    assert "<number> words" in terms("in 200 words")


def test_rows_have_terms_of_length_one():
    wording = Wording.learn(["list five facts", "list six facts", "explain tides"], 10)
    rows = wording.rows(["list nine facts", "unknown utterance"])
    terms_of = rows[:, : len(wording.vocabulary)]
    assert np.linalg.norm(terms_of, axis=1) == pytest.approx([1.0, 0.0])
    assert len(wording.names) == rows.shape[1]


# --- wrong use ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Constant().fit([], []), "at least one prompt"),
        (lambda: Constant().fit("one text", [1]), "a sequence of texts, not str"),
        (lambda: Constant().fit(["a", None], [1, 2]), "row 1 is NoneType"),
        (lambda: Constant().fit(["a"], [1, 2]), "one length a prompt"),
        (lambda: Constant().fit(["a", "b"], [1, 0]), "row 1 is 0 "),
        (lambda: Constant().fit(["a", "b"], [1, math.nan]), "row 1 is nan"),
        (lambda: Constant().fit(["a"], ["long"]), "a sequence of numbers"),
        (lambda: Constant().fit(["a"], [1], models=[""]), "not empty"),
        (lambda: Constant().fit(["a"], [1], censored=[1]), "one truth value a prompt"),
        (lambda: Constant().fit(["a"], [1], censored=[True]), "every answer was cut off"),
        (lambda: Constant().predict(["a"]), "has not been fitted"),
        (lambda: Constant().fit(["a"], [1]).predict_quantiles(["a"], (0.0, 1.0)), "between 0 and 1"),
        (lambda: PromptRidge(vocabulary=-1), "vocabulary=-1 must be"),
        (lambda: PromptRidge(alpha=0), "alpha=0 must be"),
        (lambda: PromptRidge().set_params(aplha=1), "no option 'aplha'; its options: vocabulary, alpha"),
        (lambda: Noisy(Constant(), -1.0), "relative_error=-1.0"),
        (lambda: length.make("prompt_rigde"), "unknown; allowed: .*Did you mean prompt_ridge"),
        (lambda: length.make("recalibrated"), "is not trained: astrolabe length recalibrate makes it"),
        (lambda: length.make("prompt_ridge:alpha"), "'alpha' is not key=value"),
        (lambda: length.make("prompt_ridge:alpha=big"), "alpha=big must be a number"),
        (lambda: length.make("constant:n=1"), "it has no options"),
    ],
)
def test_wrong_use_is_named_with_what_is_allowed(call, says):
    with pytest.raises(InputError, match=says):
        call()


def test_kinds_are_made_from_text():
    assert length.make("prompt_ridge:vocabulary=7,alpha=none") == PromptRidge(7, None)
    assert length.make("noisy:model=constant,relative_error=0.5,seed=2") == Noisy(Constant(), 0.5, 2)
    assert length.make("oracle").get_params() == {}


# --- on disk --------------------------------------------------------------------------------------------------

SAVED = [Constant(), Oracle(), PromptRidge(vocabulary=30), Noisy(PromptRidge(vocabulary=10), 0.3, 1)]


@pytest.mark.parametrize("model", SAVED, ids=lambda model: model.kind)
@pytest.mark.parametrize("names", [None, ["m"] * 60, ["m", "n"] * 30], ids=["unnamed", "one", "two"])
def test_a_saved_model_predicts_the_same(model, names, tmp_path):
    prompts, lengths, _ = answers(60)
    model.fit(prompts, lengths, models=names, censored=np.arange(60) % 7 == 0)
    model.metrics = {"mae": 12.5}
    again = length.load(model.save(tmp_path / "m"))
    assert type(again) is type(model) and again.get_params().keys() == model.get_params().keys()
    expected = model.predict_quantiles(prompts, (0.1, 0.5, 0.9), names)
    assert np.array_equal(again.predict_quantiles(prompts, (0.1, 0.5, 0.9), names), expected)
    manifest = json.loads((tmp_path / "m" / "model.json").read_text())
    assert manifest["metrics"] == again.metrics == {"mae": 12.5}
    assert manifest["data"]["sha256"] == again.data_sha256_ and manifest["versions"]["numpy"] == np.__version__
    assert manifest["data"]["censored"] == 9
    assert not [path for path in (tmp_path / "m").rglob("*") if path.suffix in (".pkl", ".pickle", ".pt", ".bin")]


def test_the_data_hash_is_of_the_rows_not_of_their_order():
    prompts, lengths, _ = answers(20)
    hashes = {Constant().fit(prompts[::step], lengths[::step]).data_sha256_ for step in (1, -1)}
    assert len(hashes) == 1
    lengths[3] += 1
    assert Constant().fit(prompts, lengths).data_sha256_ not in hashes


@pytest.fixture
def saved(tmp_path):
    prompts, lengths, _ = answers(60)
    return PromptRidge(vocabulary=10).fit(prompts, lengths).save(tmp_path / "m")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "model.json").unlink(), "has no model.json, so it is no length model"),
        (lambda folder: (folder / "model.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "model.json").write_text("[1]"), "not of a length model of this lab"),
        (lambda folder: edit(folder, "format", "other"), "not of a length model of this lab"),
        (lambda folder: edit(folder, "version", 99), "version 99, and this release reads 2"),
        (lambda folder: edit(folder, "kind", "psychic"), "unknown kind 'psychic'"),
        (lambda folder: edit(folder, "files", None), "entry 'files' is missing or wrong"),
        (lambda folder: edit(folder, "weights", "../elsewhere"), "entry 'files' is missing or wrong"),
        (lambda folder: edit(folder, "params", {"vocabulary": 3, "extra": 1}), "cannot be read"),
        (lambda folder: next(folder.rglob("head.npz")).unlink(), "head.npz is missing"),
        (lambda folder: flip_a_bit(next(folder.rglob("head.npz"))), "not the file that was saved"),
    ],
)
def test_a_damaged_or_foreign_model_is_refused(saved, damage, says):
    length.load(saved)
    damage(saved)
    with pytest.raises(InputError, match=says):
        length.load(saved)


def test_a_model_of_an_older_release_is_not_read_but_may_be_replaced(saved):
    edit(saved, "version", 1)
    with pytest.raises(InputError, match="version 1, and this release reads 2: train the model again"):
        length.load(saved)
    prompts, lengths, _ = answers(60)
    PromptRidge(vocabulary=20).fit(prompts, lengths).save(saved)
    assert length.load(saved).vocabulary == 20 and len(list(saved.glob("weights-*"))) == 1


def edit(folder, key, value):
    manifest = json.loads((folder / "model.json").read_text())
    manifest[key] = value
    (folder / "model.json").write_text(json.dumps(manifest))


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_pickle_in_the_weights_is_never_opened(saved):
    path = next(saved.rglob("head.npz"))
    np.savez(path, slope=np.array([{"a": 1}], dtype=object))
    manifest = json.loads((saved / "model.json").read_text())
    manifest["files"]["head.npz"] = artifact.sha256(path)
    (saved / "model.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="head.npz cannot be read"):
        length.load(saved)


def test_a_save_that_is_stopped_leaves_the_model_of_before(saved, monkeypatch):
    before = length.load(saved).predict(["List something about topic 1."])
    prompts, lengths, _ = answers(60, seed=9)

    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(artifact, "write_whole", fail)
    with pytest.raises(OSError, match="full"):
        Constant().fit(prompts, lengths).save(saved)
    monkeypatch.undo()
    assert np.array_equal(length.load(saved).predict(["List something about topic 1."]), before)
    Constant().fit(prompts, lengths).save(saved)
    assert isinstance(length.load(saved), Constant)


def test_a_model_takes_the_place_of_a_model_and_of_nothing_else(saved, tmp_path):
    model = Constant().fit(["a"], [5])
    model.save(saved)
    assert [path.name[:8] for path in sorted(saved.iterdir())] == ["model.js", "weights-"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("keep me")
    with pytest.raises(InputError, match=r"holds other files \(thesis.txt"):
        model.save(tmp_path / "mine")
    with pytest.raises(InputError, match="is a file"):
        model.save(tmp_path / "mine" / "thesis.txt")
    assert os.listdir(tmp_path / "mine") == ["thesis.txt"]
