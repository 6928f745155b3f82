"""A step cost from timings of a model's layers, measured one kernel at a time.

A step is layers x (attention + dense layers) + what runs once + what runs once a sequence. Attention was timed for
batches of equal contexts; a batch whose contexts differ takes longer than its mean says, which `Spread` accounts for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from astrolabe_lab.cost import Grid, Regime, StepCost
from astrolabe_lab.errors import InputError
from astrolabe_lab.fit.regression import Fit, hats, relative_least_squares

# Times a layer's kernel runs: in each decoder layer, or once a step.
IN_EACH_LAYER = {
    "layernorm": 2,
    "qkv_proj": 1,
    "qk_norm": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
ONCE = {"embedding": 1, "final_layernorm": 1}
NEEDED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
FILES = {
    "attention.csv": ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"),
    "dense.csv": ("layer", "tokens", "time_us"),
    "per_sequence.csv": ("layer", "sequences", "time_us"),
}


@dataclass(frozen=True)
class Spread:
    """How unequal the contexts of a decoding batch are, and what that costs.

    A batch takes (1 - share) of the time of equal contexts of its mean length, and `share` of the time of equal
    contexts of its longest. `contexts` (m,) with `weights` (m,) are the context lengths met while decoding.
    """

    share: float
    contexts: np.ndarray
    weights: np.ndarray

    def __post_init__(self):
        if not 0 <= self.share < 1:
            raise InputError(f"spread: share={self.share!r} must be in [0, 1), like 0.05")

    @classmethod
    def of(cls, prompt_tokens, output_tokens, share):
        """The Spread of requests of these lengths: each is met at every context from its prompt's to its last."""
        steps = np.linspace(0, 1, 65)
        prompt, output = np.asarray(prompt_tokens, float)[:, None], np.asarray(output_tokens, float)[:, None]
        contexts, weights = prompt + steps * (output - 1), np.broadcast_to(output, (len(prompt), len(steps)))
        order = np.argsort(contexts, axis=None)
        return cls(share, contexts.ravel()[order], weights.ravel()[order] / weights.sum())

    def longest_over_mean(self, sequences):
        """(n,) expected longest context over the mean, among so many independent sequences (n,)."""
        below = np.concatenate([[0.0], np.cumsum(self.weights)])
        sizes, which = np.unique(np.asarray(sequences, float), return_inverse=True)
        longest = [np.diff(below**size) @ self.contexts for size in sizes]
        return np.array(longest)[which] / (self.weights @ self.contexts)


