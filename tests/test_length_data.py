"""Claims about answers to learn from: where they are read from, what cleaning does, and how prompts are split."""

import gzip
import json

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.length import copies, data
from astrolabe_lab.length.evaluate import evaluate
from astrolabe_lab.length.sources import first_turns
from astrolabe_lab.length.split import Split, by_prompt

pytestmark = pytest.mark.length

ROWS = [
    {"prompt": "Why?", "response_tokens": 12, "model": "m"},
    {"prompt": "How, 007?", "response_tokens": 90, "model": "m"},
    {"prompt": "NA", "response_tokens": 7, "model": "n"},
]


def lines(*rows):
    return "\n".join(json.dumps(row) for row in rows)


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "jsonl", "json", "jsonl.gz", "parquet"])
def test_every_kind_of_file_gives_the_same_answers(kind, tmp_path):
    path = tmp_path / f"answers.{kind}"
    frame = pd.DataFrame(ROWS)
    if kind.startswith("csv"):
        frame.to_csv(path, index=False)
    elif kind == "parquet":
        frame.to_parquet(path)
    else:
        text = json.dumps(ROWS) if kind == "json" else lines(*ROWS)
        path.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
    found = data.load(path)
    assert tuple(found.columns) == data.COLUMNS
    assert found["prompt"].tolist() == ["Why?", "How, 007?", "NA"]
    assert found["response_tokens"].tolist() == [12.0, 90.0, 7.0]
    assert found["model"].tolist() == ["m", "m", "n"] and not found["censored"].any()
    assert list(tmp_path.iterdir()) == [path]  # no cache is left beside it


def test_conversations_give_their_first_question_and_its_answer(file):
    def turns(*pairs):
        return {"conversations": [{"from": who, "value": text} for who, text in pairs]}

    path = file(
        json.dumps(
            [
                turns(("human", "one two three"), ("gpt", "four five"), ("human", "more?"), ("gpt", "no")),
                turns(("system", "be kind"), ("human", "hello"), ("gpt", "hello to you")),
                turns(("gpt", "an answer to nothing")),
                turns(("human", "no answer")),
            ]
        ),
        "share.json",
    )
    found = data.load(path)
    assert found[["prompt", "response_tokens"]].values.tolist() == [["one two three", 2.0], ["hello", 3.0]]
    assert found.attrs["token_counter"] == "astrolabe approximation"
    assert found.attrs["cleaning"]["empty prompts"] == 1
    assert found.attrs["cleaning"]["answers without a length of at least one token"] == 1
    counted = data.load(path, tokenizer=lambda text: len(text))
    assert counted["response_tokens"].tolist() == [9.0, 12.0]


def test_openai_messages_are_conversations_too():
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert first_turns(turns) == ("q", "a")
    assert first_turns([{"value": "q"}, {"value": "a"}]) == ("q", "a")
    assert first_turns("nothing") == first_turns([]) == (None, None)


def test_data_sets_are_taken_as_objects_folders_and_splits(tmp_path):
    import datasets

    table = datasets.Dataset.from_list(ROWS)
    assert len(data.load(table)) == 3
    datasets.DatasetDict({"train": table, "spare": table.select([0])}).save_to_disk(str(tmp_path / "set"))
    assert len(data.load(tmp_path / "set")) == 3
    assert data.load(tmp_path / "set", split="spare")["prompt"].tolist() == ["Why?"]
    with pytest.raises(InputError, match="no split 'test'; its splits: train, spare"):
        data.load(tmp_path / "set", split="test")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text(lines(*ROWS))
    assert len(data.load(tmp_path / "files")) == 3


def test_lengths_find_their_prompts_by_uid(tmp_path):
    uid = data.prompt_uid("Why?")
    (tmp_path / "p.jsonl").write_text(lines({"prompt_uid": uid, "prompt": "Why?"}))
    (tmp_path / "l.csv").write_text(f"prompt_uid,model,response_tokens\n{uid},m,5\n{uid},n,6\n")
    found = data.load(tmp_path / "l.csv", prompts=tmp_path / "p.jsonl")
    assert found[["prompt", "model", "response_tokens"]].values.tolist() == [["Why?", "m", 5.0], ["Why?", "n", 6.0]]
    (tmp_path / "l.csv").write_text("prompt_uid,response_tokens\nbeef,5\n")
    with pytest.raises(InputError, match="prompt_uid 'beef' is not in .*belong together"):
        data.load(tmp_path / "l.csv", prompts=tmp_path / "p.jsonl")


