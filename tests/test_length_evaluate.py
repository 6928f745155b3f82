"""Claims about judging length models: nothing flatters them."""

import json
import math
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab import cli, length
from astrolabe_lab.cli import feedback as cli_feedback
from astrolabe_lab.cli import length as cli_length
from astrolabe_lab.cli import tag as cli_tag
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.length import data, metrics
from astrolabe_lab.length.baselines import Constant
from astrolabe_lab.length.evaluate import Evaluation, across_sources, evaluate, train
from astrolabe_lab.length.ridge import PromptRidge
from astrolabe_lab.length.split import Split, by_prompt
from astrolabe_lab.measure import t_interval


def answers(n=300, seed=0, samples=1, model="m", source="s", sd=0.3, scale=1.0, tail=""):
    """A frame of answers: the prompt's verb sets the median, lognormal noise the rest."""
    rng = np.random.default_rng(seed)
    verbs = rng.choice(["List", "Name", "Explain", "Write"], n)
    medians = scale * pd.Series(verbs).map({"List": 80.0, "Name": 8.0, "Explain": 250.0, "Write": 600.0}).to_numpy()
    rows = []
    for sample in range(samples):
        lengths = np.maximum(1, np.rint(medians * np.exp(sd * rng.standard_normal(n))))
        for i in range(n):
            prompt = f"{verbs[i]} number {i} of {source}{tail}"
            rows.append((data.prompt_uid(prompt), prompt, lengths[i], model, False, source, sample))
    return pd.DataFrame(rows, columns=list(data.COLUMNS))


# --- judging --------------------------------------------------------------------------------------------------


def test_a_model_stands_beside_the_constant_of_the_same_answers():
    found = evaluate(answers(), "constant", splits=3)
    table = found.splits
    assert (table["mae"] == table["constant_mae"]).all() and (table["concordance"] == 0).all()
    assert found.summary()["reduction"] == 0 and found.summary()["splits"] == 3
    assert table["n_train"].tolist() == [240] * 3 and table["n_test"].tolist() == [60] * 3
    assert len(found.predictions) == 180


def test_prompts_that_are_judged_were_not_learned_from():
    """Of answers that only the exact prompt could tell, a model with a perfect memory learns nothing."""

    class Memory(Constant):
        kind = "memory"

        def _learn(self, samples):
            super()._learn(samples)
            self.seen = dict(zip(samples.prompts, samples.lengths, strict=True))

        def _quantiles(self, prompts, models, levels):
            plain = super()._quantiles(prompts, models, levels)
            known = np.array([self.seen.get(prompt, np.nan) for prompt in prompts])
            return np.where(np.isnan(known)[:, None], plain, known[:, None])

    found = evaluate(answers(100, samples=3), Memory(), splits=4)
    assert (found.splits["mae"] == found.splits["constant_mae"]).all()


def test_a_good_model_closes_the_gap_between_constant_and_floor():
    found = evaluate(answers(400, samples=2), PromptRidge(vocabulary=30), splits=2).summary()
    assert found["floor_prompts"] == 400 and found["reduction"] > 0.4
    assert found["gap_closed"] > 0.9
    assert found["coverage_p90"] == pytest.approx(0.9, abs=0.06)
    assert found["concordance"] > 0.6 and found["pinball_p90"] < found["constant_pinball_p90"]


def test_the_floor_of_data_made_here_is_the_known_one():
    """And a ridge on the wording goes most of the way to it."""
    found = evaluate(data.generated(1500), "prompt_ridge:vocabulary=400").summary()
    assert found["floor_mae"] == pytest.approx(sharegpt_like.noise_floor().mae_tokens)
    assert found["gap_closed"] > 0.6
    assert found["mae"] > found["floor_mae"]


def test_the_oracle_is_told_the_truth_and_noise_on_it_comes_out_as_asked():
    assert evaluate(answers(), "oracle").summary()["mae"] == 0
    noisy = evaluate(answers(2000), "noisy:model=oracle,relative_error=0.3", test=0.9).summary()
    assert noisy["mape"] == pytest.approx(0.3 * math.sqrt(2 / math.pi), rel=0.08)


