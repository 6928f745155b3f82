"""The decode slope through a router: found as clients see it and priced with; no router is left over."""

import asyncio
import dataclasses
import json
import time
from contextlib import AsyncExitStack
from types import SimpleNamespace

import numpy as np
import pytest
from marks import by_the_clock, measures_time
from test_routing import own_routers
from timed_engine import TimedEngine

from astrolabe_lab import InputError
from astrolabe_lab.calibrate import Calibration, Described, SimulatedTarget, Streamed, calibrate, figures, streamed
from astrolabe_lab.calibrate.artifact import _digest
from astrolabe_lab.calibrate.cells import Rough
from astrolabe_lab.calibrate.conduct import _Clock, _gates
from astrolabe_lab.calibrate.live import LiveTarget, engines_at
from astrolabe_lab.cli.calibrate import describe
from astrolabe_lab.cost import StepCost
from astrolabe_lab.rng import stream
from astrolabe_lab.sim.config import EngineConfig

COST = StepCost.parse("base_s=0.02,per_seq_s=2e-3,per_kv_token_s=2e-6,mixed.per_token_s=2e-4")
FLAGS = "max_num_seqs=6,max_num_batched_tokens=96,num_gpu_blocks=512,max_model_len=1024"
CONFIG, ROUGH, REFERENCE = EngineConfig.parse(FLAGS), Rough(0.022, 0.002, 0.025, 2e-4, 96), 64
SEEN = Streamed(0.021, 3e-4, (0.02, 0.022), (2e-4, 4e-4), (1, 2, 4), 9, 0.0021)


def measured(prefill, decode, seconds=60.0, rounds=2):
    until = time.monotonic() + seconds
    left, rng = lambda: until - time.monotonic(), stream(0, "test")
    return streamed.measure_streamed(prefill, decode, COST, (ROUGH, ROUGH), REFERENCE, rounds, left, rng)


@pytest.fixture(scope="module")
def simulated():
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=256, num_gpu_blocks=512, max_model_len=2048)
    return calibrate(SimulatedTarget(config, COST), budget_s=60, rounds=1, progress=lambda line: None)


@measures_time
@pytest.mark.slow
@pytest.mark.parametrize("pools", [False, True])
def test_the_slope_through_a_real_router_process_is_the_engine_s_own(pools):
    async def story():
        async with AsyncExitStack() as serving:
            engines = [await serving.enter_async_context(TimedEngine(COST, 6, 96).serving()) for _ in range(1 + pools)]
            urls = [engine.url for engine in engines]
            found = await asyncio.to_thread(engines_at, urls[0], urls[1] if pools else None, None, FLAGS)
            prefill, decode = found if pools else (found, found)
            try:
                return await asyncio.to_thread(measured, prefill, decode), engines[-1].log
            finally:
                for target in {prefill, decode}:
                    await asyncio.to_thread(target.close)

    (seen, rows), log = asyncio.run(asyncio.wait_for(story(), 120))
    steps = [(n, took - COST.decode.per_kv_token_s * (kv - n * REFERENCE)) for m, _, n, kv, _, took in log if not m]
    medians = [np.median([took for n, took in steps if n == size]) for size in seen.streams]
    slope_s, base_s = np.polyfit(np.array(seen.streams) - 1, medians, 1)
    assert seen.streams == (1, 2, 4, 6) and seen.bursts == len(rows) == 8
    with by_the_clock():
        assert seen.slope_s == pytest.approx(slope_s, rel=0.25) and seen.base_s == pytest.approx(base_s, rel=0.1)
        assert seen.slope_interval_s[0] <= slope_s <= seen.slope_interval_s[1]
        assert [row["tpot_s"] for row in rows] == pytest.approx(
            [row["seconds"] / row["steps"] for row in rows], rel=0.1
        )
    assert own_routers() == []


def test_a_router_that_does_not_start_or_gets_no_answer_is_one_input_error_and_none_is_left(monkeypatch):
    monkeypatch.setenv("ASTROLABE_API_KEY", "theirs")  # which is nothing to a calibration's own router
    with LiveTarget("http://127.0.0.1:9", Described("m", "d", CONFIG, "hardware")) as target:
        with pytest.raises(InputError, match="answered HTTP 50[23]"):
            measured(target, target)
        monkeypatch.setattr(streamed, "POLICY", "nothing")
        with pytest.raises(InputError, match="calibration: the router did not start: .*'nothing'"):
            measured(target, target)
    assert own_routers() == []


