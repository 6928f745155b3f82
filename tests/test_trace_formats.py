"""Claims about the files of others: which columns mean what, what is left out, and the published ones."""

import gzip
import json

import numpy as np
import pandas as pd
import pytest
from traces import HEADER, conversation, full_frame, refusal, words

from astrolabe_lab import trace
from astrolabe_lab.errors import InputError
from astrolabe_lab.tokens import APPROXIMATION


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


# --- real files, kept beside the checkout and never in it


# --- BurstGPT

BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def test_burstgpt_failures_are_left_out_and_said_and_are_no_bad_rows(file):
    rows = (
        *("5,ChatGPT,472,18,490,Conversation log", "5,GPT-4,30,0,30,API log"),
        *("7,ChatGPT,0,0,0,API log", "9,GPT-4,3,4,7,API log"),
    )
    frame = trace.load(file(BURSTGPT + "\n".join(rows) + "\n"))
    assert frame["arrived_s"].tolist() == [5, 9] and frame["output_tokens"].tolist() == [18, 4]
    assert frame["family"].tolist() == ["ChatGPT, Conversation log", "GPT-4, API log"]
    about = frame.attrs
    assert about["format"] == "burstgpt" and about["filtered"] == {"failed": 2} and about["bad_rows"] == 0
    assert about["rows_read"] == 4 and about["ignored_columns"] == ["Total tokens"]


def test_burstgpt_rows_are_chosen_by_model_and_log_type(file):
    path = file(BURSTGPT + "1,ChatGPT,5,6,11,API log\n2,GPT-4,7,8,15,API log\n3,GPT-4,9,1,10,Conversation log\n")
    assert trace.load(path, model="GPT-4")["arrived_s"].tolist() == [2, 3]
    both = trace.load(path, model="GPT-4", log_type="API log")
    assert both["arrived_s"].tolist() == [2] and both.attrs["filtered"] == {"model": 1, "log_type": 1, "failed": 0}
    assert "model='gpt-4' matches no row: the file has 'ChatGPT', 'GPT-4'" in refusal(path, model="gpt-4")
    assert "a vidur file has no model; burstgpt, lmsys have" in refusal(
        file("num_prefill_tokens,num_decode_tokens\n5,6\n"), model="GPT-4"
    )


def test_the_second_release_of_burstgpt_has_sessions_which_are_named_as_ignored(file):
    head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    frame = trace.load(file(head + "1,7,0.5,GPT-4,5,6,11,Conversation log\n"))
    assert frame.attrs["ignored_columns"] == ["Session ID", "Elapsed time", "Total tokens"]


def test_damaged_burstgpt_rows_are_named_by_line(file):
    path = file(BURSTGPT + "1,GPT-4,5,6,11,API log\n2,GPT-4,x,6,6,API log\n3,GPT-4,5\nlater,GPT-4,5,6,11,API log\n")
    message = refusal(path)
    assert "3 of 4 rows bad: line 3: prompt_tokens is 'x'" in message
    assert "line 4: 3 fields where the header has 6; line 5: arrived_s is 'later'" in message
    assert len(trace.load(path, on_bad="drop")) == 1
    assert "go back 1 times, first at line 3" in refusal(file(BURSTGPT + "9,G,5,6,11,A\n2,G,5,6,11,A\n"))
    assert "format=burstgpt needs Timestamp, Model" in refusal(file(HEADER + "0,0,5,6\n"), format="burstgpt")


# --- Mooncake and Qwen-Bailian


def lines(*entries):
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def mooncake(timestamp=0, prompt=600, output=5, ids=(0, 1)):
    return {"timestamp": timestamp, "input_length": prompt, "output_length": output, "hash_ids": list(ids)}


def test_mooncake_milliseconds_become_seconds_and_batches_stay_together(file):
    path = file(lines(mooncake(), mooncake(), mooncake(3000, 513, 9, [0, 2]), mooncake(3001, 512, 9, [0])), "t.jsonl")
    frame = trace.load(path)
    assert frame["arrived_s"].tolist() == [0, 0, 3, 3.001] and frame["prompt_tokens"].tolist() == [600, 600, 513, 512]
    assert frame["prefix_blocks"].tolist() == [(0, 1), (0, 1), (0, 2), (0,)]
    assert frame["prefix_block_tokens"].tolist() == [512] * 4 and frame.attrs["format"] == "mooncake"


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.parquet", "t.parquet.gz"])
def test_how_many_tokens_a_block_stands_for_survives_every_file(file, tmp_path, name):
    frame = trace.load(file(lines(mooncake(), mooncake(40, 512, 9, [7])), "t.jsonl"))
    again = trace.load(trace.save(frame, tmp_path / name))
    pd.testing.assert_frame_equal(again, frame)
    for found in (frame, again, frame.head(1), pd.concat([frame, again]), trace.sample(frame, 5, seed=0, replace=True)):
        assert trace.prefix_block_tokens(found) == 512
    assert frame.attrs["prefix_block_tokens"] == again.attrs["prefix_block_tokens"] == 512


