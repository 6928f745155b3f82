"""Our pools against vLLM's own schedulers with its own NIXL connector between them, on workloads short of memory.

Only the workers are made up: the peer's clock says when steps and pulls end, and hands vLLM's scheduler what a worker
would report. For a longer hunt than CI's: ``python -m tests.live.test_pools_equal_vllm --seeds 1000:2000``.
"""

import sys
from pathlib import Path

import numpy as np

from astrolabe_lab.disagg.simulate import simulate_pools
from astrolabe_lab.disagg.state import HandOff

from . import NEEDS_VLLM
from .test_schedule_equals_vllm import random_workload

sys.path.insert(0, str(Path(__file__).parents[1]))
from pools_peer import Engine, Peer

pytestmark = NEEDS_VLLM


class VllmEngine(Engine):
    """An engine whose every decision is that of vLLM's scheduler."""

    def __init__(self, number, config, cost, decode):
        from astrolabe_lab.vllm_scheduler import scheduler

        super().__init__(number, config, cost, decode)
        self.scheduler = scheduler(config, "kv_consumer" if decode else "kv_producer")
        self.jobs = {}
        preempt = self.scheduler._preempt_request

        def recorded(request, *args, **kwargs):
            self.preempted = True
            job = self.jobs[request.request_id]
            job.preemptions += 1
            preempt(request, *args, **kwargs)
            job.computed = 0

        self.scheduler._preempt_request = recorded

    def add(self, job):
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = getattr(job, "params", None) or {"do_remote_decode": True, "do_remote_prefill": False}
        sampling = SamplingParams(
            max_tokens=job.output, ignore_eos=True, extra_args={"kv_transfer_params": dict(params)}
        )
        name = f"{'d' if self.decode else 'p'}{job.rid}"
        self.jobs[name] = job
        tokens = [2 * job.rid + 1] * job.prompt
        self.scheduler.add_request(Request(name, tokens, sampling, None, arrival_time=0.0))

    def schedule(self):
        self.preempted = False
        self.output = self.scheduler.schedule()
        plan = [(self.jobs[name], n) for name, n in self.output.num_scheduled_tokens.items()]
        for name in self.output.num_scheduled_tokens:
            request = self.scheduler.requests[name]
            self.jobs[name].computed = request.num_computed_tokens - self.output.num_scheduled_tokens[name]
        asked = self.output.kv_connector_metadata.reqs_to_recv if self.decode else ()
        return plan, [self.jobs[name] for name in asked], self.preempted

    def update(self, plan, sent=(), received=()):
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        names = list(self.output.num_scheduled_tokens)
        sampled = [[7] if job.computed >= job.prompt + job.generated else [] for job, _ in plan]
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(finished_sending=set(sent), finished_recving=set(received)),
        )
        ended = []
        for client in self.scheduler.update_from_output(self.output, output).values():
            for reply in client.outputs:
                job = self.jobs[reply.request_id]
                job.generated += len(reply.new_token_ids)
                if reply.finish_reason is not None:
                    ended.append(job)
                    job.params = reply.kv_transfer_params
        return ended

    def finish(self, plan):
        return self.update(plan)

    def hear(self, rids):
        """A step without tokens reports these pulls: to the scheduler the same as at the end of one that has some."""
        from vllm.v1.core.sched.output import SchedulerOutput

        if rids:
            names = [f"{'d' if self.decode else 'p'}{rid}" for rid in rids]
            self.output = SchedulerOutput.make_empty()
            self.update([], **{"received" if self.decode else "sent": names})


class VllmPeer(Peer):
    def __init__(self, *args):
        super().__init__(*args, VllmEngine)

    def join(self, now, rid):
        self.way[rid][3].blocks = self.way[rid][1].blocks(self.way[rid][3].prompt)
        super().join(now, rid)

    def handed_over(self, prefill_job, decode_job):
        decode_job.params = prefill_job.params | {"remote_engine_id": "p", "tp_size": 1}
        assert prefill_job.params["do_remote_prefill"] and prefill_job.params["remote_block_ids"]


class Spread:
    def choose(self, request, cluster, rng):
        return int(rng.random() * len(cluster.prefill)), int(rng.random() * len(cluster.decode))


def compare(seed):
    frame, config, cost = random_workload(seed, asynchronous=False, caching=False)
    rng = np.random.default_rng([seed, 2])
    shape = (int(rng.integers(1, 3)), int(rng.integers(1, 4)))
    step_s = cost.step_seconds(1, 1, 0)
    hand_off = HandOff(
        base_s=step_s * float(rng.choice([0.0, 0.4, 1.0, 3.0])),
        per_block_s=step_s * float(rng.choice([0.0, 0.05, 0.5])),
        polls=str(rng.choice(["launch", "end"])),
    )
    found = simulate_pools(frame, Spread(), pools=shape, engine=config, cost=cost, hand_off=hand_off, seed=seed)
    columns = ["rid", "arrived_s", "prompt_tokens", "output_tokens", "prefill_instance", "decode_instance"]
    peer = VllmPeer(shape, (config, config), (cost, cost), hand_off)
    peer.run(found[columns].itertuples(index=False))
    jobs = [peer.way[rid] for rid in found["rid"]]
    assert (found["status"] == "ok").all(), seed
    assert found["preemptions"].tolist() == [p.preemptions + d.preemptions for _, _, p, d in jobs], seed
    assert found["generated_tokens"].tolist() == [d.generated for *_, d in jobs], seed
    for column, values in {
        "prefill_finished_s": [p.end_s for _, _, p, _ in jobs],
        "transfer_started_s": [peer.log[d.rid]["pull_s"] for *_, d in jobs],
        "transfer_finished_s": [peer.log[d.rid]["landed_s"] for *_, d in jobs],
        "first_token_s": [d.first_s for *_, d in jobs],
        "finished_s": [d.end_s for *_, d in jobs],
    }.items():
        np.testing.assert_allclose(found[column], values, rtol=0, atol=1e-9, err_msg=f"{column}, seed {seed}")
    for engine in (*peer.prefill, *peer.decode):
        assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == config.num_gpu_blocks - 1, seed
    return found


def test_pools_equal_vllm_with_its_nixl_connector():
    found = [compare(seed) for seed in range(24)]
    assert sum((frame["preemptions"] > 0).sum() for frame in found) > 30
    assert sum((frame["transfer_started_s"] - frame["prefill_finished_s"] > 0.1).sum() for frame in found) > 30


if __name__ == "__main__":
    first, last = map(int, sys.argv[sys.argv.index("--seeds") + 1].split(":"))
    for one in range(first, last):
        compare(one)
    print(f"pools equal vLLM's on seeds {first}..{last - 1}")