def test_cut_off_answers_are_kept_and_said_to_be(file):
    row = {"model": "m", "prompt": "Tell me all", "response_tokens": 512}
    path = file(lines(row | {"finish_reason": "length"}, row | {"prompt": "b", "finish_reason": "stop"}), "a.jsonl")
    found = data.load(path)
    assert found["censored"].tolist() == [True, False]
    assert "1 were cut off and are kept as censored" in data.describe(found)
    assert data.load(path, max_tokens=512)["censored"].tolist() == [True, True]


def test_cleaning_leaves_out_what_teaches_nothing_and_counts_it(file):
    good = {"prompt": "a", "model": "m", "response_tokens": 5}
    path = file(
        lines(
            good,
            good,  # again
            good | {"prompt": "  "},
            good | {"prompt": "b", "response_tokens": 0},
            good | {"prompt": "c", "response_tokens": None},
            {"prompt": "d", "model": "m", "error": "HTTP 500"},
            good | {"model": "n"},
        ),
        "a.jsonl",
    )
    found = data.load(path)
    assert found[["prompt", "model"]].values.tolist() == [["a", "m"], ["a", "n"]]
    assert list(found.attrs["cleaning"].values()) == [1, 1, 2, 1]


def test_equal_answers_that_nothing_tells_apart_leave_no_noise_floor(file):
    rng = np.random.default_rng(0)
    twice = [
        {"prompt": f"p {i}", "response_tokens": int(n), "sample": k}
        for i in range(60)
        for k, n in enumerate(rng.integers(1, 4, 2))
    ]
    told = data.load(file(lines(*twice), "told.jsonl"))
    untold = data.load(file(lines(*({k: v for k, v in row.items() if k != "sample"} for row in twice)), "untold.jsonl"))
    assert told.attrs["repeats_told"] and evaluate(told, "constant").floor["prompts"] == 60
    assert len(untold) < 120 and not untold.attrs["repeats_told"] and evaluate(untold, "constant").floor is None
    assert "no noise floor is told" in data.describe(untold) and "noise floor" not in data.describe(told)


def test_a_row_that_names_no_model_among_others_that_do_is_told_with_its_place(file):
    path = file("prompt,response_tokens,model\na,5,m\nb,6,\nc,7,m\n", "a.csv")
    with pytest.raises(InputError, match="a.csv, row 2 of its answers: the model is empty.*1 of 3 do not.*fill it in"):
        data.load(path)


def test_two_samples_of_one_prompt_stay_two(file):
    row = {"prompt": "a", "model": "m", "response_tokens": 5}
    path = file(lines(row | {"sample": 0}, row | {"sample": 1}, row | {"sample": 1}), "a.jsonl")
    assert data.load(path)["sample"].tolist() == [0, 1]
    path = file(lines(row, row | {"response_tokens": 6}), "a.jsonl")
    assert data.load(path)["sample"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "content", "options", "says"),
    [
        ("a.csv", "prompt,response_tokens\n", {}, "has no rows: nothing to learn from"),
        ("a.csv", "prompt,response_tokens\n,5\n", {}, "left of 1 rows .1 empty prompts"),
        ("a.csv", "text of it,response_tokens\nx,5\n", {}, "no column for the prompt; it has text of it"),
        ("a.csv", "prompt,n\nx,5\n", {}, "no column for the length.*length=COLUMN"),
        ("a.csv", "prompt,prompt\nx,5\n", {}, "names a column twice"),
        ("a.csv", "prompt,n\nx,5\n", {"columns": {"length": "m"}}, "has no column 'm'; it has prompt, n"),
        ("a.csv", "prompt,n\nx,5\n", {"columns": {"size": "n"}}, "part 'size' is unknown"),
        ("a.csv", "prompt,response_tokens,model\nx,5,vicuna\n", {"model": "vicunia"}, "Did you mean 'vicuna'"),
        ("a.txt", "x", {}, "plain or .gz; rename it"),
        ("a.jsonl", '{"prompt": "x", "response_tok', {}, "line 1: not JSON"),
        ("a.jsonl", "[1, 2]", {}, "entry 1: int, not an object"),
        ("a.parquet", "PAR1 no", {}, "cannot be read as parquet"),
        ("a.json", "[]", {}, "has no rows: nothing to learn from"),
        ("missing/none.csv", None, {}, "does not exist"),
    ],
)
def test_what_cannot_be_read_is_named(name, content, options, says, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=says):
        data.load(path, **options)


def test_numbers_texts_and_impossible_lengths_may_share_a_column(file):
    lengths = [5, "7", 8.5, None, True, "many", 10**30, -(10**400), [1], float("nan"), 9]
    lines = (json.dumps({"prompt": f"p{i}", "response_tokens": n}) + "\n" for i, n in enumerate(lengths))
    frame = data.load(file("".join(lines), "t.jsonl"))
    assert frame["response_tokens"].tolist() == [5, 7, 8.5, 9]
    assert frame.attrs["cleaning"]["answers without a length of at least one token"] == 7


