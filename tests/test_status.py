"""The status: true to the engine, exact through JSON, and checked before compiled code runs on it."""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from workloads import CACHING, CONSTANT, KINDS, Engine, frame, random_workload

from astrolabe_lab.errors import InputError
from astrolabe_lab.predictor import Predictor, empty_status
from astrolabe_lab.request import Request
from astrolabe_lab.sim.engine import EngineConfig, run_one
from astrolabe_lab.sim.state import RUNNING, new_engines
from astrolabe_lab.sim.status import Status, write_status
from astrolabe_lab.sim.status_check import REASONS, SOUND, check_status, find_flaw

WORKLOADS = 40


def statuses(seed, kind, n=12):
    """(config, cost, status) at n random instants of a random workload."""
    trace, config, cost = random_workload(seed, kind)
    results, _ = run_one(trace, config, cost, log=False)
    engine = Engine(trace, config, cost, predicted=trace["output_tokens"])
    engine.deliver_until(np.inf)
    for now_s in np.sort(np.random.default_rng(seed).uniform(0, results["finished_s"].max(), n)):
        engine.advance(now_s)
        yield config, cost, engine.status(now_s)


def template_of(config, cost=CONSTANT):
    return new_engines([config], [cost])[0]


@pytest.mark.parametrize("kind", (*KINDS, *CACHING))
def test_every_status_of_an_engine_passes_the_check_and_survives_json_exactly(kind):
    for seed in range(WORKLOADS):
        for config, cost, status in statuses(5000 + seed, kind):
            template = template_of(config, cost)
            assert find_flaw(template, status.header, status.rows)[0] == SOUND, (seed, status.to_json())
            again = Status.from_json(status.to_json())
            assert again.rows.tobytes() == status.rows.tobytes()
            assert again.header.tolist()[0][2:] == status.header.tolist()[0][2:]
            for name in ("taken_s", "step_started_s"):
                assert np.array_equal(again.header[name], status.header[name], equal_nan=True)
            assert again.to_json() == status.to_json()


def test_a_status_shows_nothing_of_the_step_in_flight_but_what_is_scheduled():
    engine = Engine(frame([0.0, 0.2, 0.4], [20, 6, 5], [3, 4, 9]), EngineConfig(2, 16), CONSTANT, predicted=[9, 9, 9])
    engine.deliver_until(np.inf)
    engine.advance(0.5)
    status = engine.status(0.5)
    names = ["rid", "prompt", "computed", "generated", "scheduled_now", "emits", "predicted", "blocks"]
    assert (status.taken_s, status.running, status.waiting) == (0.5, 1, 2)
    assert status.rows[names].tolist() == [
        (0, 20, 0, 0, 16, 0, 9, 1),
        (1, 6, 0, 0, 0, 0, 9, 0),
        (2, 5, 0, 0, 0, 0, 9, 0),
    ]
    engine.advance(2.5)
    status = engine.status(2.5)  # in flight since 2: a decode of the first and of the second, whose prompts are done
    assert status.rows[names].tolist() == [
        (0, 20, 20, 1, 1, 1, 9, 2),
        (1, 6, 6, 1, 1, 1, 9, 1),
        (2, 5, 0, 0, 0, 0, 9, 0),
    ]
    assert status.header["step_started_s"][0] == 2.0


def test_an_arrival_at_the_very_instant_is_in_the_status_and_a_later_one_is_not():
    engine = Engine(frame([0.0, 1.0, 1.5], 4, 4), EngineConfig(), CONSTANT)
    engine.deliver_until(np.inf)
    engine.advance(1.0)
    assert engine.status(1.0).rows["rid"].tolist() == [0, 1]


def test_rows_too_few_for_a_status_are_told_and_not_written_past():
    engine = Engine(frame(np.zeros(5), 4, 4), EngineConfig(), CONSTANT)
    engine.deliver_until(np.inf)
    engine.advance(0.5)
    status = engine.status(0.5)
    rows = np.zeros(8, status.rows.dtype)
    rows["prompt"] = -7
    assert not write_status(*engine.state, 0, 0.5, status.header, rows[:4])
    assert status.header["n_rows"][0] == 5
    assert (rows["prompt"][4:] == -7).all()


def sound(kind="v1"):
    """(config, status) with two running requests in mid-step, one of them asynchronous ahead, and a waiting one."""
    config = EngineConfig(4, 16, 4, 40, 64, async_scheduling=kind == "v1_async")
    engine = Engine(frame(np.zeros(6), [20, 6, 5, 7, 3, 9], 20), config, CONSTANT, predicted=np.full(6, 20))
    engine.deliver_until(np.inf)
    engine.advance(5.5)
    status = engine.status(5.5)
    assert (status.running, status.waiting) == (4, 2) and status.rows["scheduled_now"].all(
        where=status.rows["state"] == RUNNING
    )
    return config, status


