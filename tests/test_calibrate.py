"""Calibration against simulated engines whose constants are known: they are found again, through noise, in budget."""

import json

import numpy as np
import pytest

from astrolabe_lab import InputError
from astrolabe_lab.calibrate import Calibration, Probe, SimulatedTarget, calibrate, figures, judge, load
from astrolabe_lab.calibrate.cells import Decode, Mixed, Rough, chunked
from astrolabe_lab.calibrate.live import read_tokens
from astrolabe_lab.calibrate.probe import Answer
from astrolabe_lab.calibrate.step_ends import step_ends
from astrolabe_lab.cost import StepCost, preset
from astrolabe_lab.disagg.constants import Constants
from astrolabe_lab.sim.config import EngineConfig

CONFIG = EngineConfig(max_num_seqs=16, max_num_batched_tokens=256, num_gpu_blocks=512, max_model_len=2048)
TRUTH = StepCost.parse(
    "decode.base_s=0.012,decode.per_seq_s=2e-4,decode.per_kv_token_s=5e-7,mixed.base_s=0.014,mixed.per_token_s=1e-4,"
    "mixed.per_seq_s=1e-4,mixed.per_kv_token_s=5e-7,mixed.attention_s=2e-8"
)
NAMES = [name for regime in ("decode", "mixed") for name in (f"{regime}.base_s", f"{regime}.per_seq_s",
         f"{regime}.per_kv_token_s")] + ["mixed.per_token_s", "mixed.attention_s"]  # fmt: skip


def true(name, cost=TRUTH):
    regime, _, key = name.partition(".")
    return getattr(getattr(cost, regime), key)


def quiet(line):
    pass


def grid_error(found, truth, config):
    """The largest relative error of a step's price over the whole grid of what the engine can schedule."""
    return judge.over_the_grid(found, truth, config).error_pct.abs().max() / 100


@pytest.fixture(scope="module")
def exact():
    return calibrate(SimulatedTarget(CONFIG, TRUTH), budget_s=60, rounds=2, progress=quiet)


@pytest.fixture(scope="module")
def noisy():
    target = SimulatedTarget(CONFIG, TRUTH, overhead_s=0.007, jitter_s=0.002, step_noise=0.02, seed=3)
    return calibrate(target, budget_s=150, rounds=4, seed=3, progress=quiet)


@pytest.mark.parametrize("name", NAMES)
def test_without_noise_every_constant_is_recovered(exact, name):
    assert true(name, exact.cost) == pytest.approx(true(name), rel=1e-6)
    low, high = exact.intervals[name]
    assert low <= true(name) <= high


@pytest.mark.parametrize("name", NAMES)
def test_through_noise_the_intervals_cover_the_truth(noisy, name):
    low, high = noisy.intervals[name]
    assert low <= true(name) <= high


def test_through_noise_steps_are_priced_within_five_percent_everywhere(noisy):
    assert grid_error(noisy.cost, TRUTH, CONFIG) < 0.05
    assert noisy.cost.decode.base_s == pytest.approx(TRUTH.decode.base_s, rel=0.05)
    assert noisy.bends == () and noisy.valid


def test_windows_that_the_fit_has_not_seen_are_priced_as_well_as_their_noise_allows(exact, noisy):
    for regime, each in noisy.residuals.items():
        assert each["unseen_windows"] == each["windows"], regime
        assert each["mean_abs_pct"] < each["unseen_mean_abs_pct"] < 3
        assert exact.residuals[regime]["unseen_mean_abs_pct"] < 1e-3


def test_one_round_of_a_table_tells_little_of_what_it_has_not_seen():
    bent = preset("llama2-7b-a30")
    config = EngineConfig.from_dict(bent.engine)
    one, more = (
        calibrate(SimulatedTarget(config, bent.cost, jitter_s=0.001, step_noise=0.01), rounds=n, progress=quiet)
        for n in (1, 3)
    )
    assert one.bends == more.bends == ("mixed",)
    first, later = one.residuals["mixed"], more.residuals["mixed"]
    assert first["unseen_windows"] < first["windows"] and later["unseen_windows"] == later["windows"]
    assert later["unseen_mean_abs_pct"] > later["mean_abs_pct"]


def test_what_a_router_prices_with_is_what_its_clients_see(noisy):
    constants = noisy.constants()
    context = noisy.reference_tokens
    assert noisy.decode_s == pytest.approx(TRUTH.step_seconds(1, 1, context), rel=0.02)
    slope = TRUTH.decode.per_seq_s + context * TRUTH.decode.per_kv_token_s
    assert constants.decode_slope_s == pytest.approx(slope, rel=0.03)
    assert 0.007 <= noisy.overhead_s <= 0.012  # the request's own way, and the mean jitter
    assert constants.tpot_s == pytest.approx(3 * noisy.decode_s)
    assert noisy.slo.of("loose") == (3 * noisy.slo.ttft_s, 3 * noisy.slo.tpot_s)
    assert constants.kv_capacity_tokens == CONFIG.num_gpu_blocks * CONFIG.block_size