@dataclass(frozen=True)
class LayerTimings:
    """Times of one GPU's kernels, in s: attention of a layer by batch, dense layers by tokens, heads by sequences."""

    attention: object  # DataFrame: prefill_chunk, kv_prefill, n_decode, kv_decode (tokens of each), seconds
    dense: object  # DataFrame: a row a token count, a column a layer
    per_sequence: object  # DataFrame: a row a number of sequences, a column a layer

    @classmethod
    def load(cls, folder):
        """The timings in a folder with attention.csv, dense.csv and per_sequence.csv (LLMServingSim's profiles, us).

        What was timed several times has the mean of its times.

        Raises InputError for a file or column that is missing, values that are no timings, or an unknown layer.
        """
        attention, dense, per_sequence = (_read(Path(folder) / name, columns) for name, columns in FILES.items())
        if not ((attention.prefill_chunk == 0) & (attention.n_decode > 0)).any():
            raise InputError(f"{Path(folder) / 'attention.csv'} has no batch that only decodes (prefill_chunk 0)")
        if not (attention.prefill_chunk > 0).any():
            raise InputError(f"{Path(folder) / 'attention.csv'} has no batch with a prefill chunk")
        attention = attention.groupby(list(FILES["attention.csv"][:-1]), as_index=False)["seconds"].mean()
        dense = _by_layer(dense, "tokens")
        known = [*IN_EACH_LAYER, *ONCE]
        if unknown := sorted(set(dense) - set(known)):
            where = Path(folder) / "dense.csv"
            raise InputError(f"{where}: unknown layer {', '.join(unknown)}; known: {', '.join(known)}")
        if missing := [name for name in NEEDED if name not in dense]:
            raise InputError(f"{Path(folder) / 'dense.csv'} lacks {', '.join(missing)}")
        return cls(attention, dense, _by_layer(per_sequence, "sequences"))

    def dense_s(self, tokens, layers):
        """(n,) seconds of all that depends on the tokens (n,) of a step alone, between the timings linear."""
        times = {name: count * layers for name, count in IN_EACH_LAYER.items()} | ONCE
        total = sum(times[name] * self.dense[name] for name in self.dense)
        return _line(tokens, total.index.to_numpy(float), total.to_numpy())

    def per_sequence_s(self, sequences):
        """(n,) seconds of output head and sampler for so many sequences (n,)."""
        total = self.per_sequence.sum(axis=1)
        return _line(sequences, total.index.to_numpy(float), total.to_numpy())

    def decode_attention_s(self, sequences, context, spread=None):
        """(n,) seconds of one layer's attention over n decoding sequences (n,) of `context` tokens on average (n,)."""
        rows = self.attention[self.attention.prefill_chunk == 0]
        table = rows.pivot_table(index="n_decode", columns="kv_decode", values="seconds")
        table = table.interpolate(axis=1, limit_direction="both").interpolate(axis=0, limit_direction="both")
        counts, lengths = table.index.to_numpy(float), table.columns.to_numpy(float)
        sequences, context = np.broadcast_arrays(np.asarray(sequences, float), np.asarray(context, float))

        def at(length):
            by_count = np.stack([_line(length, lengths, row) for row in table.to_numpy()])
            low = np.clip(np.searchsorted(counts, sequences, "right") - 1, 0, max(len(counts) - 2, 0))
            high = np.minimum(low + 1, len(counts) - 1)
            gap = np.where(high > low, counts[high] - counts[low], 1)
            share = (np.clip(sequences, counts[0], counts[-1]) - counts[low]) / gap
            pick = np.arange(len(sequences))
            return (1 - share) * by_count[low, pick] + share * by_count[high, pick]

        if spread is None:
            return at(context)
        longest = context * spread.longest_over_mean(sequences)
        return (1 - spread.share) * at(context) + spread.share * at(longest)

    def iterations(self, shape, engine, longest, spread=None):
        """Whole steps made of every timed batch that `engine` could run on requests of `longest` tokens at most.

        Columns as `fit.fit` takes them, and dense_s, which of the seconds depends on new_tokens alone.
        """
        a = self.attention
        sequences = a.n_decode + (a.prefill_chunk > 0)
        fits = (
            (a.n_decode <= engine.max_num_seqs)  # timed with a prefill chunk beside, that is one sequence more
            & (a.prefill_chunk + a.n_decode <= engine.max_num_batched_tokens)
            & (a.kv_decode <= longest)
            & (a.kv_prefill + a.prefill_chunk <= longest)
            & (a.n_decode * a.kv_decode + a.kv_prefill <= engine.num_gpu_blocks * engine.block_size)
        )
        if fits.sum() < 100:
            raise InputError(f"only {fits.sum()} timed batches are ones this engine could run; time more of them")
        seconds = self._spread_out(spread)[fits.to_numpy()]
        a, sequences = a[fits], sequences[fits].to_numpy(float)
        new_tokens = (a.prefill_chunk + a.n_decode).to_numpy(float)
        dense_s = self.dense_s(new_tokens, shape.layers)
        import pandas as pd

        return pd.DataFrame(
            {
                "new_tokens": new_tokens,
                "sequences": sequences,
                "context_tokens": (a.n_decode * a.kv_decode + a.kv_prefill).to_numpy(float),
                "attention": (a.prefill_chunk * a.kv_prefill + a.prefill_chunk**2 / 2).to_numpy(float),
                "mixed": (a.prefill_chunk > 0).to_numpy(),
                "dense_s": dense_s,
                "seconds": dense_s + self.per_sequence_s(sequences) + shape.layers * seconds,
            }
        )

    def _spread_out(self, spread):
        """Seconds of every attention row, of a batch whose contexts are spread out around the row's."""
        a = self.attention
        if spread is None:
            return a.seconds.to_numpy()
        seconds = a.seconds.to_numpy().copy()
        ratio = np.ones(len(a))
        decoding = (a.n_decode > 0).to_numpy()
        ratio[decoding] = spread.longest_over_mean(a.n_decode[decoding])
        for rows in a.groupby(["prefill_chunk", "kv_prefill", "n_decode"]).indices.values():
            if len(rows) > 1 and decoding[rows[0]]:
                rows = rows[np.argsort(a.kv_decode.to_numpy()[rows])]
                lengths, times = a.kv_decode.to_numpy(float)[rows], a.seconds.to_numpy()[rows]
                at_longest = _line(lengths * ratio[rows], lengths, times)
                seconds[rows] = (1 - spread.share) * times + spread.share * at_longest
        return seconds


