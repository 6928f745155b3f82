"""Files that are damaged, absurd or hostile: one clear error, or the right result; never a crash, never a hang."""

import gzip
import io
import json

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_hostile_input import HEADER, requests

from astrolabe_lab import arrivals, cli, cost, generators, trace
from astrolabe_lab.calibrate import artifact
from astrolabe_lab.cost import shapes
from astrolabe_lab.disagg.constants import Constants
from astrolabe_lab.engines.cluster_file import read_cluster
from astrolabe_lab.engines.engine_facts import read_facts
from astrolabe_lab.errors import InputError
from astrolabe_lab.fidelity.measured_run import MeasuredRun
from astrolabe_lab.length.split import Split
from astrolabe_lab.trace import files as trace_files


@pytest.fixture
def refusal(tmp_path):
    """Gives the error of loading a file with the given content."""

    def load(content, **options):
        path = tmp_path / "t.x"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(InputError) as raised:
            trace.load(path, **options)
        return str(raised.value)

    return load


def parquet(**columns):
    out = io.BytesIO()
    pq.write_table(pa.table({"prompt_tokens": [5, 6], "output_tokens": [2, 3]} | columns), out)
    return out.getvalue()


def test_a_file_of_nothing_but_a_byte_order_mark_is_empty(refusal):
    assert "is empty" in refusal(b"\xef\xbb\xbf")


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({"prompt_tokens": [True, True]}, "prompt_tokens is True"),
        ({"prompt_tokens": [[5], [6]]}, "prompt_tokens is"),
        ({"arrived_s": pa.array([1, 2], pa.timestamp("ns"))}, "arrived_s is"),
        ({"arrived_s": pa.array([1, 2], pa.duration("s"))}, "arrived_s is"),
        ({"prefix_blocks": [[1.5], [2.0]]}, "prefix_blocks is"),
        ({"prefix_blocks": ["1 x", "2 y"]}, "prefix_blocks is '1 x'"),
    ],
)
def test_what_only_casts_to_a_number_is_no_number(refusal, columns, name):
    message = refusal(parquet(**columns))
    assert "2 of 2 rows bad" in message and name in message


def test_prefix_blocks_read_the_same_from_text_in_parquet_as_in_csv(tmp_path):
    (tmp_path / "t.parquet").write_bytes(parquet(prefix_blocks=["12 13", "7"]))
    (tmp_path / "t.csv").write_text(f"{HEADER.strip()},prefix_blocks\n5,2,12 13\n6,3,7\n")
    for name in ("t.parquet", "t.csv"):
        assert trace.load(tmp_path / name)["prefix_blocks"].tolist() == [(12, 13), (7,)]


def test_ids_that_a_float_would_merge_are_refused(refusal):
    message = refusal(f"rid,{HEADER}{2**53 + 1},5,6\n")
    assert f"rid is '{2**53 + 1}'" in message and f"at most {2**53 - 1}" in message


@pytest.mark.parametrize("late", ["1e15", "1700000000000"])  # the latter: Unix time in ms
def test_times_at_which_a_step_would_vanish_in_rounding_are_refused(refusal, late):
    assert "at most 1e+10" in refusal(f"arrived_s,{HEADER}{late},5,6\n")


def test_years_that_nanoseconds_cannot_tell_are_refused(refusal):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n0001-01-01 00:00:00,5,6\n2023-01-01 00:00:00,5,6\n"
    assert "line 2: TIMESTAMP is '0001-01-01 00:00:00'" in refusal(text)


@pytest.mark.parametrize("inside", ["[" * 100_000, "9" * 5_000])
def test_json_past_what_the_reader_takes_is_no_json(refusal, inside):
    assert "not JSON" in refusal('[{"conversations":' + inside)
    assert "line 2: not JSON" in refusal('{"conversations":[]}\n[1]\n'.replace("[1]", '{"a":' + inside + "}"))