def change(**fields):
    """A mutation that sets fields of the header, or of row j where the name is rowj_field."""

    def apply(status):
        for name, value in fields.items():
            if name.startswith("row"):
                j, _, field = name[3:].partition("_")
                status.rows[field][int(j)] = value
            else:
                status.header[name] = value

    return apply


@pytest.mark.parametrize(
    ("kind", "damage", "reason"),
    [
        ("v1", change(taken_s=math.nan), "finite"),
        ("v1", change(taken_s=math.inf), "finite"),
        ("v1", change(step_started_s=-math.inf), "finite"),
        ("v1", change(step_started_s=6.0), "no step starts after"),
        ("v1", change(step_started_s=math.nan), "step_started_s is given when"),
        ("v1", change(n_rows=7), "not those of the rows"),
        ("v1", change(n_rows=-1), "not those of the rows"),
        ("v1", change(n_running=7), "not those of the rows"),
        ("v1", change(n_running=3), "must come before"),
        ("v1", change(row0_state=7), r"request 0 \(row 0\).*must come before"),
        ("v1", change(row5_state=RUNNING), "must come before"),
        ("v1", change(n_running=5, row4_state=RUNNING), "max_num_seqs=4"),
        ("v1", change(free_blocks=-1), "39 in all"),
        ("v1", change(free_blocks=2**62), "39 in all"),
        ("v1", change(free_blocks=3), "39 in all"),
        ("v1", change(row1_blocks=2**31 - 1), "39 in all"),
        ("v1", change(stalled=1), "stalled is for asynchronous"),
        ("v1_async", change(stalled=2), "stalled is for asynchronous"),
        (
            "v1_async",
            change(stalled=1),
            "stalled is for asynchronous",
        ),  # a step is queued behind the one in flight
        ("v1", change(row2_generated=-1), r"request 2 .*negative"),
        ("v1", change(row2_preemptions=-1), "negative"),
        ("v1", change(row4_prompt=0), "1 token at least"),
        ("v1", change(row4_prompt=64), "max_model_len=64"),
        ("v1", change(row4_prompt=2**31 - 1), "max_model_len=64"),
        ("v1", change(row4_generated=2**31 - 1), "max_model_len=64"),
        ("v1", change(row1_emits=0), "emits must say"),
        ("v1", change(row1_emits=3), "emits must say"),
        ("v1", change(row1_emits=-1), "emits must say"),
        ("v1", change(row4_emits=1), "emits must say"),
        ("v1", change(row1_scheduled_now=2, row1_emits=0), "more than the request has"),
        ("v1", change(row1_scheduled_next=1, row1_emits=3), "takes asynchronous"),
        ("v1", change(row4_scheduled_now=1), "takes asynchronous"),
        ("v1_async", change(row4_scheduled_now=1), "takes asynchronous"),  # it was never preempted
        ("v1_async", change(row4_scheduled_next=1), "takes asynchronous"),
        ("v1", change(row1_scheduled_now=0, row1_computed=0, row1_emits=0), "a running request has tokens"),
        ("v1", change(row1_scheduled_now=0, row1_emits=0, row1_computed=10), "a running request has tokens"),
        ("v1", change(row1_blocks=0), "blocks must hold"),
        ("v1", change(row4_blocks=1), "holds no blocks"),
        ("v1", change(row4_computed=1), "no computed tokens"),
    ],
)
def test_a_status_that_no_such_engine_can_have_is_one_error_naming_what_is_wrong(kind, damage, reason):
    config, status = sound(kind)
    damage(status)
    with pytest.raises(InputError, match=rf"^status: .*{reason}"):
        Predictor(config, CONSTANT).predict(status, Request(9, 6.0, 4, 4))


def test_a_status_of_another_engine_is_refused():
    _, status = sound()
    for other, reason in (
        (EngineConfig(2, 16, 4, 40, 64), "max_num_seqs=2"),
        (EngineConfig(4, 16, 4, 41, 64), "40 in all"),
        (EngineConfig(4, 16, 2, 40, 64), "blocks must hold"),
        (EngineConfig(4, 16, 4, 40, 24), "max_model_len=24"),
        (EngineConfig(4, 16, 4, 40, 64, scheduler="v0_chunked"), "40 in all"),
    ):
        with pytest.raises(InputError, match=reason):
            Predictor(other, CONSTANT).predict(status, Request(9, 6.0, 4, 4))