def test_the_interval_is_wider_than_one_for_independent_splits():
    gains = np.array([10.0, 12.0, 8.0, 14.0])
    splits = pd.DataFrame(
        {
            "split": list("abcd"),
            "seed": range(4),
            "mae": 100 - gains,
            "constant_mae": 100.0,
            **dict.fromkeys(("n_train", "n_prompts_train"), 80),
            **dict.fromkeys(("n_test", "n_prompts_test"), 20),
            **dict.fromkeys(("n_pool", "n_copies_left_out", "n_censored_test", "n_unknown_model_test"), 0),
        }
    )
    found = Evaluation(splits, pd.DataFrame(), None).summary()
    from scipy.stats import t

    half = t.ppf(0.975, 3) * gains.std(ddof=1) * math.sqrt(1 / 4 + 20 / 80)
    assert found["reduction"] == pytest.approx(0.11)
    assert found["reduction_high"] - found["reduction_low"] == pytest.approx(2 * half / 100)


def test_answering_every_prompt_many_times_makes_no_interval_narrower():
    once = answers(120)
    found = [
        evaluate(pd.concat([once.assign(sample=i) for i in range(n)]), PromptRidge(vocabulary=20)).summary()
        for n in (1, 9)
    ]
    low, high = (np.array([row[name] for row in found]) for name in ("reduction_low", "reduction_high"))
    assert low[0] < low[1] + 0.02 and high[1] - low[1] == pytest.approx(high[0] - low[0], rel=0.2)
    values, prompts = np.random.default_rng(11).random(40), np.arange(40)
    assert metrics.mean_over_prompts(values, prompts) == pytest.approx(t_interval(values))
    assert metrics.mean_over_prompts(np.repeat(values, 9), np.repeat(prompts, 9)) == pytest.approx(t_interval(values))


def test_serving_models_that_nothing_was_learned_of_are_counted_and_not_judged():
    frame = pd.concat([answers(200), answers(1, seed=5, model="rare", source="r")], ignore_index=True)
    seed = next(s for s in range(50) if frame["prompt_uid"].iloc[-1] in by_prompt(frame, s).test)
    found = evaluate(frame, PromptRidge(vocabulary=20), first_seed=seed)
    assert found.splits["n_unknown_model_test"].tolist() == [1] and set(found.predictions["model"]) == {"m"}
    fitted, _ = train(frame, PromptRidge(vocabulary=20), seed=seed)
    assert fitted.metrics["n_unknown_model_test"] == 1
    with pytest.raises(InputError, match="no answer to judge is by a serving model with answers to learn from"):
        evaluate(answers(50).assign(model=[f"m{i}" for i in range(50)]), "constant")


def test_groups_show_where_the_error_is():
    found = evaluate(answers(600), PromptRidge(vocabulary=30))
    for what in ("prompt_length", "length", "source", "model"):
        table = found.by(what)
        assert table["n"].sum() == 120
        assert np.average(table["mae"], weights=table["n"]) == pytest.approx(found.summary()["mae"])
    by_length = found.by("length")
    assert by_length["mean_tokens"].is_monotonic_increasing
    assert by_length["bias"].iloc[0] > by_length["bias"].iloc[-1]  # the longest of all are told too short
    with pytest.raises(InputError, match="allowed are prompt_length, length, source and model"):
        found.by("colour")


def test_other_models_help_where_own_answers_are_few():
    few = answers(60, seed=1, model="small", scale=0.5)
    frame = pd.concat([few, answers(500, seed=2, model="large", source="t")], ignore_index=True)
    options = {"served_model": "small", "splits": 3}
    alone = evaluate(frame, PromptRidge(vocabulary=40), **options).summary()
    pooled = evaluate(frame, PromptRidge(vocabulary=40), pool=True, **options).summary()
    assert pooled["n_pool"] == 500 and alone["n_pool"] == 0
    assert pooled["n_train"] == alone["n_train"] == 48 and pooled["constant_mae"] == alone["constant_mae"]
    assert pooled["mae"] < alone["mae"]


def test_near_copies_in_other_sources_are_kept_out_unless_asked_for():
    own = answers(80, seed=1, model="small", source="s", tail=" with one more clause to it")
    copied = own.assign(model="large", source="t", prompt=own["prompt"] + " Input:")
    copied["prompt_uid"] = copied["prompt"].map(data.prompt_uid)
    frame = pd.concat([own, copied], ignore_index=True)
    options = {"served_model": "small", "pool": True}
    assert evaluate(frame, "constant", **options).splits["n_copies_left_out"].min() >= 16
    kept = evaluate(frame, "constant", keep_copies=True, **options).splits
    assert kept["n_copies_left_out"].eq(0).all() and kept["n_pool"].eq(80).all()


