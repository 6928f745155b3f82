"""The scores of the baselines, lower is better: one formula each, for the policy object and its compiled twin.

Each takes the signals of the healthy instances (a structured array, one element an instance; see
``astrolabe_lab.sim.signals``) and returns one number an instance.
"""

from __future__ import annotations

import numpy as np


def requests(signals):
    """Running plus waiting requests (JSQ)."""
    return signals["running"] + signals["waiting"]


def llumnix_minus_a(signals):
    """Minus Llumnix's dispatch load as the Astrolabe paper's comparator has it: free blocks, less those that all
    waiting prompts need, per running request."""
    return (signals["waiting_blocks"] - signals["free_blocks"]) / np.maximum(signals["running"], 1)


def llumnix_minus_b(signals, defrag):
    """Minus Llumnix v0's freeness: with defragmentation only the first waiting request counts; idle is -inf."""
    scores = np.empty(len(signals))
    for i in range(len(signals)):
        x = signals[i]
        if x["running"] + x["waiting"] == 0:
            scores[i] = -np.inf
        elif defrag:
            scores[i] = (x["first_waiting_blocks"] - x["free_blocks"]) / (x["running"] + (1 if x["waiting"] > 0 else 0))
        else:
            scores[i] = (x["waiting_blocks"] - x["free_blocks"]) / (x["running"] + x["waiting"])
    return scores
