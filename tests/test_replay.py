"""A journal decided again: as it was by the policy that made it, and with a regret for every other."""

import asyncio
import json
import math
import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
import pytest
from published_engines import publish
from scripted_engine import scripted_engines
from test_router import MODEL, ask, routed

from astrolabe_lab import policies
from astrolabe_lab.cli import main
from astrolabe_lab.cost import preset
from astrolabe_lab.errors import InputError
from astrolabe_lab.foresight import Foresight
from astrolabe_lab.predictor import Predictor
from astrolabe_lab.serve import journal
from astrolabe_lab.serve.replay import replay, summary
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.status.published import StatusReader, StatusWriter
from astrolabe_lab.status.status_line import unpack

PRESET = preset("llama2-7b-a30")
CONFIG = EngineConfig.from_dict(PRESET.engine)
N = 40


def record(path, policy, n=N, engines=4, seed=0, **options):
    """A journal of n requests that this policy dispatched to scripted engines with Predictors; the order of ends is
    left to chance."""
    kind = getattr(policies.parse(policy), "foresight", "none")
    foresight = Foresight(kind, engines) if kind != "none" else None
    dice = random.Random(1)

    async def story():
        async with (
            scripted_engines(engines, token_s=0.004) as served,
            routed(
                served,
                path,
                policy,
                config=CONFIG,
                predictors=lambda: Predictor(CONFIG, PRESET.cost, foresight=foresight),
                seed=seed,
                foresight=foresight,
                **options,
            ) as (router, session, url),
        ):
            router.warm_up()

            async def one():
                await asyncio.sleep(dice.random() * 0.5)
                words = "w " * dice.randrange(10, 2000)
                tokens = dice.randrange(4, 40)
                headers = {"X-Predicted-Tokens": str(dice.randrange(1, 400))}
                body = {"model": MODEL, "prompt": words, "max_tokens": tokens, "stream": True}
                async with session.post(url + "/v1/completions", json=body, headers=headers) as answer:
                    assert answer.status == 200
                    await answer.read()

            await asyncio.gather(*(one() for _ in range(n)))

    asyncio.run(asyncio.wait_for(story(), 60))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("journal") / "j"
    record(path, "astrolabe:k=2")
    return path


@pytest.mark.parametrize("policy", ["random", "round_robin", "po2_requests", "kv_cost", "astrolabe:k=3,foresight=both"])
def test_a_journal_s_own_policy_decides_as_it_did(tmp_path, policy):
    record(tmp_path / "j", policy, n=30)
    again = replay(tmp_path / "j", policy)
    assert len(again) == 30
    assert (again["instance"] == again["recorded_instance"]).all()
    assert again["regret_s"].tolist() == again["recorded_regret_s"].tolist()


def test_predictions_made_again_are_those_that_were_made(recorded):
    again = replay(recorded, "astrolabe:k=2")
    assert (again["instance"] == again["recorded_instance"]).all()
    made = {e["rid"]: e["predicted_e2e_s"] for e in journal.read(recorded) if e["event"] == "decision"}
    for row in again.itertuples():
        assert row.predicted_e2e_s == made[row.rid][str(row.instance)]


def test_full_fan_out_has_no_regret_and_no_policy_has_less(recorded):
    fan_out = replay(recorded, "astrolabe:k=all")
    assert (fan_out["regret_s"] == 0.0).all()
    for policy in ("random", "least_loaded", "astrolabe:k=2", "min_tokens"):
        frame = replay(recorded, policy, seed=3)
        assert (frame["regret_s"] >= 0.0).all()
        assert frame["recorded_regret_s"].tolist() == fan_out["recorded_regret_s"].tolist()
        assert np.allclose(frame["predicted_e2e_s"] - frame["regret_s"], frame["best_e2e_s"])
    blind = replay(recorded, "random", seed=3)["regret_s"].mean()
    assert blind > replay(recorded, "astrolabe:k=3", seed=3)["regret_s"].mean()


def test_what_was_measured_is_told_only_where_the_policy_did_the_same(recorded):
    frame = replay(recorded, "random", seed=5)
    same = frame["instance"] == frame["recorded_instance"]
    assert 0 < same.sum() < len(frame)
    assert frame["measured_e2e_s"].notna().tolist() == same.tolist()
    assert frame["measured_regret_s"].isna().all()  # nobody knows how the others would have fared
    ended = {e["rid"]: e["e2e_s"] for e in journal.read(recorded) if e["event"] == "outcome"}
    for row in frame[same].itertuples():
        assert row.measured_e2e_s == ended[row.rid]


