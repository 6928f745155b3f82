"""When steps ended, from streams that decoded together: each step brings every stream a token, some of them sooner."""

from __future__ import annotations

import numpy as np

from astrolabe_lab.calibrate.probe import Answer

AGREE = 0.6  # of a stream's tokens that must match the same step of the first stream


def step_ends(answers: list[Answer], begin: float, over: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(steps, ends, shifts): consecutive step numbers (n,), when their first token arrived (n,), and how many tokens
    more than the step's number each stream then had (streams,).

    Of the time from ``begin`` to ``over``, in which all streams decode. What delays a token on its way delays each
    stream by itself, so the earliest is closest to the step's end. Empty where the streams are not in step.
    """
    of_token = [_arrivals(answer) for answer in answers]
    first = of_token[0]
    numbers = np.flatnonzero((first >= begin) & (first <= over))
    nothing = np.empty(0, int), np.empty(0), np.empty(0, int)
    if len(numbers) < 3:
        return nothing
    shifts, shared = [0], np.full(len(first), np.inf)
    shared[numbers] = first[numbers]
    for times in of_token[1:]:
        here = np.flatnonzero((times >= begin) & (times <= over))
        if len(here) < 3:
            return nothing
        apart = here - numbers[_nearest(first[numbers], times[here])]
        values, counts = np.unique(apart, return_counts=True)
        if counts.max() < AGREE * len(here):
            return nothing
        shift = int(values[counts.argmax()])
        shifts.append(shift)
        known = numbers[(numbers + shift >= 0) & (numbers + shift < len(times))]
        shared[known] = np.fmin(shared[known], times[known + shift])
    ends = np.maximum.accumulate(shared[numbers])
    return numbers, ends, np.array(shifts)


def _arrivals(answer: Answer) -> np.ndarray:
    """When each token was there, by its number; number 0 is none."""
    total = int(answer.tokens[-1]) if len(answer.tokens) else 0
    at = np.searchsorted(answer.tokens, np.arange(1, total + 1))
    return np.concatenate([[np.nan], answer.times[at]]) if total else np.array([np.nan])


def _nearest(sorted_times: np.ndarray, times: np.ndarray) -> np.ndarray:
    """For each time the place of the closest of the sorted ones."""
    right = np.clip(np.searchsorted(sorted_times, times), 1, len(sorted_times) - 1)
    left = right - 1
    return np.where(times - sorted_times[left] <= sorted_times[right] - times, left, right)
