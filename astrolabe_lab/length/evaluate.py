"""How good a length model is, said so that it cannot flatter: on prompts it has not seen, beside the constant.

Every split is by distinct prompt. Beside the model stands the constant median of the same training answers, and where
a serving model answered prompts twice, the noise floor. Intervals are of the paired difference over splits.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.length import copies, data, metrics
from astrolabe_lab.length.baselines import Constant, Noisy, Oracle
from astrolabe_lab.length.estimator import Estimator
from astrolabe_lab.length.kinds import make
from astrolabe_lab.length.split import Split, by_prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pandas as pd

LEVELS = (0.5, 0.9)
DECILES = 10


@dataclass(frozen=True)
class Evaluation:
    """``splits``: one row a split, ``mae`` and the rest beside ``constant_mae`` and the rest; ``predictions``: one row
    a split and test answer, with ``p50, p90, constant``; ``floor``: see ``metrics.noise_floor``, or what the
    frame's ``attrs["noise_floor"]`` knows (its ``mae`` at least)."""

    splits: pd.DataFrame
    predictions: pd.DataFrame
    floor: dict | None

    def summary(self) -> dict:
        """Means over the splits, and ``reduction``: by what share the MAE is below the constant's, with the 95 %
        interval ``reduction_low, reduction_high``.

        Splits share most of their training prompts, so the interval is Nadeau and Bengio's (2003), wider than one for
        independent runs; of a single split it is over its test prompts (``metrics.mean_over_prompts``).
        """
        table = self.splits
        means = {name: float(table[name].mean()) for name in table.columns if name not in ("split", "seed")}
        for name in (
            "n_train",
            "n_test",
            "n_pool",
            "n_copies_left_out",
            "n_prompts_train",
            "n_prompts_test",
            "n_censored_test",
            "n_unknown_model_test",
        ):
            means[name] = round(means[name])
        gain, low, high = self._gain()
        constant = means["constant_mae"]
        means |= {"splits": len(table)}
        shares = {"reduction": gain, "reduction_low": low, "reduction_high": high}
        means |= {name: value / constant if constant else math.nan for name, value in shares.items()}
        if self.floor:
            means |= {f"floor_{name}": value for name, value in self.floor.items()}
            gap = constant - self.floor["mae"]
            means["gap_closed"] = gain / gap if gap > 0 else math.nan
        return means

    def _gain(self):
        """Mean, low and high of constant_mae - mae."""
        from scipy.stats import t

        table = self.splits
        n = len(table)
        if n == 1:
            rows = self.predictions[~self.predictions["censored"]]
            true = rows["response_tokens"]
            gains = (rows["constant"] - true).abs() - (rows["p50"] - true).abs()
            return metrics.mean_over_prompts(gains, rows["prompt_uid"])
        gains = (table["constant_mae"] - table["mae"]).to_numpy()
        share = (table["n_prompts_test"] / table["n_prompts_train"]).mean()
        half = float(t.ppf(0.975, n - 1) * gains.std(ddof=1) * math.sqrt(1 / n + share))
        return float(gains.mean()), float(gains.mean()) - half, float(gains.mean()) + half

    def by(self, what: str) -> pd.DataFrame:
        """The test answers in groups: ``prompt_length`` (tenths by prompt length), ``length`` (tenths by true length,
        cut-off answers apart), ``source`` or ``model``. One row a group: ``n, mae, constant_mae, bias, mape,
        mean_tokens`` and the range that the group spans."""
        import pandas as pd

        from astrolabe_lab.tokens import count_tokens

        rows = self.predictions[~self.predictions["censored"]]
        if what == "prompt_length":
            sizes = rows["prompt"].map({text: count_tokens(text) for text in rows["prompt"].unique()})
            group = _tenths(sizes)
        elif what == "length":
            group = _tenths(rows["response_tokens"])
        elif what in ("source", "model"):
            group = rows[what]
        else:
            raise InputError(f"by={what!r} is unknown: allowed are prompt_length, length, source and model")
        true, off = rows["response_tokens"], rows["p50"] - rows["response_tokens"]
        table = pd.DataFrame(
            {
                what: group,
                "true": true,
                "off": off,
                "absolute": off.abs(),
                "relative": off.abs() / true,
                "constant": (rows["constant"] - true).abs(),
            }
        )
        grouped = table.groupby(what, observed=True, sort=True)
        return grouped.agg(
            n=("true", "size"),
            mae=("absolute", "mean"),
            constant_mae=("constant", "mean"),
            bias=("off", "mean"),
            mape=("relative", "mean"),
            mean_tokens=("true", "mean"),
        ).reset_index()