def test_learning_from_one_source_is_judged_on_another():
    frame = pd.concat([answers(150, source="a"), answers(150, seed=1, source="b", scale=4.0)], ignore_index=True)
    table = across_sources(frame, PromptRidge(vocabulary=30)).set_index(["train_source", "test_source"])
    assert len(table) == 4
    assert table.loc[("a", "a"), "mae"] < table.loc[("a", "a"), "constant_mae"]
    # Away from home the order is still told, the size is not.
    assert table.loc[("a", "b"), "concordance"] > 0.5 and table.loc[("a", "b"), "mae"] > table.loc[("b", "b"), "mae"]
    assert table.loc[("a", "b"), "home_constant_mae"] == table.loc[("b", "b"), "constant_mae"]
    # The constants know the serving models, as the model does.
    parts = [("a", "m", 1.0), ("a", "n", 9.0), ("b", "m", 1.0), ("b", "o", 1.0)]
    mixed = pd.concat([answers(150, source=s, model=m, scale=k) for s, m, k in parts], ignore_index=True)
    table = across_sources(mixed, "constant").set_index(["train_source", "test_source"])
    assert (table["mae"] == table["constant_mae"]).all()
    shared = mixed[(mixed["source"] == "b") & (mixed["model"] == "m")]
    assert table.loc[("a", "b"), "n_test"] == by_prompt(mixed).rows(shared, "test").sum()
    with pytest.raises(InputError, match="needs two of them"):
        across_sources(answers(50), "constant")


def test_training_keeps_what_it_was_judged_by(tmp_path):
    fitted, drawn = train(answers(), PromptRidge(vocabulary=20), seed=3)
    assert drawn.name == fitted.metrics["split"] == "prompts-3"
    assert fitted.n_samples_ == 240 and fitted.metrics["mae"] < fitted.metrics["constant_mae"]
    assert length.load(fitted.save(tmp_path / "m")).metrics == fitted.metrics


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"splits": 0}, "splits=0"),
        ({"served_model": "mm"}, "Did you mean 'm'"),
        ({"pool": True}, "needs the served model"),
        ({"pool": ["x"], "served_model": "m"}, "source 'x' is not in the data; its sources: s"),
        ({"test": 0.001}, "too few"),
    ],
)
def test_wrong_questions_are_refused(options, says):
    with pytest.raises(InputError, match=says):
        evaluate(answers(50), "constant", **options)


# --- the commands ---------------------------------------------------------------------------------------------


@pytest.fixture
def pooled(tmp_path):
    """Two files as a data set of prompts and lengths comes: joined by prompt_uid."""
    frame = pd.concat([answers(120, model="m"), answers(120, model="n", scale=2.0)], ignore_index=True)
    prompts = frame.drop_duplicates("prompt_uid")[["prompt_uid", "prompt"]]
    prompts.to_json(tmp_path / "P.jsonl.gz", orient="records", lines=True)
    frame.drop(columns=["prompt", "censored", "sample"]).to_csv(tmp_path / "L.csv.gz", index=False)
    return ["--prompts", str(tmp_path / "P.jsonl.gz"), "--lengths", str(tmp_path / "L.csv.gz")]


