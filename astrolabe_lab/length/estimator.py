"""The interface of every length model: fit, predict, predict_quantiles, save; in scikit-learn's manners."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from astrolabe_lab.errors import InputError
from astrolabe_lab.length import survival
from astrolabe_lab.length.samples import Samples, check_models, check_prompts, check_samples
from astrolabe_lab.trace.columns import MAX_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np


class Estimator:
    """A model of the length of answers. Subclasses are dataclasses; their fields are the options.

    After ``fit``: ``n_samples_``, ``censored_`` (how many were cut off), ``median_tokens_`` (of the lengths),
    ``data_sha256_``, ``models_`` (names of the serving models it tells apart; empty if none were given) and
    ``metrics`` (a dict to fill and save).
    """

    kind: ClassVar[str]

    def fit(self, prompts: Sequence[str], lengths, *, models=None, censored=None) -> Estimator:
        """Learn from n answers, and return self.

        lengths: tokens of each answer, 1 or more. models: who answered, one name or n of them. censored: n truth
        values, True where an answer was cut off, so that it would have been at least this long.
        Raises InputError for what does not fit together, and where nothing can be learned.
        """
        samples = check_samples(prompts, lengths, models, censored)
        self._learn(samples)
        self._note(samples)
        return self

    def predict(self, prompts: Sequence[str], models=None) -> np.ndarray:
        """The median length of each answer, in tokens: float64 (n,), at least 1.

        models: the serving model, one name or n of them; needed where ``fit`` was given several.
        Raises InputError before ``fit``, or for a model that it has not seen.
        """
        return self.predict_quantiles(prompts, (0.5,), models)[:, 0]

    def predict_quantiles(self, prompts: Sequence[str], quantiles=(0.5, 0.9), models=None) -> np.ndarray:
        """Quantiles of the length of each answer, in tokens: float64 (n, q), at least 1, rising with the quantile."""
        import numpy as np

        self._check_fitted()
        prompts = check_prompts(prompts)
        levels = np.atleast_1d(np.asarray(quantiles, dtype=np.float64))
        if levels.ndim != 1 or not ((levels > 0) & (levels < 1)).all():
            raise InputError(f"quantiles={quantiles!r} is not usable: give numbers between 0 and 1, e.g. (0.5, 0.9)")
        names = self._check_known(check_models(models, len(prompts)), len(prompts))
        if not prompts:
            return np.empty((0, len(levels)))
        tokens = np.clip(self._quantiles(prompts, names, levels), 1.0, MAX_TOKENS)
        order = np.argsort(levels, kind="stable")
        tokens[:, order] = np.maximum.accumulate(tokens[:, order], axis=1)  # rounding may cross by an ulp
        return tokens

    def save(self, directory) -> Path:
        """Write the fitted model to the folder ``directory``, whole or not at all; ``length.load`` reads it."""
        from astrolabe_lab.length import artifact

        self._check_fitted()
        written = artifact.save(self, directory)
        self.drop_checkpoint()
        return written

    def get_params(self, deep: bool = True) -> dict:
        """The options and their values."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.init}

    def set_params(self, **params) -> Estimator:
        """Change options, and return self. Raises InputError for an unknown one."""
        allowed = self.get_params()
        for name, value in params.items():
            if name not in allowed:
                raise InputError(f"{self.kind} has no option {name!r}; its options: {', '.join(allowed) or 'none'}")
            setattr(self, name, value)
        if hasattr(self, "__post_init__"):
            self.__post_init__()
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "data_sha256_")

    def drop_checkpoint(self) -> None:
        """Remove what was kept to resume the training: the model is saved, or no longer wanted."""

    # --- for subclasses -----------------------------------------------------------------------------------

    def _learn(self, samples: Samples) -> None:
        raise NotImplementedError

    def _quantiles(self, prompts: list[str], models: list[str] | None, levels: np.ndarray) -> np.ndarray:
        """float64 (n, q); ``models`` holds names in ``models_``, or is None where that is empty."""
        raise NotImplementedError

    def _write(self, folder: Path) -> dict:
        """Write the learned state into ``folder``; return what of it belongs in the manifest, as JSON."""
        raise NotImplementedError

    def _read(self, folder: Path, noted: dict) -> None:
        """Take up what ``_write`` left."""
        raise NotImplementedError

    def _note(self, samples: Samples) -> None:
        self.n_samples_ = len(samples)
        self.censored_ = int(samples.censored.sum())
        self.median_tokens_ = float(survival.quantiles(samples.lengths, samples.censored, [0.5])[0])
        self.data_sha256_ = samples.sha256()
        self.models_ = sorted(set(samples.models)) if samples.models else []
        self.metrics = {}

    def _check_fitted(self) -> None:
        if not self.__sklearn_is_fitted__():
            raise InputError(f"this {self.kind} model has not been fitted: call fit, or load a saved model")

    def _check_known(self, models: list[str] | None, n: int) -> list[str] | None:
        if not self.models_:
            return None  # it was fitted without names: they cannot matter
        if models is None:
            if len(self.models_) == 1:
                return self.models_ * n
            raise InputError(
                f"models: this {self.kind} model tells {len(self.models_)} serving models apart; say which answers: "
                f"{', '.join(self.models_)}"
            )
        unknown = sorted(set(models) - set(self.models_))
        if unknown:
            raise InputError(
                f"models: {unknown[0]!r} is unknown to this {self.kind} model; it knows {', '.join(self.models_)}"
            )
        return models
