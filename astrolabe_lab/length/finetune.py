"""Training an encoder to tell quantiles of the length: the paper's setting, on a GPU or a CPU, and resumable.

The head reads the mean of the last layer and gives the median and the steps to the other LEVELS, on a standardised
log scale; the loss is the quantile (pinball) loss. An answer that was cut off pulls a quantile up to where it was
cut, and no further (Powell, 1986). Everything that chance decides follows from the seed and the step, so that a run
that was stopped and resumed ends, on a CPU, with the weights of one that was not.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.rng import stream

if TYPE_CHECKING:
    import numpy as np

LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
MIDDLE = LEVELS.index(0.5)
_SORT_WITHIN = 32  # batches: prompts of like length share one, so that little is padded


@dataclass(frozen=True)
class Schedule:
    """How to train. The defaults are the paper's: AdamW at 1e-5, batches of 8, a warm-up, early stopping."""

    learning_rate: float = 1e-5
    head_learning_rate: float = 1e-3
    batch_size: int = 8
    epochs: int = 10
    warmup: float = 0.06
    weight_decay: float = 0.01
    patience: int = 2
    seed: int = 0
    checkpoint_every: int = 500  # steps; an epoch's end is kept anyway


@dataclass(frozen=True)
class Part:
    """Answers as numbers: token ids, standardised log length, whether cut off, and the model's number, each (n,)."""

    ids: list[list[int]]
    z: np.ndarray
    censored: np.ndarray
    model: np.ndarray