def test_a_prompt_longer_than_one_request_can_hold_is_refused():
    config = EngineConfig(4, 16, 4, 12, 64)
    status = empty_status(0.0, config)
    status.rows = np.zeros(1, sound()[1].rows.dtype)
    status.rows["state"], status.rows["prompt"], status.header["n_rows"] = sound()[1].rows["state"][-1], 45, 1
    with pytest.raises(InputError, match="more than the 11 blocks"):
        check_status(status, template_of(config))


def test_every_reason_fills_its_blanks_from_the_engine():
    template = template_of(EngineConfig())
    names = dict.fromkeys(template.dtype.names, 1)
    for reason in REASONS.values():
        assert "{" not in reason.format(**names)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "null", "3", "[]", '"status"', "{}", '{"version": 2}', '{"version": true}', '{"version": null}',
        '{"version": [1]}', "[" * 100_000, "\x00", '{"version": 1, "version": 3}', "1" * 5000, "NaN",
    ],
)  # fmt: skip
def test_text_that_is_no_status_is_one_error(text):
    with pytest.raises(InputError, match=r"^status: [^\n]+$"):
        Status.from_json(text)


def test_a_missing_and_an_unknown_field_are_named():
    raw = json.loads(sound()[1].to_json())
    for name in raw:
        with pytest.raises(InputError, match="version" if name == "version" else f"missing {name}"):
            Status.from_json(json.dumps({k: v for k, v in raw.items() if k != name}))
    with pytest.raises(InputError, match="unknown free_block;"):
        Status.from_json(json.dumps(raw | {"free_block": 3}))
    for name in raw["requests"][0]:
        without = [{k: v for k, v in raw["requests"][0].items() if k != name}, *raw["requests"][1:]]
        with pytest.raises(InputError, match=f"request 0: missing {name};"):
            Status.from_json(json.dumps(raw | {"requests": without}))


STRANGE = [
    None, True, False, "", "3", "running", "waiting", [], {}, [1], -1, 0, 1, 2, 3, 7, 16, 17, 64, 0.5, 3.0,
    1e308, -1e308,
    2**31 - 1, 2**31, 2**32 + 1, 2**63 - 1, 2**63, 10**400, -(2**31), math.nan, math.inf, -math.inf, "NaN", "é\x00",
]  # fmt: skip


def mutate(raw, rng):
    """``raw`` with one to three things wrong, or only odd."""
    raw = json.loads(json.dumps(raw))
    for _ in range(rng.randint(1, 3)):
        rows = raw.get("requests")
        rows = [row for row in rows if isinstance(row, dict) and row] if isinstance(rows, list) else []
        kind = rng.randrange(8)
        if not rows or kind == 0:
            raw[rng.choice(sorted(raw))] = rng.choice(STRANGE)
        elif kind == 1:
            rng.shuffle(raw["requests"])
        elif kind == 2:
            raw["requests"].append(json.loads(json.dumps(rng.choice(rows))))
        elif kind == 3:
            raw["requests"].remove(rng.choice(rows))
        elif kind == 4:
            row = rng.choice(rows)
            row["state"] = "waiting" if row.get("state") == "running" else "running"
        elif kind == 5:
            rng.choice(rows).pop(rng.choice(sorted(rows[0])), None)
        else:
            row = rng.choice(rows)
            name = rng.choice(sorted(row))
            row[name] = (
                rng.choice(STRANGE) if kind == 6 or not isinstance(row[name], int) else row[name] + rng.choice([-1, 1])
            )
    return raw


def predict_from_damaged_statuses(kind):
    """(answered, refused): how many mutations of real statuses were sound after all, and how many were refused."""
    rng = random.Random(KINDS.index(kind))
    answered = refused = 0
    for seed in range(8):
        for config, cost, status in statuses(6000 + seed, kind, n=5):
            raw = json.loads(status.to_json())
            predictor = Predictor(config, cost)
            for _ in range(60):
                damaged = mutate(raw, rng)
                try:
                    sound = Status.from_json(json.dumps(damaged))
                    metric = rng.choice([None, "ttft_s", "added_delay_s"])
                    answer = predictor.predict(sound, Request(0, 0.0, 3, 2), metric)
                except InputError as error:
                    assert str(error).startswith("status: ") and "\n" not in str(error)
                    refused += 1
                else:
                    assert answer.fits and math.isfinite(answer.ttft_s), damaged
                    answered += 1
    return answered, refused


def test_a_damaged_status_is_an_error_or_an_answer_and_never_a_hang_or_a_crash():
    # In a process of its own: compiled code that hangs or crashes would take this one with it.
    script = "import json, test_status as t; print(json.dumps([t.predict_from_damaged_statuses(k) for k in t.KINDS]))"
    command = [sys.executable, "-X", "faulthandler", "-c", script]
    tests = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tests, tests.parent)))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    for answered, refused in json.loads(done.stdout):
        assert refused > 1000 and answered > 50
