"""What a router believes of an engine: its published status while that can be one, else its own reckoning."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_engines import publish

from astrolabe_lab.cost import StepCost
from astrolabe_lab.predictor import Predictor
from astrolabe_lab.request import Request
from astrolabe_lab.serve.instance import STALE_S, Instance
from astrolabe_lab.serve.ledger import Ledger
from astrolabe_lab.serve.live_view import LiveView
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.sim.state import RUNNING
from astrolabe_lab.sim.status import HEADER, ROW
from astrolabe_lab.sim.status_check import check_status
from astrolabe_lab.status.published import CONTROL, StatusReader, StatusWriter
from astrolabe_lab.status.reckoned import reckon
from astrolabe_lab.status.scrape import Gauges, read_gauges

CONFIG, COST = EngineConfig(max_model_len=2048), StepCost.parse("base_s=0.02,per_seq_s=0.002")
NEWCOMER = Request(-1, 0.0, 64, 100)
METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 8.0
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 4.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 2.0
vllm:request_prompt_tokens_sum{engine="0",model_name="m"} 1000.0
vllm:request_decode_time_seconds_sum{engine="0",model_name="m"} 12.0
vllm:request_generation_tokens_sum{engine="0",model_name="m"} 124.0
"""


def instance(path=None, **options):
    return Instance(0, "http://127.0.0.1:9", CONFIG, Predictor(CONFIG, COST), path, **options)


# --- the reckoned status ------------------------------------------------------------------------------------

requests = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(1, 3000), st.integers(0, 3000), st.booleans(), st.floats(0.0, 100.0)),
    max_size=80,
)
gauges = st.builds(
    Gauges,
    taken_s=st.floats(0, 100),
    running=st.integers(0, 60).map(float),
    waiting=st.integers(0, 60).map(float),
    kv_usage=st.floats(0, 1),
    queue_s=st.floats(0, 5),
    prefill_s_per_token=st.floats(0, 0.01),
    decode_s_per_token=st.floats(0, 0.1),
    ended_since=st.integers(0, 5),
)


@settings(max_examples=150, deadline=None)
@given(requests, gauges)
def test_whatever_was_dispatched_the_reckoned_status_can_be_one_of_the_engine(sent, told):
    ledger = Ledger()
    for rid, (prompt, predicted, streamed, streams, at_s) in enumerate(sent):
        entry = ledger.open(rid, prompt, predicted, at_s, streams)
        if streams:
            ledger.progress(entry, streamed, at_s)
    status = reckon(ledger, told, CONFIG, 100.0)
    check_status(status, Predictor(CONFIG, COST).template)
    assert {rid for rid in status.rows["rid"].tolist() if rid >= 0} == set(ledger.entries)
    others = sum(rid < 0 for rid in status.rows["rid"].tolist())
    before = sum(at_s <= told.taken_s for *_, at_s in sent)
    assert others == max(0, round(told.running + told.waiting) - before - told.ended_since)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ocp"), st.integers(0, 30), st.integers(1, 500)), max_size=300))
def test_a_ledger_s_table_is_its_entries_whatever_came_and_went(events):
    ledger, model = Ledger(), {}
    for what, rid, n in events:
        if what == "o" and rid not in model:
            ledger.open(rid, n, n + 1, float(n))
            model[rid] = [n, 0]
        elif what == "c":
            assert ledger.close(rid) == (model.pop(rid, None) is not None)
        elif what == "p" and rid in model:
            ledger.progress(ledger.entries[rid], n, 1.0)
            model[rid][1] = n
        assert len(ledger) == len(model)
        assert ledger.tokens == sum(2 * prompt + 1 for prompt, _ in model.values())
    table = ledger.table()
    assert table["rid"].tolist() == list(model)
    assert table["prompt"].tolist() == [prompt for prompt, _ in model.values()]
    assert table["streamed"].tolist() == [streamed for _, streamed in model.values()]
    assert all(table["open"])


def test_a_request_that_streams_is_reckoned_as_it_is():
    ledger = Ledger()
    entry = ledger.open(7, 100, 200, 1.0)
    ledger.progress(entry, 30, 2.0)
    ledger.open(8, 50, 60, 3.0)
    first, second = reckon(ledger, Gauges(), CONFIG, 4.0).rows
    assert (first["rid"], first["computed"], first["generated"], first["blocks"]) == (7, 129, 30, 9)
    assert (second["rid"], second["computed"], second["blocks"]) == (8, 0, 0)