def test_bursts_are_of_one_stream_to_all_seats_on_contexts_that_time_and_memory_allow():
    def cells(config, left_s):
        return streamed.cells_for(config, ROUGH, ROUGH, 256, left_s)

    plenty = cells(CONFIG, 1e9)
    assert [cell.batch for cell in plenty] == [1, 2, 4, 6] and {cell.prompt_tokens for cell in plenty} == {244}
    assert sum(cell.expected_s(ROUGH) for cell in cells(CONFIG, 8.0)) <= 8.0
    assert [cell.prompt_tokens for cell in cells(CONFIG, 0.0)] == [20] * 4
    small = cells(dataclasses.replace(CONFIG, num_gpu_blocks=60), 1e9)
    assert len(small) == 4 and small[0].prompt_tokens < 244
    first, *_, last = plenty[-1].probes(ROUGH)
    assert first.output_tokens > last.output_tokens == 28 and first.after_s == 0 < last.after_s


def test_a_router_of_pools_prices_with_what_its_clients_see(simulated):
    assert simulated.streamed is None and simulated.constants().decode_slope_s == simulated.decode_slope_s
    through = dataclasses.replace(simulated, streamed=SEEN)
    constants = through.constants()
    assert (constants.decode_step_s, constants.decode_slope_s) == (SEEN.base_s, SEEN.slope_s)
    wrong = through.with_constants(decode_slope_s=9e-4).constants()
    assert (wrong.decode_step_s, wrong.decode_slope_s) == (SEEN.base_s, 9e-4)
    again = Calibration.from_dict(through.to_dict())
    assert again.constants() == constants and again.streamed.slope_s == SEEN.slope_s


def test_files_from_before_it_was_measured_still_load(simulated):
    entries = json.loads(json.dumps(simulated.to_dict()))
    for name in ("sha256", "streamed"):
        del entries[name]
    old = Calibration.from_dict(entries | {"sha256": _digest(entries)})
    assert old.streamed is None and old.constants() == simulated.constants()


@pytest.mark.parametrize(("late_s", "ok"), [(0.0049, True), (0.006, False)])
def test_a_router_whose_event_loop_was_late_fails_the_gate(late_s, ok):
    engine = SimpleNamespace(loop_lag_s=0.001)
    seen = dataclasses.replace(SEEN, loop_lag_p99_s=late_s)
    gates = _gates(engine, engine, {"decode": {"worst_cell_pct": 1.0}}, seen)
    assert gates["proxy_loop_lag_p99_s"] == {"value": late_s, "bound": 0.005, "ok": ok}
    assert gates["loop_lag_p99_s"]["ok"] and gates["worst_cell"]["ok"]


def test_both_slopes_are_told(simulated):
    rows = [{"streams": n, "step_s": 0.02, "tpot_s": 0.02} for n in SEEN.streams]
    through = dataclasses.replace(simulated, streamed=SEEN, rows=simulated.rows | {"streamed": rows})
    said = describe(through, "C.json")
    assert f"{1e3 * simulated.decode_slope_s:.4f} ms each further one (contexts" in said
    assert "streamed 21.00 ms a step of one stream, 0.3000 ms each further one (0.2000 to 0.4000), through" in said
    shown = [{trace.name for trace in figures.decode_steps(each).data} for each in (simulated, through)]
    assert shown[1] - shown[0] == {"through a router", "its slope"}


def test_engines_that_run_share_the_wall_clock_and_what_comes_last_is_kept():
    class Other(SimpleNamespace):
        """A target of another kind."""

    now = [0.0]
    about = Described("m", "d", CONFIG, "emulated", time_scale=2.0)
    running = {"wall": True, "now_s": lambda: now[0], "describe": lambda: about}
    clock = _Clock([SimpleNamespace(**running), Other(**running)], 100.0)
    now[0] = 10.0
    clock.kept_s = 30.0
    assert clock.spent_s == 20.0 and clock.left_s(0.1) == 40.0
