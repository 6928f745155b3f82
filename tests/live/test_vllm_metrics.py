"""Our measures beside those of vLLM's own load client, on the same requests."""

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab.measure import SLO, summarise

pytestmark = pytest.mark.vllm
PERCENTILES = [50, 90, 99]


def results(n=400, seed=0):
    """Requests with every kind of end; a third have one token."""
    rng = np.random.default_rng(seed)
    tokens = np.where(rng.random(n) < 1 / 3, 1, rng.integers(2, 40, n))
    arrived_s = np.sort(rng.uniform(0, 60, n))
    first_token_s = arrived_s + rng.lognormal(-1, 1, n)
    finished_s = first_token_s + (tokens - 1) * rng.lognormal(-4, 0.3, n)
    status = rng.choice(["ok", "failed", "aborted"], n, p=[0.9, 0.06, 0.04])
    return pd.DataFrame(
        {
            "arrived_s": arrived_s, "first_token_s": first_token_s, "finished_s": finished_s,
            "prompt_tokens": rng.integers(1, 200, n), "generated_tokens": tokens, "status": status, "preemptions": 0,
        }
    )  # fmt: skip


def theirs(frame, duration_s, goodput_ms):
    """What `vllm bench serve` would print of these requests."""
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
    from vllm.benchmarks.serve import calculate_metrics

    outputs = []
    for row in frame.itertuples():
        gaps = row.generated_tokens - 1
        gap_s = (row.finished_s - row.first_token_s) / gaps if gaps else 0.0
        outputs.append(
            RequestFuncOutput(
                success=row.status == "ok", latency=row.finished_s - row.arrived_s,
                ttft=row.first_token_s - row.arrived_s, itl=[gap_s] * gaps, output_tokens=row.generated_tokens,
                prompt_len=row.prompt_tokens, start_time=row.arrived_s,
            )
        )  # fmt: skip
    return calculate_metrics([], outputs, duration_s, None, PERCENTILES, goodput_ms)[0]


@pytest.fixture(scope="module")
def both():
    frame = results()
    slo = SLO(ttft_s=0.8, tpot_s=0.02, e2e_s=1.2)
    ours = summarise(frame, slo=slo).iloc[0]
    goodput_ms = {"ttft": 800.0, "tpot": 20.0, "e2el": 1200.0}
    return ours, theirs(frame, ours.duration_s, goodput_ms)


def test_latencies_and_their_percentiles_are_those_of_vllm(both):
    ours, vllm = both
    for name, its in (("ttft", "ttft"), ("tpot", "tpot"), ("e2e", "e2el")):
        assert 1e3 * ours[f"{name}_mean_s"] == pytest.approx(getattr(vllm, f"mean_{its}_ms"))
        for mark, value in getattr(vllm, f"percentiles_{its}_ms"):
            assert 1e3 * ours[f"{name}_p{mark}_s"] == pytest.approx(value), (name, mark)


def test_the_mean_gap_between_tokens_is_vllms(both):
    ours, vllm = both
    assert 1e3 * ours.itl_mean_s == pytest.approx(vllm.mean_itl_ms)
    assert vllm.mean_itl_ms != pytest.approx(vllm.mean_tpot_ms), "of all gaps, not of all requests"


def test_rates_and_counts_are_those_of_vllm(both):
    ours, vllm = both
    assert ours.ok == vllm.completed and ours.failed + ours.aborted == vllm.failed
    assert ours.throughput_rps == pytest.approx(vllm.request_throughput)
    assert ours.output_tokens_per_s == pytest.approx(vllm.output_throughput)
    assert ours.total_tokens_per_s == pytest.approx(vllm.total_token_throughput)


def test_goodput_is_vllms_also_for_requests_of_one_token(both):
    ours, vllm = both
    assert ours.goodput_rps == pytest.approx(vllm.request_goodput)
    assert 0.1 < ours.goodput_share < 0.9, "a test where all or none keep their targets would show nothing"
