"""The engine's flags: vLLM's names and rules, and no flag taken that the engine does not model."""

from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest

from astrolabe_lab.errors import InputError
from astrolabe_lab.sim.config import SCHEDULERS, UNMODELLED, EngineConfig


def test_the_defaults_are_the_papers_llama2_7b_on_one_a30():
    config = EngineConfig()
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (48, 512)
    assert (config.num_gpu_blocks, config.block_size) == (1056, 16)
    assert (config.scheduler, config.enable_chunked_prefill, config.watermark, config.async_scheduling) == (
        "v1",
        True,
        0.0,
        False,
    )


def test_each_scheduler_has_its_own_defaults():
    v0 = EngineConfig(scheduler="v0_chunked")
    assert (v0.enable_chunked_prefill, v0.watermark, v0.usable_blocks, v0.request_blocks) == (
        True,
        0.01,
        1056,
        1046,
    )
    v0 = EngineConfig(scheduler="v0_prefill_first", max_num_batched_tokens=4096)
    assert (v0.enable_chunked_prefill, v0.watermark, v0.usable_blocks, v0.request_blocks) == (
        False,
        0.01,
        1056,
        1046,
    )
    v1 = EngineConfig(watermark=0.05)
    assert (v1.usable_blocks, v1.watermark_blocks, v1.request_blocks) == (1055, 52, 1055)


def test_parse_sets_each_key_to_its_type():
    text = (
        "max_num_seqs=8, max_num_batched_tokens=64,block_size=32,num_gpu_blocks=100,max_model_len=64,"
        "enable_chunked_prefill=false,watermark=0.02,async_scheduling=True,scheduler=v1"
    )
    assert EngineConfig.parse(text) == EngineConfig(8, 64, 32, 100, 64, False, 0.02, True, "v1")
    assert EngineConfig.parse("") == EngineConfig()
    for yes in ("true", "1", "yes", "on", "TRUE"):
        assert EngineConfig.parse(f"async_scheduling={yes}").async_scheduling is True
    for no in ("false", "0", "no", "off", "False"):
        assert EngineConfig.parse(f"async_scheduling={no}").async_scheduling is False


def test_what_parse_leaves_out_stays_as_in_the_base():
    base = EngineConfig(max_num_seqs=7, watermark=0.03)
    assert EngineConfig.parse("block_size=8", base) == EngineConfig(max_num_seqs=7, watermark=0.03, block_size=8)
    assert EngineConfig.parse("", base) == base


def test_another_scheduler_than_the_bases_brings_its_own_watermark_and_chunking():
    base = EngineConfig(max_num_batched_tokens=4096)
    assert EngineConfig.parse("scheduler=v0_prefill_first", base).watermark == 0.01
    assert EngineConfig.parse("scheduler=v0_prefill_first", base).enable_chunked_prefill is False
    v0 = EngineConfig.parse("scheduler=v0_chunked", base)
    assert (EngineConfig.parse("scheduler=v1", v0).watermark, v0.watermark) == (0.0, 0.01)
    assert EngineConfig.parse("scheduler=v0_chunked,watermark=0.2", base).watermark == 0.2
    kept = EngineConfig(scheduler="v0_chunked", watermark=0.2)
    assert EngineConfig.parse("scheduler=v0_chunked", kept).watermark == 0.2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_num_seqs", "not key=value"),
        ("max_num_seqs=", "not key=value"),
        ("=8", "not key=value"),
        ("max_num_seqs=8,max_num_seqs=9", "given twice"),
        ("max_num_seq=8", "unknown key 'max_num_seq'; allowed: max_num_seqs, "),
        ("max_num_seqs=many", "whole number"),
        ("max_num_seqs=8.5", "whole number"),
        ("max_num_seqs=0", "from 1 to 2147483647"),
        ("block_size=-16", "from 1 to 2147483647"),
        ("num_gpu_blocks=2147483648", "from 1 to 2147483647"),
        ("num_gpu_blocks=1", "no usable block"),
        ("num_gpu_blocks=1,scheduler=v0_chunked", "no usable block"),
        ("watermark=wet", "must be a number"),
        ("watermark=1", r"in \[0, 1\)"),
        ("watermark=-0.1", r"in \[0, 1\)"),
        ("watermark=nan", r"in \[0, 1\)"),
        ("enable_chunked_prefill=maybe", "true or false"),
        ("scheduler=v2", "not one of v1, v0_chunked, v0_prefill_first"),
        ("scheduler=v0_chunked,enable_chunked_prefill=false", "use v0_prefill_first"),
        (
            "scheduler=v0_prefill_first,enable_chunked_prefill=true,max_num_batched_tokens=4096",
            "use v0_chunked",
        ),
        ("scheduler=v0_chunked,async_scheduling=true", "async_scheduling is vLLM V1's"),
        ("max_num_seqs=600", "at least max_num_seqs=600"),
        ("enable_chunked_prefill=false", "at least max_model_len=4096"),
        ("scheduler=v0_prefill_first", "at least max_model_len=4096"),
    ],
)
def test_a_wrong_flag_is_one_error_that_says_what_is_allowed(text, says):
    with pytest.raises(InputError, match=rf"^engine: [^\n]*{says}"):
        EngineConfig.parse(text)


