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


def kv_cost(signals, prompt_tokens, cached_tokens, overlap_weight):
    """Dynamo's cost in KV blocks: those to compute (of an array ``cached_tokens`` are cached), and those in use."""
    compute = np.maximum(signals["prefill_tokens"] + prompt_tokens - cached_tokens, 0) / signals["block_size"]
    return overlap_weight * compute + (signals["total_blocks"] - signals["free_blocks"])


def weighted(signals, cached_share, queue, kv, prefix):
    """llm-d's weighted score (higher is better); ``cached_share``: an array of the prompt's cached shares."""
    waiting = signals["waiting"]
    span = waiting.max() - waiting.min()
    queues = (waiting.max() - waiting) / span if span > 0 else np.ones(len(waiting))
    used = (signals["total_blocks"] - signals["free_blocks"]) / signals["total_blocks"]
    return queue * queues + kv * (1.0 - used) + prefix * cached_share


def latency(signals, prompt_tokens, predicted_tokens):
    """AIBrix's expected latency in s, of the means that each engine publishes."""
    return (
        signals["queue_s"]
        + signals["prefill_s_per_token"] * prompt_tokens
        + signals["decode_s_per_token"] * predicted_tokens
    )