def build_head(torch, width: int, models: int, start: np.ndarray):
    """The module from pooled states (n, width) and models (n,) to quantiles (n, levels), rising; it begins at
    ``start``, the quantiles of all lengths."""

    class LengthHead(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.of_model = torch.nn.Embedding(models, width)
            self.out = torch.nn.Linear(width, len(LEVELS))
            torch.nn.init.zeros_(self.of_model.weight)
            torch.nn.init.normal_(self.out.weight, std=0.02)
            steps = [max(float(b - a), 1e-3) for a, b in zip(start, start[1:], strict=False)]
            bias = [math.log(math.expm1(step)) for step in steps]
            with torch.no_grad():
                self.out.bias.copy_(torch.tensor([*bias[:MIDDLE], float(start[MIDDLE]), *bias[MIDDLE:]]))

        def forward(self, states, model):
            raw = self.out(states + self.of_model(model)).float()
            median = raw[:, MIDDLE : MIDDLE + 1]
            steps = torch.nn.functional.softplus(raw)
            down = median - steps[:, :MIDDLE].flip(1).cumsum(1).flip(1)
            up = median + steps[:, MIDDLE + 1 :].cumsum(1)
            return torch.cat([down, median, up], dim=1)

    return LengthHead()


def pinball(torch, quantiles, z, censored):
    """The quantile loss of each row, summed over LEVELS: (n,)."""
    levels = torch.tensor(LEVELS, device=quantiles.device)
    off = z[:, None] - quantiles
    loss = torch.maximum(levels * off, (levels - 1) * off)
    return torch.where(censored[:, None] & (off < 0), torch.zeros_like(loss), loss).sum(1)


class Training:
    """One run: ``run()`` trains encoder and head in place and leaves the best weights, by validation loss, in them."""

    def __init__(self, encoder, head, train: Part, validation: Part, schedule: Schedule, fingerprint: str):
        import torch

        self.torch, self.encoder, self.schedule, self.fingerprint = torch, encoder, schedule, fingerprint
        self.head = head.to(encoder.device)
        self.train, self.validation = train, validation
        self.module = torch.nn.ModuleDict({"encoder": encoder.model, "head": self.head})
        groups = [
            {"params": list(encoder.model.parameters()), "lr": schedule.learning_rate},
            {"params": list(self.head.parameters()), "lr": schedule.head_learning_rate},
        ]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=schedule.weight_decay)
        self.steps_an_epoch = math.ceil(len(train.ids) / schedule.batch_size)
        self.total_steps = self.steps_an_epoch * schedule.epochs
        self.step, self.best, self.best_epoch, self.stale, self.history = 0, math.inf, 0, 0, []
        self.best_weights = {}

    def run(self, checkpoint: Path | None = None, progress: Callable[[str], None] | None = None) -> list[dict]:
        """Train, from the checkpoint if there is one of this very run; return the losses epoch by epoch.

        The checkpoint stays when training has ended: what follows may be stopped too.
        """
        torch, schedule = self.torch, self.schedule
        if checkpoint is not None and checkpoint.is_file():
            self._resume(checkpoint)
            if progress:
                progress(f"resumed {checkpoint} at step {self.step:,} of at most {self.total_steps:,}")
        devices = [self.encoder.device] if self.encoder.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            while self.step < self.total_steps and self.stale <= schedule.patience:
                self._epoch(checkpoint, progress)
        self.module.load_state_dict(self.best_weights or self.module.state_dict())
        self.module.eval()
        return self.history

    def _epoch(self, checkpoint, progress):
        torch, schedule = self.torch, self.schedule
        epoch, first = divmod(self.step, self.steps_an_epoch)
        batches = self._batches(epoch)
        self.module.train()
        for rows in batches[first:]:
            torch.manual_seed((schedule.seed << 32) + self.step)  # dropout, alike after a resume
            for group, rate in zip(
                self.optimizer.param_groups,
                (schedule.learning_rate, schedule.head_learning_rate),
                strict=True,
            ):
                group["lr"] = rate * self._rate()
            loss = self._loss(self.train, rows).mean()
            if not torch.isfinite(loss):
                raise InputError(f"the loss is {loss.item()} at step {self.step}: lower the learning rate")
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
            self.optimizer.step()
            self.step += 1
            ended = self.step % self.steps_an_epoch == 0
            if progress and not ended and self.step % max(1, self.steps_an_epoch // 10) == 0:
                progress(f"epoch {epoch + 1}, step {self.step:,}: loss {loss.item():.4f}")
            if checkpoint is not None and not ended and self.step % schedule.checkpoint_every == 0:
                self._keep(checkpoint)
        self._judge(epoch, progress)
        if checkpoint is not None:
            self._keep(checkpoint)

    def _judge(self, epoch, progress):
        """Validation: keep the weights if they are the best so far."""
        loss = float(self.losses(self.validation).mean())
        self.history.append({"epoch": epoch + 1, "validation_loss": loss})
        if loss < self.best - 1e-6:
            self.best, self.best_epoch, self.stale = loss, epoch + 1, 0
            self.best_weights = {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}
        else:
            self.stale += 1
        if progress:
            progress(f"epoch {epoch + 1} of {self.schedule.epochs}: validation loss {loss:.4f} (best {self.best:.4f})")

    def losses(self, part: Part) -> np.ndarray:
        """The quantile loss of each answer, without dropout, float64 (n,)."""
        import numpy as np

        out = np.empty(len(part.ids))
        self.module.eval()
        with self.torch.inference_mode():
            for rows in _by_length(part.ids, 4 * self.schedule.batch_size):
                out[rows] = self._loss(part, rows).cpu().numpy()
        return out

    def _loss(self, part: Part, rows):
        torch, device = self.torch, self.encoder.device
        z, censored, model = (
            torch.as_tensor(values[rows], device=device) for values in (part.z, part.censored, part.model)
        )
        states = self.encoder.pooled([part.ids[i] for i in rows])
        return pinball(torch, self.head(states, model), z.float(), censored)

    def _batches(self, epoch: int) -> list[np.ndarray]:
        """The epoch's batches: a shuffle, sorted by length within stretches of it, the batches shuffled again."""
        import numpy as np

        rng = stream(self.schedule.seed, f"length epoch {epoch}")
        order = rng.permutation(len(self.train.ids))
        size = self.schedule.batch_size
        lengths = np.array([len(ids) for ids in self.train.ids])
        batches = []
        for start in range(0, len(order), size * _SORT_WITHIN):
            some = order[start : start + size * _SORT_WITHIN]
            some = some[np.argsort(lengths[some], kind="stable")]
            batches += [some[i : i + size] for i in range(0, len(some), size)]
        return [batches[i] for i in rng.permutation(len(batches))]

    def _rate(self) -> float:
        """The share of the learning rate at this step: up over the warm-up, then linearly down to 0."""
        warm = max(1, round(self.schedule.warmup * self.total_steps))
        if self.step < warm:
            return (self.step + 1) / warm
        return max(0.0, (self.total_steps - self.step) / max(1, self.total_steps - warm))

    # --- checkpoints --------------------------------------------------------------------------------------

    def _keep(self, path: Path) -> None:
        """Write all that the run needs to go on, as one safetensors file, whole or not at all."""
        from safetensors.torch import save_file

        tensors = {f"now.{name}": tensor for name, tensor in self.module.state_dict().items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self.best_weights.items()}
        for i, parameter in enumerate(self._parameters()):
            state = self.optimizer.state.get(parameter, {})
            tensors |= {f"adam.{i}.{name}": value for name, value in state.items()}
        progress = {
            "step": self.step,
            "best": self.best,
            "best_epoch": self.best_epoch,
            "stale": self.stale,
            "history": self.history,
        }
        noted = {
            "run": self.fingerprint,
            "progress": json.dumps(progress),
            "schedule": json.dumps(asdict(self.schedule)),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            # Clones: tensors that share memory cannot be stored side by side.
            save_file({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, partial, noted)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def _resume(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                noted = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise InputError(f"checkpoint {path} cannot be read ({error}): remove it to start anew") from None
        if noted.get("run") != self.fingerprint:
            raise InputError(
                f"checkpoint {path} is of another run (other data, encoder, options or seed): remove it, or give "
                "another folder"
            )
        for name, value in json.loads(noted["progress"]).items():
            setattr(self, name, value)
        parts = {prefix: _under(tensors, prefix) for prefix in ("now.", "best.", "adam.")}
        self.module.load_state_dict(parts["now."])
        self.best_weights = {name: tensor.to(self.encoder.device) for name, tensor in parts["best."].items()}
        for i, parameter in enumerate(self._parameters()):
            state = _under(parts["adam."], f"{i}.")
            # AdamW counts its steps on the CPU, and keeps the rest beside the weights.
            self.optimizer.state[parameter] = {
                name: value if name == "step" else value.to(parameter.device) for name, value in state.items()
            }

    def _parameters(self):
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


def _under(tensors: dict, prefix: str) -> dict:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _by_length(ids: list[list[int]], size: int) -> list[np.ndarray]:
    import numpy as np

    order = np.argsort([len(sequence) for sequence in ids], kind="stable")
    return [order[i : i + size] for i in range(0, len(order), size)]
