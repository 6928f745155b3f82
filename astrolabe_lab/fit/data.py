"""Where the public timings lie in the data folder, read once each."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from astrolabe_lab.errors import InputError

ASTROLABE = "astrolabe/profiling__"


@cache
def _csv(path):
    import pandas as pd

    try:
        return pd.read_parquet(path) if path.endswith(".parquet") else pd.read_csv(path)
    except OSError as error:
        where = f"timings {path}: {error.strerror}"
        raise InputError(f"{where}; give the folder that holds astrolabe/ and vidur/") from None


class Timings:
    """The public timings under a folder, by what they are of."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def mlp(self, device, model):
        """Vidur's MLP profile of a model ("Llama-2-7b-hf") on "a100" or "a40"."""
        return self._read(f"vidur/compute/{device}/meta-llama/{model}/mlp.csv")

    def astrolabe(self, device, model, what):
        """The Astrolabe repository's profile ("mlp" or "attention") of a model on "a30" or "a100_40gb"."""
        return self._read(f"{ASTROLABE}compute__{device}__{model}__{what}.csv.gz")

    def all_reduce(self):
        """All-reduce over four A100-40GB of one node."""
        return self._read(f"{ASTROLABE}network__a100_40gb_pairwise_nvlink__all_reduce.csv.gz")

    def samples(self, device, op, most=128):
        """Samples of Llama-2-7B's attention on "a100" or "a40": "attn_decode" up to a batch, or "attn_prefill"."""
        rows = self._read("vidur/sampled/llama2_7b_tp1_attention_samples.csv")
        return rows[(rows.device == device) & (rows.op == op) & (rows.batch_size <= most)]

    def prefill_of_a100(self, heads):
        """NVIDIA AIConfigurator's prefill attention of one prompt on an A100: isl (tokens), latency (ms)."""
        found = self._read("vidur/aiconfigurator/a100_sxm/attention/vllm/0.14.0/context_attention_perf.parquet")
        own = (found.num_heads == heads) & (found.num_key_value_heads == heads) & (found.head_dim == 128)
        return found[own & (found.batch_size == 1)]

    def attention_of_70b(self):
        """Vidur's attention of Llama-2-70B over two A100-80GB, from its history."""
        return self._read("vidur/history/a100/attention_llama2-70b_tp2.csv")

    def blackwell(self):
        """The LayerTimings of Llama-3.1-8B on an RTX PRO 6000."""
        from astrolabe_lab.fidelity.layers import LayerTimings

        return LayerTimings.load(self.folder / "vidur/llmservingsim/RTXPRO6000_Llama-3.1-8B_bf16_tp1")

    def _read(self, path):
        return _csv(str(self.folder / path))