def test_an_answer_that_is_not_streamed_is_reckoned_by_the_engine_s_mean_pace():
    ledger = Ledger()
    ledger.open(7, 100, 200, 0.0, streams=False)
    told = Gauges(0.0, 1, 0, 0.1, queue_s=0.5, prefill_s_per_token=0.005, decode_s_per_token=0.1)
    assert reckon(ledger, told, CONFIG, 3.0).rows["generated"].tolist() == [20]  # (3 - 0.5 - 0.5) / 0.1
    assert reckon(ledger, told, CONFIG, 0.9).rows["generated"].tolist() == [0]
    assert reckon(ledger, told, CONFIG, 900.0).rows["generated"].tolist() == [199]


def test_other_clients_requests_make_an_engine_look_as_busy_as_it_is():
    ledger = Ledger()
    ledger.progress(ledger.open(1, 100, 100, 0.0), 10, 1.0)
    alone = reckon(ledger, Gauges(1.0, 1, 0, 0.05), CONFIG, 2.0)
    crowded = reckon(ledger, Gauges(1.0, 5, 3, 0.5), CONFIG, 2.0)
    assert (alone.running, alone.waiting) == (1, 0)
    assert (crowded.running, crowded.waiting) == (5, 3)
    own = instance()
    price = [own.predict(status, NEWCOMER, "e2e_s", 2.0).e2e_s for status in (alone, crowded)]
    assert price[1] > price[0] * 1.1


def test_a_request_that_ends_after_the_gauges_were_taken_is_not_another_client_s():
    each = instance(gauges=Gauges(5.0, 2, 0, 0.1))
    for rid in (1, 2):
        each.ledger.open(rid, 50, 50, 1.0)
    assert len(each.ledger_status(6.0).rows) == 2
    assert each.settle(1) and not each.settle(1)
    assert len(each.ledger_status(6.0).rows) == 1


def test_gauges_are_read_by_their_exact_names_and_a_changed_schema_is_no_idle_engine():
    told = read_gauges(METRICS, 7.0, time_scale=2.0)
    assert (told.taken_s, told.running, told.waiting, told.kv_usage) == (7.0, 3.0, 2.0, 0.25)
    assert told.queue_s == pytest.approx(8 / 4 / 2)
    assert told.prefill_s_per_token == pytest.approx(2 / 1000 / 2)
    assert told.decode_s_per_token == pytest.approx(12 / 120 / 2)
    for broken in (
        METRICS.replace("vllm:num_requests_running", "vllm:requests_running"),
        METRICS.replace("} 3.0", "} -1.0"),
        METRICS.replace("} 3.0", "} NaN"),
        METRICS.replace('{engine="0",model_name="m"} 3.0', ""),
        METRICS.replace("} 3.0", "}"),
        METRICS.replace("} 3.0", "} three"),
        "",
    ):
        with pytest.raises(ValueError):
            read_gauges(broken, 0.0, 1.0)


# --- what is published --------------------------------------------------------------------------------------


def test_a_status_that_is_missing_damaged_or_another_engine_s_is_not_believed(tmp_path):
    path = tmp_path / "status"
    each = instance(path)
    assert each.status(time.monotonic())[1] == "ledger"
    for junk in (b"", b"x" * 40, bytes(CONTROL.itemsize + 4096)):
        path.write_bytes(junk)
        assert each.status(time.monotonic())[1] == "ledger"
    publish(StatusWriter(path), time.monotonic(), [(1, 100, 5, 200)])
    assert each.status(time.monotonic())[1] == "published"
    publish(StatusWriter(path), time.monotonic(), [(1, 100, 5, 200)], free_blocks=7)  # more blocks than it has
    assert each.status(time.monotonic())[1] == "ledger"
    publish(StatusWriter(path), time.monotonic(), [(1, -4, 5, 200)])
    assert each.status(time.monotonic())[1] == "ledger"
    publish(StatusWriter(path), time.monotonic() + 1e6, [(1, 100, 5, 200)])  # of another clock
    assert each.status(time.monotonic())[1] == "ledger"
    assert each.status_faults == 7