def test_steps_that_bend_are_tabulated_and_straight_ones_are_not():
    bent = preset("llama2-7b-a30")
    config = EngineConfig.from_dict(bent.engine)
    target = SimulatedTarget(config, bent.cost, jitter_s=0.001, step_noise=0.01)
    found = calibrate(target, budget_s=250, rounds=3, progress=quiet)
    assert found.bends == ("mixed",)
    assert grid_error(found.cost, bent.cost, config) < 0.05
    assert found.cost.decode.base_s == pytest.approx(bent.cost.decode.base_s, rel=0.05)


def test_the_budget_is_kept_and_one_too_small_is_refused():
    target = SimulatedTarget(CONFIG, TRUTH)
    found = calibrate(target, budget_s=40, progress=quiet)
    assert found.seconds == pytest.approx(target.now_s(), abs=1e-2) and target.now_s() <= 40
    with pytest.raises(InputError, match="budget_s=3 is too little here: one round needs about"):
        calibrate(SimulatedTarget(CONFIG, TRUTH), budget_s=3, progress=quiet)


def test_transfers_between_pools_are_timed_block_by_block(tmp_path):
    prefill = SimulatedTarget(CONFIG, TRUTH, overhead_s=0.005, jitter_s=0.001)
    decode = SimulatedTarget(CONFIG, TRUTH, overhead_s=0.005, jitter_s=0.001, transfer=(0.02, 3e-4), seed=1)
    found = calibrate((prefill, decode), budget_s=120, rounds=2, progress=quiet)
    low, high = found.transfer.per_block_interval_s
    assert low <= 3e-4 <= high and found.transfer.per_block_s == pytest.approx(3e-4, rel=0.1)
    assert found.transfer.latency_s == pytest.approx(0.02, abs=0.003)
    assert found.constants().transfer_per_block_s == found.transfer.per_block_s
    rows = found.rows["transfers"]
    assert {row["blocks"] for row in rows} >= {1, 64}
    assert [row["seconds"] for row in rows] == pytest.approx([0.02 + 3e-4 * row["blocks"] for row in rows], abs=0.01)
    measured, line = figures.transfers(found).data
    assert len(measured.x) == len(rows) and line.y[0] == pytest.approx(1e3 * found.transfer.latency_s)
    assert "What it takes to hand a prompt over" in figures.write_figures(found, tmp_path / "c.html").read_text()
    assert prefill.now_s() + decode.now_s() <= 120


def test_the_file_comes_back_whole_and_a_changed_one_is_refused(exact, tmp_path):
    path = exact.save(tmp_path / "c.json")
    again = load(path)
    assert again == exact.from_dict(exact.to_dict())
    assert again.cost == exact.cost and again.constants() == exact.constants()
    raw = json.loads(path.read_text())
    raw["decode_s"] *= 2
    path.write_text(json.dumps(raw))
    with pytest.raises(InputError, match="was changed after it was measured"):
        load(path)
    assert load(path, edited=True).decode_s == 2 * exact.decode_s
    raw["version"] = 99
    path.write_text(json.dumps(raw))
    with pytest.raises(InputError, match="version 99"):
        load(path)
    path.write_text("{}")
    with pytest.raises(InputError, match="is no calibration"):
        load(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("engine", bad) for bad in ([1], {"max_num_seqs": -1}, {"zzz": 1})),
        *(("transfer", bad) for bad in (5, {"latency_s": "x", "per_block_s": 0.1}, {"latency_s": 0.1})),
        *(("slo", bad) for bad in (5, {"ttft_s": float("nan"), "tpot_s": 1.0}, {"zzz": 1})),
        *(("cost", bad) for bad in (5, {"zzz": 1})),
        *(("gates", bad) for bad in ([1], {"a": 1}, {"a": {}})),
        *(("decode_s", bad) for bad in ("x", None, float("inf"), True, 10**400)),
        *(("kv_blocks", bad) for bad in ("x", 2.5)),
        *((name, 5) for name in ("bends", "flags", "streamed", "model", "rows")),
    ],
)
def test_a_calibration_that_was_spoilt_by_hand_is_refused(exact, name, value):
    with pytest.raises(InputError):
        exact.from_dict(exact.to_dict() | {name: value}, edited=True)


def test_every_reader_of_a_calibration_takes_the_same_constants_from_it(exact, tmp_path):
    path = exact.save(tmp_path / "c.json")
    assert Constants.read(path) == exact.constants()
    raw = json.loads(path.read_text())
    raw["decode_s"] *= 2
    path.write_text(json.dumps(raw))
    assert Constants.read(path) == load(path, edited=True).constants()
    assert Constants.read(path).decode_step_s == 2 * exact.decode_s
    path.write_text(json.dumps(raw | {"version": 99}))
    with pytest.raises(InputError, match="version 99"):
        Constants.read(path)


