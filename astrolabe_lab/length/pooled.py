"""Several serving models that learn from each other: what all agree on about a prompt, then what is each one's own.

log(length) = effect(prompt) + level(model) + own(model, prompt). ``effect`` is one ridge over the distinct prompts of
all models, fitted to what is left of their answers when each model's level is taken off; ``own`` is a Head a model,
on the effect (held out for its own prompts) and, where that lowers its held-out error, the leading directions of the
prompts' rows. So a model with few answers borrows from those with many, and one with many goes its own way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from astrolabe_lab.length.head import ALPHAS, Head, Ridge, held_out_mae, mean_above

if TYPE_CHECKING:
    import numpy as np

DIRECTIONS = 48
EFFECT_SCALE = 4.0  # so large beside the directions that its slope is hardly penalised
_ROUNDS = 4
_LONE_NOISE = 3.0  # variance among answers to a prompt, beside that of the prompt's effect about the ridge


class PooledHead:
    """The fitted distributions, one a model, on a shared effect."""

    def __init__(self, slope, intercept, axes, center, loss, heads: list[Head]):
        self.slope, self.intercept, self.axes, self.center = slope, intercept, axes, center
        self.loss, self.heads = loss, heads

    @classmethod
    def learn(cls, x, prompt, model, lengths, censored, alpha: float | None = None) -> PooledHead:
        """Fit to the rows x (p, d) of p distinct prompts, and n answers: ``prompt`` (index into x), ``model`` (0, 1,
        ...), ``lengths`` (tokens) and ``censored``, each (n,)."""
        import numpy as np

        y = np.log(lengths)
        models = int(model.max()) + 1
        answers = np.bincount(prompt, minlength=len(x))
        # The mean of many answers is less noisy than one answer, but no less for what the rows do not say.
        ridge = Ridge(x, np.arange(len(x)), (1 + _LONE_NOISE) * answers / (answers + _LONE_NOISE))
        effect = np.zeros(len(x))
        filled, none_cut = y.copy(), np.zeros(len(x), dtype=bool)
        for turn in range(_ROUNDS):
            level = np.bincount(model, filled - effect[prompt], models) / np.bincount(model, minlength=models)
            target = np.bincount(prompt, filled - level[model], len(x)) / answers
            if alpha is None:
                losses = [held_out_mae(target, ridge.held_out(target, a), none_cut) for a in ALPHAS]
                alpha = ALPHAS[int(np.argmin(losses))]
            effect = ridge.held_out(target, alpha)
            if turn + 1 < _ROUNDS and censored.any():
                location = effect[prompt] + level[model]
                sd = max(float(np.std((filled - location)[~censored])), 1e-6)
                filled[censored] = location[censored] + sd * mean_above((y - location)[censored] / sd)
        slope, intercept = ridge.solve(target, alpha)
        axes = ridge.leading(DIRECTIONS)
        pooled = cls(slope, intercept, axes, ridge.mean @ axes, held_out_mae(target, effect, none_cut), [])
        inputs = pooled._inputs(x, effect)
        for m in range(models):
            mine = model == m
            answers = lengths[mine], censored[mine], prompt[mine]
            own = inputs[prompt[mine]]
            plain = Head.learn(own * (np.arange(own.shape[1]) == own.shape[1] - 1), *answers)
            full = Head.learn(own, *answers)
            pooled.heads.append(min(plain, full, key=lambda head: float(head.loss)))
        return pooled

    def quantiles(self, x, model, levels) -> np.ndarray:
        """Tokens, float64 (n, q), for rows x (n, d) and the models' numbers (n,)."""
        import numpy as np

        inputs = self._inputs(x, x @ self.slope + self.intercept)
        out = np.empty((len(x), len(levels)))
        for m in np.unique(model):
            mine = model == m
            out[mine] = self.heads[m].quantiles(inputs[mine], levels)
        return out

    def through(self, reread) -> PooledHead:
        """The same for other rows: ``reread`` turns weights of those it was learned from into weights of these."""
        return PooledHead(**vars(self) | {name: reread(getattr(self, name)) for name in ("slope", "axes")})

    def arrays(self) -> dict:
        """The state as arrays, which ``from_arrays`` takes."""
        own = {name: value for name, value in vars(self).items() if name != "heads"}
        return own | {
            f"{i} {name}": value for i, head in enumerate(self.heads) for name, value in head.arrays().items()
        }

    @classmethod
    def from_arrays(cls, arrays: dict) -> PooledHead:
        own = {name: value for name, value in arrays.items() if " " not in name}
        heads: dict[int, dict] = {}
        for name, value in arrays.items():
            number, space, part = name.partition(" ")
            if space:
                heads.setdefault(int(number), {})[part] = value
        return cls(**own, heads=[Head.from_arrays(heads[i]) for i in range(len(heads))])

    def _inputs(self, x, effect):
        import numpy as np

        return np.hstack([x @ self.axes - self.center, EFFECT_SCALE * effect[:, None]])
