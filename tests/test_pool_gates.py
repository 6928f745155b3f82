"""The gates before runs on pools, over scripted engines: sound pools pass, and each gate tells what spoils it."""

import asyncio

import pytest
from scripted_pools import scripted_pools

from astrolabe_lab.bench import gates as engine_gates
from astrolabe_lab.serve.pools.gates import check_pools

ASKED = ("idle", "warm_up", "prefix_reset", "pairs", "exact", "greedy")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(engine_gates, "IDLE_S", 0.2)
    monkeypatch.setattr("astrolabe_lab.serve.pools.gates.SETTLE_S", 0.2)


def verdicts(change, prefill=2, decode=2, **options):
    """{gate: (ok, detail)} of pools that ``change(prefill, decode)`` has spoilt."""

    async def story():
        async with scripted_pools(prefill, decode) as (p, d):
            change(p, d)
            found = await check_pools([e.url for e in p], [e.url for e in d], "m", **options)
            return {each.gate: (each.ok, each.detail) for each in found}, p, d

    return asyncio.run(asyncio.wait_for(story(), 60))


def test_sound_pools_pass_every_gate_and_every_pair_was_used():
    found, prefill, decode = verdicts(lambda p, d: None)
    assert tuple(found) == ASKED
    assert all(ok for ok, _ in found.values()), found
    assert not any(engine.held for engine in prefill)
    assert all(len(engine.pulled) >= 2 * 2 * 2 for engine in decode)
    assert "4 pairs" in found["pairs"][1]


def test_of_emulated_engines_it_is_said_that_equal_answers_tell_nothing_of_the_blocks():
    said = "this says nothing of what is in the blocks"
    assert verdicts(lambda p, d: None, 1, 1, emulated=True)[0]["greedy"][1].endswith(said)
    assert said not in verdicts(lambda p, d: None, 1, 1)[0]["greedy"][1]


def test_answers_that_depend_on_the_way_the_prompt_took_fail_the_greedy_gate():
    def spoil(prefill, decode):
        decode[1].script = "garble"

    found, *_ = verdicts(spoil)
    ok, detail = found["greedy"]
    assert not ok and "pair 0, 1 departs at token 9 from an engine that computed the prompt itself" in detail
    assert found["exact"][0]


def test_a_token_short_fails_the_exact_gate():
    def spoil(prefill, decode):
        decode[0].short = 1

    found, *_ = verdicts(spoil)
    assert found["exact"] == (False, "pair 0, 0 counts 40 and 15 (length), not 40 and 16")


def test_engines_that_keep_no_blocks_are_no_prefill_pool():
    def spoil(prefill, decode):
        prefill[0].script = "http:500"

    found, *_ = verdicts(spoil)
    assert not found["pairs"][0] and "prefill engine 0 answers HTTP 500" in found["pairs"][1]
