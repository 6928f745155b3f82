"""Claims about files that are damaged, cut short or none: each is refused in one line that says what to do."""

import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traces import HEADER, conversation, full_frame, refusal, words

from astrolabe_lab import trace
from astrolabe_lab.errors import InputError


def test_what_is_no_file_is_refused(tmp_path):
    assert "is a directory: give one trace file" in refusal(tmp_path)
    assert "does not exist: check the path" in refusal(tmp_path / "none.csv")


@pytest.mark.parametrize("content", [b"", b"  \n \n", gzip.compress(b"")])
def test_an_empty_file_is_refused(file, content):
    assert "is empty: a trace needs a header" in refusal(file(content))


def test_a_header_alone_is_refused(file):
    assert "no request is left of 0 rows" in refusal(file(HEADER))


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
def test_a_gzip_file_cut_short_is_refused(file, keep):
    whole = gzip.compress((HEADER + "".join(f"{i},{i},{i % 7 + 1},{i % 5 + 1}\n" for i in range(1000))).encode())
    assert "gzip data is cut short or damaged" in refusal(file(whole[: int(len(whole) * keep)], "t.csv.gz"))


def test_a_damaged_gzip_file_is_refused(file):
    whole = bytearray(gzip.compress(HEADER.encode() * 50))
    whole[-6] ^= 0xFF
    assert "cut short or damaged" in refusal(file(bytes(whole)))


@pytest.mark.parametrize("name", ["t.parquet", "t.csv"])
def test_a_parquet_file_cut_short_or_damaged_is_refused_whatever_its_name(tmp_path, file, name):
    whole = trace.save(full_frame(), tmp_path / "whole.parquet").read_bytes()
    for damaged in (whole[:-20], whole.replace(b" spaced ", b" sp\xffced ")):
        assert "is not a readable Parquet file" in refusal(file(damaged, name))


def test_another_encoding_is_named_with_its_line(file):
    message = refusal(file("prompt_tokens,output_tokens,prompt\n5,6,ok\n5,6,caf\xe9\n".encode("latin-1")))
    assert "line 3: byte 0xe9 is not UTF-8" in message and "iconv" in message
    assert "encoded as UTF-16" in refusal(file(HEADER.encode("utf-16")))


def test_a_binary_file_is_refused(file):
    assert "is binary and not Parquet" in refusal(file(b"\x89PNG\r\n\x1a\n\x00\x00\x00"))


def test_a_quote_left_open_is_named(file):
    text = 'prompt_tokens,output_tokens,prompt\n5,6,fine\n5,6,"open\n' + "5,6,more\n" * 50
    assert "line 3: unexpected end of data" in refusal(file(text))


def test_missing_columns_and_double_ones_are_named(file):
    assert "lacks output_tokens" in refusal(file("prompt_tokens,answer\n5,6\n"))
    assert "names 'prompt_tokens' more than once" in refusal(file("prompt_tokens,prompt_tokens\n5,6\n"))
    assert "azure: Azure LLM inference CSV of 2023 and 2024: TIMESTAMP" in refusal(file("a,b\n1,2\n"))


def test_wrong_options_are_named_with_what_is_allowed(file):
    path = file(HEADER + "0,0,5,6\n")
    formats = "csv, parquet, azure, burstgpt, vidur, mooncake, bailian, sharegpt, lmsys"
    assert f"allowed are {formats};" in refusal(path, format="json")
    assert "allowed are error and drop" in refusal(path, on_bad="ignore")
    assert "allowed are error and sort" in refusal(path, unsorted="drop")
    assert "filter min_tokens is unknown: allowed are min_prompt_tokens" in refusal(path, min_tokens=4)
    assert "integers >= 0 and None" in refusal(path, max_total_tokens=-1)
    assert "only for ShareGPT and LMSYS texts" in refusal(path, tokenizer=len)


# --- damage of any kind

MOONCAKE = [{"timestamp": 40 * i, "input_length": 600, "output_length": 5, "hash_ids": [0, i]} for i in range(4)]
TURNS = [{"role": "user", "content": words(5)}, {"role": "assistant", "content": words(6)}]
WHOLE = {
    "csv": HEADER + "".join(f"{i},{i}.5,{i + 5},6\n" for i in range(5)),
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2024-05-10 00:00:00.009930+00:00,2162,5\n" * 4,
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "5,G,7,8,15,API log\n" * 4,
    "vidur": "num_prefill_tokens,num_decode_tokens\n" + "374,44\n" * 4,
    "mooncake": "".join(json.dumps(row) + "\n" for row in MOONCAKE),
    "bailian": "".join(json.dumps({"chat_id": 1, "type": "text", **row}) + "\n" for row in MOONCAKE),
    "sharegpt": json.dumps([conversation(words(5), words(6))] * 3),
    "lmsys": json.dumps([{"model": "m", "conversation": TURNS}] * 3),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Every format's sample as bytes, and a file to write the damaged one to."""
    folder = tmp_path_factory.mktemp("whole")
    found = {name: text.encode() for name, text in WHOLE.items()}
    found["parquet"] = trace.save(full_frame(), folder / "t.parquet").read_bytes()
    for name, content in found.items():
        (folder / "t").write_bytes(content)
        assert trace.load(folder / "t").attrs["format"] == name
    return found, folder / "t"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_file_damaged_anywhere_loads_or_is_refused_in_one_line(whole, data):
    """Bytes lost, doubled, changed or cut off: never another error, and never a row that breaks the contract."""
    found, path = whole
    content = bytearray(found[data.draw(st.sampled_from(sorted(found)), label="format")])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(content) - 1, 0)))
        kind = data.draw(st.sampled_from(["lose", "insert", "change", "cut", "double"]))
        patch = data.draw(st.sampled_from([*(bytes([c]) for c in b'\0-_\n",[}\xff'), b"9" * 400, b"null", b"1e999"]))
        if kind == "cut":
            del content[at:]
        elif kind == "double":
            content[at:at] = content[at : at + 40]
        else:
            content[at : at + (kind != "insert") * len(patch)] = b"" if kind == "lose" else patch
    path.write_bytes(bytes(content))
    for options in ({}, {"on_bad": "drop", "unsorted": "sort"}):
        try:
            frame = trace.load(path, **options)
            trace.check(frame, times="arrived_s" in frame)
        except InputError as error:
            assert "\n" not in str(error)