@pytest.mark.length
def test_the_command_judges_a_kind_of_model(pooled, tmp_path, capsys):
    words = ["length", "evaluate", *pooled, "--served-model", "m", "--model", "prompt_ridge:vocabulary=20"]
    assert cli.main([*words, "--splits", "2", "--by", "length", "--out", str(tmp_path / "o.csv"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert {"mae", "mape", "concordance", "constant_mae", "n_train", "n_test"} <= set(record)
    assert (record["n_train"], record["n_test"], record["splits"]) == (96, 24, 2)
    assert record["mae"] < record["constant_mae"] and len(pd.read_csv(tmp_path / "o.csv")) == 48
    assert sum(row["n"] for row in record["by"]["rows"]) == 48
    assert cli.main([*words, "--splits-dir", str(tmp_path / "kept" / "splits"), "--json"]) == 0
    kept = tmp_path / "kept" / "splits" / "prompts-0.json"
    assert Split.load(kept).name == "prompts-0"
    split = json.loads(kept.read_text())
    split["test"], split["train"] = split["test"][:-4], split["train"] + split["test"][-4:]
    kept.write_text(json.dumps(split))
    capsys.readouterr()
    assert cli.main([*words, "--splits-dir", str(tmp_path / "kept" / "splits"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n_test"] == 20  # the one that is there is taken
    assert cli.main([*words, "--pool"]) == 0
    assert "of other models to learn from" in capsys.readouterr().out


@pytest.mark.length
def test_the_command_trains_a_model_that_traces_are_tagged_with(tmp_path, capsys):
    out = tmp_path / "model"
    words = ["length", "train", "--data", "sharegpt_like:300", "--model", "prompt_ridge:vocabulary=50"]
    assert cli.main([*words, "--out", str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["floor_mae"] == pytest.approx(sharegpt_like.noise_floor().mae_tokens)
    assert json.loads((out / "split.json").read_text())["name"] == "prompts-0"
    trace = sharegpt_like.generate(50, seed=1)
    tagged = length.attach(trace, f"tagger:{out}")["predicted_tokens"]
    expected = length.load(out).predict(trace["prompt"].tolist())
    assert tagged.tolist() == np.maximum(1, np.rint(expected)).astype(int).tolist()
    with pytest.raises(InputError, match="needs a column prompt, which this trace lacks"):
        length.attach(sharegpt_like.generate(5, text=False), f"tagger:{out}")


@pytest.mark.length
@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_answers_of_one_length_leave_nothing_to_gain_and_that_is_said(command, tmp_path, capsys):
    answers = tmp_path / "a.jsonl"
    answers.write_text("".join(json.dumps({"prompt": f"p {i}", "response_tokens": 7}) + "\n" for i in range(40)))
    words = ["length", command, "--data", str(answers)] + (["--out", str(tmp_path / "m")] if command == "train" else [])
    assert cli.main(words) == 0
    assert "MAE 0.0 tokens, the constant median's 0.0: unknown less" in capsys.readouterr().out


@pytest.mark.length
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give --data, or --lengths with --prompts"),
        (["--lengths", "l.csv"], "go together"),
        (["--data", "sharegpt_like:none"], "number of requests"),
        (["--data", "sharegpt_like:50", "--keep-copies"], "give --pool too"),
        (["--data", "sharegpt_like:50", "--served-model", "m"], "there are ''"),
        (["--data", "sharegpt_like:50", "--model", "psychic"], "'psychic' is unknown"),
        (["--data", "nowhere.csv"], "does not exist"),
        (["--data", "nowhere.csv", "--column", "prompt"], "not PART=NAME"),
    ],
)
def test_wrong_words_end_with_code_2(words, says, capsys):
    assert cli.main(["length", "evaluate", *words]) == 2
    assert says in capsys.readouterr().err


def test_every_command_that_help_and_readme_tell_is_one_that_is_taken():
    texts = [example for module in (cli_length, cli_feedback) for _, example, _ in module.COMMANDS.values()]
    readme, contributing = (
        (Path(__file__).parents[1] / f"{name}.md").read_text() for name in ("README", "CONTRIBUTING")
    )
    texts += [
        readme.partition("## How long will the answer be?")[2].partition("\n## ")[0],
        contributing,
        cli_tag.EXAMPLE,
    ]
    lines = [line.strip() for text in texts for line in text.replace("\\\n", " ").splitlines()]
    told = [line for line in lines if line.startswith("astrolabe ")]
    assert len(told) > 12
    for line in told:
        words = shlex.split(line, comments=True)
        cli.build_parser().parse_args([word for word in words[1:] if word != "&"])


# --- published data -------------------------------------------------------------------------------------------


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.length
def test_a_ridge_on_the_wording_beats_the_constant_on_published_answers(real):
    frame = data.load(real("lengths/pooled_lengths.csv.gz"), prompts=real("lengths/pooled_prompts.jsonl.gz"))
    found = evaluate(frame, "prompt_ridge", served_model="vicuna-13b", splits=5).summary()
    assert found["reduction"] > 0.08 and found["concordance"] > 0.28
    found = evaluate(frame, "prompt_ridge:vocabulary=600", served_model="gpt-4 (GPTeacher)").summary()
    assert found["mae"] < 27.5 and 34 < found["constant_mae"] < 37