def evaluate(
    frame: pd.DataFrame,
    model: str | Estimator = "prompt_ridge",
    *,
    served_model: str | None = None,
    pool: bool | Sequence[str] = False,
    keep_copies: bool = False,
    splits: int = 1,
    test: float = 0.2,
    first_seed: int = 0,
    splits_dir: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Evaluation:
    """Fit and judge ``model`` on ``splits`` splits of the prompts in ``frame`` (see ``data.load``).

    model: a kind as ``kinds.make`` takes it, or an unfitted estimator, which is copied. served_model: judge on the
    answers of this one alone. pool: learn from the other models' answers too, all of them or those in the sources
        named, but none to a prompt for judging, nor (unless ``keep_copies``) to a near copy of one from another source.
    splits_dir: a folder in which each split is kept (``Split.save``), and from which one that is there is taken.

    Split i is ``split.by_prompt(seed=first_seed + i)`` of the prompts that ``served_model`` answered; a prompt for
    judging is in nobody's training answers. Answers by serving models without any in training are not judged, and
    counted (``n_unknown_model_test``). An oracle, and noise on one, is told the test answers: that is what it
    is for. Raises InputError for what is not there or too little.
    """
    import pandas as pd

    if isinstance(splits, bool) or not isinstance(splits, int) or splits < 1:
        raise InputError(f"splits={splits!r} must be an integer >= 1")
    asked = make(model) if isinstance(model, str) else model
    if pool and served_model is None:
        raise InputError("pool needs the served model that is to be judged: give served_model")
    judged = frame if served_model is None else data.of_model(frame, served_model)
    if pool:
        pooled = _pooled(frame, served_model, pool)
    rows, predicted = [], []
    for seed in range(first_seed, first_seed + splits):
        drawn = _drawn(judged, seed, test, splits_dir)
        testing = drawn.rows(judged, "test")
        train, held = judged[~testing], judged[testing]
        learn = frame[pooled & ~frame["prompt_uid"].isin(drawn.test)] if pool else train
        dropped = 0
        if pool and not keep_copies:
            copied = _copies(learn, held)
            learn, dropped = learn[~copied], int(copied.sum())
        candidate = copy.deepcopy(asked)
        row, told = _one(candidate, train, learn, held)
        candidate.drop_checkpoint()
        rows.append({"split": drawn.name, "seed": seed, "n_copies_left_out": dropped} | row)
        predicted.append(told.assign(split=drawn.name))
        if progress:
            progress(
                f"split {seed - first_seed + 1} of {splits} ({drawn.name}): MAE {row['mae']:.1f}, constant "
                f"{row['constant_mae']:.1f} tokens"
            )
    return Evaluation(pd.DataFrame(rows), pd.concat(predicted, ignore_index=True), _floor(frame, judged))


def _drawn(judged, seed, test, splits_dir) -> Split:
    """The split of that seed: the one kept in the folder, else a new one, which is then kept there."""
    if splits_dir is None:
        return by_prompt(judged, seed, test)
    kept = Path(splits_dir) / f"prompts-{seed}.json"
    if kept.exists():
        return Split.load(kept)
    kept.parent.mkdir(parents=True, exist_ok=True)
    drawn = by_prompt(judged, seed, test)
    drawn.save(kept)
    return drawn


def _floor(frame, judged):
    """The noise floor: what is known of data made here (``attrs``), else what repeated answers tell; None where equal
    ones may be missing among these, which would make it too high."""
    if not frame.attrs.get("repeats_told", True):
        return None
    return frame.attrs.get("noise_floor") or metrics.noise_floor(judged)


def _pooled(frame, served_model, pool):
    """Which rows may teach: those of the served model, and the others' in the sources asked for."""
    if pool is True:
        return frame["model"].notna()
    names = sorted(frame["source"].unique())
    unknown = [name for name in pool if name not in names]
    if unknown:
        raise InputError(f"pool: source {unknown[0]!r} is not in the data; its sources: {', '.join(names)}")
    return frame["source"].isin(list(pool)) | (frame["model"] == served_model)


def _copies(learn, held):
    """Which rows of ``learn`` answer a near copy, from another source, of a prompt in ``held``."""
    texts = learn.drop_duplicates("prompt_uid")
    found = set()
    for source, theirs in held.groupby("source"):
        elsewhere = texts[~texts["prompt_uid"].isin(learn.loc[learn["source"] == source, "prompt_uid"])]
        if len(elsewhere):
            like = copies.near(elsewhere["prompt"].tolist(), theirs["prompt"].tolist())
            found |= set(elsewhere["prompt_uid"][like > 0])
    return learn["prompt_uid"].isin(found).to_numpy()


def train(frame: pd.DataFrame, model: Estimator, *, seed: int = 0, test: float = 0.2) -> tuple[Estimator, Split]:
    """(the model fitted to the training prompts of split ``seed``, that split); ``metrics`` of the model holds what it
    does on the split's other prompts, as ``Evaluation.summary`` has it. A frame of several serving models teaches it
    to tell them apart."""
    import pandas as pd

    drawn = by_prompt(frame, seed, test)
    testing = drawn.rows(frame, "test")
    row, told = _one(model, frame[~testing], frame[~testing], frame[testing])
    row = {"split": drawn.name, "seed": seed, "n_copies_left_out": 0} | row
    judged = Evaluation(pd.DataFrame([row]), told, _floor(frame, frame))
    summary = {name: value for name, value in judged.summary().items() if value == value}  # JSON has no NaN
    model.metrics = {"split": drawn.name} | summary
    return model, drawn


def across_sources(frame: pd.DataFrame, model: str | Estimator, *, seed: int = 0, test: float = 0.2) -> pd.DataFrame:
    """Out of distribution: learn from one source, judge on another; one row a pair, also of a source with itself.

    All pairs use one split of the prompts, so that a prompt in two sources cannot leak. Columns: ``train_source,
    test_source, n_train, n_test, mae, concordance, constant_mae`` (the constants of the training source, one a serving
    model) and ``home_constant_mae`` (those that the test source's own training answers give). Judged on are answers
    by serving models that both sources have; a pair that shares none has no row.
    """
    import pandas as pd

    names = sorted(frame["source"].unique())
    if len(names) < 2:
        raise InputError(f"a test on another source needs two of them; this frame has {names}")
    asked = make(model) if isinstance(model, str) else model
    drawn = by_prompt(frame, seed, test)
    testing = drawn.rows(frame, "test")
    train = {name: frame[~testing & (frame["source"] == name)] for name in names}
    held = {name: frame[testing & (frame["source"] == name)] for name in names}
    short = [name for name in names if train[name].empty or held[name].empty]
    if short:
        raise InputError(f"source {short[0]!r} has too few prompts to be split; leave it out")
    rows = []
    for learned_on in names:
        fitted = _fit(copy.deepcopy(asked), train[learned_on])
        constant = _fit(Constant(), train[learned_on])
        for judged_on in names:
            answers = held[judged_on]
            home = _fit(Constant(), train[judged_on])
            known = answers[answers["model"].isin(train[learned_on]["model"])]
            known = known[known["model"].isin(train[judged_on]["model"])]
            if known.empty:
                continue
            told = errors_of(fitted, known)
            rows.append(
                {
                    "train_source": learned_on,
                    "test_source": judged_on,
                    "n_train": len(train[learned_on]),
                    "n_test": len(known),
                    "mae": told["mae"],
                    "concordance": told["concordance"],
                    "constant_mae": errors_of(constant, known)["mae"],
                    "home_constant_mae": errors_of(home, known)["mae"],
                }
            )
    return pd.DataFrame(rows)


def errors_of(fitted: Estimator, answers: pd.DataFrame) -> dict[str, float]:
    """``metrics.errors`` of a fitted model on a frame of answers that it has not seen."""
    told = fitted.predict(answers["prompt"].tolist(), _names(fitted, answers))
    return metrics.errors(answers["response_tokens"], told, answers["censored"])


def _one(asked, train, learn, held):
    """One split: its row, and the predictions for the test answers of serving models that ``train`` has."""
    import pandas as pd

    known = held["model"].isin(train["model"])
    if not known.any():
        raise InputError(
            "no answer to judge is by a serving model with answers to learn from: collect more, or take another seed"
        )
    held = held[known]
    told_truth = isinstance(asked, Oracle) or (isinstance(asked, Noisy) and isinstance(asked.model, Oracle))
    fitted = _fit(asked, pd.concat([learn, held]) if told_truth else learn)
    constant = _fit(Constant(), train)
    prompts, lengths, cut = (
        held["prompt"].tolist(),
        held["response_tokens"].to_numpy(),
        held["censored"].to_numpy(),
    )
    quantiles = fitted.predict_quantiles(prompts, LEVELS, _names(fitted, held))
    plain = constant.predict_quantiles(prompts, LEVELS, _names(constant, held))
    edges = metrics.bucket_edges(train["response_tokens"].to_numpy(), train["censored"].to_numpy())
    row = {
        "n_train": len(train),
        "n_test": len(held),
        "n_pool": len(learn) - len(train),
        "n_prompts_train": train["prompt_uid"].nunique(),
        "n_prompts_test": held["prompt_uid"].nunique(),
        "n_censored_test": int(cut.sum()),
        "n_unknown_model_test": int((~known).sum()),
    }
    for prefix, told in (("", quantiles), ("constant_", plain)):
        found = metrics.errors(lengths, told[:, 0], cut)
        found = {name: value for name, value in found.items() if name not in ("n", "censored")}
        found["bucket_accuracy"] = metrics.bucket_accuracy(lengths, told[:, 0], cut, edges)
        for i, level in enumerate(LEVELS):
            found[f"coverage_p{level * 100:.0f}"] = metrics.coverage(lengths, told[:, i], cut)
            found[f"pinball_p{level * 100:.0f}"] = metrics.pinball(lengths, told[:, i], cut, level)
        row |= {prefix + name: value for name, value in found.items()}
    told = held.assign(p50=quantiles[:, 0], p90=quantiles[:, 1], constant=plain[:, 0])
    return row, told


def _fit(estimator: Estimator, frame) -> Estimator:
    names = frame["model"].tolist()
    return estimator.fit(
        frame["prompt"].tolist(),
        frame["response_tokens"].to_numpy(),
        models=names if any(names) else None,
        censored=frame["censored"].to_numpy(),
    )


def _names(fitted, frame):
    return frame["model"].tolist() if fitted.models_ else None


def _tenths(values):
    """Tenths of equal share, as ordered intervals."""
    import pandas as pd

    return pd.qcut(values, DECILES, duplicates="drop")