def tabulated(timings, shape, engine, longest, *, spread=None, host_s=0.0, pad_sizes=()):
    """(StepCost, {part: Fit}) with the timings' own curves in its grids.

    Decode-only steps are the timings themselves, interpolated. Of a mixed step, what depends on its tokens alone is
    the timings; its attention and heads are fitted: piecewise linear in context, linear in sequences and query-key
    pairs. `longest` is the longest request to expect, in tokens. Raises InputError for timings of which this engine
    could run too few, or none that only decodes, or none that has a prefill chunk beside decodes or cached tokens.
    """
    steps = timings.iterations(shape, engine, longest, spread)
    mixed = steps[steps.mixed]
    for lacking, what in (
        (steps.mixed.all(), "only decodes"),
        (not (mixed.context_tokens > 0).any(), "has a prefill chunk beside decodes or cached tokens"),
    ):
        if lacking:
            raise InputError(
                f"none of the timed batches that {what} is one this engine could run (max_num_seqs="
                f"{engine.max_num_seqs}, max_num_batched_tokens={engine.max_num_batched_tokens}): time some in "
                "attention.csv"
            )
    most_context = min(engine.num_gpu_blocks * engine.block_size, engine.max_num_seqs * longest)
    knots = _knots(mixed.context_tokens.max())
    regressors = [*hats(mixed.context_tokens, knots).T, mixed.sequences, mixed.attention, mixed.new_tokens]
    fitted = relative_least_squares(regressors, mixed.seconds, known=mixed.dense_s, non_negative=True)
    per_seq_s, attention_s, per_token_s = fitted.coefficients[len(knots) :]

    tokens = np.unique([*timings.dense.index, engine.max_num_batched_tokens, 1])
    tokens = tokens[tokens <= engine.max_num_batched_tokens].astype(float)
    mixed_grid = Grid(
        tuple(tokens),
        tuple(knots),
        tuple(map(tuple, timings.dense_s(tokens, shape.layers)[:, None] + np.array(fitted.coefficients[: len(knots)]))),
    )
    counts = np.unique([*tokens[tokens <= engine.max_num_seqs], engine.max_num_seqs, *pad_sizes]).astype(float)
    contexts = _knots(most_context)
    n, context = (part.ravel() for part in np.meshgrid(counts, contexts, indexing="ij"))
    seconds = (
        timings.dense_s(n, shape.layers)
        + timings.per_sequence_s(n)
        + shape.layers * timings.decode_attention_s(n, context / n, spread)
    ).reshape(len(counts), len(contexts))
    decode_grid = Grid(tuple(counts), tuple(contexts), tuple(map(tuple, seconds)))
    cost = StepCost(
        Regime(host_s=host_s),
        Regime(host_s=host_s, per_token_s=per_token_s, per_seq_s=per_seq_s, attention_s=attention_s),
        pad_sizes=tuple(pad_sizes),
        decode_grid=decode_grid,
        mixed_grid=mixed_grid,
    )
    return cost, {"mixed": fitted, "decode": _agreement(cost, steps[~steps.mixed], host_s)}


def _agreement(cost, steps, host_s):
    """How far a cost is from steps it was tabulated from, as a Fit without coefficients."""
    priced = [cost.step_seconds(*row) for row in steps[["new_tokens", "sequences", "context_tokens"]].to_numpy()]
    residual = 100 * np.abs((np.array(priced) - host_s) / steps.seconds.to_numpy() - 1)
    return Fit((), float(residual.mean()), float(residual.max()), len(steps))


def _knots(most):
    """Context tokens to tabulate at: 0, then closer where contexts are short."""
    return np.unique(np.concatenate([[0.0], np.geomspace(min(1024, most), most, 16).round()]))


def _line(values, points, heights):
    """Linear between the points; beyond the last with the slope before it, before the first constant."""
    values = np.asarray(values, float)
    inside = np.interp(values, points, heights)
    if len(points) < 2:
        return inside
    slope = max((heights[-1] - heights[-2]) / (points[-1] - points[-2]), 0.0)
    return inside + slope * np.maximum(values - points[-1], 0)


def _by_layer(frame, by):
    """One column a layer over every value of `by`; gaps are filled linearly."""
    table = frame.pivot_table(index=by, columns="layer", values="seconds").sort_index()
    return table.interpolate(method="index", limit_direction="both")


def _read(path, columns):
    import pandas as pd

    try:
        frame = pd.read_csv(path)
    except OSError as error:
        raise InputError(f"layer timings {str(path)!r}: {error.strerror}; a folder holds {', '.join(FILES)}") from None
    except (ValueError, UnicodeDecodeError) as error:  # pandas' parser errors are ValueErrors
        raise InputError(f"layer timings {str(path)!r} cannot be read as CSV ({str(error).strip()})") from None
    if missing := [name for name in columns if name not in frame]:
        raise InputError(f"layer timings {str(path)!r} lack {', '.join(missing)}; needed: {', '.join(columns)}")
    for name in columns:
        if name == "layer":
            continue
        values = pd.to_numeric(frame[name], errors="coerce").to_numpy(np.float64)
        bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)) | ((name == "time_us") & (values == 0)))
        if bad.size:
            raise InputError(
                f"layer timings {str(path)!r}: line {bad[0] + 2} has {name}={frame[name].iloc[bad[0]]!r}, no number "
                f"{'above 0' if name == 'time_us' else '>= 0'}"
            )
        frame[name] = values
    if frame.empty:
        raise InputError(f"layer timings {str(path)!r} hold no rows")
    return frame.assign(seconds=frame.time_us / 1e6).drop(columns="time_us")
