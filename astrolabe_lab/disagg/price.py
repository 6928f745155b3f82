"""What a request would cost on each (prefill, decode) pair, in seconds, from a router's ledger and its constants.

The second paper prints no equation; this is a reconstruction in which every term is seconds (the reference
`policies.md` states it). n, o: prompt and predicted tokens of the newcomer; N_p: prefills in flight at p; j: requests
in flight at d, m_j their tokens left; c their number; a + b n: a prefill; t(c) = tau_dec + slope c: a decode step that
the newcomer shares with c others; u: 3 for tight requests, 1 for loose; T, P: targets of a request's class.

    backlog = 0.35 a N_p + b sum n_j  +  slope sum min(m_j, o)      B_p + B_d
    own     = a + b n + hand-off(n) + o tau_dec
    cache   = (a + b n + o tau_dec) max(0, k - 0.8) / 0.2           k = (K_d + n + o) / capacity
    slo     = u [(TTFT - T)+ + o (TPOT - P)+] + sum u_j m_j [(t(c) - P_j)+ - (t(c - 1) - P_j)+]
    others  = slope sum min(m_j, o)                                 what its shared steps cost them
    with TTFT = B_p + a + b n + hand-off(n) + t(c) and TPOT = tau_dec + B_d / o

0.35: queued prefills share a step's fixed cost. K_d: polled, and the prompts on their way to d since.
"""

from __future__ import annotations

import numpy as np

from astrolabe_lab.disagg.compiled import compiled

SHARED_BASE = 0.35  # of a prefill's fixed cost, for one that waits behind others
LEAST_LEFT = 10.0  # tokens that a request in flight is taken to have left at least
TIGHT = 3.0  # how much a second over its target counts for a tight request
PRESSURE = 0.8  # share of the KV cache from which on it presses
TERMS = 5  # backlog, own, cache, slo, others
BELIEFS = 12  # numbers of Constants that ``beliefs`` packs


def beliefs(constants) -> np.ndarray:
    """The constants as the array that ``price`` takes."""
    c = constants
    return np.array(
        [
            c.prefill_base_s, c.prefill_per_token_s, c.decode_step_s, c.decode_slope_s, c.transfer_base_s,
            c.transfer_per_block_s, c.block_size, c.kv_capacity_tokens, c.ttft_s, c.tpot_s, c.loose_factor, 0.0,
        ]
    )  # fmt: skip


@compiled
def tokens_left(row, now_s, step_s, streamed, usual):
    """Tokens that a request in flight still has to stream: by what has come (``streamed``), or by the time since its
    first at ``step_s`` a token. ``usual`` > 0 stands for its predicted length."""
    expected = usual if usual > 0.0 else float(row.predicted_tokens)
    if np.isnan(row.first_token_s):
        return max(expected, LEAST_LEFT)
    done = float(row.streamed) if streamed else (now_s - row.first_token_s) / step_s
    return max(expected - done, LEAST_LEFT)


@compiled
def price(prefill, decode, flying, b, n, o, tight, now_s, weights, streamed, usual, out):
    """Write the weighted seconds of each pair to ``out`` (P, D), the TTFT expected there in s to ``out[P : 2P]``, and
    of each decode engine t(c) in s to ``out[2P]`` and the share of its KV cache that prompts take, the newcomer's too,
    to ``out[2P + 1]``. Returns the request's TTFT target.

    ``prefill``, ``decode``: POLLED arrays; ``flying``: IN_FLIGHT; ``b``: ``beliefs``; ``weights``: (TERMS,) of backlog,
    own, cache, slo, others; ``usual``: > 0 where lengths are unknown, then the tokens that everybody is taken to have.
    """
    base_s, per_token_s, step_s, slope_s = b[0], b[1], b[2], b[3]
    o = max(usual if usual > 0.0 else o, 1.0)
    hand_off_s = b[4] + b[5] * np.ceil(n / b[6])
    prefill_s = base_s + per_token_s * n
    own_s = prefill_s + hand_off_s + o * step_s
    factor = 1.0 if tight else b[10]
    urgency = TIGHT if tight else 1.0
    ttft_target_s, tpot_target_s = b[8] * factor, b[9] * factor
    n_p, n_d = prefill.size, decode.size
    queue_s = np.zeros(n_p)
    shared_s = np.zeros(n_d)
    streams = np.zeros(n_d)
    coming = np.zeros(n_d)
    for j in range(flying.size):
        row = flying[j]
        if np.isnan(row.prefilled_s):
            for p in range(n_p):
                if prefill[p].instance == row.prefill:
                    queue_s[p] += SHARED_BASE * base_s + per_token_s * row.prompt_tokens
        for d in range(n_d):
            if decode[d].instance == row.decode:
                streams[d] += 1.0
                shared_s[d] += slope_s * min(tokens_left(row, now_s, step_s, streamed, usual), o)
                if not row.prefilled_s <= decode[d].taken_s:
                    coming[d] += row.prompt_tokens
    harm_s = np.zeros(n_d)  # to residents' targets
    if weights[3] != 0.0:
        for j in range(flying.size):
            row = flying[j]
            for d in range(n_d):
                if decode[d].instance == row.decode:
                    target_s = b[9] * (1.0 if row.tight == 1 else b[10])
                    after_s = step_s + slope_s * streams[d]
                    over_s = max(after_s - target_s, 0.0) - max(after_s - slope_s - target_s, 0.0)
                    if over_s > 0.0:
                        left = tokens_left(row, now_s, step_s, streamed, usual)
                        harm_s[d] += (TIGHT if row.tight == 1 else 1.0) * left * over_s
    for p in range(n_p):
        for d in range(n_d):
            ttft_s = queue_s[p] + prefill_s + hand_off_s + step_s + slope_s * streams[d]
            tpot_s = step_s + shared_s[d] / o
            promised = decode[d].used_tokens + coming[d] + n
            filled = (promised + o) / b[7]
            cache_s = (prefill_s + o * step_s) * max(0.0, filled - PRESSURE) / (1.0 - PRESSURE)
            slo_s = urgency * (max(ttft_s - ttft_target_s, 0.0) + o * max(tpot_s - tpot_target_s, 0.0)) + harm_s[d]
            out[p, d] = (
                weights[0] * (queue_s[p] + shared_s[d])
                + weights[1] * own_s
                + weights[2] * cache_s
                + weights[3] * slo_s
                + weights[4] * shared_s[d]
            )
            out[n_p + p, d] = ttft_s
            out[2 * n_p, d] = step_s + slope_s * streams[d]
            out[2 * n_p + 1, d] = promised / b[7]
    return ttft_target_s