def test_more_blocks_than_a_prompt_has_and_blocks_of_two_sizes_are_refused(file):
    message = refusal(file(lines(mooncake(), mooncake(1, 512, 5, [0, 1])), "t.jsonl"))
    assert "line 2: prefix_blocks has 2 ids of 512 tokens (allowed: 1 at most for 512 prompt_tokens)" in message
    frame = trace.load(file(lines(mooncake(), mooncake(1)), "t.jsonl"))
    with pytest.raises(InputError, match="row 1: prefix_block_tokens is 256 .allowed: 512, as in the first row"):
        trace.check(frame.assign(prefix_block_tokens=[512, 256]))
    with pytest.raises(InputError, match="holds 512, 256"):
        trace.prefix_block_tokens(frame.assign(prefix_block_tokens=[512, 256]))


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_what_only_attrs_say_of_blocks_is_written_as_a_column(tmp_path, name):
    frame = full_frame().drop(columns="prefix_block_tokens").assign(prefix_blocks=[(1,), ()] * 4)
    frame.attrs["prefix_block_tokens"] = 16
    again = trace.load(trace.save(frame, tmp_path / name))
    assert trace.prefix_block_tokens(again) == 16 and "prefix_block_tokens" in again


def test_a_trace_that_does_not_say_what_a_block_stands_for_has_none():
    assert trace.prefix_block_tokens(full_frame().drop(columns="prefix_block_tokens")) is None


def test_damaged_mooncake_rows_are_named_by_line(file):
    good = mooncake()
    bad = [
        ("[1]", "no object"),
        (json.dumps({"timestamp": 1, "input_length": 5, "output_length": 5}), "no hash_ids"),
        (json.dumps(mooncake(output=0)), "output_tokens is 0"),
        (json.dumps(mooncake(timestamp="soon")), "arrived_s is 'soon'"),
        (json.dumps(mooncake(timestamp=True)), "arrived_s is True"),
        (json.dumps(mooncake(timestamp=-1)), "arrived_s is -0.001"),
        (json.dumps(mooncake(ids=[0, -1])), "prefix_blocks is [0, -1]"),
        (json.dumps(good | {"hash_ids": 3}), "prefix_blocks is 3"),
        (json.dumps(good | {"input_length": [600]}), "prompt_tokens is [600]"),
        (json.dumps(good)[:-9], "not JSON"),
    ]
    for text, says in bad:
        message = refusal(file(f"{json.dumps(good)}\n{text}\n", "t.jsonl"))
        assert "1 of 2 rows bad: line 2: " in message and says in message, (text, message)
        assert len(trace.load(file(f"{json.dumps(good)}\n{text}\n", "t.jsonl"), on_bad="drop")) == 1
    assert "go back 1 times, first at line 2" in refusal(file(lines(mooncake(5), mooncake(4)), "t.jsonl"))
    assert "only for ShareGPT and LMSYS texts" in refusal(file(lines(good), "t.jsonl"), tokenizer=len)


def test_mooncake_lengths_load_without_blocks(file):
    entry = {"timestamp": 10, "input_length": 5, "output_length": 6}
    assert list(trace.load(file(lines(entry, entry), "t.jsonl"))) == [*HEADER.strip().split(",")]


def test_bailian_times_are_seconds_and_its_blocks_hold_sixteen_tokens(file):
    entry = {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 33, "output_length": 132}
    path = file(
        lines(*({**entry, "type": kind, "turn": 1, "hash_ids": [8, 9, i]} for i, kind in enumerate(["text", "file"]))),
        "t.jsonl",
    )
    frame = trace.load(path)
    assert frame["arrived_s"].tolist() == [61.114] * 2 and trace.prefix_block_tokens(frame) == 16
    assert frame["family"].tolist() == ["text", "file"] and frame.attrs["format"] == "bailian"
    assert trace.load(path, type="file")["prefix_blocks"].tolist() == [(8, 9, 1)]


