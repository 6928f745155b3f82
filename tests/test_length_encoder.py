"""Claims about encoders as length models: what is read of a prompt, what is kept, and that training can be resumed."""

import json
import os
import shlex
import signal
import subprocess
import sys

import numpy as np
import pytest
from encoders import tiny_bert

from astrolabe_lab import cli, length
from astrolabe_lab.cli.length import COMMANDS
from astrolabe_lab.errors import InputError

pytestmark = pytest.mark.length

VERBS = {"list": 60, "name": 5, "explain": 300, "write": 600}
WORDS = [*VERBS, *"a the of about something please topic one two three four".split()]


def answers(n, seed=0):
    """Prompts whose verb sets the median of the answer, and lengths about it."""
    rng = np.random.default_rng(seed)
    verbs = rng.choice(list(VERBS), n)
    numbers = rng.choice(["one", "two", "three", "four"], (n, 6))
    prompts = [f"please {verb} something about topic {' '.join(row)}" for verb, row in zip(verbs, numbers, strict=True)]
    medians = np.array([VERBS[verb] for verb in verbs], dtype=float)
    return prompts, np.maximum(1, np.rint(medians * np.exp(0.2 * rng.standard_normal(n)))), medians


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return str(tiny_bert(tmp_path_factory.mktemp("bert"), WORDS))


@pytest.fixture(autouse=True)
def kept_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("ASTROLABE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- what is read ---------------------------------------------------------------------------------------------


def test_a_long_prompt_is_read_at_its_head_and_its_tail(bert):
    from astrolabe_lab.length.text_encoder import TextEncoder

    encoder = TextEncoder(bert, max_tokens=10)
    words = ["list", *["the"] * 50, "four"]
    ids = encoder.ids([" ".join(words), "list four", ""])
    assert [len(row) for row in ids] == [10, 4, 2]
    known = encoder.tokenizer.convert_ids_to_tokens(ids[0])
    assert known == ["[CLS]", "list", "the", "the", "the", "the", "the", "the", "four", "[SEP]"]
    assert encoder.tokenizer("list four")["input_ids"] == ids[1]


def test_vectors_do_not_depend_on_the_batch(bert):
    from astrolabe_lab.length.text_encoder import TextEncoder

    encoder = TextEncoder(bert, max_tokens=32)
    prompts = ["list", "explain the topic of three", "", "write " * 40]
    together = encoder.embed(prompts)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    for row, prompt in zip(together, prompts, strict=True):
        np.testing.assert_allclose(encoder.embed([prompt])[0], row, atol=2e-5)


def test_the_packaged_encoder_gives_the_vectors_of_sentence_transformers():
    """The published embedding of all-MiniLM-L6-v2 is the mean over tokens, scaled to length 1."""
    from astrolabe_lab.length.text_encoder import TextEncoder

    vectors = TextEncoder().embed(["A man is eating food.", "Somebody eats a meal.", "The market fell today."])
    likeness = vectors @ vectors.T
    assert vectors.shape == (3, 384)
    assert likeness[0, 1] > 0.5 > 0.2 > likeness[0, 2]


def test_vectors_are_kept_on_disk_by_what_they_are_of(bert, tmp_path, monkeypatch):
    from astrolabe_lab.length.text_encoder import EmbeddingCache, TextEncoder

    encoder = TextEncoder(bert, max_tokens=16)
    prompts = [f"list {word}" for word in WORDS] * 2
    first = EmbeddingCache(encoder).embed(prompts)
    read = []
    embed = encoder.embed
    monkeypatch.setattr(encoder, "embed", lambda texts: read.extend(texts) or embed(texts))
    assert np.array_equal(EmbeddingCache(encoder).embed(prompts), first) and not read
    EmbeddingCache(encoder).embed([*prompts, "name four"])
    assert read == ["name four"]
    # Another length of reading is another vector.
    other = TextEncoder(bert, max_tokens=8)
    assert EmbeddingCache(other)._salt != EmbeddingCache(encoder)._salt
    # And so is another precision, chosen after the cache was made.
    cache = EmbeddingCache(encoder)
    assert np.array_equal(cache.embed(["list four"]), embed(["list four"]))
    encoder.bfloat16, read[:] = True, []
    cache.embed(["list four"])
    assert read == ["list four"]


def test_a_spoilt_cache_costs_time_and_nothing_else(bert, tmp_path, capsys):
    from astrolabe_lab.length.text_encoder import EmbeddingCache, TextEncoder

    encoder = TextEncoder(bert, max_tokens=16)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "embeddings.sqlite").write_bytes(b"no database at all, but long enough to look like one" * 9)
    found = EmbeddingCache(encoder).embed(["list four"])
    assert np.allclose(found, encoder.embed(["list four"]), atol=1e-6)
    assert "embeddings are not kept" in capsys.readouterr().err
    cache = EmbeddingCache(encoder)
    for _ in range(3):
        cache.embed(["list four"])
    assert capsys.readouterr().err.count("embeddings are not kept") == 1