@pytest.mark.parametrize("key", sorted(UNMODELLED))
def test_a_flag_that_the_engine_does_not_model_is_refused_when_on_and_ignored_when_off(key):
    on = {"preemption_mode": "swap", "scheduling_policy": "priority", "policy": "priority"}.get(key, "4")
    for value in (on, True, "true"):
        with pytest.raises(InputError, match=f"engine: {key}=.* is not modelled"):
            EngineConfig.from_dict({key: value})
    for off in ("false", "0", "none", False, 0, None):
        assert EngineConfig.from_dict({key: off}) == EngineConfig()


def test_vllms_default_of_one_partial_prefill_is_taken():
    assert EngineConfig.parse("max_num_partial_prefills=1,max_long_partial_prefills=1") == EngineConfig()


def test_prefix_caching_is_v1s_and_refused_elsewhere_with_the_reason():
    assert EngineConfig.parse("enable_prefix_caching=true").enable_prefix_caching
    for scheduler in ("v0_chunked", "v0_prefill_first"):
        flags = f"scheduler={scheduler},max_num_batched_tokens=4096,enable_prefix_caching="
        assert not EngineConfig.parse(f"{flags}false").enable_prefix_caching
        with pytest.raises(InputError, match=f"enable_prefix_caching is modelled as vLLM V1 .* scheduler={scheduler}"):
            EngineConfig.parse(f"{flags}true")


@pytest.mark.parametrize(
    "flags",
    [
        {"max_num_seqs": True},
        {"max_num_seqs": 8.0},
        {"max_num_seqs": None},
        {"block_size": "16"},
        {"watermark": "0.1"},
        {"watermark": True},
        {"enable_chunked_prefill": 1},
        {"async_scheduling": "yes"},
        {"scheduler": None},
    ],
)
def test_values_of_another_type_are_refused(flags):
    with pytest.raises(InputError, match=f"^engine: {next(iter(flags))}="):
        EngineConfig(**flags)


def test_the_watermark_counts_whole_blocks_of_all_blocks():
    assert [EngineConfig(watermark=0.01, num_gpu_blocks=n).watermark_blocks for n in (99, 100, 199, 1056)] == [
        0,
        1,
        1,
        10,
    ]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_rejects_answers_alike_for_numbers_and_arrays(scheduler):
    config = EngineConfig(4, 64, 4, 12, 48, scheduler=scheduler, watermark=0.1)
    prompt, output = np.meshgrid(np.arange(1, 60), np.arange(1, 60))
    answers = config.rejects(prompt, output)
    for p, o, rejected in zip(prompt.flat, output.flat, answers.flat, strict=True):
        blocks = -(-(int(p) + int(o) - 1) // 4)
        assert rejected == config.rejects(int(p), int(o)) == (p + o > 48 or blocks > 11)


def test_a_configuration_is_a_value():
    assert EngineConfig() == EngineConfig(enable_chunked_prefill=True, watermark=0.0)
    assert len({EngineConfig(), EngineConfig(), EngineConfig(block_size=8)}) == 2
    with pytest.raises(FrozenInstanceError):
        EngineConfig().block_size = 8
    written = {f.name: str(getattr(EngineConfig(), f.name)) for f in fields(EngineConfig)}
    assert EngineConfig.from_dict(written) == EngineConfig()
