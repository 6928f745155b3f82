"""``encoder``: a pre-trained encoder reads the prompt; frozen under a ridge, or trained as a whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from astrolabe_lab.errors import InputError
from astrolabe_lab.length import finetune
from astrolabe_lab.length.landmarks import Landmarks
from astrolabe_lab.length.linear import LinearEstimator
from astrolabe_lab.length.ridge import check_alpha
from astrolabe_lab.length.text_encoder import MINILM, EmbeddingCache, TextEncoder
from astrolabe_lab.length.wording import Wording

_CACHED_FROM = 64  # prompts: fewer are read anew, which is faster than a look at the disk


@dataclass
class Encoder(LinearEstimator):
    """Likeness to known prompts in a frozen encoder's eyes, beside what ``prompt_ridge`` looks at; or ``fine_tune``.

    encoder: ``minilm`` (the packaged all-MiniLM-L6-v2), a folder, or a name on a hub such as ``roberta-base``.
    fine_tune: train the whole encoder with a quantile head. The paper's setting is
        ``encoder:encoder=roberta-base,fine_tune=true`` with the defaults of what follows.
    landmarks: at most so many known prompts are compared with; None: all of up to 4,000, and 1,000 of more.
        vocabulary, alpha: as in ``prompt_ridge``; vocabulary=0 leaves the wording out. These three are of the frozen
        encoder alone.
    max_tokens: of a prompt that are read, half at its head and half at its tail if it is longer.
    learning_rate, head_learning_rate, batch_size, epochs, warmup, weight_decay, patience, checkpoint_every, seed: see
        ``finetune.Schedule``. validation: the share of training prompts that decides when to stop.
    checkpoint: a folder in which to keep a training that can be resumed, until the model is saved; None keeps nothing.
    device: ``auto`` (a GPU in bfloat16 if there is one), ``cpu`` or ``cuda``.

    ``progress`` may be set to a function that takes lines of text.
    """

    encoder: str = MINILM
    fine_tune: bool = False
    landmarks: int | None = None
    vocabulary: int = 2000
    alpha: float | None = None
    max_tokens: int = 256
    learning_rate: float = 1e-5
    head_learning_rate: float = 1e-3
    batch_size: int = 8
    epochs: int = 10
    warmup: float = 0.06
    weight_decay: float = 0.01
    patience: int = 2
    validation: float = 0.1
    checkpoint_every: int = 500
    seed: int = 0
    checkpoint: str | None = None
    device: str = "auto"
    kind = "encoder"
    progress: ClassVar[Callable[[str], None] | None] = None
    _kept: ClassVar[Path | None] = None  # the checkpoint of the training that made it

    def __post_init__(self):
        check_alpha(self.kind, self.alpha)
        whole = {
            "landmarks": 1,
            "vocabulary": 0,
            "max_tokens": 4,
            "batch_size": 1,
            "epochs": 1,
            "patience": 0,
            "seed": 0,
        }
        whole["checkpoint_every"] = 1
        for name, least in whole.items():
            value = getattr(self, name)
            if name == "landmarks" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"encoder: {name}={value!r} must be an integer >= {least}")
        shares = {"validation": 0.5, "warmup": 1.0}
        for name in ("learning_rate", "head_learning_rate", "weight_decay", *shares):
            value = getattr(self, name)
            limit = shares.get(name, float("inf"))
            least_open = name in ("learning_rate", "head_learning_rate", "validation")
            if (
                not isinstance(value, (int, float))
                or not (value > 0 if least_open else value >= 0)
                or not value < limit
            ):
                raise InputError(
                    f"encoder: {name}={value!r} must be a number {'above' if least_open else 'from'} 0"
                    + (f", below {limit:g}" if name in shares else "")
                )
        if self.seed >= 2**31:
            raise InputError(f"encoder: seed={self.seed} must be below 2**31")

    # --- frozen -------------------------------------------------------------------------------------------

    def _learn_rows(self, prompts):
        self._text = TextEncoder(self.encoder, self.max_tokens, self.device)
        self._cache = None
        self._wording = Wording.learn(prompts, self.vocabulary) if self.vocabulary else None
        vectors = self._vectors(prompts)
        self._landmarks = Landmarks.learn(vectors, self.landmarks, self.seed)
        rows = self._beside(self._landmarks.rows(vectors), prompts, interplay=True)
        return rows, len(self._landmarks.points) + (self._wording.plain_columns if self._wording else 0)

    def _rows(self, prompts, interplay):
        return self._beside(self._landmarks.likeness(self._vectors(prompts)), prompts, interplay)

    def _beside(self, likeness, prompts, interplay):
        import numpy as np

        return likeness if self._wording is None else np.hstack([likeness, self._wording.rows(prompts, interplay)])

    def _reread(self, weights):
        import numpy as np

        known = len(self._landmarks.points)
        return np.concatenate([self._landmarks.whiten @ weights[:known], weights[known:]])

    def _vectors(self, prompts):
        if len(prompts) < _CACHED_FROM:
            return self._text.embed(prompts)
        self._cache = self._cache or EmbeddingCache(self._text)
        return self._cache.embed(prompts, self._embedded)

    def _embedded(self, done, of):
        if self.progress:
            self.progress(f"read {done:,} of {of:,} prompts")

    # --- fine-tuned ---------------------------------------------------------------------------------------

    def _learn(self, samples):
        if not self.fine_tune:
            return super()._learn(samples)
        import numpy as np
        import torch

        from astrolabe_lab.length import survival
        from astrolabe_lab.rng import stream

        self._text = TextEncoder(self.encoder, self.max_tokens, self.device)
        names = sorted(set(samples.models)) if samples.models else []
        model = np.searchsorted(names, samples.models) if names else np.zeros(len(samples), dtype=np.int64)
        y = np.log(samples.lengths)
        self._mean, self._sd = float(y.mean()), max(float(y.std()), 1e-3)
        z = ((y - self._mean) / self._sd).astype(np.float32)
        start = survival.quantiles(z, samples.censored, finetune.LEVELS)
        # The seed draws the head and, by prompt, who decides when to stop.
        with torch.random.fork_rng([]):
            torch.manual_seed(self.seed)
            self._out = finetune.build_head(torch, self._text.width, max(len(names), 1), start)
        distinct = list(dict.fromkeys(samples.prompts))
        drawn = stream(self.seed, "length validation").permutation(len(distinct))
        held = {distinct[i] for i in drawn[: max(1, round(self.validation * len(distinct)))]}
        of_held = np.array([prompt in held for prompt in samples.prompts])
        if of_held.all() or samples.censored[of_held].all() or samples.censored[~of_held].all():
            raise InputError(
                f"{len(distinct)} distinct prompts are too few to train an encoder and to decide when to stop"
            )
        ids = self._text.ids(samples.prompts)

        def part(rows):
            return finetune.Part([ids[i] for i in np.flatnonzero(rows)], z[rows], samples.censored[rows], model[rows])

        schedule = finetune.Schedule(**{f.name: getattr(self, f.name) for f in fields(finetune.Schedule)})
        training = finetune.Training(
            self._text, self._out, part(~of_held), part(of_held), schedule, self._run_hash(samples)
        )
        self._kept = Path(self.checkpoint) / "checkpoint.safetensors" if self.checkpoint else None
        self.history_ = training.run(self._kept, self.progress)
        self._shift = self._calibrated(part(of_held))

    def _calibrated(self, held) -> list[float]:
        """What to add to each quantile so that it holds on the prompts held out (Romano and others, 2019)."""
        from astrolabe_lab.length import survival

        told = self._raw(held.ids, held.model)
        return [
            float(survival.quantiles(held.z - told[:, i], held.censored, [level])[0])
            for i, level in enumerate(finetune.LEVELS)
        ]

    def _run_hash(self, samples) -> str:
        options = {k: v for k, v in self.get_params().items() if k not in ("checkpoint", "device", "checkpoint_every")}
        said = {"data": samples.sha256(), "order": _order_hash(samples), "options": options}
        said["encoder"] = self._text.fingerprint()
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

    def _raw(self, ids, model):
        """Quantiles at LEVELS on the standardised log scale, float64 (n, levels)."""
        import numpy as np
        import torch

        out = np.empty((len(ids), len(finetune.LEVELS)))
        self._out.eval()
        with torch.inference_mode():
            for rows in finetune._by_length(ids, 32):
                states = self._text.pooled([ids[i] for i in rows])
                out[rows] = self._out(states, torch.as_tensor(model[rows], device=states.device)).cpu().numpy()
        return out

    def _quantiles(self, prompts, models, levels):
        if not self.fine_tune:
            return super()._quantiles(prompts, models, levels)
        import numpy as np
        from scipy.stats import norm

        model = np.searchsorted(self.models_, models) if models else np.zeros(len(prompts), dtype=np.int64)
        told = np.maximum.accumulate(self._raw(self._text.ids(prompts), model) + np.array(self._shift), axis=1)
        # Between and beyond the levels, straight on a normal's scale.
        at, asked = norm.ppf(finetune.LEVELS), norm.ppf(levels)
        left = np.clip(np.searchsorted(at, asked) - 1, 0, len(at) - 2)
        share = (asked - at[left]) / (at[left + 1] - at[left])
        z = told[:, left] + share * (told[:, left + 1] - told[:, left])
        return np.exp(np.clip(z * self._sd + self._mean, 0.0, 25.0))

    # --- on disk ------------------------------------------------------------------------------------------

    def drop_checkpoint(self):
        if self._kept is not None:
            self._kept.unlink(missing_ok=True)

    def _write(self, folder: Path) -> dict:
        if not self.fine_tune:
            return super()._write(folder) | {"encoder_sha256": self._text.fingerprint()}
        from safetensors.torch import save_file

        self._text.model.save_pretrained(folder / "encoder")
        self._text.tokenizer.save_pretrained(folder / "encoder")
        save_file(
            {name: value.cpu().contiguous() for name, value in self._out.state_dict().items()},
            folder / "head.safetensors",
        )
        return {"mean": self._mean, "sd": self._sd, "shift": self._shift, "history": self.history_}

    def _read(self, folder: Path, noted: dict) -> None:
        if not self.fine_tune:
            super()._read(folder, noted)
            if self._text.fingerprint() != noted["encoder_sha256"]:
                raise InputError(
                    f"encoder {self.encoder!r} is not the one that this model was fitted on (its hash differs): give "
                    "it the encoder of then, or train again"
                )
            return
        import numpy as np
        import torch
        from safetensors.torch import load_file

        self._text = TextEncoder(str(folder / "encoder"), self.max_tokens, self.device)
        self._out = finetune.build_head(
            torch, self._text.width, max(len(self.models_), 1), np.zeros(len(finetune.LEVELS))
        ).to(self._text.device)
        self._out.load_state_dict(load_file(folder / "head.safetensors"))
        self._mean, self._sd, self._shift = noted["mean"], noted["sd"], noted["shift"]
        self.history_ = noted["history"]

    def _write_rows(self, folder: Path) -> None:
        self._landmarks.write(folder)
        if self._wording is not None:
            self._wording.write(folder)

    def _read_rows(self, folder: Path) -> None:
        self._text = TextEncoder(self.encoder, self.max_tokens, self.device)
        self._cache = None
        self._landmarks = Landmarks.read(folder)
        self._wording = Wording.read(folder) if self.vocabulary else None


def _order_hash(samples) -> str:
    """The hash of the prompts in their order, which decides the batches."""
    return hashlib.sha256("\0".join(samples.prompts).encode("utf-8", "surrogatepass")).hexdigest()