# --- frozen ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [0, 30])
def test_a_frozen_encoder_tells_the_verbs_apart_even_with_random_weights(bert, vocabulary, tmp_path):
    prompts, lengths, _ = answers(300)
    unseen, true, medians = answers(120, seed=1)
    model = length.make(f"encoder:max_tokens=32,landmarks=120,vocabulary={vocabulary},encoder={bert}")
    told = model.fit(prompts, lengths).predict_quantiles(unseen, (0.1, 0.5, 0.9))
    assert np.abs(true - told[:, 1]).mean() < 1.6 * np.abs(true - medians).mean()
    assert np.mean(true[:, None] <= told, axis=0) == pytest.approx([0.1, 0.5, 0.9], abs=0.1)
    again = length.load(model.save(tmp_path / "m"))
    np.testing.assert_allclose(again.predict_quantiles(unseen, (0.1, 0.5, 0.9)), told, rtol=1e-5)


def test_another_encoder_in_the_old_ones_place_is_refused(tmp_path):
    folder = tiny_bert(tmp_path / "bert", WORDS)
    prompts, lengths, _ = answers(80)
    model = length.make(f"encoder:max_tokens=32,encoder={folder}").fit(prompts, lengths)
    model.save(tmp_path / "m")
    length.load(tmp_path / "m")
    tiny_bert(folder, WORDS, seed=1)
    with pytest.raises(InputError, match="is not the one that this model was fitted on"):
        length.load(tmp_path / "m")


# --- trained as a whole ---------------------------------------------------------------------------------------

QUICK = "fine_tune=true,max_tokens=32,learning_rate=0.003,head_learning_rate=0.01,checkpoint_every=3"


def weights(model):
    encoder = {f"encoder {name}": value for name, value in model._text.model.state_dict().items()}
    head = {f"head {name}": value for name, value in model._out.state_dict().items()}
    return {name: value.numpy() for name, value in (encoder | head).items()}


def test_a_fine_tuned_encoder_learns_and_comes_back(bert, tmp_path):
    prompts, lengths, _ = answers(240)
    unseen, true, _ = answers(100, seed=1)
    model = length.make(f"encoder:{QUICK},epochs=8,encoder={bert}")
    said = []
    model.progress = said.append
    told = model.fit(prompts, lengths).predict_quantiles(unseen, (0.05, 0.5, 0.9, 0.99))
    constant = np.abs(true - np.median(lengths)).mean()
    assert np.abs(true - told[:, 1]).mean() < 0.4 * constant
    assert (np.diff(told, axis=1) > 0).all() and 0.75 < np.mean(true <= told[:, 2]) <= 1
    assert model.history_[-1]["validation_loss"] < model.history_[0]["validation_loss"]
    assert any(line.startswith("epoch 1 of 8: validation loss") for line in said)
    again = length.load(model.save(tmp_path / "m"))
    np.testing.assert_allclose(again.predict_quantiles(unseen, (0.05, 0.5, 0.9, 0.99)), told, rtol=1e-4)
    files = {path.suffix for path in (tmp_path / "m").rglob("*") if path.is_file()}
    assert files <= {".json", ".safetensors"}


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(bert):
    prompts, lengths, _ = answers(60)
    one, two, other = (
        weights(length.make(f"encoder:{QUICK},epochs=1,seed={seed},encoder={bert}").fit(prompts, lengths))
        for seed in (0, 0, 1)
    )
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert any(not np.array_equal(one[name], other[name]) for name in one)