def test_a_line_separator_inside_a_json_string_ends_no_line(tmp_path):
    turns = [{"value": "a b \u2028 c d e"}, {"value": "a b c d e"}]
    line = json.dumps({"conversations": turns}, ensure_ascii=False)
    (tmp_path / "t.jsonl").write_text(f"{line}\n{line}\n", encoding="utf-8")
    assert len(trace.load(tmp_path / "t.jsonl")) == 2


def test_a_gzip_file_that_unpacks_without_end_is_refused(refusal, monkeypatch):
    monkeypatch.setattr(trace_files, "MAX_UNPACKED", 10_000)
    assert "unpacks to more than 10,000 bytes" in refusal(gzip.compress(bytes(10_001)))


def test_a_device_is_no_trace():
    with pytest.raises(InputError, match="/dev/zero is a device"):
        trace.load("/dev/zero")


@pytest.mark.parametrize("write", ["csv", "parquet"])
def test_a_file_of_too_many_columns_is_refused_at_its_header(refusal, monkeypatch, write):
    monkeypatch.setattr(trace_files, "MAX_COLUMNS", 100)
    names = [f"c{i}" for i in range(101)]
    content = ",".join(names) + "\n" if write == "csv" else parquet(**{name: [0, 0] for name in names[2:]})
    message = refusal(content)
    assert "has 101 columns, more than the 100" in message and len(message) < 400


def test_a_header_that_names_a_column_twice_is_told_by_that_name(refusal):
    message = refusal("rid,prompt_tokens,rid," + ",".join(f"c{i}" for i in range(1000)) + "\n")
    assert "names 'rid' more than once" in message and len(message) < 200


@pytest.mark.parametrize("many", [10**12, 2**70])
@pytest.mark.parametrize(
    "draw",
    [
        lambda n: generators.draw("sharegpt_like", n),
        lambda n: generators.draw("family:mixed", n),
        lambda n: trace.sample(requests(), n, 0, replace=True),
        lambda n: arrivals.unit_arrivals("poisson", n, 0),
    ],
)
def test_more_requests_than_fit_a_memory_are_refused_before_they_are_drawn(draw, many):
    with pytest.raises(InputError, match=f"n={many} is not usable.*at most 100,000,000"):
        draw(many)


def test_running_out_of_memory_is_told_in_a_line(monkeypatch, capsys):
    def hungry(*_, **__):
        raise MemoryError("Unable to allocate 72.8 TiB")

    monkeypatch.setattr("astrolabe_lab.doctor.examine", hungry)
    assert cli.main(["doctor"]) == 1
    assert "too little memory for that (Unable to allocate 72.8 TiB): ask for less" in capsys.readouterr().err


@pytest.mark.parametrize(
    "read",
    [
        cost.preset,
        shapes.Model.from_config,
        lambda p: MeasuredRun.load(p.parent),
        artifact.load,
        Constants.read,
        Split.load,
        read_facts,
        lambda p: read_cluster(p.rename(p.with_name("cluster.json")).parent),
    ],
)
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe{", "not UTF-8"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "nested too deep"),
        (b"[1]", "not a JSON object"),
    ],
)
def test_a_json_file_that_is_none_is_named(tmp_path, read, content, says):
    path = tmp_path / "meta.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=says) as raised:
        read(path)
    assert str(tmp_path) in str(raised.value) and ".json" in str(raised.value)


def test_a_router_of_pools_names_the_file_of_constants_that_is_none(tmp_path, capsys):
    (tmp_path / "c.json").write_text("[" * 100_000)
    pools = ["--prefill", "http://127.0.0.1:8", "--decode", "http://127.0.0.1:9"]
    assert cli.main(["route", *pools, "--constants-from", str(tmp_path / "c.json")]) == 2
    assert f"{tmp_path / 'c.json'}: this calibration is nested too deep" in capsys.readouterr().err


def test_a_million_rows_load_and_round_trip(tmp_path):
    frame = requests(1_000_000)
    pd.testing.assert_frame_equal(trace.load(trace.save(frame, tmp_path / "t.parquet")), frame, check_dtype=False)
