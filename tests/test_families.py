"""Claims about the four families: their laws, their words, their SLOs, and what can be known of an answer."""

import hashlib
import math
import re
from statistics import NormalDist

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab import trace
from astrolabe_lab.arrivals import parse
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import families
from astrolabe_lab.generators.families import NOISE_SIGMA, generate
from astrolabe_lab.generators.families_wording import write
from astrolabe_lab.rng import stream
from astrolabe_lab.tokens import count_tokens

# As the second paper's families were specified: (median, sigma, low, high) of prompt and answer, share tight.
SPECIFIED = {
    "chat": ((200, 0.7, 8, 1024), (200, 0.5, 16, 512), 0.75),
    "documents": ((1200, 0.4, 300, 4000), (120, 0.5, 16, 400), 0.25),
    "reasoning": ((120, 0.6, 16, 600), (700, 0.5, 200, 2400), 0.50),
}
N = 40_000


def law_of(family, column):
    return SPECIFIED[family][0 if column == "prompt_tokens" else 1]


def distance(sample, median, sigma, low, high):
    """Kolmogorov-Smirnov distance to the rounded, clipped lognormal, at every whole number."""
    at = np.arange(low, high)
    cdf = np.array([NormalDist(math.log(median), sigma).cdf(math.log(k + 0.5)) for k in at])
    return np.abs(np.searchsorted(np.sort(sample), at, side="right") / len(sample) - cdf).max()


@pytest.mark.parametrize("column", ["prompt_tokens", "output_tokens"])
@pytest.mark.parametrize("name", SPECIFIED)
def test_lengths_follow_the_clipped_lognormal_law(name, column):
    sample = generate(name, N, seed=1, text=False)[column]
    median, sigma, low, high = law_of(name, column)
    assert sample.min() >= low and sample.max() <= high
    assert distance(sample, median, sigma, low, high) < 1.63 / math.sqrt(N)  # 1 %
    assert distance(sample, median * 1.03, sigma, low, high) > 1.63 / math.sqrt(N)
    beyond = 1 - NormalDist(math.log(median), sigma).cdf(math.log(high - 0.5))
    assert abs((sample == high).sum() - N * beyond) < 4.5 * math.sqrt(N * beyond) + 1  # clipped, not drawn again


@pytest.mark.parametrize("name", [*SPECIFIED, "mixed"])
def test_prompt_and_answer_lengths_are_independent_within_a_family(name):
    for _, rows in generate(name, N, seed=2, text=False).groupby("family"):
        ranks = rows[["prompt_tokens", "output_tokens"]].rank()
        assert abs(ranks.corr().iloc[0, 1]) < 4.5 / math.sqrt(len(rows))


def test_mixed_has_the_shares_and_each_part_its_family_s_law():
    frame = generate("mixed", N, seed=3, text=False)
    for family, share in (("chat", 0.65), ("documents", 0.15), ("reasoning", 0.20)):
        rows = frame[frame["family"] == family]
        assert abs(len(rows) - N * share) < 4.5 * math.sqrt(N * share * (1 - share))
        for column in ("prompt_tokens", "output_tokens"):
            assert distance(rows[column], *law_of(family, column)) < 1.63 / math.sqrt(len(rows))
        assert abs((rows["slo"] == "tight").sum() - len(rows) * 0.75) < 4.5 * math.sqrt(len(rows) * 0.75 * 0.25)


@pytest.mark.parametrize("name", SPECIFIED)
def test_the_share_of_tight_slos_is_the_family_s(name):
    frame, share = generate(name, N, seed=4, text=False), SPECIFIED[name][2]
    assert abs((frame["slo"] == "tight").sum() - N * share) < 4.5 * math.sqrt(N * share * (1 - share))
    assert set(frame["family"]) == {name}