def test_training_stops_early_and_keeps_the_best(bert):
    prompts, lengths, _ = answers(60)
    rng = np.random.default_rng(0)
    model = length.make(f"encoder:{QUICK},epochs=30,patience=1,encoder={bert}")
    model.fit(prompts, np.maximum(1, rng.permutation(lengths)))  # nothing to learn
    losses = [epoch["validation_loss"] for epoch in model.history_]
    assert len(losses) < 30
    assert losses[-1] > min(losses) and losses[-2] > min(losses)


def test_cut_off_answers_do_not_teach_that_answers_are_short(bert):
    prompts, lengths, _ = answers(240)
    cut = lengths > 200
    seen = np.minimum(lengths, 200.0)
    told, untold = (
        length.make(f"encoder:{QUICK},epochs=4,encoder={bert}")
        .fit(prompts, seen, censored=given)
        .predict_quantiles(["please write something about topic one"], (0.9,))[0, 0]
        for given in (cut, None)
    )
    assert told > 1.1 * untold


def test_serving_models_are_told_apart(bert):
    prompts, lengths, _ = answers(240)
    names = ["brief" if i % 2 else "wordy" for i in range(240)]
    model = length.make(f"encoder:{QUICK},epochs=8,encoder={bert}")
    model.fit(prompts, np.where([n == "brief" for n in names], np.ceil(lengths / 4), lengths), models=names)
    unseen = answers(40, seed=2)[0]
    ratio = model.predict(unseen, "wordy") / model.predict(unseen, "brief")
    assert np.median(ratio) == pytest.approx(4, rel=0.4)


TRAIN = """
import json, sys, numpy as np, torch
torch.set_num_threads(1)
from astrolabe_lab import length
answers = json.load(open(sys.argv[1]))
model = length.make(sys.argv[2])
model.progress = lambda line: print(line, file=sys.stderr, flush=True)
model.fit(answers["prompts"], answers["lengths"]).save(sys.argv[3])
print(json.dumps(model.history_))
"""


