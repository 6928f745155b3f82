"""Claims about trace frames and our own files: what loads, what is refused, and that nothing is lost on the way."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from traces import HEADER, full_frame, refusal

from astrolabe_lab import arrivals, trace
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import sharegpt_like

SAMPLE = Path(__file__).parents[1] / "data" / "sharegpt_like_200.csv"


# --- our own files


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.parquet", "t.parquet.gz"])
def test_what_is_saved_comes_back_exactly(tmp_path, name):
    frame = full_frame()
    path = trace.save(frame, tmp_path / name)
    pd.testing.assert_frame_equal(trace.load(path), frame, check_exact=True)
    first = path.read_bytes()
    assert trace.save(trace.load(path), path).read_bytes() == first or "parquet" in name
    assert os.listdir(tmp_path) == [name]


def test_what_no_file_can_hold_among_attrs_hinders_no_saving(tmp_path):
    frame = full_frame()
    frame.attrs = {"step log": pd.DataFrame(), "count": np.int64(3), "source": "drawn"}
    path = trace.save(frame, tmp_path / "t.parquet")
    assert pd.read_parquet(path).attrs == {"source": "drawn"} and len(frame.attrs) == 3


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


@pytest.mark.parametrize("value", ["0", "-3", "nan", "inf", "2.5", "x", "", "1e30", "1_000", "1,000", "0x10", "٣"])
@pytest.mark.parametrize("column", [2, 3])
def test_a_token_count_that_is_no_positive_integer_is_named_with_its_line(file, value, column):
    row = ["1", "2.0", "5", "6"]
    row[column] = f'"{value}"' if "," in value else value
    message = refusal(file(HEADER + "0,1.0,5,6\n" + ",".join(row) + "\n"))
    name = HEADER.strip().split(",")[column]
    assert f"1 of 2 rows bad: line 3: {name} is {value!r} (allowed: an integer from 1 to 1,000,000,000)" in message
    assert "on_bad='drop'" in message


@pytest.mark.parametrize("value", ["-0.5", "nan", "inf", "later", "", "1_0.5", "1 0"])
def test_a_time_that_is_not_finite_or_negative_is_named_with_its_line(file, value):
    assert f"line 2: arrived_s is {value!r} (allowed: finite seconds >= 0, at most 1e+10)" in refusal(
        file(HEADER + f"0,{value},5,6\n")
    )


def test_numbers_that_only_python_reads_are_none_wherever_they_stand(file, tmp_path):
    assert "prefix_blocks is '1_0 2'" in refusal(file("prompt_tokens,output_tokens,prefix_blocks\n5,6,1_0 2\n"))
    for column in (["5", "1_000"], pd.array(["5", "1_000"], dtype="string")):
        pd.DataFrame({"prompt_tokens": pd.Series(column), "output_tokens": 6}).to_parquet(tmp_path / "t.parquet")
        assert "row 2: prompt_tokens is" in refusal(tmp_path / "t.parquet")
    assert trace.load(file("prompt_tokens,output_tokens\n 5 ,+6\n5e0,6.0\n"))["prompt_tokens"].tolist() == [5, 5]


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