def test_a_write_that_never_ends_does_not_hold_the_router_up(tmp_path):
    path = tmp_path / "status"
    writer = StatusWriter(path)
    publish(writer, time.monotonic())
    writer._control["sequence"] += 1  # died while it wrote
    started = time.monotonic()
    assert instance(path).status(time.monotonic())[1] == "ledger"
    assert time.monotonic() - started < 5.0


def test_a_restarted_engine_is_seen_and_its_dead_predecessor_s_requests_are_gone(tmp_path):
    path = tmp_path / "status"
    each = instance(path)
    publish(StatusWriter(path), time.monotonic(), [(1, 100, 5, 200), (2, 100, 5, 200)])
    assert (each.status(time.monotonic())[0].running, each.restarts) == (2, 0)
    time.sleep(0.002)
    publish(StatusWriter(path), time.monotonic())
    status, source = each.status(time.monotonic())
    assert (status.running, source, each.restarts) == (0, "published", 1)


def test_a_hung_engine_does_not_look_as_if_it_had_finished(tmp_path):
    """Advanced to now, an old status is that of an idle engine: it would draw all requests."""
    hung, busy = tmp_path / "hung", tmp_path / "busy"
    now_s = time.monotonic()
    publish(StatusWriter(hung), now_s - 600.0, [(1, 100, 5, 200)])
    publish(StatusWriter(busy), now_s, [(j, 100, 5, 200) for j in range(20)])
    engines = [instance(hung), Instance(1, "", CONFIG, Predictor(CONFIG, COST), busy)]
    engines[0].ledger.open(1, 100, 200, now_s - 601.0)
    view = LiveView(engines, now_s)
    assert view.sources == ["stale", "published"]
    hang, price = view.predict(Request(-1, now_s, 64, 100), "e2e_s", [0, 1])
    assert hang == math.inf and price < math.inf
    assert view[0].running + view[0].waiting == 1  # and not none


def test_an_engine_is_not_hung_before_its_step_has_taken_far_longer_than_its_price(tmp_path):
    path, now_s = tmp_path / "status", time.monotonic()
    writer, slow = StatusWriter(path), StepCost.parse("base_s=0.02,mixed.per_token_s=0.04")  # a real engine on a CPU
    each = Instance(0, "http://127.0.0.1:9", CONFIG, Predictor(CONFIG, slow), path)
    header, rows = np.zeros(1, HEADER), np.zeros(1, ROW)
    rows["rid"], rows["state"], rows["prompt"], rows["scheduled_now"] = 7, RUNNING, 1000, 500
    rows["blocks"] = -(-500 // CONFIG.block_size)
    header["free_blocks"] = CONFIG.usable_blocks - rows["blocks"]
    header["n_running"] = header["n_rows"] = 1
    for age_s, source in ((30.0, "published"), (100.0, "stale")):  # the step's price is 20 s
        header["taken_s"] = header["step_started_s"] = now_s - age_s
        writer.write(header, rows)
        assert each.status(now_s)[1] == source
    each.predictor = None
    header["taken_s"] = header["step_started_s"] = now_s - 30.0
    writer.write(header, rows)
    assert each.status(now_s)[1] == "stale"  # nobody knows its price


def test_an_idle_engine_s_old_status_is_good_for_ever(tmp_path):
    path = tmp_path / "status"
    publish(StatusWriter(path), time.monotonic() - 600.0)
    assert instance(path).status(time.monotonic())[1] == "published"
    publish(StatusWriter(path), time.monotonic() - STALE_S / 2, [(1, 100, 5, 200)])
    assert instance(path).status(time.monotonic())[1] == "published"


def test_both_kinds_of_status_price_a_request_alike_where_both_know_all(tmp_path):
    path, now_s = tmp_path / "status", time.monotonic()
    running = [(j, 100 + j, 5 + 3 * j, 200) for j in range(12)]
    publish(StatusWriter(path), now_s, running, free_blocks=CONFIG.usable_blocks)
    each = instance()
    for rid, prompt, generated, predicted in running:
        each.ledger.progress(each.ledger.open(rid, prompt, predicted, now_s - 1.0), generated, now_s)
    published = StatusReader(path).read()
    reckoned = each.ledger_status(now_s)
    assert np.array_equal(published.rows, reckoned.rows)
    assert published.free_blocks == reckoned.free_blocks
    prices = [each.predict(status, NEWCOMER, "e2e_s", now_s).e2e_s for status in (published, reckoned)]
    assert prices[0] == prices[1]
