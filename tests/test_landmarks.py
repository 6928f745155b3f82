"""Likeness to known prompts: with all of them the kernel ridge itself, with some of them close to it."""

import numpy as np
import pytest

from astrolabe_lab.length import landmarks
from astrolabe_lab.length.head import Head, Ridge
from astrolabe_lab.length.landmarks import Landmarks
from astrolabe_lab.length.pooled import PooledHead

RNG = np.random.default_rng(0)


def unit(n, width=12):
    vectors = RNG.standard_normal((n, width)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def kernel(a, b):
    """The definition, in float64."""
    squared = ((a[:, None].astype(float) - b[None].astype(float)) ** 2).sum(axis=2)
    return landmarks.WEIGHT * np.exp(-squared / (2 * landmarks.WIDTH**2))


def test_a_ridge_on_all_landmarks_is_the_kernel_ridge_with_an_intercept():
    known, new, y, alpha = unit(60), unit(9), RNG.standard_normal(60), 0.7
    found = Landmarks.learn(known, None, 0)
    slope, intercept = Ridge(found.rows(known), np.arange(60)).solve(y, alpha)
    told = found.likeness(new) @ (found.whiten @ slope) + intercept
    # Both at once: (K + alpha I) a + b = y, and the a sum to 0.
    system = np.block([[kernel(known, known) + alpha * np.eye(60), np.ones((60, 1))], [np.ones((1, 60)), 0.0]])
    solved = np.linalg.solve(system, np.r_[y, 0.0])
    assert told == pytest.approx(kernel(new, known) @ solved[:60] + solved[60], abs=2e-3)


def test_products_of_rows_are_the_kernel_also_where_two_prompts_are_one_to_the_encoder():
    known = np.vstack([unit(40), unit(1).repeat(3, axis=0)])
    rows = Landmarks.learn(known, None, 0).rows(known)
    assert np.isfinite(rows).all()
    assert rows @ rows.T == pytest.approx(kernel(known, known), abs=2e-3)


def test_few_landmarks_come_close_where_prompts_are_alike():
    middles = unit(8)
    known = middles[RNG.integers(0, 8, 400)] + 0.05 * unit(400)
    known /= np.linalg.norm(known, axis=1, keepdims=True)
    rows = Landmarks.learn(known, 80, 0).rows(known)
    assert rows.shape == (400, 80)
    assert np.abs(rows @ rows.T - kernel(known, known)).max() < 0.05 * landmarks.WEIGHT


def test_all_prompts_are_landmarks_until_there_are_too_many(monkeypatch):
    monkeypatch.setattr(landmarks, "EXACT", 30)
    monkeypatch.setattr(landmarks, "OF_MORE", 10)
    many = unit(31)
    assert len(Landmarks.learn(many[:30], None, 0).points) == 30
    drawn = [Landmarks.learn(many, None, seed).points for seed in (0, 0, 1)]
    assert len(drawn[0]) == 10 and (drawn[0] == drawn[1]).all() and not (drawn[0] == drawn[2]).all()


def test_a_kept_model_reads_likeness_and_tells_what_it_told(tmp_path):
    known, new = unit(50), unit(7)
    found, groups = Landmarks.learn(known, None, 0), np.arange(50)
    lengths, none_cut = np.exp(4 + RNG.standard_normal(50)), np.zeros(50, dtype=bool)
    found.write(tmp_path)
    back = Landmarks.read(tmp_path)
    alone = Head.learn(found.rows(known), lengths, none_cut, groups)
    both = PooledHead.learn(found.rows(known), groups, groups % 2, lengths, none_cut)
    for head, more in ((alone, ()), (both, (np.array([0, 1, 0, 1, 0, 1, 0]),))):
        folded = head.through(lambda weights: found.whiten @ weights)
        told = folded.quantiles(back.likeness(new), *more, [0.5, 0.9])
        assert told == pytest.approx(head.quantiles(found.rows(new), *more, [0.5, 0.9]), rel=2e-3)
