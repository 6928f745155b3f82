"""Claims about the step cost and the presets."""

import json
from fractions import Fraction

import numpy as np
import pytest

from astrolabe_lab.cost import KEYS, Regime, StepCost, preset, presets
from astrolabe_lab.errors import InputError

DECODE = Regime(1e-3, 2e-2, 6e-5, 2e-6, 7e-7)
MIXED = Regime(1e-3, 1.9e-2, 1.1e-4, 2e-6, 1e-6, attention_s=1e-8)
COST = StepCost(DECODE, MIXED)


def test_a_step_is_the_sum_of_its_six_terms():
    steps = COST.step_seconds(500, 20, 6000, attention=130_000.5, mixed=True)
    counts = (1, 1, 500, 20, 6000, 130_000.5)
    exact = sum(Fraction(c) * Fraction(x) for c, x in zip(COST.array[1], counts, strict=True))
    assert steps == pytest.approx(float(exact), rel=1e-15)


def test_the_terms_are_added_from_left_to_right_so_that_a_kernel_gives_the_same_bits():
    rng = np.random.default_rng(5)
    for _ in range(2000):
        values = 10.0 ** rng.uniform(-9, -1, (2, 6))
        cost = StepCost(Regime(*values[0]), Regime(*values[1]))
        new, seqs, context = (int(v) for v in rng.integers(1, 20_000, 3))
        attention, mixed = float(rng.uniform(0, 1e7)), bool(rng.integers(2))
        seconds = cost.array[int(mixed), 0]
        for c, x in zip(cost.array[int(mixed), 1:], (1.0, new, seqs, context, attention), strict=True):
            seconds = seconds + c * x
        assert cost.step_seconds(new, seqs, context, attention, mixed) == seconds


def test_only_mixed_steps_pay_the_mixed_prices():
    assert COST.step_seconds(20, 20, 6000) == pytest.approx(1e-3 + 2e-2 + 20 * 6.2e-5 + 6000 * 7e-7)
    mixed = 1e-3 + 1.9e-2 + 20 * 1.12e-4 + 6000 * 1e-6
    assert COST.step_seconds(20, 20, 6000, mixed=True) == pytest.approx(mixed)


def test_array_rows_are_decode_and_mixed_and_columns_are_the_keys():
    array = COST.array
    assert array.shape == (2, 6)
    assert array.dtype == np.float64
    for row, regime in enumerate((DECODE, MIXED)):
        assert array[row].tolist() == [getattr(regime, key) for key in KEYS]
    array[:] = 0  # a caller's change must not reach the cost
    assert COST.array[0, 1] == 2e-2


def test_a_bare_key_sets_both_regimes_and_a_prefixed_one_wins_wherever_it_stands():
    cost = StepCost.parse("mixed.base_s=0.03, base_s=0.01 ,decode.per_seq_s=1e-5")
    assert (cost.decode.base_s, cost.mixed.base_s) == (0.01, 0.03)
    assert (cost.decode.per_seq_s, cost.mixed.per_seq_s) == (1e-5, 0)


def test_missing_keys_come_from_the_base_or_are_zero():
    assert StepCost.parse("base_s=0.01").mixed == Regime(base_s=0.01)
    changed = StepCost.parse("mixed.attention_s=5e-8", base=COST)
    assert changed.decode == DECODE
    assert changed.mixed == Regime(1e-3, 1.9e-2, 1.1e-4, 2e-6, 1e-6, 5e-8)
    assert StepCost.parse("", base=COST) == COST
    assert COST.mixed.attention_s == 1e-8  # the base itself is left alone


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("bse_s=0.01", "bse_s.*host_s, base_s, per_token_s, per_seq_s, per_kv_token_s, attention_s"),
        ("prefill.base_s=0.01", "prefill.base_s.*decode.KEY or mixed.KEY"),
        ("mixed.=0.01", "unknown cost key 'mixed.'"),
        ("base_s=fast", "base_s=fast"),
        ("base_s=", "base_s="),
        ("base_s", "KEY=SECONDS"),
        ("base_s=-0.01", "base_s=-0.01"),
        ("base_s=0.01,per_seq_s=nan", "per_seq_s=nan"),
        ("base_s=inf", "base_s=inf"),
        ("base_s=1e999", "base_s=inf"),
        ("base_s=0.01,base_s=0.01", "base_s.*twice"),
        ("base_s=0.01,mixed.base_s=1,mixed.base_s=2", "mixed.base_s.*twice"),
        ("", "must take time"),
        ("base_s=0", "must take time"),
    ],
)
def test_bad_text_is_refused_by_name(text, named):
    with pytest.raises(InputError, match=named):
        StepCost.parse(text)