def test_a_name_that_is_nowhere_says_so(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="neither a file or folder here nor a data set that can be had"):
        data.load("nobody/no-such-set")


def test_a_trace_teaches_lengths():
    trace = sharegpt_like.generate(50, seed=3)
    frame = data.from_trace(trace)
    assert frame["response_tokens"].tolist() == trace["output_tokens"].tolist()
    with pytest.raises(InputError, match="prompt and output_tokens"):
        data.from_trace(sharegpt_like.generate(5, text=False))


# --- splits ---------------------------------------------------------------------------------------------------


def frame_of(uids):
    return pd.DataFrame({"prompt_uid": list(uids)})


def test_a_prompt_is_on_one_side_however_many_answers_it_has():
    frame = frame_of([f"p{i % 40}" for i in range(200)])
    split = by_prompt(frame, 3, test=0.2, validation=0.1)
    parts = [split.rows(frame, part) for part in ("train", "validation", "test")]
    assert sum(parts).tolist() == [1] * 200
    assert [len({*frame.prompt_uid[rows]}) for rows in parts] == [28, 4, 8]


def test_a_split_follows_from_its_seed_and_the_prompts_alone():
    uids = [f"p{i}" for i in range(50)]
    assert by_prompt(frame_of(uids), 1) == by_prompt(frame_of(uids[::-1] * 2), 1)
    assert by_prompt(frame_of(uids), 1).test != by_prompt(frame_of(uids), 2).test


def test_a_split_is_stored_and_found_again(tmp_path):
    split = by_prompt(frame_of("abcdefghij"), 4)
    assert Split.load(split.save(tmp_path / "s.json")) == split
    with pytest.raises(InputError, match="prompt z is in none of its parts"):
        split.rows(frame_of("az"), "train")
    leaking = json.loads((tmp_path / "s.json").read_text())
    leaking["train"] += leaking["test"]
    (tmp_path / "s.json").write_text(json.dumps(leaking))
    with pytest.raises(InputError, match="in two parts"):
        Split.load(tmp_path / "s.json")
    (tmp_path / "s.json").write_text("{}")
    with pytest.raises(InputError, match="holds no split"):
        Split.load(tmp_path / "s.json")


@pytest.mark.parametrize("options", [{"test": 1.0}, {"test": -0.1}, {"test": 0.01}, {"test": 0.5, "validation": 0.5}])
def test_parts_that_cannot_be_made_are_refused(options):
    with pytest.raises(InputError, match="must be a share|are too few"):
        by_prompt(frame_of("abcd"), 0, **options)


def test_near_copies_are_found_by_their_words():
    found = copies.near(
        ["Rate this film. Input: a slow film, but a good one", "Rate this book", "nothing alike", ""],
        ["rate this film.\n\na slow film but a good one!", "Write a rondo"],
    )
    assert found[0] == pytest.approx(8 / 9) and found[1:].tolist() == [0, 0, 0]


# --- published data -------------------------------------------------------------------------------------------


@pytest.mark.shared
@pytest.mark.slow
def test_the_published_answers_are_read_whole(real):
    frame = data.load(real("lengths/pooled_lengths.csv.gz"), prompts=real("lengths/pooled_prompts.jsonl.gz"))
    assert frame.prompt_uid.nunique() == 15_362
    assert len(frame) == 48_841 - sum(frame.attrs["cleaning"].values())
    listed = pd.read_csv(real("lengths/pooled_lengths.csv.gz"))
    one = listed[listed.model == "vicuna-13b"]
    assert len(data.of_model(frame, "vicuna-13b")) == len(one) == 805
    known = dict(zip(one.prompt_uid, one.response_tokens, strict=True))
    mine = data.of_model(frame, "vicuna-13b")
    assert np.array_equal(mine.response_tokens, [known[uid] for uid in mine.prompt_uid])
    assert (frame.prompt_uid == frame.prompt.map(data.prompt_uid)).all()  # our rule is the publisher's


@pytest.mark.shared
def test_a_published_file_is_read_by_the_names_of_its_columns(real):
    frame = data.load(real("lengths/raw/alpaca_eval/vicuna-13b.json.gz"))
    assert len(frame) == 805 and set(frame.model) == {"vicuna-13b"}
    frame = data.load(real("lengths/raw/gpteacher/roleplay-simple-deduped.json.gz"), columns={"prompt": "instruction"})
    assert len(frame) > 1500
