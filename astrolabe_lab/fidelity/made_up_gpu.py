"""A made-up GPU whose kernels follow a known law: layer timings of it, and a run of our own engine on it.

For lessons and tests, where no measured files are at hand. The run is our engine's, so that comparing with it shows
what noise in the timings, a fit or a table costs, and nothing about a real GPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from astrolabe_lab.cost import Grid, Regime, StepCost
from astrolabe_lab.cost.shapes import FP16_BYTES, MODELS
from astrolabe_lab.fidelity.layers import IN_EACH_LAYER, ONCE
from astrolabe_lab.record import write_whole
from astrolabe_lab.rng import stream
from astrolabe_lab.sim.config import EngineConfig

MODEL = "meta-llama/Llama-3.1-8B"
TOKENS = np.unique([*range(1, 17), *range(20, 65, 4), *range(80, 2049, 16)]).astype(float)
SEQUENCES = np.array([*range(1, 17), *range(20, 65, 4), *range(80, 257, 16)], float)
CHUNKS, PREFILL_CONTEXTS = (16, 64, 128, 256, 512, 1024, 2048), (0, 256, 512, 1024, 2048, 4096)
DECODES, CONTEXTS = (1, 2, 4, 8, 16, 32, 64, 128), (16, 64, 256, 512, 1024, 1536, 2048, 3072, 4096)
PRODUCTS = {
    "qkv_proj": "attn_pre_proj", "o_proj": "attn_post_proj", "gate_up_proj": "mlp_up_proj",
    "down_proj": "mlp_down_proj",
}  # fmt: skip


@dataclass(frozen=True)
class MadeUpGpu:
    """The law: a matrix product takes the longer of reading its weights and of computing, every kernel a launch.

    Rates are what is reached, in bytes and operations per second. Context costs `mixing` times as much in batches with
    a prefill chunk. `host_s` is what each step of the run takes beside its kernels.
    """

    bytes_s: float = 1.2e12
    flops_s: float = 2.5e14
    launch_s: float = 2.5e-6
    mixing: float = 1.6
    host_s: float = 2e-4
    model: str = MODEL

    @property
    def shape(self):
        return MODELS[self.model]

    def dense_s(self, layer, tokens):
        """(n,) seconds of one layer's kernel for so many tokens (n,)."""
        tokens, shape = np.asarray(tokens, float), self.shape
        if layer in PRODUCTS:
            weights = shape.weights[PRODUCTS[layer]]
            return self.launch_s + np.maximum(FP16_BYTES * weights / self.bytes_s, 2 * weights * tokens / self.flops_s)
        return self.launch_s + 3 * FP16_BYTES * shape.hidden * tokens / self.bytes_s

    def attention_s(self, chunk, kv_prefill, decodes, kv_decode):
        """Seconds of one layer's attention of a batch."""
        shape = self.shape
        context = kv_prefill + decodes * kv_decode
        read = shape.kv_bytes * context * (self.mixing if chunk else 1.0) / self.bytes_s
        return self.launch_s + read + shape.pair_flops * (chunk * kv_prefill + chunk**2 / 2) / (0.5 * self.flops_s)

    def heads_s(self, layer, sequences):
        """(n,) seconds of "lm_head" or "sampler" for so many sequences (n,)."""
        read = FP16_BYTES * self.shape.head_weights / self.bytes_s if layer == "lm_head" else 2e-5
        return read + (2e-7 if layer == "lm_head" else 3e-7) * np.asarray(sequences, float)

    def cost(self):
        """The StepCost of the law: exact, but for what lies between two token counts of its timings."""
        shape, slope = self.shape, 5e-7
        count = {name: times * shape.layers for name, times in IN_EACH_LAYER.items() if name != "qk_norm"} | ONCE
        dense = sum(times * self.dense_s(name, TOKENS) for name, times in count.items())
        once = shape.layers * self.launch_s + sum(self.heads_s(name, 0.0) for name in ("lm_head", "sampler"))
        grid = Grid(tuple(TOKENS), (0.0,), tuple((seconds,) for seconds in dense + once))
        per_kv_s = shape.layers * shape.kv_bytes / self.bytes_s
        pairs = shape.layers * shape.pair_flops / (0.5 * self.flops_s)
        return StepCost(
            Regime(self.host_s, 0.0, 0.0, slope, per_kv_s),
            Regime(self.host_s, 0.0, 0.0, slope, self.mixing * per_kv_s, pairs),
            decode_grid=grid, mixed_grid=grid,
        )  # fmt: skip

    def write_timings(self, folder, noise=0.02, seed=0):
        """Write attention.csv, dense.csv and per_sequence.csv, each timing off by a relative error; the folder."""
        import pandas as pd

        folder, rng = Path(folder), stream(seed, "made-up-timings")
        folder.mkdir(parents=True, exist_ok=True)

        def write(name, rows, columns):
            frame = pd.DataFrame(rows, columns=[*columns, "seconds"])
            frame["time_us"] = 1e6 * frame.pop("seconds") * np.exp(rng.normal(0, noise, len(frame)))
            write_whole(folder / name, frame.to_csv(index=False, lineterminator="\n"))

        batches = [(0, 0, n, kv) for n in DECODES for kv in CONTEXTS]
        batches += [(c, p, 0, 0) for c in CHUNKS for p in PREFILL_CONTEXTS]
        batches += [(c, p, n, kv) for c in CHUNKS for p in PREFILL_CONTEXTS for n in DECODES for kv in CONTEXTS]
        rows = [(*batch, self.attention_s(*batch)) for batch in batches]
        write("attention.csv", rows, ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode"))
        layers = [name for name in [*IN_EACH_LAYER, *ONCE] if name != "qk_norm"]
        rows = [(name, int(n), s) for name in layers for n, s in zip(TOKENS, self.dense_s(name, TOKENS), strict=True)]
        write("dense.csv", rows, ("layer", "tokens"))
        rows = [(name, int(n), float(self.heads_s(name, n))) for name in ("lm_head", "sampler") for n in SEQUENCES]
        write("per_sequence.csv", rows, ("layer", "sequences"))
        return folder

    def write_run(self, folder, requests=300, qps=10.0, seed=0, engine=None):
        """Write meta.json and requests.jsonl of a run of our engine on the law (no noise); the folder.

        `requests` are sharegpt_like ones that arrive at `qps`; `engine` is an EngineConfig (default: 48 seats, 2048
        tokens a step).
        """
        from astrolabe_lab import arrivals
        from astrolabe_lab.fidelity import pad_sizes_of
        from astrolabe_lab.generators import sharegpt_like
        from astrolabe_lab.sim.engine import run_one

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        engine = engine or EngineConfig(
            max_num_seqs=48, max_num_batched_tokens=2048, num_gpu_blocks=20_000, max_model_len=8192
        )
        drawn = sharegpt_like.generate(requests, seed=seed, text=False)
        trace = arrivals.with_arrivals(drawn, qps=qps, seed=seed)
        cost = replace(self.cost(), pad_sizes=pad_sizes_of(engine))
        result, _ = run_one(trace, engine, cost, log=False)
        lines = [
            json.dumps(
                {
                    "request_id": f"made-up-{row.rid}",
                    "input_toks": int(row.prompt_tokens),
                    "output_toks": int(row.output_tokens),
                    "queued_ts": float(row.arrived_s),
                    "first_token_ts": float(row.first_token_s),
                    "last_token_ts": float(row.finished_s),
                }
            )
            for row in result.itertuples()
        ]
        kwargs = {
            "model": self.model, "max_num_seqs": engine.max_num_seqs,
            "max_num_batched_tokens": engine.max_num_batched_tokens, "block_size": engine.block_size,
            "max_model_len": engine.max_model_len, "async_scheduling": engine.async_scheduling,
            "enable_prefix_caching": False,
        }  # fmt: skip
        meta = {
            "model": self.model, "vllm_version": "0.0 (our own engine, on a made-up GPU)", "engine_kwargs": kwargs,
            "kv_cache": {"num_gpu_blocks": engine.num_gpu_blocks},
        }  # fmt: skip
        write_whole(folder / "meta.json", json.dumps(meta, indent=2) + "\n")
        write_whole(folder / "requests.jsonl", "\n".join(lines) + "\n")
        return folder