def test_the_mixed_family_comes_in_the_paper_s_bursts_and_the_others_evenly():
    profile = parse(families.ARRIVALS["mixed"]).profile
    assert (profile.high, profile.high_s, profile.low_s, round(profile.low, 2)) == (1.7, 1.0, 3.0, 0.77)
    assert dict.fromkeys(SPECIFIED, "poisson") | {"mixed": families.ARRIVALS["mixed"]} == families.ARRIVALS


@pytest.mark.parametrize("name", families.NAMES)
def test_the_text_has_the_tokens_it_claims_and_asks_for_the_words(name):
    frame, told = generate(name, 3000, seed=5), families.features(name, 3000, seed=5)
    assert (frame["prompt"].map(count_tokens) == frame["prompt_tokens"]).all()
    asked = [int(re.findall(r"(\d+) words", prompt)[-1]) for prompt in frame["prompt"]]
    assert asked == told["words"].tolist() and told["family"].equals(frame["family"])
    assert (frame["prompt"] == frame["prompt"].str.strip()).all()
    trace.check(frame, times=False)


@pytest.mark.parametrize("family", SPECIFIED)
@pytest.mark.parametrize("shortest", [True, False])
def test_the_shortest_and_longest_prompts_have_their_text_too(family, shortest):
    """Prompts at the limits are too rare to meet by chance: 2 in a million chats have 8 tokens."""
    (_, _, *limits), (_, _, least, most), _ = SPECIFIED[family]
    tokens = np.full(200, limits[0 if shortest else 1])
    words = np.linspace(0.75 * least, 0.75 * most, 200).astype(int)
    texts = write([family] * 200, tokens, words, stream(0, "limits"))
    assert [count_tokens(text) for text in texts] == tokens.tolist()
    assert all(f"{asked} words" in text for text, asked in zip(texts, words, strict=True))


@pytest.mark.parametrize("name", SPECIFIED)
def test_given_the_prompt_the_answer_is_lognormal_about_what_it_asks_for(name):
    rows = generate(name, N, seed=6, text=False)
    median = families.features(name, N, seed=6)["median_tokens"]
    _, _, low, high = law_of(name, "output_tokens")
    inside = (median > low * 2.5) & (median < high / 2.5)  # where clipping takes nothing
    residual = np.log(rows["output_tokens"] / median)[inside]
    n = len(residual)
    assert n > 1000 and abs(residual.std() - NOISE_SIGMA) < 4.5 * NOISE_SIGMA / math.sqrt(2 * n)
    assert abs(residual.mean()) < 4.5 * NOISE_SIGMA / math.sqrt(n)
    best = (rows["output_tokens"] - median).abs().mean()
    for factor in (0.9, 1.1):
        assert (rows["output_tokens"] - median * factor).abs().mean() > best


@pytest.mark.parametrize("name", families.NAMES)
def test_a_longer_trace_starts_with_the_shorter_one_and_text_changes_no_length(name):
    long = generate(name, 400, seed=7)
    pd.testing.assert_frame_equal(generate(name, 150, seed=7), long.head(150))
    pd.testing.assert_frame_equal(generate(name, 400, seed=7, text=False), long.drop(columns="prompt"))
    assert not long["output_tokens"].equals(generate(name, 400, seed=8)["output_tokens"])


def test_the_same_seed_gives_the_same_bytes_on_every_platform(tmp_path):
    content = trace.save(generate("mixed", 300, seed=0), tmp_path / "t.csv").read_bytes()
    assert hashlib.sha256(content).hexdigest()[:16] == "19b67b3d989e62ed"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: generate("talk", 5), "family 'talk' is unknown: allowed are chat, documents, reasoning, mixed"),
        (lambda: generate("chat", 0), "integer >= 1"),
        (lambda: generate("chat", 2.5), "integer >= 1"),
        (lambda: generate("chat", 5, seed=-1), "seed="),
    ],
)
def test_wrong_input_is_named_with_what_is_allowed(call, says):
    with pytest.raises(InputError, match=says):
        call()
