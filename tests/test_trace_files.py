"""Claims about files that are damaged, cut short or none: each is refused in one line that says what to do."""

import gzip

import pytest
from traces import HEADER, full_frame, refusal

from astrolabe_lab import trace


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
    assert "names a column twice" in refusal(file("prompt_tokens,prompt_tokens\n5,6\n"))
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
