"""An encoder on the CPU serves in the precision and on the cores that are faster, and says the same lengths."""

from types import SimpleNamespace

import numpy as np
import pytest

from astrolabe_lab.errors import InputError
from astrolabe_lab.length import make
from astrolabe_lab.length.precision import choose, choose_threads, encoder_of, prepare


class Paced:
    """A length model whose encoder takes so many seconds in float32 and in bfloat16."""

    def __init__(self, float32_s, bfloat16_s, device="cpu"):
        self._text = SimpleNamespace(device=SimpleNamespace(type=device), bfloat16=False)
        self.seconds, self.models_, self.asked = {False: float32_s, True: bfloat16_s}, ["m"], []

    def predict_quantiles(self, prompts, quantiles=(0.5, 0.9), models=None):
        self.asked.append(models)
        return np.ones((len(prompts), 2))


@pytest.mark.parametrize(
    "times, taken", [((0.02, 0.01), "bfloat16"), ((0.01, 0.02), "float32"), ((0.02, 0.019), "float32")]
)
def test_the_faster_precision_is_taken_if_it_is_worth_it(monkeypatch, times, taken):
    monkeypatch.setattr("astrolabe_lab.length.precision._timed", lambda model: model.seconds[model._text.bfloat16])
    model = Paced(*times)
    assert choose(model) == taken
    assert model._text.bfloat16 == (taken == "bfloat16") and set(model.asked) == {"m"}


def test_a_precision_that_is_asked_for_is_taken_untimed():
    model = Paced(9, 9)
    assert choose(model, "bfloat16") == "bfloat16" and model._text.bfloat16
    assert choose(model, "float32") == "float32" and not model._text.bfloat16
    assert not model.asked
    with pytest.raises(InputError, match="auto, float32, bfloat16"):
        choose(model, "int8")


def test_a_model_is_prepared_for_one_prompt_and_for_a_whole_batch():
    asked = []

    class Counts(Paced):
        def predict_quantiles(self, prompts, quantiles=(0.5, 0.9), models=None):
            asked.append(len(prompts))
            return super().predict_quantiles(prompts, quantiles, models)

    assert prepare(Counts(9, 9, device="cuda"), max_batch=32) == {} and asked == [1, 32]


@pytest.fixture
def threads_kept():
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    yield torch
    torch.set_num_threads(before)


@pytest.mark.length
@pytest.mark.parametrize("of_half_s, taken", [(0.006, 2), (0.008, 1), (0.05, 1)])
def test_half_of_the_cores_are_taken_if_that_is_worth_it(monkeypatch, threads_kept, of_half_s, taken):
    torch = threads_kept
    torch.set_num_threads(4)
    timed = {1: 0.01, 2: of_half_s}
    monkeypatch.setattr("astrolabe_lab.length.precision._timed", lambda model: timed[torch.get_num_threads()])
    assert choose_threads(Paced(9, 9)) == taken == torch.get_num_threads()


@pytest.mark.length
def test_cores_that_are_asked_for_are_taken_untimed(threads_kept):
    model = Paced(9, 9)
    assert choose_threads(model, 3) == 3 == threads_kept.get_num_threads() and not model.asked
    assert choose_threads(make("constant").fit(["a"], [1])) == 0 == choose_threads(Paced(9, 9, device="cuda"))
    with pytest.raises(InputError, match="threads=0"):
        choose_threads(model, 0)


def test_models_without_an_encoder_on_the_cpu_are_left_alone():
    assert choose(make("constant").fit(["a"], [1])) == ""
    on_gpu = Paced(9, 9, device="cuda")
    on_gpu._text.bfloat16 = True
    assert choose(on_gpu, "float32") == "" and on_gpu._text.bfloat16
    assert encoder_of(SimpleNamespace(model=SimpleNamespace(model=on_gpu))) is on_gpu._text


@pytest.mark.length
def test_lengths_move_by_a_percent_at_most_and_come_back_exactly():
    from astrolabe_lab.generators import sharegpt_like

    drawn = sharegpt_like.generate(60, seed=0)
    model = make("encoder:landmarks=40,vocabulary=50").fit(drawn["prompt"].tolist(), drawn["output_tokens"])
    prompts = sharegpt_like.generate(16, seed=1)["prompt"].tolist()
    exact = model.predict(prompts)
    assert choose(model, "bfloat16") == "bfloat16"
    rough = model.predict(prompts)
    assert 0 < np.abs(rough / exact - 1).max() < 0.03
    choose(model, "float32")
    assert (model.predict(prompts) == exact).all()


@pytest.mark.length
@pytest.mark.parametrize("rows", [(1, 7), (1, 128), (5, 300)])
def test_weights_laid_out_beforehand_answer_as_plain_bfloat16_does(rows):
    import torch

    from astrolabe_lab.length.bfloat16 import _can_pack, in_bfloat16

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32, bias=False))
    asked = torch.randn(*rows, 64).bfloat16()
    copied = in_bfloat16(model)
    with torch.inference_mode():
        plain = torch.nn.Sequential(*model).to(torch.bfloat16)(asked).float()  # in place: the copy was made before
        told = copied(asked).float()
    assert (told - plain).abs().max() <= 0.01 * plain.abs().max()
    assert _can_pack(torch) == (type(copied[0]) is not torch.nn.Linear)
    assert not list(copied.parameters()) or not _can_pack(torch)
