"""Claims about the generated trace: its lengths, its words, and what can be learnt from them."""

import hashlib
import math
import re

import numpy as np
import pytest

from astrolabe_lab import trace
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators.sharegpt_like import MAX_TOTAL_TOKENS, SIGMA, features, generate, noise_floor
from astrolabe_lab.tokens import count_tokens

# Published for the ShareGPT test set of the Astrolabe paper: mean, p50, p99.
PUBLISHED = {"prompt_tokens": (246, 35, 2863), "output_tokens": (326, 286, 1001)}


@pytest.fixture(scope="module")
def texts():
    return generate(10_000, seed=3)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("column", PUBLISHED)
def test_lengths_have_the_published_moments(column, seed):
    lengths = generate(20_000, seed, text=False)[column]
    mean, p50, p99 = PUBLISHED[column]
    assert lengths.mean() == pytest.approx(mean, rel=0.05)
    assert lengths.median() == pytest.approx(p50, rel=0.05)
    assert lengths.quantile(0.99) == pytest.approx(p99, rel=0.10)


def test_every_request_fits_the_model_and_the_trace_contract(texts):
    assert (texts["prompt_tokens"] + texts["output_tokens"]).max() <= MAX_TOTAL_TOKENS
    trace.check(texts, times=False)


def test_the_text_has_the_tokens_it_claims(texts):
    assert texts["prompt"].map(count_tokens).equals(texts["prompt_tokens"])
    assert texts["prompt"].map(str.strip).equals(texts["prompt"])


def test_without_text_the_lengths_are_the_same(texts):
    lengths = generate(10_000, seed=3, text=False)
    assert list(lengths) == ["rid", "prompt_tokens", "output_tokens"] and lengths.equals(texts[list(lengths)])


def test_a_longer_trace_starts_with_the_shorter_one(texts):
    assert generate(500, seed=3).equals(texts.head(500))


def test_the_same_seed_gives_the_same_bytes_on_every_platform(tmp_path):
    digest = hashlib.sha256(trace.save(generate(200, seed=0), tmp_path / "t.csv").read_bytes()).hexdigest()
    assert digest[:16] == "2c4da8e12bf1bd1b"
    assert not generate(200, seed=0).equals(generate(200, seed=1))


def errors(predicted, true):
    error = np.abs(predicted - true)
    return error.mean(), (error / true).mean(), np.log(true / predicted).std()


def test_the_conditional_median_reaches_the_noise_floor_and_nothing_goes_below():
    n = 100_000
    true = generate(n, seed=5, text=False)["output_tokens"].to_numpy()
    median = features(n, seed=5)["median_tokens"].to_numpy()
    floor = noise_floor(n, seed=5)
    mae, mape, log_sd = errors(median, true)
    spread = np.abs(median - true).std() / math.sqrt(n)
    assert abs(mae - floor.mae_tokens) < 4 * spread
    assert mape == pytest.approx(floor.mape, rel=0.02)
    assert log_sd == pytest.approx(floor.log_sd, rel=0.01)
    for factor in (0.9, 0.95, 1.05, 1.1):
        assert errors(median * factor, true)[0] > mae
    shorter = np.maximum(np.rint(median * math.exp(-(SIGMA**2))), 1)
    assert errors(shorter, true)[1] == pytest.approx(floor.lowest_mape, rel=0.02)
    assert floor.lowest_mape < floor.mape


def test_the_noise_floor_agrees_with_its_closed_form():
    floor, medians = noise_floor(), features(20_000)["median_tokens"]
    c = math.exp(SIGMA**2 / 2) * math.erf(SIGMA / math.sqrt(2))
    assert floor.mae_tokens == pytest.approx(c * medians.mean(), rel=0.01)
    assert floor.mape == pytest.approx(c, rel=0.01)
    assert floor.log_sd == pytest.approx(SIGMA, rel=0.01)


def test_the_residual_noise_is_the_same_for_every_task():
    n = 50_000
    rows = features(n, seed=6)
    rows["residual"] = np.log(generate(n, 6, text=False)["output_tokens"] / rows["median_tokens"])
    long = rows[rows["median_tokens"] >= 20].groupby("task")["residual"].agg(["median", "std", "count"])
    assert (long["median"].abs() < 5 * 1.2533 * SIGMA / np.sqrt(long["count"])).all()
    assert (abs(long["std"] - SIGMA) < 5 * SIGMA / np.sqrt(2 * long["count"])).all()


def test_the_words_are_all_it_takes_to_know_the_median():
    """Prompts that say the same but for topic, opener and remarks have one conditional median."""
    n = 5_000
    rows = features(n, seed=8)
    groups = rows.groupby(["task", "style", "amount", "pasted_tokens"])["median_tokens"]
    assert groups.nunique().max() == 1
    prompts = generate(n, seed=8)["prompt"]
    said = rows["amount"].gt(0)
    assert all(str(a) in re.findall(r"\d+", p) for a, p in zip(rows["amount"][said], prompts[said], strict=True))
    assert all(style in p for style, p in zip(rows["style"], prompts, strict=True))
    assert (rows["pasted_tokens"].gt(0) == prompts.str.contains("\n\n")).all()


def test_a_bag_of_words_learns_most_of_what_there_is(texts):
    """Ridge on words of the request against log length: far better than a constant, and above the floor."""
    heads = [prompt.partition("\n\n")[0] for prompt in texts["prompt"]]
    words = [set(re.findall(r"\w+", head.lower())) for head in heads]
    vocabulary = {word: i for i, word in enumerate(sorted(set().union(*words)))}
    x = np.zeros((len(words), len(vocabulary) + 2))
    for row, present in zip(x, words, strict=True):
        row[[vocabulary[word] for word in present]] = 1
    x[:, -2], x[:, -1] = 1, np.log(texts["prompt_tokens"])
    y = texts["output_tokens"].to_numpy()
    train, test = slice(0, 8000), slice(8000, None)
    normal = x[train].T @ x[train] + np.eye(x.shape[1])
    predicted = np.exp(x[test] @ np.linalg.solve(normal, x[train].T @ np.log(y[train])))
    learnt = errors(predicted, y[test])[0]
    constant = errors(np.median(y[train]), y[test])[0]
    floor = noise_floor(2000, seed=3).mae_tokens
    assert floor < learnt < floor + 0.5 * (constant - floor)


@pytest.mark.parametrize("n", [0, -1, 2.5, "10", True, None])
def test_a_wrong_number_of_requests_is_refused(n):
    with pytest.raises(InputError, match="integer >= 1"):
        generate(n)


def test_a_wrong_seed_is_refused():
    with pytest.raises(InputError, match="integer >= 0"):
        generate(5, seed=-1)
