"""Claims about trace files: what loads, what is refused and how, and that nothing is lost on the way."""

import gzip
import json
import os
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab import arrivals, sharegpt_like, trace
from astrolabe_lab.errors import InputError
from astrolabe_lab.tokens import APPROXIMATION, count_tokens, counter

HEADER = "rid,arrived_s,prompt_tokens,output_tokens\n"
SAMPLE = Path(__file__).parents[1] / "data" / "sharegpt_like_200.csv"


@pytest.fixture
def file(tmp_path):
    def write(content, name="t.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def refusal(*args, **kwargs):
    with pytest.raises(InputError) as raised:
        trace.load(*args, **kwargs)
    message = str(raised.value)
    assert "\n" not in message
    return message


def full_frame():
    awkward = [
        "",
        "NA",
        "null",
        'quote " and, comma',
        "two\nlines",
        "cr\rlf\r\n",
        " spaced ",
        "\u00e9\u4e2d\U0001f600",
    ]
    n = len(awkward)
    frame = pd.DataFrame(
        {
            "rid": np.arange(n)[::-1] * 3,
            "arrived_s": np.cumsum(np.random.default_rng(0).random(n)) / 3,
            "prompt_tokens": range(1, n + 1),
            "output_tokens": range(10**9 - n, 10**9),
            "predicted_tokens": [1] * n,
            "slo": ["tight", "loose"] * (n // 2),
            "family": ["chat"] * n,
            "prompt": awkward,
            "prefix_blocks": [(1, 2, 3), ()] * (n // 2),
        }
    )
    return trace.check(frame)


# --- our own files


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.parquet", "t.parquet.gz"])
def test_what_is_saved_comes_back_exactly(tmp_path, name):
    frame = full_frame()
    path = trace.save(frame, tmp_path / name)
    pd.testing.assert_frame_equal(trace.load(path), frame, check_exact=True)
    first = path.read_bytes()
    assert trace.save(trace.load(path), path).read_bytes() == first or "parquet" in name
    assert os.listdir(tmp_path) == [name]


def test_saving_a_broken_trace_leaves_the_old_file(tmp_path):
    path = trace.save(full_frame(), tmp_path / "t.csv")
    before = path.read_bytes()
    with pytest.raises(InputError, match="output_tokens is 0"):
        trace.save(full_frame().assign(output_tokens=0), path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["t.csv"]


def test_saving_under_another_suffix_or_into_no_folder_is_refused(tmp_path):
    for name, says in (("t.json", "saved as .csv"), ("t", "saved as .csv"), ("no/t.csv", "does not exist")):
        with pytest.raises(InputError, match=says):
            trace.save(full_frame(), tmp_path / name)


def test_a_file_without_rid_and_times_gets_rids_and_no_times(file):
    frame = trace.load(file("prompt_tokens,output_tokens\n5,6\n7,8\n"))
    assert list(frame) == ["rid", "prompt_tokens", "output_tokens"] and frame["rid"].tolist() == [0, 1]


def test_byte_order_mark_windows_line_ends_and_trailing_blank_lines_are_harmless(file):
    frame = trace.load(file(b"\xef\xbb\xbf" + (HEADER + "0,0.5,5,6\n1,1.5,7.0,8\n\n\n").replace("\n", "\r\n").encode()))
    assert frame["prompt_tokens"].tolist() == [5, 7] and frame["prompt_tokens"].dtype == np.int64


def test_other_columns_are_left_out_and_named(file):
    frame = trace.load(file("prompt_tokens,output_tokens,ttft_s\n5,6,0.1\n"))
    assert "ttft_s" not in frame and frame.attrs["ignored_columns"] == ["ttft_s"]


def test_a_misspelt_column_is_not_ignored_in_silence(file):
    assert "did you mean 'predicted_tokens'" in refusal(file("prompt_tokens,output_tokens,predicted_token\n5,6,7\n"))


def test_the_sample_is_what_its_readme_says(tmp_path):
    made = arrivals.with_arrivals(sharegpt_like.generate(200, seed=0), qps=2.0, kind="poisson", seed=0)
    assert trace.save(made, tmp_path / "t.csv").read_bytes() == SAMPLE.read_bytes()


# --- bad rows


@pytest.mark.parametrize("value", ["0", "-3", "nan", "inf", "2.5", "x", "", "1e30"])
@pytest.mark.parametrize("column", [2, 3])
def test_a_token_count_that_is_no_positive_integer_is_named_with_its_line(file, value, column):
    row = ["1", "2.0", "5", "6"]
    row[column] = value
    message = refusal(file(HEADER + "0,1.0,5,6\n" + ",".join(row) + "\n"))
    name = HEADER.strip().split(",")[column]
    assert f"1 of 2 rows bad: line 3: {name} is {value!r} (allowed: an integer from 1 to 1,000,000,000)" in message
    assert "on_bad='drop'" in message


@pytest.mark.parametrize("value", ["-0.5", "nan", "inf", "later", ""])
def test_a_time_that_is_not_finite_or_negative_is_named_with_its_line(file, value):
    assert f"line 2: arrived_s is {value!r} (allowed: finite seconds >= 0, at most 1e+10)" in refusal(
        file(HEADER + f"0,{value},5,6\n")
    )


def test_the_first_three_bad_rows_are_shown_and_all_are_counted(file):
    text = HEADER + "".join(f"{i},{i},{5 if i % 10 else 0},6\n" for i in range(100))
    message = refusal(file(text))
    assert "10 of 100 rows bad: line 2:" in message and "line 12:" in message and "line 22:" in message
    assert "line 32:" not in message and "and 7 more" in message


def test_bad_rows_are_dropped_only_if_asked_and_counted(file):
    frame = trace.load(file(HEADER + "4,0,5,6\n5,1,0,6\n6,2\n7,3,5,6\n"), on_bad="drop")
    assert frame["rid"].tolist() == [4, 7]
    assert (frame.attrs["rows_read"], frame.attrs["bad_rows"]) == (4, 2)


def test_a_file_of_bad_rows_only_is_refused_even_when_dropping(file):
    assert "no request is left of 1 rows (left out: 1 by bad)" in refusal(file(HEADER + "0,0,0,0\n"), on_bad="drop")


def test_a_last_row_cut_short_is_named(file):
    assert "line 3: 2 fields where the header has 4" in refusal(file(HEADER + "0,1,5,6\n1,2"))


def test_a_row_with_too_many_fields_and_a_blank_line_are_named(file):
    message = refusal(file(HEADER + "0,1,5,6,7\n\n1,2,5,6\n"))
    assert "line 2: 5 fields where the header has 4; line 3: a blank line" in message


def test_lines_are_counted_through_prompts_of_many_lines(file):
    text = 'prompt_tokens,output_tokens,prompt\n5,6,"one\ntwo\nthree"\n0,6,x\n'
    assert "line 5: prompt_tokens is '0'" in refusal(file(text))


def test_a_rid_used_twice_is_named_with_both_lines(file):
    assert "line 4: rid 7 is used already on line 2" in refusal(file(HEADER + "7,0,5,6\n8,1,5,6\n7,2,5,6\n"))


def test_other_columns_of_the_contract_are_checked_too(file):
    head = "prompt_tokens,output_tokens,"
    assert "slo is 'TIGHT' (allowed: tight or loose)" in refusal(file(head + "slo\n5,6,TIGHT\n"))
    assert "predicted_tokens is '0'" in refusal(file(head + "predicted_tokens\n5,6,0\n"))
    assert "prefix_blocks is '1 x'" in refusal(file(head + "prefix_blocks\n5,6,1 x\n"))


def test_times_that_go_back_are_an_error_unless_sorting_is_asked_for(file):
    path = file(HEADER + "0,5,1,1\n1,3,2,2\n2,3,3,3\n3,9,4,4\n")
    message = refusal(path)
    assert "go back 1 times, first at line 3 (3 s after 5 s)" in message and "unsorted='sort'" in message
    assert refusal(path, on_bad="drop") == message
    frame = trace.load(path, unsorted="sort")
    assert frame["rid"].tolist() == [1, 2, 0, 3] and frame.attrs["out_of_order_rows"] == 1


# --- bad files


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
    assert "azure: Azure LLM inference CSV: TIMESTAMP" in refusal(file("a,b\n1,2\n"))


def test_wrong_options_are_named_with_what_is_allowed(file):
    path = file(HEADER + "0,0,5,6\n")
    assert "allowed are csv, parquet, azure, vidur, sharegpt" in refusal(path, format="json")
    assert "allowed are error and drop" in refusal(path, on_bad="ignore")
    assert "allowed are error and sort" in refusal(path, unsorted="drop")
    assert "filter min_tokens is unknown: allowed are min_prompt_tokens" in refusal(path, min_tokens=4)
    assert "integers >= 0 and None" in refusal(path, max_total_tokens=-1)
    assert "only for ShareGPT JSON" in refusal(path, tokenizer=len)


# --- files of others


def test_azure_times_keep_seven_decimals_and_start_at_zero(file):
    rows = "18:15:46.6805900,374,44", "18:15:50.9951690,396,109", "18:15:50.9951691,5,1"
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    frame = trace.load(file(head + "".join(f"2023-11-16 {row}\r\n" for row in rows)))
    assert frame["arrived_s"].tolist() == [0.0, 4.314579, 4.3145791] and frame["output_tokens"].tolist() == [
        44,
        109,
        1,
    ]
    assert frame.attrs["format"] == "azure"


def test_azure_times_may_carry_a_zone_and_bad_ones_are_named(file):
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    frame = trace.load(file(head + "2024-05-10 00:00:00.009930+00:00,5,6\n2024-05-10 02:00:00.009930+01:00,5,6\n"))
    assert frame["arrived_s"].tolist() == [0.0, 3600.0]
    bad = file(head + "2024-05-10 00:00:00,5,6\nyesterday,5,6\n2024-05-10 00:00:03,5,0\n")
    message = refusal(bad)
    assert "line 3: TIMESTAMP is 'yesterday'" in message and "line 4: output_tokens is '0'" in message
    assert trace.load(bad, on_bad="drop")["arrived_s"].tolist() == [0.0]


def test_vidur_lengths_come_with_or_without_times(file):
    head = "num_prefill_tokens,num_decode_tokens"
    frame = trace.load(file(f"{head},num_total_tokens,pd_ratio\n3772.0,54.0,3826,69.8\n"))
    assert list(frame) == ["rid", "prompt_tokens", "output_tokens"] and frame.attrs["format"] == "vidur"
    assert trace.load(file(f"arrived_at,{head}\n0.5,1,2\n"))["arrived_s"].tolist() == [0.5]


def test_other_formats_have_no_filter_unless_asked(file):
    path = file("num_prefill_tokens,num_decode_tokens\n3,2\n5000,9\n100,100\n")
    assert len(trace.load(path)) == 3
    frame = trace.load(path, max_total_tokens=4096, min_prompt_tokens=4)
    assert frame["prompt_tokens"].tolist() == [100] and frame["rid"].tolist() == [0]
    assert frame.attrs["filtered"] == {"max_total_tokens": 1, "min_prompt_tokens": 1}


def conversation(prompt, answer, **more):
    turns = [
        {"from": "human", "value": prompt},
        {"from": "gpt", "value": answer},
        {"from": "human", "value": "more"},
    ]
    return {"id": "x", "conversations": turns} | more


def words(n):
    return " ".join(["word"] * n)


def test_sharegpt_takes_the_first_turn_and_its_answer_under_the_rules_of_vllm(file):
    sizes = [(4, 4), (3, 9), (9, 3), (1024, 1024), (1025, 9), (1000, 1049), (30, 2018)]
    kept = [(4, 4), (1024, 1024), (30, 2018)]
    entries = [conversation(words(p), words(o)) for p, o in sizes] + [{"conversations": [{"value": "alone"}]}]
    frame = trace.load(file(json.dumps(entries), "t.json"))
    assert list(zip(frame["prompt_tokens"], frame["output_tokens"], strict=True)) == kept
    assert frame["rid"].tolist() == [0, 1, 2] and frame["prompt"][0] == words(4)
    assert frame.attrs["filtered"] == {
        "fewer_than_two_turns": 1,
        "min_prompt_tokens": 1,
        "min_output_tokens": 1,
        "max_prompt_tokens": 1,
        "max_total_tokens": 1,
    }
    assert frame.attrs["rows_read"] == 8 and frame.attrs["token_counter"] == APPROXIMATION
    everything = trace.load(file(json.dumps(entries)), **dict.fromkeys(trace.FILTERS))
    assert len(everything) == 7


def test_sharegpt_comes_as_one_list_or_a_line_each_gzipped_or_not(file):
    entries = [conversation(words(5), words(6)), conversation(words(7), words(8))]
    lines = "\n".join(map(json.dumps, entries))
    loaded = [
        trace.load(file(content, name))
        for content, name in (
            (json.dumps(entries, indent=1), "a.json"),
            (lines, "b.jsonl"),
            (gzip.compress(lines.encode()), "c.jsonl.gz"),
        )
    ]
    assert all(frame.equals(loaded[0]) for frame in loaded) and len(loaded[0]) == 2


def test_sharegpt_entries_that_are_no_conversation_are_bad_rows(file):
    good = conversation(words(5), words(6))
    path = file(json.dumps([good, [1], {"messages": []}, conversation(None, "x"), good]), "t.json")
    message = refusal(path)
    assert "3 of 5 rows bad: entry 2: no list 'conversations'" in message and "entry 4: a turn without" in message
    assert len(trace.load(path, on_bad="drop")) == 2


def test_sharegpt_cut_short_is_refused(file):
    text = json.dumps([conversation(words(5), words(6))] * 20, indent=1)
    assert "is the file cut short?" in refusal(file(text[:-30], "t.json"))
    lines = "\n".join([json.dumps(conversation(words(5), words(6)))] * 3)
    assert "1 of 3 rows bad: line 3: not JSON" in refusal(file(lines[:-30], "t.jsonl"))


def test_half_a_surrogate_pair_can_be_loaded_and_saved(file, tmp_path):
    path = file(json.dumps([conversation("a \ud83d b c d", words(6))]), "t.json")
    frame = trace.load(path)
    pd.testing.assert_frame_equal(trace.load(trace.save(frame, tmp_path / "s.csv")), frame)


def test_a_format_that_the_file_does_not_have_is_refused(file, tmp_path):
    path = file(HEADER + "0,0,5,6\n")
    assert "format=azure needs TIMESTAMP, ContextTokens, GeneratedTokens" in refusal(path, format="azure")
    assert "format=sharegpt needs JSON" in refusal(path, format="sharegpt")
    assert "the file is not Parquet" in refusal(path, format="parquet")
    assert "the file is Parquet" in refusal(trace.save(full_frame(), tmp_path / "t.parquet"), format="csv")
    assert len(trace.load(path, format="csv")) == 1


# --- token counts


def test_the_default_count_adds_up_over_words_digits_marks_and_lines():
    assert count_tokens("") == 0 and count_tokens("one two") == 2 and count_tokens("it's 250!") == 7
    assert (
        count_tokens("incomprehensibilities") == 3
        and count_tokens("a\n\n\nb") == 3
        and count_tokens("\u4e2d\u6587") == 2
    )


def test_a_tokenizer_may_be_a_callable_an_encoder_or_give_a_mapping(file):
    class Encoder:
        name_or_path = "models/tiny"

        def encode(self, text):
            return list(text)

    path = file(json.dumps([conversation("abcdef", "ghijk")]), "t.json")
    for tokenizer, name in ((len, "len"), (Encoder(), "models/tiny")):
        frame = trace.load(path, tokenizer=tokenizer)
        assert (frame["prompt_tokens"][0], frame["output_tokens"][0]) == (6, 5) and frame.attrs["token_counter"] == name
    assert counter(lambda text: {"input_ids": [1, 2]})[0]("x") == 2
    for wrong in (7, "no/such/folder"):
        with pytest.raises(InputError, match="tokenizer"):
            counter(wrong)
    with pytest.raises(InputError, match="must give a count"):
        counter(lambda text: None)[0]("x")


def test_a_hugging_face_folder_counts_as_its_tokenizer_does(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers (extra length)")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    count, name = counter(tmp_path)
    assert count("a b a") == 3 and tmp_path.name in name
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        counter(tmp_path)


# --- check


def test_check_gives_the_types_of_the_contract_and_keeps_what_else_there_is():
    frame = pd.DataFrame(
        {
            "note": ["x", "y"],
            "output_tokens": [5.0, 6.0],
            "prompt_tokens": np.int32([1, 2]),
            "arrived_s": [0, 1],
            "rid": [9, 4],
        },
        index=[7, 8],
    )
    checked = trace.check(frame)
    assert list(checked) == ["rid", "arrived_s", "prompt_tokens", "output_tokens", "note"]
    assert [str(t) for t in checked.dtypes[:4]] == ["int64", "float64", "int64", "int64"]
    assert checked.index.tolist() == [0, 1] and frame.index.tolist() == [7, 8]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rid": [1, 1]}, "row 1: rid 1 is used already on row 0"),
        ({"rid": [-1, 1]}, "rid is -1 .allowed: an integer >= 0"),
        ({"arrived_s": [1.0, 0.5]}, "go back 1 times, first at row 1"),
        ({"arrived_s": [0.0, np.inf]}, "finite seconds"),
        ({"arrived_s": [None, 1.0]}, "finite seconds"),
        ({"prompt_tokens": [0, 1]}, "row 0: prompt_tokens is 0"),
        ({"output_tokens": [1.5, 1]}, "output_tokens is 1.5"),
        ({"predicted_tokens": [1, 0]}, "row 1: predicted_tokens is 0"),
        ({"slo": ["tight", None]}, "tight or loose"),
        ({"prompt": ["x", 3]}, "prompt is 3 .allowed: text"),
        ({"prefix_blocks": [(1,), (-2,)]}, "integers >= 0"),
        ({"Predicted_tokens": [1, 1]}, "did you mean 'predicted_tokens'"),
    ],
)
def test_check_names_what_breaks_the_contract(change, says):
    frame = pd.DataFrame({"rid": [0, 1], "arrived_s": [0.0, 1.0], "prompt_tokens": [1, 1], "output_tokens": [1, 1]})
    trace.check(frame)
    with pytest.raises(InputError, match=says):
        trace.check(frame.assign(**change))


def test_check_names_what_is_missing():
    frame = pd.DataFrame({"rid": [0], "prompt_tokens": [1], "output_tokens": [1]})
    with pytest.raises(InputError, match="arrived_s is missing .*with_arrivals"):
        trace.check(frame)
    assert len(trace.check(frame, times=False)) == 1
    with pytest.raises(InputError, match="output_tokens is missing"):
        trace.check(frame.drop(columns="output_tokens"), times=False)
    with pytest.raises(InputError, match="no rows"):
        trace.check(frame.head(0), times=False)
    with pytest.raises(InputError, match="not list"):
        trace.check([1])


# --- real files, kept beside the checkout and never in it


@pytest.fixture
def real(shared):
    def find(path):
        if not (shared / "data" / path).exists():
            pytest.skip(f"the shared data folder lacks {path}")
        return shared / "data" / path

    return find


@pytest.mark.shared
@pytest.mark.parametrize(
    ("path", "rows", "format", "prompt_mean", "output_mean"),
    [
        ("traces/azure_2023_conv.csv.gz", 19366, "azure", 1154.7, 211.1),
        ("traces/azure_2023_code.csv.gz", 8819, "azure", 2047.8, 27.9),
        ("traces/arxiv_summarization_lengths.csv.gz", 28257, "vidur", 2588, 291),
        ("traces/sharegpt_v3_filtered_lengths.csv.gz", 16384, "vidur", 219.6, 199.3),
        ("vidur/processed_traces/splitwise_conv.csv", 19366, "vidur", 1154.7, 211.1),
        ("astrolabe/trace_data__sharegpt__sharegpt_val_10k_llama2.csv.gz", 10000, "vidur", 246, 326),
    ],
)
def test_published_traces_load_with_their_published_moments(real, path, rows, format, prompt_mean, output_mean):
    frame = trace.load(real(path))
    assert (len(frame), frame.attrs["format"], frame.attrs["bad_rows"]) == (rows, format, 0)
    assert frame["prompt_tokens"].mean() == pytest.approx(prompt_mean, rel=0.005)
    assert frame["output_tokens"].mean() == pytest.approx(output_mean, rel=0.005)


@pytest.mark.shared
def test_azure_and_its_copy_by_vidur_agree_and_load_fast(real):
    azure = real("traces/azure_2023_conv.csv.gz")
    ours, took_s = trace.load(azure), []
    for _ in range(3):
        started = time.perf_counter()
        trace.load(azure)
        took_s.append(time.perf_counter() - started)
    assert min(took_s) < 0.5
    theirs = trace.load(real("vidur/processed_traces/splitwise_conv.csv"))
    np.testing.assert_allclose(ours["arrived_s"], theirs["arrived_s"], atol=1e-6)
    assert ours[["prompt_tokens", "output_tokens"]].equals(theirs[["prompt_tokens", "output_tokens"]])


@pytest.mark.shared
@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("lengths/raw/sharegpt/mlenergy_ShareGPT_V3_filtered_500.json.gz", "500 by fewer_than_two_turns"),
        ("lengths/raw/sharegpt/chord_sharegpt_sample.json.gz", "no list 'conversations'"),
        ("traces/mooncake_fast25_conversation.jsonl.gz", "no list 'conversations'"),
        ("traces/lmsys_chat_1m_output_lengths_ssjf.csv.gz", "known formats are"),
        ("traces/servegen_reason_deepseek-r1.tar.gz", "is binary"),
    ],
)
def test_real_files_without_requests_for_us_are_refused_with_a_reason(real, path, says):
    assert says in refusal(real(path))


@pytest.mark.shared
def test_our_count_is_close_to_a_real_tokenizer_on_real_prompts(real):
    """The claim of count_tokens: total within 1 %, a prompt off by 6 % on average, against SmolLM2."""
    with gzip.open(real("lengths/pooled_prompts.jsonl.gz"), "rt") as lines:
        rows = [json.loads(line) for line in lines]
    ours = np.array([count_tokens(row["prompt"]) for row in rows])
    theirs = np.array([row["prompt_tokens"] for row in rows])
    assert abs(ours.sum() / theirs.sum() - 1) < 0.01
    assert np.mean(np.abs(ours - theirs) / theirs) < 0.07
