"""Emulated hand-offs between vLLM's own schedulers in one process: our connector and executor, no servers."""

import time

import pytest

from astrolabe_lab.calibrate import Transfer
from astrolabe_lab.cost import StepCost
from astrolabe_lab.engines.emulation import Emulation
from astrolabe_lab.engines.engine_process import free_port
from astrolabe_lab.sim.config import EngineConfig

from . import NEEDS_VLLM

pytestmark = NEEDS_VLLM
CONFIG = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64, num_gpu_blocks=64, max_model_len=512)
TRANSFER = Transfer(0.02, 1e-3)
STEP_S = 0.002


class EngineInProcess:
    """vLLM's scheduler with our connector, and our executor in the place of its workers."""

    def __init__(self, role, expiry_s=30.0, fail_share=0.0):
        import torch
        from vllm.config import CacheConfig, KVTransferConfig, SchedulerConfig, VllmConfig
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from astrolabe_lab.serve.pools.executor import PoolExecutor
        from astrolabe_lab.vllm_scheduler import _import_quietly, _model_config

        _import_quietly()
        extra = {
            "port": free_port(), "latency_s": TRANSFER.latency_s, "per_block_s": TRANSFER.per_block_s,
            "expiry_s": expiry_s, "time_scale": 1.0, "fail_share": fail_share,
        }  # fmt: skip
        self.config = VllmConfig(
            model_config=_model_config(CONFIG.max_model_len),
            cache_config=CacheConfig(block_size=16, enable_prefix_caching=False),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512, is_encoder_decoder=False,
                enable_chunked_prefill=True,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="EmulatedConnector", kv_connector_module_path="astrolabe_lab.serve.pools.connector",
                kv_role=role, kv_load_failure_policy="recompute", kv_connector_extra_config=extra,
            ),
            additional_config=Emulation(StepCost.parse(f"base_s={STEP_S}")).additional_config(),
        )  # fmt: skip
        self.config.cache_config.num_gpu_blocks = CONFIG.num_gpu_blocks
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float16)
        cache = KVCacheConfig(64, [], [KVCacheGroupSpec(["layer"], spec)])
        manager = StructuredOutputManager(self.config)
        self.scheduler = Scheduler(self.config, cache, manager, block_size=16)
        self.executor = PoolExecutor(self.config)
        self.tokens, self.params, self.ended_s, self.steps = {}, {}, {}, {}

    def ask(self, name, prompt, output, params):
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=output, ignore_eos=True, extra_args={"kv_transfer_params": params})
        self.tokens[name] = 0
        self.scheduler.add_request(Request(name, [1 + j % 50 for j in range(prompt)], sampling, None, arrival_time=0.0))

    def step(self):
        out = self.scheduler.schedule()
        for name, n in out.num_scheduled_tokens.items():
            self.steps.setdefault(name, []).append(n)
        told = self.executor.execute_model(out)
        told = self.executor.sample_tokens(None) if told is None else told
        for client in self.scheduler.update_from_output(out, told).values():
            for reply in client.outputs:
                self.tokens[reply.request_id] += len(reply.new_token_ids)
                if reply.finish_reason is not None:
                    self.ended_s[reply.request_id] = time.monotonic()
                    self.params[reply.request_id] = reply.kv_transfer_params

    @property
    def used(self):
        return CONFIG.num_gpu_blocks - 1 - self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def until(self, met, others=(), seconds=20.0):
        deadline = time.monotonic() + seconds
        while not met():
            assert time.monotonic() < deadline, (self.tokens, self.used)
            for engine in (self, *others):
                if engine.scheduler.has_requests():
                    engine.step()
            time.sleep(0.0005)


ASK = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture
def pools(request):
    options = getattr(request, "param", {})
    made = [
        EngineInProcess("kv_producer", expiry_s=options.get("expiry_s", 30.0)),
        EngineInProcess("kv_consumer", fail_share=options.get("fail_share", 0.0)),
    ]
    yield made
    for engine in made:
        engine.executor.shutdown()


def prefilled(prefill, name="r", prompt=100):
    prefill.ask(name, prompt, 1, dict(ASK))
    prefill.until(lambda: name in prefill.params)
    return prefill.params[name]


def test_a_prompt_is_computed_once_handed_over_in_time_and_let_go(pools):
    prefill, decode = pools
    params = prefilled(prefill)
    assert params["do_remote_prefill"] and prefill.used == 7 and prefill.steps["r"] == [64, 36]
    sent_s = time.monotonic()
    decode.ask("r", 100, 5, dict(params))
    decode.until(lambda: decode.tokens["r"] == 1)
    took_s = time.monotonic() - sent_s
    assert took_s > TRANSFER.seconds(7)
    decode.until(lambda: "r" in decode.ended_s)
    assert decode.tokens["r"] == 5 and decode.steps["r"] == [1] * 5  # the last prompt token, and no other, again
    prefill.until(lambda: prefill.used == 0)
    assert decode.used == 0 and not prefill.scheduler.has_requests()


@pytest.mark.parametrize("pools", [{"expiry_s": 0.2}], indirect=True)
def test_blocks_that_nobody_pulls_expire_and_the_prompt_is_computed_where_it_decodes(pools):
    prefill, decode = pools
    params = prefilled(prefill)
    prefill.until(lambda: prefill.used == 0)
    decode.ask("r", 100, 3, dict(params))
    decode.until(lambda: "r" in decode.ended_s)
    assert decode.tokens["r"] == 3 and decode.steps["r"][:2] == [64, 36]


@pytest.mark.parametrize("pools", [{"fail_share": 1.0, "expiry_s": 1.0}], indirect=True)
def test_a_failed_transfer_is_computed_again_and_its_blocks_expire(pools):
    prefill, decode = pools
    params = prefilled(prefill)
    decode.ask("r", 100, 3, dict(params))
    decode.until(lambda: "r" in decode.ended_s)
    assert decode.tokens["r"] == 3 and decode.steps["r"][:2] == [64, 36]
    prefill.until(lambda: prefill.used == 0)


def test_a_request_that_ends_before_it_is_scheduled_lets_go_of_its_blocks(pools):
    from vllm.v1.request import RequestStatus

    prefill, decode = pools
    params = prefilled(prefill)
    decode.ask("r", 100, 3, dict(params))
    decode.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    decode.until(lambda: prefill.used == 0, others=[prefill])
    assert decode.used == 0


def test_a_request_that_is_aborted_while_it_pulls_leaves_no_block_on_either_side(pools):
    from vllm.v1.request import RequestStatus

    prefill, decode = pools
    params = prefilled(prefill, prompt=400)
    decode.ask("r", 400, 3, dict(params))
    decode.step()
    assert decode.used == 25
    decode.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    decode.until(lambda: prefill.used == decode.used == 0, others=[prefill])


def test_many_at_once_are_all_served_and_none_is_left(pools):
    prefill, decode = pools
    names = [f"r{j}" for j in range(12)]
    for j, name in enumerate(names):
        prefill.ask(name, 20 + 5 * j, 1, dict(ASK))
    asked = set()

    def go_on():
        for name in set(prefill.params) - asked:
            asked.add(name)
            decode.ask(name, 20 + 5 * names.index(name), 4, dict(prefill.params[name]))
        return len(decode.ended_s) == len(names) and prefill.used == decode.used == 0

    prefill.until(go_on, others=[decode])
    assert all(decode.tokens[name] == 4 for name in names)
    assert all(decode.steps[name] == [1] * 4 for name in names)
