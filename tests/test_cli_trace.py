"""``astrolabe trace`` and the options of ``simulate`` that say which requests arrive."""

import json

import pandas as pd
import pytest
from test_servegen import CLIENTS, dataset, trace_csv
from traces import HEADER

from astrolabe_lab import arrivals, cli, length, trace
from astrolabe_lab.generators import families

BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace.save(arrivals.with_arrivals(families.generate("chat", 80, seed=1), 4.0), tmp_path / "t.csv")
    rows = (f"{i},{'GPT-4' if i % 2 else 'ChatGPT'},{10 + i},{i % 4},{i},API log" for i in range(40))
    (tmp_path / "burst.csv").write_text(BURSTGPT + "\n".join(rows) + "\n")
    return tmp_path


def run(words, code=0):
    assert cli.main(words.split()) == code


def test_make_writes_what_the_library_draws(folder):
    run("trace make family:mixed --requests 60 --qps 5 --seed 3 --lengths noisy:0.2 --out m.parquet")
    drawn = arrivals.with_arrivals(families.generate("mixed", 60, seed=3), 5, families.ARRIVALS["mixed"], seed=3)
    expected = trace.check(length.attach(drawn, "noisy:0.2", seed=3))
    pd.testing.assert_frame_equal(trace.load("m.parquet"), expected)


def test_make_without_a_rate_writes_no_times_and_no_text_leaves_out_the_prompts(folder):
    run("trace make sharegpt_like --requests 30 --no-text --out s.csv.gz")
    assert list(trace.load("s.csv.gz")) == ["rid", "prompt_tokens", "output_tokens"]


def test_make_chooses_resamples_and_times_a_file_anew(folder, capsys):
    run("trace make burst.csv --filter model=GPT-4 --filter min_prompt_tokens=20 --out g.csv")
    kept = trace.load("burst.csv", model="GPT-4", min_prompt_tokens=20)
    pd.testing.assert_frame_equal(trace.load("g.csv"), trace.check(kept))
    assert "rows left out by model" in capsys.readouterr().err
    run("trace make burst.csv --sample resample --requests 300 --qps 2 --arrivals gamma:alpha=0.5 --seed 5 --out r.csv")
    again = trace.sample(trace.load("burst.csv"), 300, 5, replace=True)
    expected = trace.check(arrivals.with_arrivals(again, 2, "gamma", 5, alpha=0.5))
    pd.testing.assert_frame_equal(trace.load("r.csv"), expected)
    run("trace make burst.csv --sample permute --requests 10 --out p.csv")
    pd.testing.assert_frame_equal(trace.load("p.csv"), trace.check(trace.sample(trace.load("burst.csv"), 10, 0)))


def test_failed_requests_are_said_wherever_they_are_left_out(folder, capsys):
    for words in (
        "trace describe burst.csv",
        "trace make burst.csv --out b.csv",
        "simulate --trace burst.csv --policy random --instances 1 --out r.csv",
    ):
        run(words)
        assert "burst.csv: 10 failed requests (0 response tokens) left out" in capsys.readouterr().err


def test_describe_prints_the_numbers_of_the_library(folder, capsys):
    run("trace describe t.csv --json")
    found = json.loads(capsys.readouterr().out)
    numbers = trace.describe(trace.load("t.csv"))
    assert {name: found[name] for name in numbers} == numbers
    assert found["trace"] == "t.csv" and found["format"] == "csv" and found["rows_read"] == 80
    run("trace describe t.csv")
    assert "requests    80" in capsys.readouterr().out


def test_describe_takes_generators_and_another_rate(folder, capsys):
    run("trace describe family:reasoning --requests 200 --qps 7 --arrivals constant --json")
    found = json.loads(capsys.readouterr().out)
    assert found["families"] == {"reasoning": 1.0} and found["arrivals"]["rate_rps"] == pytest.approx(7)
    assert found["arrivals"]["gap_cv"] == pytest.approx(0, abs=1e-9)