def test_probes_of_all_candidates_make_the_regret_a_measured_one(recorded, tmp_path):
    lines = []
    for entry in journal.read(recorded):
        lines.append(journal.line_of(entry))
        if entry["event"] == "outcome":
            others = [i for i in range(4) if i != entry["instance"]]
            for j, i in enumerate(others):
                probe = {"event": "probe", "rid": entry["rid"], "instance": i, "e2e_s": entry["e2e_s"] + j - 1}
                lines.append(journal.line_of(probe))
    (tmp_path / "probed").write_bytes(b"".join(lines))
    frame = replay(tmp_path / "probed", "astrolabe:k=2")
    assert np.allclose(frame["measured_regret_s"], 1.0)  # the first of the others was a second faster
    assert summary(frame)["measured_regret_mean_s"] == pytest.approx(1.0)


def test_a_replay_is_the_same_every_time_and_wherever_it_is_ended(recorded, tmp_path):
    for policy in ("astrolabe:k=2", "round_robin", "astrolabe:k=2,foresight=both"):
        whole = replay(recorded, policy, seed=9)
        kept = tmp_path / f"kept-{policy}"

        def stop(done, at=17):
            if done == at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            replay(recorded, policy, seed=9, kept_in=kept, progress=stop)
        assert len(kept.read_text().splitlines()) == 18  # and who it is of
        kept.write_text(kept.read_text() + '{"rid": 5, "att')  # killed while it wrote
        went_on = []
        again = replay(recorded, policy, seed=9, kept_in=kept, goes_on=went_on.append)
        pd.testing.assert_frame_equal(again, whole)
        assert went_on == [17]
        assert not kept.exists()


def test_two_replays_do_not_share_their_kept_rows(recorded, tmp_path):
    kept, refused = tmp_path / "kept", []

    def meanwhile(done):
        if done == 3:
            with ThreadPoolExecutor(1) as other, pytest.raises(InputError, match="kept is in use by another run"):
                refused.append(other.submit(replay, recorded, "random", kept_in=kept).result())
            refused.append(True)

    replay(recorded, "random", kept_in=kept, progress=meanwhile)
    assert refused == [True] and not [*tmp_path.glob("*kept*")]


def test_rows_kept_of_another_replay_are_not_taken(recorded, tmp_path):
    kept = tmp_path / "kept"

    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(recorded, "random", seed=1, kept_in=kept, progress=stop)
    went_on = []
    again = replay(recorded, "random", seed=2, kept_in=kept, goes_on=went_on.append)
    pd.testing.assert_frame_equal(again, replay(recorded, "random", seed=2))
    assert not went_on


def test_a_torn_last_line_is_left_out_and_said_and_a_damaged_one_is_an_error(recorded, tmp_path, capsys):
    torn = tmp_path / "torn"
    lines = recorded.read_bytes().splitlines(keepends=True)
    last = max(j for j, line in enumerate(lines) if b'"event":"decision"' in line)
    torn.write_bytes(b"".join(lines[:last]) + lines[last][:60])
    frame = replay(torn, "random")
    assert len(frame) == N - 1
    assert frame.attrs["torn_line"] == last + 1
    assert main(["replay", str(torn), "--policy", "random"]) == 0
    assert f"line {last + 1} is torn" in capsys.readouterr().out
    torn.write_bytes(b"".join(lines[:last]) + lines[last][:60] + b"\n")
    with pytest.raises(InputError, match=f"line {last + 1}: not JSON"):
        replay(torn, "random")


def test_a_published_status_survives_the_journal_exactly(tmp_path):
    path, running = tmp_path / "status", [(1 << 60, 100, 5, 200), (2, 40, 9, 60)]
    publish(StatusWriter(path), 12.345678901234567, running)
    status = StatusReader(path).read()
    line = json.loads(journal.line_of({"statuses": [journal.Packed(status, None)]}))
    again = unpack(line["statuses"][0])
    assert again.rows.tolist() == status.rows.tolist()
    assert again.header.tobytes() == status.header.tobytes()
    with pytest.raises(InputError, match="not one that a journal holds"):
        unpack({"taken_s": 1.0})