def test_a_calibration_of_another_model_device_or_flag_is_refused_by_name(exact):
    exact.require(SimulatedTarget(CONFIG, TRUTH).describe())
    with pytest.raises(InputError, match="model 'simulated', here 'other'"):
        exact.require(model="other")
    with pytest.raises(InputError, match="device 'simulated [0-9a-f]+', here 'NVIDIA A40'"):
        exact.require(device="NVIDIA A40")
    with pytest.raises(InputError, match="max_num_seqs 16, here 32.*--constants-from"):
        exact.require(engine=EngineConfig(32, 256, num_gpu_blocks=512, max_model_len=2048))
    with pytest.raises(InputError, match="dtype None, here 'fp8'"):
        exact.require(flags={"dtype": "fp8"})


def test_a_preset_made_of_it_simulates(exact, tmp_path):
    made = preset(str(exact.save(tmp_path / "c.json")))
    assert made.cost == exact.cost and made.engine["num_gpu_blocks"] == 512
    assert EngineConfig.from_dict(made.engine) == CONFIG
    assert isinstance(exact, Calibration)


# the reading of bursts


def test_a_window_of_a_burst_counts_exactly_the_steps_that_ran():
    target = SimulatedTarget(CONFIG, TRUTH)
    rough = Rough(0.012, 2e-4, 0.014, 1e-4, CONFIG.max_num_batched_tokens)
    for cell in (Decode(5, 100), Mixed(3, 20, (7, 250, 600))):
        found = cell.read(target.burst(cell.probes(rough)), 0, rough.room)
        assert len(found) == len(getattr(cell, "sizes", (1,)))
        for window in found:
            steps = sum(
                s.times * TRUTH.step_seconds(s.new_tokens, s.sequences, s.context_tokens, s.attention, s.mixed)
                for s in window.steps
            )
            assert window.seconds == pytest.approx(steps, rel=1e-6)


def test_a_prompt_is_cut_as_the_engine_cuts_it():
    assert list(chunked(600, 253)) == [(0, 253), (253, 253), (506, 94)]


def test_tokens_are_counted_by_usage_though_several_come_at_once_or_in_pieces():
    def event(n):
        return b"data: " + json.dumps({"choices": [{"text": ""}], "usage": {"completion_tokens": n}}).encode() + b"\n\n"

    whole = event(0) + event(1) + event(3) + event(4) + b"data: [DONE]\n\n"
    cut = len(event(0) + event(1)) + 9
    times, tokens = read_tokens([(1.0, whole[:cut]), (2.0, whole[cut:])])
    assert tokens.tolist() == [1, 3, 4] and times.tolist() == [1.0, 2.0, 2.0]


def test_a_simulated_burst_is_the_engine_s_own_schedule():
    target = SimulatedTarget(CONFIG, TRUTH, overhead_s=0.003)
    short, long = target.burst([Probe(10, 4), Probe(300, 2, after_s=0.001)])
    first = 0.003 + TRUTH.step_seconds(10, 1, 0, 50, mixed=True)
    assert short.first_s == pytest.approx(first)
    assert short.tokens.tolist() == [1, 2, 3, 4] and long.tokens.tolist() == [1, 2]
    assert np.all(np.diff(short.times) > 0) and target.now_s() == max(short.last_s, long.last_s)


def test_streams_out_of_step_give_no_steps_and_late_tokens_do_not_move_their_ends():
    rng = np.random.default_rng(0)
    ends = np.cumsum(np.full(40, 0.02))
    streams = [
        Answer(Probe(10, 40 - late), 0.0, ends[late:] + rng.exponential(0.004, 40 - late), np.arange(1, 41 - late))
        for late in (0, 3, 5, 1, 2, 4)
    ]
    for answer in streams:
        answer.times = np.maximum.accumulate(answer.times)
    numbers, found, shifts = step_ends(streams, 0.15, 0.79)
    assert shifts.tolist() == [0, -3, -5, -1, -2, -4]
    assert np.abs(found - ends[numbers - 1]).max() < 0.004 and np.diff(found).min() >= 0
    apart = Answer(Probe(10, 40), 0.0, np.cumsum(rng.uniform(0.001, 0.05, 40)), np.arange(1, 41))
    assert len(step_ends([streams[0], apart], 0.1, 0.7)[0]) == 0


@pytest.mark.parametrize("seats", [2, 3, 6])
def test_engines_of_few_seats_are_priced_as_they_are(seats):
    config = EngineConfig(max_num_seqs=seats, max_num_batched_tokens=128, num_gpu_blocks=256, max_model_len=1024)
    found = calibrate(SimulatedTarget(config, TRUTH), budget_s=60, rounds=1, progress=quiet)
    table = judge.over_the_grid(found.cost, TRUTH, config)
    inside = table[~table.mixed | (table.sequences > 1)]  # alone with a prompt nobody can watch
    assert inside.error_pct.abs().max() < 1.5


def test_an_engine_of_one_seat_cannot_be_watched():
    with pytest.raises(InputError, match="a second seat"):
        calibrate(SimulatedTarget(EngineConfig(max_num_seqs=1), TRUTH), progress=quiet)