@pytest.mark.shared
def test_mooncake_ids_are_one_for_512_tokens_and_each_tells_all_before_it(real):
    """What makes an id usable as the identity of a prefix, on every row of the published trace."""
    frame = trace.load(real("traces/mooncake_fast25_conversation.jsonl.gz"))
    ids = frame["prefix_blocks"].map(len)
    assert (ids == -(-frame["prompt_tokens"] // 512)).all() and frame["arrived_s"].nunique() == 1180
    before: dict[int, int | None] = {}
    for blocks in frame["prefix_blocks"]:
        for one, other in zip((None, *blocks), blocks, strict=False):
            assert before.setdefault(other, one) == one


# --- LMSYS


def lmsys(prompt, answer, **more):
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"conversation_id": "x", "model": "vicuna-13b", "conversation": turns, "language": "English"} | more


@pytest.mark.parametrize("name", ["t.jsonl", "t.json", "t.parquet"])
def test_lmsys_conversations_load_from_json_and_parquet_alike(file, tmp_path, name):
    entries = [lmsys(words(5), words(9)), lmsys(words(7), words(6), model="gpt-4"), lmsys(words(3), words(9))]
    if name == "t.parquet":
        path = tmp_path / name
        pd.DataFrame(entries).to_parquet(path)
    else:
        path = file(lines(*entries) if name == "t.jsonl" else json.dumps(entries), name)
    frame = trace.load(path)
    assert frame["prompt_tokens"].tolist() == [5, 7] and frame["output_tokens"].tolist() == [9, 6]
    assert frame["family"].tolist() == ["vicuna-13b", "gpt-4"] and frame["prompt"][0] == words(5)
    assert frame.attrs["format"] == "lmsys" and frame.attrs["filtered"]["min_prompt_tokens"] == 1
    assert trace.load(path, model="gpt-4", language="English")["prompt_tokens"].tolist() == [7]
    assert trace.load(path, tokenizer=len)["prompt_tokens"][0] == len(words(5))


def test_lmsys_entries_that_are_no_conversation_are_bad_rows(file):
    good = lmsys(words(5), words(6))
    path = file(lines(good, {"conversation": "hi"}, lmsys(None, "x"), {"model": "m"}), "t.jsonl")
    message = refusal(path)
    assert "line 2: no list 'conversation'; " in message.replace(" (allowed: an object with one)", "")
    assert "line 3: a turn without a text 'content'" in message and "3 of 4 rows bad" in message
    assert len(trace.load(path, on_bad="drop")) == 1
    assert "lacks conversation; format=lmsys needs it" in refusal(
        trace.save(full_frame(), path.with_name("t.parquet")), format="lmsys"
    )


# --- published files, kept beside the checkout and never in it


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
        ("traces/mooncake_fast25_conversation.jsonl.gz", 12031, "mooncake", 12035, 342.6),
        ("traces/mooncake_fast25_synthetic.jsonl.gz", 3993, "mooncake", 15325, 149.1),
    ],
)
def test_published_traces_load_with_their_published_moments(real, path, rows, format, prompt_mean, output_mean):
    frame = trace.load(real(path))
    assert (len(frame), frame.attrs["format"], frame.attrs["bad_rows"]) == (rows, format, 0)
    assert frame["prompt_tokens"].mean() == pytest.approx(prompt_mean, rel=0.005)
    assert frame["output_tokens"].mean() == pytest.approx(output_mean, rel=0.005)


@pytest.mark.shared
def test_azure_and_its_copy_by_vidur_agree(real):
    azure = real("traces/azure_2023_conv.csv.gz")
    ours = trace.load(azure)
    theirs = trace.load(real("vidur/processed_traces/splitwise_conv.csv"))
    np.testing.assert_allclose(ours["arrived_s"], theirs["arrived_s"], atol=1e-6)
    assert ours[["prompt_tokens", "output_tokens"]].equals(theirs[["prompt_tokens", "output_tokens"]])


@pytest.mark.shared
@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("lengths/raw/sharegpt/mlenergy_ShareGPT_V3_filtered_500.json.gz", "500 by fewer_than_two_turns"),
        ("lengths/raw/sharegpt/chord_sharegpt_sample.json.gz", "no list 'conversations'"),
        ("traces/lmsys_chat_1m_output_lengths_ssjf.csv.gz", "known formats are"),
        ("traces/servegen_reason_deepseek-r1.tar.gz", "is binary"),
    ],
)
def test_real_files_without_requests_for_us_are_refused_with_a_reason(real, path, says):
    assert says in refusal(real(path))
