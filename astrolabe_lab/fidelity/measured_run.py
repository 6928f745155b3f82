"""A measured vLLM run as LLMServingSim's bench records it: engine flags, and each request's engine-side times."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from astrolabe_lab.cost import shapes
from astrolabe_lab.errors import InputError
from astrolabe_lab.text_files import json_object, text_of

STATISTICS = {
    "mean": np.mean,
    "median": np.median,
    "p90": lambda values: np.percentile(values, 90),
    "p95": lambda values: np.percentile(values, 95),
    "p99": lambda values: np.percentile(values, 99),
}
TIMES = ("queued_ts", "first_token_ts", "last_token_ts")
COUNTS = {"input_toks": "prompt_tokens", "output_toks": "output_tokens"}
ENGINE_FLAGS = (
    "max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks", "max_model_len",
    "enable_chunked_prefill", "async_scheduling", "enable_prefix_caching", "gpu_memory_utilization",
)  # fmt: skip
MOST_S = 1e15  # clocks count from anywhere, but no further
ALONE = {"tensor_parallel_size": 1, "data_parallel_size": 1, "pipeline_parallel_size": 1}


@dataclass(frozen=True)
class MeasuredRun:
    """One engine's run: `requests` in order of arrival (rid, arrived_s, prompt_tokens, output_tokens, ttft_s, tpot_s,
    latency_s), the engine's `flags`, and where the folder has another simulator's summary.txt, its errors (`peer`).

    arrived_s is when the engine queued the request, which the three times count from.
    """

    model: str
    vllm_version: str
    flags: dict
    requests: object = field(repr=False)  # DataFrame
    peer: dict = field(default_factory=dict, repr=False)
    hardware: str = ""

    @property
    def version(self):
        """vLLM's version as a tuple of its first two numbers."""
        return tuple(int(part) for part in re.findall(r"\d+", self.vllm_version)[:2])

    @classmethod
    def load(cls, folder):
        """The run in a folder with meta.json and requests.jsonl. Raises InputError for what is missing or damaged."""
        folder = Path(folder)
        path = folder / "meta.json"
        meta = json_object(path, "the measured run's meta.json", "; give the folder that holds it and requests.jsonl")
        kwargs = meta.get("engine_kwargs")
        if not isinstance(kwargs, dict) or not meta.get("vllm_version"):
            raise InputError(f"{path} lacks engine_kwargs or vllm_version")
        for name, only in ALONE.items():
            if kwargs.get(name, only) != only:
                raise InputError(f"{path}: {name}={kwargs[name]}; only runs of one GPU can be compared")
        if kwargs.get("kv_cache_dtype", "auto") not in ("auto", "bfloat16", "float16"):
            raise InputError(f"{path}: kv_cache_dtype={kwargs['kv_cache_dtype']} is not modelled")
        cache = meta.get("kv_cache") if isinstance(meta.get("kv_cache"), dict) else {}
        scheduler = _object(_object(meta, "resolved_config", path), "scheduler_config", path)
        flags = {name: value for name in ENGINE_FLAGS if (value := kwargs.get(name)) is not None}
        for source in (cache, scheduler):
            flags |= {name: source[name] for name in ENGINE_FLAGS if source.get(name) is not None}
        hardware = str(_object(meta, "hardware", path).get("device_name", ""))
        return cls(
            str(kwargs.get("model") or meta.get("model")), str(meta["vllm_version"]), flags,
            _requests(folder / "requests.jsonl"), _peer(folder / "summary.txt"), f"{hardware} {folder.resolve().name}",
        )  # fmt: skip

    def device(self):
        """The known Device that meta.json or the folder's name tells of, or None."""
        text = re.sub(r"[^A-Z0-9]", "", self.hardware.upper())
        return next((gpu for name, gpu in shapes.DEVICES.items() if re.sub(r"[^A-Z0-9]", "", name) in text), None)


def _requests(path):
    import pandas as pd

    rows = []
    for number, line in enumerate(text_of(path, "the measured requests").split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            row = {ours: entry[theirs] for theirs, ours in COUNTS.items()} | {name: entry[name] for name in TIMES}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(
                f"{path}, line {number} is no request with {', '.join([*COUNTS, *TIMES])} ({error})"
            ) from None
        whole = [row[name] for name in COUNTS.values()]
        if any(isinstance(v, bool) or not isinstance(v, int) or v < 1 for v in whole):
            raise InputError(f"{path}, line {number}: {', '.join(COUNTS)} must be whole numbers >= 1, not {whole}")
        times = [row[name] for name in TIMES]
        if any(isinstance(v, bool) or not isinstance(v, (int, float)) or not abs(v) <= MOST_S for v in times):
            raise InputError(f"{path}, line {number}: {', '.join(TIMES)} must be numbers of seconds, not {times}")
        if times != sorted(times):
            raise InputError(f"{path}, line {number}: {', '.join(TIMES)} must follow each other, not {times}")
        rows.append(row)
    if not rows:
        raise InputError(f"{path} holds no requests")
    frame = pd.DataFrame(rows).sort_values("queued_ts", kind="stable", ignore_index=True)
    several = frame.output_tokens > 1
    frame["tpot_s"] = np.where(
        several, (frame.last_token_ts - frame.first_token_ts) / (frame.output_tokens - 1).clip(lower=1), np.nan
    )
    return frame.assign(
        rid=np.arange(len(frame)),
        arrived_s=frame.queued_ts - frame.queued_ts.iloc[0],
        ttft_s=frame.first_token_ts - frame.queued_ts,
        latency_s=frame.last_token_ts - frame.queued_ts,
    )[["rid", "arrived_s", "prompt_tokens", "output_tokens", "ttft_s", "tpot_s", "latency_s"]]


def _peer(path):
    """{(metric, statistic): error in percent} that another simulator's summary.txt reports; empty without the file."""
    if not path.is_file():
        return {}
    found = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        match = re.fullmatch(r"(TTFT|TPOT|Latency) (Mean|Median|P9[059])\s+\S+\s+\S+\s+([+-]?[\d.]+)%", line.strip())
        if match:
            found[match[1].lower(), match[2].lower()] = float(match[3])
    return found


def _object(entries, name, path):
    """The object `entries[name]`; an empty one where there is none."""
    found = {} if entries.get(name) is None else entries[name]
    if not isinstance(found, dict):
        raise InputError(f"{path}: {name} is {found!r:.60}; it must be a JSON object")
    return found