def test_engines_that_publish_are_replayed_as_well_as_those_that_do_not(tmp_path):
    statuses = [tmp_path / f"status-{i}" for i in range(3)]
    for i, path in enumerate(statuses[:2]):  # the third one's is missing
        publish(StatusWriter(path), time.monotonic(), [(j, 300, 9, 100) for j in range(3 + 5 * i)])
    record(tmp_path / "j", "astrolabe:k=2", n=12, engines=3, statuses=statuses)
    again = replay(tmp_path / "j", "astrolabe:k=2")
    sources = {tuple(e["status_from"]) for e in journal.read(tmp_path / "j") if e["event"] == "decision"}
    assert ("published", "published", "ledger") in sources
    assert (again["instance"] == again["recorded_instance"]).all()
    made = {e["rid"]: e["predicted_e2e_s"] for e in journal.read(tmp_path / "j") if e["event"] == "decision"}
    assert again["predicted_e2e_s"].tolist() == [made[r.rid][str(r.instance)] for r in again.itertuples()]


def test_decisions_of_an_earlier_journal_are_counted_and_a_headless_one_is_refused(recorded, tmp_path):
    entries = list(journal.read(recorded))
    old = [{k: v for k, v in e.items() if k != "statuses"} for e in entries]
    (tmp_path / "old").write_bytes(b"".join(map(journal.line_of, old)))
    frame = replay(tmp_path / "old", "random")
    assert frame.empty and frame.attrs["without_status"] == N
    (tmp_path / "headless").write_bytes(b"".join(map(journal.line_of, entries[1:])))
    with pytest.raises(InputError, match="no router line"):
        replay(tmp_path / "headless", "random")
    entries[1] = {**entries[1], "statuses": [{}] * 4}
    (tmp_path / "damaged").write_bytes(b"".join(map(journal.line_of, entries)))
    with pytest.raises(InputError, match=f"request {entries[1]['rid']}"):
        replay(tmp_path / "damaged", "random")


def test_a_journal_without_decisions_says_so(recorded, tmp_path, capsys):
    entries = list(journal.read(recorded))
    for kept in ([], entries[:1]):
        (tmp_path / "idle").write_bytes(b"".join(map(journal.line_of, kept)))
        assert main(["replay", str(tmp_path / "idle")]) == 2
        assert f"journal '{tmp_path / 'idle'}' holds no decisions" in capsys.readouterr().err
    old = [{k: v for k, v in e.items() if k != "statuses"} for e in entries]
    (tmp_path / "old").write_bytes(b"".join(map(journal.line_of, old)))
    assert main(["replay", str(tmp_path / "old")]) == 0
    assert f"{N} decisions hold no statuses" in capsys.readouterr().out


def test_a_router_without_predictors_is_replayed_with_a_named_step_cost(tmp_path):
    async def story():
        async with scripted_engines(2) as engines, routed(engines, tmp_path / "j") as (_, session, url):
            for _ in range(4):
                await ask(session, url)

    asyncio.run(asyncio.wait_for(story(), 30))
    with pytest.raises(InputError, match="no Predictors"):
        replay(tmp_path / "j", "least_loaded")
    frame = replay(tmp_path / "j", "astrolabe:k=2", cost=PRESET.cost)
    assert (frame["regret_s"] == 0).all() and len(frame) == 4


def test_what_fits_nowhere_has_no_regret(recorded, tmp_path):
    entries = list(journal.read(recorded))
    entries[1] = {**entries[1], "prompt_tokens": 10**6}
    (tmp_path / "long").write_bytes(b"".join(map(journal.line_of, entries)))
    first = replay(tmp_path / "long", "astrolabe:k=2").iloc[0]
    assert math.isnan(first["regret_s"]) and first["best_instance"] == -1


def test_the_command_prints_one_json_object_and_writes_a_row_a_decision(recorded, tmp_path, capsys):
    out = tmp_path / "r.parquet"
    assert main(["replay", str(recorded), "--policy", "least_loaded", "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["decisions"] == N == len(pd.read_parquet(out))
    assert 0 <= told["recorded_best_share"] <= 1 and told["recorded_regret_mean_s"] >= 0
    assert main(["replay", str(tmp_path / "nothing"), "--json"]) == 2
    assert "cannot be read" in json.loads(capsys.readouterr().out)["error"]