@pytest.mark.slow
def test_a_training_that_was_killed_and_resumed_ends_with_the_same_weights(bert, tmp_path):
    prompts, lengths, _ = answers(160)
    (tmp_path / "answers.json").write_text(json.dumps({"prompts": prompts, "lengths": lengths.tolist()}))
    spec = f"encoder:{QUICK},epochs=3,patience=9,encoder={bert}"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def start(spec, out):
        command = [sys.executable, "-c", TRAIN, str(tmp_path / "answers.json"), spec, str(tmp_path / out)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    whole = start(spec, "whole")
    history, said = whole.communicate(timeout=240)
    assert whole.returncode == 0, said
    stopped = start(f"{spec},checkpoint={tmp_path / 'kept'}", "stopped")
    for line in stopped.stderr:  # in the second epoch, between two checkpoints
        if line.startswith("epoch 2, step 2"):
            break
    os.kill(stopped.pid, signal.SIGKILL)
    stopped.communicate()
    assert (tmp_path / "kept" / "checkpoint.safetensors").is_file() and not (tmp_path / "stopped").exists()
    resumed = start(f"{spec},checkpoint={tmp_path / 'kept'}", "stopped")
    again, said = resumed.communicate(timeout=240)
    assert resumed.returncode == 0 and "resumed" in said and "epoch 1 of 3" not in said
    assert json.loads(again) == json.loads(history)
    one, two = (weights(length.load(tmp_path / name)) for name in ("whole", "stopped"))
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert not (tmp_path / "kept" / "checkpoint.safetensors").exists()


def test_a_training_that_has_ended_is_kept_until_its_model_is_saved(bert, tmp_path, monkeypatch):
    prompts, lengths, _ = answers(60)
    model = length.make(f"encoder:{QUICK},epochs=1,encoder={bert},checkpoint={tmp_path / 'kept'}")
    kept, said = tmp_path / "kept" / "checkpoint.safetensors", []
    with monkeypatch.context() as patched:
        patched.setattr(type(model), "_calibrated", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model.fit(prompts, lengths)
    assert kept.is_file()
    model.progress = said.append
    model.fit(prompts, lengths)
    assert "resumed" in said[0] and not any(line.startswith("epoch") for line in said)
    model.save(tmp_path / "model")
    assert not kept.exists()
    kept.touch()  # of another run, in the same place
    length.load(tmp_path / "model").save(tmp_path / "again")
    assert kept.exists()


def test_a_checkpoint_of_another_run_is_not_taken_up(bert, tmp_path):
    from astrolabe_lab.length import finetune

    prompts, lengths, _ = answers(60)
    model = length.make(f"encoder:{QUICK},epochs=2,encoder={bert},checkpoint={tmp_path / 'kept'}")
    seen = []

    def stop(line):
        seen.append(line)
        if line.startswith("epoch 1 of"):
            raise KeyboardInterrupt

    model.progress = stop
    with pytest.raises(KeyboardInterrupt):
        model.fit(prompts, lengths)
    # The end of an epoch is told before it is kept: what is there is from within it.
    assert (tmp_path / "kept" / "checkpoint.safetensors").is_file()
    model.progress = None
    with pytest.raises(InputError, match="is of another run"):
        model.fit(prompts, lengths + 1)
    (tmp_path / "kept" / "checkpoint.safetensors").write_bytes(b"broken")
    with pytest.raises(InputError, match="cannot be read"):
        model.fit(prompts, lengths)
    assert finetune.LEVELS[finetune.MIDDLE] == 0.5


def test_the_papers_setting_is_one_command(tmp_path, capsys):
    """The command that --help tells for RoBERTa-base on ShareGPT, word for word but for four names."""
    prompts, lengths, _ = answers(60)
    text = [
        {"conversations": [{"from": "human", "value": p}, {"from": "gpt", "value": "word " * int(n)}]}
        for p, n in zip(prompts, lengths, strict=True)
    ]
    (tmp_path / "ShareGPT.json").write_text(json.dumps(text))
    out, bert = tmp_path / "model", tiny_bert(tmp_path / "bert", WORDS, longest=512)
    told = COMMANDS["train"][1].partition("the paper's setting")[2].partition("\n")[2].replace("\\\n", " ")
    for paper, small in (
        ("ShareGPT.json", tmp_path / "ShareGPT.json"), ("50000", 50), ("outputs/length", out), ("roberta-base", bert)
    ):  # fmt: skip
        assert paper in told
        told = told.replace(paper, str(small))
    assert cli.main([*shlex.split(told)[1:], "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["n_train"], record["n_test"]) == (40, 10) and record["mae"] > 0
    params = json.loads((out / "model.json").read_text())["params"]
    assert (params["learning_rate"], params["batch_size"], params["epochs"]) == (1e-5, 8, 10)  # the paper's
    assert length.load(out).predict(["list something"]).shape == (1,)
    assert not (tmp_path / "model.checkpoint" / "checkpoint.safetensors").exists()


@pytest.mark.gpu
def test_on_a_gpu_training_and_reading_agree_with_the_cpu(bert, tmp_path):
    prompts, lengths, _ = answers(240)
    model = length.make(f"encoder:{QUICK},epochs=6,device=cuda,encoder={bert}").fit(prompts, lengths)
    model.save(tmp_path / "m")
    unseen = answers(50, seed=1)[0]
    on_cpu = length.load(tmp_path / "m").set_params(device="cpu")
    np.testing.assert_allclose(model.predict(unseen), on_cpu.predict(unseen), rtol=0.1)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("encoder:encoder=nobody/no-such-encoder", "cannot be had"),
        ("encoder:max_tokens=5000", "reads from 4 to 512"),
        ("encoder:device=cuda:99", "cuda:99|no CUDA GPU"),
        ("encoder:device=abacus", "allowed are auto, cpu, cuda"),
        ("encoder:epochs=0", "epochs=0 must be an integer >= 1"),
        ("encoder:learning_rate=0", "learning_rate=0.0 must be a number above 0"),
        ("encoder:validation=0.7", "below 0.5"),
        ("encoder:fine_tune=yes", "must be true or false"),
        ("encoder:layers=3", "unknown option 'layers'"),
    ],
)
def test_wrong_options_are_named(spec, says):
    with pytest.raises(InputError, match=says):
        length.make(spec).fit(["a", "b"], [1, 2])