def test_servegen_folders_are_made_into_files(folder):
    for name, windows in CLIENTS.items():
        (folder / f"{name}-trace.csv").write_text(trace_csv(windows))
        (folder / f"{name}-dataset.json").write_text(dataset())
    run("trace make servegen:.,start_s=600,clients=2 --requests 100 --out v.parquet")
    made = trace.load("v.parquet")
    assert len(made) == 100 and made["client"].nunique() <= 2 and made["arrived_s"].iloc[0] < 10


@pytest.mark.parametrize("spec", ["family:mixed", "sharegpt_like", "t.csv"])
def test_simulate_takes_generators_as_it_takes_files(folder, spec, capsys):
    run(f"simulate --trace {spec} --requests 40 --qps 4 --seed 2 --policy random --instances 2 --out a.parquet --json")
    asked = json.loads(capsys.readouterr().out)
    assert asked["arrivals"] == (families.ARRIVALS["mixed"] if spec == "family:mixed" else "poisson")
    run(f"trace make {spec} --requests 40 --qps 4 --seed 2 --out a.csv")
    run("simulate --trace a.csv --seed 2 --policy random --instances 2 --out b.parquet")
    columns = ["rid", "arrived_s", "instance", "finished_s"]
    pd.testing.assert_frame_equal(pd.read_parquet("a.parquet")[columns], pd.read_parquet("b.parquet")[columns])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("trace", "required: COMMAND"),
        ("trace make t.csv", "required: --out"),
        ("trace make t.csv --out t.csv", "is the trace itself"),
        ("trace make t.csv --out t.json", "must end in .csv or .csv.gz or .parquet or .parquet.gz"),
        ("trace make t.csv --out no/t.csv", "does not exist"),
        ("trace make family:chat --out o.csv", "give their number"),
        ("trace make family:chat --requests 5 --format csv --out o.csv", "format: this goes with a trace file"),
        ("trace make family:chat --requests 5 --qps 3 --arrivals trace --out o.csv", "another process than"),
        ("trace make family:chat --requests 5 --arrivals poisson --out o.csv", "needs a rate: give --qps"),
        ("trace make family:chat --requests 5 --qps 1_0 --out o.csv", "'1_0' is not a number > 0"),
        ("trace make t.csv --qps 3 --arrivals bursts:high=9 --out o.csv", "at most 4"),
        ("trace make t.csv --sample permute --requests 99 --out o.csv", "more than the 80 requests"),
        ("trace make t.csv --filter model=x --out o.csv", "a csv file has no model"),
        ("trace make t.csv --filter format=csv --out o.csv", "--filter format=csv is unknown or given twice"),
        ("trace make burst.csv --filter model=a --filter model=b --out o.csv", "given twice"),
        ("trace make t.csv --filter max_total_tokens=x --out o.csv", "'x' is not a whole number"),
        ("trace make t.csv --filter model --out o.csv", "'model' is not key=value"),
        ("trace describe no.csv", "does not exist"),
        ("trace describe t.csv --out o.csv", "unknown: --out o.csv"),
        ("simulate --trace family:chat --policy random --instances 1 --out r.csv", "give their number"),
        ("simulate --trace family:chat --requests 5 --policy random --instances 1 --out r.csv", "no arrival times"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(folder, words, says, capsys):
    run(words, code=2)
    shown = capsys.readouterr()
    assert says in shown.err and shown.err.count("\n") <= 2 and not shown.out
    assert {path.name for path in folder.iterdir()} == {"t.csv", "burst.csv"}


@pytest.mark.parametrize("name", ["make", "describe"])
def test_each_has_help_with_an_example(name, capsys):
    with pytest.raises(SystemExit):
        cli.main(["trace", name, "--help"])
    shown = capsys.readouterr().out
    assert f"astrolabe trace {name} SPEC" in shown and "example:" in shown and "--json" in shown


def test_a_file_that_has_lost_its_times_gets_them_from_a_rate(folder, file):
    file(HEADER.replace("arrived_s,", "") + "0,5,6\n1,7,8\n", "u.csv")
    run("trace make u.csv --out v.csv")
    assert "arrived_s" not in trace.load("v.csv")
    run("trace make u.csv --qps 2 --arrivals constant --out w.csv")
    assert trace.load("w.csv")["arrived_s"].tolist() == [0.5, 1.0]
