"""Tags in this process: in time from the model, otherwise the constant and the reason."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taggers import CountsLetters

from astrolabe_lab.errors import InputError
from astrolabe_lab.length.batching import Batcher, ModelError, Overloaded
from astrolabe_lab.length.breaker import Breaker
from astrolabe_lab.length.prompts import clean
from astrolabe_lab.length.tagging import MAX_ANSWER_TOKENS, Tag, Tagger, as_tokens, model_tag

ANY_TEXT = st.text(st.characters(codec=None), max_size=200)  # halves of surrogate pairs included


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def waited_for(condition, seconds=5.0):
    until_s = time.monotonic() + seconds
    while not condition() and time.monotonic() < until_s:
        time.sleep(0.005)
    return condition()


# --- prompts ------------------------------------------------------------------------------------------------


@given(ANY_TEXT, st.integers(1, 60))
def test_a_cleaned_prompt_is_valid_bounded_and_keeps_head_and_tail(text, most):
    cleaned = clean(text, most)
    cleaned.encode("utf-8")
    assert len(cleaned) <= min(len(text), most)
    if len(text) <= most and text.isprintable():
        assert cleaned == text
    if len(text) > most and text.isascii():
        assert cleaned == text[: most - most // 2] + (text[-(most // 2) :] if most > 1 else "")


def test_only_lone_surrogates_are_replaced():
    assert clean("a\ud83d\ude00b\udc00c\0\N{PILE OF POO}") == "a\N{GRINNING FACE}b\ufffdc\0\N{PILE OF POO}"
    assert clean("") == ""


# --- the batcher --------------------------------------------------------------------------------------------


def test_what_waits_while_the_model_is_busy_goes_to_it_together_in_order():
    gate = threading.Event()
    model = CountsLetters(gate=gate)
    batcher = Batcher(model, max_batch=4)
    first = batcher.submit("first")
    assert waited_for(lambda: model.batches == [["first"]])
    rest = [batcher.submit("x" * i) for i in range(6)]
    gate.set()
    assert first.result(5) == (15.0, 30.0)
    assert [future.result(5)[0] for future in rest] == [10.0 + i for i in range(6)]
    assert [len(batch) for batch in model.batches] == [1, 4, 2]
    batcher.close()


def test_a_batch_waits_for_company_no_longer_than_it_was_told():
    model = CountsLetters()
    batcher = Batcher(model, max_batch=2, max_wait_s=30.0)
    futures = [batcher.submit("a"), batcher.submit("b")]
    assert [future.result(5) for future in futures] == [(11.0, 22.0)] * 2  # full: nobody waits 30 s
    assert model.batches == [["a", "b"]]
    batcher.close(0.1)
    batcher = Batcher(model, max_batch=2, max_wait_s=0.05)
    assert batcher.submit("alone").result(5) == (15.0, 30.0)
    batcher.close()


def test_a_prompt_given_up_in_the_queue_never_reaches_the_model():
    gate = threading.Event()
    model = CountsLetters(gate=gate)
    batcher = Batcher(model)
    first = batcher.submit("first")
    assert waited_for(lambda: model.batches)
    given_up, kept = batcher.submit("given up"), batcher.submit("kept")
    assert given_up.cancel()
    gate.set()
    assert kept.result(5) and first.result(5)
    assert model.batches == [["first"], ["kept"]]
    batcher.close()


@pytest.mark.parametrize("bad", ["crash", "lie"])
def test_a_prompt_that_breaks_the_model_fails_alone(bad):
    gate = threading.Event()
    model = CountsLetters(gate=gate)
    batcher = Batcher(model)
    batcher.submit("first")
    assert waited_for(lambda: model.batches)
    good, broken, other = (batcher.submit(prompt) for prompt in ("good", bad, "other"))
    gate.set()
    assert good.result(5) == (14.0, 28.0) and other.result(5) == (15.0, 30.0)
    with pytest.raises(ModelError):
        broken.result(5)
    assert batcher.submit("again").result(5) == (15.0, 30.0)
    batcher.close()


def test_a_queue_that_is_full_refuses_at_once():
    gate = threading.Event()
    model = CountsLetters(gate=gate)
    batcher = Batcher(model, max_waiting=2)
    batcher.submit("in the model")
    assert waited_for(lambda: model.batches)
    batcher.submit("a"), batcher.submit("b")
    with pytest.raises(Overloaded, match="2 prompts"):
        batcher.submit("c")
    gate.set()
    batcher.close()


def test_closing_cancels_what_waits_and_refuses_what_comes():
    gate = threading.Event()
    model = CountsLetters(gate=gate)
    batcher = Batcher(model, max_batch=1)
    batcher.submit("in the model")
    assert waited_for(lambda: model.batches)
    waiting = batcher.submit("waiting")
    batcher.close(0.05)
    assert waiting.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        batcher.submit("late")
    gate.set()


def test_the_serving_model_is_passed_on_and_an_unknown_one_refused():
    model = CountsLetters()
    model.models_ = ["llama", "qwen"]
    batcher = Batcher(model)
    assert batcher.submit("a", "qwen").result(5)
    assert model.models == [["qwen"]]
    for name, said in (("gpt", "'gpt' is unknown"), (None, "none was given")):
        with pytest.raises(InputError, match=f"{said}.*llama, qwen"):
            batcher.submit("a", name)
    model.models_ = ["llama"]
    assert batcher.submit("a").result(5)
    assert model.models[-1] == ["llama"]
    batcher.close()


# --- tags ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, tokens",
    [(12, 12), (12.4, 12), (0.5, 1), (1e6, 10**6), (0.49, None), (0, None), (-5, None), (1e6 + 1, None)]
    + [(10**400, None), (float("nan"), None), (float("inf"), None), (True, None), ("12", None), (None, None)],
)
def test_a_length_is_a_number_of_tokens_from_one_to_the_most(value, tokens):
    assert as_tokens(value) == tokens


def test_the_p90_is_never_below_the_median():
    assert model_tag(100.0, 90.0) == Tag(100, "model", p90_tokens=100)
    assert model_tag(100.0) == Tag(100, "model")
    assert model_tag(100.0, float("nan")) is None


@settings(max_examples=60, deadline=None)
@given(ANY_TEXT)
def test_any_text_is_tagged(text):
    with Tagger(CountsLetters(), deadline_s=10, fallback=7) as tagger:
        assert tagger.tag(text).source == "model"


def test_a_model_in_time_is_believed():
    with Tagger(CountsLetters(), deadline_s=10, fallback=99) as tagger:
        assert tagger.tag("four") == Tag(14, "model", p90_tokens=28)
        assert tagger.tag("") == Tag(10, "model", p90_tokens=20)
        assert tagger.counts == {"model": 2}


def test_a_slow_model_costs_its_deadline_and_no_more():
    gate = threading.Event()
    with Tagger(CountsLetters(gate=gate), deadline_s=0.1, fallback=99) as tagger:
        began_s = time.monotonic()
        assert tagger.tag("a") == Tag(99, "constant", "late")
        assert 0.1 <= time.monotonic() - began_s < 2
        gate.set()
        assert waited_for(lambda: tagger.tag("b").source == "model")  # what was late is dropped, not mixed up
        assert tagger.tag("cc").predicted_tokens == 12


@pytest.mark.parametrize("prompt, reason", [("crash", "failed"), ("lie", "failed")])
def test_a_model_that_raises_or_lies_gives_the_constant(prompt, reason):
    with Tagger(CountsLetters(), deadline_s=10, fallback=99) as tagger:
        assert tagger.tag(prompt) == Tag(99, "constant", reason)
        assert tagger.tag("a").source == "model"
        assert tagger.counts == {reason: 1, "model": 1}


def test_an_absurd_length_gives_the_constant():
    class Absurd:
        def predict_quantiles(self, prompts, quantiles, models=None):
            return np.full((len(prompts), 2), MAX_ANSWER_TOKENS + 1.0)

    with Tagger(Absurd(), deadline_s=10, fallback=99) as tagger:
        assert tagger.tag("a") == Tag(99, "constant", "absurd")


def test_a_dead_model_soon_costs_nothing():
    clock, gate = Clock(), threading.Event()
    breaker = Breaker(failures=3, cool_s=1, clock=clock)
    with Tagger(CountsLetters(gate=gate), deadline_s=0.02, fallback=99, breaker=breaker) as tagger:
        assert [tagger.tag("a").reason for _ in range(6)] == ["late"] * 3 + ["breaker"] * 3
        began_s = time.monotonic()
        for _ in range(1000):
            tagger.tag("a")
        assert time.monotonic() - began_s < 1  # waiting would take 20 s
        gate.set()
        clock.now_s += 1.01
        assert waited_for(lambda: (clock.__setattr__("now_s", clock.now_s + 31), tagger.tag("bb"))[1].source == "model")
        assert tagger.tag("a").predicted_tokens == 11


def test_two_hundred_threads_get_the_tag_of_their_own_prompt():
    model = CountsLetters(pause_s=0.002)
    with Tagger(model, deadline_s=20, fallback=9999) as tagger, ThreadPoolExecutor(200) as pool:
        tags = list(pool.map(lambda n: tagger.tag("x" * n), range(600)))
    assert [tag.predicted_tokens for tag in tags] == [10 + n for n in range(600)]
    assert tagger.counts == {"model": 600}
    assert max(map(len, model.batches)) > 1


@pytest.mark.parametrize(
    "wrong", [{"deadline_s": 0}, {"deadline_s": "x"}, {"deadline_s": 61}, {"fallback": 0}, {"fallback": "many"}]
)
def test_what_is_no_deadline_or_constant_is_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        Tagger(CountsLetters(), **({"deadline_s": 1, "fallback": 10} | wrong))


def test_a_prompt_that_is_no_text_is_refused():
    with Tagger(CountsLetters(), deadline_s=1, fallback=9) as tagger, pytest.raises(InputError, match="bytes"):
        tagger.tag(b"text")


# --- the breaker --------------------------------------------------------------------------------------------


def test_the_breaker_opens_after_failures_in_a_row_only():
    breaker = Breaker(failures=3, clock=Clock())
    for outcome in (breaker.failed, breaker.failed, breaker.succeeded, breaker.failed, breaker.failed):
        assert breaker.ask()
        outcome()
    assert breaker.ask() and not breaker.open
    breaker.failed()
    assert breaker.open and not breaker.ask()


def test_one_probe_at_a_time_asks_after_the_pause_which_doubles_up_to_a_limit():
    clock = Clock()
    breaker = Breaker(failures=1, cool_s=1, longest_s=5, clock=clock)
    breaker.ask(), breaker.failed()
    for pause_s in (1, 2, 4, 5, 5):
        clock.now_s += pause_s - 0.01
        assert not breaker.ask()
        clock.now_s += 0.02
        assert breaker.ask() and not breaker.ask()
        breaker.failed()
    clock.now_s += 6
    assert breaker.ask()
    breaker.succeeded()
    assert not breaker.open and breaker.ask() and breaker.ask()


def test_a_probe_that_was_given_up_leaves_room_for_the_next():
    clock = Clock()
    breaker = Breaker(failures=1, clock=clock)
    breaker.ask(), breaker.failed()
    clock.now_s += 2
    assert breaker.ask()
    breaker.gave_up()
    assert breaker.ask()


def test_failures_of_before_the_pause_do_not_lengthen_it():
    clock = Clock()
    breaker = Breaker(failures=2, cool_s=1, clock=clock)
    for _ in range(50):
        breaker.failed()
    clock.now_s += 1.01
    assert breaker.ask()