@pytest.mark.parametrize("bad", [-1e-9, float("nan"), float("inf"), "0.01", None, True, 1j])
def test_a_coefficient_that_is_not_a_finite_positive_number_is_refused(bad):
    with pytest.raises(InputError, match="per_token_s"):
        Regime(base_s=0.01, per_token_s=bad)


def test_no_base_can_be_overridden_into_a_free_step():
    with pytest.raises(InputError, match="must take time"):
        StepCost.parse(",".join(f"{key}=0" for key in KEYS), base=COST)


def test_text_and_dict_bring_back_the_same_cost():
    rng = np.random.default_rng(8)
    for _ in range(200):
        values = 10.0 ** rng.uniform(-12, 0, (2, 6)) * rng.integers(0, 2, (2, 6))
        values[1, :3] = values[0, :3]
        values[0, 1] = values[1, 1] = 0.02
        cost = StepCost(Regime(*values[0]), Regime(*values[1]))
        assert StepCost.parse(str(cost)) == cost
        assert StepCost.from_dict(json.loads(json.dumps(cost.to_dict()))) == cost
    assert str(StepCost.parse("base_s=0.01")) == "base_s=0.01"


def test_a_cost_dict_with_a_foreign_key_is_refused():
    with pytest.raises(InputError, match=r"decode.speed.*allowed"):
        StepCost.from_dict({"decode": {"base_s": 0.01, "speed": 3}, "mixed": {}})
    with pytest.raises(InputError, match="is an object"):
        StepCost.from_dict([0.01])


def test_costs_are_values():
    assert hash(COST) == hash(StepCost(DECODE, MIXED))
    with pytest.raises(AttributeError):
        COST.decode = MIXED


def test_every_preset_says_what_it_was_fitted_on_and_how_well():
    assert "llama2-7b-a30" in presets()
    for name in presets():
        chosen = preset(name)
        assert chosen.name == name
        for told in (chosen.model, chosen.device, chosen.date, chosen.source, chosen.engine):
            assert told
        assert set(chosen.derivation) >= {key for key in KEYS if getattr(chosen.cost.mixed, key) > 0}
        assert all({"over", "mean_abs_pct", "points"} <= set(entry) for entry in chosen.error.values())


def test_preset_engine_keys_are_the_papers_a30_settings():
    assert preset("llama2-7b-a30").engine == {
        "max_num_seqs": 48,
        "max_num_batched_tokens": 512,
        "block_size": 16,
        "num_gpu_blocks": 1056,
        "max_model_len": 4096,
        "enable_chunked_prefill": True,
    }


def test_an_a30_step_lies_between_the_hardware_floor_and_what_engines_show():
    cost = preset("llama2-7b-a30").cost
    weights, kv, memory = 2 * 6.74e9, 524_288, 933e9
    for sequences, context in ((1, 300), (20, 6000), (48, 16_000)):
        floor = (weights + kv * context) / memory
        assert floor < cost.step_seconds(sequences, sequences, context) - cost.decode.host_s < 1.7 * floor
    assert 0.020 < cost.step_seconds(20, 20, 6000) < 0.030
    arithmetic = 2 * 6.6e9 * 512 / 165e12
    assert arithmetic < cost.step_seconds(512, 1, 0, 512**2 / 2, mixed=True) < 2.5 * arithmetic
    assert 0.070 < cost.step_seconds(512, 21, 6000, 492**2 / 2, mixed=True) < 0.120


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(InputError, match=r"llama2-7b-a31.*known: .*llama2-7b-a30"):
        preset("llama2-7b-a31")


def test_a_preset_can_be_a_json_file_of_ones_own(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"cost": {"base_s": 0.01}, "engine": {"max_num_seqs": 8}}))
    mine = preset(file)
    assert (mine.name, mine.cost, mine.engine) == ("mine", StepCost.parse("base_s=0.01"), {"max_num_seqs": 8})
    file.write_text(json.dumps(preset("llama2-7b-a30").to_dict()))
    assert preset(str(file)) == preset("llama2-7b-a30")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"engine": {}}', 'no "cost"'),
        ('{"cost": {"base_s": 1}, "gpu": "A30"}', "unknown gpu; allowed: name, cost"),
        ('{"cost": {"base_s": 1}, "engine": []}', r"engine is \[\]"),
        ('{"cost": {"base_s": "1"}}', "base_s='1' is not a number"),
        ('{"cost": {"base_s": NaN}}', "base_s=nan"),
        ('{"cost": 3}', "is an object"),
    ],
)
def test_a_broken_preset_file_is_refused_by_name(tmp_path, content, named):
    file = tmp_path / "mine.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=named):
        preset(file)
